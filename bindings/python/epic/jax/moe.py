# SPDX-License-Identifier: Apache-2.0
"""The whole layer as one function with one gradient.

The layer is router, plan, dispatch, experts and combine.  Forward is one call of the core, and
backward is another one.  With a token mask, with rows that are sent in e4m3, or with
`grouped_gemm=`, the layer is *composed*: it calls the functions of these steps one after the other
(composed.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from epic import _native
from epic.errors import EpicArgumentError, EpicUnsupportedError
from epic.jax import e4m3, placement, replicas, steps, tensor
from epic.jax import router as routing
from epic.jax.arrays import (
    ANY_ROWS,
    FLOATS,
    as_array,
    as_axes,
    check_array,
    check_kind,
)
from epic.jax.call import (
    ArraySpec,
    call_handler,
    cast_all_varying,
    memory_specs,
    previous_call,
    record_call,
    site_and_rank,
    spec_of,
    zero_gradient,
)
from epic.jax.composed import compose_layer, layer_losses, masked_layer_losses, router_logits
from epic.jax.experts import (
    ExpertWeights,
    cast_for_gpu,
    gradient_dtype,
    gradient_of_weight,
    gradient_spec,
    wide_dtype,
)
from epic.jax.gemm import GroupedGemm
from epic.jax.groups import Group
from epic.jax.layer_args import (
    DENSE_WEIGHTS,
    MLP_WEIGHTS,
    NUM_TABLES,
    WEIGHT_ORDER,
    MoeOut,
    MoeWeights,
    Routing,
    as_forced,
    as_weights_of_layer,
    check_parts,
    check_replicas,
    check_tokens,
    complete_options,
    expert_weights_of,
    place_experts,
    promise_distinct,
)
from epic.jax.over_mesh import over_mesh
from epic.options import Moe, check_invariant_call

# ------------------------------------------------------------- the core's own layer ----


@dataclass(frozen=True)
class LayerStatic:
    """The static arguments of a layer's forward and backward call.

    Attributes:
        group: the group.
        options: the options, with dtypes and capacity filled in by complete_options().
        is_loss_by_caller: True with loss_axes: layer_losses() computes the losses.  The core
            computes none, and only compares the coefficients between the ranks.
        max_sms: the largest number of SMs of both calls; 0: the group's.
        with_routing: whether the forward call returns the ids and weights that it used.

    """

    group: Group
    options: Moe
    is_loss_by_caller: bool = False
    max_sms: int = 0
    with_routing: bool = False

    @property
    def is_summed_by_core(self) -> bool:
        """Whether the core adds losses and gradients of replicated weights over the ranks.

        It does in tree order, because XLA would add the devices in an order of its own.  Ranks
        without a mesh add their parts themselves.
        """
        has_peers = self.group.num_ranks > 1 and bool(self.group.axes)
        return has_peers and self.options.layer.sum_order == "tree"

    @property
    def flags(self) -> int:
        """The flags of the core's layer that the options do not contain."""
        by_caller = steps.LOSS_BY_CALLER if self.is_loss_by_caller else 0
        return by_caller | (steps.SUM_DENSE if self.is_summed_by_core else 0)

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of the forward and the backward call."""
        return {**steps.moe_attributes(self.options, self.flags), "max_sms": self.max_sms}

    def as_part(self, total: Any) -> Any:
        """Return this device's part of a loss or gradient, so that a psum returns the total.

        In tree order the core has added it over the ranks.  Rank 0 has the total, and all other
        ranks have zeros.  -0 becomes +0 on any number of ranks, because a psum of -0 and +0 is +0.
        """
        if self.options.layer.sum_order != "tree" or not self.group.axes:
            return total
        is_first = jax.lax.axis_index(self.group.axes) == 0
        return jnp.where(is_first & (total != 0), total, 0)


def layer_memory(static: LayerStatic) -> tuple[ArraySpec, ArraySpec, ArraySpec]:
    """Return the saved memory and the workspaces of forward and backward, as array specs."""
    query = partial(
        _native.moe_memory, static.group.config(), static.options, more_flags=static.flags
    )
    return memory_specs(query, static.group.platform)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def run_layer(
    static: LayerStatic, x: Any, weights: MoeWeights, forced_weights: Any, ints: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Run the layer on checked arrays, with a gradient.

    Args:
        static: the static arguments.
        x: [num_tokens, hidden].
        weights: the weights of this device.
        forced_weights: [num_tokens, top_k] or None: the weights of the forced ids.
        ints: token_ids, table, rank_of_expert, logical_of_expert, forced ids, capacity_limit,
            channel, then the arrays to wait for.

    Returns:
        out, loss [1], load, demand, logical_load or None, record, then ids and weights, or None
        and None.

    """
    return run_layer_forward(static, x, weights, forced_weights, ints)[0]


