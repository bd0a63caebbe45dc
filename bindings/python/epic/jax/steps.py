# SPDX-License-Identifier: Apache-2.0
"""plan, dispatch, combine, plan_dispatch, sum: arrays in, arrays out, with gradients.

They are called on each device's own part: inside shard_map over the group's axis, or anywhere in
a group of one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from epic.errors import EpicArgumentError
from epic.jax import placement
from epic.jax.call import Array, Spec, call, like, marks, no_gradient, spread_all, zero_gradient
from epic.jax.groups import Group
from epic.options import Layer, Moe, whole, word

PLAN_TAIL = 16  # bytes behind the core's plan: the channel of its call site
CALLERS_CHANNEL = 1 << 23  # a bit of it, where the number is the caller's: as job.c
PLAN_PARTS = 6  # results of a plan, before those of dispatch
NARROW = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3",
          "float8_e3m4", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz")  # fmt: skip
ROW_TYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Way:
    """What a plan and its users know while tracing."""

    group: Group
    layer: Layer
    token_dims: tuple[int, ...]  # those of topk_idx but the last
    capacity: int
    moe: Moe | None = None  # the completed options of a composed layer, which ranks compare

    @property
    def num_tokens(self) -> int:
        """Of this device."""
        return math.prod(self.token_dims)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("bytes", "expert_rows", "expert_tokens", "load", "demand", "logical_load"),
    meta_fields=("way",),
)
@dataclass(frozen=True)
class Plan:
    """Where every choice goes.

    bytes [n] uint8: what dispatch, combine and their gradients read; expert_rows and
    expert_tokens [local experts] int32: padded and true rows of each slab; load [num_experts]
    int32: choices of each expert over the group; demand [1] int32: slots that were needed;
    logical_load [num_logical]: the load of logical experts, None without replicas.
    """

    bytes: Array
    expert_rows: Array
    expert_tokens: Array
    load: Array
    demand: Array
    logical_load: Array | None
    way: Way

    @property
    def load_of_ids(self) -> Array:
        """Of what ids name: experts, or the logical ones."""
        return self.load if self.logical_load is None else self.logical_load


@partial(jax.tree_util.register_dataclass, data_fields=("bytes",), meta_fields=("way",))
@dataclass(frozen=True)
class Record:
    """The bytes of a plan that a layer has made inside, for read_plan."""

    bytes: Array
    way: Way


def as_rows(name: str, x: Any, count: int | None = None) -> Any:
    """[..., hidden] as [rows, hidden]."""
    if x.ndim < 2:
        raise EpicArgumentError(f"{name}: shape {x.shape}: [..., hidden] is needed")
    rows = math.prod(x.shape[:-1])
    if count is not None and rows != count:
        raise EpicArgumentError(f"{name}: {rows} rows (shape {x.shape}): the plan has {count}")
    return x.reshape(rows, x.shape[-1])


def as_tokens(name: str, x: Any, dims: tuple[int, ...]) -> Any:
    """[..., n] as [num_tokens, n], its rows in the order of the choices."""
    x = jnp.asarray(x)
    if x.ndim > 2 and len(dims) > 1 and x.shape[:-1] != dims:
        raise EpicArgumentError(f"{name}: shape {x.shape}: topk_idx has {list(dims)} tokens")
    return as_rows(name, x, math.prod(dims))


def check_floats(name: str, x: Any) -> None:
    """What is added must be a type that the core adds."""
    if x.dtype.name not in ROW_TYPES:
        raise EpicArgumentError(f"{name}: dtype {x.dtype}: one of {', '.join(ROW_TYPES)} is needed")


def as_weights(name: str, x: Any, dims: tuple[int, ...], top_k: int) -> Any:
    """[..., top_k] as float32 [num_tokens, top_k]; None stays None."""
    if x is None:
        return None
    x = jnp.asarray(x)
    if x.ndim < 2 or x.shape[-1] != top_k:
        raise EpicArgumentError(f"{name}: shape {x.shape}: {[*dims, top_k]} is needed")
    return as_tokens(name, x, dims).astype(jnp.float32)


def as_slot_weights(x: Any, capacity: int) -> Any:
    """Float32 [capacity]; None stays None."""
    if x is None:
        return None
    x = jnp.asarray(x)
    if math.prod(x.shape) != capacity:
        raise EpicArgumentError(f"slot_weights: shape {x.shape}: [{capacity}] is needed")
    return x.astype(jnp.float32).reshape(capacity)


def calm(after: Any) -> list[Any]:
    """Arrays to wait for, without a gradient."""
    return [jax.lax.stop_gradient(x) for x in jax.tree.leaves(after)]


# ------------------------------------------------------------------------------ plan ----


def plan_way(group: Group, layer: Layer, topk_idx: Any, capacity: int | None) -> tuple[Way, Any]:
    """Checks the routing; the choices as [num_tokens, top_k]."""
    if topk_idx.dtype.name not in ("int32", "int64"):
        raise EpicArgumentError(f"topk_idx: dtype {topk_idx.dtype}: int32 or int64 is needed")
    if topk_idx.ndim < 2 or topk_idx.shape[-1] != layer.top_k:
        raise EpicArgumentError(
            f"topk_idx: shape {topk_idx.shape}: [..., top_k {layer.top_k}] is needed"
        )
    rows = as_rows("topk_idx", topk_idx)
    if rows.shape[0] > group.max_tokens:
        raise EpicArgumentError(
            f"topk_idx: {rows.shape[0]} tokens: group {group.name!r} was opened with "
            f"max_tokens {group.max_tokens}"
        )
    slots = group.capacity_bound(layer) if capacity is None else capacity
    if slots < 1:
        raise EpicArgumentError(f"capacity {slots}: 1 or more is needed, or None for the bound")
    return Way(group, layer, topk_idx.shape[:-1], slots), rows


def most_of_a_rank(table: Any) -> int:
    """Experts, of a rank_of_expert that is no tracer; what is no rank the core says."""
    ranks = np.asarray(table)
    return int(np.bincount(ranks[ranks >= 0], minlength=1).max())


def num_local(group: Group, layer: Layer, rank_of_expert: Any, given: int | None) -> int:
    """Experts of a rank, at most; a table that is traced the handler counts."""
    check_table("rank_of_expert", layer, rank_of_expert)
    least, most = 1, layer.num_experts
    if rank_of_expert is None:
        least = most = group.local_experts(layer)
    elif not isinstance(rank_of_expert, jax.core.Tracer):
        least = most_of_a_rank(rank_of_expert)
    elif not given:
        raise EpicArgumentError("rank_of_expert is traced: num_local_experts is needed then")
    count = least if not given else whole("num_local_experts", given)
    if not least <= count <= most:
        raise EpicArgumentError(
            f"num_local_experts {count}: a rank has {least}"
            if least > count
            else f"num_local_experts {count}: a rank has {most} at most"
        )
    return count


def check_table(name: str, layer: Layer, table: Any) -> None:
    """A whole number for each expert."""
    if table is None:
        return
    shape, dtype = np.shape(table), getattr(table, "dtype", None) or np.asarray(table).dtype
    if shape != (layer.num_experts,) or not jnp.issubdtype(dtype, jnp.integer):
        raise EpicArgumentError(
            f"{name}: {dtype}{list(shape)}: integers [num_experts {layer.num_experts}] are needed"
        )


def tables(group: Group, layer: Layer, owners: Any, logical: Any) -> list[Any]:
    """rank_of_expert and logical_of_expert for the core, checked; None where it needs none."""
    if bool(layer.num_logical) != (logical is not None):
        raise EpicArgumentError(
            f"num_logical {layer.num_logical}: logical_of_expert [num_experts] comes with "
            "replicas, and only then"
        )
    owners = placement.table(group, layer, owners)
    check_table("rank_of_expert", layer, owners)
    check_table("logical_of_expert", layer, logical)
    return [None if t is None else jnp.asarray(t, jnp.int32) for t in (owners, logical)]


def plan_results(way: Way, has_table: bool, local: int) -> list[Spec | None]:
    """With a table the core may write counts of more experts than the caller reckons with."""
    counts = Spec((way.layer.num_experts if has_table else local,), jnp.int32)
    size = way.group.plan_bytes(way.layer) + PLAN_TAIL
    return [
        Spec((size,), jnp.uint8),
        counts,
        counts,
        Spec((way.layer.num_experts,), jnp.int32),
        Spec((1,), jnp.int32),
        Spec((way.layer.num_logical,), jnp.int32) if way.layer.num_logical else None,
    ]


def plan_attributes(way: Way, local: int) -> dict[str, Any]:
    """Of plan and plan_dispatch."""
    whole = {} if way.moe is None else moe_attributes(way.moe)
    sizes = {"capacity": way.capacity, "num_local_experts": local}
    return {**whole, **way.layer.numbers(), **sizes, "has_moe": int(way.moe is not None)}


def moe_attributes(options: Moe) -> dict[str, Any]:
    """All numbers of a layer; num_experts is the layer's, and the router's where there are no
    replicas."""
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
    }


def plan_of(way: Way, local: int, parts: Sequence[Any]) -> Plan:
    """Results of the handler as a Plan."""
    data, rows, tokens, load, demand, logical = parts
    return Plan(data, rows[:local], tokens[:local], load, demand, logical, way)


def channel_of(channel: Any) -> Any:
    """The caller's number as an operand; -1: none.  The handler checks one that is traced."""
    if channel is None:
        return jnp.int32(-1)
    dtype = getattr(channel, "dtype", None)
    if dtype is None or isinstance(channel, np.generic):
        if whole("channel", channel) >= CALLERS_CHANNEL:
            raise EpicArgumentError(f"channel {channel}: 0 to {CALLERS_CHANNEL - 1} is needed")
    elif np.shape(channel) or not jnp.issubdtype(dtype, jnp.integer):
        raise EpicArgumentError(f"channel: {dtype}{list(np.shape(channel))}: one int32 is needed")
    return jnp.asarray(channel, jnp.int32)


