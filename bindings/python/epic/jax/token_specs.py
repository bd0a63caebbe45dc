# SPDX-License-Identifier: Apache-2.0
"""Partition specs of the arrays of sharded calls, and the shard_map around such a call.

Tokens are sharded over `token_axes` (data axes and the group's axes), in their first dimension or
in several dimensions.  Rows of a receive buffer are sharded in their first dimension.  Experts are
sharded over the group's axes.  With `hidden_axis`, hidden is sharded over that axis.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from epic.errors import EpicArgumentError
from epic.jax import mesh_checks
from epic.jax.arrays import as_axes, check_kind
from epic.jax.groups import Group

Axes = tuple[str, ...]
TokenAxes = Axes | P | None


def map_over_mesh(
    mesh: Mesh, function: Callable[..., Any], ins: Any, outs: Any, *, check: bool = True
) -> Callable[..., Any]:
    """Return the function in a shard_map over all axes of the mesh.

    check: whether JAX checks that results are equal on devices whose axes `outs` does not name.
    """
    return jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=check)


def check_axes(mesh: Mesh, taken: Axes, **given: Any) -> None:
    """Raise an error for axes that the mesh does not have, or that are in `taken`.

    given: the axes of arguments by the argument's name.
    """
    for name, axes in given.items():
        one = (axes,) if axes else ()  # an argument that names a single axis
        for axis in as_axes(name, axes or ()) if name.endswith("_axes") else as_axes(name, one):
            if axis not in mesh.axis_names:
                raise EpicArgumentError(
                    f"{name} is {axis!r}: must be an axis of the mesh, one of {mesh.axis_names}"
                )
            if axis in taken:
                raise EpicArgumentError(f"{name} is {axis!r}: must not be an axis of the group")


def check_divisible(mesh: Mesh, name: str, x: Any, spec: P) -> None:
    """Raise an error if a dimension of x cannot be divided equally among the devices of its axes.

    name: the name of x in the error.
    """
    for dimension, axes in enumerate(spec):
        count = math.prod(mesh.shape[a] for a in axes_of_spec(P(axes)))
        if x is not None and dimension < x.ndim and x.shape[dimension] % count:
            raise EpicArgumentError(
                f"{name} has the shape {tuple(x.shape)}: dimension {dimension} must be a multiple "
                f"of {count}, the number of devices on the mesh axis {axes!r}"
            )


def axes_of_spec(spec: P) -> Axes:
    """Return the mesh axes of all dimensions of a spec as one tuple."""
    parts = [part for part in spec if part is not None]
    return tuple(a for part in parts for a in ((part,) if isinstance(part, str) else part))


def token_spec(
    mesh: Mesh, group: Group, given: TokenAxes, rank: int, hidden_axis: str | None = None
) -> tuple[P, Axes]:
    """Return how all dimensions of an array except the last are sharded, and the axes of that.

    Args:
        mesh: the mesh.
        group: the group.
        given: token_axes.  None: the token_axes of `epic.jax.open`.  Without them the first
            dimension is sharded over all axes of the mesh except hidden_axis.
        rank: the number of dimensions of the array.
        hidden_axis: the mesh axis over which hidden is sharded, or None.

    """
    check_kind("group", group, Group)
    check_kind("mesh", mesh, Mesh)
    mesh_checks.check_mesh(group, mesh)
    given = group.token_axes if given is None else given
    if not isinstance(given, P):
        check_axes(mesh, (), token_axes=given)
    check_axes(mesh, group.axes, hidden_axis=hidden_axis)
    axes = given or tuple(a for a in mesh.axis_names if a != hidden_axis)
    spec = given if isinstance(given, P) else P(axes)
    if len(spec) >= rank:
        raise EpicArgumentError(
            f"token_axes is {spec}: must have at most {rank - 1} dimensions, because the last "
            "dimension of x, hidden, is not sharded"
        )
    as_axes("token_axes", axes_of_spec(spec))
    for axis in axes_of_spec(spec):
        if axis not in mesh.axis_names:
            raise EpicArgumentError(
                f"token_axes contains {axis!r}: must contain only axes of the mesh, "
                f"{mesh.axis_names}"
            )
    if not set(group.axes) <= set(axes_of_spec(spec)):
        raise EpicArgumentError(
            f"token_axes is {spec}: must contain the axes of the group, {group.axes}"
        )
    return spec, axes_of_spec(spec)


def rows_specs(
    mesh: Mesh, group: Group, given: TokenAxes, rank: int, hidden_axis: str | None
) -> tuple[P, P, P, P]:
    """Return the shardings of the arrays in calls on a plan.

    The arguments are those of token_spec.

    Returns:
        The shardings of arrays [B, ..., hidden], [B, ..., top_k] and [slots, hidden].  The fourth
        one is for arrays of which each device has a different one, such as plans and [slots].

    """
    spec, axes = token_spec(mesh, group, given, rank, hidden_axis)
    if hidden_axis in axes:
        raise EpicArgumentError(
            f"hidden_axis is {hidden_axis!r}: must not be in token_axes, {spec}, because its "
            "devices have the same tokens"
        )
    rows = P(*spec, *[None] * (rank - 1 - len(spec)), hidden_axis)
    own = P((*axes, hidden_axis) if hidden_axis else axes)
    return rows, spec, P(axes, hidden_axis), own
