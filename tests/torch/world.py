# SPDX-License-Identifier: Apache-2.0
"""Starts processes with torch.distributed, which run functions of the tests together."""

import importlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forked import Server, server
from ports import free_port

OTHERS = ("transformers.modeling_utils", "peft")  # modules of which not every test needs one
LIMIT = 240  # time limit of one function in seconds


def torch_server(*more: str) -> Server:
    """Return the server of programs that use epic.torch and the modules `more`.

    The first optimizer of a process imports torch._dynamo, which takes longer than most programs.
    """
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # as in World.__enter__
    return server("epic.torch", "torch._dynamo", *more)


def run_torchrun(*words: str) -> str:
    """Run torchrun, which must end with 0; return its output."""
    program = "import sys\nfrom torch.distributed.run import main\nmain(sys.argv[1:])\n"
    return torch_server().run(program, "--master-port", str(free_port()), *words, timeout=200)


def serve(rank: int, size: int, port: int, pipe: Any) -> None:
    """Run the functions that the parent sends, until it closes the pipe."""
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "jax")]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    while True:
        try:
            module, name, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((True, getattr(importlib.import_module(module), name)(rank, *args)))
        except BaseException as error:
            said = "".join(traceback.format_exception(error))
            pipe.send((False, f"rank {rank}: {said}"))


def begin(rank: int) -> None:
    """Import modules that take long, before the first test."""
    importlib.import_module("epic.torch")


class World:
    """A number of processes that run functions of the tests.

    If the functions use CUDA, uses_cuda must be True. Then the process from which all others are
    forked imports only epic.torch, because other modules may use CUDA when they are imported. If
    a process has used CUDA, processes forked from it cannot use CUDA.
    """

    def __init__(self, size: int, uses_cuda: bool = False) -> None:
        self.size = size
        self.uses_cuda = uses_cuda
        self.processes: list[Any] = []
        self.pipes: list[Any] = []

    def __enter__(self) -> "World":
        context, port = multiprocessing.get_context("forkserver"), free_port()
        # Else each process starts a pool of processes. The import of torch._dynamo reads it.
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        # The server of forkserver imports the modules in `preloaded` once for all processes. They
        # include those modules of OTHERS that the tests have imported. The first torch.compile of a
        # process would import torch._inductor.compile_fx, which takes 1.3 s.
        others = [name for name in OTHERS if name.partition(".")[0] in sys.modules]
        preloaded = ["epic.torch"]
        if not self.uses_cuda:
            preloaded += ["torch._dynamo", *others, "torch._inductor.compile_fx"]
        context.set_forkserver_preload(preloaded)
        for rank in range(self.size):
            mine, other = context.Pipe()
            process = context.Process(
                target=serve, args=(rank, self.size, port, other), daemon=True
            )
            process.start()
            other.close()
            self.processes.append(process)
            self.pipes.append(mine)
        self.run(begin)
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            process.kill()
            process.join()

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Start function(rank, *args) in each process, which must be able to import its module."""
        for pipe in self.pipes:
            pipe.send((function.__module__, function.__name__, args))

    def answer(self, rank: int, limit: float = LIMIT) -> tuple[bool, Any]:
        """Return the result of one process, or what it raised."""
        if not self.pipes[rank].poll(limit):
            return False, f"rank {rank} has not answered in {limit} s"
        try:
            return self.pipes[rank].recv()
        except EOFError:
            return False, f"rank {rank} is gone"

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return the results of all processes; fail with the first exception that any raised."""
        self.start(function, *args)
        end = time.monotonic() + LIMIT
        answers = [self.answer(r, max(0.0, end - time.monotonic())) for r in range(self.size)]
        failures = [what for good, what in answers if not good]
        assert not failures, "\n".join(map(str, failures))
        return [what for _, what in answers]
