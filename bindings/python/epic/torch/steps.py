# SPDX-License-Identifier: Apache-2.0
"""The functions plan, dispatch and plan_dispatch on tensors, with gradients."""

from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import has_torch_function_variadic as overridden

from epic.errors import EpicArgumentError, EpicUnsupportedError
from epic.options import BLOCKS, Layer, check_choice
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
from epic.torch.groups import Group
from epic.torch.narrow import NARROW, dequantize, dispatch_bytes
from epic.torch.ops import (
    boxed_call,
    copy_into,
    parts_of,
    to_epic_error,
    translate_errors,
    write_out,
)
from epic.torch.plans import (
    EXACT,
    Plan,
    PlanRequest,
    PlanSpec,
    limit_capacity,
    limit_plan,
    limit_spec,
    resolve_request,
    rows_and_weights,
    wrong_layout,
)

ops = torch.ops.epic
# Each operator twice: for traced calls, and as a faster callable for all others (boxed_call).
PLAN, PLAN_NOW = ops.plan.default, boxed_call(ops.plan.default)
DISPATCH, DISPATCH_NOW = ops.dispatch.default, boxed_call(ops.dispatch.default)
PLAN_DISPATCH, PLAN_DISPATCH_NOW = ops.plan_dispatch.default, boxed_call(ops.plan_dispatch.default)

ZERO_TAIL = 1  # the default of the operators' argument zero_tail

# ------------------------------------------------------------------------------ plan ----


def plan(
    group: Group,
    layer: Layer,
    topk_idx: Tensor,
    *,
    capacity: int | None = None,
    capacity_limit: Tensor | None = None,
    rank_of_expert: Any = None,
    logical_of_expert: Any = None,
    num_local_experts: int | None = None,
    tag: int = 0,
    max_sms: int | None = None,
    compared: tuple[Any, ...] = (),
    counts_dtype: torch.dtype = torch.int32,
    out: Plan | None = None,
) -> Plan:
    """Plan where every choice of every token goes.

    Collective: every rank of the group calls it. Dispatch, combine and their gradients read the
    plan; it may be used many times.

    Args:
        group: The open group.
        layer: Experts, top_k and the rules for overflow and sums.
        topk_idx: Chosen experts [..., top_k], int32 or int64; a negative id means no expert.
        capacity: Number of slots of this rank, that is, of rows of its receive buffer. None: as
            many as can ever be needed. EXACT: as many as arrive; the host waits once for this
            number.
        capacity_limit: A 0-d int32 tensor on the device of topk_idx. The rank then has
            min(capacity, capacity_limit) slots, at least one. The operation reads it on the device,
            so each replay of a CUDA graph uses its value at that time. Not with EXACT or out.
        rank_of_expert: Integers [num_experts]: the rank that owns each expert. It needs capacity
            and num_local_experts. None: rank r owns the r-th contiguous block of experts.
        logical_of_expert: With layer.num_logical, integers [num_experts] or a `Placement`: the
            logical expert of which each expert is a replica. topk_idx then contains ids of logical
            experts, and the replicas of a logical expert receive its choices round-robin.
        num_local_experts: Largest number of experts of a rank, with rank_of_expert.
        tag: Calls with equal tags run in the same order on every rank. Threads of one process use
            different tags.
        max_sms: On GPUs the largest number of SMs of this call and of all calls on the plan. None,
            0 or a larger number: the group's.
        compared: Only `moe` passes it: options of a whole layer, which the ranks compare.
        counts_dtype: Dtype of the plan's expert_rows and expert_tokens: torch.int32, or torch.int64
            for a grouped product that needs it. `experts` needs int32.
        out: A plan of a layer and sizes equal to these, whose bytes the function overwrites.

    Returns:
        A `Plan`. Its properties expert_rows, expert_tokens, load and demand are views of its bytes.

    Raises:
        EpicArgumentError: A shape or value is wrong.
        EpicError: A rank failed, was late, or made a different call. Or overflow is "error" and
            more rows arrive than capacity. On GPUs `Group.check` raises this second error.

    Example:
        See `Group`.
    """
    try:
        placed = (rank_of_expert, logical_of_expert, num_local_experts)
        more = (compared, counts_dtype)
        request = resolve_request(group, layer, topk_idx, capacity, placed, tag, *more)
        if capacity_limit is not None:
            request = limit_capacity(request, capacity_limit, topk_idx, out)
        spec, num_tokens, slots, tables = request
        spec = limit_spec(spec, max_sms)
        if out is not None:
            data = plan_into(spec, topk_idx, slots, tables, out)
        elif compared:
            given = (spec.layer, slots, spec.tag, *tables[:2], capacity_limit, *compared)
            data = ops.plan.compared(group.order_token, topk_idx, *given)
        else:
            call = PLAN if is_traced() or overridden(topk_idx) else PLAN_NOW
            data = call(group.order_token, topk_idx, spec.layer, slots, spec.tag, *tables)
    except Exception as error:
        numbers: dict[str, Any] = {"num_local_experts": num_local_experts, "tag": tag}
        numbers["counts_dtype"] = counts_dtype
        raise to_epic_error(error, plan, group, layer, topk_idx, **numbers) from None
    new_plan = Plan(data, num_tokens, slots, spec, capacity_limit)
    if slots != EXACT:
        return new_plan
    return new_plan._replace(capacity=wait_capacity(new_plan, layer))


