# SPDX-License-Identifier: Apache-2.0
"""Tests flat rows (one row for each token and rank), and gradients that are sent in e4m3."""

from typing import Any

import numpy as np
import pytest
import torch

import epic.torch
from parts import ALIGN, EVEN, EXPERTS, HIDDEN, LAYER, TOP_K, UNEVEN, Data, group_of, numbers, same
from reference import relative

FLAT = epic.torch.Layer(EXPERTS, TOP_K, layout="flat")


def flat_rows(data: Data, rank: int, ep: int) -> list[tuple[int, list[int]]]:
    """Return the tokens that a rank receives, in order, and their choices on that rank."""
    local, found = EXPERTS // ep, []
    part = data.where(rank, ep)
    for token in range(part.start, part.stop):
        ids = data.ids[token].tolist()
        mine = [k for k, id_ in enumerate(ids) if id_ >= 0 and id_ // local == rank % ep]
        if mine:
            found.append((token, mine))
    return found


def check_rows(data: Data, rank: int, ep: int, rows: Any, weights: Any, experts: Any) -> None:
    """Compare the received rows exactly, including the tail."""
    wanted = flat_rows(data, rank, ep)
    for at, (token, mine) in enumerate(wanted):
        tail = TOP_K - len(mine)
        own = [int(data.ids[token, k]) % (EXPERTS // ep) for k in mine]
        assert torch.equal(rows[at], data.x[token])
        assert experts[at].tolist() == own + [-1] * tail
        assert weights[at].tolist() == [float(data.w[token, k]) for k in mine] + [0.0] * tail
    assert not rows[len(wanted) :].any() and bool((experts[len(wanted) :] == -1).all())


def flat(rank: int, ep: int, tokens: tuple[int, ...], exact: bool) -> None:
    """Dispatch flat rows, compute the weighted sum of sin(x * (local expert + 1)), and combine."""
    data = Data(tokens)
    with group_of(ep) as group:
        x, w, ids, ct = data.mine(rank)
        capacity = epic.torch.EXACT if exact else None
        plan = epic.torch.plan(group, FLAT, ids, capacity=capacity)
        rows, weights, experts = epic.torch.dispatch_flat(plan, x, w)
        check_rows(data, rank, ep, *(v.detach() for v in (rows, weights, experts)))
        if exact:
            assert rows.shape[0] == len(flat_rows(data, rank, ep))
        y = torch.sin(rows[:, None] * (experts[..., None] + 1))
        live = (experts >= 0)[..., None]
        out = epic.torch.combine(plan, (torch.where(live, y, 0) * weights[..., None]).sum(dim=1))
        got = [out.detach(), *torch.autograd.grad(out, (x, w), ct)]
        bare, none, _ = epic.torch.dispatch_flat(plan, x.detach())
        assert none is None and torch.equal(bare, rows)
    wide, wide_w, wide_ct = (v.detach().double().numpy() for v in (x, w, ct))
    chosen = ids.numpy()
    factor = (np.where(chosen >= 0, chosen % (EXPERTS // ep), 0) + 1)[..., None]
    alive = (chosen >= 0)[..., None]
    sines = np.sin(wide[:, None] * factor)
    slopes = np.cos(wide[:, None] * factor) * factor * alive * wide_w[..., None]
    wanted = [
        (sines * alive * wide_w[..., None]).sum(axis=1),
        slopes.sum(axis=1) * wide_ct,
        (sines * wide_ct[:, None]).sum(axis=2) * alive[..., 0],
    ]
    for a, b in zip(got, wanted, strict=True):
        assert relative(a.numpy(), b) < 2e-6


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_flat(world: Any, ep: int) -> None:
    """Check rows, experts and weights exactly, and the sum and its gradients against float64."""
    for tokens, exact in ((EVEN, False), (UNEVEN, False), (UNEVEN, True)):
        world.run(flat, ep, tokens, exact)


def flat_compiled(rank: int) -> None:
    """Check flat rows under torch.compile, without a graph break."""
    with group_of(4) as group:
        x, w, ids, ct = Data(UNEVEN).mine(rank)

        def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            plan = epic.torch.plan(group, FLAT, ids)
            rows, weights, _ = epic.torch.dispatch_flat(plan, x, w)
            return epic.torch.combine(plan, torch.sin(rows) * weights.sum(dim=1, keepdim=True))

        out = torch.compile(step, fullgraph=True, backend="aot_eager")(x, w)
        got = torch.autograd.grad(out, (x, w), ct)
        wanted = step(x, w)
        assert torch.equal(out, wanted)
        assert same(got, torch.autograd.grad(wanted, (x, w), ct))
    torch._dynamo.reset()


def test_flat_compiled(world: Any) -> None:
    """Run the compiled test on every rank."""
    world.run(flat_compiled)


def test_each_layout_has_its_dispatch() -> None:
    """Check that the dispatch of the wrong layout raises an error that names the right one."""
    ids, x = Data().ids, Data().x
    with epic.torch.Group(num_ranks=1, max_tokens=64, max_row_bytes=4096) as group:
        plan = epic.torch.plan(group, FLAT, ids)
        for dispatch in (epic.torch.dispatch, epic.torch.dispatch_quantized):
            with pytest.raises(epic.torch.EpicArgumentError, match="or use dispatch_flat"):
                dispatch(plan, x)
        with pytest.raises(epic.torch.EpicArgumentError, match="or use plan, then dispatch_flat"):
            epic.torch.plan_dispatch(group, FLAT, ids, x)
        with pytest.raises(epic.torch.EpicArgumentError, match="must be 'flat', or use"):
            epic.torch.dispatch_flat(epic.torch.plan(group, LAYER, ids), x)
        with pytest.raises(epic.torch.EpicArgumentError, match="slot_weights"):
            epic.torch.combine(plan, numbers(1, plan.capacity, HIDDEN), torch.ones(plan.capacity))


def rounded_gradient(rank: int, block: str, most: float) -> None:
    """Check that the output has the bits of combine, and that row gradients are rounded once."""
    with group_of(4) as group:
        x, w, ids, ct = Data(UNEVEN).mine(rank)
        plan, rows, slot = epic.torch.plan_dispatch(group, LAYER, ids, x.detach(), w.detach())
        rows, slot = rows.requires_grad_(), slot.requires_grad_()
        plain = epic.torch.combine(plan, rows, slot)
        out = epic.torch.combine(plan, rows, slot, quantize_gradient=block)
        assert torch.equal(out, plain)
        wanted = torch.autograd.grad(plain, (rows, slot), ct)
        got = torch.autograd.grad(out, (rows, slot), ct)
        for a, b in zip(got, wanted, strict=True):
            assert relative(a, b) < most
    assert torch.equal(got[0], rounded(wanted[0], block)) and torch.equal(got[1], wanted[1])
    assert not torch.equal(got[0], wanted[0])


def rounded(rows: torch.Tensor, block: str) -> torch.Tensor:
    """Round rows as dispatch does."""
    size = rows.shape[0]
    with epic.torch.Group(num_ranks=1, max_tokens=size, max_row_bytes=4096) as alone:
        ids = torch.zeros(size, 1, dtype=torch.int32)
        plan = epic.torch.plan(alone, epic.torch.Layer(1, 1), ids)
        return epic.torch.dispatch(plan, rows, quantize=block)[0]


@pytest.mark.parametrize(("block", "most"), [("1x128", 16 / 448), ("1x32", 16 / 224)])
def test_quantized_gradient_of_combine(world: Any, block: str, most: float) -> None:
    """Check quantized gradients with both block sizes."""
    assert ALIGN > 1  # so that there is padding, whose gradient must be 0
    world.run(rounded_gradient, block, 1.001 * most)
