# SPDX-License-Identifier: Apache-2.0
"""The functions that dispatch rows.

They differ in three ways. A row is sent once for each choice, or once for each rank
(dispatch_flat). It is sent in its own dtype, or in 8 bits (dispatch_quantized). The plan exists
already, or the call makes it (plan_dispatch).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from epic.errors import EpicArgumentError
from epic.jax.arrays import FLOATS, as_array
from epic.jax.call import (
    ArraySpec,
    call_handler,
    cast_all_varying,
    previous_call,
    record_call,
    site_and_rank,
    zero_gradient,
)
from epic.jax.e4m3 import multiply_mx
from epic.jax.groups import Group
from epic.jax.over_mesh import over_mesh
from epic.jax.steps import (
    PLAN_PARTS,
    Plan,
    PlanSpec,
    as_capacity_limit,
    as_channel,
    as_tokens,
    as_weights,
    check_group,
    check_plan,
    expert_tables,
    finish_call,
    limit_sms,
    make_plan,
    make_plan_spec,
    max_local_experts,
    no_gradients,
    ordering_deps,
    plan_attributes,
    plan_operands,
    plan_results,
)
from epic.options import Layer, Moe, check_choice

NARROW = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3",
          "float8_e3m4", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz")  # fmt: skip
ROW_TYPES = (*FLOATS, *NARROW)
SCALES_OF = {"1x128": ("float32",), "1x32": ("uint8", "float8_e8m0fnu")}
SCALES = ("float32", "bfloat16", "float16", "float64", *NARROW)


# -------------------------------------------------------------------------- dispatch ----


def slot_results(spec: PlanSpec, weights: Any) -> list[ArraySpec | None]:
    """Return the specs of the slots' weights, and with layout "flat" of their local experts."""
    if spec.layer.layout != "flat":
        return [None if weights is None else ArraySpec((spec.capacity,), jnp.float32)]
    choices = (spec.capacity, spec.layer.top_k)
    found = None if weights is None else ArraySpec(choices, jnp.float32)
    return [found, ArraySpec(choices, jnp.int32)]


def dispatch_results(spec: PlanSpec, tokens: Any, weights: Any) -> list[ArraySpec | None]:
    """Return the result specs of dispatch."""
    recv = ArraySpec((spec.capacity, tokens.shape[1]), tokens.dtype)
    return [recv, *slot_results(spec, weights)]


def target_of(spec: PlanSpec, form: str) -> str:
    """Return the name of the handler for a dispatch.

    form: "": rows in their own dtype.  "quantized": rows that the handler rounds.  "scaled": rows
    of the caller with scales.
    """
    flat = "_flat" if spec.layer.layout == "flat" else ""
    return f"dispatch{flat}" + (f"_{form}" if form else "")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch_rows(spec: PlanSpec, data: Any, tokens: Any, weights: Any) -> tuple[Any, ...]:
    """Run dispatch or, with layout "flat", dispatch_flat on checked arrays.

    data contains the plan's bytes and the arrays to wait for.  The last result is the byte that is
    available when the call has finished.
    """
    operands = [data[0], tokens, weights, *site_and_rank(spec.group, data[0], tokens), *data[1:]]
    results = dispatch_results(spec, tokens, weights)
    target = target_of(spec, "")
    return tuple(call_handler(target, results, operands, spec.group, **spec.sizes()))


def dispatch_forward(spec: PlanSpec, data: Any, tokens: Any, weights: Any) -> tuple[Any, Any]:
    """Save the plan, which is all that backward needs."""
    return dispatch_rows.fun(spec, data, tokens, weights), data


