# SPDX-License-Identifier: Apache-2.0
"""Measures the host time of epic.torch's calls with one rank, in microseconds per call.

python bench/torch_host.py runs on a GPU if there is one, else on the CPU.

python bench/torch_host.py --device cpu --tokens 1

Columns: "function" is the call without gradients; "autograd" is the call when gradients are needed;
"operator" is torch.ops.epic alone; "core" is the C call with filled arguments, on GPUs only the
launch, on CPUs all the work. A time is the median of short batches, because machines are shared.
With --least it is the smallest one, to compare two libraries whose programs run in turn while the
clock changes.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch_core import Core

import epic.torch

Call = Callable[[], Any]
Calls = dict[str, Call]
BATCH = 20


class Seen(TorchDispatchMode):
    """Records the calls of EPIC's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Calls = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "epic":
            same = [v.detach() if isinstance(v, torch.Tensor) else v for v in args]
            self.calls[func.__name__.split(".")[0]] = lambda: func(*same)
        return func(*args, **(kwargs or {}))


class Step:
    """One step and its data."""

    def __init__(self, group: epic.torch.Group, args: argparse.Namespace) -> None:
        on_gpu = group.device.type == "cuda"
        self.group, self.layer = group, epic.torch.Layer(args.experts, args.top_k)
        self.x = torch.randn(args.tokens, args.hidden, device=group.device)
        if on_gpu:
            self.x = self.x.bfloat16()
        chosen = torch.rand(args.tokens, args.experts, device=group.device).topk(args.top_k)
        self.ids, self.w = chosen.indices.int(), chosen.values
        outputs = epic.torch.plan_dispatch(group, self.layer, self.ids, self.x, self.w)
        self.plan, self.recv, self.slot = outputs

    def functions(self) -> Calls:
        """Return the calls as a program makes them."""
        group, layer, x, w, ids = self.group, self.layer, self.x, self.w, self.ids
        return {
            "plan": lambda: epic.torch.plan(group, layer, ids),
            "dispatch": lambda: epic.torch.dispatch(self.plan, x, w),
            "plan_dispatch": lambda: epic.torch.plan_dispatch(group, layer, ids, x, w),
            "combine": lambda: epic.torch.combine(self.plan, self.recv, self.slot),
            "(torch.empty_like)": lambda: torch.empty_like(x),
        }

    def backwards(self) -> Calls:
        """Return backward calls through the engine, one gradient each; leaves must require
        gradients."""
        self.x.requires_grad_()
        self.recv.requires_grad_()
        recv, _ = epic.torch.dispatch(self.plan, self.x, self.w)
        out = epic.torch.combine(self.plan, self.recv, self.slot)
        d_recv, d_out = torch.ones_like(recv), torch.ones_like(out)

        def grad(result: torch.Tensor, of: torch.Tensor, cotangent: torch.Tensor) -> Any:
            return torch.autograd.grad(result, of, cotangent, retain_graph=True)

        return {
            "dispatch_backward": lambda: grad(recv, self.x, d_recv),
            "combine_backward": lambda: grad(out, self.recv, d_out),
        }

    def operators(self) -> Calls:
        """Return the operators that these functions call."""
        with Seen() as seen:
            for call in (self.functions() | self.backwards()).values():
                call()
        return seen.calls

    def core(self) -> Calls:
        """Return the C calls."""
        return Core(self.group, self.layer, self.ids, self.x, self.w, zero_tail=True).calls()


def measured_us(call: Call, on_gpu: bool, args: argparse.Namespace) -> float:
    """Return the time of a call, in the median batch or in the fastest one."""
    found = []
    for _ in range(args.batches + 3):
        start = time.perf_counter()
        for _ in range(BATCH):
            call()
        found.append((time.perf_counter() - start) / BATCH * 1e6)
        if on_gpu:
            torch.cuda.synchronize()
    return min(found) if args.least else statistics.median(found[3:])


def measure(args: argparse.Namespace) -> None:
    """Print the table."""
    device = torch.device(args.device)
    sizes: dict[str, Any] = {"max_tokens": args.tokens, "max_row_bytes": 4 * args.hidden}
    with epic.torch.Group(num_ranks=1, device=device, **sizes) as group:
        step = Step(group, args)
        table: dict[str, dict[str, float]] = {}

        def column(name: str, calls: Calls) -> None:
            on_gpu = device.type == "cuda"
            table[name] = {n: measured_us(c, on_gpu, args) for n, c in calls.items()}

        with torch.no_grad():
            column("core", step.core())
            column("function", step.functions())
        operators = step.operators()
        with torch.no_grad():
            column("operator", operators)
        column("autograd", step.functions() | step.backwards())
        print(f"{'us of the host, a call':24}" + "".join(f"{name:>10}" for name in table))
        for row in dict.fromkeys(row for found in table.values() for row in found):
            cells = [
                f"{found[row]:10.2f}" if row in found else " " * 10 for found in table.values()
            ]
            print(f"{row:24}" + "".join(cells))


def main() -> int:
    """Parse the command line and measure."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--tokens", type=int, default=256 if gpu else 2)
    parser.add_argument("--hidden", type=int, default=256 if gpu else 8)
    parser.add_argument("--experts", type=int, default=64 if gpu else 8)
    parser.add_argument("--top-k", type=int, default=8 if gpu else 2)
    parser.add_argument("--batches", type=int, default=101)
    parser.add_argument("--least", action="store_true")
    torch.set_num_threads(1)
    measure(parser.parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(main())
