# SPDX-License-Identifier: Apache-2.0
"""dispatch for the layout "flat": sends a token once to each rank that has experts for it."""

from typing import Any

import torch
from torch import Tensor

from epic.torch.arguments import (
    EpicFunction,
    as_rows,
    as_weights,
    first_order_only,
    make_apply,
    needs_gradient,
)
from epic.torch.ops import parts_of, translate_errors, write_out
from epic.torch.plans import Plan, limit_plan, wrong_layout
from epic.torch.steps import ZERO_TAIL, check_pair, save_plan, token_gradients

ops = torch.ops.epic


def dispatch_flat_args(
    plan: Plan, data: Tensor, tokens: Tensor, weights: Tensor | None
) -> tuple[Any, ...]:
    """Return the arguments of the operator."""
    spec = plan.spec
    place = (spec.layer, spec.tag, ZERO_TAIL)
    return (spec.group.order_token, data, tokens, weights, plan.capacity, spec.top_k, *place)


def dispatch_flat_op(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Call the operator; inputs: those of dispatch_flat_args."""
    return ops.dispatch_flat.default(*dispatch_flat_args(*inputs))


class DispatchFlat(EpicFunction):
    """The operator epic::dispatch_flat with its gradient."""

    @staticmethod
    def forward(
        plan: Plan, data: Tensor, tokens: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Call the operator."""
        return dispatch_flat_op(plan, data, tokens, weights)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], out: tuple[Tensor, ...]) -> None:
        """Save the plan only."""
        plan, data, tokens, _ = inputs
        save_plan(ctx, plan.spec, data, tokens)
        ctx.mark_non_differentiable(out[2])

    @staticmethod
    @first_order_only
    @translate_errors
    def backward(ctx: Any, d_recv: Tensor, d_slots: Tensor, _: Tensor) -> tuple[Any, ...]:
        """Return the gradients of tokens and weights."""
        return None, None, *token_gradients(ctx, d_recv, d_slots.reshape(-1))


dispatch_flat_apply = make_apply(DispatchFlat)


@translate_errors
def dispatch_flat(
    plan: Plan,
    tokens: Tensor,
    weights: Tensor | None = None,
    *,
    max_sms: int | None = None,
    out: tuple[Tensor, Tensor | None, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Send each token once to each rank that has experts for it, with layout "flat".

    Run the local experts of each row yourself, and pass their weighted sum to `combine`: one
    finished partial sum for each row.

    Args:
        plan: A plan of a layer with layout="flat".
        tokens: [..., hidden] in float32, bfloat16, float16 or float64.
        weights: Weight of each choice [..., top_k], or None.
        max_sms: As for `dispatch`.
        out: (recv, slot_weights, recv_expert) that are written and returned, without a gradient.

    Returns:
        The rows [capacity, hidden], their weights [capacity, top_k] float32 or None, and the local
        experts of each row [capacity, top_k] int32, followed by -1.

    Raises:
        EpicArgumentError: The layout is not "flat", or a shape, dtype or device is wrong.
        EpicError: A rank failed, was late, or made a different call.
    """
    plan = limit_plan(plan, max_sms)
    spec = plan.spec
    if not spec.flat:
        raise wrong_layout(spec, "dispatch")
    rows = as_rows("tokens", tokens, plan.num_tokens)
    weights = as_weights("weights", weights, (plan.num_tokens, spec.top_k), tokens)
    inputs = (plan, plan.bytes, rows, weights)
    if out is not None:
        recv, slots, experts = parts_of(out, "recv, slot_weights, experts")
        check_pair(weights, slots)
        write_out(ops.dispatch_flat_out.default, dispatch_flat_args(*inputs), recv, slots, experts)
        return recv, slots, experts
    call = dispatch_flat_apply if needs_gradient(rows, weights) else dispatch_flat_op
    recv, slots, experts = call(*inputs)
    return recv, None if weights is None else slots, experts
