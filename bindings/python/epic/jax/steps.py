# SPDX-License-Identifier: Apache-2.0
"""plan and combine with gradients, and functions that dispatching.py and sums.py also use.

Inside of a shard_map over the group's axes, arrays are those of one device.  So they are, anywhere,
in a group without a mesh or with a mesh of one device.  Outside of a shard_map over a larger mesh,
arrays are those of all devices (over_mesh.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from epic import _native
from epic.errors import EpicArgumentError
from epic.jax import placement
from epic.jax.arrays import (
    ANY_ROWS,
    FLOATS,
    INDICES,
    INTEGERS,
    Dimension,
    as_array,
    as_array_or_none,
    as_int32,
    check_kind,
    show_shape,
)
from epic.jax.call import (
    Array,
    ArraySpec,
    call_handler,
    cast_all_varying,
    has_own_programs,
    no_gradient,
    previous_call,
    record_call,
    site_and_rank,
    spec_of,
)
from epic.jax.groups import Group
from epic.jax.over_mesh import over_mesh
from epic.options import Layer, Moe, check_int

PLAN_TAIL = 16  # bytes after the core's plan that contain the channel of the call site
CALLERS_CHANNEL = 1 << 23  # bit of a channel that the caller chose; handler.c has the same constant
PLAN_FIELDS = (
    "bytes",
    "expert_rows",
    "expert_tokens",
    "load",
    "demand",
    "logical_load",
    "capacity_limit",
)
PLAN_PARTS = 6  # the first results of plan_dispatch, which form the plan
SUM_DENSE, LOSS_BY_CALLER = 4, 256  # the values of flags EPIC_SUM_DENSE and EPIC_LOSS_BY_CALLER
MOST_SLOTS = (1 << 31) - 1  # largest capacity, because numbers of slots are int32


@dataclass(frozen=True)
class PlanSpec:
    """Static facts of a plan, which the calls that use the plan need while tracing.

    Attributes:
        group: the group.
        layer: the layer.
        token_dims: all dimensions of topk_idx except the last.
        capacity: the number of slots of this device.
        moe: the options of a composed layer, which the ranks compare.  None: the plan does not
            belong to a composed layer.
        max_sms: the largest number of SMs of each call on the plan; 0: the group's.
        token_axes: in a plan of all devices, how the tokens are sharded.  None: the plan is that of
            one device.
        hidden_axis: in a plan of all devices, the mesh axis over which hidden is sharded, or None.

    """

    group: Group
    layer: Layer
    token_dims: tuple[int, ...]
    capacity: int
    moe: Moe | None = None
    max_sms: int = 0
    token_axes: jax.sharding.PartitionSpec | None = None
    hidden_axis: str | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens of this device."""
        return math.prod(self.token_dims)

    def sizes(self) -> dict[str, Any]:
        """Return the attributes of calls on the plan: its layer, and the sizes of arrays."""
        numbers = {"num_tokens": self.num_tokens, "capacity": self.capacity}
        numbers["max_sms"] = self.max_sms
        return {**numbers, **self.layer.numbers()}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=PLAN_FIELDS,
    meta_fields=("spec",),
)
@dataclass(frozen=True)
class Plan:
    """The plan of one step: where every choice goes.  It is a pytree.

    Attributes:
        bytes: [n] uint8: the plan itself, which dispatch, combine and their gradients read.
        expert_rows: [local experts] int32: number of rows of each expert, with padding.
        expert_tokens: [local experts] int32: number of rows of each expert, without padding.
        load: [num_experts] int32: number of choices of each expert over the whole group, before any
            choice is dropped.
        demand: [1] int32: number of slots that all choices of this rank's experts would need.
        logical_load: [num_logical] int32: load of each logical expert; None without replicas.
        capacity_limit: [1] int32: the argument capacity_limit; None without one.
        spec: static facts: group, layer, shape of the tokens, capacity.

    """

    bytes: Array
    expert_rows: Array
    expert_tokens: Array
    load: Array
    demand: Array
    logical_load: Array | None
    capacity_limit: Array | None
    spec: PlanSpec

    @property
    def has_overflow(self) -> Array:
        """[1] bool: whether all choices of this rank's experts need more slots than it has."""
        if self.capacity_limit is None:
            return self.demand > self.spec.capacity
        return self.demand > jnp.clip(self.capacity_limit, 1, self.spec.capacity)

    @property
    def load_of_ids(self) -> Array:
        """The load by the ids in topk_idx: logical_load with replicas, else load."""
        return self.load if self.logical_load is None else self.logical_load


