# SPDX-License-Identifier: Apache-2.0
"""The functions of epic.jax over global arrays, for a plain jit.

They insert the shard_map.  Tokens are sharded over `token_axes` (data axes and the group's axes),
in their first dimension or in several.  Rows of a receive buffer are sharded in their first
dimension, experts over the group's axes, hidden over `hidden_axis` if there is one.  Without a
shard_map XLA would gather every array and run the call on all devices.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from epic.errors import EpicArgumentError
from epic.jax import dispatching, layer_args, mesh_checks, placement, router, steps, tensor
from epic.jax import moe as layer
from epic.jax.arrays import ANY_ROWS, FLOATS, INDICES, INTEGERS, as_axes, check_array, check_kind
from epic.jax.groups import Group
from epic.jax.layer_args import MoeOut, MoeWeights
from epic.options import Layer, Moe

__all__ = ["combine", "moe", "plan_dispatch", "weight_specs"]

Axes = tuple[str, ...]
TokenAxes = Axes | P | None


def map_over_mesh(
    mesh: Mesh, function: Callable[..., Any], ins: Any, outs: Any
) -> Callable[..., Any]:
    """Return the function in a shard_map over all axes of the mesh."""
    return jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=outs)


def check_axes(mesh: Mesh, taken: Axes, **given: Any) -> None:
    """Refuse axes of arguments that the mesh does not have, or that are among `taken`."""
    for name, axes in given.items():
        one = (axes,) if axes else ()  # an argument that names a single axis
        for axis in as_axes(name, axes or ()) if name.endswith("_axes") else as_axes(name, one):
            if axis not in mesh.axis_names:
                raise EpicArgumentError(f"{name} {axis!r}: the mesh has the axes {mesh.axis_names}")
            if axis in taken:
                raise EpicArgumentError(f"{name} {axis!r}: that is the group's axis")


def check_divisible(mesh: Mesh, name: str, x: Any, spec: P) -> None:
    """Refuse an array that the devices of its axes cannot share equally."""
    for dimension, axes in enumerate(spec):
        count = math.prod(mesh.shape[a] for a in axes_of_spec(P(axes)))
        if x is not None and dimension < x.ndim and x.shape[dimension] % count:
            raise EpicArgumentError(
                f"{name}: shape {tuple(x.shape)}: the {count} devices of {axes!r} must divide "
                f"dimension {dimension}"
            )


def axes_of_spec(spec: P) -> Axes:
    """Return the axes of all dimensions, one after the other."""
    parts = [part for part in spec if part is not None]
    return tuple(a for part in parts for a in ((part,) if isinstance(part, str) else part))


def token_spec(
    mesh: Mesh, group: Group, given: TokenAxes, rank: int, hidden_axis: str | None = None
) -> tuple[P, Axes]:
    """Return how all dimensions of x except the last are sharded, and the axes of this sharding.

    By default the first dimension is sharded over all axes of the mesh except hidden_axis.
    """
    check_kind("group", group, Group)
    check_kind("mesh", mesh, Mesh)
    mesh_checks.check_mesh(group, mesh)
    if not isinstance(given, P):
        check_axes(mesh, (), token_axes=given)
    check_axes(mesh, group.axes, hidden_axis=hidden_axis)
    axes = given or tuple(a for a in mesh.axis_names if a != hidden_axis)
    spec = given if isinstance(given, P) else P(axes)
    if len(spec) >= rank:
        raise EpicArgumentError(
            f"token_axes {spec}: x has {rank} dimensions, and the last, hidden, stays whole"
        )
    as_axes("token_axes", axes_of_spec(spec))
    for axis in axes_of_spec(spec):
        if axis not in mesh.axis_names:
            raise EpicArgumentError(f"token_axes {axis!r}: the mesh has the axes {mesh.axis_names}")
    if not set(group.axes) <= set(axes_of_spec(spec)):
        raise EpicArgumentError(f"token_axes {spec}: the group's {group.axes} must be among them")
    return spec, axes_of_spec(spec)


def rows_specs(
    mesh: Mesh, group: Group, given: TokenAxes, rank: int, hidden_axis: str | None
) -> tuple[P, P, P, P]:
    """Return the shardings of the arrays of a plan's calls.

    They are for arrays [B, ..., hidden], [B, ..., top_k], [slots, hidden], and for arrays that each
    device has of its own, such as plans and [slots].
    """
    spec, axes = token_spec(mesh, group, given, rank, hidden_axis)
    if hidden_axis in axes:
        raise EpicArgumentError(
            f"hidden_axis {hidden_axis!r}: its devices have the same tokens, so it must not be in "
            f"token_axes {spec}"
        )
    rows = P(*spec, *[None] * (rank - 1 - len(spec)), hidden_axis)
    own = P((*axes, hidden_axis) if hidden_axis else axes)
    return rows, spec, P(axes, hidden_axis), own


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
    """Make a plan and dispatch tokens with it, over global arrays.

    See `epic.jax.plan_dispatch`.  Every part of the results is stacked over the devices.

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
        hidden_axis: a mesh axis over which hidden is sharded; its devices have the same tokens.
        **more: further arguments of `epic.jax.plan_dispatch`: capacity, channel, after.

    Returns:
        The Plan, rows and slot_weights of all devices.

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.

    """
    steps.check_group(group, options, "options")
    tokens = check_array("tokens", tokens, dispatching.ROW_TYPES, (ANY_ROWS, "hidden"))
    dims = (*tokens.shape[:-1], ("top_k", options.top_k))
    topk_idx = check_array("topk_idx", topk_idx, INDICES, dims)
    if weights is not None:
        weights = check_array("weights", weights, FLOATS, dims)
    rows, choices, slots, own = rows_specs(mesh, group, token_axes, tokens.ndim, hidden_axis)
    check_divisible(mesh, "tokens", tokens, rows)
    steps.expert_tables(group, options, rank_of_expert, logical_of_expert)
    count = steps.max_local_experts(group, options, rank_of_expert, num_local_experts)

    def local(chosen: Any, x: Any, w: Any, owners: Any, logical: Any) -> Any:
        placing = {"rank_of_expert": owners, "logical_of_expert": logical}
        placing |= {"num_local_experts": count}
        return dispatching.plan_dispatch(group, options, chosen, x, w, **placing, **more)

    ins, outs = (choices, rows, choices, P(), P()), (own, slots, own)
    tables = (rank_of_expert, logical_of_expert)
    return map_over_mesh(mesh, local, ins, outs)(topk_idx, tokens, weights, *tables)


def combine(
    mesh: Mesh,
    plan: steps.Plan,
    rows: Any,
    slot_weights: Any = None,
    *,
    token_axes: TokenAxes = None,
    hidden_axis: str | None = None,
) -> Any:
    """Return rows to their tokens and sum them there, over global arrays.

    See `epic.jax.combine`.

    Args:
        mesh: the mesh that the group was opened with.
        plan: the plan that `plan_dispatch` of this module returned.
        rows: [slots of all devices, hidden] a float dtype.
        slot_weights: [slots of all devices] any float dtype, or None.
        token_axes: as passed to `plan_dispatch`.
        hidden_axis: as passed to `plan_dispatch`.

    Returns:
        [B, ..., hidden], sharded as the tokens were.

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.

    """
    check_kind("plan", plan, steps.Plan)
    dims, group = plan.spec.token_dims, plan.spec.group
    whole, _, slots, own = rows_specs(mesh, group, token_axes, len(dims) + 1, hidden_axis)

    def slots_of(spec: Any) -> tuple[str, int]:
        """Return the slots of all devices along the axes of a dimension."""
        count = math.prod(mesh.shape[axis] for axis in axes_of_spec(P(spec)))
        return "slots of all devices", plan.spec.capacity * count

    rows = check_array("rows", rows, FLOATS, (slots_of(slots[0]), "hidden"))
    if slot_weights is not None:
        slot_weights = check_array("slot_weights", slot_weights, FLOATS, [slots_of(own[0])])

    def local(plan: steps.Plan, rows: Any, weights: Any) -> Any:
        out = steps.combine(plan, rows, weights)
        return out.reshape(*dims, out.shape[-1])

    return map_over_mesh(mesh, local, (own, slots, own), whole)(plan, rows, slot_weights)


def weight_specs(
    group: Group,
    weights: MoeWeights,
    fsdp_axes: Axes = (),
    tensor_axis: str | None = None,
) -> MoeWeights:
    """Return the shardings in which `moe` needs its weights.

    Experts are sharded over the group's axes if the ranks divide them, hidden over fsdp_axes and
    inner over tensor_axis.  Router weights and other arrays without experts are on every device.

    Args:
        group: the group.
        weights: arrays, or anything else that has a shape, in a MoeWeights.
        fsdp_axes: mesh axes for hidden.
        tensor_axis: a mesh axis for inner.

    Returns:
        A MoeWeights of `jax.sharding.PartitionSpec`; None where the weights are None.

    Raises:
        EpicArgumentError: an argument is of a wrong class.

    """
    check_kind("group", group, Group)
    check_kind("weights", weights, MoeWeights)
    fsdp_axes = as_axes("fsdp_axes", fsdp_axes)

    def spec(name: str, shape: tuple[int, ...]) -> P:
        parts: list[Any] = [None] * len(shape)
        if name in placement.EXPERT_WEIGHTS and shape[0] % group.num_ranks == 0:
            parts[0] = group.axes
        if fsdp_axes and name in layer.FSDP_DIMENSION:
            parts[layer.FSDP_DIMENSION[name]] = fsdp_axes
        if tensor_axis and name in tensor.DIMENSION:
            parts[tensor.DIMENSION[name]] = tensor_axis
        return P(*parts)

    named = weights._asdict().items()
    return MoeWeights(**{n: None if x is None else spec(n, x.shape) for n, x in named})


def load_everywhere(group: Group, loads: Any, axes: Axes) -> Any:
    """Return the load summed over all groups; one rank of each group counts."""
    first = jnp.ones((), bool)
    for axis in group.axes:
        first &= jax.lax.axis_index(axis) == 0
    return jax.tree.map(lambda load: jax.lax.psum(jnp.where(first, load, 0), axes), loads)


def check_inputs(options: Moe, x: Any, token_ids: Any, table: Any, token_mask: Any) -> None:
    """Compare the arrays that come with the tokens with the tokens' dimensions."""
    dims = x.shape[:-1]
    if token_ids is not None:
        check_array("token_ids", token_ids, INTEGERS, dims)
    router.as_ids(token_ids, table, options.router.top_k, dims)
    if token_mask is not None:
        check_array("token_mask", token_mask, ("bool",), dims)


