# SPDX-License-Identifier: Apache-2.0
"""The functions of epic.jax on global arrays, except moe, for a plain jax.jit.

Each function inserts a shard_map around the function of epic.jax with its name.  Without a
shard_map XLA would gather every array and make the call on all devices.  Each array of the results
contains those of all devices, one after the other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from epic.jax import dispatching, router, steps
from epic.jax import experts as mlp
from epic.jax.arrays import (
    ANY_ROWS,
    FLOATS,
    INDICES,
    INTEGERS,
    array_of,
    check_array,
    check_kind,
)
from epic.jax.groups import Group
from epic.jax.token_specs import (
    TokenAxes,
    axes_of_spec,
    check_divisible,
    map_over_mesh,
    rows_specs,
    token_spec,
)
from epic.options import Experts, Layer, Router

# A number of dimensions of tokens that is larger than any real one.  experts() uses it, because the
# rows of a receive buffer do not show how many dimensions the tokens have.
MOST_DIMS = 64

# ----------------------------------------------------------------------- making a plan ----


def check_choices(options: Layer, topk_idx: Any, dims: Sequence[Any]) -> Any:
    """Return the choices [B, ..., top_k] after checking them."""
    shape = (*dims, ("top_k", options.top_k))
    return check_array("topk_idx", topk_idx, INDICES, shape)


def check_tables(group: Group, layer: Layer, owners: Any, logical: Any) -> list[Any]:
    """Return rank_of_expert and logical_of_expert as arrays, after checking them.

    None stays None.
    """
    steps.expert_tables(group, layer, owners, logical)
    shape, found = [("num_experts", layer.num_experts)], []
    for name, table in (("rank_of_expert", owners), ("logical_of_expert", logical)):
        found.append(None if table is None else check_array(name, table, INTEGERS, shape))
    return found


def keep_token_axes(plan: steps.Plan, spec: P, hidden_axis: str | None) -> steps.Plan:
    """Return the plan with a spec that contains how its tokens are sharded."""
    return replace(plan, spec=replace(plan.spec, token_axes=spec, hidden_axis=hidden_axis))


def plan(
    mesh: Mesh,
    group: Group,
    options: Layer,
    topk_idx: Any,
    *,
    rank_of_expert: Any = None,
    logical_of_expert: Any = None,
    num_local_experts: int | None = None,
    token_axes: TokenAxes = None,
    **more: Any,
) -> steps.Plan:
    """Make the plan of the experts that the tokens of all devices chose, on global arrays.

    See `epic.jax.plan`.  Each array of the plan contains those of all devices.

    Args:
        mesh: the mesh that the group was opened with.
        group: the group.
        options: the layer; static.
        topk_idx: [B, ..., top_k] int32 or int64: the chosen experts; negative: no expert.
        rank_of_expert: see `epic.jax.plan`.
        logical_of_expert: see `epic.jax.plan`.
        num_local_experts: see `epic.jax.plan`.
        token_axes: see `moe`.
        **more: other arguments of `epic.jax.plan`: capacity, capacity_limit, channel, after,
            max_sms.  All devices have the same capacity_limit.

    Returns:
        The Plan of all devices.

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.

    Example:
        See `plan_dispatch`.

    """
    steps.check_group(group, options, "options")
    topk_idx = check_choices(options, topk_idx, (ANY_ROWS,))
    spec, axes = token_spec(mesh, group, token_axes, topk_idx.ndim)
    check_divisible(mesh, "topk_idx", topk_idx, spec)
    tables = check_tables(group, options, rank_of_expert, logical_of_expert)
    count = steps.max_local_experts(group, options, tables[0], num_local_experts)

    def local(chosen: Any, owners: Any, logical: Any) -> steps.Plan:
        placing = {"rank_of_expert": owners, "logical_of_expert": logical}
        placing |= {"num_local_experts": count}
        return steps.plan(group, options, chosen, **placing, **more)

    run = map_over_mesh(mesh, local, (spec, P(), P()), P(axes))
    return keep_token_axes(run(topk_idx, *tables), spec, None)


def plan_dispatch(
    mesh: Mesh,
    group: Group,
    options: Layer,
    topk_idx: Any,
    tokens: Any,
    weights: Any = None,
    *,
    rank_of_expert: Any = None,
    logical_of_expert: Any = None,
    num_local_experts: int | None = None,
    token_axes: TokenAxes = None,
    hidden_axis: str | None = None,
    **more: Any,
) -> tuple[steps.Plan, Any, Any]:
    """Make a plan and dispatch tokens with it, on global arrays.

    See `epic.jax.plan_dispatch`.  Each array of the results contains those of all devices.

    Args:
        mesh: the mesh that the group was opened with.
        group: the group.
        options: the layer; static.
        topk_idx: [B, ..., top_k] int32 or int64: the chosen experts; negative: no expert.
        tokens: [B, ..., hidden] a float dtype.
        weights: [B, ..., top_k] any float dtype, or None.
        rank_of_expert: see `epic.jax.plan`.
        logical_of_expert: see `epic.jax.plan`.
        num_local_experts: see `epic.jax.plan`.
        token_axes: see `moe`.
        hidden_axis: a mesh axis over which hidden is sharded.  Each device of this axis has a part
            of the columns of the tokens.
        **more: other arguments of `epic.jax.plan_dispatch`: capacity, capacity_limit, channel,
            after, max_sms.  All devices have the same capacity_limit.

    Returns:
        The Plan, rows and slot_weights of all devices.

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import epic.jax
        >>> layer = epic.jax.Layer(num_experts=8, top_k=2)
        >>> mlp = epic.jax.Experts(hidden=8, inner=16)
        >>> weights = epic.jax.ExpertWeights(jnp.ones((8, 8, 32)), jnp.ones((8, 16, 8)))
        >>> topk_idx, x = jnp.tile(jnp.array([[0, 5]]), (8, 1)), jnp.ones((8, 8))
        >>> mesh = jax.sharding.Mesh(jax.devices(), ("ep",))
        >>> with epic.jax.open(mesh, "ep", like=x) as group:
        ...     steps = epic.jax.sharded
        ...     plan, rows, _ = steps.plan_dispatch(mesh, group, layer, topk_idx, x)
        ...     counts = plan.expert_rows, plan.expert_tokens
        ...     rows = steps.experts(mesh, mlp, rows, *counts, weights, group=group)
        ...     steps.combine(mesh, plan, rows).shape
        (8, 8)

    """
    steps.check_group(group, options, "options")
    tokens = check_array("tokens", tokens, dispatching.ROW_TYPES, (ANY_ROWS, "hidden"))
    dims = (*tokens.shape[:-1], ("top_k", options.top_k))
    topk_idx = check_array("topk_idx", topk_idx, INDICES, dims)
    if weights is not None:
        weights = check_array("weights", weights, FLOATS, dims)
    rows, choices, slots, own = rows_specs(mesh, group, token_axes, tokens.ndim, hidden_axis)
    check_divisible(mesh, "tokens", tokens, rows)
    tables = check_tables(group, options, rank_of_expert, logical_of_expert)
    count = steps.max_local_experts(group, options, tables[0], num_local_experts)

    def local(chosen: Any, x: Any, w: Any, owners: Any, logical: Any) -> Any:
        placing = {"rank_of_expert": owners, "logical_of_expert": logical}
        placing |= {"num_local_experts": count}
        return dispatching.plan_dispatch(group, options, chosen, x, w, **placing, **more)

    ins, outs = (choices, rows, choices, P(), P()), (own, slots, own)
    run = map_over_mesh(mesh, local, ins, outs)
    found, recv, slot_weights = run(topk_idx, tokens, weights, *tables)
    return keep_token_axes(found, choices, hidden_axis), recv, slot_weights


# ------------------------------------------------------------------- calls on a plan ----


def specs_of_plan(
    mesh: Mesh, plan: steps.Plan, token_axes: TokenAxes, hidden_axis: str | None
) -> tuple[P, P, P, P]:
    """Return rows_specs() for the calls on a plan of all devices."""
    check_kind("plan", plan, steps.Plan)
    spec = plan.spec
    token_axes = spec.token_axes if token_axes is None else token_axes
    hidden_axis = spec.hidden_axis if hidden_axis is None else hidden_axis
    return rows_specs(mesh, spec.group, token_axes, len(spec.token_dims) + 1, hidden_axis)


def send(
    mesh: Mesh,
    function: Callable[..., Any],
    plan: steps.Plan,
    arrays: tuple[Any, Any, Any],
    num_rows: int,
    num_own: int,
    where: tuple[TokenAxes, str | None],
    **more: Any,
) -> Any:
    """Run a dispatch function of epic.jax on global arrays.

    Args:
        mesh: the mesh that the group was opened with.
        function: the function.
        plan: the plan of all devices.
        arrays: tokens, weights or None, scales or None.
        num_rows: the number of its first results that are rows, sharded in hidden like the tokens.
        num_own: the number of its other results, which are not sharded in hidden.
        where: token_axes and hidden_axis; None: those of the plan.
        **more: other arguments of the function.

    """
    rows, choices, slots, own = specs_of_plan(mesh, plan, *where)
    tokens = check_array("tokens", arrays[0], dispatching.ROW_TYPES, (ANY_ROWS, "hidden"))
    weights, scales = arrays[1], array_of(arrays[2])
    if weights is not None:
        shape = (ANY_ROWS, ("top_k", plan.spec.layer.top_k))
        weights = check_array("weights", weights, FLOATS, shape)
    check_divisible(mesh, "tokens", tokens, rows)
    check_divisible(mesh, "weights", weights, choices)
    check_divisible(mesh, "scales", scales, rows)

    def local(plan: steps.Plan, tokens: Any, weights: Any, scales: Any) -> Any:
        with_scales = {} if scales is None else {"scales": scales}
        return function(plan, tokens, weights, **with_scales, **more)

    outs = (slots,) * num_rows + (own,) * num_own
    return map_over_mesh(mesh, local, (own, rows, choices, rows), outs)(
        plan, tokens, weights, scales
    )


def dispatch(
    mesh: Mesh,
    plan: steps.Plan,
    tokens: Any,
    weights: Any = None,
    *,
    token_axes: TokenAxes = None,
    hidden_axis: str | None = None,
    **more: Any,
) -> tuple[Any, Any]:
    """Send each token to the ranks of its experts, on global arrays.

    See `epic.jax.dispatch`.

    Args:
        mesh: the mesh that the group was opened with.
        plan: the plan that `plan` or `plan_dispatch` of this module returned.
        tokens: [B, ..., hidden] a float dtype or an 8-bit dtype.
        weights: [B, ..., top_k] any float dtype, or None.
        token_axes: as passed to `plan`; None: that of the plan.
        hidden_axis: a mesh axis over which hidden is sharded; None: that of the plan.
        **more: other arguments of `epic.jax.dispatch`: quantize, max_sms.

    Returns:
        Rows and slot_weights of all devices.

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import epic.jax
        >>> layer = epic.jax.Layer(num_experts=8, top_k=2)
        >>> topk_idx, x = jnp.tile(jnp.array([[0, 5]]), (8, 1)), jnp.ones((8, 8))
        >>> mesh = jax.sharding.Mesh(jax.devices(), ("ep",))
        >>> with epic.jax.open(mesh, "ep", like=x) as group:
        ...     plan = epic.jax.sharded.plan(mesh, group, layer, topk_idx)
        ...     rows, _ = epic.jax.sharded.dispatch(mesh, plan, x)
        ...     float(epic.jax.sharded.combine(mesh, plan, rows)[0, 0])
        2.0

    """
    where, arrays = (token_axes, hidden_axis), (tokens, weights, None)
    recv, slot = send(mesh, dispatching.dispatch, plan, arrays, 1, 1, where, **more)
    return recv, slot


def dispatch_flat(
    mesh: Mesh,
    plan: steps.Plan,
    tokens: Any,
    weights: Any = None,
    *,
    token_axes: TokenAxes = None,
    hidden_axis: str | None = None,
    **more: Any,
) -> tuple[Any, Any, Any]:
    """Send each token once to each rank that has one of its experts, on global arrays.

    See `epic.jax.dispatch_flat`.

    Args:
        mesh: see `dispatch`.
        plan: see `dispatch`.
        tokens: see `dispatch`.
        weights: see `dispatch`.
        token_axes: see `dispatch`.
        hidden_axis: see `dispatch`.
        **more: other arguments of `epic.jax.dispatch_flat`: quantize, max_sms.

    Returns:
        Rows, their weights and their local experts, of all devices.

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.

    Example:
        See `dispatch`, and pass a plan of a layer with layout="flat".

    """
    where, arrays = (token_axes, hidden_axis), (tokens, weights, None)
    recv, slot, found = send(mesh, dispatching.dispatch_flat, plan, arrays, 1, 2, where, **more)
    return recv, slot, found


def dispatch_quantized(
    mesh: Mesh,
    plan: steps.Plan,
    tokens: Any,
    weights: Any = None,
    block: str = "1x128",
    *,
    scales: Any = None,
    token_axes: TokenAxes = None,
    hidden_axis: str | None = None,
    **more: Any,
) -> tuple[Any, Any, Any]:
    """Send tokens as float8_e4m3fn rows with their scales, on global arrays.

    See `epic.jax.dispatch_quantized`.

    Args:
        mesh: see `dispatch`.
        plan: see `dispatch`.
        tokens: [B, ..., hidden] a float dtype; with `scales` an 8-bit dtype.
        weights: see `dispatch`.
        block: see `epic.jax.dispatch_quantized`.
        scales: [B, ..., n] or None; see `epic.jax.dispatch_quantized`.
        token_axes: see `dispatch`.
        hidden_axis: see `dispatch`.
        **more: another argument of `epic.jax.dispatch_quantized`: max_sms.

    Returns:
        Rows, scales and slot_weights of all devices.

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.

    Example:
        See `dispatch`. The results are those of `epic.jax.dispatch_quantized`.

    """
    where, arrays = (token_axes, hidden_axis), (tokens, weights, scales)
    call, more = dispatching.dispatch_quantized, {"block": block, **more}
    recv, found, slot = send(mesh, call, plan, arrays, 2, 1, where, **more)
    return recv, found, slot


def dispatch_flat_quantized(
    mesh: Mesh,
    plan: steps.Plan,
    tokens: Any,
    weights: Any = None,
    block: str = "1x128",
    *,
    scales: Any = None,
    token_axes: TokenAxes = None,
    hidden_axis: str | None = None,
    **more: Any,
) -> tuple[Any, Any, Any, Any]:
    """Send tokens once to each rank as float8_e4m3fn rows with scales, on global arrays.

    See `epic.jax.dispatch_flat_quantized`.

    Args:
        mesh: see `dispatch`.
        plan: see `dispatch`.
        tokens: see `dispatch_quantized`.
        weights: see `dispatch`.
        block: see `epic.jax.dispatch_quantized`.
        scales: see `dispatch_quantized`.
        token_axes: see `dispatch`.
        hidden_axis: see `dispatch`.
        **more: another argument of `epic.jax.dispatch_flat_quantized`: max_sms.

    Returns:
        Rows, scales, weights and local experts of all devices.

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.

    Example:
        See `dispatch`, and pass a plan of a layer with layout="flat".

    """
    where, arrays = (token_axes, hidden_axis), (tokens, weights, scales)
    call, more = dispatching.dispatch_flat_quantized, {"block": block, **more}
    recv, found, slot, chosen = send(mesh, call, plan, arrays, 2, 2, where, **more)
    return recv, found, slot, chosen


def combine(
    mesh: Mesh,
    plan: steps.Plan,
    rows: Any,
    slot_weights: Any = None,
    *,
    token_axes: TokenAxes = None,
    hidden_axis: str | None = None,
    max_sms: int | None = None,
) -> Any:
    """Return rows to their tokens and sum them there, on global arrays.

    See `epic.jax.combine`.

    Args:
        mesh: the mesh that the group was opened with.
        plan: the plan that `plan_dispatch` of this module returned.
        rows: [slots of all devices, hidden] a float dtype.
        slot_weights: [slots of all devices] any float dtype, or None.
        token_axes: as passed to `plan_dispatch`; None: that of the plan.
        hidden_axis: as passed to `plan_dispatch`; None: that of the plan.
        max_sms: see `epic.jax.combine`.

    Returns:
        [B, ..., hidden], with the sharding of the tokens.

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.

    Example:
        See `plan_dispatch`.

    """
    whole, _, slots, own = specs_of_plan(mesh, plan, token_axes, hidden_axis)
    dims = plan.spec.token_dims

    def slots_of(spec: Any) -> tuple[str, int]:
        """Return the slots of all devices along the axes of a dimension."""
        count = math.prod(mesh.shape[axis] for axis in axes_of_spec(P(spec)))
        return "slots of all devices", plan.spec.capacity * count

    rows = check_array("rows", rows, FLOATS, (slots_of(slots[0]), "hidden"))
    if slot_weights is not None:
        slot_weights = check_array("slot_weights", slot_weights, FLOATS, [slots_of(own[0])])

    def local(plan: steps.Plan, rows: Any, weights: Any) -> Any:
        out = steps.combine(plan, rows, weights, max_sms=max_sms)
        return out.reshape(*dims, out.shape[-1])

    return map_over_mesh(mesh, local, (own, slots, own), whole)(plan, rows, slot_weights)


# ---------------------------------------------------------------------- local functions ----


def experts(
    mesh: Mesh,
    options: Experts,
    rows: Any,
    expert_rows: Any,
    expert_tokens: Any,
    weights: mlp.ExpertWeights,
    slot_weights: Any = None,
    *,
    group: Group,
    token_axes: TokenAxes = None,
    max_sms: int = 0,
) -> Any:
    """Apply the MLP of each expert to the rows of its slab, on global arrays.

    See `epic.jax.experts`.

    Args:
        mesh: the mesh that the group was opened with.
        options: the experts' options; static.
        rows: [slots of all devices, hidden] a float dtype.
        expert_rows: `Plan.expert_rows` of all devices.
        expert_tokens: `Plan.expert_tokens` of all devices.
        weights: the weights of all experts, sharded over the group's axes.
        slot_weights: [slots of all devices] any float dtype, or None.
        group: the group.
        token_axes: as passed to `plan`.
        max_sms: see `epic.jax.experts`.

    Returns:
        [slots of all devices, hidden], dtype of rows.

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.

    Example:
        See `plan_dispatch`.

    """
    check_kind("options", options, Experts)
    check_kind("weights", weights, mlp.ExpertWeights)
    own = P(token_spec(mesh, group, token_axes, MOST_DIMS)[1])
    rows, slot_weights = map(array_of, (rows, slot_weights))
    counts = ["local experts of all devices"]
    expert_rows = check_array("expert_rows", expert_rows, INTEGERS, counts)
    expert_tokens = check_array("expert_tokens", expert_tokens, INTEGERS, counts)
    named = {"rows": rows, "expert_rows": expert_rows, "expert_tokens": expert_tokens}
    for name, x in {**named, "slot_weights": slot_weights}.items():
        check_divisible(mesh, name, x, own)
    weights = mlp.ExpertWeights(*map(array_of, weights))
    expert_spec = P(group.axes)
    for name, w in weights._asdict().items():
        check_divisible(mesh, name, w, expert_spec)

    def local(rows: Any, counts: tuple[Any, Any], weights: Any, slot_weights: Any) -> Any:
        how: dict[str, Any] = {"group": group, "max_sms": max_sms}
        return mlp.experts(options, rows, counts[0], counts[1], weights, slot_weights, **how)

    run = map_over_mesh(mesh, local, (own, own, expert_spec, own), own)
    return run(rows, (expert_rows, expert_tokens), weights, slot_weights)


def route(
    mesh: Mesh,
    options: Router,
    logits: Any,
    *,
    bias: Any = None,
    token_ids: Any = None,
    table: Any = None,
    forced: Any = None,
    group: Group,
    token_axes: TokenAxes = None,
) -> tuple[Any, Any]:
    """Choose top_k experts for each token, on global arrays.

    See `epic.jax.route`.

    Args:
        mesh: the mesh that the group was opened with.
        options: the router's options; static.
        logits: [B, ..., E] a float dtype.
        bias: [E] any float dtype or None.
        token_ids: [B, ...] integers, with `table`.
        table: [rows, top_k] integers.
        forced: [B, ..., top_k] integers.
        group: the group.
        token_axes: see `moe`.

    Returns:
        topk_idx and weights [B, ..., top_k].

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import epic.jax
        >>> router = epic.jax.Router(num_experts=8, top_k=2)
        >>> logits = jnp.ones((8, 8))
        >>> mesh = jax.sharding.Mesh(jax.devices(), ("ep",))
        >>> with epic.jax.open(mesh, "ep", max_tokens=8, max_row_bytes=64) as group:
        ...     topk_idx, weights = epic.jax.sharded.route(mesh, router, logits, group=group)
        ...     topk_idx.shape, topk_idx[0].tolist()
        ((8, 2), [0, 1])

    """
    check_kind("options", options, Router)
    columns = router.columns_of(options)
    logits = check_array("logits", logits, FLOATS, (ANY_ROWS, columns))
    spec, _ = token_spec(mesh, group, token_axes, logits.ndim)
    check_divisible(mesh, "logits", logits, spec)
    dims = logits.shape[:-1]
    table = router.as_ids(token_ids, table, options.top_k, dims)[1]
    if token_ids is not None:
        token_ids = check_array("token_ids", token_ids, INTEGERS, dims, ["num_tokens"])
    if forced is not None:
        shape = (*dims, ("top_k", options.top_k))
        forced = check_array("forced ids", forced, INTEGERS, shape)
    check_divisible(mesh, "token_ids", token_ids, spec)
    check_divisible(mesh, "forced ids", forced, spec)

    def local(logits: Any, bias: Any, ids: Any, table: Any, forced: Any) -> tuple[Any, Any]:
        given = {"token_ids": ids, "table": table, "forced": forced}
        found = router.route(options, logits, bias=bias, **given)
        chosen, weights = (x.reshape(*logits.shape[:-1], options.top_k) for x in found)
        return chosen, weights

    run = map_over_mesh(mesh, local, (spec, P(), spec, P(), spec), (spec, spec))
    return run(logits, bias, token_ids, table, forced)
