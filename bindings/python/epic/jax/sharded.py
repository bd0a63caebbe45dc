# SPDX-License-Identifier: Apache-2.0
"""The functions of epic.jax on global arrays, for a plain jax.jit.

Each function inserts a shard_map around the function of epic.jax with its name.  Without a
shard_map XLA would gather every array and make the call on all devices.  If a program calls a
function of epic.jax outside of a shard_map, it calls the function of this module.

Tokens are sharded over `token_axes` (data axes and the group's axes), in their first dimension or
in several dimensions.  Rows of a receive buffer are sharded in their first dimension.  Experts are
sharded over the group's axes.  With `hidden_axis`, hidden is sharded over that axis.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from epic.errors import EpicArgumentError
from epic.jax import e4m3, layer_args, placement, router, tensor
from epic.jax import moe as layer
from epic.jax.arrays import (
    ANY_ROWS,
    FLOATS,
    INTEGERS,
    MATRICES,
    array_of,
    as_axes,
    check_array,
    check_kind,
)
from epic.jax.groups import Group
from epic.jax.layer_args import MoeOut, MoeWeights
from epic.jax.sharded_steps import (
    check_tables,
    combine,
    dispatch,
    dispatch_flat,
    dispatch_flat_quantized,
    dispatch_quantized,
    experts,
    plan,
    plan_dispatch,
    route,
)
from epic.jax.sharded_sums import balance_loss, sum, sum_replica_grads, sum_replicas, z_loss
from epic.jax.token_specs import (
    Axes,
    TokenAxes,
    axes_of_spec,
    check_axes,
    check_divisible,
    map_over_mesh,
    token_spec,
)
from epic.options import Moe

__all__ = [
    "balance_loss",
    "combine",
    "dispatch",
    "dispatch_flat",
    "dispatch_flat_quantized",
    "dispatch_quantized",
    "experts",
    "moe",
    "plan",
    "plan_dispatch",
    "route",
    "sum",
    "sum_replica_grads",
    "sum_replicas",
    "weight_specs",
    "z_loss",
]


def weight_specs(
    group: Group,
    weights: MoeWeights,
    fsdp_axes: Axes = (),
    tensor_axis: str | None = None,
) -> MoeWeights:
    """Return the shardings in which `moe` needs its weights.

    Experts are sharded over the group's axes, if the number of ranks divides their number.  hidden
    is sharded over fsdp_axes, and inner over tensor_axis.  All other dimensions are not sharded.

    Args:
        group: the group.
        weights: a MoeWeights of arrays, or of other objects that have a shape.
        fsdp_axes: mesh axes for hidden.
        tensor_axis: a mesh axis for inner.

    Returns:
        A MoeWeights of `jax.sharding.PartitionSpec`; None where the weights are None.

    Raises:
        EpicArgumentError: an argument is of a wrong class.

    Example:
        See `epic.jax.moe`.

    """
    check_kind("group", group, Group)
    check_kind("weights", weights, MoeWeights)
    fsdp_axes = as_axes("fsdp_axes", fsdp_axes)
    for argument, axes in (("fsdp_axes", fsdp_axes), ("tensor_axis", tensor_axis)):
        if axes:
            e4m3.refuse_parts(weights, argument)

    def spec(name: str, shape: tuple[int, ...]) -> P:
        parts: list[Any] = [None] * len(shape)
        if name in placement.BY_EXPERT and shape[0] % group.num_ranks == 0:
            parts[0] = group.axes
        if fsdp_axes and name in layer.FSDP_DIMENSION:
            parts[layer.FSDP_DIMENSION[name]] = fsdp_axes
        if tensor_axis and name in tensor.DIMENSION:
            parts[tensor.DIMENSION[name]] = tensor_axis
        return P(*parts)

    named = weights._asdict().items()
    return MoeWeights(**{n: None if x is None else spec(n, x.shape) for n, x in named})


def load_everywhere(group: Group, loads: Any, axes: Axes) -> Any:
    """Return loads, summed over all groups.

    The load is equal on all ranks of a group, so the sum counts only the first rank of each group.
    """
    first = jnp.ones((), bool)
    for axis in group.axes:
        first &= jax.lax.axis_index(axis) == 0
    return jax.tree.map(lambda load: jax.lax.psum(jnp.where(first, load, 0), axes), loads)


def check_inputs(
    options: Moe, x: Any, token_ids: Any, table: Any, token_mask: Any
) -> tuple[Any, Any, Any]:
    """Return token_ids, table and token_mask as arrays, after checking them; None stays None.

    token_ids and token_mask must have the dimensions of the tokens.
    """
    dims = x.shape[:-1]
    if token_ids is not None:
        token_ids = check_array("token_ids", token_ids, INTEGERS, dims)
    table = router.as_ids(token_ids, table, options.router.top_k, dims)[1]
    if token_mask is not None:
        token_mask = check_array("token_mask", token_mask, ("bool",), dims)
    return token_ids, table, token_mask


def check_weights(
    group: Group, options: Moe, x: Any, weights: MoeWeights, rank_of_expert: Any
) -> None:
    """Raise an error for weights that do not have all experts.

    With rank_of_expert, the number of experts in the weights must be a multiple of the number of
    ranks.
    """
    shape = ("experts", "hidden", "width")
    first = check_array("w_gate_up", weights.w_gate_up, MATRICES, shape)
    count = options.layer.num_experts
    if rank_of_expert is not None:
        count = first.shape[0]
        if count % group.num_ranks:
            raise EpicArgumentError(
                f"w_gate_up has {count} experts: must be a multiple of {group.num_ranks}, the "
                "number of ranks, with rank_of_expert"
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
    forced: Any = None,
    return_routing: bool = False,
    rank_of_expert: Any = None,
    logical_of_expert: Any = None,
    fsdp_axes: Axes = (),
    tensor_axis: str | None = None,
    loss_axes: Axes = (),
    **more: Any,
) -> MoeOut:
    """Run a Mixture-of-Experts layer on global arrays.

    Call it in a plain `jax.jit`, or outside of one.  It inserts a shard_map around `epic.jax.moe`.

    Args:
        mesh: the mesh that the group was opened with.
        group: the group.
        options: the options of the layer; static.
        x: [B, ..., hidden] float32, bfloat16, float16 or float64: the tokens of all devices.
        weights: the weights of all experts; `weight_specs` returns their best sharding.
        token_axes: a tuple of mesh axes over which B is sharded.  Or a PartitionSpec for B and
            other dimensions, for example P(("data", "expert"), "context").  It must contain the
            group's axes.  None: the token_axes of `epic.jax.open`, or without them all axes for B.
        token_ids: [B, ...] integers; see `epic.jax.moe`.
        table: see `epic.jax.moe`.
        token_mask: [B, ...] bool; see `epic.jax.moe`.
        forced: a `Routing` of [B, ..., top_k], or ids alone; see `epic.jax.moe`.
        return_routing: see `epic.jax.moe`.
        rank_of_expert: see `epic.jax.moe`.
        logical_of_expert: see `epic.jax.moe`.
        fsdp_axes: see `epic.jax.moe`.
        tensor_axis: see `epic.jax.moe`.  If token_axes contains it, the call gathers the tokens
            over this axis, and each device gets the output of its own tokens.  That sends half the
            bytes of a sum over the axis.
        loss_axes: other mesh axes whose tokens also count in the losses.
        **more: other arguments of `epic.jax.moe`: capacity_limit, grouped_gemm, channel, after,
            max_sms.  All devices have the same capacity_limit.

    Returns:
        MoeOut: `loss` is a scalar: the mean of the losses of all groups.  With loss_axes it is
        the loss of all tokens along these axes.  `load` [num_experts] is the sum over all groups.
        `demand` [devices] has one value for each device.

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
    check_kind("group", group, Group)
    if "scatter_tokens" in more:
        raise EpicArgumentError(
            "scatter_tokens is given and the arrays are global: must be left out; pass token_axes "
            "with tensor_axis in it to scatter the tokens over tensor_axis"
        )
    layer_args.check_parts(options, weights)
    x = check_array("x", x, FLOATS, (ANY_ROWS, ("hidden", options.experts.hidden)))
    token_ids, table, token_mask = check_inputs(options, x, token_ids, table, token_mask)
    forced = layer_args.check_forced(options.router, forced, x)
    token_axes = group.token_axes if token_axes is None else token_axes
    if tensor_axis and token_axes is None:
        token_axes = tuple(a for a in mesh.axis_names if a != tensor_axis)
    spec, axes = token_spec(mesh, group, token_axes, x.ndim)
    check_axes(mesh, (), loss_axes=layer.loss_axes_of(group, loss_axes))
    check_axes(mesh, group.axes, fsdp_axes=fsdp_axes, tensor_axis=tensor_axis)
    scatter = tensor_axis in axes  # the layer gathers the tokens of this axis
    groups_axes = tuple(a for a in axes if a != tensor_axis)
    for axis in fsdp_axes:
        if axis not in axes and mesh.shape[axis] > 1:
            raise EpicArgumentError(
                f"fsdp_axes contains {axis!r}: must contain only axes in token_axes, {spec}; put "
                "the axis in token_axes, or do not shard the weights over it"
            )
    for axis in loss_axes:
        if axis not in groups_axes:
            raise EpicArgumentError(
                f"loss_axes contains {axis!r}: must not contain it, because its devices have the "
                f"same tokens (token_axes is {spec}, tensor_axis is {tensor_axis!r})"
            )
    if options.sequence_tokens and len(axes) > len(axes_of_spec(P(spec[0]))):
        raise EpicArgumentError(
            f"token_axes is {spec}: must shard only the first dimension, because sequence_tokens "
            f"({options.sequence_tokens}) needs whole sequences on each device"
        )
    check_divisible(mesh, "x", x, spec)
    owners, logical = check_tables(group, options.layer, rank_of_expert, logical_of_expert)
    layer_args.check_replicas(options, logical)
    if tensor_axis:
        tensor.check_tensor_axis(options, tensor_axis, mesh.shape[tensor_axis])
    check_weights(group, options, x, weights, owners)
    weights = MoeWeights(*map(array_of, weights))
    if owners is None and not placement.is_even(group, options.layer):
        weights = placement.pad_weights(group, options.layer, weights)
    summed = (*group.axes, *loss_axes)
    replicas = tuple(a for a in groups_axes if a not in summed)

    def local(
        x: Any,
        weights: MoeWeights,
        ids: Any,
        table: Any,
        mask: Any,
        forced: Any,
        ranks: Any,
        logical: Any,
    ) -> MoeOut:
        out = layer.moe(
            group,
            options,
            x,
            weights,
            token_ids=ids,
            table=table,
            token_mask=mask,
            forced=forced,
            return_routing=return_routing,
            rank_of_expert=ranks,
            logical_of_expert=logical,
            fsdp_axes=fsdp_axes,
            tensor_axis=tensor_axis,
            scatter_tokens=scatter,
            loss_axes=loss_axes,
            **more,
        )
        loss = jax.lax.psum(out.loss, summed)
        loss = jax.lax.pmean(loss, replicas) if replicas else loss
        loads = load_everywhere(group, (out.load, out.logical_load), groups_axes)
        return out._replace(loss=loss, load=loads[0], logical_load=loads[1])

    places_of = weight_specs(group, weights, tuple(fsdp_axes), tensor_axis)
    for name, where in places_of._asdict().items():
        check_divisible(mesh, name, getattr(weights, name), where or P())
    ins = (spec, places_of, spec, P(), spec, spec, P(), P())
    outs = MoeOut(spec, P(), P(), P(groups_axes), P(), P(groups_axes), spec)
    tables = (token_ids, table, token_mask, forced, owners, logical)
    return map_over_mesh(mesh, local, ins, outs)(x, weights, *tables)
