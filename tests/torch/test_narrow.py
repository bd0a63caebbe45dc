# SPDX-License-Identifier: Apache-2.0
"""Tests 8-bit rows that the caller has quantized, and their scales, byte by byte against numpy."""

from typing import Any

import numpy as np
import pytest
import torch

import epic.torch
from epic.errors import EpicArgumentError
from epic.torch.narrow import NARROW
from parts import ALIGN, EXPERTS, HIDDEN, LAYER, SIZES, TOP_K, UNEVEN, Data, group_of
from reference import slots_of

BLOCKS = 3  # number of scales of a row
SCALES = (torch.float32, torch.float8_e8m0fnu, torch.uint8, torch.bfloat16)


def octets(seed: int, *shape: int) -> torch.Tensor:
    """Return random bytes, including 0xff."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, np.uint8))


def placed(choices: Any, x: torch.Tensor, capacity: int) -> torch.Tensor:
    """Return the bytes of x's rows in their slots, with zeros in empty slots."""
    rows = x.contiguous().view(torch.uint8)
    out = torch.zeros(capacity, rows.shape[1], dtype=torch.uint8)
    for i, (token, _) in enumerate(choices):
        if token >= 0:
            out[i] = rows[token]
    return out


def carried(rank: int) -> None:
    """Send rows of every 8-bit type, with scales of every type and without scales."""
    data = Data(UNEVEN)
    part, count = data.where(rank), sum(UNEVEN)
    with group_of(4) as group:
        plan = epic.torch.plan(group, LAYER, data.ids[part])
        choices = slots_of(data.ids.numpy(), rank, 4, EXPERTS, ALIGN).choices
        weights = torch.zeros(plan.capacity)
        for i, (t, k) in enumerate(choices):
            if t >= 0:
                weights[i] = data.w[t, k]
        for i, dtype in enumerate(NARROW):
            x = octets(i, count, HIDDEN).view(dtype)
            w = None if i % 2 else data.w[part]
            recv, slot = epic.torch.dispatch(plan, x[part], w)
            assert recv.dtype == dtype
            assert torch.equal(recv.view(torch.uint8), placed(choices, x, plan.capacity))
            assert slot is None if i % 2 else torch.equal(slot, weights)
            kind = SCALES[i % len(SCALES)]
            s = octets(9 + i, count, BLOCKS * kind.itemsize).view(kind)
            recv, scales, slot = epic.torch.dispatch_quantized(plan, x[part], w, scales=s[part])
            assert (recv.dtype, scales.dtype, scales.shape) == (
                dtype,
                kind,
                (plan.capacity, BLOCKS),
            )
            assert torch.equal(recv.view(torch.uint8), placed(choices, x, plan.capacity))
            assert torch.equal(scales.view(torch.uint8), placed(choices, s, plan.capacity))
            assert slot is None if i % 2 else torch.equal(slot, weights)


def test_carried(world: Any) -> None:
    """Check ranks with different numbers of tokens, one of them with none."""
    world.run(carried)


def test_strides_compiled_and_out() -> None:
    """Check rows that are not contiguous, in a compiled function, written into existing memory."""
    with epic.torch.Group(**{**SIZES, "num_ranks": 1}) as group, torch.no_grad():
        x, ids = octets(1, 6, HIDDEN).view(torch.float8_e4m3fn), Data().ids[:6]
        s, w = torch.rand(6, 2), torch.rand(6, TOP_K)
        plan = epic.torch.plan(group, LAYER, ids)
        wanted: Any = epic.torch.dispatch_quantized(plan, x, w, scales=s)

        def bits(parts: Any) -> list[torch.Tensor]:
            return [part.view(torch.uint8) for part in parts]

        def agree(parts: Any) -> bool:
            return all(map(torch.equal, bits(parts), bits(wanted)))

        turned = x.view(torch.uint8).mT.contiguous().mT.view(torch.float8_e4m3fn)
        columns = s.mT.contiguous().mT.reshape(3, 2, 2)
        assert agree(epic.torch.dispatch_quantized(plan, turned, w, scales=columns))
        compiled = torch.compile(epic.torch.dispatch_quantized, backend="aot_eager", fullgraph=True)
        assert agree(compiled(plan, x, w, scales=s))
        out = tuple(torch.full_like(part.view(torch.uint8), 7).view(part.dtype) for part in wanted)
        found = epic.torch.dispatch_quantized(plan, x, w, scales=s, out=out)
        assert all(a is b for a, b in zip(found, out, strict=True)) and agree(out)
        rows = torch.empty_like(out[0])
        assert epic.torch.dispatch(plan, x, out=(rows, None))[0] is rows
        assert torch.equal(rows.view(torch.uint8), wanted[0].view(torch.uint8))


