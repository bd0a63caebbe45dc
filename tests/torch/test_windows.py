# SPDX-License-Identifier: Apache-2.0
"""Tests that results in windows have the bits of usual results, with and without gradients."""

import errno
import mmap
import time
from typing import Any

import pytest
import torch

import epic.torch
from epic.torch import EpicArgumentError, EpicError
from parts import EXPERTS, HIDDEN, LAYER, SIZES, UNEVEN, Data, group_of, same

TOP_1 = epic.torch.Layer(EXPERTS, 1)


def places(group: epic.torch.Group, layer: Any, tokens: int, kinds: str) -> tuple[Any, ...]:
    """Return memory for recv, slot_weights, out and the expert's results, filled with wrong values.

    kinds: for each a letter, "w" for a window on all ranks, "h" for a window on half of them, "-"
    for usual memory."""
    slots = group.capacity_bound(layer)
    shapes = ((slots, HIDDEN), (slots,), (tokens, HIDDEN), (slots, HIDDEN))
    found = []
    for kind, shape in zip(kinds, shapes, strict=True):
        has = kind == "w" or (kind == "h" and group.rank % 2 == 0)
        memory = torch.empty(shape)
        if kind != "-":
            memory = epic.torch.window(shape if has else (0,), torch.float32, group)
        found.append((memory if memory.shape == shape else torch.empty(shape)).fill_(99))
    return tuple(found)


