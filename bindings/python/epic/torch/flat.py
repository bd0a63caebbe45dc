# SPDX-License-Identifier: Apache-2.0
"""dispatch_flat: sends a token once to each rank that has one of its experts (layout "flat")."""

from typing import Any

import torch
from torch import Tensor

from epic.torch.arguments import EpicFunction, first_order_only, make_apply, needs_gradient
from epic.torch.ops import parts_of, translate_errors, write_out
from epic.torch.plans import Plan, limit_plan, rows_and_weights, wrong_layout
from epic.torch.steps import ZERO_TAIL, check_pair, save_plan, token_gradients

ops = torch.ops.epic


def dispatch_flat_args(
    plan: Plan, data: Tensor, tokens: Tensor, weights: Tensor | None
) -> tuple[Any, ...]:
    """Return the arguments of the operator epic::dispatch_flat."""
    spec = plan.spec
    place = (spec.layer, spec.tag, ZERO_TAIL)
    return (spec.group.order_token, data, tokens, weights, plan.capacity, spec.top_k, *place)


def dispatch_flat_op(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Call the operator without a gradient; inputs: the arguments of dispatch_flat_args."""
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
        """Save the plan, which is all that backward needs."""
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
    """Send each token once to each rank that has one of its experts, for layout "flat".

    Your program then runs, for each received row, all its experts on this rank. It passes the
    weighted sum of their results to `combine`, as one row.

    Collective: every rank of the group calls it.

    Args:
        plan: A plan of a layer with layout="flat".
        tokens: [..., hidden] in float32, bfloat16, float16 or float64, as many as the plan has.
        weights: Weight of each choice [..., top_k], or None.
        max_sms: As for `dispatch`.
        out: Tensors (recv, slot_weights, recv_expert) into which the function writes. It returns
            them, without a gradient.

    Returns:
        The received rows [capacity, hidden]; the weights of their choices [capacity, top_k]
        float32, or None without weights; and the experts of this rank that the row's token has
        chosen [capacity, top_k] int32, numbered from 0, and -1 in unused entries.

    Raises:
        EpicArgumentError: The layout is not "flat", or a shape, dtype or device is wrong.
        EpicError: A rank failed, was late, or made a different call.

    Example:
        >>> import torch, epic.torch
        >>> layer = epic.torch.Layer(num_experts=4, top_k=2, layout="flat")
        >>> ids = torch.tensor([[0, 3]], dtype=torch.int32)
        >>> with epic.torch.Group(num_ranks=1, max_tokens=1, max_row_bytes=32) as group:
        ...     plan = epic.torch.plan(group, layer, ids)
        ...     rows, _, experts = epic.torch.dispatch_flat(plan, torch.ones(1, 8))
        ...     out = epic.torch.combine(plan, rows)  # one row for both experts
        >>> experts[0].tolist(), out[0, 0].item()
        ([0, 3], 1.0)
    """
    plan = limit_plan(plan, max_sms)
    spec = plan.spec
    if not spec.flat:
        raise wrong_layout(spec, "dispatch")
    rows, weights = rows_and_weights(plan, tokens, weights)
    inputs = (plan, plan.bytes, rows, weights)
    if out is not None:
        recv, slots, experts = parts_of(out, "recv, slot_weights, experts")
        check_pair(weights, slots)
        write_out(ops.dispatch_flat_out.default, dispatch_flat_args(*inputs), recv, slots, experts)
        return recv, slots, experts
    call = dispatch_flat_apply if needs_gradient(rows, weights) else dispatch_flat_op
    recv, slots, experts = call(*inputs)
    return recv, None if weights is None else slots, experts
