# SPDX-License-Identifier: Apache-2.0
"""torch's grouped_mm on the shapes of layer.cu, timed as there: 15 ms of rest, one call to warm
up, three timed, median of ROUNDS x 3."""

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

try:
    import torch
    from torch.nn import functional
except ImportError:
    print("left out: torch is not installed")
    sys.exit(0)

grouped_mm = getattr(functional, "grouped_mm", None) or torch._grouped_mm
ROUNDS = 4
ROWS = 32768


def burst(run: Callable[[], object]) -> float:
    """Milliseconds of a call."""
    times: list[float] = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        time.sleep(0.015)
        run()
        marks = [torch.cuda.Event(True) for _ in range(4)]
        marks[0].record()
        for mark in marks[1:]:
            run()
            mark.record()
        torch.cuda.synchronize()
        times += [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    return statistics.median(times)


def products(experts: int, k: int, n: int) -> None:
    """The three passes of a grouped product."""
    x = torch.randn(ROWS, k, device="cuda", dtype=torch.bfloat16)
    d = torch.randn(ROWS, n, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(experts, k, n, device="cuda", dtype=torch.bfloat16) * 0.02
    each = ROWS // experts
    ends = torch.arange(each, ROWS + 1, each, device="cuda", dtype=torch.int32)
    passes = (
        lambda: grouped_mm(x, w, offs=ends),
        lambda: grouped_mm(d, w.transpose(-2, -1), offs=ends),
        lambda: grouped_mm(x.t(), d, offs=ends),
    )
    flop = 2 * ROWS * k * n
    ms = [burst(run) for run in passes]
    rates = " ".join(f"{flop / t / 1e9:.0f}" for t in ms)
    print(
        f"torch {torch.__version__}, {experts} x {each} rows, k {k}, n {n}: {rates} TFLOP/s, "
        f"three passes {3 * flop / sum(ms) / 1e9:.0f}"
    )


def experts(count: int, hidden: int, inner: int) -> None:
    """A gated MLP of experts, forward and with backward."""
    x = torch.randn(ROWS, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    up = torch.randn(count, hidden, 2 * inner, device="cuda", dtype=torch.bfloat16) * 0.02
    down = torch.randn(count, inner, hidden, device="cuda", dtype=torch.bfloat16) * 0.02
    d_y = torch.randn(ROWS, hidden, device="cuda", dtype=torch.bfloat16)
    up.requires_grad_()
    down.requires_grad_()
    ends = torch.arange(ROWS // count, ROWS + 1, ROWS // count, device="cuda", dtype=torch.int32)

    @torch.compile
    def activation(h: Any) -> Any:
        gate, value = h.chunk(2, dim=-1)
        return functional.silu(gate) * value

    def forward() -> Any:
        return grouped_mm(activation(grouped_mm(x, up, offs=ends)), down, offs=ends)

    def both() -> None:
        for t in (x, up, down):
            t.grad = None
        forward().backward(d_y)

    both()
    with torch.no_grad():
        ms = burst(forward)
    print(
        f"torch experts, {count} experts, {hidden}, inner {inner}: forward {ms:.3f} ms, "
        f"with backward {burst(both):.3f}"
    )


for shape in ((64, 7168, 4096), (64, 2048, 7168), (4, 7168, 4096)):
    products(*shape)
try:
    experts(64, 7168, 2048)
except Exception as error:  # compilation needs more than torch: a C compiler, triton
    print(f"left out: torch's experts: {type(error).__name__}: {str(error)[:120]}")
