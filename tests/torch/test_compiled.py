# SPDX-License-Identifier: Apache-2.0
"""Tests torch.compile.

The compiled functions contain several steps, which must stay in order. Programs have one or several
such functions, with activation checkpoints around them or inside of them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import epic.torch
from parts import EXPERTS, HIDDEN, LAYER, TOP_K, UNEVEN, Data, group_of, through
from reference import relative

# With "aot_eager" torch 2.9 reports that a backward changed a tensor, although it only writes its
# own outputs.
AOT = not torch.__version__.startswith("2.9")
CALLS = (UNEVEN, (9, 2, 0, 30))  # the numbers of tokens of all ranks, for each call


def two_steps(group: Any, fused: bool) -> Callable[..., torch.Tensor]:
    """Return a function with two independent round trips, each after products of uneven sizes, and
    a sum. Inductor could reorder them."""
    step = through(group, fused)

    def run(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        a = step(torch.tanh(x), w, ids)
        total = epic.torch.sum(group, x.new_ones(1))
        b = step(torch.tanh(x) @ torch.eye(HIDDEN), w * 2, ids)
        return a * b / total

    return run


def compiled(
    rank: int, ep: int, fused: bool, backend: str, sizes: Sequence[tuple[int, ...]] = CALLS
) -> None:
    """Check that results and gradients are those of eager mode, without a graph break.

    sizes: the numbers of tokens of all ranks, for each call.
    """
    with group_of(ep) as group:
        if ep == 1 and rank > 1:
            return  # ranks alone compile the same programs; rank 0 has tokens, rank 1 has none
        eager = two_steps(group, fused)
        counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
        run = torch.compile(eager, fullgraph=True, backend=counter, dynamic=True)
        for tokens in sizes:
            x, w, ids, ct = Data(tokens).mine(rank)
            wanted = eager(x, w, ids)
            out = run(x, w, ids)
            torch.testing.assert_close(out, wanted)
            got = torch.autograd.grad(out, (x, w), ct)
            torch.testing.assert_close(got, torch.autograd.grad(wanted, (x, w), ct))
        assert counter.frame_count <= 3
    torch._dynamo.reset()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("ep", [1, 4])
def test_compile(world: Any, ep: int, fused: bool) -> None:
    """Check that forward and backward are traced completely with fake functions."""
    world.run(compiled, ep, fused, "aot_eager")


def compiled_by_two(rank: int) -> None:
    """Compile with inductor on ranks 0 and 1, of which only rank 0 has tokens."""
    group_of(2).close()  # all ranks make the mesh
    if rank < 2:
        compiled(rank, 2, False, "inductor", [UNEVEN])


def test_inductor(world: Any) -> None:
    """Check that the calls keep their order on ranks with different numbers of tokens, which
    compile different programs."""
    assert UNEVEN[0] > 0 and UNEVEN[1] == 0
    world.run(compiled_by_two)


def compiled_module_reopened(rank: int) -> None:
    """Open a group again after a function was compiled; errors keep their text."""
    x, w, ids, _ = Data().mine(rank)

    def run(group: Any, x: torch.Tensor) -> torch.Tensor:
        return through(group, True)(x, w.detach(), ids)

    fast = torch.compile(run, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        with group_of(4) as group:
            torch.testing.assert_close(fast(group, x), run(group, x))
    closed = group
    try:
        fast(closed, x)
    except RuntimeError as error:
        converted = epic.torch.as_epic_error(error)
        assert isinstance(converted, epic.torch.EpicError) and converted.code == "EPIC_ECLOSED", (
            converted
        )
    else:
        raise AssertionError("a closed group computed")
    torch._dynamo.reset()


def test_compile_and_reopen(world: Any) -> None:
    """Check that a compiled function does not contain the number of its group."""
    world.run(compiled_module_reopened)


# -------------------------------------------------------------------- several functions ----

WIDE = 32  # the block of a quantized row


def kinds(group: Any, rank: int) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return functions of rows [tokens, WIDE] that use every operator with a gradient."""
    _, w, ids, _ = Data(UNEVEN).mine(rank, str(group.device))
    wish = epic.torch.Moe.of(num_experts=EXPERTS, top_k=TOP_K, hidden=WIDE, inner=WIDE)
    layer = epic.torch.MoE(group, wish)
    flat = epic.torch.Layer(EXPERTS, TOP_K, layout="flat")

    def quantized(x: torch.Tensor) -> torch.Tensor:
        plan = epic.torch.plan(group, LAYER, ids)
        recv, slot = epic.torch.dispatch(plan, x, w, quantize="1x32")
        return epic.torch.combine(plan, torch.sin(recv), slot, quantize_gradient="1x32")

    def by_rank(x: torch.Tensor) -> torch.Tensor:
        plan = epic.torch.plan(group, flat, ids)
        recv, slots, _ = epic.torch.dispatch_flat(plan, x, w)
        assert slots is not None
        return epic.torch.combine(plan, torch.sin(recv) * slots.sum(-1, keepdim=True))

    apart, fused = (through(group, how) for how in (False, True))
    return {
        "plan": lambda x: apart(x, w, ids),
        "plan_dispatch": lambda x: fused(x, w, ids),
        "quantized": quantized,
        "flat": by_rank,
        "sum": lambda x: epic.torch.sum(group, x.sum(0)) / 8 + x,
        "layer": lambda x: layer(x)[0],
    }


def thrice(function: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    """Return the output of three calls, and the gradient of x."""
    rows = x.clone().requires_grad_()
    out = rows
    for _ in range(3):
        out = function(out)
    (gradient,) = torch.autograd.grad(out.square().sum(), rows)
    return torch.cat([out.detach(), gradient])


KEEP = partial(create_selective_checkpoint_contexts, epic.torch.save_exchange)
WAYS: dict[str, Callable[..., Any]] = {
    "alone": torch.compile,
    "checkpoint around": lambda f, **how: partial(
        checkpoint, torch.compile(f, **how), use_reentrant=False
    ),
    "checkpoint inside": lambda f, **how: torch.compile(
        partial(checkpoint, f, use_reentrant=False, context_fn=KEEP), **how
    ),
}


def check_apart(group: Any, rank: int, backend: str, *names: str) -> None:
    """Call a compiled function three times before its first backward, as a model with equal blocks
    does, and compare with eager mode."""
    x = torch.sin(torch.arange(UNEVEN[rank % len(UNEVEN)] * WIDE, device=group.device) + rank * 1.0)
    for name, function in kinds(group, rank).items():
        if names and name not in names:
            continue
        wanted = thrice(function, x.reshape(-1, WIDE))
        assert not len(x) or wanted[len(wanted) // 2 :].abs().max() > 0, name
        for way, compiled_by in WAYS.items():
            torch._dynamo.reset()
            got = thrice(compiled_by(function, backend=backend), x.reshape(-1, WIDE))
            error = relative(got.cpu(), wanted.cpu())
            assert error < 1e-4, f"{name}, {way}: {error}"
    torch._dynamo.reset()


def of_two(rank: int, backend: str, *names: str) -> None:
    """Check half of the functions with ranks 0 and 1, the others with ranks 2 and 3."""
    with group_of(2, max_row_bytes=4 * WIDE) as group:
        check_apart(group, rank, backend, *names[rank // 2 :: 2])


def test_apart(world: Any) -> None:
    """Check that no forward call changes what the backward of another function needs."""
    names = ("plan", "plan_dispatch", "flat", "quantized", "sum", "layer")
    how = ("aot_eager", *names) if AOT else ("inductor", "plan_dispatch", "plan_dispatch")
    world.run(of_two, *how)
