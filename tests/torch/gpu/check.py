# SPDX-License-Identifier: Apache-2.0
"""epic.torch on GPUs:  check.py threads|processes|shared RANKS [cases of the files beside this one]

threads, processes: each rank has a GPU of its own.  shared: processes that share the GPUs there
are; the driver gives them turns.  A line for each case, with the first exception where one went
wrong; then the next case.  The last line is "right", or names what was wrong.
check.py deaths RANKS: processes that share the GPUs, of which the last is killed."""

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent / "jax")]

import framework_cases
import gpu_cases
import host_cases
import torch
import torch.distributed as dist
import torch.multiprocessing
from gpu_cases import LIMIT_MS

import epic.torch
from parts import SIZES
from ports import free_port

CASES = {**gpu_cases.CASES, **host_cases.CASES, **framework_cases.CASES}
# Dynamo is not for threads that trace at once; times of ranks that take turns say nothing.
# Nor is the profiler.
LEFT_OUT = {
    "threads": {"compile", "apart", "profiler", "pretrained", *framework_cases.CASES},
    "processes": set(),
    "shared": {"compile", "apart", "host_time"},
}


def left_out(how: str, ranks: int) -> set[str]:
    """The cases that are not for these ranks."""
    four = how != "threads" and ranks == 4
    nccl = how == "processes" and ranks % 2 == 0
    none: set[str] = set()
    return (
        LEFT_OUT[how]
        | (none if four else host_cases.OF_FOUR)
        | (none if nccl else host_cases.BY_NCCL)
    )


FATAL = ("CUDA error", "CUDA failure", "EPIC_EDEVICE")  # the process can go no further


# ---------------------------------------------------------------------------- verdicts ----


def what_went_wrong(error: BaseException) -> str:
    """The exception, where it came from, and the line, in a few words."""
    frames = traceback.extract_tb(error.__traceback__)
    path = " > ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames[-4:])
    lines = [f.line for f in frames if f.filename == gpu_cases.__file__ and f.line] or [""]
    text = " ".join(str(error).split())[:600]
    return f"{type(error).__name__}: {text} [{lines[-1]}: {path}]"


def run_case(name: str, rank: int, ranks: int, device: torch.device) -> str:
    """What went wrong; empty: nothing."""
    try:
        bootstrap = gpu_cases.bootstraps(name, rank, ranks)
        sizes = {**SIZES, "timeout_ms": 3 * LIMIT_MS if name in ("compile", "apart") else LIMIT_MS}
        with epic.torch.Group(
            bootstrap=bootstrap, rank=rank, num_ranks=ranks, device=device, name=name, **sizes
        ) as group:
            CASES[name](group)
            torch.cuda.synchronize()
    except BaseException as error:
        return what_went_wrong(error)
    return ""


def told_by_all(name: str, rank: int, ranks: int, mine: str) -> list[str]:
    """Every rank's verdict."""
    exchange = gpu_cases.bootstraps(f"verdict of {name}", rank, ranks)
    exchange.timeout_ms = 4 * LIMIT_MS
    try:
        return [said.decode() for said in exchange(rank, mine.encode() or b" ")]
    except RuntimeError as error:
        return [mine] * rank + [mine or f"{FATAL[0]}? {error}"] + [""] * (ranks - rank - 1)


def cause(verdicts: list[str]) -> str:
    """The first failure that is not one that another rank's failure made."""
    wrong = [f"rank {r}: {said}" for r, said in enumerate(verdicts) if said.strip()]
    caused = ("EPIC_EPEER", "EPIC_ETIMEOUT")
    own = [said for said in wrong if not any(word in said for word in caused)]
    return (own or wrong or [""])[0]


def run_cases(rank: int, ranks: int, device: torch.device, names: list[str]) -> list[str]:
    """All of one rank; gives the cases that went wrong."""
    torch.cuda.set_device(device)
    wrong = []
    for name in names:
        begin = time.monotonic()
        said = cause(told_by_all(name, rank, ranks, run_case(name, rank, ranks, device)))
        if rank == 0:
            seconds = f"{time.monotonic() - begin:5.1f} s"
            print(f"  {name:12} {seconds}  {'WRONG: ' + said if said else 'right'}", flush=True)
        if said:
            wrong.append(name)
        if any(word in said for word in FATAL):
            return [*wrong, "and no case after it was run"]
    return wrong


# ------------------------------------------------------------------------------ ranks ----


def device_of(rank: int) -> torch.device:
    """Of a rank; more ranks than GPUs share them."""
    return torch.device("cuda", rank % torch.cuda.device_count())


def in_process(rank: int, ranks: int, port: int, how: str, names: list[str], folder: str) -> None:
    """With torch.distributed; the store is that of the process group.  NCCL takes no two ranks of
    one GPU."""
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, all_threads=False, chain=True)
    device = device_of(rank)
    torch.cuda.set_device(device)
    backend = "gloo" if how == "shared" else "nccl"
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=ranks)
    assert dist.group.WORLD is not None
    torch.set_num_threads(4)
    gpu_cases.store = dist.PrefixStore("check", dist.group.WORLD.get_group_store())
    more = {"device": device} if how == "shared" else {}  # nccl: the current GPU
    with epic.torch.Group(**SIZES, **more) as group:
        assert group.device == device and group.backend == "p2p", group
    wrong = run_cases(rank, ranks, device, names)
    dist.destroy_process_group()
    Path(folder, str(rank)).write_text(", ".join(wrong))


def in_processes(how: str, ranks: int, names: list[str]) -> str:
    """What was wrong."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, free_port(), how, names, folder)
        torch.multiprocessing.spawn(in_process, arguments, nprocs=ranks)
        return Path(folder, "0").read_text()


def in_threads(ranks: int, names: list[str]) -> str:
    """What was wrong."""
    gpu_cases.store = dist.HashStore()
    found: list[Any] = ["its thread ended"] * ranks

    def run(rank: int) -> None:
        found[rank] = ", ".join(run_cases(rank, ranks, device_of(rank), names))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return next((said for said in found if said), "")


def main() -> int:
    """One line at the end."""
    how, ranks, names = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)
    try:
        if how == "deaths":
            wrong = host_cases.deaths(ranks)
        else:
            names = [n for n in names or CASES if n not in left_out(how, ranks)]
            run = in_threads if how == "threads" else partial(in_processes, how)
            wrong = run(ranks, names)
    except Exception as error:
        wrong = f"a process ended: {str(error)[-1500:]}"
    print(f"WRONG: {wrong}" if wrong else "right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
