# SPDX-License-Identifier: Apache-2.0
"""Rows of 8-bit dtypes, which are sent but never added, and their scales."""

import torch
from torch import Tensor

from epic.errors import EpicArgumentError
from epic.options import BLOCKS, check_choice
from epic.torch.arguments import ROW_TYPES, as_rows, check_tensor, needs_gradient
from epic.torch.ops import write_out
from epic.torch.plans import Plan, rows_and_weights

# The dtypes of rows that are sent as bytes.
NARROW = (
    torch.float8_e4m3fn, torch.uint8, torch.int8, torch.float8_e5m2, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)  # fmt: skip

Carried = tuple[Tensor, Tensor | None, Tensor | None]  # rows, scales, weights of slots


def as_bytes(x: Tensor) -> Tensor:
    """Return [rows, n] of any dtype as bytes [rows, n * element size]."""
    return x.detach().contiguous().view(torch.uint8)


def out_bytes(name: str, out: Tensor | None, x: Tensor | None) -> Tensor | None:
    """Return an output tensor as bytes; None for None.

    Args:
        name: The name of the output in the error.
        out: The output, or None.
        x: What is sent. The output must have its dtype. None: nothing is sent.
    """
    if out is None or x is None:
        return out
    if out.dtype != x.dtype or not out.is_contiguous():
        raise EpicArgumentError(f"out {name} is {out.dtype}: must be {x.dtype} and contiguous")
    return out.view(torch.uint8)


def dispatch_bytes(
    plan: Plan,
    tokens: Tensor,
    scales: Tensor | None,
    weights: Tensor | None,
    zero_tail: bool = True,
    out: Carried | None = None,
) -> Carried:
    """Send rows of an 8-bit dtype, their scales and their weights to their slots.

    Args:
        plan: The plan.
        tokens: [..., hidden] in one of the dtypes in NARROW.
        scales: [..., n] of any dtype, or None.
        weights: [..., top_k], or None.
        zero_tail: As for `dispatch`.
        out: Tensors (recv, scales, slot_weights) to write and return, or None.

    Returns:
        Rows [capacity, hidden], scales [capacity, n] or None, and weights [capacity] or None.
    """
    if tokens.dtype not in NARROW:
        raise EpicArgumentError(f"tokens is {tokens.dtype}: must have an 8-bit type with scales")
    if needs_gradient(tokens, weights):
        raise EpicArgumentError(
            f"tokens is {tokens.dtype} and a gradient is required: rows of this type have no "
            "gradient; call under torch.no_grad(), or detach tokens and weights"
        )
    rows, weights = rows_and_weights(plan, tokens, weights)
    scale_rows = None if scales is None else as_rows("scales", scales, plan.num_tokens)
    spec = plan.spec
    place = (plan.capacity, spec.layer, spec.tag, int(zero_tail))
    sent = (as_bytes(rows), None if scale_rows is None else as_bytes(scale_rows), weights)
    args = (spec.group.order_token, plan.bytes, *sent, *place)
    if out is not None:
        views = (out_bytes("recv", out[0], rows), out_bytes("scales", out[1], scale_rows), out[2])
        write_out(torch.ops.epic.dispatch_bytes_out.default, args, *views)
        return out
    recv, found, slots = torch.ops.epic.dispatch_bytes.default(*args)
    received_scales = None if scale_rows is None else found.view(scale_rows.dtype)
    return recv.view(rows.dtype), received_scales, None if weights is None else slots


