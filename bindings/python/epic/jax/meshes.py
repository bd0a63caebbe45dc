# SPDX-License-Identifier: Apache-2.0
"""The devices of a mesh as a group sees them: by group and rank, as numbers, and as text.

Nothing here needs a Group: groups.py builds groups from these functions, and mesh_checks.py
compares groups with the meshes of programs.
"""

import hashlib
import math
from typing import Any

import jax
import numpy as np

from epic.errors import EpicArgumentError
from epic.jax.arrays import as_axes

DeviceRows = tuple[tuple[int, ...], ...]
MOST_TEXT = 200  # largest number of bytes of a list of devices; the handlers store up to 255


def check_axes_in_mesh(mesh: jax.sharding.Mesh, argument: str, axes: tuple[str, ...]) -> None:
    """Refuse axes that the mesh does not have."""
    for axis in axes:
        if axis not in mesh.axis_names:
            names = ", ".join(map(str, mesh.axis_names))
            raise EpicArgumentError(
                f"{argument} is {axis!r}: must be an axis of the mesh, one of {names}"
            )


def devices_by_rank(mesh: jax.sharding.Mesh, axes: tuple[str, ...]) -> tuple[list[list[Any]], int]:
    """Return the devices of each group by rank, and the number of ranks.

    A group is all devices that share the other coordinates.
    """
    check_axes_in_mesh(mesh, "axis", axes)
    if len(set(axes)) < len(axes):
        raise EpicArgumentError(f"axis is {axes}: must not contain an axis twice")
    devices = np.asarray(mesh.devices)
    at = [mesh.axis_names.index(axis) for axis in axes]
    num_ranks = math.prod(devices.shape[i] for i in at)
    last = np.moveaxis(devices, at, range(devices.ndim - len(at), devices.ndim))
    return last.reshape(-1, num_ranks).tolist(), num_ranks


def as_token_axes(mesh: jax.sharding.Mesh | None, given: Any) -> Any:
    """Return token_axes as a hashable value, after checking the axes; None stays None."""
    if given is None or mesh is None:
        return None
    is_spec = isinstance(given, jax.sharding.PartitionSpec)
    parts = given if is_spec else as_axes("token_axes", given)
    for part in parts:
        check_axes_in_mesh(mesh, "token_axes", (part,) if isinstance(part, str) else part or ())
    return given if is_spec else parts


def token_sizes(mesh: jax.sharding.Mesh | None, like: Any, token_axes: Any) -> tuple[int, int]:
    """Return the tokens of a device and the bytes of a row, from the activations of all devices.

    The activations are [B, ..., hidden], sharded over token_axes as in sharded.moe; without a mesh
    they are those of this device.
    """
    if not hasattr(like, "shape") or not hasattr(like, "dtype"):
        raise EpicArgumentError(
            f"like is a {type(like).__name__}: must be an array [..., hidden] or its "
            "jax.ShapeDtypeStruct"
        )
    shape = list(like.shape)
    if len(shape) < 2:
        raise EpicArgumentError(f"like has the shape {like.shape}: must be [..., hidden]")
    if mesh is not None:
        whole = isinstance(token_axes, jax.sharding.PartitionSpec)
        if whole and len(token_axes) >= len(shape):
            raise EpicArgumentError(
                f"token_axes is {token_axes}: must have at most {len(shape) - 1} dimensions, "
                "because the last dimension of like, hidden, is not sharded"
            )
        for i, part in enumerate(token_axes if whole else [token_axes or mesh.axis_names]):
            axes = (part,) if isinstance(part, str) else part or ()
            check_axes_in_mesh(mesh, "token_axes", axes)
            shape[i] = -(-shape[i] // math.prod(mesh.shape[axis] for axis in axes))
    return math.prod(shape[:-1]), shape[-1] * np.dtype(like.dtype).itemsize


def device_ids(groups: list[list[Any]]) -> DeviceRows:
    """Return the devices' ids, which are equal in every process."""
    return tuple(tuple(device.id for device in group) for group in groups)


def show_devices(row: tuple[int, ...]) -> str:
    """Return the ids as text: [0 1 2 3], cut if there are many."""
    most = 16
    more = f" and {len(row) - most} more" if len(row) > most else ""
    return "[" + " ".join(map(str, row[:most])) + more + "]"


def describe_devices(devices: DeviceRows, num_ranks: int) -> str:
    """Return all devices of a group's name as text, which the handlers compare and show.

    If the text is long, a digest replaces the rest.
    """
    if not devices:
        return f"{num_ranks} ranks without a mesh"
    rows = sorted(devices)
    whole = " ".join("[" + " ".join(map(str, row)) + "]" for row in rows)
    if len(whole) <= MOST_TEXT:
        return f"devices {whole}"
    digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
    return f"devices {whole[: MOST_TEXT - 50]}... ({len(rows)} groups, digest {digest})"


def show_axes(axes: tuple[str, ...]) -> str:
    """Return the axes of a group as part of a sentence."""
    return "axis " + repr(axes[0]) if len(axes) == 1 else f"axes {axes}"