def check_weights(
    group: Group, options: Moe, x: Any, weights: MoeWeights, rank_of_expert: Any
) -> None:
    """Refuse weights that are not those of all experts.

    With rank_of_expert they must have equally many for each rank.
    """
    first = check_array("w_gate_up", weights.w_gate_up, FLOATS, ("experts", "hidden", "width"))
    count = options.layer.num_experts
    if rank_of_expert is not None:
        count = first.shape[0]
        if count % group.num_ranks:
            raise EpicArgumentError(
                f"w_gate_up has {count} experts: with rank_of_expert must have as many for each of "
                f"the {group.num_ranks} ranks"
            )
        mine = replace(options.experts, num_local_experts=count // group.num_ranks)
        layer_args.check_experts(group, replace(options, experts=mine), rank_of_expert)
    every = replace(options.experts, num_local_experts=count)
    shared = options.shared and replace(options.shared, num_local_experts=1)
    layer_args.check_weights_of_layer(options.router, every, shared, x, weights)


def moe(
    mesh: Mesh,
    group: Group,
    options: Moe,
    x: Any,
    weights: MoeWeights,
    *,
    token_axes: TokenAxes = None,
    token_ids: Any = None,
    table: Any = None,
    token_mask: Any = None,
    rank_of_expert: Any = None,
    logical_of_expert: Any = None,
    fsdp_axes: Axes = (),
    tensor_axis: str | None = None,
    loss_axes: Axes = (),
    **more: Any,
) -> MoeOut:
    """Run a Mixture-of-Experts layer over global arrays.

    Call it in a plain `jax.jit` (or outside of one); it inserts the shard_map around
    `epic.jax.moe`.

    Args:
        mesh: the mesh that the group was opened with.
        group: the group.
        options: the options of the layer; static.
        x: [B, ..., hidden] float32, bfloat16, float16 or float64: the tokens of all devices.
        weights: the weights of all experts; `weight_specs` returns their best sharding.
        token_axes: a tuple of mesh axes over which B is sharded; or a PartitionSpec for B and
            further dimensions, for example P(("data", "expert"), "context").  It must contain the
            group's axes. None: B over all axes.
        token_ids: [B, ...] integers; see `epic.jax.moe`.
        table: see `epic.jax.moe`.
        token_mask: [B, ...] bool; see `epic.jax.moe`.
        rank_of_expert: see `epic.jax.moe`.
        logical_of_expert: see `epic.jax.moe`.
        fsdp_axes: see `epic.jax.moe`.
        tensor_axis: see `epic.jax.moe`.
        loss_axes: further mesh axes whose tokens the losses count.
        **more: further arguments of `epic.jax.moe`: grouped_gemm, channel, after.

    Returns:
        MoeOut: `loss` is one number, the mean over groups of each group's loss, or with loss_axes
        the loss over all tokens of these axes.  `load` [num_experts] counts all groups.  `demand`
        [devices] has a number for each device.

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.

    Example:
        >>> import jax
        >>> import epic.jax
        >>> options = epic.jax.Moe.of(num_experts=8, top_k=2, hidden=16, inner=32)
        >>> keys = jax.random.split(jax.random.key(0), 4)
        >>> x = jax.random.normal(keys[0], (8, 4, 16))
        >>> weights = epic.jax.MoeWeights(
        ...     w_gate=jax.random.normal(keys[1], (16, 8)) / 4,
        ...     w_gate_up=jax.random.normal(keys[2], (8, 16, 64)) / 4,
        ...     w_down=jax.random.normal(keys[3], (8, 32, 16)) / 6,
        ... )
        >>> mesh = jax.sharding.Mesh(jax.devices(), ("ep",))
        >>> with epic.jax.open(mesh, "ep", like=x) as group:
        ...     layer = jax.jit(lambda x, w: epic.jax.sharded.moe(mesh, group, options, x, w))
        ...     out = layer(x, weights)
        ...     out.out.shape, int(out.load.sum())
        ((8, 4, 16), 64)

    """
    check_kind("mesh", mesh, Mesh)
    layer_args.check_parts(options, weights)
    x = check_array("x", x, FLOATS, (ANY_ROWS, ("hidden", options.experts.hidden)))
    check_inputs(options, x, token_ids, table, token_mask)
    if tensor_axis and token_axes is None:
        token_axes = tuple(a for a in mesh.axis_names if a != tensor_axis)
    spec, axes = token_spec(mesh, group, token_axes, x.ndim)
    check_axes(mesh, (), loss_axes=layer.loss_axes_of(group, loss_axes))
    for axis in loss_axes:
        if axis not in axes:
            raise EpicArgumentError(
                f"loss_axes {axis!r}: its devices have the same tokens (token_axes {spec}): leave "
                "it out"
            )
    check_axes(mesh, group.axes, fsdp_axes=fsdp_axes, tensor_axis=tensor_axis)
    if tensor_axis in axes:
        raise EpicArgumentError(
            f"tensor_axis {tensor_axis!r}: its devices have the same tokens, so it must not be in "
            f"token_axes {spec}"
        )
    if options.sequence_tokens and len(axes) > len(axes_of_spec(P(spec[0]))):
        raise EpicArgumentError(
            f"token_axes {spec}: sequence_tokens {options.sequence_tokens} needs whole sequences "
            "on each device, so only the first dimension may be sharded"
        )
    check_divisible(mesh, "x", x, spec)
    steps.expert_tables(group, options.layer, rank_of_expert, logical_of_expert)
    if tensor_axis:
        tensor.check_tensor_axis(options, tensor_axis, mesh.shape[tensor_axis])
    check_weights(group, options, x, weights, rank_of_expert)
    if rank_of_expert is None and not placement.is_even(group, options.layer):
        weights = placement.pad_weights(group, options.layer, weights)
    summed = (*group.axes, *loss_axes)
    replicas = tuple(a for a in axes if a not in summed)

    def local(
        x: Any, weights: MoeWeights, ids: Any, table: Any, mask: Any, ranks: Any, logical: Any
    ) -> MoeOut:
        out = layer.moe(
            group,
            options,
            x,
            weights,
            token_ids=ids,
            table=table,
            token_mask=mask,
            rank_of_expert=ranks,
            logical_of_expert=logical,
            fsdp_axes=fsdp_axes,
            tensor_axis=tensor_axis,
            loss_axes=loss_axes,
            **more,
        )
        loss = jax.lax.psum(out.loss, summed)
        loss = jax.lax.pmean(loss, replicas) if replicas else loss
        loads = load_everywhere(group, (out.load, out.logical_load), axes)
        return out._replace(loss=loss, load=loads[0], logical_load=loads[1])

    places_of = weight_specs(group, weights, tuple(fsdp_axes), tensor_axis)
    for name, where in places_of._asdict().items():
        check_divisible(mesh, name, getattr(weights, name), where or P())
    ins = (spec, places_of, spec, P(), spec, P(), P())
    outs = MoeOut(spec, P(), P(), P(axes), P(), P(axes))
    tables = (token_ids, table, token_mask, rank_of_expert, logical_of_expert)
    return map_over_mesh(mesh, local, ins, outs)(x, weights, *tables)