@partial(jax.tree_util.register_dataclass, data_fields=("bytes",), meta_fields=("spec",))
@dataclass(frozen=True)
class Record:
    """The bytes of a layer's plan, for read_plan()."""

    bytes: Array
    spec: PlanSpec


def as_rows(x: Any) -> Any:
    """Return [..., n] as [rows, n]."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def as_tokens(
    name: str, x: Any, dims: tuple[int, ...], dtypes: Sequence[str], last: Dimension = "hidden"
) -> Any:
    """Return x [..., n] as [num_tokens, n], after checking it.

    If x and topk_idx both have several dimensions before the last, these must be equal.

    Args:
        name: the name of x in errors.
        x: the array.
        dims: all dimensions of topk_idx except the last.
        dtypes: the dtypes that x may have.
        last: the last dimension of x.

    """
    x = as_array(name, x, dtypes, (ANY_ROWS, last))
    count = math.prod(dims)
    in_order = x.ndim == 2 or len(dims) == 1 or x.shape[:-1] == dims
    if not in_order or math.prod(x.shape[:-1]) != count:
        raise EpicArgumentError(
            f"{name} is {x.dtype}{list(x.shape)}: must be {show_shape((*dims, last))}, with a row "
            "for each token of topk_idx"
        )
    return as_rows(x)


def as_weights(name: str, x: Any, dims: tuple[int, ...], top_k: int) -> Any:
    """Return [..., top_k] as float32 [num_tokens, top_k]; None stays None."""
    if x is None:
        return None
    return as_tokens(name, x, dims, FLOATS, ("top_k", top_k)).astype(jnp.float32)


def as_slot_weights(x: Any, capacity: int) -> Any:
    """Return the weights as float32 [capacity]; None stays None."""
    if x is None:
        return None
    return as_array("slot_weights", x, FLOATS, [("capacity", capacity)]).astype(jnp.float32)


def ordering_deps(after: Any) -> list[Any]:
    """Return the arrays in the pytree `after`, for which a call waits, without gradients."""
    for x in jax.tree.leaves(after):
        if not hasattr(x, "dtype") or not hasattr(x, "shape"):
            raise EpicArgumentError(
                f"after contains a {type(x).__name__}: must contain only arrays"
            )
    return [jax.lax.stop_gradient(x) for x in jax.tree.leaves(after)]


def check_plan(plan: Any) -> None:
    """Raise an error for an object that is no plan, or a plan whose bytes have a wrong size."""
    check_kind("plan", plan, Plan)
    size = plan.spec.group.plan_bytes(plan.spec.layer) + PLAN_TAIL
    as_array("plan.bytes", plan.bytes, ("uint8",), [size])


def check_group(group: Any, layer: Any, name: str = "layer") -> None:
    """Raise an error for arguments of wrong classes, or if top_k exceeds the group's max_top_k."""
    check_kind("group", group, Group)
    check_kind(name, layer, Layer)
    if group.max_top_k and layer.top_k > group.max_top_k:
        raise EpicArgumentError(
            f"top_k is {layer.top_k}: must be at most {group.max_top_k}, the max_top_k of group "
            f"{group.name!r}; open a group with more"
        )


# ------------------------------------------------------------------------------ plan ----


def check_sms(max_sms: Any) -> int:
    """Return the largest number of SMs of a call after checking it; 0: the group's."""
    return check_int("max_sms", max_sms, 0)


def limit_sms(plan: Plan, max_sms: int | None) -> Plan:
    """Return a plan for calls that use at most max_sms SMs; None: the plan unchanged."""
    if max_sms is None:
        return plan
    return replace(plan, spec=replace(plan.spec, max_sms=check_sms(max_sms)))


def make_plan_spec(
    group: Group,
    layer: Layer,
    topk_idx: Any,
    capacity: int | None,
    moe: Moe | None,
    max_sms: int,
) -> tuple[PlanSpec, Any]:
    """Check the arguments of plan(); return the PlanSpec and topk_idx as [num_tokens, top_k]."""
    check_group(group, layer)
    if moe is not None:
        check_kind("moe", moe, Moe)
    topk_idx = as_array("topk_idx", topk_idx, INDICES, (ANY_ROWS, ("top_k", layer.top_k)))
    rows = as_rows(topk_idx)
    if rows.shape[0] > group.max_tokens:
        raise EpicArgumentError(
            f"topk_idx has {rows.shape[0]} tokens: must be at most {group.max_tokens}, the "
            f"max_tokens of group {group.name!r}; open a group with more"
        )
    slots = num_slots(group, layer, capacity)
    return PlanSpec(group, layer, topk_idx.shape[:-1], slots, moe, check_sms(max_sms)), rows


