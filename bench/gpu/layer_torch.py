# SPDX-License-Identifier: Apache-2.0
"""Times torch's grouped_mm on the shapes of layer.cu, with the same schedule: 15 ms of rest, one
warm-up call, three timed calls, and the median of ROUNDS x 3.

If epic.torch can be imported, it then times whole layers on all GPUs, with one process for each
GPU. One layer is that of the core. The other has the same exchange and router, with torch's
products and a compiled activation.

layer_torch.py [products] [layers]      without arguments: both
"""

import itertools
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing
    from torch.nn import functional
except ImportError:
    print("left out: torch is not installed")
    sys.exit(0)

grouped_mm = getattr(functional, "grouped_mm", None) or torch._grouped_mm
ROUNDS = 4
ROWS = 32768


def burst(run: Callable[[], object], meet: Callable[[], object] = bool) -> float:
    """Return the milliseconds of a call. All ranks synchronize before a burst."""
    times: list[float] = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        time.sleep(0.015)
        meet()
        torch.cuda.synchronize()
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
    """Time the three passes of a grouped product."""
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
    """Time a gated MLP of experts, forward and with backward."""
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


# ------------------------------------------------------------------------------ layers ----

TOKENS = 4096

# experts of all ranks, top_k, hidden, inner, and whether there are biases and a clamped activation
MODELS = {
    "gpt-oss, 2880, inner 2880, top-4 of 128": (128, 4, 2880, 2880, True),
    "Qwen3-30B, 2048, inner 768, top-8 of 128": (128, 8, 2048, 768, False),
}


def parameters(local: int, hidden: int, inner: int, experts: int, biased: bool) -> Any:
    """Return random weights of a rank."""
    import epic.torch

    def make(*shape: int, kind: Any = torch.bfloat16) -> Any:
        return (torch.randn(*shape, device="cuda") * 0.02).to(kind).requires_grad_()

    weights = {
        "w_gate": make(hidden, experts, kind=torch.float32),
        "w_gate_up": make(local, hidden, 2 * inner),
        "w_down": make(local, inner, hidden),
    }
    if biased:
        weights["b_gate"] = make(experts, kind=torch.float32)
        weights["b_gate_up"] = make(local, 2 * inner)
        weights["b_down"] = make(local, hidden)
    return epic.torch.MoeWeights(**weights)


@torch.compile
def between(h: Any, bias: Any, expert: Any, clamped: bool) -> Any:
    """Compute the activation between torch's two products."""
    if bias is not None:
        h = h + bias[expert]
    gate, value = h.chunk(2, dim=-1)
    if not clamped:
        return functional.silu(gate) * value
    gate, value = gate.clamp(max=7), value.clamp(-7, 7)
    return gate * torch.sigmoid(1.702 * gate) * (value + 1)


@torch.compile
def biased_rows(y: Any, bias: Any, expert: Any) -> Any:
    """Add the bias after the second product."""
    return y + bias[expert]


def by_torch(group: Any, options: Any, x: Any, w: Any) -> Any:
    """Return the layer with torch's products."""
    import epic.torch

    logits = x.float() @ w.w_gate
    if w.b_gate is not None:
        logits = logits + w.b_gate
    chosen, weights = epic.torch.route(options.router, logits, group=group)
    plan, rows, slots = epic.torch.plan_dispatch(
        group, options.layer, chosen, x, weights, capacity=options.capacity, zero_tail=False
    )
    ends = plan.expert_rows.cumsum(0, dtype=torch.int32)
    expert = None
    if w.b_gate_up is not None:
        slot = torch.arange(rows.shape[0], device="cuda")
        expert = torch.bucketize(slot, ends, right=True).clamp(max=ends.shape[0] - 1)
    h = grouped_mm(rows, w.w_gate_up, offs=ends)
    y = grouped_mm(between(h, w.b_gate_up, expert, expert is not None), w.w_down, offs=ends)
    if w.b_down is not None:
        y = biased_rows(y, w.b_down, expert)
    return epic.torch.combine(plan, y, slots)


def layer(group: Any, name: str) -> None:
    """Time a model, forward, and forward and backward with all gradients, in ms of the slowest
    rank."""
    import epic.torch

    count, top_k, hidden, inner, biased = MODELS[name]
    rank, local = dist.get_rank(), count // group.num_ranks
    options = epic.torch.Moe.of(
        num_experts=count,
        top_k=top_k,
        hidden=hidden,
        inner=inner,
        alignment=128,
        activation="clamped_swiglu" if biased else "silu",
        capacity=TOKENS * top_k * 3 // 2 + local * 128,
    )
    torch.manual_seed(rank)
    w = parameters(local, hidden, inner, count, biased)
    x = torch.randn(TOKENS, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ct = torch.randn_like(x)
    leaves = [x, *(t for t in w if t is not None)]
    runs = {
        "EPIC": lambda: epic.torch.moe(group, options, x, w).out,
        "torch's products": lambda: by_torch(group, options, x, w),
    }
    found, times = {}, []
    for how, run in runs.items():
        with torch.no_grad():
            found[how] = run()
            ms = [burst(run, dist.barrier)]
        ms.append(burst(lambda run=run: torch.autograd.grad(run(), leaves, ct), dist.barrier))
        slowest = torch.tensor(ms, device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(slowest)
        if rank == 0:
            print(
                f"layer, {name}, {group.num_ranks} ranks of {TOKENS} tokens, {how}: forward "
                f"{slowest[0]:.3f} ms, with backward {slowest[1]:.3f}",
                flush=True,
            )
    one, other = (t.float() for t in found.values())
    off = (one - other).abs().amax(dim=1) / one.abs().max()
    # number of tokens whose last choice differs because two logits are nearly equal
    far = int((off > 2e-2).sum())
    if rank == 0:
        ahead, both = (times[0] / times[1]).tolist()
        print(
            f"  compared with torch's products, {name}: forward {ahead:.3f}, "
            f"with backward {both:.3f} times; {TOKENS - far} of {TOKENS} rows agree within "
            f"{off[off <= 2e-2].max():.1e}",
            flush=True,
        )
    group.check()


def layers(rank: int, ranks: int, port: int) -> None:
    """Time the layers in one process."""
    import epic.torch

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=device)
    widest = 2 * max(model[2] for model in MODELS.values())
    with epic.torch.Group(max_tokens=TOKENS, max_row_bytes=widest, device=device) as group:
        for name in MODELS:
            layer(group, name)
        torch.cuda.synchronize()
        dist.barrier()
    dist.destroy_process_group()


def all_layers() -> None:
    """Start a process for each GPU."""
    try:
        import epic.torch  # noqa: F401
    except Exception as error:
        print(f"left out: layers: {type(error).__name__}: {str(error)[:120]}")
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = torch.cuda.device_count()
    torch.multiprocessing.spawn(layers, (ranks, port), ranks)


def all_products() -> None:
    """Time the products on one GPU."""
    for shape in ((64, 7168, 4096), (64, 2048, 7168), (4, 7168, 4096)):
        products(*shape)
    try:
        experts(64, 7168, 2048)
    except Exception as error:  # compilation needs more than torch: a C compiler and triton
        print(f"left out: torch's experts: {type(error).__name__}: {str(error)[:120]}")


if __name__ == "__main__":
    words = sys.argv[1:] or ["products", "layers"]
    if "products" in words:
        all_products()
    if "layers" in words:
        all_layers()