def check_scales(rows: Tensor, scales: Tensor, block: str) -> int:
    """Return the number of columns of a block, 128 or 32, after checking that scales fit rows."""
    size = 32 if check_choice("block", block, BLOCKS) == "1x32" else 128
    kinds = (torch.uint8, torch.float8_e8m0fnu) if size == 32 else (torch.float32,)
    shape = (rows.shape[0], -(-rows.shape[1] // size))
    if scales.dtype not in kinds or scales.shape != shape:
        raise EpicArgumentError(
            f"scales are {scales.dtype} of shape {list(scales.shape)}: must be "
            f"{' or '.join(map(str, kinds))} of shape {list(shape)} for block {block!r} and rows "
            f"of shape {list(rows.shape)}"
        )
    return size


def dequantize(rows: Tensor, scales: Tensor, dtype: torch.dtype, block: str = "1x128") -> Tensor:
    """Multiply quantized rows by their scales.

    Args:
        rows: [slots, hidden] float8_e4m3fn, as `dispatch_quantized` returns them.
        scales: [slots, blocks]: float32 with block "1x128"; uint8 or float8_e8m0fnu with "1x32".
        dtype: Dtype of the result: float32, bfloat16, float16 or float64.
        block: "1x128" or "1x32", with which the rows were quantized.

    Returns:
        The rows [slots, hidden] in that dtype.

    Raises:
        EpicArgumentError: The scales do not fit the rows, or a dtype is wrong.

    Example:
        >>> import torch, epic.torch
        >>> layer = epic.torch.Layer(num_experts=2, top_k=1)
        >>> with epic.torch.Group(num_ranks=1, max_tokens=1, max_row_bytes=512) as group:
        ...     plan = epic.torch.plan(group, layer, torch.tensor([[1]]))
        ...     rows, scales, _ = epic.torch.dispatch_quantized(plan, torch.ones(1, 128))
        >>> epic.torch.dequantize(rows, scales, torch.float32)[0, 0].item()
        1.0
    """
    check_tensor("rows", rows)
    check_tensor("scales", scales)
    if rows.dtype != torch.float8_e4m3fn or rows.dim() != 2:
        raise EpicArgumentError(
            f"rows are {rows.dtype} of shape {list(rows.shape)}: must be torch.float8_e4m3fn of "
            "shape [slots, hidden]; call view(torch.float8_e4m3fn) on bytes"
        )
    if dtype not in ROW_TYPES:
        raise EpicArgumentError(f"dtype is {dtype!r}: must be {' or '.join(map(str, ROW_TYPES))}")
    size = check_scales(rows, scales, block)
    if block == "1x32":
        octets = scales.view(torch.uint8)
        powers = torch.exp2(octets.to(torch.float32) - 127)
        scales = torch.where(octets == 255, torch.nan, powers)
    wide = scales.repeat_interleave(size, dim=1)[:, : rows.shape[1]]
    found = rows.to(torch.float32) * wide
    # A `to` that changes nothing returns its input. In torch 2.11 a compiled autograd function that
    # returns such a result has gradients of zero. So do not call it then.
    return found if dtype == torch.float32 else found.to(dtype)


def swizzle_scales(scales: Tensor) -> Tensor:
    """Return MXFP8 scales in the layout that the tensor cores of sm_100 read.

    torch calls this layout SWIZZLE_32_4_4. torch.nn.functional.scaled_grouped_mm reads it. A tile
    of the layout must not contain rows of two experts, so use Layer(alignment=128).

    Rows are padded with zeros to a multiple of 128, columns to a multiple of 4. In each tile of 128
    rows and 4 columns, the scale of row r and column c is byte 16 * (r % 32) + 4 * (r // 32) + c
    (NVIDIA, cuBLAS documentation: 1D block scaling factors layout).

    Args:
        scales: [rows, n] of a dtype of one byte, as `dispatch_quantized` returns them with block
            "1x32".

    Returns:
        [rows padded to 128, n padded to 4] float8_e8m0fnu.

    Raises:
        EpicArgumentError: The scales have another shape or dtype.

    Example:
        >>> import torch, epic.torch
        >>> epic.torch.swizzle_scales(torch.full((2, 4), 127, dtype=torch.uint8)).shape
        torch.Size([128, 4])
    """
    check_tensor("scales", scales)
    if scales.dim() != 2 or scales.element_size() != 1:
        shape = list(scales.shape)
        raise EpicArgumentError(
            f"scales is {scales.dtype} of shape {shape}: must be [rows, n] bytes of block '1x32'"
        )
    rows, columns = scales.shape
    more = (0, -columns % 4, 0, -rows % 128)
    whole = torch.nn.functional.pad(scales.view(torch.uint8), more)
    high, wide = whole.shape
    tiles = whole.view(high // 128, 4, 32, wide // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(high, wide).view(torch.float8_e8m0fnu)