def num_slots(group: Group, layer: Layer, capacity: Any) -> int:
    """Return the capacity after checking it.  None stands for what suffices for any routing."""
    if capacity is None:
        capacity = group.capacity_bound(layer)
    return check_int("capacity", capacity, 1, MOST_SLOTS)


def max_experts_per_rank(group: Group, table: Any) -> int:
    """Return the largest number of experts of a rank in a table that is not traced, at least 1.

    Invalid ranks do not count here; the core reports them as errors.
    """
    ranks = np.asarray(table)
    most = np.bincount(ranks[(ranks >= 0) & (ranks < group.num_ranks)], minlength=1).max()
    return max(1, int(most))


def max_local_experts(group: Group, layer: Layer, rank_of_expert: Any, given: int | None) -> int:
    """Return num_local_experts, the largest number of experts of a rank, after checking it.

    If rank_of_expert is traced, only the handler can check it.

    Args:
        group: the group.
        layer: the layer.
        rank_of_expert: the table, or None.
        given: num_local_experts of the caller.  None: it is derived.

    """
    check_group(group, layer)
    check_table("rank_of_expert", layer, rank_of_expert)
    least, most = 1, layer.num_experts
    if rank_of_expert is None:
        least = most = group.local_experts(layer)
    elif not isinstance(rank_of_expert, jax.core.Tracer):
        least = max_experts_per_rank(group, rank_of_expert)
    elif not given:
        raise EpicArgumentError(
            "num_local_experts is None: must be given if rank_of_expert is traced"
        )
    count = least if not given else check_int("num_local_experts", given)
    if not least <= count <= most:
        rule = f"at least {least}" if least > count else f"at most {most}"
        raise EpicArgumentError(
            f"num_local_experts is {count}: must be {rule}, the number of experts that a rank has"
        )
    return count


def check_table(name: str, layer: Layer, table: Any) -> Any:
    """Return a table as an array, or None, after checking its dtype and length."""
    return as_array_or_none(name, table, INTEGERS, [("num_experts", layer.num_experts)])


def expert_tables(group: Group, layer: Layer, owners: Any, logical: Any) -> list[Any]:
    """Return rank_of_expert and logical_of_expert for the core, after checking them.

    A table that the core does not need is None.
    """
    if bool(layer.num_logical) != (logical is not None):
        raise EpicArgumentError(
            f"logical_of_expert is {'None' if logical is None else 'given'} and num_logical is "
            f"{layer.num_logical}: must be given if num_logical is above 0, and None if it is 0"
        )
    owners = placement.owner_table(group, layer, owners)
    found = [
        check_table("rank_of_expert", layer, owners),
        check_table("logical_of_expert", layer, logical),
    ]
    return [None if t is None else as_int32(t) for t in found]


def plan_results(spec: PlanSpec, has_table: bool, local: int) -> list[ArraySpec | None]:
    """Return the specs of a plan's results.

    With a table, the core may write counts for more experts than num_local_experts.
    """
    counts = ArraySpec((spec.layer.num_experts if has_table else local,), jnp.int32)
    size = spec.group.plan_bytes(spec.layer) + PLAN_TAIL
    return [
        ArraySpec((size,), jnp.uint8),
        counts,
        counts,
        ArraySpec((spec.layer.num_experts,), jnp.int32),
        ArraySpec((1,), jnp.int32),
        ArraySpec((spec.layer.num_logical,), jnp.int32) if spec.layer.num_logical else None,
    ]


def plan_attributes(spec: PlanSpec, local: int) -> dict[str, Any]:
    """Return the attributes of plan and plan_dispatch."""
    of_moe = {} if spec.moe is None else moe_attributes(spec.moe)
    sizes = {"capacity": spec.capacity, "num_local_experts": local, "max_sms": spec.max_sms}
    return {**of_moe, **spec.layer.numbers(), **sizes, "has_moe": int(spec.moe is not None)}


