# SPDX-License-Identifier: Apache-2.0
"""Weights and rows of e4m3: a float32 scale for each 128 x 128 numbers of a weight, and for each
128 of a row, as the core's products take them (CUDA contexts)."""

from typing import TypeVar

import torch
from torch import Tensor

from epic.errors import EpicArgumentError
from epic.torch.arguments import check_floats

BLOCK = 128
LARGEST = 448.0
E4M3 = torch.float8_e4m3fn

Weights = TypeVar("Weights", bound=tuple)  # type: ignore[type-arg]  # ExpertWeights or MoeWeights


def blocks_of(length: int) -> int:
    """Of 128, the last one of what is left."""
    return -(-length // BLOCK)


def expand_scales(scales: Tensor, *shape: int) -> Tensor:
    """A scale for each element of the last dimensions, whose lengths are the shape."""
    for i, length in enumerate(shape):
        dim = i - len(shape)
        scales = scales.repeat_interleave(BLOCK, dim=dim).narrow(dim, 0, length)
    return scales


def scale_for(largest: Tensor) -> Tensor:
    """That brings it to e4m3's largest."""
    return torch.where(largest == 0, 1.0, largest / LARGEST)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[slots, hidden] as e4m3 and scales [slots, blocks], as dispatch with "1x128" does it."""
    columns = x.shape[1]
    wide = torch.nn.functional.pad(x.float(), (0, blocks_of(columns) * BLOCK - columns))
    scales = scale_for(wide.unflatten(1, (-1, BLOCK)).abs().amax(-1))
    return (x.float() / expand_scales(scales, columns)).to(E4M3), scales


def quantize_weight(w: Tensor) -> tuple[Tensor, Tensor]:
    """[experts, n, m] as e4m3 [experts, m, n], turned, and scales [experts, blocks of m, blocks of
    n]."""
    turned = w.detach().mT.float()
    rows, columns = turned.shape[1:]
    missing = (0, blocks_of(columns) * BLOCK - columns, 0, blocks_of(rows) * BLOCK - rows)
    whole = torch.nn.functional.pad(turned, missing)
    tiles = whole.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    scales = scale_for(tiles.abs().amax((2, 4)))
    return (turned / expand_scales(scales, rows, columns)).to(E4M3).contiguous(), scales


def transpose_scaled(w: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The same numbers, [experts, m, n] as [experts, n, m]."""
    octets = w.view(torch.uint8).mT.contiguous()
    return octets.view(E4M3), scales.mT.contiguous()


def scaled(weights: Weights) -> Weights:
    """ExpertWeights or MoeWeights with the experts' products in e4m3, for weights that stay as they
    are: half the memory of 16 bits, and nothing to round at each call.  They have no gradient; rows
    and biases have."""
    named = weights._asdict()  # type: ignore[attr-defined]
    if named["w_gate_up"].dtype == E4M3:
        raise EpicArgumentError("weights: dtype torch.float8_e4m3fn: they are scaled already")
    for name in ("w_gate_up", "w_down"):
        check_floats(name, named[name])
    up, down = quantize_weight(named["w_gate_up"]), quantize_weight(named["w_down"])
    change = {"w_gate_up": up[0], "w_gate_up_scales": up[1]}
    change |= {"w_down": down[0], "w_down_scales": down[1]}
    return weights._replace(**change)  # type: ignore[attr-defined,no-any-return]
