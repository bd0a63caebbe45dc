# SPDX-License-Identifier: Apache-2.0
"""The whole layer: router, plan, dispatch, experts, combine, as one function with one gradient.

It is the core's own layer, forward and backward one call each.  With a token mask, with rows that
travel in 8 bits and with `grouped_gemm=`, where the experts' products are the caller's, it is
composed of the single functions.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from epic import _native
from epic.errors import EpicArgumentError, EpicUnsupportedError
from epic.jax import placement, replicas, steps, tensor
from epic.jax import router as routing
from epic.jax.call import Spec, call, like, marks, memory_of, spread_all, zero_gradient
from epic.jax.experts import (
    ExpertWeights,
    check_weights,
    counted,
    grad_type,
    of_slabs,
    on_gpu,
    refuse_e4m3,
    wide,
)
from epic.jax.gemm import GroupedGemm
from epic.jax.groups import Group
from epic.options import Experts, Moe


class MoeWeights(NamedTuple):
    """Parameters, as one device has them: of its own experts; the others whole.  In sharded.moe
    those of all experts.  width: 2 inner, gate then up (options.interleaved: by turns); ungated
    inner.  E: the router's columns, num_experts + zero_experts.

    w_gate: [hidden, E] float32, of the router.
    w_gate_up: [local experts, hidden, width], of any of the rows' types.
    w_down: [local experts, inner, hidden].
    b_gate: [E] float32, added to the logits.
    bias: [E] float32, for the choice only; no gradient (bias_update moves it).
    b_gate_up, b_down: [local experts, width] and [local experts, hidden].
    shared_gate_up, shared_down, shared_b_gate_up, shared_b_down: of the shared expert, with 1 in
        place of the local experts and its own inner."""

    w_gate: Any
    w_gate_up: Any
    w_down: Any
    b_gate: Any = None
    bias: Any = None
    b_gate_up: Any = None
    b_down: Any = None
    shared_gate_up: Any = None
    shared_down: Any = None
    shared_b_gate_up: Any = None
    shared_b_down: Any = None


class MoeOut(NamedTuple):
    """What a layer gives.

    out: as x.
    loss: [] float32, this device's part of balance loss + z-loss.
    load: [num_experts] int32, choices of each expert over the group, before any is dropped.
    demand: [1] int32, slots that all choices of this rank's experts would take.
    logical_load: [num_logical], with replicas: load by what the router chooses.
    record: of the plan, for read_plan outside of the program: the fate of each choice."""

    out: Any
    loss: Any
    load: Any
    demand: Any
    logical_load: Any = None
    record: Any = None

    @property
    def load_of_ids(self) -> Any:
        """Of what the router chooses: experts, or with replicas the logical ones."""
        return self.load if self.logical_load is None else self.logical_load


TABLES = 4  # of the layer's integers: token_ids, table, rank_of_expert, logical_of_expert

# The order of the handlers' arrays.
ORDER = (
    "w_gate b_gate bias w_gate_up w_down b_gate_up b_down shared_gate_up shared_down "
    "shared_b_gate_up shared_b_down"
).split()

OF_MLPS = ORDER[3:]  # the experts' and the shared expert's


def of(weights: MoeWeights, prefix: str = "") -> ExpertWeights:
    """The weights of the experts, or with "shared_" of the shared one."""
    if not prefix:
        return ExpertWeights(*(getattr(weights, name) for name in ExpertWeights._fields))
    names = ("shared_gate_up", "shared_down", "shared_b_gate_up", "shared_b_down")
    return ExpertWeights(*(getattr(weights, name) for name in names))


def promised(options: Moe, table: Any) -> Moe:
    """A router chooses no expert twice; a caller's table may."""
    if table is not None or options.layer.distinct:
        return options
    return replace(options, layer=replace(options.layer, distinct=True))


def completed(group: Group, options: Moe, x: Any, weights: MoeWeights) -> Moe:
    """The options with the arrays' dtypes and the capacity as a number."""
    refuse_e4m3(options.experts)
    types = {"row_type": x.dtype.name, "weight_type": weights.w_gate_up.dtype.name}
    capacity = options.capacity
    return replace(
        options,
        experts=replace(options.experts, **types),
        shared=replace(options.shared, **types) if options.shared else None,
        capacity=group.capacity_bound(options.layer) if capacity is None else capacity,
    )


