# SPDX-License-Identifier: Apache-2.0
"""Tests weights in e4m3 and MXFP8: their values, against numpy, and what is refused.

Their products run only on GPUs: see emulated.py and gpu."""

import numpy as np
import pytest
import torch

import epic.torch
from epic.errors import EpicArgumentError, EpicUnsupportedError
from epic.torch.scaled import quantize_rows

HIDDEN, INNER = 200, 144  # not multiples of 128


def mx_weight(seed: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Return e4m3 numbers, e8m0 scales for 32 columns as bytes, and the values in float64."""
    rng = np.random.default_rng(seed)
    octets = rng.integers(0, 127, shape, np.uint8) | (rng.integers(0, 2, shape, np.uint8) << 7)
    scales = rng.integers(100, 140, (*shape[:-1], -(-shape[-1] // 32)), np.uint8)
    wide = 2.0 ** (scales.astype(np.float64).repeat(32, axis=-1)[..., : shape[-1]] - 127)
    q = torch.from_numpy(octets).view(torch.float8_e4m3fn)
    return q, torch.from_numpy(scales), q.double().numpy() * wide


def rounded(x: np.ndarray) -> np.ndarray:
    """Return [experts, n, m] rounded to e4m3 with one float32 scale for 128 x 128, in float64."""
    out = np.empty_like(x)
    for e in range(x.shape[0]):
        for i in range(0, x.shape[1], 128):
            for j in range(0, x.shape[2], 128):
                block = (e, slice(i, i + 128), slice(j, j + 128))
                scale = np.float32(np.float32(np.abs(x[block]).max()) / np.float32(448))
                quotient = torch.from_numpy(x[block].astype(np.float32) / scale)
                q = quotient.to(torch.float8_e4m3fn).double().numpy()
                out[block] = q * np.float64(scale)
    return out


@pytest.mark.parametrize("kind", [torch.uint8, torch.float8_e8m0fnu])
def test_mxfp8(kind: torch.dtype) -> None:
    """MXFP8 weights become bfloat16 exactly, and e4m3 in blocks of 128 x 128."""
    up, up_scales, up_values = mx_weight(1, 2, 2 * INNER, HIDDEN)
    down, down_scales, down_values = mx_weight(2, 2, HIDDEN, INNER)
    scales = (up_scales.view(kind), down_scales.view(kind))
    given = epic.torch.ExpertWeights(up, down, None, None, *scales)
    for dtype in (torch.float32, torch.bfloat16):
        found = epic.torch.unscaled(given, dtype)
        assert found.w_gate_up_scales is None and found.w_down_scales is None
        for got, values in ((found.w_gate_up, up_values), (found.w_down, down_values)):
            assert got.dtype == dtype
            assert np.array_equal(got.double().numpy(), np.swapaxes(values, 1, 2))
    kept = epic.torch.scaled(given)
    assert kept.w_gate_up.dtype == torch.float8_e4m3fn
    back = epic.torch.unscaled(kept, torch.float32)
    for got, values in ((back.w_gate_up, up_values), (back.w_down, down_values)):
        wanted = np.swapaxes(rounded(values), 1, 2).astype(np.float32)
        assert np.array_equal(got.numpy(), wanted)


def test_tiny_numbers() -> None:
    """Numbers that are too small for a scale become zeros, in weights and in rows."""
    w = torch.zeros(1, 128, 256)
    w[0, 0, 0] = 1e-43
    found = epic.torch.scaled(epic.torch.ExpertWeights(w, w.mT))
    back = epic.torch.unscaled(found, torch.float32)
    assert torch.equal(back.w_gate_up, torch.zeros(1, 128, 256))
    assert torch.equal(back.w_down, torch.zeros(1, 256, 128))
    layer = epic.torch.Layer(num_experts=1, top_k=1)
    with epic.torch.Group(num_ranks=1, max_tokens=128, max_row_bytes=1024) as group:
        plan = epic.torch.plan(group, layer, torch.zeros(128, 1, dtype=torch.int32))
        rows, scales, _ = epic.torch.dispatch_quantized(plan, w[0])
    ours = quantize_rows(w[0])
    assert torch.equal(rows.float(), ours[0].float()) and torch.equal(scales, ours[1])


def test_refused() -> None:
    """Check the errors: products of MXFP8, scales that do not fit, weights that are not e4m3."""
    up, up_scales, _ = mx_weight(1, 2, 2 * INNER, HIDDEN)
    down, down_scales, _ = mx_weight(2, 2, HIDDEN, INNER)
    given = epic.torch.ExpertWeights(up, down, None, None, up_scales, down_scales)
    options = epic.torch.Experts(hidden=HIDDEN, inner=INNER)
    counts = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(EpicUnsupportedError, match="MXFP8 weights are not supported, because"):
        epic.torch.experts(options, torch.ones(4, HIDDEN), counts, counts, given)
    with pytest.raises(EpicArgumentError, match=r"w_down_scales is torch.uint8 of shape \[2, 200"):
        epic.torch.scaled(given._replace(w_down_scales=down_scales[:, :, 1:]))
    with pytest.raises(EpicArgumentError, match=r"w_gate_up has the shape \[200, 288\]: must be"):
        epic.torch.scaled(epic.torch.ExpertWeights(up[0].float().T, down.float()))
    with pytest.raises(EpicArgumentError, match="w_down_scales is None: must be"):
        epic.torch.unscaled(given._replace(w_down_scales=None), torch.float32)
    with pytest.raises(EpicArgumentError, match=r"w_gate_up is torch\.bfloat16"):
        epic.torch.unscaled(given._replace(w_gate_up=up.bfloat16()), torch.float32)
    with pytest.raises(EpicArgumentError, match=r"dtype is torch\.int32: must be float32"):
        epic.torch.unscaled(given, torch.int32)