def wait_capacity(plan: Plan, layer: Layer) -> int:
    """Return the number of slots that the plan fills; the host waits for it.

    This is plan.demand. But with overflow="drop" plan.demand also counts dropped choices, so there
    it is the sum of plan.expert_rows.
    """
    dropping = layer.overflow == "drop" and not plan.spec.flat
    return int((plan.expert_rows.sum() if dropping else plan.demand).item())


def bytes_of(out: Any) -> Tensor:
    """Return the bytes of a plan that is passed as out=."""
    if not isinstance(out, Plan):
        raise EpicArgumentError(
            f"out is a {type(out).__name__}: must be a Plan, as plan returns it"
        )
    return out.bytes


def plan_into(
    spec: PlanSpec, chosen: Tensor, slots: int, tables: tuple[Any, Any], out: Plan
) -> Tensor:
    """Make a plan in the bytes of `out`, and return these bytes."""
    data, limit = bytes_of(out), None  # out= and capacity_limit exclude each other
    args = (spec.group.order_token, chosen, spec.layer, slots, spec.tag, *tables, limit)
    write_out(ops.plan_out.default, args, data)
    return data


# -------------------------------------------------------------------------- dispatch ----


def save_plan(ctx: Any, spec: PlanSpec, data: Tensor, tokens: Tensor) -> None:
    """Save in ctx what token_gradients needs.

    The number of tokens is read from an input, because torch.compile can use only sizes of inputs
    in a backward.
    """
    ctx.spec, ctx.num_tokens = spec, tokens.shape[0]
    mark_no_offload(data)
    ctx.save_for_backward(data)


def token_gradients(ctx: Any, d_recv: Tensor, d_slots: Tensor) -> tuple[Any, Any]:
    """Return the gradients of tokens and weights, from those of received rows and their weights."""
    (data,) = ctx.saved_tensors
    spec, weighs = ctx.spec, ctx.needs_input_grad[3]
    d_tokens, d_weights = ops.dispatch_backward.default(
        spec.group.order_token_backward,
        data,
        d_recv,
        d_slots if weighs else None,
        ctx.num_tokens,
        spec.top_k,
        spec.layer,
        spec.tag,
    )
    return d_tokens, d_weights if weighs else None


class Dispatch(EpicFunction):
    """The operator epic::dispatch with its gradient."""

    @staticmethod
    def forward(
        plan: Plan, data: Tensor, tokens: Tensor, weights: Tensor | None, zero_tail: bool
    ) -> tuple[Tensor, Tensor]:
        """Call the operator. data: the bytes of the plan, which torch.compile needs as an input."""
        return dispatch_op(plan, data, tokens, weights, zero_tail)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Any) -> None:
        """Save the plan, which is all that backward needs."""
        plan, data, tokens, *_ = inputs
        save_plan(ctx, plan.spec, data, tokens)

    @staticmethod
    @first_order_only
    @translate_errors
    def backward(ctx: Any, d_recv: Tensor, d_slots: Tensor) -> tuple[Any, ...]:
        """Return the gradients of tokens and weights; the plan has none."""
        return None, None, *token_gradients(ctx, d_recv, d_slots), None


