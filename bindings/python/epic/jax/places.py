# SPDX-License-Identifier: Apache-2.0
"""Where the devices of a group are, and whether a program means the same ones.

A program knows a group by its name, and which rank a device is by its own mesh.  Rows that went
to the rank of another mesh would be wrong without an error, so the two are compared: meshes while
tracing and lowering, and, by the handlers at each call, what the program was made for with the
group that is open.
"""

import hashlib
import math
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from epic.errors import EpicArgumentError

if TYPE_CHECKING:
    from epic.jax.groups import Group

Rows = tuple[tuple[int, ...], ...]
MOST_TEXT = 200  # bytes; the handlers have room for 255
UNKNOWN = -1


def check_known(mesh: jax.sharding.Mesh, argument: str, axes: tuple[str, ...]) -> None:
    """The mesh must have them."""
    for axis in axes:
        if axis not in mesh.axis_names:
            names = ", ".join(map(str, mesh.axis_names))
            raise EpicArgumentError(
                f"{argument} {axis!r} is not an axis of the mesh: those are {names}"
            )


def by_rank(mesh: jax.sharding.Mesh, axes: tuple[str, ...]) -> tuple[list[list[Any]], int]:
    """Devices by group and rank: a group is all devices that share the other coordinates."""
    check_known(mesh, "axis", axes)
    if len(set(axes)) < len(axes):
        raise EpicArgumentError(f"axis {axes}: each axis once")
    devices = np.asarray(mesh.devices)
    at = [mesh.axis_names.index(axis) for axis in axes]
    num_ranks = math.prod(devices.shape[i] for i in at)
    last = np.moveaxis(devices, at, range(devices.ndim - len(at), devices.ndim))
    return last.reshape(-1, num_ranks).tolist(), num_ranks


def sizes(mesh: jax.sharding.Mesh | None, like: Any, token_axes: Any) -> tuple[int, int]:
    """Tokens of a device and bytes of a row, of activations [B, ..., hidden] of all devices that
    token_axes cut as sharded.moe says; without a mesh of this one."""
    if not hasattr(like, "shape") or not hasattr(like, "dtype"):
        raise EpicArgumentError(
            f"like is a {type(like).__name__}: must be an array [..., hidden] or its "
            "jax.ShapeDtypeStruct"
        )
    shape = list(like.shape)
    if len(shape) < 2:
        raise EpicArgumentError(f"like: shape {like.shape}: [..., hidden] is needed")
    if mesh is not None:
        whole = isinstance(token_axes, jax.sharding.PartitionSpec)
        if whole and len(token_axes) >= len(shape):
            raise EpicArgumentError(
                f"token_axes {token_axes}: like has {len(shape)} dimensions, and the last, hidden, "
                "stays whole"
            )
        for i, part in enumerate(token_axes if whole else [token_axes or mesh.axis_names]):
            axes = (part,) if isinstance(part, str) else part or ()
            check_known(mesh, "token_axes", axes)
            shape[i] = -(-shape[i] // math.prod(mesh.shape[axis] for axis in axes))
    return math.prod(shape[:-1]), shape[-1] * np.dtype(like.dtype).itemsize


def ids(groups: list[list[Any]]) -> Rows:
    """The devices' numbers, which are the same in every process."""
    return tuple(tuple(device.id for device in group) for group in groups)


def shown(row: tuple[int, ...]) -> str:
    """[0 1 2 3], cut where it is long."""
    most = 16
    more = f" and {len(row) - most} more" if len(row) > most else ""
    return "[" + " ".join(map(str, row[:most])) + more + "]"


def text(group: "Group") -> str:
    """All devices of a group's name for the handlers, which compare it and show it; where it is
    long a digest stands for the rest."""
    if not group.devices:
        return f"{group.num_ranks} ranks without a mesh"
    rows = sorted(group.devices)
    whole = " ".join("[" + " ".join(map(str, row)) + "]" for row in rows)
    if len(whole) <= MOST_TEXT:
        return f"devices {whole}"
    digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
    return f"devices {whole[: MOST_TEXT - 50]}... ({len(rows)} groups, digest {digest})"


def named(axes: tuple[str, ...]) -> str:
    """The axes of a group in a sentence."""
    return "axis " + repr(axes[0]) if len(axes) == 1 else f"axes {axes}"


def check_mesh(group: "Group", mesh: Any) -> None:
    """Refuses a mesh that is not made of groups that this one was opened for, rank by rank."""
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
    for row in ids(by_rank(mesh, group.axes)[0]):
        has = opened.get(row[0]) or next((r for r in group.devices if row[0] in r), None)
        if row == has:
            continue
        theirs = f"devices {shown(has)}" if has else f"no device {row[0]}"
        raise EpicArgumentError(
            f"the mesh has devices {shown(row)} along {named(group.axes)}, and group "
            f"{group.name!r} was opened with {theirs} (in the order of the ranks): use the mesh "
            "that the group was opened with, or open a group with this one, epic.jax.open(mesh, "
            f"{axes!r}, name=...)"
        )


def check_lowering(group: "Group", context: Any) -> None:
    """The same for the mesh of the shard_map that is being compiled.  Where JAX keeps it is
    private to JAX: if it is not there, only the handlers compare."""
    mesh = getattr(getattr(context, "axis_context", None), "mesh", None)
    if group.num_ranks > 1 or set(group.axes) <= set(getattr(mesh, "axis_names", ())):
        check_mesh(group, mesh)


def bound_size(group: "Group") -> int | None:
    """Devices along the group's axes where the program is now; None outside of a shard_map."""
    try:
        return math.prod(map(jax.lax.axis_size, group.axes))
    except NameError:
        return None


def rank_without_mesh(group: "Group") -> Any:
    """In a shard_map over as many devices as the group has ranks, the place among them."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(a for a in mesh.axis_names if a in getattr(mesh, "manual_axes", ()))
    if group.platform == "gpu" or not axes or math.prod(mesh.shape[a] for a in axes) == 1:
        return np.int32(UNKNOWN)
    whole = math.prod(mesh.shape[a] for a in axes) == group.num_ranks
    return jax.lax.axis_index(axes) if whole else np.int32(UNKNOWN)


def rank(group: "Group") -> Any:
    """This device's rank by the mesh of the program, an int32 scalar, for the handlers to compare
    with the group's; UNKNOWN on GPUs, where they could not read it without waiting."""
    if not group.axes:
        return rank_without_mesh(group)
    size = bound_size(group)
    if size is None and group.num_ranks > 1:
        raise EpicArgumentError(
            f"a collective of group {group.name!r} outside of a shard_map over "
            f"{named(group.axes)}: XLA would gather all arrays and run it on every device.  Put "
            "it into jax.shard_map over the group's mesh, or use epic.jax.sharded"
        )
    if size is not None and size != group.num_ranks:
        raise EpicArgumentError(
            f"{named(group.axes)} has {size} devices here, and group {group.name!r} was opened "
            f"with {group.num_ranks} ranks: use the mesh that the group was opened with, or open "
            "a group with this one"
        )
    if group.platform == "gpu" or group.num_ranks == 1:
        return np.int32(UNKNOWN)
    return jax.lax.axis_index(group.axes)
