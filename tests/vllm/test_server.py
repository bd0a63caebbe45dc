# SPDX-License-Identifier: Apache-2.0
"""Tests a server of two data-parallel ranks: many requests, a killed and a stopped worker."""

import random
import signal
from pathlib import Path

from generate import NEW_TOKENS, Job, generate
from models import write_model
from server import (
    END,
    Request,
    Server,
    check_answers,
    check_end,
    check_shm,
    fork_server,
    options,
    ready,
)

REQUESTS = 500
SECONDS = 30.0  # the time in which the requests are sent


def start(folder: Path, timeout_ms: int) -> Server:
    """Start a server of a tiny Qwen3-MoE model, which is written into the folder."""
    write_model("qwen3", folder / "model")
    words = [*options(folder / "model", timeout_ms), "--api-server-count", "1"]
    return Server(lambda socket, log: fork_server([*words, "--uds", socket], log), folder)


def test_requests_and_kill(tmp_path: Path) -> None:
    """Check 500 answers to requests at random times; then kill a worker while requests run."""
    draw = random.Random(2)
    prompts = [[draw.randrange(3, 256) for _ in range(draw.randrange(1, 100))] for _ in range(40)]
    with ready(start(tmp_path, 60_000)) as server:
        files = tmp_path / "one"
        files.mkdir()
        job = Job(tmp_path / "model", 1, 1, "float32", False, tuple(map(tuple, prompts)))
        one = [result.tokens for result in generate(job, files)[0]]
        which = [draw.randrange(len(prompts)) for _ in range(REQUESTS)]
        requests = [
            Request(prompts[i], draw.randrange(1, NEW_TOKENS + 1), draw.uniform(0, SECONDS))
            for i in which
        ]
        check_answers(server, requests, [one[i] for i in which])
        check_end(server, signal.SIGKILL, END, "EPIC_EPEER.*rank 1")
        check_shm(server)


def test_stop(tmp_path: Path) -> None:
    """Check that a stopped worker ends the server after timeout_ms."""
    with ready(start(tmp_path, 10_000)) as server:
        check_end(server, signal.SIGSTOP, 10 + END, "EPIC_ETIMEOUT.*rank 1")
        check_shm(server)
