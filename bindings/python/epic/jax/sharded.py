# SPDX-License-Identifier: Apache-2.0
"""The same functions over global arrays, for plain jit: they insert the shard_map.

Tokens are sharded over `token_axes` (data axes and the group's), in their first dimension or in
several, rows of a receive buffer in their first, experts over the group's axis, hidden over
`hidden_axis` if there is one.  Without a shard_map XLA would gather every array and run the call
on all devices.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from epic.errors import EpicArgumentError
from epic.jax import moe as layer
from epic.jax import placement, places, steps, tensor
from epic.jax.groups import Group
from epic.options import Layer

Axes = tuple[str, ...]
TokenAxes = Axes | P | None


def mapped(mesh: Mesh, function: Callable[..., Any], ins: Any, outs: Any) -> Callable[..., Any]:
    """shard_map over all axes of the mesh."""
    return jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=outs)


def rows_spec(axes: Axes, rank: int, hidden_axis: str | None) -> P:
    """First dimension over the axes, last over the hidden one."""
    return P(axes, *[None] * (rank - 2), hidden_axis)


def default_axes(mesh: Mesh, group: Group, given: Axes | None, hidden_axis: str | None) -> Axes:
    """All axes of the mesh but the hidden one, in the mesh's order; the mesh is the group's."""
    places.check_mesh(group, mesh)
    axes = given or tuple(a for a in mesh.axis_names if a != hidden_axis)
    if not set(group.axes) <= set(axes):
        raise EpicArgumentError(f"token_axes {axes}: the group's {group.axes} must be among them")
    return axes


def flat(spec: P) -> Axes:
    """The axes of all dimensions, one after the other."""
    parts = [part for part in spec if part is not None]
    return tuple(a for part in parts for a in ((part,) if isinstance(part, str) else part))


def token_spec(mesh: Mesh, group: Group, given: TokenAxes, rank: int) -> tuple[P, Axes]:
    """How the dimensions of x but the last are cut, and the axes that cut them."""
    spec = given if isinstance(given, P) else P(default_axes(mesh, group, given, None))
    if len(spec) >= rank:
        raise EpicArgumentError(
            f"token_axes {spec}: x has {rank} dimensions, and the last, hidden, stays whole"
        )
    places.check_mesh(group, mesh)
    if not set(group.axes) <= set(flat(spec)):
        raise EpicArgumentError(f"token_axes {spec}: the group's {group.axes} must be among them")
    return spec, flat(spec)


def plan_dispatch(
    mesh: Mesh,
    group: Group,
    options: Layer,
    topk_idx: Any,
    tokens: Any,
    weights: Any,
    *,
    token_axes: Axes | None = None,
    hidden_axis: str | None = None,
    capacity: int | None = None,
) -> tuple[steps.Plan, Any, Any]:
    """As epic.jax.plan_dispatch; every part of the results is stacked over the devices."""
    axes = default_axes(mesh, group, token_axes, hidden_axis)

    def local(chosen: Any, x: Any, w: Any) -> Any:
        return steps.plan_dispatch(group, options, chosen, x, w, capacity=capacity)

    rows = rows_spec(axes, tokens.ndim, hidden_axis)
    ins = (P(axes), rows, P(axes))
    whole = (*axes, hidden_axis) if hidden_axis else axes
    outs = (P(whole), P(axes, hidden_axis), P(whole))
    return mapped(mesh, local, ins, outs)(topk_idx, tokens, weights)


def combine(
    mesh: Mesh,
    plan: steps.Plan,
    rows: Any,
    slot_weights: Any,
    *,
    token_axes: Axes | None = None,
    hidden_axis: str | None = None,
) -> Any:
    """As epic.jax.combine, on what plan_dispatch above gave."""
    axes = default_axes(mesh, plan.way.group, token_axes, hidden_axis)
    whole = (*axes, hidden_axis) if hidden_axis else axes
    row = P(axes, hidden_axis)
    return mapped(mesh, steps.combine, (P(whole), row, P(whole)), row)(plan, rows, slot_weights)


def weight_specs(
    group: Group,
    weights: layer.MoeWeights,
    fsdp_axes: Axes = (),
    tensor_axis: str | None = None,
) -> layer.MoeWeights:
    """Experts over the group's axes, where they divide; hidden over the FSDP axes; inner over the
    tensor axis; vectors that all experts share on every device."""

    def spec(name: str, shape: tuple[int, ...]) -> P:
        parts: list[Any] = [None] * len(shape)
        if name in placement.OF_EXPERTS and shape[0] % group.num_ranks == 0:
            parts[0] = group.axes
        if fsdp_axes and name in layer.FSDP_DIMENSION:
            parts[layer.FSDP_DIMENSION[name]] = fsdp_axes
        if tensor_axis and name in tensor.DIMENSION:
            parts[tensor.DIMENSION[name]] = tensor_axis
        return P(*parts)

    named = weights._asdict().items()
    return layer.MoeWeights(**{n: None if x is None else spec(n, x.shape) for n, x in named})


def load_everywhere(group: Group, load: Any, axes: Axes) -> Any:
    """Choices of each expert over all groups; of each group one rank counts."""
    first = jnp.ones((), bool)
    for axis in group.axes:
        first &= jax.lax.axis_index(axis) == 0
    return jax.lax.psum(jnp.where(first, load, 0), axes)


def moe(
    mesh: Mesh,
    group: Group,
    options: layer.Moe,
    x: Any,
    weights: layer.MoeWeights,
    *,
    token_axes: TokenAxes = None,
    token_ids: Any = None,
    table: Any = None,
    token_mask: Any = None,
    rank_of_expert: Any = None,
    fsdp_axes: Axes = (),
    tensor_axis: str | None = None,
    loss_axes: Axes = (),
    **more: Any,
) -> layer.MoeOut:
    """As epic.jax.moe over x [B, ..., hidden] and weights of all experts.

    token_axes: the mesh axes over which B is sharded, by default all of them; or a PartitionSpec
    for B, S and so on, P(("data", "expert"), "context"), so that no dimension has to be cut by all
    devices.  The group's axes must be among them.

    The loss is one number, as on a single device: the mean over the groups of their sums, or,
    with loss_axes, over all tokens of these axes together.  load [num_experts] is of all groups,
    demand [devices] of each device.  Weights are those of all experts also where the ranks do not
    divide them; then they lie on every rank.
    """
    if tensor_axis and token_axes is None:
        token_axes = tuple(a for a in mesh.axis_names if a != tensor_axis)
    spec, axes = token_spec(mesh, group, token_axes, x.ndim)
    if tensor_axis in axes:
        raise EpicArgumentError(
            f"tensor_axis {tensor_axis!r}: its devices have the same tokens, so it is none of "
            f"token_axes {spec}"
        )
    if options.sequence_tokens and len(axes) > len(flat(P(spec[0]))):
        raise EpicArgumentError(
            f"token_axes {spec}: sequence_tokens {options.sequence_tokens} wants whole sequences "
            "on each device, so only the first dimension may be sharded"
        )
    if rank_of_expert is None and not placement.is_even(group, options.layer):
        weights = placement.padded(group, options.layer, weights)
    summed = (*group.axes, *loss_axes)
    replicas = tuple(a for a in axes if a not in summed)

    def local(
        x: Any, weights: layer.MoeWeights, ids: Any, table: Any, mask: Any, ranks: Any
    ) -> layer.MoeOut:
        out = layer.moe(
            group,
            options,
            x,
            weights,
            token_ids=ids,
            table=table,
            token_mask=mask,
            rank_of_expert=ranks,
            fsdp_axes=fsdp_axes,
            tensor_axis=tensor_axis,
            loss_axes=loss_axes,
            **more,
        )
        loss = jax.lax.psum(out.loss, summed)
        loss = jax.lax.pmean(loss, replicas) if replicas else loss
        return out._replace(loss=loss, load=load_everywhere(group, out.load, axes))

    places_of = weight_specs(group, weights, tuple(fsdp_axes), tensor_axis)
    ins = (spec, places_of, spec, P(), spec, P())
    outs = layer.MoeOut(spec, P(), P(), P(axes))
    return mapped(mesh, local, ins, outs)(x, weights, token_ids, table, token_mask, rank_of_expert)
