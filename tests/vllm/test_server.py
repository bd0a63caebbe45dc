# SPDX-License-Identifier: Apache-2.0
"""Tests a server of two data-parallel ranks: many requests, a killed and a stopped worker."""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from generate import NEW_TOKENS, Job, free_port, generate
from models import write_model

START = 400.0  # time limit of the start in seconds
END = 20.0  # time limit for the end of the server, after its worker has failed
REQUESTS = 500
SECONDS = 30.0  # the time in which the requests are sent


class Server:
    """A server with two data-parallel ranks of a tiny Qwen3-MoE model.

    Args:
        folder: A folder for the model and the log.
        timeout_ms: The option of epic.vllm.
    """

    def __init__(self, folder: Path, timeout_ms: int) -> None:
        self.model = folder / "model"
        write_model("qwen3", self.model)
        self.log = folder / "server.log"
        self.url = f"http://127.0.0.1:{free_port()}"
        words = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(self.model), "--port", self.url.rpartition(":")[2],
            "--data-parallel-size", "2", "--enable-expert-parallel", "--enforce-eager",
            "--dtype", "float32", "--max-model-len", "256", "--max-num-batched-tokens", "64",
            "--max-num-seqs", "16", "--served-model-name", "tiny",
            "--additional-config", json.dumps({"epic": {"timeout_ms": timeout_ms}}),
        ]  # fmt: skip
        with self.log.open("w") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)

    def text(self) -> str:
        """Return the log."""
        return self.log.read_text(errors="replace")

    def worker(self, rank: int) -> int:
        """Return the number of the process of a rank, which the log names."""
        found = re.search(
            rf"EPIC: expert-parallel rank {rank} of 2 is \S+, process (\d+)", self.text()
        )
        assert found, self.text()
        return int(found[1])

    def members(self) -> list[psutil.Process]:
        """Return the processes of the server that exist."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) == self.process.pid:
                    found.append(process)
        return [p for p in found if p.status() != psutil.STATUS_ZOMBIE]


async def wait_ready(server: Server) -> None:
    """Wait until the server answers."""
    async with aiohttp.ClientSession() as session:
        end = time.monotonic() + START
        while time.monotonic() < end:
            assert server.process.poll() is None, server.text()
            with suppress(aiohttp.ClientError):
                async with session.get(server.url + "/health") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.5)
    raise AssertionError(server.text())


@contextmanager
def started(folder: Path, timeout_ms: int) -> Iterator[Server]:
    """Start a server, and end it with all its processes."""
    server = Server(folder, timeout_ms)
    try:
        asyncio.run(wait_ready(server))
        yield server
    finally:
        for process in server.members():
            process.kill()
        server.process.wait()


async def complete(
    session: aiohttp.ClientSession, server: Server, prompt: list[int], number: int
) -> list[int]:
    """Return the tokens that the server generates."""
    asked: dict[str, Any] = {
        "model": "tiny", "prompt": prompt, "max_tokens": number, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    async with session.post(server.url + "/v1/completions", json=asked) as answer:
        assert answer.status == 200, await answer.text()
        return list((await answer.json())["choices"][0]["token_ids"])


async def send_all(server: Server, requests: list[tuple[float, list[int], int]]) -> list[list[int]]:
    """Send each request at its time in seconds, and return all answers."""
    limit = aiohttp.ClientTimeout(total=400)
    async with aiohttp.ClientSession(
        timeout=limit, connector=aiohttp.TCPConnector(limit=0)
    ) as session:

        async def send(at: float, prompt: list[int], number: int) -> list[int]:
            await asyncio.sleep(at)
            return await complete(session, server, prompt, number)

        return await asyncio.gather(*(send(*request) for request in requests))


async def fail_during_requests(server: Server, rank: int, number: signal.Signals) -> float:
    """Send a signal to the worker of a rank while requests run; return the seconds to the end."""
    async with aiohttp.ClientSession() as session:
        running = [
            asyncio.create_task(complete(session, server, [3 + i, 4, 5], 240)) for i in range(8)
        ]
        await asyncio.sleep(1.0)
        begin = time.monotonic()
        os.kill(server.worker(rank), number)
        # Exceptions: the server ends before it answers.
        await asyncio.wait(running, timeout=START)
    with suppress(subprocess.TimeoutExpired):
        server.process.wait(START)
    return time.monotonic() - begin


def shm_names() -> set[str]:
    """Return the names in the folder of shared memory."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def check_end(server: Server, seconds: float, limit: float, before: set[str], error: str) -> None:
    """Check that the server has ended, and has left a log that names the rank, but nothing else."""
    assert server.process.poll() is not None, f"the server still runs\n{server.text()}"
    assert seconds < limit
    end = time.monotonic() + END
    while server.members() and time.monotonic() < end:
        time.sleep(0.2)
    assert not server.members()
    found = re.search(r"EPIC: expert-parallel rank 0 of 2 .* cannot go on: .*", server.text())
    assert found, server.text()
    assert re.search(error, found[0]), found[0]
    assert f"rank 1: {os.uname().nodename}, process {server.worker(1)}" in found[0]
    left = shm_names() - before
    while left & shm_names() and time.monotonic() < end:
        time.sleep(0.2)  # programs that run at the same time remove their names later
    assert not left & shm_names()


def test_requests_and_kill(tmp_path: Path) -> None:
    """Check 500 answers to requests at random times; then kill a worker while requests run."""
    draw = random.Random(2)
    prompts = [[draw.randrange(3, 256) for _ in range(draw.randrange(1, 100))] for _ in range(40)]
    before = shm_names()
    with started(tmp_path, 60_000) as server:
        job = Job(server.model, 1, 1, "float32", False, tuple(map(tuple, prompts)))
        files = tmp_path / "one"
        files.mkdir()
        wanted = [result.tokens for result in generate(job, files)[0]]
        requests, expected = [], []
        for _ in range(REQUESTS):
            which, number = draw.randrange(len(prompts)), draw.randrange(1, NEW_TOKENS + 1)
            requests.append((draw.uniform(0, SECONDS), prompts[which], number))
            expected.append(wanted[which][:number])
        answers = asyncio.run(send_all(server, requests))
        wrong = [i for i in range(REQUESTS) if answers[i] != expected[i]]
        assert not wrong, f"{len(wrong)} of {REQUESTS} answers are wrong, for example {wrong[:3]}"
        seconds = asyncio.run(fail_during_requests(server, 1, signal.SIGKILL))
        check_end(server, seconds, END, before, "EPIC_EPEER.*rank 1")


def test_stop(tmp_path: Path) -> None:
    """Check that a stopped worker ends the server after timeout_ms."""
    before = shm_names()
    with started(tmp_path, 10_000) as server:
        seconds = asyncio.run(fail_during_requests(server, 1, signal.SIGSTOP))
        check_end(server, seconds, 10 + END, before, "EPIC_ETIMEOUT.*rank 1")
