# SPDX-License-Identifier: Apache-2.0
"""plan, dispatch, combine, plan_dispatch and sum: tensors in, tensors out, with gradients."""

from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from epic.errors import EpicArgumentError
from epic.options import BLOCKS, Layer, word
from epic.torch.arguments import (
    applied,
    as_rows,
    as_weights,
    needs_gradient,
    once,
    stay,
)
from epic.torch.groups import Group
from epic.torch.ops import copy_into, note_write, parts_of, raising, told, write
from epic.torch.plans import EXACT, Plan, Way, asked, check_layout

ops = torch.ops.epic
PLAN, PLAN_DISPATCH = ops.plan.default, ops.plan_dispatch.default
DISPATCH, COMBINE = ops.dispatch.default, ops.combine.default

ZERO_TAIL = 1

# ------------------------------------------------------------------------------ plan ----


def plan(
    group: Group,
    layer: Layer,
    topk_idx: Tensor,
    *,
    capacity: int | None = None,
    rank_of_expert: Any = None,
    logical_of_expert: Any = None,
    num_local_experts: int | None = None,
    tag: int = 0,
    out: Plan | None = None,
) -> Plan:
    """Makes the plan of topk_idx [..., top_k]; negative: no expert.

    capacity: slots of this rank; None: as many as can ever be needed; EXACT: as many as land, for
    which the host waits once.  rank_of_expert [num_experts]: which rank owns each expert, with
    num_local_experts, the most of one rank; None: contiguous blocks.  logical_of_expert
    [num_experts]: with layer.num_logical, whose replica each expert is; topk_idx names logical
    experts then, and their replicas take turns.  tag: calls of one tag come in the same order on
    every rank; threads of a process use different ones.  out: a plan of the same layer and sizes,
    whose bytes are written.
    """
    try:
        way, chosen, num_tokens, slots, size, local, room, numbers = asked(
            group,
            layer,
            topk_idx,
            capacity,
            rank_of_expert,
            logical_of_expert,
            num_local_experts,
            tag,
        )
        if out is None:
            data = PLAN(group.turn, chosen, slots, size, *numbers)
        else:
            data = plan_into((group.turn, chosen, slots, size, *complete(way, numbers)), out)
        stay(data)
    except RuntimeError as error:
        raise told(error) from None
    made = Plan(data, num_tokens, slots, local, room, way)
    return made._replace(capacity=int(made.demand.item())) if slots == EXACT else made


def complete(way: Way, numbers: tuple[Any, ...]) -> tuple[Any, ...]:
    """The numbers of `asked`, with what they leave out."""
    return numbers if len(numbers) > len(way.numbers) else (*way.numbers, None, None)


def bytes_of(out: Any) -> Tensor:
    """Those of a plan that is given as out=."""
    if not isinstance(out, Plan):
        raise EpicArgumentError(f"out: {type(out).__name__}: a Plan is needed, as plan gives it")
    return out.bytes


def plan_into(args: tuple[Any, ...], out: Plan) -> Tensor:
    """plan with out=."""
    data = bytes_of(out)
    write(ops.plan_out.default, args, data)
    return data


# -------------------------------------------------------------------------- dispatch ----


def rows_home(ctx: Any, plan: Tensor, d_recv: Tensor, d_slots: Tensor) -> tuple[Any, Any]:
    """Gradients of the received rows and weights, brought to their tokens."""
    way, group = ctx.way, ctx.way.group
    d_tokens, d_weights = ops.dispatch_backward.default(
        group.turn,
        plan,
        d_recv.contiguous(),
        d_slots.contiguous() if ctx.has_weights else None,
        ctx.num_tokens,
        way.top_k,
        *way.place,
    )
    return d_tokens, d_weights if ctx.has_weights else None