WRONG: dict[str, Any] = {
    "tokens is torch.float32: must have an 8-bit type": lambda t, p, x, s: t.dispatch_quantized(
        p, x.float(), scales=s
    ),
    "tokens are already torch.float8_e4m3fn": lambda t, p, x, s: t.dispatch(p, x, quantize="1x32"),
    "scales has the shape [5, 2]: must have 6 rows": lambda t, p, x, s: t.dispatch_quantized(
        p, x, scales=s[:5]
    ),
    "rows of this type have no gradient": lambda t, p, x, s: t.dispatch(
        p, x, torch.ones(6, TOP_K, requires_grad=True)
    ),
    "out scales is torch.float64: must be torch.float32": lambda t, p, x, s: t.dispatch_quantized(
        p, x, scales=s, out=(torch.empty(216, HIDDEN).to(x), s.double(), None)
    ),
    "out recv is torch.float32": lambda t, p, x, s: t.dispatch(
        p, x, out=(torch.empty(216, HIDDEN), None)
    ),
    "out is a tuple: must be (recv, scales, slot_weights)": lambda t, p, x, s: t.dispatch_quantized(
        p, x, scales=s, out=(x, s)
    ),
}


@pytest.mark.parametrize("text", WRONG)
def test_refused(text: str) -> None:
    """Check that the error has the expected text and the group stays usable."""
    with epic.torch.Group(**{**SIZES, "num_ranks": 1}) as group:
        x, s = octets(1, 6, HIDDEN).view(torch.float8_e4m3fn), torch.rand(6, 2)
        plan = epic.torch.plan(group, LAYER, Data().ids[:6])
        with pytest.raises(EpicArgumentError) as caught:
            WRONG[text](epic.torch, plan, x, s)
        assert text in str(caught.value)
        assert epic.torch.dispatch(plan, x)[0].shape == (plan.capacity, HIDDEN)


@pytest.mark.parametrize("shape", [(128, 4), (256, 12), (130, 5), (0, 4), (1, 1)])
def test_swizzled(shape: tuple[int, int]) -> None:
    """Compare the swizzled scales with the documented layout, byte by byte."""
    scales = octets(3, *shape)
    found = epic.torch.swizzle_scales(scales)
    high, wide = -(-shape[0] // 128) * 128, -(-shape[1] // 4) * 4
    wanted = torch.zeros(high * wide, dtype=torch.uint8)
    for r in range(shape[0]):
        for c in range(shape[1]):
            tile = r // 128 * (wide // 4) + c // 4
            at = tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
            wanted[at] = scales[r, c]
    assert found.shape == (high, wide) and found.dtype == torch.float8_e8m0fnu
    assert torch.equal(found.view(torch.uint8).view(-1), wanted)


def test_swizzled_refuses() -> None:
    """Check that scales that are not bytes of whole blocks are refused."""
    with pytest.raises(
        EpicArgumentError, match=r"torch.float32 of shape \[4, 4\]: must be \[rows, n\] bytes"
    ):
        epic.torch.swizzle_scales(torch.ones(4, 4))
