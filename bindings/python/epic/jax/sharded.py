# SPDX-License-Identifier: Apache-2.0
"""The same functions over global arrays, for plain jit: they insert the shard_map.

Tokens are sharded over `token_axes` (data axes and the group's) in their first dimension, rows of
a receive buffer likewise, experts over the group's axis, hidden over `hidden_axis` if there is
one.  Without a shard_map XLA would gather every array and run the call on all devices.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from epic.errors import EpicArgumentError
from epic.jax import moe as layer
from epic.jax import placement, places, steps
from epic.jax.groups import Group
from epic.options import Layer

Axes = tuple[str, ...]


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


def weight_specs(group: Group, weights: layer.MoeWeights, fsdp_axes: Axes = ()) -> layer.MoeWeights:
    """Experts over the group's axes, where they divide; hidden over the FSDP axes; vectors that all
    experts share on every device."""

    def spec(name: str, shape: tuple[int, ...]) -> P:
        parts: list[Any] = [None] * len(shape)
        if name in placement.OF_EXPERTS and shape[0] % group.num_ranks == 0:
            parts[0] = group.axes
        if fsdp_axes and name in layer.FSDP_DIMENSION:
            parts[layer.FSDP_DIMENSION[name]] = fsdp_axes
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
    token_axes: Axes | None = None,
    token_ids: Any = None,
    table: Any = None,
    rank_of_expert: Any = None,
    fsdp_axes: Axes = (),
    loss_axes: Axes = (),
    **more: Any,
) -> layer.MoeOut:
    """As epic.jax.moe over x [B, ..., hidden] with B over token_axes and weights of all experts.

    The loss is one number, as on a single device: the mean over the groups of their sums, or,
    with loss_axes, over all tokens of these axes together.  load [num_experts] is of all groups,
    demand [devices] of each device.  Weights are those of all experts also where the ranks do not
    divide them; then they lie on every rank.
    """
    axes = default_axes(mesh, group, token_axes, None)
    if rank_of_expert is None and not placement.is_even(group, options.layer):
        weights = placement.padded(group, options.layer, weights)
    summed = (*group.axes, *loss_axes)
    replicas = tuple(a for a in axes if a not in summed)

    def local(x: Any, weights: layer.MoeWeights, ids: Any, table: Any, ranks: Any) -> layer.MoeOut:
        out = layer.moe(
            group,
            options,
            x,
            weights,
            token_ids=ids,
            table=table,
            rank_of_expert=ranks,
            fsdp_axes=fsdp_axes,
            loss_axes=loss_axes,
            **more,
        )
        loss = jax.lax.psum(out.loss, summed)
        loss = jax.lax.pmean(loss, replicas) if replicas else loss
        return out._replace(loss=loss, load=load_everywhere(group, out.load, axes))

    ins = (P(axes), weight_specs(group, weights, tuple(fsdp_axes)), P(axes), P(), P())
    outs = layer.MoeOut(P(axes), P(), P(), P(axes))
    return mapped(mesh, local, ins, outs)(x, weights, token_ids, table, rank_of_expert)
