# SPDX-License-Identifier: Apache-2.0
"""Starts a server of two data-parallel ranks, sends requests to it, and checks how it ends.

The processes of the server are forks of a process that has imported vLLM, because the import takes
longer than a test.

usage: server.py ARGUMENT...: mpirun starts this program with the arguments of the command vllm
"""

import asyncio
import json
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import aiohttp
import psutil

from epic.vllm.__main__ import main as run
from generate import write_log

START = 400.0  # time limit of the start in seconds
END = 20.0  # time limit for the end of the server, after its worker has failed


class Request(NamedTuple):
    """A request to the server.

    Attributes:
        prompt: The tokens of the prompt.
        number: Number of tokens to generate.
        at: When it is sent, in seconds after the first one.
    """

    prompt: list[int]
    number: int
    at: float = 0.0


def shm_names() -> set[str]:
    """Return the names of the files in /dev/shm."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def options(model: Path, timeout_ms: int) -> list[str]:
    """Return the options of the server.

    Args:
        model: The folder of the model.
        timeout_ms: The option of epic.vllm.
    """
    return [
        "serve", str(model), "--served-model-name", "tiny", "--dtype", "float32",
        "--data-parallel-size", "2", "--enable-expert-parallel", "--enforce-eager",
        "--max-model-len", "256", "--max-num-batched-tokens", "64", "--max-num-seqs", "16",
        "--additional-config", json.dumps({"epic": {"timeout_ms": timeout_ms}}),
    ]  # fmt: skip


def serve(arguments: list[str]) -> None:
    """Run the command vllm, whose processes are forks."""
    context = multiprocessing.get_context("fork")
    patch.object(multiprocessing, "get_context", lambda _=None: context).start()
    resource_tracker.ensure_running()  # else each process would start its own tracker
    sys.argv[1:] = arguments
    run()


def fork_server(arguments: list[str], log: Path) -> int:
    """Run the command vllm in a fork of this process, and return the pid of the fork."""
    process = os.fork()
    if process:
        return process
    os.setsid()
    write_log(log)
    with suppress(BaseException):
        serve(arguments)
    os._exit(1)


class Server:
    """A server that has been started.

    It listens on a Unix socket, to which the test can connect even if the server is in another
    network namespace.

    Args:
        start: A function that starts the server, and returns its pid. Its arguments are the path of
            the socket and the path of the log.
        folder: A folder for the log and the socket.
        members: A function that returns the processes of the server. None: use the processes of the
            server's session.
    """

    def __init__(
        self,
        start: Callable[[str, Path], int],
        folder: Path,
        members: Callable[[], list[psutil.Process]] | None = None,
    ) -> None:
        self.log = folder / "server.log"
        self.socket = str(folder / "socket")
        self.members = members or self.members_of_session
        self.shm_before = shm_names()
        self.process = psutil.Process(start(self.socket, self.log))

    def is_running(self) -> bool:
        """Return whether the process of the server exists and is no zombie."""
        return self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE

    def text(self) -> str:
        """Return the log."""
        return self.log.read_text(errors="replace")

    def place(self, rank: int) -> tuple[str, int]:
        """Return the host and the pid of a rank. Both are read from the log."""
        found = re.search(
            rf"EPIC: expert-parallel rank {rank} of 2 is (\S+), process (\d+)", self.text()
        )
        assert found, self.text()
        return found[1], int(found[2])

    def members_of_session(self) -> list[psutil.Process]:
        """Return the processes of the server's session."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) == self.process.pid:
                    found.append(process)
        return [p for p in found if p.status() != psutil.STATUS_ZOMBIE]

    def session(self) -> aiohttp.ClientSession:
        """Return a session of HTTP with the server."""
        return aiohttp.ClientSession(
            "http://server", timeout=aiohttp.ClientTimeout(total=START),
            connector=aiohttp.UnixConnector(self.socket, limit=0),
        )  # fmt: skip