def plan(
    group: Group,
    layer: Layer,
    topk_idx: Any,
    *,
    capacity: int | None = None,
    rank_of_expert: Any = None,
    logical_of_expert: Any = None,
    num_local_experts: int | None = None,
    channel: Any = None,
    after: Any = None,
    moe: Moe | None = None,
) -> Plan:
    """Makes the plan of topk_idx [..., top_k]; negative: no expert.

    capacity: slots of this device; None: as many as can ever be needed.  rank_of_expert
    [num_experts]: which rank owns each expert; None: contiguous blocks, as even as the numbers
    allow.  logical_of_expert [num_experts]: with layer.num_logical, which logical expert each is a
    replica of.  num_local_experts: experts of one rank at most, where rank_of_expert is traced.
    channel: a number that no independent plan of the program shares; after: results
    that must be there first; see docs/jax.md for the one case that needs them.  moe: completed
    options of a whole layer, which must be equal on all ranks.
    """
    way, chosen = plan_way(group, layer, jnp.asarray(topk_idx), capacity)
    way = replace(way, moe=moe)
    local = num_local(group, layer, rank_of_expert, num_local_experts)
    placed = tables(group, layer, rank_of_expert, logical_of_expert)
    chosen, *placed, number = spread_all(group, chosen, *placed, channel_of(channel))
    parts = call(
        "plan",
        plan_results(way, placed[0] is not None, local),
        [chosen, *placed, *marks(group, chosen), number, *calm(after)],
        group,
        **plan_attributes(way, local),
    )
    return plan_of(way, local, parts)