def check_moe(options: Moe, x: Any, weights: MoeWeights) -> None:
    """Shapes and dtypes, before anything is traced."""
    steps.check_floats("x", x)
    if x.shape[-1] != options.experts.hidden:
        raise EpicArgumentError(f"x: shape {x.shape}: [..., {options.experts.hidden}] is needed")
    columns = options.router.num_experts + options.router.zero_experts
    gate = (options.experts.hidden, columns)
    if weights.w_gate.shape != gate:
        raise EpicArgumentError(f"w_gate: shape {weights.w_gate.shape}: {list(gate)} is needed")
    check_weights(options.experts, of(weights))
    if (options.shared is None) != (weights.shared_gate_up is None):
        raise EpicArgumentError("shared options and shared weights come together")
    if options.shared is not None:
        check_weights(options.shared, of(weights, "shared_"))
    for name in ("b_gate", "bias"):
        vector = getattr(weights, name)
        if vector is not None and vector.shape != (columns,):
            raise EpicArgumentError(f"{name}: shape {vector.shape}: [{columns}] is needed")


def placed(
    group: Group, options: Moe, weights: MoeWeights, given: Any
) -> tuple[Moe, MoeWeights, Any]:
    """The experts of this rank counted, their rows of the weights where those of all came, and
    the core's table."""
    layer = options.layer
    uneven = given is None and not placement.is_even(group, layer)
    if uneven and weights.w_gate_up.shape[0] == layer.num_experts:
        weights = placement.own(group, layer, weights)
    mine = counted(options.experts, of(weights))
    shared = options.shared and counted(options.shared, of(weights, "shared_"))
    table = placement.table(group, layer, given)
    return replace(options, experts=mine, shared=shared), weights, table


# ------------------------------------------------------------- the core's own layer ----


@dataclass(frozen=True)
class Static:
    """What forward and backward know while tracing; options are completed."""

    group: Group
    options: Moe


def memory(static: Static) -> tuple[Spec, Spec, Spec]:
    """What is saved, and workspace forward and backward."""
    info = _native.moe_memory(static.group.config(), static.options)
    return memory_of(info, static.group.platform)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def layer(static: Static, x: Any, weights: MoeWeights, ints: tuple[Any, ...]) -> tuple[Any, ...]:
    """moe on checked arrays; ints: token_ids, table, rank_of_expert, logical_of_expert, channel,
    what to wait for."""
    return layer_forward(static, x, weights, ints)[0]


def layer_forward(
    static: Static, x: Any, weights: MoeWeights, ints: tuple[Any, ...]
) -> tuple[Any, Any]:
    """The core saves what it needs; x and weights are kept as they are."""
    saved, workspace, _ = memory(static)
    num_experts, num_logical = static.options.layer.num_experts, static.options.layer.num_logical
    results: list[Spec | None] = [like(x), Spec((1,), jnp.float32)]
    results += [Spec((num_experts,), jnp.int32), Spec((1,), jnp.int32)]
    results += [Spec((num_logical,), jnp.int32) if num_logical else None, saved, workspace]
    arrays = [getattr(weights, name) for name in ORDER]
    operands = [x, *arrays, *ints[:TABLES]]
    operands += [*marks(static.group, x, *ints[TABLES:]), *ints[TABLES:]]
    out = call("moe", results, operands, static.group, **steps.moe_attributes(static.options))
    record = record_of(static, x, out[5], ints[TABLES])
    return (*out[:5], record), (x, weights, ints, out[5])


def record_of(static: Static, x: Any, saved: Any, channel: Any) -> steps.Record:
    """The plan, with which the core begins what it saves, as the steps have theirs."""
    way = steps.Way(static.group, static.options.layer, x.shape[:-1], static.options.capacity or 0)
    number = jnp.where(channel < 0, 0, channel | steps.CALLERS_CHANNEL)
    tail = jax.lax.bitcast_convert_type(number, jnp.uint8).reshape(-1)
    zeros = jnp.zeros(steps.PLAN_TAIL - tail.shape[0], jnp.uint8)
    size = static.group.plan_bytes(way.layer)
    return steps.Record(jnp.concatenate([saved[:size], tail, zeros]), way)


def of_logical(record: steps.Record, found: dict[str, Any]) -> dict[str, Any]:
    """The gradients of experts, added over replicas."""
    mine = {name: found[name] for name in placement.OF_EXPERTS if found[name] is not None}
    return {name: replicas.added(record.way, record.bytes, d) for name, d in mine.items()}


def gradient_types(static: Static, x: Any, weights: MoeWeights) -> dict[str, Any]:
    """In which the core's gradients come: wide, but on GPUs those of experts as narrow as the rows
    where the weights are, too.  Those of replicas are added over ranks first."""
    of_experts = wide(x)
    if not static.options.layer.num_logical:
        of_experts = grad_type(static.group.platform, x, weights.w_gate_up)
    return {n: of_experts if n in placement.OF_EXPERTS else wide(x) for n in ORDER}


