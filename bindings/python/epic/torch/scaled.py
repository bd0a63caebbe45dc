# SPDX-License-Identifier: Apache-2.0
"""Weights and rows in e4m3 with float32 scales, as the core's products on GPUs take them.

A weight has a scale for each 128 x 128 numbers, a row one for each 128.
"""

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
    """Return the number of blocks of 128; the last one may be shorter."""
    return -(-length // BLOCK)


def expand_scales(scales: Tensor, *shape: int) -> Tensor:
    """Return a scale for each element; shape: lengths of the last dimensions."""
    for i, length in enumerate(shape):
        dim = i - len(shape)
        scales = scales.repeat_interleave(BLOCK, dim=dim).narrow(dim, 0, length)
    return scales


def scale_for(largest: Tensor) -> Tensor:
    """Return the scale that maps the largest magnitude to e4m3's largest number."""
    return torch.where(largest == 0, 1.0, largest / LARGEST)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows [slots, hidden] to e4m3, as dispatch with "1x128" does; return both parts."""
    columns = x.shape[1]
    wide = torch.nn.functional.pad(x.float(), (0, blocks_of(columns) * BLOCK - columns))
    scales = scale_for(wide.unflatten(1, (-1, BLOCK)).abs().amax(-1))
    return (x.float() / expand_scales(scales, columns)).to(E4M3), scales


def quantize_weight(w: Tensor) -> tuple[Tensor, Tensor]:
    """Round [experts, n, m] to e4m3 and transpose it.

    Returns the weight [experts, m, n] and scales [experts, blocks of m, blocks of n].
    """
    turned = w.detach().mT.float()
    rows, columns = turned.shape[1:]
    missing = (0, blocks_of(columns) * BLOCK - columns, 0, blocks_of(rows) * BLOCK - rows)
    whole = torch.nn.functional.pad(turned, missing)
    tiles = whole.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    scales = scale_for(tiles.abs().amax((2, 4)))
    return (turned / expand_scales(scales, rows, columns)).to(E4M3).contiguous(), scales


def transpose_scaled(w: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return an e4m3 weight [experts, m, n] and its scales as [experts, n, m]."""
    octets = w.view(torch.uint8).mT.contiguous()
    return octets.view(E4M3), scales.mT.contiguous()


def scaled(weights: Weights) -> Weights:
    """Return weights whose expert matrices are rounded to e4m3, for experts that are not trained.

    They take half the memory of 16-bit weights, and no call has to round them. The matrices have no
    gradient; rows and biases have.

    Args:
        weights: ExpertWeights or MoeWeights in float32, bfloat16 or float16.

    Returns:
        The same type, with w_gate_up and w_down transposed in float8_e4m3fn, and their scales.

    Raises:
        EpicArgumentError: The weights are scaled already, or have another dtype.
    """
    named = weights._asdict()  # type: ignore[attr-defined]
    if named["w_gate_up"].dtype == E4M3:
        raise EpicArgumentError("weights are torch.float8_e4m3fn: must not be scaled already")
    for name in ("w_gate_up", "w_down"):
        check_floats(name, named[name])
    up, down = quantize_weight(named["w_gate_up"]), quantize_weight(named["w_down"])
    change = {"w_gate_up": up[0], "w_gate_up_scales": up[1]}
    change |= {"w_down": down[0], "w_down_scales": down[1]}
    return weights._replace(**change)  # type: ignore[attr-defined,no-any-return]