# -------------------------------------------------------------------------- dispatch ----


def recv_results(way: Way, tokens: Any, weights: Any) -> list[Spec | None]:
    """What dispatch gives."""
    recv = Spec((way.capacity, tokens.shape[1]), tokens.dtype)
    return [recv, None if weights is None else Spec((way.capacity,), jnp.float32)]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch_rows(way: Way, data: Any, tokens: Any, weights: Any) -> tuple[Any, Any]:
    """dispatch on checked arrays."""
    operands = [data, tokens, weights, *marks(way.group, data, tokens)]
    recv, slot_weights = call("dispatch", recv_results(way, tokens, weights), operands, way.group)
    return recv, slot_weights


def dispatch_forward(way: Way, data: Any, tokens: Any, weights: Any) -> tuple[Any, Any]:
    """Nothing is saved but the plan."""
    return dispatch_rows.fun(way, data, tokens, weights), data


def rows_home(way: Way, data: Any, gradients: tuple[Any, Any]) -> tuple[Any, Any]:
    """Gradients of the received rows and weights, brought to their tokens."""
    d_recv, d_slot_weights = gradients
    d_tokens = Spec((way.num_tokens, d_recv.shape[1]), d_recv.dtype)
    d_weights = Spec((way.num_tokens, way.layer.top_k), jnp.float32)
    operands = [data, d_recv, d_slot_weights, *marks(way.group, data, d_recv)]
    results = [d_tokens, None if d_slot_weights is None else d_weights]
    out = call("dispatch_backward", results, operands, way.group)
    return out[0], out[1]