def moe_attributes(options: Moe, more_flags: int = 0) -> dict[str, Any]:
    """Return the attributes from which the handlers read the options of a whole layer.

    num_experts is that of Layer.  Without replicas it is also that of Router.

    Args:
        options: the options, with dtypes and capacity filled in.
        more_flags: flags of epic_moe that the options do not contain.

    """
    shared = options.shared.numbers("shared_") if options.shared else {}
    return {
        **options.router.numbers(),
        **options.layer.numbers(),
        **options.experts.numbers("experts_"),
        **shared,
        "has_shared": int(options.shared is not None),
        "balance_coeff": float(options.balance_coeff),
        "z_coeff": float(options.z_coeff),
        "sequence_tokens": options.sequence_tokens,
        "capacity": options.capacity,
        "moe_flags": _native.moe_flags(options) | more_flags,
    }


def make_plan(spec: PlanSpec, local: int, parts: Sequence[Any], limit: Any) -> Plan:
    """Return the results of the handler as a Plan."""
    data, rows, tokens, load, demand, logical = parts
    return Plan(data, rows[:local], tokens[:local], load, demand, logical, limit, spec)


def as_capacity_limit(limit: Any) -> Any:
    """Return the argument capacity_limit as [1] int32, after checking it; None stays None."""
    if limit is None:
        return None
    return as_array("capacity_limit", limit, ("int32",), []).reshape(1)


def as_channel(channel: Any) -> Any:
    """Return the channel of the caller as an int32 array; -1 if there is none.

    A traced channel is checked by the handler.
    """
    if channel is None:
        return jnp.int32(-1)
    if not hasattr(channel, "dtype") or isinstance(channel, np.generic):
        channel = check_int("channel", channel, 0, CALLERS_CHANNEL - 1)
    return as_array("channel", channel, INTEGERS, []).astype(jnp.int32)


@over_mesh
def plan(
    group: Group,
    layer: Layer,
    topk_idx: Any,
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
) -> Plan:
    """Make the plan of the experts that the tokens of all ranks chose.

    The call is collective: all ranks of the group make it.  `dispatch`, `dispatch_flat` and
    `combine` use the plan.

    Args:
        group: the group.
        layer: the layer, equal on all ranks; static.
        topk_idx: [..., top_k] int32 or int64: the chosen experts of each token; negative: no
            expert.
        capacity: the number of slots of this device; None: as many as can ever be needed.
        capacity_limit: an int32 array without dimensions.  This device then has
            min(capacity, capacity_limit) slots, at least one.  It may be traced: a program with
            another limit is not compiled again.
        rank_of_expert: [num_experts] integers: the rank that owns each expert.  None: each rank
            owns a contiguous block, and the sizes of blocks differ by at most one.
        logical_of_expert: [num_experts] integers, with `Layer.num_logical`: the logical expert of
            which each expert is a replica.
        num_local_experts: the largest number of experts of a rank; needed if rank_of_expert is
            traced.
        channel: an int from 0 to 2^23 - 1 that no other independent plan of the program has; see
            "Independent calls on CPUs" in the JAX guide.
        after: an array or pytree that must be computed before this call starts.
        moe: only a composed layer passes it: its options, which the ranks compare.
        max_sms: on GPUs the largest number of SMs of this call and of all calls on the plan; 0: the
            group's.  A value above the group's has no effect.

    Returns:
        Plan: the plan, with the sizes of the experts' slabs, the load and the demand.

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import epic.jax
        >>> layer = epic.jax.Layer(num_experts=4, top_k=2)
        >>> topk_idx = jnp.array([[0, 1], [2, 3], [0, 2]], jnp.int32)
        >>> tokens = jnp.ones((3, 8))
        >>> with epic.jax.open(max_tokens=4, max_row_bytes=64) as group:  # one rank
        ...     plan = epic.jax.plan(group, layer, topk_idx)
        ...     rows, _ = epic.jax.dispatch(plan, tokens)  # [capacity, 8]
        ...     out = epic.jax.combine(plan, rows)  # sums the two rows of each token
        ...     plan.expert_tokens.tolist(), out[:, 0].tolist()
        ([2, 1, 2, 1], [2.0, 2.0, 2.0])

    """
    spec, chosen = make_plan_spec(group, layer, topk_idx, capacity, moe, max_sms)
    local = max_local_experts(group, layer, rank_of_expert, num_local_experts)
    placed = expert_tables(group, layer, rank_of_expert, logical_of_expert)
    limit = as_capacity_limit(capacity_limit)
    ints = cast_all_varying(group, chosen, *placed, limit, as_channel(channel))
    chosen, owners, logical, limit, number = ints
    operands = [chosen, owners, logical, limit, *site_and_rank(group, chosen), number]
    parts = call_handler(
        "plan",
        plan_results(spec, owners is not None, local),
        [*operands, *ordering_deps(after)],
        group,
        **plan_attributes(spec, local),
    )
    return make_plan(spec, local, parts[:-1], limit)


