# SPDX-License-Identifier: Apache-2.0
"""Runs epic.torch on GPUs: check.py threads|processes|shared RANKS [cases of the files in this
folder]

threads, processes: each rank has a GPU of its own. shared: processes share the available GPUs, and
the driver runs them in turn. check.py deaths RANKS: processes share the GPUs, and the last one is
killed.

Prints a line for each case, with the first exception if it failed, and continues. The last line is
"right", or names the cases that failed.
"""

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
import vllm_cases
from gpu_cases import LIMIT_MS

import epic.torch
from parts import SIZES
from ports import free_port

CASES = {**gpu_cases.CASES, **host_cases.CASES, **framework_cases.CASES, **vllm_cases.CASES}
# Cases that do not work with some kinds of ranks. Dynamo does not support threads that trace at the
# same time. Times are meaningless if ranks run in turn, and the profiler does not support this
# either.
LEFT_OUT = {
    "threads": {"compile", "apart", "profiler", "pretrained", *framework_cases.CASES},
    "processes": set(),
    "shared": {"compile", "apart", "host_time"},
}


def left_out(how: str, ranks: int) -> set[str]:
    """Return the cases that are skipped for these ranks."""
    four = how != "threads" and ranks == 4
    nccl = how == "processes" and ranks % 2 == 0
    none: set[str] = set()
    return (
        LEFT_OUT[how]
        | (none if four else host_cases.OF_FOUR)
        | (none if nccl else host_cases.BY_NCCL)
    )


# errors after which the process cannot continue
FATAL = ("CUDA error", "CUDA failure", "EPIC_EDEVICE")


# ---------------------------------------------------------------------------- verdicts ----


def what_went_wrong(error: BaseException) -> str:
    """Return the exception and the source line that raised it, in one short line.

    If an exception ends a capture, torch raises another one. So return the first of both.
    """
    if "during capture" in str(error) and error.__context__ is not None:
        error = error.__context__
    frames = traceback.extract_tb(error.__traceback__)
    path = " > ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames[-4:])
    lines = [f.line for f in frames if f.filename == gpu_cases.__file__ and f.line] or [""]
    text = " ".join(str(error).split())[:600]
    return f"{type(error).__name__}: {text} [{lines[-1]}: {path}]"


def run_case(name: str, rank: int, ranks: int, device: torch.device) -> str:
    """Run a case; return what failed, or an empty string."""
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


def exchange_results(name: str, rank: int, ranks: int, mine: str) -> list[str]:
    """Collect the verdicts of all ranks."""
    exchange = gpu_cases.bootstraps(f"verdict of {name}", rank, ranks)
    exchange.timeout_ms = 4 * LIMIT_MS
    try:
        return [said.decode() for said in exchange(rank, mine.encode() or b" ")]
    except RuntimeError as error:
        return [mine] * rank + [mine or f"{FATAL[0]}? {error}"] + [""] * (ranks - rank - 1)


def cause(verdicts: list[str]) -> str:
    """Return the first failure that was not caused by a failure of another rank."""
    wrong = [f"rank {r}: {said}" for r, said in enumerate(verdicts) if said.strip()]
    caused = ("EPIC_EPEER", "EPIC_ETIMEOUT")
    own = [said for said in wrong if not any(word in said for word in caused)]
    return (own or wrong or [""])[0]


def run_cases(rank: int, ranks: int, device: torch.device, names: list[str]) -> list[str]:
    """Run all cases on one rank; return the names of those that failed."""
    torch.cuda.set_device(device)
    wrong = []
    for name in names:
        begin = time.monotonic()
        said = cause(exchange_results(name, rank, ranks, run_case(name, rank, ranks, device)))
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
    """Return the GPU of a rank; if there are more ranks than GPUs, they share them."""
    return torch.device("cuda", rank % torch.cuda.device_count())


def in_process(rank: int, ranks: int, port: int, how: str, names: list[str], folder: str) -> None:
    """Run as one process, with the store of the process group. NCCL does not allow two ranks on one
    GPU, so shared GPUs use gloo."""
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
    more = {"device": device} if how == "shared" else {}  # nccl uses the current GPU
    with epic.torch.Group(**SIZES, **more) as group:
        assert group.device == device and group.backend == "p2p", group
    wrong = run_cases(rank, ranks, device, names)
    dist.destroy_process_group()
    Path(folder, str(rank)).write_text(", ".join(wrong))


def in_processes(how: str, ranks: int, names: list[str]) -> str:
    """Run all ranks as processes; return what failed."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, free_port(), how, names, folder)
        torch.multiprocessing.spawn(in_process, arguments, nprocs=ranks)
        return Path(folder, "0").read_text()


def in_threads(ranks: int, names: list[str]) -> str:
    """Run all ranks as threads; return what failed."""
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
    """Print the result as the last line."""
    how, ranks, names = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)
    try:
        if how == "deaths":
            wrong = host_cases.deaths(ranks) or vllm_cases.deaths(ranks)
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
