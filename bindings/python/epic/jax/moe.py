# SPDX-License-Identifier: Apache-2.0
"""The whole layer: router, plan, dispatch, experts, combine, as one function with one gradient.

It is the core's own layer, forward and backward one call each.  With a token mask, with rows that
travel in 8 bits and with `grouped_gemm=`, where the experts' products are the caller's, it is
composed of the single functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from epic import _native
from epic.errors import EpicArgumentError, EpicUnsupportedError
from epic.jax import placement, replicas, steps, tensor
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
    cast_for_gpu,
    gradient_dtype,
    wide_dtype,
)
from epic.jax.gemm import GroupedGemm
from epic.jax.groups import Group
from epic.jax.layer_args import (
    MLP_WEIGHTS,
    NUM_TABLES,
    WEIGHT_ORDER,
    MoeOut,
    MoeWeights,
    as_weights_of_layer,
    check_parts,
    check_tokens,
    complete_options,
    place_experts,
    promise_distinct,
)
from epic.options import Moe

# ------------------------------------------------------------- the core's own layer ----


@dataclass(frozen=True)
class LayerStatic:
    """What forward and backward know while tracing; options are completed."""

    group: Group
    options: Moe
    is_loss_by_caller: bool = False  # loss_axes: layer_losses() computes the losses

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of the forward and the backward call."""
        return steps.moe_attributes(self.options, self.is_loss_by_caller)


def layer_memory(static: LayerStatic) -> tuple[ArraySpec, ArraySpec, ArraySpec]:
    """What is saved, and workspace forward and backward."""
    query = partial(_native.moe_memory, static.group.config(), static.options)
    return memory_specs(query, static.group.platform)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def run_layer(
    static: LayerStatic, x: Any, weights: MoeWeights, ints: tuple[Any, ...]
) -> tuple[Any, ...]:
    """moe on checked arrays; ints: token_ids, table, rank_of_expert, logical_of_expert, channel,
    what to wait for."""
    return run_layer_forward(static, x, weights, ints)[0]


def run_layer_forward(
    static: LayerStatic, x: Any, weights: MoeWeights, ints: tuple[Any, ...]
) -> tuple[Any, Any]:
    """The core saves what it needs; x and weights are kept as they are."""
    saved, workspace, _ = layer_memory(static)
    num_experts, num_logical = static.options.layer.num_experts, static.options.layer.num_logical
    results: list[ArraySpec | None] = [spec_of(x), ArraySpec((1,), jnp.float32)]
    results += [ArraySpec((num_experts,), jnp.int32), ArraySpec((1,), jnp.int32)]
    results += [ArraySpec((num_logical,), jnp.int32) if num_logical else None, saved, workspace]
    arrays = [getattr(weights, name) for name in WEIGHT_ORDER]
    operands = [x, *arrays, *ints[:NUM_TABLES]]
    operands += [*site_and_rank(static.group, x, *ints[NUM_TABLES:]), *ints[NUM_TABLES:]]
    out = call_handler("moe", results, operands, static.group, **static.attributes())
    out = out[:-1]
    record = make_record(static, x, out[5], ints[NUM_TABLES])
    return (*out[:5], record), (x, weights, ints, out[5])


def make_record(static: LayerStatic, x: Any, saved: Any, channel: Any) -> steps.Record:
    """The plan, with which the core begins what it saves, as the steps have theirs."""
    spec = steps.PlanSpec(
        static.group, static.options.layer, x.shape[:-1], static.options.capacity or 0
    )
    number = jnp.where(channel < 0, 0, channel | steps.CALLERS_CHANNEL)
    tail = jax.lax.bitcast_convert_type(number, jnp.uint8).reshape(-1)
    zeros = jnp.zeros(steps.PLAN_TAIL - tail.shape[0], jnp.uint8)
    size = static.group.plan_bytes(spec.layer)
    return steps.Record(jnp.concatenate([saved[:size], tail, zeros]), spec)


def sum_expert_gradients(record: steps.Record, found: dict[str, Any]) -> dict[str, Any]:
    """The gradients of experts, added over replicas."""
    mine = {name: found[name] for name in placement.EXPERT_WEIGHTS if found[name] is not None}
    return {
        name: replicas.sum_over_replicas(record.spec, record.bytes, d) for name, d in mine.items()
    }