def layer_backward(static: Static, kept: Any, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    """Weight gradients leave in the weights' dtype."""
    x, weights, ints, saved = kept
    kinds = gradient_types(static, x, weights)
    arrays = {name: getattr(weights, name) for name in ORDER}
    named = [name for name in ORDER if name != "bias"]
    results: list[Spec | None] = [like(x)]
    results += [None if arrays[n] is None else Spec(arrays[n].shape, kinds[n]) for n in named]
    results += [memory(static)[2]]
    operands = [x, *arrays.values(), saved, gradients[0], gradients[1]]
    operands += [*marks(static.group, x), ints[TABLES]]
    out = call(
        "moe_backward", results, operands, static.group, **steps.moe_attributes(static.options)
    )
    found = dict(zip(named, out[1:-1], strict=True))
    if static.options.layer.num_logical:
        found |= of_logical(record_of(static, x, saved, ints[TABLES]), found)
    pairs = found.items()
    d_weights = {n: None if d is None else d.astype(arrays[n].dtype) for n, d in pairs}
    bias = None if weights.bias is None else jnp.zeros_like(weights.bias)
    return (
        out[0],
        MoeWeights(**d_weights, bias=bias),
        tuple(None if i is None else zero_gradient(i) for i in ints),
    )


layer.defvjp(layer_forward, layer_backward)


# --------------------------------------------------------------- composed, any GEMM ----


def activate(options: Experts, z: Any) -> Any:
    """The experts' nonlinearity over [rows, width]."""
    plain: dict[str, Callable[[Any], Any]] = {
        "silu": jax.nn.silu,
        "gelu": partial(jax.nn.gelu, approximate=False),
        "gelu_tanh": partial(jax.nn.gelu, approximate=True),
        "relu2": lambda v: jnp.square(jax.nn.relu(v)),
    }
    if options.ungated:
        return plain[options.activation](z)
    gate, up = (z[:, 0::2], z[:, 1::2]) if options.interleaved else jnp.split(z, 2, axis=1)
    if options.activation in plain:
        return plain[options.activation](gate) * up
    of_deepseek = options.activation == "clamped_silu"
    limit = options.limit or (10.0 if of_deepseek else 7.0)
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    if of_deepseek:
        return jax.nn.silu(gate) * up
    return gate * jax.nn.sigmoid((options.alpha or 1.702) * gate) * (up + 1)


def mlp(
    group: Group,
    options: Experts,
    gemm: GroupedGemm | None,
    x: Any,
    counts: tuple[Any, Any],
    w: ExpertWeights,
    scale: Any,
) -> Any:
    """The experts over slabs of counts[0] rows, with the caller's products, else by the core."""
    sizes = counts[0]
    if gemm is None:
        return of_slabs(options, group.platform, False, x, counts, w, scale)
    expert = jnp.repeat(jnp.arange(sizes.shape[0]), sizes, total_repeat_length=x.shape[0])
    column = None if scale is None else scale[:, None].astype(x.dtype)
    if options.weighting == "input" and column is not None:
        x = x * column
    z = gemm(x, w.w_gate_up.astype(x.dtype), sizes)
    if w.b_gate_up is not None:
        z = z + w.b_gate_up.astype(z.dtype)[expert]
    a = activate(options, z)
    early = column if options.weighting == "early" else None
    a = a if early is None else a * early
    y = gemm(a.astype(x.dtype), w.w_down.astype(x.dtype), sizes)
    if w.b_down is not None:
        b = w.b_down.astype(y.dtype)[expert]
        y = y + (b if early is None else b * early)
    return y.astype(x.dtype)


def dense_gemm(x: Any, w: Any, _: Any) -> Any:
    """The product of a single expert that has all rows."""
    return x @ w[0]


def sent(
    group: Group,
    options: Moe,
    chosen: Any,
    x: Any,
    w: Any,
    placed: dict[str, Any],
    after: dict[str, Any],
) -> tuple[steps.Plan, Any, Any]:
    """plan and dispatch, rounded on the way if the options say so."""
    more = {
        "capacity": options.capacity,
        **placed,
        "num_local_experts": options.experts.num_local_experts,
        "moe": options,
        **after,
    }
    if options.quantize is None:
        return steps.plan_dispatch(group, options.layer, chosen, x, w, **more)
    plan = steps.plan(group, options.layer, chosen, **more)
    return plan, *steps.dispatch(plan, x, w, quantize=options.quantize)


def composed(
    group: Group,
    options: Moe,
    gemm: GroupedGemm | None,
    x: Any,
    weights: MoeWeights,
    extras: dict[str, Any],
    after: dict[str, Any],
) -> tuple[Any, steps.Plan, Any, Any]:
    """The layer from the single functions: out, plan, logits, choices."""
    logits = logits_of(x, weights)
    placed = {name: extras.pop(name) for name in ("rank_of_expert", "logical_of_expert")}
    mask = extras.pop("token_mask")
    chosen, w = routing.route(options.router, logits, bias=weights.bias, **extras)
    if mask is not None:
        chosen = jnp.where(mask[:, None], chosen, -1)
    zero = chosen >= options.router.num_experts  # identity experts stay at home
    plan, recv, slot = sent(group, options, jnp.where(zero, -1, chosen), x, w, placed, after)
    late = options.experts.weighting == "late"
    rows = (plan.expert_rows, plan.expert_tokens)
    mine = ExpertWeights(*(replicas.tied(plan, weight) for weight in of(weights)))
    y = mlp(group, options.experts, gemm, recv, rows, mine, None if late else slot)
    out = steps.combine(plan, y, slot if late else None)
    if options.router.zero_experts:
        kept = jnp.where(zero, w, 0).sum(axis=1, keepdims=True)
        out = (out + x * kept).astype(x.dtype)
    if options.shared is not None:
        whole = jnp.full((1,), x.shape[0], jnp.int32)
        dense = None if gemm is None else dense_gemm
        shared = of(weights, "shared_")
        out = out + mlp(group, options.shared, dense, x, (whole, whole), shared, None)
    return out, plan, logits, chosen


def logits_of(x: Any, weights: MoeWeights) -> Any:
    """What the router sees, in float32."""
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    logits = jnp.matmul(x.astype(wide), weights.w_gate.astype(wide), precision="highest")
    return logits if weights.b_gate is None else logits + weights.b_gate.astype(wide)


def losses(
    group: Group, options: Moe, logits: Any, load: Any, chosen: Any, axes: tuple[str, ...]
) -> Any:
    """This device's part of the losses over the group and the axes."""
    total = logits.shape[0] * group.num_ranks * math.prod(map(jax.lax.axis_size, axes))
    if axes and options.sequence_tokens:
        raise EpicArgumentError(
            "loss_axes: with sequence_tokens each sequence has a loss by itself"
        )
    load = jax.lax.psum(load, axes) if axes else load
    loss = jnp.zeros((), jnp.float32)
    if options.balance_coeff:
        loss = loss + routing.balance_loss(
            options.router,
            logits,
            coeff=options.balance_coeff,
            total_tokens=total,
            load=load,
            topk_idx=chosen,
            sequence_tokens=options.sequence_tokens,
        )
    if options.z_coeff:
        loss = loss + routing.z_loss(
            options.router, logits, coeff=options.z_coeff, total_tokens=total
        )
    return loss


def losses_of_kept(
    group: Group,
    options: Moe,
    logits: Any,
    load: Any,
    mask: Any,
    axes: tuple[str, ...],
    channel: Any,
) -> Any:
    """losses of the tokens that the mask keeps; how many there are is known at run time."""
    total = steps.sum(group, mask.sum(dtype=jnp.float32)[None], channel=channel)[0]
    if axes:
        total, load = jax.lax.psum((total, load), axes)
    coeffs = (options.balance_coeff, options.z_coeff)
    return routing.masked_losses(options.router, logits, load, mask, total, coeffs)


# ------------------------------------------------------------------------------- moe ----

# The dimension that FSDP axes shard: always hidden.
FSDP_DIMENSION = {
    "w_gate": 0,
    "w_gate_up": 1,
    "w_down": 2,
    "shared_gate_up": 1,
    "shared_down": 2,
}


def gathered(group: Group, x: Any, weights: MoeWeights, axes: tuple[str, ...]) -> MoeWeights:
    """The weights whole in hidden; the gradient of each is reduced and scattered over the axes,
    then added over the others."""
    parts = MoeWeights(*spread_all(group, *weights, x)[:-1])

    def whole(name: str, part: Any) -> Any:
        if part is None or name not in FSDP_DIMENSION:
            return part
        return jax.lax.all_gather(part, axes, axis=FSDP_DIMENSION[name], tiled=True)

    return MoeWeights(**{name: whole(name, part) for name, part in parts._asdict().items()})


def loss_axes_of(group: Group, axes: Sequence[str]) -> tuple[str, ...]:
    """Those whose tokens the losses count beside the group's, each once."""
    if isinstance(axes, str):
        raise EpicArgumentError(f"loss_axes {axes!r}: a tuple of axes is needed, ({axes!r},)")
    for i, axis in enumerate(axes):
        if axis in group.axes:
            raise EpicArgumentError(
                f"loss_axes {axis!r}: the tokens of the group's axis are counted anyway: leave it "
                "out"
            )
        if axis in axes[:i]:
            raise EpicArgumentError(f"loss_axes {tuple(axes)}: {axis!r} is there twice")
    return tuple(axes)


def masked(options: Moe, mask: Any, x: Any) -> Any:
    """The mask as [num_tokens], checked; None stays None."""
    if mask is None:
        return None
    if mask.shape != x.shape[:-1] or mask.dtype != jnp.bool_:
        raise EpicArgumentError(
            f"token_mask: {mask.dtype}{list(mask.shape)}: bool{list(x.shape[:-1])} is needed"
        )
    if options.sequence_tokens:
        raise EpicUnsupportedError("token_mask: with sequence_tokens all tokens are counted")
    return jnp.asarray(mask).reshape(-1)


def from_core(
    group: Group, options: Moe, x: Any, weights: MoeWeights, ints: list[Any]
) -> tuple[Any, ...]:
    """What MoeOut has, of the core's own layer."""
    arrays = spread_all(group, x, *weights, *ints)
    count = 1 + len(weights)
    spread = MoeWeights(*arrays[1:count])
    return layer(Static(group, options), arrays[0], spread, tuple(arrays[count:]))


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
    if tensor_axis is not None:
        options, weights = tensor.cut(options, weights, tensor_axis)
        more = {"token_ids": token_ids, "table": table, "token_mask": token_mask}
        more |= {"rank_of_expert": rank_of_expert, "logical_of_expert": logical_of_expert}
        more |= {"grouped_gemm": grouped_gemm}
        more |= {"fsdp_axes": fsdp_axes, "loss_axes": loss_axes, "channel": channel, "after": after}
        return tensor.whole(moe(group, options, x, weights, **more), tensor_axis)
    x, fsdp, over = jnp.asarray(x), tuple(fsdp_axes), loss_axes_of(group, loss_axes)
    options, weights, owners = placed(group, promised(options, table), weights, rank_of_expert)
    owners, logical = steps.tables(group, options.layer, owners, logical_of_expert)
    if fsdp:
        weights = gathered(group, x, weights, fsdp)
    check_moe(options, x, weights)
    if group.platform == "gpu":
        cast = {name: on_gpu(x.dtype, getattr(weights, name)) for name in OF_MLPS}
        weights = weights._replace(**cast)
    options = completed(group, options, x, weights)
    rows = steps.as_rows("x", x)
    mask = masked(options, token_mask, x)
    rows = rows if mask is None else jnp.where(mask[:, None], rows, 0)
    if weights.bias is not None:
        weights = weights._replace(bias=jax.lax.stop_gradient(weights.bias))
    if grouped_gemm is not None or options.quantize is not None or mask is not None:
        extras = {"token_ids": token_ids, "table": table, "token_mask": mask}
        extras |= {"rank_of_expert": owners, "logical_of_expert": logical}
        order = {"channel": channel, "after": after}
        out, plan, logits, chosen = composed(
            group, options, grouped_gemm, rows, weights, extras, order
        )
        if mask is None:
            loss = losses(group, options, logits, plan.load_of_ids, chosen, over)
        else:
            out = jnp.where(mask[:, None], out, 0)
            loss = losses_of_kept(group, options, logits, plan.load_of_ids, mask, over, channel)
        record = steps.Record(plan.bytes, plan.way)
        return MoeOut(out.reshape(x.shape), loss, plan.load, plan.demand, plan.logical_load, record)
    ids = None if token_ids is None else jnp.asarray(token_ids).reshape(rows.shape[0])
    ints = [ids, table, owners, logical, steps.channel_of(channel), *steps.calm(after)]
    # The core counts over the group alone; losses over more are made from logits of our own.
    inner = replace(options, balance_coeff=0.0, z_coeff=0.0) if over else options
    out, loss, *rest = from_core(group, inner, rows, weights, ints)
    found = MoeOut(out.reshape(x.shape), loss[0], *rest)
    if over and (options.balance_coeff or options.z_coeff):
        loss = losses(group, options, logits_of(rows, weights), found.load_of_ids, None, over)
        found = found._replace(loss=loss)
    return found
