# SPDX-License-Identifier: Apache-2.0
"""The function combine on tensors, with gradients."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function_variadic as overridden

from epic.errors import EpicArgumentError, EpicUnsupportedError
from epic.options import BLOCKS
from epic.torch.arguments import (
    EpicFunction,
    as_rows,
    as_weights,
    first_order_only,
    is_traced,
    make_apply,
    mark_no_offload,
    needs_gradient,
)
from epic.torch.narrow import dequantize
from epic.torch.ops import boxed_call, to_epic_error, translate_errors, write_out
from epic.torch.plans import Plan, limit_plan
from epic.torch.steps import ZERO_TAIL, alias, as_block, can_write, copy_results

ops = torch.ops.epic
COMBINE, COMBINE_NOW = ops.combine.default, boxed_call(ops.combine.default)


def combine_op(plan: Plan, data: Tensor, rows: Tensor, slots: Tensor | None) -> Tensor:
    """Call the operator without a gradient."""
    num_tokens, spec = plan.num_tokens, plan.spec
    is_seen = is_traced() or overridden(data, rows, slots)
    call, order_token = COMBINE if is_seen else COMBINE_NOW, spec.group.order_token
    if not spec.tag:
        return call(order_token, data, rows, slots, num_tokens, spec.layer)
    return call(order_token, data, rows, slots, num_tokens, spec.layer, spec.tag)


class Combine(EpicFunction):
    """The operator epic::combine with its gradient."""

    @staticmethod
    def forward(
        plan: Plan,
        data: Tensor,
        rows: Tensor,
        slots: Tensor | None,
        _block: str | None,
        out: Tensor | None,
        _grad_out: Tensor | None,
    ) -> Tensor:
        """Call the operator. _block: the format in which backward sends gradients, or None."""
        if out is not None:
            return combine_into(plan._replace(bytes=data), rows, slots, out)
        return combine_op(plan, data, rows, slots)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Any) -> None:
        """Save the plan and the weights, and the rows only if the weights need a gradient.

        grad_out is only written, so it is not saved: another write to it is no error.
        """
        plan, data, rows, slots, ctx.block, out, ctx.grad_out = inputs
        ctx.spec, ctx.capacity = plan.spec, rows.shape[0]
        if out is not None:
            ctx.mark_dirty(out)
        mark_no_offload(data)
        ctx.save_for_backward(data, rows if ctx.needs_input_grad[3] else None, slots)

    @staticmethod
    @first_order_only
    @translate_errors
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        """Return the gradients of the rows and of slot_weights."""
        data, rows, slots = ctx.saved_tensors
        spec, block = ctx.spec, ctx.block
        inputs = (spec.group.order_token_backward, data, d_out, rows, slots, ctx.capacity)
        if block is not None:
            more = (1 + BLOCKS.index(block), spec.layer, spec.tag)
            back = ops.combine_backward_quantized.default(*inputs, *more)
            d_rows, d_slots = dequantize(back[0], back[1], d_out.dtype, block), back[2]
            if ctx.grad_out is not None:
                d_rows = ctx.grad_out.copy_(d_rows)
        elif ctx.grad_out is not None:
            d_rows = ctx.grad_out
            d_slots = None if rows is None else slots.new_empty(ctx.capacity, dtype=torch.float32)
            more = (spec.layer, spec.tag, ZERO_TAIL)
            write_out(ops.combine_backward_out.default, (*inputs, *more), d_rows, d_slots)
        else:
            d_rows, d_slots = ops.combine_backward.default(*inputs, spec.layer, spec.tag)
        return None, None, d_rows, d_slots if rows is not None else None, None, None, None


combine_apply = make_apply(Combine)


def combine(
    plan: Plan,
    rows: Tensor,
    slot_weights: Tensor | None = None,
    *,
    quantize_gradient: str | None = None,
    max_sms: int | None = None,
    out: Tensor | None = None,
    grad_out: Tensor | None = None,
) -> Tensor:
    """Return rows to their tokens and sum them: [capacity, hidden] -> [num_tokens, hidden].

    Collective: every rank of the group calls it. out[t] is the sum over k of slot_weights[slot(t,
    k)] * rows[slot(t, k)]. The layer's sum_order defines the order of the sum, so its bits do not
    depend on timing. With layout "flat" each row is already the weighted sum of one rank for a
    token, and slot_weights is None.

    Args:
        plan: The plan that dispatched the rows.
        rows: [capacity, hidden] in float32, bfloat16, float16 or float64.
        slot_weights: [capacity], as dispatch returned them. None: all weights are 1.
        quantize_gradient: "1x128" or "1x32": backward sends the gradients rounded to e4m3, with a
            scale for each block of 128 or 32 columns. None: gradients are sent unchanged.
        max_sms: On GPUs the largest number of SMs of this call and its gradient. None: as `plan`.
        out: Tensor [num_tokens, hidden] into which combine writes, for example a window
            (`window`). It returns this tensor, as `dispatch` does with `out`.
        grad_out: Tensor of the shape and dtype of rows, into which backward writes the gradient of
            rows. Use one for each combine whose gradient is still needed. Not in compiled
            functions.

    Returns:
        The tokens [num_tokens, hidden] in the rows' dtype. A token without a choice is zero.

    Raises:
        EpicArgumentError: A shape, dtype or device is wrong.
        EpicError: A rank failed, was late, or made a different call.

    Example:
        >>> import torch, epic.torch
        >>> layer = epic.torch.Layer(num_experts=4, top_k=2)
        >>> ids, weights = torch.tensor([[0, 3]]), torch.tensor([[0.75, 0.25]])
        >>> with epic.torch.Group(num_ranks=1, max_tokens=1, max_row_bytes=32) as group:
        ...     plan = epic.torch.plan(group, layer, ids)
        ...     rows, slot_weights = epic.torch.dispatch(plan, torch.ones(1, 8), weights)
        ...     out = epic.torch.combine(plan, 2 * rows, slot_weights)
        >>> out[0, 0].item()
        2.0
    """
    try:
        plan = limit_plan(plan, max_sms)
        rows = as_rows("rows", rows, plan.capacity)
        slots = as_weights("slot_weights", slot_weights, (plan.capacity,))
        block = quantize_gradient
        if block is not None:
            block = as_block("quantize_gradient", block, "rows", rows)
        check_grad_out(grad_out, rows)
        if not needs_gradient(rows, slots):
            if out is not None:
                return combine_into(plan, rows, slots, out)
            return combine_op(plan, plan.bytes, rows, slots)
        is_copied = out is not None and is_traced()
        if out is not None and not is_copied and not can_write((out,), rows, slots):
            return combine_into(plan, rows, slots, out)  # which reports why it cannot
        written = None if is_copied else alias(out)
        home = combine_apply(plan, plan.bytes, rows, slots, block, written, grad_out)
        return copy_results((out,), (home,))[0] if is_copied else home
    except Exception as error:
        given = (plan, rows, slot_weights)
        raise to_epic_error(error, combine, *given, out=out, grad_out=grad_out) from None


def combine_into(plan: Plan, rows: Tensor, slots: Tensor | None, out: Tensor) -> Tensor:
    """Run combine into the tensor `out`, without a gradient, and return it."""
    data, num_tokens, _, spec, _ = plan
    args = (spec.group.order_token, data, rows, slots, num_tokens, spec.layer, spec.tag)
    write_out(ops.combine_out.default, args, out)
    return out


def check_grad_out(grad_out: Tensor | None, rows: Tensor) -> None:
    """Check that backward can write the gradient of the rows into grad_out."""
    if grad_out is None:
        return
    if is_traced():
        raise EpicUnsupportedError(
            "grad_out is given in a compiled function: must be None, because the compiler owns "
            "the memory of gradients"
        )
    if grad_out.requires_grad:
        raise EpicArgumentError("grad_out requires a gradient: must not, because it is written")
    wanted = (rows.dtype, rows.shape, rows.device)
    if (grad_out.dtype, grad_out.shape, grad_out.device) != wanted or not grad_out.is_contiguous():
        raise EpicArgumentError(
            f"grad_out is {grad_out.dtype} of shape {list(grad_out.shape)} on {grad_out.device}: "
            f"must be {rows.dtype} of shape {list(rows.shape)} on {rows.device} and contiguous, as "
            "rows"
        )