def gradient_dtypes(static: LayerStatic, x: Any, weights: MoeWeights) -> dict[str, Any]:
    """In which the core's gradients come: wide, but on GPUs those of experts as narrow as the rows
    where the weights are, too.  Those of replicas are added over ranks first."""
    of_experts = wide_dtype(x)
    if not static.options.layer.num_logical:
        of_experts = gradient_dtype(static.group.platform, x, weights.w_gate_up)
    return {n: of_experts if n in placement.EXPERT_WEIGHTS else wide_dtype(x) for n in WEIGHT_ORDER}


def run_layer_backward(
    static: LayerStatic, kept: Any, gradients: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Weight gradients leave in the weights' dtype."""
    x, weights, ints, saved = kept
    kinds = gradient_dtypes(static, x, weights)
    arrays = {name: getattr(weights, name) for name in WEIGHT_ORDER}
    named = [name for name in WEIGHT_ORDER if name != "bias"]
    results: list[ArraySpec | None] = [spec_of(x)]
    results += [None if arrays[n] is None else ArraySpec(arrays[n].shape, kinds[n]) for n in named]
    results += [layer_memory(static)[2]]
    operands = [x, *arrays.values(), saved, gradients[0], gradients[1]]
    operands += [*site_and_rank(static.group, x), ints[NUM_TABLES]]
    numbers = static.attributes()
    out = call_handler("moe_backward", results, operands, static.group, **numbers)
    found = dict(zip(named, out[1:-2], strict=True))
    if static.options.layer.num_logical:
        found |= sum_expert_gradients(make_record(static, x, saved, ints[NUM_TABLES]), found)
    pairs = found.items()
    d_weights = {n: None if d is None else d.astype(arrays[n].dtype) for n, d in pairs}
    bias = None if weights.bias is None else jnp.zeros_like(weights.bias)
    return (
        out[0],
        MoeWeights(**d_weights, bias=bias),
        tuple(None if i is None else zero_gradient(i) for i in ints),
    )


run_layer.defvjp(run_layer_forward, run_layer_backward)


# ------------------------------------------------------------------------------- moe ----

# The dimension that FSDP axes shard: always hidden.
FSDP_DIMENSION = {
    "w_gate": 0,
    "w_gate_up": 1,
    "w_down": 2,
    "shared_gate_up": 1,
    "shared_down": 2,
}


def gather_weights(group: Group, x: Any, weights: MoeWeights, axes: tuple[str, ...]) -> MoeWeights:
    """The weights whole in hidden; the gradient of each is reduced and scattered over the axes,
    then added over the others."""
    parts = MoeWeights(*cast_all_varying(group, *weights, x)[:-1])

    def whole(name: str, part: Any) -> Any:
        if part is None or name not in FSDP_DIMENSION:
            return part
        check_array(name, part, FLOATS, ["any"] * (2 if name == "w_gate" else 3))
        return jax.lax.all_gather(part, axes, axis=FSDP_DIMENSION[name], tiled=True)

    return MoeWeights(**{name: whole(name, part) for name, part in parts._asdict().items()})


def loss_axes_of(group: Group, axes: Sequence[str]) -> tuple[str, ...]:
    """Those whose tokens the losses count beside the group's, each once."""
    for axis in as_axes("loss_axes", axes):
        if axis in group.axes:
            raise EpicArgumentError(
                f"loss_axes {axis!r}: the tokens of the group's axis are counted anyway: leave it "
                "out"
            )
    return tuple(axes)


def as_token_mask(options: Moe, mask: Any, x: Any) -> Any:
    """The mask as [num_tokens], checked; None stays None."""
    if mask is None:
        return None
    mask = as_array("token_mask", mask, ("bool",), x.shape[:-1])
    if options.sequence_tokens:
        raise EpicUnsupportedError("token_mask: with sequence_tokens all tokens are counted")
    return mask.reshape(-1)


def run_core_layer(
    static: LayerStatic, x: Any, weights: MoeWeights, ints: list[Any]
) -> tuple[Any, ...]:
    """Return the fields of MoeOut, computed by the core's own layer."""
    arrays = cast_all_varying(static.group, x, *weights, *ints)
    count = 1 + len(weights)
    return run_layer(static, arrays[0], MoeWeights(*arrays[1:count]), tuple(arrays[count:]))


def moe(
    group: Group,
    options: Moe,
    x: Any,
    weights: MoeWeights,
    *,
    token_ids: Any = None,
    table: Any = None,
    token_mask: Any = None,
    rank_of_expert: Any = None,
    logical_of_expert: Any = None,
    grouped_gemm: GroupedGemm | None = None,
    fsdp_axes: Sequence[str] = (),
    tensor_axis: str | None = None,
    loss_axes: Sequence[str] = (),
    channel: Any = None,
    after: Any = None,
) -> MoeOut:
    """The layer of x [..., hidden], on each device's own tokens and experts.

    Sum MoeOut.loss over the group's axis (jax.lax.psum) before it joins the loss.  Where the ranks
    do not divide the experts, ranks have one more or less, and weights may be those of all.

    token_ids [...] with table [rows, top_k]: experts by token id.  token_mask [...] bool: tokens
    that count; the others go nowhere, come out as zeros, and load and losses are without them (the
    layer is composed then).  rank_of_expert [num_experts]: which rank owns each expert.
    logical_of_expert [num_experts]: with layer.num_logical, whose replica each expert is; replicas'
    gradients are added, so that equal weights stay equal.

    grouped_gemm: a function as jax.lax.ragged_dot, (rows [slots, k], weights [experts, k, n], sizes
    [experts]) -> [slots, n].  fsdp_axes: mesh axes over which the weights come sharded, in hidden.
    tensor_axis: a mesh axis over which they come sharded in inner (options.experts.inner is the
    whole), whose devices have the same tokens; their parts are added up.  loss_axes: further axes
    over whose tokens the losses are counted; sum MoeOut.loss over them too.  channel, after: as
    plan's.
    """
    check_kind("group", group, Group)
    check_parts(options, weights)
    if tensor_axis is not None:
        options, weights = tensor.take_part(options, weights, tensor_axis)
        more = {"token_ids": token_ids, "table": table, "token_mask": token_mask}
        more |= {"rank_of_expert": rank_of_expert, "logical_of_expert": logical_of_expert}
        more |= {"grouped_gemm": grouped_gemm}
        more |= {"fsdp_axes": fsdp_axes, "loss_axes": loss_axes, "channel": channel, "after": after}
        return tensor.sum_parts(moe(group, options, x, weights, **more), tensor_axis)
    fsdp, over = as_axes("fsdp_axes", fsdp_axes), loss_axes_of(group, loss_axes)
    steps.check_group(group, options.layer)
    if fsdp:
        weights = gather_weights(group, x, weights, fsdp)
    x = as_array("x", x, FLOATS, (ANY_ROWS, ("hidden", options.experts.hidden)))
    options, weights, owners = place_experts(
        group, promise_distinct(options, table), weights, rank_of_expert
    )
    owners, logical = steps.expert_tables(group, options.layer, owners, logical_of_expert)
    weights = as_weights_of_layer(options, x, weights)
    if group.platform == "gpu":
        cast = {name: cast_for_gpu(x.dtype, getattr(weights, name)) for name in MLP_WEIGHTS}
        weights = weights._replace(**cast)
    options = complete_options(group, options, x, weights)
    rows = steps.as_rows(x)
    check_tokens(group, options, rows.shape[0])
    group.check_width("x", rows)
    token_ids, table = routing.as_ids(token_ids, table, options.router.top_k, x.shape[:-1])
    mask = as_token_mask(options, token_mask, x)
    rows = rows if mask is None else jnp.where(mask[:, None], rows, 0)
    if grouped_gemm is not None or options.quantize is not None or mask is not None:
        extras = {"token_ids": token_ids, "table": table, "token_mask": mask}
        extras |= {"rank_of_expert": owners, "logical_of_expert": logical}
        order = {"channel": channel, "after": after}
        out, plan, logits, chosen = compose_layer(
            group, options, grouped_gemm, rows, weights, extras, order
        )
        if mask is None:
            loss = layer_losses(group, options, logits, plan.load_of_ids, chosen, over)
        else:
            out = jnp.where(mask[:, None], out, 0)
            loss = masked_layer_losses(
                group, options, logits, plan.load_of_ids, mask, over, channel
            )
        record = steps.Record(plan.bytes, plan.spec)
        return MoeOut(out.reshape(x.shape), loss, plan.load, plan.demand, plan.logical_load, record)
    ints = [
        token_ids,
        table,
        owners,
        logical,
        steps.as_channel(channel),
        *steps.ordering_deps(after),
    ]
    ints += previous_call(group)
    # The core computes losses over the tokens of the group.  With loss_axes layer_losses() computes
    # them from the logits; the core still compares the coefficients between the ranks.
    static = LayerStatic(group, options, is_loss_by_caller=bool(over))
    out, loss, *rest = run_core_layer(static, rows, weights, ints)
    record_call(group, rest[1])
    found = MoeOut(out.reshape(x.shape), loss[0], *rest)
    if over and (options.balance_coeff or options.z_coeff):
        loss = layer_losses(
            group, options, router_logits(rows, weights), found.load_of_ids, None, over
        )
        found = found._replace(loss=loss)
    return found
