# SPDX-License-Identifier: Apache-2.0
"""Received rows that stay in e4m3 for a grouped product, and that have a gradient."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from epic.torch.arguments import EpicFunction, first_order_only, make_apply, mark_no_offload
from epic.torch.narrow import dequantize
from epic.torch.ops import translate_errors
from epic.torch.plans import Plan, limit_plan, rows_and_weights, wrong_layout
from epic.torch.steps import as_block, dispatch_quantized_op, save_plan, token_gradients


class GroupedRows(NamedTuple):
    """Rows in e4m3, sorted by expert, as `dispatch_grouped` returns them.

    A grouped product takes `data`, `scales` and `ends`. Autograd does not see these. So an
    autograd.Function that multiplies them also takes `carrier`, and returns the gradient of the
    rows as the gradient of `carrier`.

    Attributes:
        data: [capacity, hidden] float8_e4m3fn.
        scales: [capacity, blocks] float32 with block "1x128", uint8 (e8m0) with "1x32".
        ends: [local experts] int32: the slot after the last slot of each expert, as `offs` of
            torch.nn.functional.grouped_mm.
        carrier: [capacity, hidden] in the dtype of the tokens: zeros without memory.
        block: "1x128" or "1x32".
    """

    data: Tensor
    scales: Tensor
    ends: Tensor
    carrier: Tensor
    block: str

    def dequantize(self) -> Tensor:
        """Return the rows multiplied by their scales, in the dtype of the tokens.

        Their gradient is that of the rows: it ignores the rounding.

        Returns:
            [capacity, hidden].
        """
        return straight_through_apply(self.carrier, self.data, self.scales, self.block)

    def split(self) -> list[tuple[Tensor, Tensor]]:
        """Return the data and scales of each expert as views. On GPUs the host waits.

        Returns:
            For each local expert ([rows, hidden] float8_e4m3fn, [rows, blocks]).
        """
        ends = self.ends.tolist()
        parts = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]
        return [(self.data[part], self.scales[part]) for part in parts]


class StraightThrough(EpicFunction):
    """The values of quantized rows, whose gradient goes to the carrier."""

    @staticmethod
    def forward(carrier: Tensor, data: Tensor, scales: Tensor, block: str) -> Tensor:
        """Multiply the rows by their scales."""
        return dequantize(data, scales, carrier.dtype, block)

    @staticmethod
    def setup_context(*_: Any) -> None:
        """Save nothing."""

    @staticmethod
    def backward(_: Any, d_rows: Tensor) -> tuple[Any, ...]:
        """Return the gradient unchanged."""
        return d_rows, None, None, None


straight_through_apply = make_apply(StraightThrough)


class DispatchGrouped(EpicFunction):
    """dispatch_quantized with the gradient of dispatch, which arrives at the carrier."""

    @staticmethod
    def forward(
        plan: Plan, data: Tensor, tokens: Tensor, weights: Tensor | None, block: str
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Call the operator, and make the carrier."""
        rows, scales, slots = dispatch_quantized_op(plan, data, tokens, weights, block)
        return rows, scales, slots, tokens.new_zeros(()).expand(rows.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], out: tuple[Tensor, ...]) -> None:
        """Save the plan only."""
        plan, data, tokens, *_ = inputs
        ctx.mark_non_differentiable(*out[:2])
        mark_no_offload(data)
        save_plan(ctx, plan.spec, data, tokens)

    @staticmethod
    @first_order_only
    @translate_errors
    def backward(ctx: Any, _: Any, __: Any, d_slots: Tensor, d_rows: Tensor) -> tuple[Any, ...]:
        """Return the gradients of tokens and weights."""
        return None, None, *token_gradients(ctx, d_rows.contiguous(), d_slots), None


dispatch_grouped_apply = make_apply(DispatchGrouped)


@translate_errors
def dispatch_grouped(
    plan: Plan,
    tokens: Tensor,
    weights: Tensor | None = None,
    block: str = "1x128",
    *,
    max_sms: int | None = None,
) -> tuple[GroupedRows, Tensor | None]:
    """Send tokens in e4m3, as `dispatch_quantized` does, with the gradient of `dispatch`.

    Args:
        plan: The plan.
        tokens: [..., hidden] in float32, bfloat16 or float16.
        weights: Weight of each choice [..., top_k], or None.
        block: As for `dispatch_quantized`.
        max_sms: As for `dispatch`.

    Returns:
        GroupedRows, and the weight of each slot [capacity] float32 or None.

    Raises:
        EpicArgumentError: A shape, dtype or device is wrong.
        EpicUnsupportedError: tokens are float64.
        EpicError: A rank failed, was late, or made a different call.

    Example:
        >>> import torch, epic.torch
        >>> layer = epic.torch.Layer(num_experts=2, top_k=1)
        >>> ids = torch.tensor([[1], [0], [1]], dtype=torch.int32)
        >>> x = torch.ones(3, 128, requires_grad=True)
        >>> with epic.torch.Group(num_ranks=1, max_tokens=3, max_row_bytes=512) as group:
        ...     rows, _ = epic.torch.dispatch_grouped(epic.torch.plan(group, layer, ids), x)
        ...     rows.dequantize().sum().backward()
        >>> rows.ends.tolist(), rows.data.dtype, x.grad[:, 0].tolist()
        ([1, 3], torch.float8_e4m3fn, [1.0, 1.0, 1.0])
    """
    if plan.spec.flat:
        raise wrong_layout(plan.spec, "dispatch_flat")
    plan = limit_plan(plan, max_sms)
    rows, weights = rows_and_weights(plan, tokens, weights)
    given = (plan, plan.bytes, rows, weights, as_block("block", block, "tokens", rows))
    data, scales, slots, carrier = dispatch_grouped_apply(*given)
    ends = plan.counted("expert_rows").cumsum(0, dtype=torch.int32)
    return GroupedRows(data, scales, ends, carrier, block), None if weights is None else slots
