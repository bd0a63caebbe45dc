# SPDX-License-Identifier: Apache-2.0
"""Compares the mesh of a program with the mesh that its group was opened with.

A program finds a group by its name, and the rank of a device in the program's mesh.  If the mesh of
the group has other ranks, rows would go to wrong ranks without an error.  So the two meshes are
compared while JAX traces and lowers a program, and the handlers compare them again in each call.
"""

import math
from typing import Any

import jax
import numpy as np

from epic.errors import EpicArgumentError
from epic.jax.groups import Group
from epic.jax.meshes import device_ids, devices_by_rank, show_axes, show_devices

UNKNOWN = -1  # a rank that the handlers do not compare


def check_mesh(group: Group, mesh: Any) -> None:
    """Raise an error if the device of a rank in the mesh is not that in the group."""
    if not group.devices or not isinstance(mesh, jax.sharding.Mesh):
        return
    platform = mesh.devices.flat[0].platform
    if platform != group.platform:
        raise EpicArgumentError(
            f"the mesh has devices of {platform}, and group {group.name!r} was opened with devices "
            f"of {group.platform}: use the mesh that the group was opened with"
        )
    opened = {row[0]: row for row in group.devices}
    axes = group.axes[0] if len(group.axes) == 1 else group.axes
    for row in device_ids(devices_by_rank(mesh, group.axes)[0]):
        has = opened.get(row[0]) or next((r for r in group.devices if row[0] in r), None)
        if row == has:
            continue
        theirs = f"devices {show_devices(has)}" if has else f"no device {row[0]}"
        raise EpicArgumentError(
            f"the mesh has devices {show_devices(row)} along {show_axes(group.axes)}, and group "
            f"{group.name!r} was opened with {theirs} (in the order of the ranks): use the mesh "
            "that the group was opened with, or open a group with this one, epic.jax.open(mesh, "
            f"{axes!r}, name=...)"
        )


def check_lowering(group: Group, context: Any) -> None:
    """Check the mesh of the shard_map that JAX is lowering.

    The mesh is in a private attribute of JAX.  If a later JAX does not have it, only the handlers
    compare the meshes.
    """
    mesh = getattr(getattr(context, "axis_context", None), "mesh", None)
    if group.num_ranks > 1 or set(group.axes) <= set(getattr(mesh, "axis_names", ())):
        check_mesh(group, mesh)


def size_of_bound_axes(group: Group) -> int | None:
    """Return the number of devices along the group's axes; None outside of a shard_map."""
    try:
        return math.prod(map(jax.lax.axis_size, group.axes))
    except NameError:
        return None


def takes_global_arrays(group: Group) -> bool:
    """Return whether the arrays of a call on the group are global arrays.

    They are if the call is outside of any shard_map, and the group's mesh has several devices.
    """
    if group.mesh is None or group.mesh.size == 1:
        return False
    is_inside = bool(getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ()))
    return not is_inside and size_of_bound_axes(group) is None


def rank_without_mesh(group: Group) -> Any:
    """Return this device's index, if it is in a shard_map over as many devices as ranks.

    Otherwise, and on GPUs, returns UNKNOWN.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(a for a in mesh.axis_names if a in getattr(mesh, "manual_axes", ()))
    if group.platform == "gpu" or not axes or math.prod(mesh.shape[a] for a in axes) == 1:
        return np.int32(UNKNOWN)
    whole = math.prod(mesh.shape[a] for a in axes) == group.num_ranks
    return jax.lax.axis_index(axes) if whole else np.int32(UNKNOWN)


def rank_in_mesh(group: Group) -> Any:
    """Return this device's rank in the mesh of the program, an int32 scalar.

    The handlers compare it with the rank in the group.  On GPUs it is UNKNOWN, because a handler
    would have to wait to read it.
    """
    if not group.axes:
        return rank_without_mesh(group)
    size = size_of_bound_axes(group)
    if size is None and group.num_ranks > 1:
        raise EpicArgumentError(
            f"a call with group {group.name!r} is outside of a shard_map over "
            f"{show_axes(group.axes)}: XLA would gather all arrays and make the call on every "
            "device; make it inside jax.shard_map over the group's mesh, or use epic.jax.sharded"
        )
    if size is not None and size != group.num_ranks:
        raise EpicArgumentError(
            f"{show_axes(group.axes)} has {size} devices here, and group {group.name!r} was opened "
            f"with {group.num_ranks} ranks: use the mesh that the group was opened with, or open "
            "a group with this one"
        )
    if group.platform == "gpu" or group.num_ranks == 1:
        return np.int32(UNKNOWN)
    return jax.lax.axis_index(group.axes)