dispatch_apply = make_apply(Dispatch)


class DispatchOut(EpicFunction):
    """dispatch with out=: it writes into tensors of the caller, and has a gradient."""

    @staticmethod
    def forward(plan: Plan, data: Tensor, *args: Any) -> tuple[Tensor, Tensor | None]:
        """Call the operator. args: the other arguments of dispatch_into."""
        return dispatch_into(plan._replace(bytes=data), *args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], out: tuple[Any, ...]) -> None:
        """Save the plan, and mark the caller's tensors as written."""
        plan, data, tokens, *_ = inputs
        ctx.mark_dirty(*[x for x in out if x is not None])
        save_plan(ctx, plan.spec, data, tokens)

    @staticmethod
    @first_order_only
    @translate_errors
    def backward(ctx: Any, d_recv: Tensor, d_slots: Tensor) -> tuple[Any, ...]:
        """Return the gradients of tokens and weights."""
        return None, None, *token_gradients(ctx, d_recv, d_slots), None, None, None


dispatch_out_apply = make_apply(DispatchOut)


def can_write(out: Any, x: Tensor, w: Tensor | None) -> bool:
    """Return whether a call with out= can and must compute gradients.

    That is possible outside of torch.compile and torch.func, if no tensor of `out` requires a
    gradient. If it returns False, write_out() writes without a gradient, or raises an error.

    Args:
        out: The tensors of the caller.
        x: The tokens.
        w: The weights, or None.
    """
    is_eager = not is_traced() and not torch._C._are_functorch_transforms_active()
    has_own = any(isinstance(part, Tensor) and part.requires_grad for part in out)
    return is_eager and not has_own and needs_gradient(x, w)


def alias(x: Any) -> Any:
    """Return another tensor with the memory of x, so that x itself gets no gradient.

    Both tensors share one counter of writes. So autograd notices if the memory of a saved tensor
    was overwritten. An x that is no tensor is returned unchanged.
    """
    return x.detach() if isinstance(x, Tensor) else x


def copy_results(outs: Any, found: Any) -> Any:
    """Copy results into tensors of the caller, and return the results.

    For compiled functions with gradients, where a Function cannot write into its inputs.
    """
    for out, x in zip(outs, found, strict=True):
        if x is not None:
            copy_into(out.detach(), x.detach())
    return found


def dispatch_op(
    plan: Plan, data: Tensor, tokens: Tensor, weights: Tensor | None, zero_tail: bool
) -> tuple[Tensor, Tensor]:
    """Call the operator without a gradient."""
    capacity, spec = plan.capacity, plan.spec
    is_seen = is_traced() or overridden(data, tokens, weights)
    call, order_token = DISPATCH if is_seen else DISPATCH_NOW, spec.group.order_token
    if zero_tail and not spec.tag:
        return call(order_token, data, tokens, weights, capacity, spec.layer)
    return call(order_token, data, tokens, weights, capacity, spec.layer, spec.tag, int(zero_tail))


