# SPDX-License-Identifier: Apache-2.0
"""The same functions over global arrays, for plain jit: they insert the shard_map.

Tokens are sharded over `token_axes` (data axes and the group's), in their first dimension or in
several, rows of a receive buffer in their first, experts over the group's axis, hidden over
`hidden_axis` if there is one.  Without a shard_map XLA would gather every array and run the call
on all devices.
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

Axes = tuple[str, ...]
TokenAxes = Axes | P | None


def map_over_mesh(
    mesh: Mesh, function: Callable[..., Any], ins: Any, outs: Any
) -> Callable[..., Any]:
    """shard_map over all axes of the mesh."""
    return jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=outs)


def check_axes(mesh: Mesh, taken: Axes, **given: Any) -> None:
    """Axes that an argument names: the mesh has them, and they are none of those taken."""
    for name, axes in given.items():
        one = (axes,) if axes else ()  # the name of a single axis, or none
        for axis in as_axes(name, axes or ()) if name.endswith("_axes") else as_axes(name, one):
            if axis not in mesh.axis_names:
                raise EpicArgumentError(f"{name} {axis!r}: the mesh has the axes {mesh.axis_names}")
            if axis in taken:
                raise EpicArgumentError(f"{name} {axis!r}: that is the group's axis")


def check_divisible(mesh: Mesh, name: str, x: Any, spec: P) -> None:
    """A dimension is cut into equal parts, one for each device of its axes."""
    for dimension, axes in enumerate(spec):
        count = math.prod(mesh.shape[a] for a in axes_of_spec(P(axes)))
        if x is not None and dimension < x.ndim and x.shape[dimension] % count:
            raise EpicArgumentError(
                f"{name}: shape {tuple(x.shape)}: the {count} devices of {axes!r} must divide "
                f"dimension {dimension}"
            )


def axes_of_spec(spec: P) -> Axes:
    """The axes of all dimensions, one after the other."""
    parts = [part for part in spec if part is not None]
    return tuple(a for part in parts for a in ((part,) if isinstance(part, str) else part))


def token_spec(
    mesh: Mesh, group: Group, given: TokenAxes, rank: int, hidden_axis: str | None = None
) -> tuple[P, Axes]:
    """How the dimensions of x but the last are cut, and the axes that cut them: by default the
    first by all axes of the mesh but the hidden one, in the mesh's order."""
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
    """Of arrays [B, ..., hidden], [B, ..., top_k], [slots, hidden], and of what each device has by
    itself: a plan, [slots]."""
    spec, axes = token_spec(mesh, group, given, rank, hidden_axis)
    if hidden_axis in axes:
        raise EpicArgumentError(
            f"hidden_axis {hidden_axis!r}: its devices have the same tokens, so it is none of "
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
    """As epic.jax.plan_dispatch of tokens [B, ..., hidden], topk_idx and weights [B, ..., top_k];
    every part of the results is stacked over the devices.

    token_axes: as moe's.  hidden_axis: a mesh axis over which hidden is sharded; its devices have
    the same tokens.
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
    """As epic.jax.combine, on what plan_dispatch above gave, with its token_axes and hidden_axis:
    [B, ..., hidden], as the tokens were."""
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
    """Where moe wants its weights: experts over the group's axes, where they divide; hidden over
    fsdp_axes; inner over tensor_axis; vectors that all experts share on every device."""
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
    """Choices of each expert over all groups; of each group one rank counts."""
    first = jnp.ones((), bool)
    for axis in group.axes:
        first &= jax.lax.axis_index(axis) == 0
    return jax.tree.map(lambda load: jax.lax.psum(jnp.where(first, load, 0), axes), loads)


def check_inputs(options: Moe, x: Any, token_ids: Any, table: Any, token_mask: Any) -> None:
    """Compare what comes with the tokens of all devices with them."""
    dims = x.shape[:-1]
    if token_ids is not None:
        check_array("token_ids", token_ids, INTEGERS, dims)
    router.as_ids(token_ids, table, options.router.top_k, dims)
    if token_mask is not None:
        check_array("token_mask", token_mask, ("bool",), dims)


def check_weights(
    group: Group, options: Moe, x: Any, weights: MoeWeights, rank_of_expert: Any
) -> None:
    """Refuse weights that are not those of all experts; with rank_of_expert those of as many on
    each rank."""
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
    """As epic.jax.moe over x [B, ..., hidden] and weights of all experts.

    token_axes: the mesh axes over which B is sharded, by default all of them; or a PartitionSpec
    for B, S and so on, P(("data", "expert"), "context"), so that no dimension has to be cut by all
    devices.  The group's axes must be among them.

    The loss is one number, as on a single device: the mean over the groups of their sums, or,
    with loss_axes, over all tokens of these axes together.  load [num_experts] is of all groups,
    demand [devices] of each device.  Weights are those of all experts also where the ranks do not
    divide them; then they lie on every rank.
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
            f"tensor_axis {tensor_axis!r}: its devices have the same tokens, so it is none of "
            f"token_axes {spec}"
        )
    if options.sequence_tokens and len(axes) > len(axes_of_spec(P(spec[0]))):
        raise EpicArgumentError(
            f"token_axes {spec}: sequence_tokens {options.sequence_tokens} wants whole sequences "
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
