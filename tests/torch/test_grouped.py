# SPDX-License-Identifier: Apache-2.0
"""Tests rows that stay in e4m3: their bits, their parts by expert and their gradient."""

from typing import Any

import pytest
import torch

import epic.torch
from epic.errors import EpicArgumentError, EpicUnsupportedError
from parts import EXPERTS, LAYER, SIZES, TOP_K, UNEVEN, Data, group_of, numbers, same


class GroupedProduct(torch.autograd.Function):
    """A product of the caller that takes e4m3 rows, and returns a gradient of usual type."""

    @staticmethod
    def forward(
        ctx: Any, carrier: torch.Tensor, rows: epic.torch.GroupedRows, w: torch.Tensor
    ) -> torch.Tensor:
        """Multiply the rows of each expert by its matrix."""
        assert not carrier.any() and carrier.untyped_storage().nbytes() <= 8
        ctx.ends = rows.ends.tolist()
        ctx.save_for_backward(w)
        out = torch.zeros(carrier.shape[0], w.shape[2], dtype=carrier.dtype)
        begin = 0
        for e, (data, scales) in enumerate(rows.split()):
            values = epic.torch.dequantize(data, scales, carrier.dtype, rows.block)
            out[begin : begin + data.shape[0]] = values @ w[e]
            begin += data.shape[0]
        assert begin == ctx.ends[-1]
        return out

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradient of the rows for the carrier."""
        (w,) = ctx.saved_tensors
        d_rows, begin = torch.zeros(d_out.shape[0], w.shape[1], dtype=d_out.dtype), 0
        for e, end in enumerate(ctx.ends):
            d_rows[begin:end] = d_out[begin:end] @ w[e].T
            begin = end
        return d_rows, None, None


def steps(rank: int) -> None:
    """Compare with dispatch(quantize=), whose rows are not in e4m3."""
    with group_of(4) as group:
        x, w, ids, ct = Data(UNEVEN).mine(rank)
        local = EXPERTS // 4
        matrices = numbers(6, local, x.shape[1], x.shape[1])
        for block in ("1x128", "1x32"):
            plan = epic.torch.plan(group, LAYER, ids)
            rows, slots = epic.torch.dispatch_grouped(plan, x, w, block)
            assert slots is not None
            raw = epic.torch.dispatch_quantized(plan, x, w, block)
            assert same((rows.data, rows.scales, slots.detach()), raw)
            ends = plan.expert_rows.cumsum(0)
            assert rows.ends.dtype == torch.int32 and torch.equal(rows.ends, ends.int())
            plain, weights = epic.torch.dispatch(plan, x, w, quantize=block)
            assert same(rows.dequantize().detach(), plain.detach())
            sizes = [0, *ends.tolist()]
            y = torch.zeros_like(plain)
            for e in range(local):
                part = slice(sizes[e], sizes[e + 1])
                y = y.index_add(0, torch.arange(sizes[e], sizes[e + 1]), plain[part] @ matrices[e])
            wanted = torch.autograd.grad(epic.torch.combine(plan, y, weights), (x, w), ct)
            product = GroupedProduct.apply(rows.carrier, rows, matrices)
            assert torch.allclose(product, y)
            home = epic.torch.combine(plan, product, slots)
            for a, b in zip(torch.autograd.grad(home, (x, w), ct), wanted, strict=True):
                assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)
            again, slots = epic.torch.dispatch_grouped(plan, x, None, block)
            assert slots is None
            home = epic.torch.combine(plan, again.dequantize())
            other = epic.torch.combine(plan, epic.torch.dispatch(plan, x, quantize=block)[0])
            pair = [torch.autograd.grad(out, x, ct)[0] for out in (home, other)]
            assert same(*pair)


def test_steps(world: Any) -> None:
    """Run it on all ranks."""
    world.run(steps)


def compiled(rank: int) -> None:
    """Check one compiled graph, forward and backward."""
    with group_of(4) as group:
        x, w, ids, ct = Data(UNEVEN).mine(rank)

        def step(x: Any, w: Any, ids: Any) -> Any:
            plan = epic.torch.plan(group, LAYER, ids)
            rows, slots = epic.torch.dispatch_grouped(plan, x, w)
            return epic.torch.combine(plan, rows.dequantize().sin(), slots)

        found = []
        for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
            out = run(x, w, ids)
            found.append([out.detach(), *torch.autograd.grad(out, (x, w), ct)])
        assert same(*found)
    torch._dynamo.reset()


def test_compiled(world: Any) -> None:
    """Run it on all ranks."""
    world.run(compiled)


def test_refused() -> None:
    """Check the errors of a wrong layout, block and dtype."""
    x, ids = numbers(1, 4, 20), torch.zeros(4, TOP_K, dtype=torch.int32)
    flat = epic.torch.Layer(EXPERTS, TOP_K, layout="flat")
    with epic.torch.Group(**{**SIZES, "num_ranks": 1}) as group:
        plan = epic.torch.plan(group, LAYER, ids)
        with pytest.raises(EpicArgumentError, match="block is '1x64': must be one of"):
            epic.torch.dispatch_grouped(plan, x, block="1x64")
        with pytest.raises(EpicUnsupportedError, match=r"tokens is torch\.float64"):
            epic.torch.dispatch_grouped(plan, x.double())
        with pytest.raises(EpicArgumentError, match="layout is 'flat'"):
            epic.torch.dispatch_grouped(epic.torch.plan(group, flat, ids), x)
        with pytest.raises(EpicArgumentError, match="must have 4 rows"):
            epic.torch.dispatch_grouped(plan, x[:3])