class Dispatch(torch.autograd.Function):
    """epic::dispatch with its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        way: Way,
        data: Tensor,
        tokens: Tensor,
        weights: Tensor | None,
        capacity: int,
        zero_tail: bool,
    ) -> tuple[Tensor, Tensor]:
        """Nothing is saved but the plan."""
        ctx.way, ctx.num_tokens, ctx.has_weights = way, tokens.shape[0], weights is not None
        ctx.save_for_backward(data)
        return dispatch_op(way, data, tokens, weights, capacity, zero_tail)

    @staticmethod
    @once
    @raising
    def backward(ctx: Any, d_recv: Tensor, d_slots: Tensor) -> tuple[Any, ...]:
        """The plan has no gradient."""
        (data,) = ctx.saved_tensors
        return None, None, *rows_home(ctx, data, d_recv, d_slots), None, None


dispatch_apply = applied(Dispatch)


def dispatch_op(
    way: Way, data: Tensor, tokens: Tensor, weights: Tensor | None, capacity: int, zero_tail: bool
) -> tuple[Tensor, Tensor]:
    """The operator."""
    place = way.place if zero_tail else (*whole_place(way), 0)
    return DISPATCH(way.group.turn, data, tokens, weights, capacity, *place)


def whole_place(way: Way) -> tuple[int, int]:
    """way.place, with the tag that it may leave out."""
    return way.numbers[0], way.tag


def dispatch(
    plan: Plan,
    tokens: Tensor,
    weights: Tensor | None = None,
    *,
    quantize: str | None = None,
    zero_tail: bool = True,
    out: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Sends each token to its experts: [..., hidden] -> [capacity, hidden].

    With weights [..., top_k] also each slot's weight [capacity] float32; else None.  Slots that
    the plan does not fill are zeros; with zero_tail=False those past the last slab hold anything.
    quantize "1x128" or "1x32": rows travel in e4m3 and arrive rounded; the gradient goes straight
    through.  out: (recv, slot_weights) that are written and returned, without a gradient.
    """
    try:
        way = plan.way
        check_layout(way, False, "dispatch_flat")
        rows = as_rows("tokens", tokens, plan.num_tokens)
        weights = as_weights("weights", weights, plan.num_tokens, way.top_k)
        if out is not None:
            if quantize is not None:
                raise EpicArgumentError("quantize with out=: call dispatch_quantized with out=")
            parts = parts_of(out, "recv, slot_weights")
            return dispatch_into(plan, rows, weights, zero_tail, *parts)
        if quantize is not None:
            return rounded(plan, rows, weights, word("quantize", quantize, BLOCKS))
        call = dispatch_apply if needs_gradient(rows, weights) else dispatch_op
        recv, slots = call(way, plan.bytes, rows, weights, plan.capacity, zero_tail)
    except RuntimeError as error:
        raise told(error) from None
    return recv, None if weights is None else slots


