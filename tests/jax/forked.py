# SPDX-License-Identifier: Apache-2.0
"""Starts Python processes for tests in milliseconds, as copies of a process with all imports.

The import of JAX or PyTorch takes more processor time than most programs of the tests.  So a server
process imports it once, and forks for each program, before any thread or device exists.  A copy
runs the program like `python PROGRAM WORDS`, with its own environment.  But variables that imports
read, such as JAX_*, have the values of the server's environment.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MOST = 1 << 17  # bytes of a request


class Process:
    """A running program, as subprocess.Popen; its output goes to files."""

    def __init__(self, link: socket.socket, out: Any, err: Any) -> None:
        self.link, self.out, self.err = link, out, err
        self.returncode: int | None = None
        self.pid = int(link.recv(64))

    def poll(self) -> int | None:
        """Return the exit status, or None if it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status when it has ended."""
        if self.returncode is None:
            self.link.settimeout(timeout)
            try:
                self.returncode = int(self.link.recv(64))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0) from None
            self.link.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return stdout and stderr when it has ended."""
        self.wait(timeout)
        return written(self.out), "" if self.err is self.out else written(self.err)

    def wait_for_line(self, line: str, timeout: float) -> None:
        """Wait until it has printed this line."""
        end = time.monotonic() + timeout
        while True:
            is_over = self.poll() is not None or time.monotonic() > end
            if line in written(self.out).splitlines():
                return
            assert not is_over, written(self.out) + written(self.err)
            time.sleep(0.01)

    def send_signal(self, number: int) -> None:
        """Send a signal if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def written(file: Any) -> str:
    """Return all text of a file whose position belongs to a writer."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="replace")


class Server:
    """A process that has imported modules, of which every program is a copy."""

    def __init__(self, *modules: str, env: Mapping[str, str] | None = None) -> None:
        self.control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [sys.executable, __file__, str(other.fileno()), *modules]
        self.process = subprocess.Popen(
            words, pass_fds=[other.fileno()], env=env, stdin=subprocess.DEVNULL
        )
        other.close()

    def close(self) -> None:
        """End the server; programs that run go on."""
        self.control.close()
        self.process.wait()

    def start(
        self,
        program: str,
        *words: str,
        env: Mapping[str, str] | None = None,
        merged: bool = False,
        ends_early: bool = False,
    ) -> Process:
        """Start a program.

        Args:
            program: a path, or the text of a program.
            *words: its arguments.
            env: its environment; None: this process's.
            merged: whether stderr goes to stdout.
            ends_early: whether a program without an error ends after the functions of atexit. The
                rest of the shutdown takes 0.4 s of processor time with PyTorch, 0.1 s with JAX.

        """
        environment = dict(os.environ if env is None else env)
        request = json.dumps([program, words, environment, str(Path.cwd()), ends_early]).encode()
        assert len(request) < MOST
        out = tempfile.TemporaryFile()  # noqa: SIM115
        err = out if merged else tempfile.TemporaryFile()  # noqa: SIM115
        mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = [other.fileno(), out.fileno(), err.fileno()]
        socket.send_fds(self.control, [request], fds)
        other.close()
        return Process(mine, out, err)

    def run(self, program: str, *words: str, timeout: float, **more: Any) -> str:
        """Run a program, which must end with 0; return its output."""
        return finish([self.start(program, *words, **more)], timeout)[0]


@functools.cache
def server(*modules: str) -> Server:
    """Return the server with these modules; it ends with this process."""
    found = Server(*modules)
    atexit.register(found.close)
    return found


def start_ranks(
    server: Server,
    program: str,
    *words: str,
    ranks: int,
    port: int,
    ends_early: bool = False,
    **more: str,
) -> list[Process]:
    """Start a program as often as there are ranks, with the variables that torchrun sets."""
    env = {**os.environ, **more, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return [
        server.start(program, *words, env=env | place, ends_early=ends_early) for place in places
    ]


def finish(running: list[Process], timeout: float) -> list[str]:
    """Return the output of processes, which must end with 0."""
    try:
        said = [process.communicate(timeout) for process in running]
    finally:
        for process in running:
            process.kill()
    assert not any(process.returncode for process in running), said
    return [out for out, _ in said]


# ----------------------------------------------------------------------- in the server ----


def reap() -> None:
    """Wait for the guardians that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def serve(control: socket.socket) -> list[Any]:
    """Fork for each request; return it in the copy.

    A guardian between server and copy sends the copy's number and its exit status.
    """
    while True:
        request, fds, _, _ = socket.recv_fds(control, MOST, 3)
        reap()
        if not request:
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.wait()
            os._exit(0)
        if os.fork():
            for fd in fds:
                os.close(fd)
            continue
        control.close()
        link, out, err = fds
        copy = os.fork()
        if copy == 0:
            os.close(link)
            os.dup2(out, 1)
            os.dup2(err, 2)
            for fd in {out, err}:
                os.close(fd)
            return json.loads(request)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.write(link, str(copy).encode())
        status = os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
        with contextlib.suppress(OSError):
            os.write(link, str(status).encode())
        os._exit(0)


def become(
    program: str, words: list[str], env: dict[str, str], folder: str, ends_early: bool
) -> None:
    """Run a program in this copy."""
    execute(program, words, env, folder)
    if ends_early:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def execute(program: str, words: list[str], env: dict[str, str], folder: str) -> None:
    """Execute a program as the main module."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    if "\n" not in program:
        sys.argv = [program, *words]
        sys.path[0] = str(Path(program).parent)
        runpy.run_path(program, run_name="__main__")
        return
    sys.argv = ["-c", *words]
    sys.path[0] = ""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(program, "<string>", "exec"), main.__dict__)


if __name__ == "__main__":
    this = sys.modules["__main__"]
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()
    become(*serve(socket.socket(fileno=int(sys.argv[1]))))