# ------------------------------------------------------------------- calls on a plan ----


def plan_operands(plan: Plan, *arrays: Any) -> list[Any]:
    """Return the operands of a call on a plan: first a tuple for the plan, then the arrays.

    The tuple contains the bytes of the plan, and the arrays to wait for.
    """
    after = previous_call(plan.spec.group)
    data, *spread = cast_all_varying(plan.spec.group, plan.bytes, *arrays, *after)
    return [(data, *spread[len(arrays) :]), *spread[: len(arrays)]]


def finish_call(plan: Plan, results: Sequence[Any]) -> Any:
    """Record the last result, for which the next call waits, and return all other results."""
    record_call(plan.spec.group, results[-1])
    return tuple(results[:-1])


def no_gradients(ints: Any) -> Any:
    """Return the cotangents of integer arrays."""
    return jax.tree.map(no_gradient, ints)


# --------------------------------------------------------------------------- combine ----


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def combine_rows(spec: PlanSpec, data: Any, rows: Any, slot_weights: Any) -> tuple[Any, Any]:
    """Run combine on checked arrays.

    data contains the plan's bytes and the arrays to wait for.  The last result is the byte that is
    available when the call has finished.
    """
    results = [ArraySpec((spec.num_tokens, rows.shape[1]), rows.dtype)]
    operands = [data[0], rows, slot_weights, *site_and_rank(spec.group, data[0], rows), *data[1:]]
    out, done = call_handler("combine", results, operands, spec.group, **spec.sizes())
    return out, done


def combine_forward(spec: PlanSpec, data: Any, rows: Any, slot_weights: Any) -> tuple[Any, Any]:
    """Save the plan and the weights, and the rows only if there are weights."""
    out = combine_rows.fun(spec, data, rows, slot_weights)
    saved_rows = None if slot_weights is None else rows
    return out, (data, saved_rows, slot_weights, gradient_deps(spec.group, out[1]))


def combine_backward(spec: PlanSpec, saved: tuple[Any, ...], gradients: Any) -> tuple[Any, ...]:
    """Return the gradients of the rows and of slot_weights."""
    data, rows, slot_weights, after = saved
    d_out = gradients[0]
    d_rows = ArraySpec((spec.capacity, d_out.shape[1]), d_out.dtype)
    d_weights = None if slot_weights is None else spec_of(slot_weights)
    operands = [
        data[0],
        d_out,
        rows,
        slot_weights,
        *site_and_rank(spec.group, data[0], d_out),
        *after,
    ]
    out = call_handler(
        "combine_backward", [d_rows, d_weights], operands, spec.group, **spec.sizes()
    )
    return no_gradients(data), out[0], out[1]


def gradient_deps(group: Group, done: Any) -> list[Any]:
    """Return the arrays for which the gradient of a call waits; done: the last result of the call.

    If the ranks run separate programs, the gradient waits for the call itself.  Otherwise the order
    of the two could differ between the programs.
    """
    return [done] if has_own_programs(group) else []


combine_rows.defvjp(combine_forward, combine_backward)


@over_mesh
def combine(plan: Plan, rows: Any, slot_weights: Any = None, *, max_sms: int | None = None) -> Any:
    """Return rows to their tokens and sum them there.

    Collective; differentiable in rows and slot_weights.  out[t] is the sum over k of
    slot_weights[slot(t, k)] * rows[slot(t, k)], in the order of `Layer.sum_order`.  With layout
    "flat" each row is already the weighted sum of one rank for a token, and slot_weights is None.

    Args:
        plan: the plan.
        rows: [capacity, hidden] float32, bfloat16, float16 or float64: a row for each slot.
        slot_weights: [capacity] any float dtype.  None: all weights are 1.
        max_sms: on GPUs the largest number of SMs of this call and its gradient; None: that of
            the plan.

    Returns:
        [num_tokens, hidden], dtype of rows.

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.

    Example:
        See `plan`.

    """
    check_plan(plan)
    plan = limit_sms(plan, max_sms)
    spec = plan.spec
    rows = as_array("rows", rows, FLOATS, (("capacity", spec.capacity), "hidden"))
    spec.group.check_width("rows", rows)
    slot_weights = as_slot_weights(slot_weights, spec.capacity)
    return finish_call(plan, combine_rows(spec, *plan_operands(plan, rows, slot_weights)))[0]