def dispatch_backward(way: Way, data: Any, gradients: tuple[Any, Any]) -> tuple[Any, ...]:
    """The plan has no gradient."""
    return (no_gradient(data), *rows_home(way, data, gradients))


dispatch_rows.defvjp(dispatch_forward, dispatch_backward)


def dispatch(
    plan: Plan, tokens: Any, weights: Any = None, *, quantize: str | None = None
) -> tuple[Any, Any]:
    """Sends each token to its experts: tokens [..., hidden] -> [capacity, hidden].

    With weights [..., top_k] also each slot's weight [capacity] float32; else None.  Slots that
    the plan does not fill are zeros.  Rows of an 8-bit type (fp8, int8, uint8) go as they are,
    without a gradient.  quantize "1x128" or "1x32": rows travel in e4m3 and arrive
    rounded; the gradient goes straight through.
    """
    check_layout(plan.way.layer, "expert_major", "dispatch_flat")
    if is_narrow(tokens) and quantize is None:
        recv, _, slot = carried(plan, tokens, weights, None)
        return recv, slot
    inputs = dispatch_inputs(plan, tokens, weights)
    if quantize is None:
        plan.way.group.check_width("tokens", inputs[1])
        return dispatch_rows(plan.way, *inputs)
    check_block(quantize)
    return dispatch_rounded(plan.way, quantize, *inputs)


def check_layout(layer: Layer, layout: str, other: str) -> None:
    """Each layout has a dispatch of its own."""
    if layer.layout != layout:
        raise EpicArgumentError(f"layout {layer.layout!r}: {layout!r} is needed here, else {other}")


def dispatch_inputs(plan: Plan, tokens: Any, weights: Any) -> list[Any]:
    """Plan, tokens and weights, checked."""
    way = plan.way
    rows = as_tokens("tokens", tokens, way.token_dims)
    check_floats("tokens", rows)
    weights = as_weights("weights", weights, way.token_dims, way.layer.top_k)
    return spread_all(way.group, plan.bytes, rows, weights)


# -------------------------------------------------------------------- flat, quantized ----


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch_flat_rows(way: Way, data: Any, tokens: Any, weights: Any) -> tuple[Any, ...]:
    """dispatch_flat on checked arrays."""
    choices = (way.capacity, way.layer.top_k)
    results: list[Spec | None] = [Spec((way.capacity, tokens.shape[1]), tokens.dtype)]
    results += [None if weights is None else Spec(choices, jnp.float32), Spec(choices, jnp.int32)]
    operands = [data, tokens, weights, *marks(way.group, data, tokens)]
    return tuple(call("dispatch_flat", results, operands, way.group))


def dispatch_flat_forward(way: Way, data: Any, tokens: Any, weights: Any) -> tuple[Any, Any]:
    """Nothing is saved but the plan."""
    return dispatch_flat_rows.fun(way, data, tokens, weights), data