def dispatch_into(
    plan: Plan,
    rows: Tensor,
    weights: Tensor | None,
    zero_tail: bool,
    recv: Tensor,
    slots: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """dispatch with out=."""
    check_pair(weights, slots)
    place = (*whole_place(plan.way), int(zero_tail))
    args = (plan.way.group.turn, plan.bytes, rows, weights, plan.capacity, *place)
    write(ops.dispatch_out.default, args, recv, slots)
    return recv, slots


def check_pair(weights: Tensor | None, slots: Tensor | None) -> None:
    """Of out=."""
    if (weights is None) != (slots is None):
        raise EpicArgumentError("weights and the slot_weights of out= come together")


# ------------------------------------------------------------------------- quantized ----


@raising
def dispatch_quantized(
    plan: Plan,
    tokens: Tensor,
    weights: Tensor | None = None,
    block: str = "1x128",
    *,
    out: tuple[Tensor, Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dispatch in e4m3: rows, scales [capacity, blocks], weights; without a gradient.

    block "1x128": float32 scales; "1x32": powers of two as e8m0 bytes.  out: these three, which are
    written and returned.
    """
    check_layout(plan.way, False, "dispatch_flat")
    rows = as_rows("tokens", tokens.detach(), plan.num_tokens)
    weights = as_weights("weights", weights, plan.num_tokens, plan.way.top_k)
    if weights is not None:
        weights = weights.detach()
    inputs = (plan.way, plan.bytes, rows, weights, plan.capacity, word("block", block, BLOCKS))
    if out is not None:
        recv, scales, slots = parts_of(out, "recv, scales, slot_weights")
        check_pair(weights, slots)
        write(ops.dispatch_quantized_out.default, quantized_args(*inputs), recv, scales, slots)
        return recv, scales, slots
    recv, scales, slots = quantized(*inputs)
    return recv, scales, None if weights is None else slots


def quantized_args(
    way: Way, data: Tensor, rows: Tensor, weights: Tensor | None, capacity: int, block: str
) -> tuple[Any, ...]:
    """What the operator is passed."""
    kind = 1 + BLOCKS.index(block)
    place = (*whole_place(way), ZERO_TAIL)
    return (way.group.turn, data, rows, weights, capacity, kind, *place)


@raising
def quantized(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The operator; inputs: of quantized_args."""
    return ops.dispatch_quantized.default(*quantized_args(*inputs))


def dequantize(rows: Tensor, scales: Tensor, dtype: torch.dtype, block: str = "1x128") -> Tensor:
    """What dispatch_quantized's rows stand for."""
    if block == "1x32":
        powers = torch.exp2(scales.to(torch.float32) - 127)
        scales = torch.where(scales == 255, torch.nan, powers)
    size = 32 if block == "1x32" else 128
    wide = scales.repeat_interleave(size, dim=1)[:, : rows.shape[1]]
    return (rows.to(torch.float32) * wide).to(dtype)


class DispatchRounded(torch.autograd.Function):
    """dispatch whose rows travelled in e4m3; its gradient is that of dispatch."""

    @staticmethod
    def forward(
        ctx: Any,
        way: Way,
        data: Tensor,
        tokens: Tensor,
        weights: Tensor | None,
        capacity: int,
        block: str,
    ) -> tuple[Tensor, Tensor]:
        """Nothing is saved but the plan."""
        ctx.way, ctx.num_tokens, ctx.has_weights = way, tokens.shape[0], weights is not None
        ctx.save_for_backward(data)
        rows, scales, slots = quantized(way, data, tokens, weights, capacity, block)
        return dequantize(rows, scales, tokens.dtype, block), slots

    backward = Dispatch.backward


def rounded(
    plan: Plan, rows: Tensor, weights: Tensor | None, block: str
) -> tuple[Tensor, Tensor | None]:
    """dispatch with quantize=."""
    recv, slots = DispatchRounded.apply(plan.way, plan.bytes, rows, weights, plan.capacity, block)
    return recv, None if weights is None else slots


# --------------------------------------------------------------------- plan_dispatch ----


def plan_dispatch_op(
    way: Way,
    chosen: Tensor,
    tokens: Tensor,
    weights: Tensor | None,
    slots: int,
    size: int,
    numbers: tuple[Any, ...],
) -> tuple[Tensor, ...]:
    """The operator."""
    turn = way.group.turn
    found = PLAN_DISPATCH(turn, chosen, tokens, weights, slots, size, *numbers)
    stay(found[0])
    return found


def plan_dispatch_into(out: Any, way: Way, *inputs: Any) -> tuple[Tensor, ...]:
    """plan_dispatch with out=; inputs: as plan_dispatch_op's, with all of the numbers."""
    plan, recv, slots = parts_of(out, "plan, recv, slot_weights")
    found = (bytes_of(plan), recv, slots)
    check_pair(inputs[2], slots)
    args = (way.group.turn, *inputs[:-1], *inputs[-1])
    write(ops.plan_dispatch_out.default, args, *found)
    stay(found[0])
    return found


class PlanDispatch(torch.autograd.Function):
    """epic::plan_dispatch with its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        way: Way,
        chosen: Tensor,
        tokens: Tensor,
        weights: Tensor | None,
        slots: int,
        size: int,
        numbers: tuple[Any, ...],
    ) -> tuple[Tensor, ...]:
        """The plan is saved."""
        ctx.way, ctx.num_tokens, ctx.has_weights = way, tokens.shape[0], weights is not None
        out = plan_dispatch_op(way, chosen, tokens, weights, slots, size, numbers)
        ctx.save_for_backward(out[0])
        ctx.mark_non_differentiable(out[0])
        return out

    @staticmethod
    @once
    @raising
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """As dispatch's."""
        (data,) = ctx.saved_tensors
        return None, None, *rows_home(ctx, data, *gradients[1:]), None, None, None


plan_dispatch_apply = applied(PlanDispatch)


def plan_dispatch(
    group: Group,
    layer: Layer,
    topk_idx: Tensor,
    tokens: Tensor,
    weights: Tensor | None = None,
    *,
    capacity: int | None = None,
    rank_of_expert: Any = None,
    logical_of_expert: Any = None,
    num_local_experts: int | None = None,
    zero_tail: bool = True,
    tag: int = 0,
    out: tuple[Plan, Tensor, Tensor | None] | None = None,
) -> tuple[Plan, Tensor, Tensor | None]:
    """plan, then dispatch with it, as one call: (plan, recv, slot_weights or None).  out: these
    three, which are written and returned, without a gradient."""
    try:
        way, chosen, num_tokens, slots, size, local, room, numbers = asked(
            group,
            layer,
            topk_idx,
            capacity,
            rank_of_expert,
            logical_of_expert,
            num_local_experts,
            tag,
        )
        check_layout(way, False, "plan, then dispatch_flat")
        if slots == EXACT:
            raise EpicArgumentError("capacity EXACT: call plan, then dispatch")
        if tokens.dim() > 2 and topk_idx.dim() > 2 and tokens.shape[:-1] != topk_idx.shape[:-1]:
            dims = list(topk_idx.shape[:-1])
            raise EpicArgumentError(
                f"tokens: shape {list(tokens.shape)}: topk_idx has {dims} tokens"
            )
        rows = as_rows("tokens", tokens, num_tokens)
        weights = as_weights("weights", weights, num_tokens, way.top_k)
        if out is not None or not zero_tail:
            numbers = (*complete(way, numbers), int(zero_tail))
        inputs = (way, chosen, rows, weights, slots, size, numbers)
        if out is not None:
            data, recv, slot = plan_dispatch_into(out, *inputs)
        else:
            call = plan_dispatch_apply if needs_gradient(rows, weights) else plan_dispatch_op
            data, recv, slot = call(*inputs)
    except RuntimeError as error:
        raise told(error) from None
    made = Plan(data, num_tokens, slots, local, room, way)
    return made, recv, None if weights is None else slot


# --------------------------------------------------------------------------- combine ----


def combine_op(
    way: Way,
    data: Tensor,
    rows: Tensor,
    slots: Tensor | None,
    num_tokens: int,
    *_: Any,
) -> Tensor:
    """The operator."""
    return COMBINE(way.group.turn, data, rows, slots, num_tokens, *way.place)


class Combine(torch.autograd.Function):
    """epic::combine with its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        way: Way,
        data: Tensor,
        rows: Tensor,
        slots: Tensor | None,
        num_tokens: int,
        weighs: bool,
        block: str | None,
    ) -> Tensor:
        """Rows are needed again only for the weights' gradient."""
        ctx.way, ctx.capacity, ctx.weighs, ctx.block = way, rows.shape[0], weighs, block
        ctx.save_for_backward(data, rows if weighs else None, slots)
        return combine_op(way, data, rows, slots, num_tokens)

    @staticmethod
    @once
    @raising
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        """To the slots, scaled by their weights."""
        data, rows, slots = ctx.saved_tensors
        way, block = ctx.way, ctx.block
        inputs = (way.group.turn, data, d_out.contiguous(), rows, slots, ctx.capacity)
        if block is None:
            d_rows, d_slots = ops.combine_backward.default(*inputs, *way.place)
        else:
            kind = 1 + BLOCKS.index(block)
            back = ops.combine_backward_quantized.default(*inputs, kind, *way.place)
            d_rows, d_slots = dequantize(back[0], back[1], d_out.dtype, block), back[2]
        return None, None, d_rows, d_slots if ctx.weighs else None, None, None, None


combine_apply = applied(Combine)


def combine(
    plan: Plan,
    rows: Tensor,
    slot_weights: Tensor | None = None,
    *,
    quantize_gradient: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Brings rows home, summed: [capacity, hidden] -> [num_tokens, hidden].

    out[t] = sum over k of slot_weights[slot(t, k)] * rows[slot(t, k)], in the layer's order.  With
    the layout "flat" each row is one finished partial, and there are no slot_weights.
    quantize_gradient "1x128" or "1x32": the rows' gradients travel in e4m3 and arrive rounded.
    out=: a tensor that is written and returned, without a gradient.
    """
    try:
        rows = as_rows("rows", rows, plan.capacity)
        slots = as_weights("slot_weights", slot_weights, plan.capacity)
        way = plan.way
        if out is not None:
            return combine_into(way, plan.bytes, rows, slots, plan.num_tokens, out)
        weighs = slots is not None and slots.requires_grad
        block = quantize_gradient and word("quantize_gradient", quantize_gradient, BLOCKS)
        call = combine_apply if needs_gradient(rows, slots) else combine_op
        return call(way, plan.bytes, rows, slots, plan.num_tokens, weighs, block)
    except RuntimeError as error:
        raise told(error) from None


def combine_into(
    way: Way, data: Tensor, rows: Tensor, slots: Tensor | None, num_tokens: int, out: Tensor
) -> Tensor:
    """combine with out=."""
    args = (way.group.turn, data, rows, slots, num_tokens, *whole_place(way))
    write(ops.combine_out.default, args, out)
    return out


# ------------------------------------------------------------------------------- sum ----


def sum_op(group: Group, x: Tensor, order: int, tag: int) -> Tensor:
    """The operator works in place."""
    out = x.clone()
    ops.sum_.default(group.turn, out, order, group.number, tag)
    return out


class Sum(torch.autograd.Function):
    """epic::sum_ with its gradient."""

    @staticmethod
    def forward(ctx: Any, group: Group, x: Tensor, order: int, tag: int) -> Tensor:
        """Nothing is saved."""
        ctx.group, ctx.order, ctx.tag = group, order, tag
        return sum_op(group, x, order, tag)

    @staticmethod
    @once
    @raising
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """Each rank's x is in every rank's sum."""
        return None, sum_op(ctx.group, gradient.contiguous(), ctx.order, ctx.tag), None, None


@raising
def sum(
    group: Group, x: Tensor, *, tree: bool = False, tag: int = 0, out: Tensor | None = None
) -> Tensor:
    """Adds float32 tensors over the ranks: the same bits on every rank, in rank order or in a
    binary tree.  out: as x, or x itself: written and returned, without a gradient."""
    if x.dtype != torch.float32:
        raise EpicArgumentError(f"x: dtype {x.dtype}: float32 is needed")
    if out is not None:
        copy_into(out, x)
        place = (int(tree), group.number, tag)
        ops.sum_.default(group.turn, out.view(-1), *place)
        note_write(out)
        return out
    call = Sum.apply if needs_gradient(x) else sum_op
    return call(group, x.reshape(-1).contiguous(), int(tree), tag).reshape(x.shape)


# --------------------------------------------------------------------- checkpointing ----


def save_plans(_context: Any, op: Any, *_: Any, **__: Any) -> Any:
    """A policy for torch.utils.checkpoint.create_selective_checkpoint_contexts: plans are kept and
    all else is computed again, which saves the exchange that a plan takes."""
    policy = torch.utils.checkpoint.CheckpointPolicy
    is_plan = op in (ops.plan.default, ops.plan_dispatch.default)
    return policy.MUST_SAVE if is_plan else policy.PREFER_RECOMPUTE