def run_layer_forward(
    static: LayerStatic, x: Any, weights: MoeWeights, forced_weights: Any, ints: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Run the forward call; save its inputs, and the memory that the core saves for backward."""
    saved, workspace, _ = layer_memory(static)
    num_experts, num_logical = static.options.layer.num_experts, static.options.layer.num_logical
    results: list[ArraySpec | None] = [spec_of(x), ArraySpec((1,), jnp.float32)]
    results += [ArraySpec((num_experts,), jnp.int32), ArraySpec((1,), jnp.int32)]
    results += [ArraySpec((num_logical,), jnp.int32) if num_logical else None]
    choices = (x.shape[0], static.options.router.top_k)
    used = [ArraySpec(choices, jnp.int32), ArraySpec(choices, wide_dtype(x))]
    results += [*(used if static.with_routing else [None, None]), saved, workspace]
    given = weights
    if static.options.experts.weight_type == "e4m3":
        given = replace_experts(weights, e4m3.round_weights(x, expert_weights_of(weights)))
    arrays = [getattr(given, name) for name in WEIGHT_ORDER]
    *tables, limit = ints[:NUM_TABLES]
    operands = [x, *arrays, *tables, forced_weights, limit]
    operands += [*site_and_rank(static.group, x, *ints[NUM_TABLES:]), *ints[NUM_TABLES:]]
    out = call_handler("moe", results, operands, static.group, **static.attributes())
    saved_here = out[7]
    record = make_record(static, x, saved_here, ints[NUM_TABLES])
    residuals = (x, weights, forced_weights, ints, saved_here)
    return (out[0], static.as_part(out[1]), *out[2:5], record, *out[5:7]), residuals


def replace_experts(weights: MoeWeights, given: Sequence[Any]) -> MoeWeights:
    """Return weights with `given`, in the order of ExpertWeights, in place of those of experts."""
    return weights._replace(**ExpertWeights(*given)._asdict())


def make_record(static: LayerStatic, x: Any, saved: Any, channel: Any) -> steps.Record:
    """Return the plan of a layer for read_plan().

    The core writes the plan at the beginning of the saved memory.  This function adds the channel
    after it, as in the bytes of a Plan.
    """
    layer, capacity = static.options.layer, static.options.capacity or 0
    spec = steps.PlanSpec(static.group, layer, x.shape[:-1], capacity, max_sms=static.max_sms)
    number = jnp.where(channel < 0, 0, channel | steps.CALLERS_CHANNEL)
    tail = jax.lax.bitcast_convert_type(number, jnp.uint8).reshape(-1)
    zeros = jnp.zeros(steps.PLAN_TAIL - tail.shape[0], jnp.uint8)
    size = static.group.plan_bytes(spec.layer)
    return steps.Record(jnp.concatenate([saved[:size], tail, zeros]), spec)


def sum_expert_gradients(record: steps.Record, found: dict[str, Any]) -> dict[str, Any]:
    """Return the gradients of the experts' weights, summed over replicas."""
    mine = {name: found[name] for name in placement.EXPERT_WEIGHTS if found[name] is not None}
    return {
        name: replicas.sum_over_replicas(record.spec, record.bytes, d) for name, d in mine.items()
    }


def gradient_dtypes(static: LayerStatic, x: Any, weights: MoeWeights) -> dict[str, Any]:
    """Return the dtype of each gradient that the core writes, by weight name.

    Gradients are float32 (float64 with float64 rows).  There is one exception: on GPUs the
    gradients of experts have the dtype of the rows, if the weights have it too.  With replicas they
    are float32, because they are summed over replicas first.
    """
    expert_dtype = wide_dtype(x)
    if not static.options.layer.num_logical:
        expert_dtype = gradient_dtype(static.group.platform, x, weights.w_gate_up)
    return {
        n: expert_dtype if n in placement.EXPERT_WEIGHTS else wide_dtype(x) for n in WEIGHT_ORDER
    }


def run_layer_backward(
    static: LayerStatic, residuals: Any, gradients: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Run the backward call; return each gradient in the dtype of its weight."""
    x, weights, forced_weights, ints, saved = residuals
    given = weights
    if static.options.experts.weight_type == "e4m3":
        given = replace_experts(weights, e4m3.weights_for_backward(x, expert_weights_of(weights)))
    kinds = gradient_dtypes(static, x, weights)
    arrays = {name: getattr(given, name) for name in WEIGHT_ORDER}
    named = [name for name in WEIGHT_ORDER if name not in ("bias", *e4m3.SCALES)]
    results: list[ArraySpec | None] = [spec_of(x)]
    results += [gradient_spec(arrays[n], kinds[n]) for n in named]
    has_forced = forced_weights is not None
    results += [spec_of(forced_weights) if has_forced else None, layer_memory(static)[2]]
    operands = [x, *arrays.values(), saved, gradients[0], gradients[1]]
    operands += [*site_and_rank(static.group, x), ints[NUM_TABLES]]
    numbers = static.attributes()
    out = call_handler("moe_backward", results, operands, static.group, **numbers)
    found = dict(zip(named, out[1:-3], strict=True))
    if static.options.layer.num_logical:
        found |= sum_expert_gradients(make_record(static, x, saved, ints[NUM_TABLES]), found)
    d_weights = {n: gradient_of_weight(getattr(weights, n), d) for n, d in found.items()}
    dense = (n for n in DENSE_WEIGHTS if d_weights[n] is not None)
    d_weights |= {n: static.as_part(d_weights[n]) for n in dense}
    for name in ("bias", *e4m3.SCALES):
        w = getattr(weights, name)
        d_weights[name] = None if w is None else jnp.zeros_like(w)
    return (
        out[0],
        MoeWeights(**d_weights),
        out[-3],
        tuple(None if i is None else zero_gradient(i) for i in ints),
    )


run_layer.defvjp(run_layer_forward, run_layer_backward)


# ------------------------------------------------------------------------------- moe ----

# For each weight the dimension that FSDP axes shard. It is the dimension of size hidden.
FSDP_DIMENSION = {
    "w_gate": 0,
    "w_gate_up": 1,
    "w_down": 2,
    "shared_gate_up": 1,
    "shared_down": 2,
}


def gather_weights(group: Group, x: Any, weights: MoeWeights, axes: tuple[str, ...]) -> MoeWeights:
    """Return the weights with all columns of hidden, gathered over the FSDP axes.

    Backward sums the gradient of each weight over these axes, and scatters the sum over them.
    """
    e4m3.refuse_parts(weights, "fsdp_axes")
    # JAX can leave axes of size 1 out of the types of arrays, and then refuses to gather over them.
    axes = tuple(axis for axis in axes if jax.lax.axis_size(axis) > 1)
    if not axes:
        return weights
    parts = MoeWeights(*cast_all_varying(group, *weights, x)[:-1])

    def whole(name: str, part: Any) -> Any:
        if part is None or name not in FSDP_DIMENSION:
            return part
        check_array(name, part, FLOATS, ["any"] * (2 if name == "w_gate" else 3))
        return jax.lax.all_gather(part, axes, axis=FSDP_DIMENSION[name], tiled=True)

    return MoeWeights(**{name: whole(name, part) for name, part in parts._asdict().items()})


def loss_axes_of(group: Group, axes: Sequence[str]) -> tuple[str, ...]:
    """Return loss_axes as a checked tuple, which must not contain an axis of the group."""
    for axis in as_axes("loss_axes", axes):
        if axis in group.axes:
            raise EpicArgumentError(
                f"loss_axes contains {axis!r}: must not contain an axis of the group, whose tokens "
                "are always counted"
            )
    return tuple(axes)


def fsdp_axes_of(group: Group, axes: Sequence[str]) -> tuple[str, ...]:
    """Return fsdp_axes as a checked tuple, which must not contain an axis of the group."""
    for axis in as_axes("fsdp_axes", axes):
        if axis in group.axes:
            raise EpicArgumentError(
                f"fsdp_axes is {axis!r}: must not be an axis of the group, whose devices have "
                "different experts"
            )
    return tuple(axes)


def as_token_mask(options: Moe, mask: Any, x: Any) -> Any:
    """Return the mask as [num_tokens], after checking it; None for None."""
    if mask is None:
        return None
    mask = as_array("token_mask", mask, ("bool",), x.shape[:-1])
    if options.sequence_tokens:
        raise EpicUnsupportedError(
            "token_mask is given with sequence_tokens: not supported, because the loss of a "
            "sequence counts all its tokens; leave one of them out"
        )
    return mask.reshape(-1)


def run_core_layer(
    static: LayerStatic, x: Any, weights: MoeWeights, forced_weights: Any, ints: list[Any]
) -> tuple[Any, ...]:
    """Mark all arrays as differing along the same mesh axes, and call run_layer()."""
    arrays = cast_all_varying(static.group, x, *weights, forced_weights, *ints)
    count = 1 + len(weights)
    whole, rest = MoeWeights(*arrays[1:count]), tuple(arrays[count + 1 :])
    return run_layer(static, arrays[0], whole, arrays[count], rest)


def as_routing(chosen: Any, weights: Any, x: Any) -> Routing:
    """Return ids and weights [num_tokens, top_k] as a Routing with the leading dimensions of x."""
    shape = (*x.shape[:-1], chosen.shape[1])
    return Routing(chosen.reshape(shape), weights.reshape(shape))


@over_mesh
def moe(
    group: Group,
    options: Moe,
    x: Any,
    weights: MoeWeights,
    *,
    token_ids: Any = None,
    table: Any = None,
    token_mask: Any = None,
    forced: Any = None,
    return_routing: bool = False,
    rank_of_expert: Any = None,
    logical_of_expert: Any = None,
    capacity_limit: Any = None,
    grouped_gemm: GroupedGemm | None = None,
    fsdp_axes: Sequence[str] = (),
    tensor_axis: str | None = None,
    scatter_tokens: bool = False,
    loss_axes: Sequence[str] = (),
    channel: Any = None,
    after: Any = None,
    max_sms: int = 0,
) -> MoeOut:
    """Run a Mixture-of-Experts layer on this device's tokens, with its experts on all ranks.

    Inside of a `jax.shard_map` over the group's mesh, arrays are those of one device.  Outside of a
    shard_map, for example in a plain `jax.jit`, they are global.  The call is then a call of
    `epic.jax.sharded.moe` on the group's mesh, with its arguments and results.

    Collective: all ranks must call it with equal options.  The ranks compare them.  It is
    differentiable in x and in all weights except `bias` (first order, reverse mode).

    Args:
        group: the group, as `epic.jax.open` returned it.
        options: the options of the layer, for example from `Moe.of(...)`; static.
        x: [..., hidden] float32, bfloat16, float16 or float64: the tokens of this device.
        weights: this device's weights; `MoeWeights` has the shapes and dtypes.  If the number of
            ranks does not divide the number of experts, they may be the weights of all experts.
        token_ids: [...] integers, with `table`: the id of each token.
        table: [rows, top_k] integers: the experts of each token id.  They replace the router's
            choice; the weights of the choices still come from the router's logits.
        token_mask: [...] bool.  A token whose element is False (padding) has no expert, a result of
            zeros, and no part in the load and in the losses.  None: all tokens count.
        forced: a `Routing`, (ids, weights) or ids alone: the experts of each token, which replace
            the router's choice, for example as another run recorded them.  ids are [..., top_k]
            integers, negative for no expert.  If weights is None, the router computes the weights
            from its scores, and gets its usual gradients.  Otherwise the layer uses weights [...,
            top_k] unchanged.  They get a gradient, and the router gets only that of the losses.
            The losses use the router's scores and the load of the forced ids.  All ranks pass it,
            or none.
        return_routing: whether the result has a `Routing`: the ids and weights that the layer used.
        rank_of_expert: [num_experts] integers: the rank that owns each expert.  None: each rank
            owns a contiguous block, and the sizes of blocks differ by at most one.
        logical_of_expert: [num_experts] integers, with `Layer.num_logical`: the logical expert of
            which each expert is a replica.  The gradients of replicas are summed, so equal weights
            stay equal.
        capacity_limit: an int32 array without dimensions.  This device then has
            min(`options.capacity`, capacity_limit) slots, at least one.  It may be traced: a
            program with another limit is not compiled again.
        grouped_gemm: a function like `jax.lax.ragged_dot`, called with rows [slots, k], weights
            [experts, k, n] and sizes [experts], that returns [slots, n].  None: the core's
            products.
        fsdp_axes: mesh axes over which the weights are sharded in hidden.  The call gathers them.
        tensor_axis: a mesh axis over which the weights are sharded in inner.  All its devices must
            have the same tokens, unless scatter_tokens is True.  `options.experts.inner` is the
            whole inner dimension.
        scatter_tokens: whether the devices of tensor_axis have different tokens.  The call gathers
            the tokens of the whole axis, so `max_tokens` of the group must be at least their
            number.  It sums the output over the axis, and each device gets that of its own tokens.
        loss_axes: other mesh axes whose tokens also count in the losses, for example data axes.
        channel: an int from 0 to 2^23 - 1 that differs between independent calls of one inner
            `jax.jit`; see "Independent calls on CPUs" in the JAX guide.
        after: an array or pytree that must be computed before this call starts.
        max_sms: on GPUs the largest number of SMs of each operation of the layer, forward and
            backward; 0: the group's.  A value above the group's has no effect.

    Returns:
        MoeOut: the output in the shape of x, this device's part of the losses, the load of the
        experts and the demand for slots.  Sum `loss` with `jax.lax.psum` over the group's axis and
        `loss_axes`.

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.
        EpicUnsupportedError: the combination is not supported; raised while tracing.
        jax.errors.JaxRuntimeError: the compiled program failed; `epic.jax.error_code` returns the
            code.

    Example:
        >>> import jax
        >>> import epic.jax
        >>> from jax.sharding import PartitionSpec as P
        >>> options = epic.jax.Moe.of(
        ...     num_experts=8, top_k=2, hidden=16, inner=32, balance_coeff=0.01
        ... )
        >>> keys = jax.random.split(jax.random.key(0), 4)
        >>> x = jax.random.normal(keys[0], (64, 16))
        >>> weights = epic.jax.MoeWeights(
        ...     w_gate=jax.random.normal(keys[1], (16, 8)) / 4,
        ...     w_gate_up=jax.random.normal(keys[2], (8, 16, 64)) / 4,
        ...     w_down=jax.random.normal(keys[3], (8, 32, 16)) / 6,
        ... )
        >>> mesh = jax.sharding.Mesh(jax.devices(), ("ep",))
        >>> group = epic.jax.open(mesh, "ep", like=x)
        >>> def layer(x, weights):
        ...     out = epic.jax.moe(group, options, x, weights)
        ...     return out.out, jax.lax.psum(out.loss, "ep")
        >>> specs = epic.jax.sharded.weight_specs(group, weights)
        >>> sharding = {"in_specs": (P("ep"), specs), "out_specs": (P("ep"), P())}
        >>> layer = jax.shard_map(layer, mesh=mesh, **sharding)
        >>> def loss_of(weights, x):
        ...     out, balance_loss = layer(x, weights)
        ...     return (out**2).mean() + balance_loss
        >>> loss, gradients = jax.jit(jax.value_and_grad(loss_of))(weights, x)
        >>> gradients.w_down.shape
        (8, 32, 16)
        >>> epic.jax.close(group)

    """
    check_kind("group", group, Group)
    check_parts(options, weights)
    if scatter_tokens and tensor_axis is None:
        raise EpicArgumentError("scatter_tokens is True: must be False without tensor_axis")
    if tensor_axis is not None:
        options, weights = tensor.take_part(options, weights, tensor_axis)
        if scatter_tokens:
            x = as_array("x", x, FLOATS, (ANY_ROWS, ("hidden", options.experts.hidden)))
            x, token_ids, token_mask = tensor.gather_tokens(tensor_axis, x, token_ids, token_mask)
            parts = forced if isinstance(forced, tuple) else (forced, None)
            forced = None if forced is None else tuple(tensor.gather_tokens(tensor_axis, *parts))
        more = {"token_ids": token_ids, "table": table, "token_mask": token_mask}
        more |= {"forced": forced, "return_routing": return_routing}
        more |= {"rank_of_expert": rank_of_expert, "logical_of_expert": logical_of_expert}
        more |= {"capacity_limit": capacity_limit, "grouped_gemm": grouped_gemm}
        more |= {"fsdp_axes": fsdp_axes, "loss_axes": loss_axes, "channel": channel, "after": after}
        more |= {"max_sms": max_sms}
        found = moe(group, options, x, weights, **more)
        return tensor.sum_parts(found, tensor_axis, scatter_tokens)
    fsdp, over = fsdp_axes_of(group, fsdp_axes), loss_axes_of(group, loss_axes)
    steps.check_group(group, options.layer)
    if fsdp:
        weights = gather_weights(group, x, weights, fsdp)
    x = as_array("x", x, FLOATS, (ANY_ROWS, ("hidden", options.experts.hidden)))
    options, weights, owners = place_experts(
        group, promise_distinct(options, table, forced), weights, rank_of_expert
    )
    owners, logical = steps.expert_tables(group, options.layer, owners, logical_of_expert)
    check_replicas(options, logical_of_expert)
    e4m3.check_e4m3(options.experts, group.platform, x, weights.w_gate_up)
    weights = as_weights_of_layer(options, x, weights)
    if group.platform == "gpu":
        # If experts use e4m3, their weights are not converted here, so that they are rounded only
        # once.
        is_e4m3 = e4m3.uses_e4m3(options.experts, weights.w_gate_up)
        names = [n for n in MLP_WEIGHTS if not (is_e4m3 and n in placement.EXPERT_WEIGHTS)]
        cast = {name: cast_for_gpu(x.dtype, getattr(weights, name)) for name in names}
        weights = weights._replace(**cast)
    options = complete_options(group, options, x, weights)
    if grouped_gemm is not None and options.experts.weight_type == "e4m3":
        raise EpicUnsupportedError(
            "grouped_gemm with experts in e4m3 is not supported: leave grouped_gemm out, or use "
            "weights and a weight_type of a float type"
        )
    if options.invariant:
        check_invariant_call("grouped_gemm", grouped_gemm, token_mask)
    rows = steps.as_rows(x)
    check_tokens(group, options, rows.shape[0])
    group.check_width("x", rows)
    token_ids, table = routing.as_ids(token_ids, table, options.router.top_k, x.shape[:-1])
    routing.refuse_both(token_ids, forced)
    forced_ids, forced_weights = as_forced(options.router, forced, x)
    limit = steps.as_capacity_limit(capacity_limit)
    mask = as_token_mask(options, token_mask, x)
    rows = rows if mask is None else jnp.where(mask[:, None], rows, 0)
    if grouped_gemm is not None or options.quantize is not None or mask is not None:
        extras = {"token_ids": token_ids, "table": table, "token_mask": mask}
        extras |= {"forced": forced_ids, "forced_weights": forced_weights}
        extras |= {"rank_of_expert": owners, "logical_of_expert": logical}
        extras |= {"capacity_limit": None if limit is None else limit.reshape(())}
        order = {"channel": channel, "after": after, "max_sms": max_sms}
        out, plan, logits, chosen, w = compose_layer(
            group, options, grouped_gemm, rows, weights, extras, order
        )
        if mask is None:
            loss = layer_losses(group, options, logits, plan.load_of_ids, chosen, over, channel)
        else:
            out = jnp.where(mask[:, None], out, 0)
            loss = masked_layer_losses(
                group, options, logits, plan.load_of_ids, mask, over, channel
            )
        record = steps.Record(plan.bytes, plan.spec)
        used = as_routing(chosen, jax.lax.stop_gradient(w), x) if return_routing else None
        loads = (plan.load, plan.demand, plan.logical_load)
        return MoeOut(out.reshape(x.shape), loss, *loads, record, used)
    ints = [
        token_ids,
        table,
        owners,
        logical,
        forced_ids,
        limit,
        steps.as_channel(channel),
        *steps.ordering_deps(after),
    ]
    ints += previous_call(group)
    # The core computes the losses of the group's tokens.  With loss_axes layer_losses() computes
    # them from the logits, and the core only compares the coefficients between the ranks.
    static = LayerStatic(group, options, bool(over), steps.check_sms(max_sms), return_routing)
    out, loss, *rest, chosen, w = run_core_layer(static, rows, weights, forced_weights, ints)
    record_call(group, rest[1])
    used = as_routing(chosen, jax.lax.stop_gradient(w), x) if return_routing else None
    found = MoeOut(out.reshape(x.shape), loss[0], *rest)._replace(routing=used)
    if over and (options.balance_coeff or options.z_coeff):
        loss = layer_losses(
            group, options, router_logits(rows, weights), found.load_of_ids, None, over, channel
        )
        found = found._replace(loss=loss)
    return found
