# SPDX-License-Identifier: Apache-2.0
"""torch.compile: one function with steps that could change places; several functions, with
checkpoints around and inside."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import epic.torch
from parts import EXPERTS, HIDDEN, LAYER, TOP_K, UNEVEN, Data, group_of, through
from reference import relative

# With "aot_eager" torch 2.9 takes what a backward writes to for changed behind its back.
AOT = not torch.__version__.startswith("2.9")


def two_steps(group: Any, fused: bool) -> Callable[..., torch.Tensor]:
    """Two independent round trips behind products of ragged sizes, and a sum beside them: what
    Inductor would like to reorder."""
    step = through(group, fused)

    def run(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        a = step(torch.tanh(x), w, ids)
        total = epic.torch.sum(group, x.new_ones(1))
        b = step(torch.tanh(x) @ torch.eye(HIDDEN), w * 2, ids)
        return a * b / total

    return run


def compiled(rank: int, ep: int, fused: bool, backend: str) -> None:
    """The same numbers as eager, forward and backward, without a graph break."""
    with group_of(ep) as group:
        eager = two_steps(group, fused)
        counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
        run = torch.compile(eager, fullgraph=True, backend=counter, dynamic=True)
        for tokens in (UNEVEN, (9, 2, 0, 30)):
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
    """Traced forward and backward, with fakes, in full."""
    world.run(compiled, ep, fused, "aot_eager")


def test_inductor(world: Any) -> None:
    """Ranks of different numbers of tokens, so of different programs: the calls keep their
    order."""
    world.run(compiled, 4, False, "inductor")


def compiled_module_reopened(rank: int) -> None:
    """A group that is opened again under a compiled function; errors keep their text."""
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
        told = epic.torch.as_epic_error(error)
        assert isinstance(told, epic.torch.EpicError) and told.code == "EPIC_ECLOSED", told
    else:
        raise AssertionError("a closed group computed")
    torch._dynamo.reset()


def test_compile_and_reopen(world: Any) -> None:
    """The number of a group is not baked in."""
    world.run(compiled_module_reopened)


# -------------------------------------------------------------------- several functions ----

WIDE = 32  # a block of quantized rows


def kinds(group: Any, rank: int) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Functions of rows [tokens, WIDE]: every operator that has a gradient."""
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
    """Its output, and the gradient of x."""
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
    """A compiled function that is called thrice before its first backward, as the blocks of a model
    are: eager's numbers."""
    x = torch.sin(torch.arange(UNEVEN[rank] * WIDE, device=group.device) + rank * 1.0)
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


def of_four(rank: int, backend: str, *names: str) -> None:
    """On every rank."""
    with group_of(4, max_row_bytes=4 * WIDE) as group:
        check_apart(group, rank, backend, *names)


def test_apart(world: Any) -> None:
    """What one function's backward needs is not what the next one's forward changes."""
    how = ("aot_eager",) if AOT else ("inductor", "plan_dispatch")
    world.run(of_four, *how)