def return_gradients(spec: PlanSpec, data: Any, gradients: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return the gradients of tokens and weights, from those of received rows and their weights."""
    d_recv, d_slot_weights = gradients[:2]
    d_tokens = ArraySpec((spec.num_tokens, d_recv.shape[1]), d_recv.dtype)
    d_weights = ArraySpec((spec.num_tokens, spec.layer.top_k), jnp.float32)
    operands = [data[0], d_recv, d_slot_weights, *site_and_rank(spec.group, data[0], d_recv)]
    results = [d_tokens, None if d_slot_weights is None else d_weights]
    out = call_handler("dispatch_backward", results, operands, spec.group, **spec.sizes())
    return out[0], out[1]


def dispatch_backward(spec: PlanSpec, data: Any, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the gradients of dispatch; the plan has none."""
    return (no_gradients(data), *return_gradients(spec, data, gradients))


dispatch_rows.defvjp(dispatch_forward, dispatch_backward)


@over_mesh
def dispatch(
    plan: Plan,
    tokens: Any,
    weights: Any = None,
    *,
    quantize: str | None = None,
    max_sms: int | None = None,
) -> tuple[Any, Any]:
    """Send each token to the ranks of its experts, one row for each choice.

    Collective; differentiable in tokens and weights.  Rows of an 8-bit dtype (float8, int8, uint8)
    are sent unchanged and have no gradient.

    Args:
        plan: a plan whose layout is "expert_major".
        tokens: [..., hidden] a float dtype or an 8-bit dtype; [...] as in topk_idx.
        weights: [..., top_k] any float dtype, or None: the weight of each choice.
        quantize: "1x128" or "1x32": rows are rounded to float8_e4m3fn with a scale for each block
            of 128 or 32 columns, and sent in this form.  The result has the dtype of tokens.  The
            gradient is computed as if rows were not rounded.  None: rows are sent in their own
            dtype.
        max_sms: on GPUs the largest number of SMs of this call and its gradient; None: that of
            the plan.

    Returns:
        Rows [capacity, hidden] in the dtype of tokens, zeros in slots without a token, and
        slot_weights [capacity] float32 (None without weights).

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.

    Example:
        >>> import jax.numpy as jnp
        >>> import epic.jax
        >>> layer = epic.jax.Layer(num_experts=4, top_k=2)
        >>> topk_idx, weights = jnp.array([[0, 3]]), jnp.array([[0.75, 0.25]])
        >>> with epic.jax.open(max_tokens=1, max_row_bytes=64) as group:  # one rank
        ...     plan = epic.jax.plan(group, layer, topk_idx)
        ...     rows, slot_weights = epic.jax.dispatch(plan, jnp.ones((1, 8)), weights)
        ...     rows.shape, slot_weights.tolist()
        ((2, 8), [0.75, 0.25])

    """
    plan = as_plan(plan, "expert_major", "dispatch_flat", max_sms)
    recv, slot_weights = send_rows(plan, tokens, weights, quantize)
    return recv, slot_weights


def as_plan(plan: Plan, layout: str, other: str, max_sms: int | None) -> Plan:
    """Return the plan of a dispatch, with max_sms, after checking it and its layout.

    other: the function to call for the other layout.
    """
    check_plan(plan)
    check_layout(plan.spec.layer, layout, other)
    return limit_sms(plan, max_sms)


def send_rows(plan: Plan, tokens: Any, weights: Any, quantize: str | None) -> tuple[Any, ...]:
    """Return the results of dispatch or, with layout "flat", of dispatch_flat."""
    if quantize is not None:
        check_choice("quantize", quantize, BLOCKS)
        inputs = dispatch_inputs(plan, tokens, weights)
        return finish_call(plan, dispatch_rounded(plan.spec, quantize, *inputs))
    if is_narrow(tokens):
        recv, _, *slots = dispatch_narrow(plan, tokens, weights, None)
        return recv, *slots
    inputs = dispatch_inputs(plan, tokens, weights, ROW_TYPES)
    return finish_call(plan, dispatch_rows(plan.spec, *inputs))


def check_layout(layer: Layer, layout: str, other: str) -> None:
    """Raise an error if the layer has another layout; `other` is the function for it."""
    if layer.layout != layout:
        raise EpicArgumentError(f"layout is {layer.layout!r}: must be {layout!r}, or use {other}")


def dispatch_inputs(
    plan: Plan, tokens: Any, weights: Any, dtypes: Sequence[str] = FLOATS
) -> list[Any]:
    """Return the plan's operand, tokens and weights, after checking them."""
    return plan_operands(plan, *rows_and_weights(plan.spec, tokens, weights, dtypes))


def rows_and_weights(
    spec: PlanSpec, tokens: Any, weights: Any, dtypes: Sequence[str] = FLOATS
) -> tuple[Any, Any]:
    """Return tokens as [num_tokens, hidden] and weights, after checking them."""
    rows = as_tokens("tokens", tokens, spec.token_dims, dtypes)
    spec.group.check_width("tokens", rows)
    return rows, as_weights("weights", weights, spec.token_dims, spec.layer.top_k)


# -------------------------------------------------------------------- flat, quantized ----


@over_mesh
def dispatch_flat(
    plan: Plan,
    tokens: Any,
    weights: Any = None,
    *,
    quantize: str | None = None,
    max_sms: int | None = None,
) -> tuple[Any, Any, Any]:
    """Send each token once to each rank that has one of its experts.

    Collective; differentiable in tokens and weights.  Rows of an 8-bit dtype (float8, int8, uint8)
    are sent unchanged and have no gradient.

    Your program then runs, for each received row, all its experts on this device.  It passes the
    weighted sum of their results to `combine`, as one row.

    Args:
        plan: a plan whose layout is "flat".
        tokens: [..., hidden] a float dtype or an 8-bit dtype.
        weights: [..., top_k] any float dtype, or None.
        quantize: see `dispatch`.
        max_sms: see `dispatch`.

    Returns:
        Three arrays: the rows [capacity, hidden] in the dtype of tokens; the weights of their
        choices [capacity, top_k] float32, or None without weights; the experts of this device that
        the row's token has chosen [capacity, top_k] int32, numbered from 0, and -1 in unused
        entries.

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.

    Example:
        >>> import jax.numpy as jnp
        >>> import epic.jax
        >>> layer = epic.jax.Layer(num_experts=4, top_k=2, layout="flat")
        >>> topk_idx, weights = jnp.array([[0, 3]]), jnp.array([[0.75, 0.25]])
        >>> with epic.jax.open(max_tokens=1, max_row_bytes=64) as group:  # one rank
        ...     plan = epic.jax.plan(group, layer, topk_idx)
        ...     rows, weights, experts = epic.jax.dispatch_flat(plan, jnp.ones((1, 8)), weights)
        ...     rows.shape, weights.tolist(), experts.tolist()
        ((1, 8), [[0.75, 0.25]], [[0, 3]])

    """
    plan = as_plan(plan, "flat", "dispatch", max_sms)
    recv, slot_weights, chosen = send_rows(plan, tokens, weights, quantize)
    return recv, slot_weights, chosen


# For each block format its number in C, its columns and the dtype of its scales.
BLOCKS = {"1x128": (1, 128, jnp.float32), "1x32": (2, 32, jnp.uint8)}


def is_narrow(x: Any) -> bool:
    """Return whether x has a dtype that the core sends but cannot add."""
    return getattr(getattr(x, "dtype", None), "name", None) in NARROW


def as_bytes(x: Any) -> Any:
    """Return [rows, n] of any dtype as bytes [rows, n * size]."""
    return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(x.shape[0], -1)


def from_bytes(data: Any, dtype: Any) -> Any:
    """Return bytes [rows, n * size] as [rows, n] of the dtype."""
    size = jnp.dtype(dtype).itemsize
    shape = (data.shape[0], data.shape[1] // size, size) if size > 1 else data.shape
    return jax.lax.bitcast_convert_type(data.reshape(shape), dtype)


def dispatch_narrow(plan: Plan, tokens: Any, weights: Any, scales: Any) -> tuple[Any, ...]:
    """Send rows of an 8-bit dtype with their scales (or None) and weights, unchanged.

    Returns the rows, the scales, the slots' weights, and with layout "flat" their local experts.
    """
    spec = plan.spec
    rows, weights = rows_and_weights(spec, tokens, weights, NARROW)
    extra = None if scales is None else as_tokens("scales", scales, spec.token_dims, SCALES, "n")
    if extra is not None:
        spec.group.check_width("scales", extra)
    given = [None if x is None else jax.lax.stop_gradient(x) for x in (rows, weights)]
    packed, form = [as_bytes(given[0])], ""
    if extra is not None:
        packed, form = [*packed, as_bytes(jax.lax.stop_gradient(extra))], "scaled"
    data, slot_weights, *packed = cast_all_varying(spec.group, plan.bytes, given[1], *packed)
    results: list[ArraySpec | None] = [
        ArraySpec((spec.capacity, x.shape[1]), jnp.uint8) for x in packed
    ]
    results += slot_results(spec, slot_weights)
    operands = [data, *packed, slot_weights, *site_and_rank(spec.group, data, *packed)]
    out = call_handler(target_of(spec, form), results, operands, spec.group, **spec.sizes())
    back = None if extra is None else from_bytes(out[1], extra.dtype)
    return from_bytes(out[0], rows.dtype), back, *out[len(packed) : -1]


@over_mesh
def dispatch_quantized(
    plan: Plan,
    tokens: Any,
    weights: Any = None,
    block: str = "1x128",
    *,
    scales: Any = None,
    max_sms: int | None = None,
) -> tuple[Any, Any, Any]:
    """Send tokens as float8_e4m3fn rows with their scales.  There is no gradient.

    Args:
        plan: a plan whose layout is "expert_major".
        tokens: [..., hidden] a float dtype; with `scales` an 8-bit dtype.
        weights: [..., top_k] any float dtype, or None.
        block: "1x128": a float32 scale for each 128 columns; "1x32": a power of two as an e8m0 byte
            for each 32 columns.
        scales: [..., n] scales of tokens that are already quantized.  Tokens and scales are sent
            unchanged, and block is ignored.  None: the tokens are quantized.
        max_sms: see `dispatch`.

    Returns:
        Rows [capacity, hidden] float8_e4m3fn (with `scales`: dtype of tokens), scales [capacity,
        blocks], and slot_weights [capacity] float32 (None without weights).

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.

    Example:
        >>> import jax.numpy as jnp
        >>> import epic.jax
        >>> layer = epic.jax.Layer(num_experts=2, top_k=1)
        >>> with epic.jax.open(max_tokens=1, max_row_bytes=512) as group:  # one rank
        ...     plan = epic.jax.plan(group, layer, jnp.array([[1]]))
        ...     rows, scales, _ = epic.jax.dispatch_quantized(plan, jnp.ones((1, 128)))
        ...     rows.dtype.name, scales.shape
        ('float8_e4m3fn', (1, 1))

    """
    plan = as_plan(plan, "expert_major", "dispatch_flat_quantized", max_sms)
    rows, found, slot_weights = send_quantized(plan, tokens, weights, block, scales)
    return rows, found, slot_weights


@over_mesh
def dispatch_flat_quantized(
    plan: Plan,
    tokens: Any,
    weights: Any = None,
    block: str = "1x128",
    *,
    scales: Any = None,
    max_sms: int | None = None,
) -> tuple[Any, Any, Any, Any]:
    """Send tokens as `dispatch_flat` does, as float8_e4m3fn rows with their scales.

    There is no gradient.

    Args:
        plan: a plan whose layout is "flat".
        tokens: see `dispatch_quantized`.
        weights: [..., top_k] any float dtype, or None.
        block: see `dispatch_quantized`.
        scales: see `dispatch_quantized`.
        max_sms: see `dispatch`.

    Returns:
        Four arrays: the rows [capacity, hidden] float8_e4m3fn; their scales [capacity, blocks]; the
        weights of their choices [capacity, top_k] float32, or None without weights; their local
        experts [capacity, top_k] int32, as `dispatch_flat` returns them.  If `scales` are passed,
        rows and scales have the dtypes that were passed.

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.

    Example:
        >>> import jax.numpy as jnp
        >>> import epic.jax
        >>> layer = epic.jax.Layer(num_experts=4, top_k=2, layout="flat")
        >>> with epic.jax.open(max_tokens=1, max_row_bytes=512) as group:  # one rank
        ...     plan = epic.jax.plan(group, layer, jnp.array([[0, 3]]))
        ...     found = epic.jax.dispatch_flat_quantized(plan, jnp.ones((1, 128)))
        ...     rows, scales, _, experts = found
        ...     rows.dtype.name, scales.shape, experts.tolist()
        ('float8_e4m3fn', (1, 1), [[0, 3]])

    """
    plan = as_plan(plan, "flat", "dispatch_quantized", max_sms)
    rows, found, slot_weights, chosen = send_quantized(plan, tokens, weights, block, scales)
    return rows, found, slot_weights, chosen


def send_quantized(plan: Plan, tokens: Any, weights: Any, block: str, scales: Any) -> Any:
    """Return the results of dispatch_quantized or dispatch_flat_quantized."""
    check_choice("block", block, BLOCKS)
    if scales is not None:
        return dispatch_narrow(plan, tokens, weights, scales)
    data, rows, weights = dispatch_inputs(plan, tokens, weights)
    rows, weights = (None if x is None else jax.lax.stop_gradient(x) for x in (rows, weights))
    return finish_call(plan, quantize_and_dispatch(plan.spec, block, data, rows, weights))


def quantize_and_dispatch(
    spec: PlanSpec, block: str, data: Any, rows: Any, weights: Any
) -> tuple[Any, ...]:
    """Run dispatch_quantized on checked arrays."""
    kind, size, scale_type = BLOCKS[block]
    slots, hidden = spec.capacity, rows.shape[1]
    results: list[ArraySpec | None] = [ArraySpec((slots, hidden), jnp.float8_e4m3fn)]
    results += [ArraySpec((slots, -(-hidden // size)), scale_type)]
    results += slot_results(spec, weights)
    operands = [data[0], rows, weights, *site_and_rank(spec.group, data[0], rows), *data[1:]]
    numbers, target = {**spec.sizes(), "quantize": kind}, target_of(spec, "quantized")
    return tuple(call_handler(target, results, operands, spec.group, **numbers))


def dequantize(rows: Any, scales: Any, dtype: Any, block: str = "1x128") -> Any:
    """Multiply quantized rows by their scales.

    Args:
        rows: [slots, hidden], as `dispatch_quantized` returns them.
        scales: [slots, blocks]: float32 for "1x128", uint8 or float8_e8m0fnu for "1x32".
        dtype: the dtype of the result: float32, bfloat16, float16 or float64.
        block: "1x128" or "1x32", with which the rows were quantized.

    Returns:
        The rows [slots, hidden] in that dtype.

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.

    Example:
        >>> import jax.numpy as jnp
        >>> import epic.jax
        >>> layer = epic.jax.Layer(num_experts=2, top_k=1)
        >>> with epic.jax.open(max_tokens=1, max_row_bytes=512) as group:  # one rank
        ...     plan = epic.jax.plan(group, layer, jnp.array([[1]]))
        ...     rows, scales, _ = epic.jax.dispatch_quantized(plan, jnp.ones((1, 128)))
        ...     float(epic.jax.dequantize(rows, scales, jnp.float32)[0, 0])
        1.0

    """
    check_choice("block", block, BLOCKS)
    if jnp.dtype(dtype).name not in FLOATS:
        raise EpicArgumentError(f"dtype is {jnp.dtype(dtype)}: must be {' or '.join(FLOATS)}")
    size, scale_types = BLOCKS[block][1], SCALES_OF[block]
    rows = as_array("rows", rows, (*NARROW, *FLOATS), ("slots", "hidden"))
    slots, hidden = rows.shape
    shape = (slots, (f"{hidden} columns / {size} =", -(-hidden // size)))
    scales = as_array("scales", scales, scale_types, shape)
    if block == "1x32":
        return multiply_mx(rows, scales).astype(dtype)
    wide = jnp.repeat(scales, size, axis=1)[:, :hidden]
    return (rows.astype(jnp.float32) * wide).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def dispatch_rounded(spec: PlanSpec, block: str, data: Any, tokens: Any, weights: Any) -> Any:
    """Run dispatch with quantize=.  It has the gradient of dispatch, without rounding."""
    rows, scales, *rest = quantize_and_dispatch(spec, block, data, tokens, weights)
    return dequantize(rows, scales, tokens.dtype, block), *rest


def dispatch_rounded_forward(
    spec: PlanSpec, block: str, data: Any, tokens: Any, weights: Any
) -> tuple[Any, Any]:
    """Save the plan, which is all that backward needs."""
    return dispatch_rounded.fun(spec, block, data, tokens, weights), data


def dispatch_rounded_backward(spec: PlanSpec, _: str, data: Any, gradients: Any) -> tuple[Any, ...]:
    """Return the gradients of rows that are not rounded."""
    return (no_gradients(data), *return_gradients(spec, data, gradients))


dispatch_rounded.defvjp(dispatch_rounded_forward, dispatch_rounded_backward)


# --------------------------------------------------------------------- plan_dispatch ----


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def plan_dispatch_rows(
    spec: PlanSpec, local: int, ints: tuple[Any, ...], tokens: Any, weights: Any
) -> tuple[Any, ...]:
    """Run plan_dispatch on checked arrays.

    ints contains the choices, rank_of_expert, logical_of_expert, capacity_limit, the channel, and
    the arrays to wait for.
    """
    chosen, owners, logical, limit, number, *after = ints
    results = plan_results(spec, owners is not None, local) + dispatch_results(
        spec, tokens, weights
    )
    operands = [
        chosen,
        owners,
        logical,
        limit,
        tokens,
        weights,
        *site_and_rank(spec.group, chosen, tokens),
    ]
    operands += [number, *after]
    out = call_handler(
        "plan_dispatch", results, operands, spec.group, **plan_attributes(spec, local)
    )
    return tuple(out)


def plan_dispatch_forward(
    spec: PlanSpec, local: int, ints: tuple[Any, ...], tokens: Any, weights: Any
) -> tuple[Any, Any]:
    """Save the plan and the shapes of the integers."""
    out = plan_dispatch_rows.fun(spec, local, ints, tokens, weights)
    return out, (out[0], ints)


def plan_dispatch_backward(
    spec: PlanSpec, _: int, saved: tuple[Any, Any], gradients: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Return the gradients, as dispatch_backward() does."""
    data, ints = saved
    return (
        jax.tree.map(zero_gradient, ints),
        *return_gradients(spec, (data,), gradients[PLAN_PARTS:]),
    )


plan_dispatch_rows.defvjp(plan_dispatch_forward, plan_dispatch_backward)


@over_mesh
def plan_dispatch(
    group: Group,
    layer: Layer,
    topk_idx: Any,
    tokens: Any,
    weights: Any = None,
    *,
    capacity: int | None = None,
    capacity_limit: Any = None,
    rank_of_expert: Any = None,
    logical_of_expert: Any = None,
    num_local_experts: int | None = None,
    channel: Any = None,
    after: Any = None,
    moe: Moe | None = None,
    max_sms: int = 0,
) -> tuple[Plan, Any, Any]:
    """Make a plan and dispatch tokens with it, as one collective call.

    The results are those of `plan` and then `dispatch`, but one call is faster than two.

    Args:
        group: the group.
        layer: the layer, of layout "expert_major"; static.
        topk_idx: [..., top_k] int32 or int64: the chosen experts of each token; negative: no
            expert.
        tokens: [..., hidden] a float dtype.
        weights: [..., top_k] any float dtype, or None.
        capacity: see `plan`.
        capacity_limit: see `plan`.
        rank_of_expert: see `plan`.
        logical_of_expert: see `plan`.
        num_local_experts: see `plan`.
        channel: see `plan`.
        after: see `plan`.
        moe: see `plan`.
        max_sms: see `plan`.

    Returns:
        The Plan, rows [capacity, hidden] in the dtype of tokens, and slot_weights [capacity]
        float32 (None without weights).

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.

    Example:
        >>> import jax.numpy as jnp
        >>> import epic.jax
        >>> layer = epic.jax.Layer(num_experts=4, top_k=2)
        >>> topk_idx, x = jnp.array([[0, 1], [2, 3], [0, 2]]), jnp.ones((3, 8))
        >>> with epic.jax.open(max_tokens=4, max_row_bytes=64) as group:  # one rank
        ...     plan, rows, _ = epic.jax.plan_dispatch(group, layer, topk_idx, x)
        ...     plan.expert_tokens.tolist(), epic.jax.combine(plan, rows)[:, 0].tolist()
        ([2, 1, 2, 1], [2.0, 2.0, 2.0])

    """
    check_group(group, layer)
    check_layout(layer, "expert_major", "plan and dispatch_flat")
    spec, chosen = make_plan_spec(group, layer, topk_idx, capacity, moe, max_sms)
    local = max_local_experts(group, layer, rank_of_expert, num_local_experts)
    placed = expert_tables(group, layer, rank_of_expert, logical_of_expert)
    arrays = [
        *rows_and_weights(spec, tokens, weights),
        chosen,
        *placed,
        as_capacity_limit(capacity_limit),
        as_channel(channel),
        *ordering_deps(after),
        *previous_call(group),
    ]
    rows, weights, *ints = cast_all_varying(group, *arrays)
    out = plan_dispatch_rows(spec, local, tuple(ints), rows, weights)
    record_call(group, out[-1])
    return make_plan(spec, local, out[:PLAN_PARTS], ints[3]), *out[PLAN_PARTS:-1]
