# SPDX-License-Identifier: Apache-2.0
"""Weights and rows in e4m3 with float32 scales, for the products of EPIC's experts on GPUs.

A weight has one scale for each block of 128 x 128 numbers. A row has one scale for each 128
numbers. The value of a number is the e4m3 number times its scale.
Weights in MXFP8, with one power of two for each 32 numbers, are converted.
"""

from typing import Any, TypeVar

import torch
from torch import Tensor

from epic.errors import EpicArgumentError
from epic.torch.arguments import check_floats, check_tensor

BLOCK = 128
LARGEST = 448.0  # largest number in e4m3
E4M3 = torch.float8_e4m3fn
MX_BLOCK = 32  # numbers that share a scale in MXFP8
MX_SCALES = (torch.uint8, torch.float8_e8m0fnu)

Weights = TypeVar("Weights", bound=tuple)  # type: ignore[type-arg]  # ExpertWeights or MoeWeights


def blocks_of(length: int) -> int:
    """Return the number of blocks of 128 that `length` numbers have; the last may be shorter."""
    return -(-length // BLOCK)


def expand_scales(scales: Tensor, *shape: int) -> Tensor:
    """Return scales of blocks as one scale for each number.

    Args:
        scales: [..., blocks] or [..., blocks, blocks].
        *shape: Length of each dimension that is divided into blocks, the last dimension last.

    Returns:
        [..., *shape].
    """
    for i, length in enumerate(shape):
        dim = i - len(shape)
        scales = scales.repeat_interleave(BLOCK, dim=dim).narrow(dim, 0, length)
    return scales


def scale_for(largest: Tensor) -> Tensor:
    """Return the scale of blocks by their largest magnitudes, which it maps to 448.

    It is 1 for zeros, and for magnitudes so small that the quotient is zero.
    """
    scale = largest / LARGEST
    return torch.where(scale == 0, 1.0, scale)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows to e4m3, as dispatch does with quantize="1x128".

    Args:
        x: [slots, hidden], any dtype of floating point.

    Returns:
        Rows [slots, hidden] float8_e4m3fn, and scales [slots, blocks of hidden] float32.
    """
    columns = x.shape[1]
    wide = torch.nn.functional.pad(x.float(), (0, blocks_of(columns) * BLOCK - columns))
    scales = scale_for(wide.unflatten(1, (-1, BLOCK)).abs().amax(-1))
    return (x.float() / expand_scales(scales, columns)).to(E4M3), scales


def quantize_weight(w: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight of experts to e4m3 and transpose it.

    Args:
        w: [experts, n, m], any dtype of floating point.

    Returns:
        The weight [experts, m, n] float8_e4m3fn, and scales [experts, blocks of m, blocks of n]
        float32.
    """
    turned = w.detach().mT.float()
    rows, columns = turned.shape[1:]
    missing = (0, blocks_of(columns) * BLOCK - columns, 0, blocks_of(rows) * BLOCK - rows)
    whole = torch.nn.functional.pad(turned, missing)
    tiles = whole.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    scales = scale_for(tiles.abs().amax((2, 4)))
    return (turned / expand_scales(scales, rows, columns)).to(E4M3).contiguous(), scales


def transpose_scaled(w: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Transpose the last two dimensions of an e4m3 weight [experts, m, n] and of its scales."""
    octets = w.view(torch.uint8).mT.contiguous()
    return octets.view(E4M3), scales.mT.contiguous()


def check_weight_scales(name: str, w: Tensor, scales: Any) -> None:
    """Check that scales are those of 128 x 128 blocks or of MXFP8."""
    experts, rows, columns = w.shape
    whole = (experts, blocks_of(rows), blocks_of(columns))
    thin = (experts, rows, -(-columns // MX_BLOCK))
    is_ = repr(scales)
    fits = False
    if isinstance(scales, Tensor):
        is_ = f"{scales.dtype} of shape {list(scales.shape)}"
        fits = scales.shape == whole and scales.dtype == torch.float32
        fits = fits or (scales.shape == thin and scales.dtype in MX_SCALES)
    if not fits:
        raise EpicArgumentError(
            f"{name}_scales is {is_}: must be torch.float32 of shape {list(whole)}, or "
            f"torch.uint8 or torch.float8_e8m0fnu of shape {list(thin)}"
        )


def weight_values(w: Tensor, scales: Tensor) -> Tensor:
    """Return an e4m3 weight [experts, m, n] times its scales, in float32.

    For MXFP8 scales the result is exact.
    """
    rows, columns = w.shape[1:]
    if scales.dtype == torch.float32:
        return w.float() * expand_scales(scales, rows, columns)
    octets = scales.view(torch.uint8).repeat_interleave(MX_BLOCK, dim=2)[..., :columns].int()
    found = torch.ldexp(w.float(), octets - 127)
    return torch.where(octets == 255, torch.nan, found)


def unscaled(weights: Weights, dtype: torch.dtype) -> Weights:
    """Return weights in e4m3 as weights of a float type, which every group computes with.

    In float32 and bfloat16 the result is exact for MXFP8 weights (e4m3 values with one power-of-two
    scale for each 32), unless a value is too small for the type.

    Args:
        weights: ExpertWeights or MoeWeights with w_gate_up [experts, width, hidden] and w_down
            [experts, hidden, inner] in float8_e4m3fn, and their scales: float32 as `scaled` makes
            them, or uint8 or float8_e8m0fnu [experts, rows, columns / 32] (MXFP8).
        dtype: torch.float32, bfloat16 or float16.

    Returns:
        The same type, with w_gate_up [experts, hidden, width] and w_down [experts, inner, hidden]
        in that dtype, without scales.

    Raises:
        EpicArgumentError: The weights are not e4m3, or the scales do not fit them.

    Example:
        >>> import torch, epic.torch
        >>> weights = epic.torch.ExpertWeights(torch.ones(2, 256, 512), torch.ones(2, 256, 256))
        >>> found = epic.torch.unscaled(epic.torch.scaled(weights), torch.float32)
        >>> torch.equal(found.w_gate_up, weights.w_gate_up)
        True
    """
    named = fields_of(weights)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise EpicArgumentError(f"dtype is {dtype}: must be float32, bfloat16 or float16")
    change: dict[str, Any] = {}
    for name in ("w_gate_up", "w_down"):
        w = named[name]
        check_tensor(name, w)
        if w.dtype != E4M3 or w.dim() != 3:
            raise EpicArgumentError(
                f"{name} is {w.dtype} of shape {list(w.shape)}: must be {E4M3} of shape "
                "[experts, rows, columns]"
            )
        check_weight_scales(name, w, named[name + "_scales"])
        values = weight_values(w.detach(), named[name + "_scales"])
        change[name] = values.mT.to(dtype).contiguous()
        change[name + "_scales"] = None
    return weights._replace(**change)  # type: ignore[attr-defined,no-any-return]


def fields_of(weights: Any) -> dict[str, Any]:
    """Return the fields of ExpertWeights or MoeWeights, after checking the class."""
    if not hasattr(weights, "w_gate_up_scales"):
        kind = type(weights).__name__
        raise EpicArgumentError(f"weights is a {kind}: must be ExpertWeights or MoeWeights")
    return weights._asdict()  # type: ignore[no-any-return]


def has_mx_scales(weights: Any) -> bool:
    """Return whether the scales of weights are those of MXFP8."""
    scales = (weights.w_gate_up_scales, weights.w_down_scales)
    return any(isinstance(x, Tensor) and x.dtype in MX_SCALES for x in scales)


def scaled(weights: Weights) -> Weights:
    """Round the matrices of experts to e4m3 with scales, for experts that are not trained.

    The rounded matrices take half the memory of 16-bit weights, and later calls do not round them
    again. They have no gradient; rows and biases have one.

    Args:
        weights: ExpertWeights or MoeWeights, whose w_gate_up and w_down are float32, bfloat16,
            float16 or float64; or MXFP8, as `unscaled` describes it. Products on Hopper take no
            MXFP8 weights, so these are rounded a second time, to blocks of 128 x 128.

    Returns:
        Weights of the type that was passed. w_gate_up and w_down are transposed and in
        float8_e4m3fn. w_gate_up_scales and w_down_scales are set. All other fields are unchanged.

    Raises:
        EpicArgumentError: w_gate_up is float8_e4m3fn already, or a matrix has another dtype.

    Example:
        >>> import torch, epic.torch
        >>> weights = epic.torch.ExpertWeights(torch.ones(2, 256, 512), torch.ones(2, 256, 256))
        >>> found = epic.torch.scaled(weights)
        >>> found.w_gate_up.dtype, found.w_gate_up.shape, found.w_gate_up_scales.shape
        (torch.float8_e4m3fn, torch.Size([2, 512, 256]), torch.Size([2, 4, 2]))
    """
    named = fields_of(weights)
    if has_mx_scales(weights):
        named = fields_of(unscaled(weights, torch.float32))
    if named["w_gate_up"].dtype == E4M3:
        raise EpicArgumentError("weights are torch.float8_e4m3fn: must not be scaled already")
    for name in ("w_gate_up", "w_down"):
        check_floats(name, named[name])
        if named[name].dim() != 3:
            raise EpicArgumentError(
                f"{name} has the shape {list(named[name].shape)}: must be [experts, n, m]"
            )
    up, down = quantize_weight(named["w_gate_up"]), quantize_weight(named["w_down"])
    change = {"w_gate_up": up[0], "w_gate_up_scales": up[1]}
    change |= {"w_down": down[0], "w_down_scales": down[1]}
    return weights._replace(**change)  # type: ignore[attr-defined,no-any-return]