def dispatch(
    plan: Plan,
    tokens: Tensor,
    weights: Tensor | None = None,
    *,
    quantize: str | None = None,
    zero_tail: bool = True,
    max_sms: int | None = None,
    out: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Send each token to its experts: [..., hidden] -> [capacity, hidden].

    Collective: every rank of the group calls it. The rows of one expert form a slab: consecutive
    slots, padded to a multiple of layer.alignment. The slabs of the local experts follow each
    other; plan.expert_rows contains their lengths.

    Args:
        plan: The plan.
        tokens: [..., hidden] in float32, bfloat16, float16 or float64, as many as the plan has.
            Tokens of an 8-bit dtype are sent as they are, without a gradient.
        weights: Weight of each choice [..., top_k], or None.
        quantize: "1x128" or "1x32": rows are rounded to e4m3 with a scale for each block of 128 or
            32 columns, and sent in this form. The result has the dtype of tokens. The gradient is
            computed as if rows were not rounded. None: rows are sent unchanged.
        zero_tail: Whether dispatch sets the slots after the last slab to zero. It always sets
            padding inside of a slab to zero.
        max_sms: On GPUs the largest number of SMs of this call and its gradient. None: as `plan`.
        out: Tensors (recv, slot_weights) into which dispatch writes, for example windows
            (`window`). It returns these tensors. If tokens or weights require a gradient, it
            returns other tensors with this memory. Backward then raises an error if a later call
            has overwritten a tensor that it needs. Compiled functions with gradients copy the
            results into these tensors.

    Returns:
        The received rows [capacity, hidden], and the weight of each slot [capacity] float32, or
        None without weights.

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
        >>> rows.shape, slot_weights.tolist()
        (torch.Size([2, 8]), [0.75, 0.25])
    """
    try:
        plan = limit_plan(plan, max_sms)
        spec = plan.spec
        if spec.flat:
            raise wrong_layout(spec, "dispatch_flat")
        if tokens.dtype in NARROW:
            return dispatch_narrow(plan, tokens, weights, quantize, zero_tail, out)
        rows, weights = rows_and_weights(plan, tokens, weights)
        if out is not None:
            if quantize is not None:
                raise EpicArgumentError(
                    f"quantize is {quantize!r} with out=: must be None; call dispatch_quantized "
                    "with out="
                )
            parts = parts_of(out, "recv, slot_weights")
            if can_write(parts, rows, weights):
                given = (plan, plan.bytes, rows, weights, zero_tail, *map(alias, parts))
                return dispatch_out_apply(*given)
            if is_traced() and needs_gradient(rows, weights):
                check_pair(weights, parts[1])
                recv, slots = dispatch_apply(plan, plan.bytes, rows, weights, zero_tail)
                return copy_results(parts, (recv, None if weights is None else slots))
            return dispatch_into(plan, rows, weights, zero_tail, *parts)
        if quantize is not None:
            return dispatch_rounded(
                plan, rows, weights, as_block("quantize", quantize, "tokens", rows)
            )
        call = dispatch_apply if needs_gradient(rows, weights) else dispatch_op
        recv, slots = call(plan, plan.bytes, rows, weights, zero_tail)
    except Exception as error:
        given = (plan, tokens, weights)
        raise to_epic_error(error, dispatch, *given, quantize=quantize) from None
    return recv, None if weights is None else slots


def dispatch_into(
    plan: Plan,
    rows: Tensor,
    weights: Tensor | None,
    zero_tail: bool,
    recv: Tensor,
    slots: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Run dispatch into the tensors recv and slots, without a gradient, and return both."""
    check_pair(weights, slots)
    spec = plan.spec
    place = (spec.layer, spec.tag, int(zero_tail))
    args = (spec.group.order_token, plan.bytes, rows, weights, plan.capacity, *place)
    write_out(ops.dispatch_out.default, args, recv, slots)
    return recv, slots


def dispatch_narrow(
    plan: Plan,
    tokens: Tensor,
    weights: Tensor | None,
    quantize: str | None,
    zero_tail: bool,
    out: tuple[Tensor, Tensor | None] | None,
) -> tuple[Tensor, Tensor | None]:
    """Run dispatch for tokens of an 8-bit dtype, which are sent without scales."""
    if quantize is not None:
        raise EpicArgumentError(
            f"quantize is {quantize!r}: must be None, because tokens are already {tokens.dtype}"
        )
    into = None
    if out is not None:
        into = parts_of(out, "recv, slot_weights")
        check_pair(weights, into[1])
        into = (into[0], None, into[1])
    recv, _, slots = dispatch_bytes(plan, tokens, None, weights, zero_tail, into)
    return recv, slots


def check_pair(weights: Tensor | None, slots: Tensor | None) -> None:
    """Raise an error unless both weights and the slot_weights of out= are given, or neither."""
    if (weights is None) != (slots is None):
        raise EpicArgumentError(
            f"weights is {'None' if weights is None else 'given'} and slot_weights of out= is "
            f"{'None' if slots is None else 'given'}: pass both or none"
        )


# ------------------------------------------------------------------------- quantized ----


def as_block(name: str, block: str, what: str, rows: Tensor) -> str:
    """Return the block format after checking it, and that the rows can be rounded to e4m3.

    name: the argument that contains the block format; what: the argument that contains the rows.
    """
    if rows.dtype == torch.float64:
        raise EpicUnsupportedError(
            f"{what} is torch.float64: must be float32, bfloat16 or float16 with {name}"
        )
    return check_choice(name, block, BLOCKS)


@translate_errors
def dispatch_quantized(
    plan: Plan,
    tokens: Tensor,
    weights: Tensor | None = None,
    block: str = "1x128",
    *,
    scales: Tensor | None = None,
    max_sms: int | None = None,
    out: tuple[Tensor, Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Send tokens in e4m3, and return the received rows and their scales, without a gradient.

    Collective: every rank of the group calls it.

    Args:
        plan: The plan.
        tokens: [..., hidden] in float32, bfloat16 or float16. With scales: in an 8-bit dtype.
        weights: Weight of each choice [..., top_k], or None.
        block: "1x128": one float32 scale for 128 columns. "1x32": one power of two for 32 columns,
            as an e8m0 byte (MXFP8).
        scales: Scales [..., n] of tokens that are already quantized, with any dtype and n. Tokens
            and scales are sent unchanged, and block is ignored. None: tokens are quantized.
        max_sms: As for `dispatch`.
        out: Tensors (recv, scales, slot_weights) into which the function writes. It returns them.

    Returns:
        Rows [capacity, hidden] in float8_e4m3fn, scales [capacity, blocks], and the weight of each
        slot [capacity] float32, or None without weights. If scales are passed, rows and scales have
        the dtypes that were passed, and scales the shape [capacity, n].

    Raises:
        EpicArgumentError: A shape, dtype or device is wrong.
        EpicUnsupportedError: tokens are float64.
        EpicError: A rank failed, was late, or made a different call.

    Example:
        >>> import torch, epic.torch
        >>> layer = epic.torch.Layer(num_experts=2, top_k=1)
        >>> with epic.torch.Group(num_ranks=1, max_tokens=1, max_row_bytes=512) as group:
        ...     plan = epic.torch.plan(group, layer, torch.tensor([[1]]))
        ...     rows, scales, _ = epic.torch.dispatch_quantized(plan, torch.ones(1, 128))
        >>> rows.dtype, scales.shape
        (torch.float8_e4m3fn, torch.Size([1, 1]))
    """
    if plan.spec.flat:
        raise wrong_layout(plan.spec, "dispatch_flat")
    plan = limit_plan(plan, max_sms)
    if scales is not None:
        return with_scales(plan, tokens, scales, weights, out)
    if weights is not None:
        weights = weights.detach()
    rows, weights = rows_and_weights(plan, tokens.detach(), weights)
    inputs = (plan, plan.bytes, rows, weights, as_block("block", block, "tokens", rows))
    if out is not None:
        recv, scales, slots = parts_of(out, "recv, scales, slot_weights")
        check_pair(weights, slots)
        write_out(ops.dispatch_quantized_out.default, quantized_args(*inputs), recv, scales, slots)
        return recv, scales, slots
    recv, scales, slots = dispatch_quantized_op(*inputs)
    return recv, scales, None if weights is None else slots


def with_scales(
    plan: Plan,
    tokens: Tensor,
    scales: Tensor,
    weights: Tensor | None,
    out: tuple[Tensor, Tensor, Tensor | None] | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run dispatch_quantized for tokens that are already quantized and have scales."""
    if out is not None:
        out = parts_of(out, "recv, scales, slot_weights")
        check_pair(weights, out[2])
    weights = None if weights is None else weights.detach()
    recv, found, slots = dispatch_bytes(plan, tokens.detach(), scales, weights, out=out)
    assert found is not None
    return recv, found, slots


def quantized_args(
    plan: Plan, data: Tensor, rows: Tensor, weights: Tensor | None, block: str
) -> tuple[Any, ...]:
    """Return the arguments of the operator dispatch_quantized."""
    spec = plan.spec
    kind = 1 + BLOCKS.index(block)
    place = (spec.layer, spec.tag, ZERO_TAIL)
    return (spec.group.order_token, data, rows, weights, plan.capacity, kind, *place)


@translate_errors
def dispatch_quantized_op(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Call the operator without a gradient; inputs: the arguments of quantized_args."""
    return ops.dispatch_quantized.default(*quantized_args(*inputs))


class DispatchRounded(EpicFunction):
    """The function dispatch with quantize=. It has the gradient of Dispatch, without rounding."""

    @staticmethod
    def forward(
        plan: Plan, data: Tensor, tokens: Tensor, weights: Tensor | None, block: str
    ) -> tuple[Tensor, Tensor]:
        """Call the operator and multiply the rows by their scales."""
        rows, scales, slots = dispatch_quantized_op(plan, data, tokens, weights, block)
        return dequantize(rows, scales, tokens.dtype, block), slots

    setup_context = Dispatch.setup_context
    backward = Dispatch.backward


dispatch_rounded_apply = make_apply(DispatchRounded)


def dispatch_rounded(
    plan: Plan, rows: Tensor, weights: Tensor | None, block: str
) -> tuple[Tensor, Tensor | None]:
    """Run dispatch with quantize=block."""
    recv, slots = dispatch_rounded_apply(plan, plan.bytes, rows, weights, block)
    return recv, None if weights is None else slots


# --------------------------------------------------------------------- plan_dispatch ----


def plan_dispatch_op(
    request: PlanRequest, chosen: Tensor, tokens: Tensor, weights: Tensor | None, zero_tail: bool
) -> tuple[Tensor, ...]:
    """Call the operator without a gradient."""
    spec, _, slots, tables = request
    order_token = spec.group.order_token
    limit = tables[2:]  # one element, capacity_limit, or none
    numbers = (spec.layer, slots, spec.tag, *tables[:2], int(zero_tail))
    if spec.compared:
        given = (*numbers, *(limit or (None,)), *spec.compared)
        return ops.plan_dispatch.compared(order_token, chosen, tokens, weights, *given)
    is_seen = is_traced() or overridden(chosen, tokens, weights)
    call = PLAN_DISPATCH if is_seen else PLAN_DISPATCH_NOW
    return call(order_token, chosen, tokens, weights, *numbers, *limit)


def plan_dispatch_into(
    out: Any,
    request: PlanRequest,
    chosen: Tensor,
    tokens: Tensor,
    weights: Tensor | None,
    zero_tail: bool,
) -> tuple[Tensor, ...]:
    """Run plan_dispatch with out=, without a gradient; return plan bytes, recv and slot_weights."""
    plan, recv, slot = parts_of(out, "plan, recv, slot_weights")
    found = (bytes_of(plan), recv, slot)
    check_pair(weights, slot)
    spec, _, slots, tables = request
    limit = None  # out= and capacity_limit exclude each other
    numbers = (spec.layer, slots, spec.tag, *tables, int(zero_tail), limit)
    args = (spec.group.order_token, chosen, tokens, weights, *numbers)
    write_out(ops.plan_dispatch_out.default, args, *found)
    return found


class PlanDispatchOut(EpicFunction):
    """plan_dispatch with out=: it writes into tensors of the caller, and has a gradient."""

    @staticmethod
    def forward(
        request: PlanRequest,
        chosen: Tensor,
        tokens: Tensor,
        weights: Tensor | None,
        zero_tail: bool,
        *out: Any,
    ) -> tuple[Tensor, ...]:
        """Call the operator. out: the plan, recv and slot_weights to write."""
        return plan_dispatch_into(out, request, chosen, tokens, weights, zero_tail)[1:]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], out: tuple[Any, ...]) -> None:
        """Save the plan, and mark the caller's tensors as written."""
        ctx.mark_dirty(*[x for x in out if x is not None])
        save_plan(ctx, inputs[0][0], inputs[5].bytes, inputs[2])

    @staticmethod
    @first_order_only
    @translate_errors
    def backward(ctx: Any, d_recv: Tensor, d_slots: Tensor) -> tuple[Any, ...]:
        """Return the gradients of tokens and weights."""
        return None, None, *token_gradients(ctx, d_recv, d_slots), None, None, None, None


plan_dispatch_out_apply = make_apply(PlanDispatchOut)


def plan_dispatch_written(
    out: Any,
    request: PlanRequest,
    chosen: Tensor,
    rows: Tensor,
    weights: Tensor | None,
    zero_tail: bool,
) -> tuple[Tensor, ...]:
    """Run plan_dispatch with out= and gradients."""
    plan, *parts = parts_of(out, "plan, recv, slot_weights")
    if is_traced():
        check_pair(weights, parts[1])
        data, recv, slots = plan_dispatch_apply(request, chosen, rows, weights, zero_tail)
        found = (data, recv, None if weights is None else slots)
        return copy_results((bytes_of(plan), *parts), found)
    given = (request, chosen, rows, weights, zero_tail, plan, *map(alias, parts))
    return bytes_of(plan), *plan_dispatch_out_apply(*given)


class PlanDispatch(EpicFunction):
    """The operator epic::plan_dispatch with its gradient."""

    @staticmethod
    def forward(
        request: PlanRequest,
        chosen: Tensor,
        tokens: Tensor,
        weights: Tensor | None,
        zero_tail: bool,
    ) -> tuple[Tensor, ...]:
        """Call the operator."""
        return plan_dispatch_op(request, chosen, tokens, weights, zero_tail)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], out: tuple[Tensor, ...]) -> None:
        """Save the bytes of the plan, which are the first result."""
        save_plan(ctx, inputs[0][0], out[0], inputs[2])
        ctx.mark_non_differentiable(out[0])

    @staticmethod
    @first_order_only
    @translate_errors
    def backward(ctx: Any, _: Any, d_recv: Tensor, d_slots: Tensor) -> tuple[Any, ...]:
        """Return the gradients of tokens and weights."""
        return None, None, *token_gradients(ctx, d_recv, d_slots), None


plan_dispatch_apply = make_apply(PlanDispatch)


def as_tokens(tokens: Tensor, topk_idx: Tensor, num_tokens: int) -> Tensor:
    """Check the shape of tokens against topk_idx, and return tokens as [num_tokens, hidden]."""
    if tokens.dim() > 2 and topk_idx.dim() > 2 and tokens.shape[:-1] != topk_idx.shape[:-1]:
        dims = list(topk_idx.shape[:-1])
        raise EpicArgumentError(
            f"tokens has the shape {list(tokens.shape)}: must have the leading dimensions of "
            f"topk_idx, {dims}"
        )
    return as_rows("tokens", tokens, num_tokens)


def plan_dispatch(
    group: Group,
    layer: Layer,
    topk_idx: Tensor,
    tokens: Tensor,
    weights: Tensor | None = None,
    *,
    capacity: int | None = None,
    capacity_limit: Tensor | None = None,
    rank_of_expert: Any = None,
    logical_of_expert: Any = None,
    num_local_experts: int | None = None,
    zero_tail: bool = True,
    tag: int = 0,
    max_sms: int | None = None,
    compared: tuple[Any, ...] = (),
    counts_dtype: torch.dtype = torch.int32,
    out: tuple[Plan, Tensor, Tensor | None] | None = None,
) -> tuple[Plan, Tensor, Tensor | None]:
    """Make a plan and dispatch with it, in one call that is faster than two calls.

    Collective: every rank of the group calls it.

    Args:
        group: As for `plan`.
        layer: As for `plan`.
        topk_idx: As for `plan`: [..., top_k] int32 or int64.
        tokens: As for `dispatch`: [..., hidden].
        weights: As for `dispatch`: [..., top_k], or None.
        capacity: As for `plan`, but not EXACT.
        capacity_limit: As for `plan`.
        rank_of_expert: As for `plan`.
        logical_of_expert: As for `plan`.
        num_local_experts: As for `plan`.
        zero_tail: As for `dispatch`.
        tag: As for `plan`.
        max_sms: As for `plan`.
        compared: As for `plan`.
        counts_dtype: As for `plan`.
        out: (plan, recv, slot_weights), a `Plan` and tensors into which the function writes, as for
            `dispatch`.

    Returns:
        The plan, the received rows [capacity, hidden], and the weight of each slot [capacity]
        float32 or None.

    Raises:
        EpicArgumentError: A shape, dtype or device is wrong.
        EpicError: A rank failed, was late, or made a different call.

    Example:
        >>> import torch, epic.torch
        >>> layer = epic.torch.Layer(num_experts=4, top_k=2)
        >>> ids = torch.tensor([[0, 3], [2, -1]], dtype=torch.int32)
        >>> weights = torch.tensor([[0.75, 0.25], [1.0, 0.0]])
        >>> x = torch.ones(2, 8)
        >>> with epic.torch.Group(num_ranks=1, max_tokens=2, max_row_bytes=32) as group:
        ...     plan, rows, slots = epic.torch.plan_dispatch(group, layer, ids, x, weights)
        ...     out = epic.torch.combine(plan, rows, slots)
        >>> plan.expert_rows.tolist()
        [1, 0, 1, 1]
        >>> out[:, 0].tolist()
        [1.0, 1.0]
    """
    try:
        placed = (rank_of_expert, logical_of_expert, num_local_experts)
        more = (compared, counts_dtype)
        request = resolve_request(group, layer, topk_idx, capacity, placed, tag, *more)
        if capacity_limit is not None:
            request = limit_capacity(request, capacity_limit, topk_idx, out)
        request = (limit_spec(request[0], max_sms), *request[1:])
        spec, num_tokens, slots, _ = request
        if spec.flat:
            raise wrong_layout(spec, "plan, then dispatch_flat")
        if slots == EXACT:
            raise EpicArgumentError(
                "capacity is EXACT: must be a number or None; or call plan, then dispatch"
            )
        writes = isinstance(out, tuple) and (
            can_write(out, tokens, weights) or (is_traced() and needs_gradient(tokens, weights))
        )
        if out is not None and not writes:
            found = plan_dispatch_into(out, request, topk_idx, tokens, weights, zero_tail)
        elif needs_gradient(tokens, weights):
            rows = as_tokens(tokens, topk_idx, num_tokens)
            weights = as_weights("weights", weights, (num_tokens, spec.top_k), tokens)
            call = partial(plan_dispatch_written, out) if writes else plan_dispatch_apply
            found = call(request, topk_idx, rows, weights, zero_tail)
        else:
            found = plan_dispatch_op(request, topk_idx, tokens, weights, zero_tail)
    except Exception as error:
        given = (group, layer, topk_idx, tokens, weights)
        numbers: dict[str, Any] = {"num_local_experts": num_local_experts, "tag": tag}
        numbers["counts_dtype"] = counts_dtype
        raise to_epic_error(error, plan_dispatch, *given, **numbers) from None
    data, recv, slot = found
    new_plan = Plan(data, num_tokens, slots, spec, capacity_limit)
    return new_plan, recv, None if weights is None else slot


# --------------------------------------------------------------------- checkpointing ----


def save_plans(_context: Any, op: Any, *_: Any, **__: Any) -> Any:
    """Save plans and recompute everything else: a policy for selective activation checkpointing.

    Pass this function to torch.utils.checkpoint.create_selective_checkpoint_contexts. Without it,
    backward makes each plan again, which needs communication.

    Args:
        op: The operator, which torch passes.

    Returns:
        CheckpointPolicy.MUST_SAVE or PREFER_RECOMPUTE.

    Example:
        >>> from functools import partial
        >>> import torch, epic.torch
        >>> from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
        >>> contexts = partial(create_selective_checkpoint_contexts, epic.torch.save_plans)
        >>> options = epic.torch.Moe.of(num_experts=4, top_k=2, hidden=8, inner=16)
        >>> with epic.torch.Group(num_ranks=1, max_tokens=4, max_row_bytes=32) as group:
        ...     layer = epic.torch.MoE(group, options)
        ...     x = torch.randn(4, 8, requires_grad=True)
        ...     out, _ = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        ...     out.sum().backward()
        >>> x.grad.shape
        torch.Size([4, 8])
    """
    policy = torch.utils.checkpoint.CheckpointPolicy
    is_plan = op.namespace == "epic" and op._opname in ("plan", "plan_dispatch")
    return policy.MUST_SAVE if is_plan else policy.PREFER_RECOMPUTE


def save_exchange(_context: Any, op: Any, *_: Any, **__: Any) -> Any:
    """Save the results of all EPIC operators: a policy for selective activation checkpointing.

    Pass this function to torch.utils.checkpoint.create_selective_checkpoint_contexts. Use it
    instead of `save_plans` if a program has several compiled functions and a checkpoint is inside
    of one of them.

    Args:
        op: The operator, which torch passes.

    Returns:
        CheckpointPolicy.MUST_SAVE or PREFER_RECOMPUTE.

    Example:
        See `save_plans`, and pass save_exchange in its place.
    """
    policy = torch.utils.checkpoint.CheckpointPolicy
    return policy.MUST_SAVE if op.namespace == "epic" else policy.PREFER_RECOMPUTE