class SinInto(torch.autograd.Function):
    """An expert whose results are in memory of the caller."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the sine of x to out."""
        ctx.save_for_backward(x)
        ctx.mark_dirty(out)
        return torch.sin(x, out=out)

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradient of x."""
        (x,) = ctx.saved_tensors
        return d_out * torch.cos(x), None


def step(group: Any, layer: Any, mine: Any, fused: bool, memory: Any = None) -> list[torch.Tensor]:
    """Run one step and return recv, slot_weights, out and the gradients of tokens and weights."""
    x, w, ids, ct = mine
    recv, slots = memory[:2] if memory else (None, None)
    plan = epic.torch.plan(group, layer, ids)
    out: Any = None
    if fused:
        out = memory and (plan, recv, slots)
        plan, rows, weights = epic.torch.plan_dispatch(group, layer, ids, x, w, out=out)
    else:
        out = memory and (recv, slots)
        rows, weights = epic.torch.dispatch(plan, x, w, out=out)
    assert weights is not None
    assert memory is None or rows.data_ptr() == memory[0].data_ptr()
    y = torch.sin(rows) if memory is None else SinInto.apply(rows, memory[3].detach())
    home = epic.torch.combine(plan, y, weights, out=memory and memory[2])
    assert memory is None or home.data_ptr() == memory[2].data_ptr()
    assert memory is None or not memory[2].requires_grad
    return [rows.detach(), weights.detach(), home.detach(), *torch.autograd.grad(home, (x, w), ct)]


def steps(rank: int, kinds: str, fused: bool) -> None:
    """Compare steps with windows with usual steps, several times in the same windows."""
    for layer in (LAYER, TOP_1):
        with group_of(4) as group:
            x, w, ids, ct = Data(UNEVEN).mine(rank)
            mine = [x, w[:, : layer.top_k].detach().requires_grad_(), ids[:, : layer.top_k], ct]
            mine[2] = mine[2].contiguous()
            memory = places(group, layer, x.shape[0], kinds)
            wanted = step(group, layer, mine, fused)
            for _ in range(3):
                assert same(wanted, step(group, layer, mine, fused, memory))
            with torch.no_grad():
                plan, recv, slots = epic.torch.plan_dispatch(group, layer, mine[2], x, mine[1])
                given = epic.torch.combine(plan, recv, slots, out=memory[2])
                assert given is memory[2]
                assert torch.equal(given, epic.torch.combine(plan, recv, slots))


@pytest.mark.parametrize(("kinds", "fused"), [("wwww", True), ("w-h-", False), ("hwww", True)])
def test_steps(world: Any, kinds: str, fused: bool) -> None:
    """Check all results and gradients."""
    world.run(steps, kinds, fused)


def rows_of(group: Any, plan: Any, ids: torch.Tensor) -> list[tuple[int, int, int, int]]:
    """Return (slot, expert, token, k) of every row of this rank, from the ids of all ranks."""
    local, found = EXPERTS // group.num_ranks, []
    ends = [0, *plan.expert_rows.cumsum(0).tolist()]
    for i in range(local):
        expert = group.rank * local + i
        for n, (t, k) in enumerate((ids == expert).nonzero().tolist()):
            found.append((ends[i] + n, expert, t, k))
    return found


def training(rank: int, kinds: str) -> None:
    """Train with sin((e + 1) x) as expert e, and compare with loops in float64.

    kinds: as for `places`, and a letter for grad_out=.
    """
    whole, mine = Data(UNEVEN), Data(UNEVEN).where(rank)
    x64, w64, ct64 = (v.double() for v in (whole.x, whole.w, whole.ct))
    for layer in (LAYER, TOP_1):
        ids = whole.ids[:, : layer.top_k].contiguous()
        with group_of(4) as group:
            x, w = whole.x[mine].clone(), whole.w[mine, : layer.top_k].clone()
            memory = (
                *places(group, layer, x.shape[0], kinds[:4]),
                places(group, layer, x.shape[0], "---" + kinds[4])[3],
            )
            for _ in range(2):
                x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
                recv, slots, out, results, grad = (v.detach().fill_(99) for v in memory)
                plan = epic.torch.plan(group, layer, ids[mine])
                rows, weights = epic.torch.dispatch(plan, x, w, out=(recv, slots))
                assert weights is not None
                factor = torch.zeros(len(rows), 1)
                used = rows_of(group, plan, ids)
                for slot, expert, _, _ in used:
                    factor[slot] = expert + 1
                y = SinInto.apply(rows * factor, results)
                home = epic.torch.combine(plan, y, weights, out=out, grad_out=grad)
                (home * whole.ct[mine]).sum().backward()
                same_memory = ((rows, 0), (weights, 1), (home, 2), (y, 3))
                assert all(v.data_ptr() == memory[i].data_ptr() for v, i in same_memory)
                true, d_x, d_w = (torch.zeros_like(v) for v in (x64, x64, w64[:, : layer.top_k]))
                for t, k in (ids >= 0).nonzero().tolist():
                    f = int(ids[t, k]) + 1
                    true[t] += w64[t, k] * torch.sin(f * x64[t])
                    d_x[t] += w64[t, k] * ct64[t] * f * torch.cos(f * x64[t])
                    d_w[t, k] = ct64[t] @ torch.sin(f * x64[t])
                assert x.grad is not None and w.grad is not None
                for got, value in ((home, true), (x.grad, d_x), (w.grad, d_w)):
                    torch.testing.assert_close(got.double(), value[mine], rtol=2e-5, atol=2e-5)
                for slot, _, t, k in used:
                    torch.testing.assert_close(memory[4][slot], whole.w[t, k] * whole.ct[t])


@pytest.mark.parametrize("kinds", ["wwwww", "ww-w-", "-hwhw"])
def test_training(world: Any, kinds: str) -> None:
    """Check training if all tensors of the program are in windows, or only some on some ranks.

    The gradients that autograd allocates are never in windows.
    """
    world.run(training, kinds)


def test_written_again() -> None:
    """Check that autograd finds a window that a later step has written before backward."""
    with epic.torch.Group(**{**SIZES, "num_ranks": 1}) as group:
        x, w, ids, _ = Data().mine(0)
        plan = epic.torch.plan(group, LAYER, ids)
        memory = places(group, LAYER, x.shape[0], "wwww")
        rows, weights = epic.torch.dispatch(plan, x, w, out=memory[:2])
        loss = epic.torch.combine(plan, rows.sin(), weights).sum()
        epic.torch.dispatch(plan, x, w, out=memory[:2])
        assert not memory[0].requires_grad
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def mixed_shapes(rank: int) -> None:
    """Check shapes and dtypes that differ between ranks, and that a closed group leaves tensors."""
    group = group_of(4)
    x = epic.torch.window((rank, 3), torch.bfloat16, group)
    y = epic.torch.window(5, torch.int32 if rank else torch.float64, group)
    assert x.shape == (rank, 3) and x.dtype == torch.bfloat16 and y.shape == (5,)
    assert not x.any() and not y.any()
    group.close()
    assert y.fill_(1).sum() == 5
    with pytest.raises(EpicError, match="was closed"):
        epic.torch.window(5, torch.int32, group)


def test_mixed_shapes(world: Any) -> None:
    """Run it on all ranks."""
    world.run(mixed_shapes)


def test_refused() -> None:
    """Check the errors of wrong arguments."""
    with epic.torch.Group(**{**SIZES, "num_ranks": 1}) as group:
        with pytest.raises(EpicArgumentError, match="shape is -1: must be an integer from 0"):
            epic.torch.window((2, -1), torch.float32, group)
        with pytest.raises(EpicArgumentError, match=r"dtype is 'float32': must be a torch\.dtype"):
            epic.torch.window(2, "float32", group)  # type: ignore[arg-type]
        with pytest.raises(
            EpicArgumentError, match=r"shape is \(64, 1099511627776\): must have at"
        ):
            epic.torch.window((64, 1 << 40), torch.int64, group)
        with pytest.raises(EpicError, match="rank 0 has no memory for a window"):
            epic.torch.window(1 << 47, torch.uint8, group)


def test_register_refused() -> None:
    """Check the errors of wrong arguments of register_window."""
    x: Any = torch.ones(4, 6)
    with epic.torch.Group(**{**SIZES, "num_ranks": 1}) as group:
        with pytest.raises(EpicArgumentError, match="group is on CPUs: must be on GPUs"):
            epic.torch.register_window(x, group)
        with pytest.raises(EpicArgumentError, match=r"tensor is list: must be a torch\.Tensor"):
            epic.torch.register_window([1.0], group)  # type: ignore[arg-type]
        group.on_gpu = True  # the other errors are found before the call of the core
        with pytest.raises(EpicArgumentError, match="tensor is on meta: must be on cpu"):
            epic.torch.register_window(x.to("meta"), group)
        with pytest.raises(EpicArgumentError, match="tensor is not contiguous"):
            epic.torch.register_window(x.T, group)
        group.on_gpu = False
    with pytest.raises(EpicError, match="was closed"):
        epic.torch.register_window(x, group)


def no_memory(rank: int) -> str:
    """Let mapping fail on rank 1, and return the error."""
    with group_of(2, timeout_ms=60000) as group, pytest.MonkeyPatch.context() as patch:
        if group.rank == 1:

            def fail(*_: Any) -> Any:
                raise OSError(errno.ENOMEM, "Cannot allocate memory")

            patch.setattr(mmap, "mmap", fail)
        with pytest.raises(
            EpicError, match="rank 1 has no memory for a window of 32 bytes"
        ) as caught:
            epic.torch.window(8, torch.float32, group)
        return caught.value.code


def test_no_memory(world: Any) -> None:
    """Check that a rank without memory is named on all ranks, at once."""
    begin = time.monotonic()
    assert world.run(no_memory) == ["EPIC_EPEER", "EPIC_ENOMEM"] * 2
    assert time.monotonic() - begin < 50