async def wait_ready(server: Server) -> None:
    """Wait until the server answers."""
    async with server.session() as session:
        end = time.monotonic() + START
        while time.monotonic() < end:
            assert server.is_running(), server.text()
            with suppress(aiohttp.ClientError):
                async with session.get("/health") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.5)
    raise AssertionError(server.text())


@contextmanager
def ready(server: Server) -> Iterator[Server]:
    """Wait until the server answers, and at the end kill all its processes."""
    try:
        asyncio.run(wait_ready(server))
        yield server
    finally:
        for process in server.members():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        server.process.wait()


async def complete(session: aiohttp.ClientSession, request: Request) -> list[int]:
    """Send a request at its time, and return the tokens that the server generates."""
    asked: dict[str, Any] = {
        "model": "tiny", "prompt": request.prompt, "max_tokens": request.number, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    await asyncio.sleep(request.at)
    async with session.post("/v1/completions", json=asked) as answer:
        assert answer.status == 200, await answer.text()
        return list((await answer.json())["choices"][0]["token_ids"])


async def send_all(server: Server, requests: list[Request]) -> list[list[int]]:
    """Send all requests, and return the answers."""
    async with server.session() as session:
        return await asyncio.gather(*(complete(session, request) for request in requests))


def check_answers(server: Server, requests: list[Request], one: list[list[int]]) -> None:
    """Check that the server answers all requests with the tokens of one process.

    Args:
        server: The server.
        requests: The requests.
        one: For each request the tokens that one process generates, at least request.number.
    """
    answers = asyncio.run(send_all(server, requests))
    pairs = zip(requests, answers, one, strict=True)
    wrong = [i for i, (r, found, wanted) in enumerate(pairs) if found != wanted[: r.number]]
    assert not wrong, f"{len(wrong)} of {len(requests)} answers are wrong, for example {wrong[:3]}"


async def fail_during_requests(server: Server, rank: int, number: signal.Signals) -> float:
    """Send a signal to the worker of a rank while requests run; return the seconds to the end."""
    async with server.session() as session:
        running = [
            asyncio.create_task(complete(session, Request([3 + i, 4, 5], 240))) for i in range(8)
        ]
        await asyncio.sleep(1.0)
        begin = time.monotonic()
        os.kill(server.place(rank)[1], number)
        # The requests raise exceptions, because the server ends before it answers.
        await asyncio.wait(running, timeout=START)
    with suppress(psutil.TimeoutExpired):
        server.process.wait(START)
    return time.monotonic() - begin


def check_end(server: Server, number: signal.Signals, limit: float, error: str) -> None:
    """Let the worker of rank 1 fail, and check that all processes of the server end in time.

    Args:
        server: A server that runs.
        number: The signal for the worker.
        limit: Longest time to the end of the server in seconds.
        error: A regular expression for the error of rank 0, which must name rank 1 and its host.
    """
    seconds = asyncio.run(fail_during_requests(server, 1, number))
    assert not server.is_running(), f"the server still runs\n{server.text()}"
    assert seconds < limit, server.text()
    end = time.monotonic() + END
    while server.members() and time.monotonic() < end:
        time.sleep(0.2)
    assert not server.members()
    host, process = server.place(1)
    line = (
        rf"EPIC: expert-parallel rank 0 of 2 .* cannot go on: .*{error}.*"
        rf"rank 1: {host}, process {process}"
    )
    assert re.search(line, server.text()), f"{line} is missing\n{server.text()}"


def check_shm(server: Server) -> None:
    """Check that the server has left no files in /dev/shm."""
    end = time.monotonic() + END
    left = shm_names() - server.shm_before
    while left & shm_names() and time.monotonic() < end:
        time.sleep(0.2)  # programs that run at the same time remove their names later
    assert not left & shm_names()


if __name__ == "__main__":
    serve(sys.argv[1:])
