# SPDX-License-Identifier: Apache-2.0
"""Tests two data-parallel ranks on two hosts, which are network namespaces, over MPI."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import server as server_program
from generate import NEW_TOKENS, Job, generate_on_hosts
from hosts import ADDRESSES, ENVIRONMENT, NAMES, Hosts, two_hosts
from runs import Runs, make_prompts
from server import END, Request, Server, check_answers, check_end, options, ready


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Return two hosts."""
    if not (Path(os.environ["EPIC_LIBRARY_PATH"]) / "libepic_mpi.so").exists():
        pytest.skip("there is no libepic_mpi.so, so ranks on two hosts cannot be tested")
    try:
        with two_hosts(tmp_path_factory.mktemp("hosts")) as made:
            yield made
    except OSError as error:
        pytest.skip(f"two hosts cannot be made here: {error}")


def test_offline(hosts: Hosts, runs: Runs, tmp_path: Path) -> None:
    """Check the tokens and log-probabilities of vLLM's offline class."""
    prompts = tuple(map(tuple, make_prompts()))
    job = Job(runs.model("qwen3"), 2, 1, "float32", False, prompts)
    found, logs = generate_on_hosts(job, tmp_path, hosts)
    assert "backend mpi, 2 host(s)" in logs
    assert all(f"is {name}, process" in logs for name in NAMES)
    for ours, wanted in zip(found, runs.results("qwen3", 1, 1), strict=True):
        assert ours.tokens == wanted.tokens
        assert ours.logs == pytest.approx(wanted.logs, abs=1e-4, rel=0)
        assert ours.prompt_logs == pytest.approx(wanted.prompt_logs, abs=1e-4, rel=0)


def start(hosts: Hosts, model: Path, socket: str, log: Path) -> int:
    """Start a server with a rank on each host, and return the pid of mpirun.

    The process on the second host has no HTTP server ("headless").
    """
    serve = [sys.executable, server_program.__file__, *options(model, 60_000)]
    serve += ["--data-parallel-address", ADDRESSES[0], "--data-parallel-size-local", "1"]
    first = [*serve, "--api-server-count", "1", "--uds", socket]
    second = [*serve, "--headless", "--data-parallel-start-rank", "1"]
    words = [*hosts.mpirun(), "-np", "1", *first, ":", "-np", "1", *second]
    with log.open("w") as file:
        return subprocess.Popen(words, stdout=file, stderr=file, env=os.environ | ENVIRONMENT).pid


def test_server(hosts: Hosts, runs: Runs, tmp_path: Path) -> None:
    """Check answers of a server; then kill the worker on the second host while requests run."""
    model = runs.model("qwen3")
    one = [result.tokens for result in runs.results("qwen3", 1, 1)]
    made = Server(lambda socket, log: start(hosts, model, socket, log), tmp_path, hosts.members)
    with ready(made) as server:
        assert (server.place(0)[0], server.place(1)[0]) == NAMES
        requests = [Request(prompt, NEW_TOKENS, i / 10) for i, prompt in enumerate(make_prompts())]
        check_answers(server, requests, one)
        mapped = {file.path for member in server.members() for file in member.memory_maps()}
        check_end(server, signal.SIGKILL, END, "EPIC_EPEER.*rank 1")
    # mpirun has also killed the processes that would have removed vLLM's shared memory.
    for path in mapped:
        if path.startswith("/dev/shm/"):
            Path(path).unlink(missing_ok=True)