def dispatch_flat_backward(way: Way, data: Any, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    """As dispatch's."""
    return (no_gradient(data), *rows_home(way, data, gradients[:2]))


dispatch_flat_rows.defvjp(dispatch_flat_forward, dispatch_flat_backward)


def dispatch_flat(plan: Plan, tokens: Any, weights: Any = None) -> tuple[Any, Any, Any]:
    """Sends each token once to each rank that has experts for it; the layer's layout is "flat".

    tokens [..., hidden], weights [..., top_k] or None.  Gives rows [capacity, hidden], their
    weights [capacity, top_k] or None, and the local experts that each row is for [capacity, top_k],
    -1 behind them.  combine(plan, rows) wants one finished partial for each row: the weighted sum
    over these experts.
    """
    check_layout(plan.way.layer, "flat", "dispatch")
    inputs = dispatch_inputs(plan, tokens, weights)
    plan.way.group.check_width("tokens", inputs[1])
    return dispatch_flat_rows(plan.way, *inputs)


BLOCKS = {"1x128": (1, 128, jnp.float32), "1x32": (2, 32, jnp.uint8)}


def check_block(block: str) -> None:
    """One that the core knows."""
    word("block", block, BLOCKS)


def is_narrow(x: Any) -> bool:
    """Of a type that the core carries and never adds."""
    return jnp.asarray(x).dtype.name in NARROW


def as_bytes(x: Any) -> Any:
    """[rows, n] of any type as bytes [rows, n * size]."""
    return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(x.shape[0], -1)


def from_bytes(data: Any, dtype: Any) -> Any:
    """The reverse."""
    size = jnp.dtype(dtype).itemsize
    shape = (data.shape[0], data.shape[1] // size, size) if size > 1 else data.shape
    return jax.lax.bitcast_convert_type(data.reshape(shape), dtype)


def carried(plan: Plan, tokens: Any, weights: Any, scales: Any) -> tuple[Any, Any, Any]:
    """Rows of an 8-bit type, their scales or None, and weights, in their slots: as they are."""
    way = plan.way
    rows = as_tokens("tokens", tokens, way.token_dims)
    weights = as_weights("weights", weights, way.token_dims, way.layer.top_k)
    given = [None if x is None else jax.lax.stop_gradient(x) for x in (rows, weights)]
    packed, name = [as_bytes(given[0])], "dispatch"
    if scales is not None:
        extra = as_tokens("scales", scales, way.token_dims)
        packed, name = [*packed, as_bytes(jax.lax.stop_gradient(extra))], "dispatch_scaled"
    data, slot_weights, *packed = spread_all(way.group, plan.bytes, given[1], *packed)
    results: list[Spec | None] = [Spec((way.capacity, x.shape[1]), jnp.uint8) for x in packed]
    results += [None if slot_weights is None else Spec((way.capacity,), jnp.float32)]
    operands = [data, *packed, slot_weights, *marks(way.group, data, *packed)]
    out = call(name, results, operands, way.group)
    back = None if scales is None else from_bytes(out[1], scales.dtype)
    return from_bytes(out[0], rows.dtype), back, out[-1]


def dispatch_quantized(
    plan: Plan,
    tokens: Any,
    weights: Any = None,
    block: str = "1x128",
    *,
    scales: Any = None,
) -> tuple[Any, Any, Any]:
    """dispatch in e4m3: rows, scales [capacity, blocks], weights; without a gradient.

    block "1x128": float32 scales; "1x32": powers of two as e8m0 bytes.  scales [..., n]: tokens
    are quantized already, in an 8-bit type, and go as they are with these, whatever the block.
    """
    check_layout(plan.way.layer, "expert_major", "dispatch_flat")
    if scales is not None:
        if not is_narrow(tokens):
            raise EpicArgumentError(
                f"tokens: dtype {tokens.dtype}: rows with scales have an 8-bit type"
            )
        return carried(plan, tokens, weights, scales)
    check_block(block)
    data, rows, weights = dispatch_inputs(plan, tokens, weights)
    rows, weights = (None if x is None else jax.lax.stop_gradient(x) for x in (rows, weights))
    return quantized(plan.way, block, data, rows, weights)


def quantized(way: Way, block: str, data: Any, rows: Any, weights: Any) -> tuple[Any, Any, Any]:
    """dispatch_quantized on checked arrays."""
    kind, size, scale_type = BLOCKS[block]
    slots, hidden = way.capacity, rows.shape[1]
    results: list[Spec | None] = [Spec((slots, hidden), jnp.float8_e4m3fn)]
    results += [Spec((slots, -(-hidden // size)), scale_type)]
    results += [None if weights is None else Spec((slots,), jnp.float32)]
    operands = [data, rows, weights, *marks(way.group, data, rows)]
    out = call("dispatch_quantized", results, operands, way.group, quantize=kind)
    return out[0], out[1], out[2]


def dequantize(rows: Any, scales: Any, dtype: Any, block: str = "1x128") -> Any:
    """What dispatch_quantized's rows [slots, n] stand for, with their scales and the block that
    they were made with, in a dtype."""
    size = BLOCKS[block][1]
    if block == "1x32":
        powers = jnp.exp2(scales.astype(jnp.float32) - 127)
        scales = jnp.where(scales == 255, jnp.nan, powers)
    wide = jnp.repeat(scales, size, axis=1)[:, : rows.shape[1]]
    return (rows.astype(jnp.float32) * wide).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def dispatch_rounded(way: Way, block: str, data: Any, tokens: Any, weights: Any) -> Any:
    """dispatch whose rows travelled in e4m3; its gradient is that of dispatch."""
    rows, scales, slot = quantized(way, block, data, tokens, weights)
    return dequantize(rows, scales, tokens.dtype, block), slot


def dispatch_rounded_forward(
    way: Way, block: str, data: Any, tokens: Any, weights: Any
) -> tuple[Any, Any]:
    """Nothing is saved but the plan."""
    return dispatch_rounded.fun(way, block, data, tokens, weights), data


def dispatch_rounded_backward(way: Way, _: str, data: Any, gradients: Any) -> tuple[Any, ...]:
    """Straight through."""
    return (no_gradient(data), *rows_home(way, data, gradients))


dispatch_rounded.defvjp(dispatch_rounded_forward, dispatch_rounded_backward)


# --------------------------------------------------------------------- plan_dispatch ----


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def plan_dispatch_rows(
    way: Way, local: int, ints: tuple[Any, ...], tokens: Any, weights: Any
) -> tuple[Any, ...]:
    """plan_dispatch on checked arrays; ints: choices, the two tables, channel, and what to wait
    for."""
    chosen, owners, logical, number, *after = ints
    results = plan_results(way, owners is not None, local) + recv_results(way, tokens, weights)
    operands = [chosen, owners, logical, tokens, weights, *marks(way.group, chosen, tokens)]
    operands += [number, *after]
    return tuple(call("plan_dispatch", results, operands, way.group, **plan_attributes(way, local)))


def plan_dispatch_forward(
    way: Way, local: int, ints: tuple[Any, ...], tokens: Any, weights: Any
) -> tuple[Any, Any]:
    """The plan and the integers' shapes are saved."""
    out = plan_dispatch_rows.fun(way, local, ints, tokens, weights)
    return out, (out[0], ints)


def plan_dispatch_backward(
    way: Way, _: int, saved: tuple[Any, Any], gradients: tuple[Any, ...]
) -> tuple[Any, ...]:
    """As dispatch's."""
    data, ints = saved
    return (jax.tree.map(zero_gradient, ints), *rows_home(way, data, gradients[PLAN_PARTS:]))


plan_dispatch_rows.defvjp(plan_dispatch_forward, plan_dispatch_backward)


def plan_dispatch(
    group: Group,
    layer: Layer,
    topk_idx: Any,
    tokens: Any,
    weights: Any = None,
    *,
    capacity: int | None = None,
    rank_of_expert: Any = None,
    logical_of_expert: Any = None,
    num_local_experts: int | None = None,
    channel: Any = None,
    after: Any = None,
    moe: Moe | None = None,
) -> tuple[Plan, Any, Any]:
    """plan, then dispatch of tokens [..., hidden] and weights [..., top_k] with it, as one call:
    (plan, recv, slot_weights or None)."""
    check_layout(layer, "expert_major", "plan and dispatch_flat")
    way, chosen = plan_way(group, layer, jnp.asarray(topk_idx), capacity)
    way = replace(way, moe=moe)
    local = num_local(group, layer, rank_of_expert, num_local_experts)
    placed = tables(group, layer, rank_of_expert, logical_of_expert)
    rows = as_tokens("tokens", tokens, way.token_dims)
    check_floats("tokens", rows)
    group.check_width("tokens", rows)
    weights = as_weights("weights", weights, way.token_dims, layer.top_k)
    arrays = [rows, weights, chosen, *placed, channel_of(channel), *calm(after)]
    rows, weights, *ints = spread_all(group, *arrays)
    out = plan_dispatch_rows(way, local, tuple(ints), rows, weights)
    return plan_of(way, local, out[:PLAN_PARTS]), *out[PLAN_PARTS:]


# --------------------------------------------------------------------------- combine ----


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def combine_rows(way: Way, data: Any, rows: Any, slot_weights: Any) -> Any:
    """combine on checked arrays."""
    out = Spec((way.num_tokens, rows.shape[1]), rows.dtype)
    operands = [data, rows, slot_weights, *marks(way.group, data, rows)]
    return call("combine", [out], operands, way.group)[0]


def combine_forward(way: Way, data: Any, rows: Any, slot_weights: Any) -> tuple[Any, Any]:
    """Rows are needed again only for the weights' gradient."""
    out = combine_rows.fun(way, data, rows, slot_weights)
    return out, (data, None if slot_weights is None else rows, slot_weights)


def combine_backward(way: Way, saved: tuple[Any, Any, Any], d_out: Any) -> tuple[Any, ...]:
    """To the slots, scaled by their weights."""
    data, rows, slot_weights = saved
    d_rows = Spec((way.capacity, d_out.shape[1]), d_out.dtype)
    d_weights = None if slot_weights is None else like(slot_weights)
    operands = [data, d_out, rows, slot_weights, *marks(way.group, data, d_out)]
    out = call("combine_backward", [d_rows, d_weights], operands, way.group)
    return no_gradient(data), out[0], out[1]


combine_rows.defvjp(combine_forward, combine_backward)


def combine(plan: Plan, rows: Any, slot_weights: Any = None) -> Any:
    """Brings rows home, summed: [capacity, hidden] -> [num_tokens, hidden].

    out[t] = sum over k of slot_weights[slot(t, k)] * rows[slot(t, k)], in the layer's order.
    """
    way = plan.way
    rows = as_rows("rows", jnp.asarray(rows), way.capacity)
    check_floats("rows", rows)
    way.group.check_width("rows", rows)
    slot_weights = as_slot_weights(slot_weights, way.capacity)
    return combine_rows(way, *spread_all(way.group, plan.bytes, rows, slot_weights))


# ------------------------------------------------------------------------------- sum ----


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def sum_array(group: Group, order: int, x: Any, ints: tuple[Any, ...]) -> Any:
    """sum on a flat float32 array; ints: channel, and what to wait for."""
    operands = [x, *marks(group, x), *ints]
    return call("sum", [like(x)], operands, group, aliases={0: 0}, order=order)[0]


def sum_forward(group: Group, order: int, x: Any, ints: tuple[Any, ...]) -> tuple[Any, Any]:
    """Nothing is saved but the shapes of the integers."""
    return sum_array(group, order, x, ints), ints


def sum_backward(group: Group, order: int, ints: Any, gradient: Any) -> tuple[Any, ...]:
    """Each rank's x is in every rank's sum."""
    d_x = sum_array(group, order, gradient, (ints[0],))
    return d_x, jax.tree.map(zero_gradient, ints)


sum_array.defvjp(sum_forward, sum_backward)


def sum(group: Group, x: Any, *, tree: bool = False, channel: Any = None, after: Any = None) -> Any:
    """Adds a float32 array x over the ranks: the same bits on every rank, in rank order or in a
    binary tree.  channel, after: as plan's."""
    x = jnp.asarray(x)
    if x.dtype != jnp.float32:
        raise EpicArgumentError(f"x: dtype {x.dtype}: float32 is needed")
    flat, *ints = spread_all(group, x.reshape(-1), channel_of(channel), *calm(after))
    return sum_array(group, int(tree), flat, tuple(ints)).reshape(x.shape)
