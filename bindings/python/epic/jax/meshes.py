# SPDX-License-Identifier: Apache-2.0
"""Lists the devices of a mesh by group and rank, and describes them as numbers and as text.

This module does not import groups.py, which uses it to make groups.
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
    """Raise an error for axes that the mesh does not have; argument: the name of the argument."""
    for axis in axes:
        if axis not in mesh.axis_names:
            names = ", ".join(map(str, mesh.axis_names))
            raise EpicArgumentError(
                f"{argument} is {axis!r}: must be an axis of the mesh, one of {names}"
            )


def devices_by_rank(mesh: jax.sharding.Mesh, axes: tuple[str, ...]) -> tuple[list[list[Any]], int]:
    """Return a list of the devices of each group, in the order of ranks, and the number of ranks.

    Devices form a group if all their mesh coordinates are equal, except those along `axes`.
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
    """Return the number of tokens of a device and the bytes of a row, from activations.

    Args:
        mesh: the mesh, or None.
        like: activations [B, ..., hidden] of all devices.  Without a mesh those of this device.
        token_axes: how they are sharded, as in sharded.moe.

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
    """Return the ids of the devices; a device has one id in all processes."""
    return tuple(tuple(device.id for device in group) for group in groups)


def show_devices(row: tuple[int, ...]) -> str:
    """Return the ids as text for an error, such as [0 1 2 3]; at most 16 of them."""
    most = 16
    more = f" and {len(row) - most} more" if len(row) > most else ""
    return "[" + " ".join(map(str, row[:most])) + more + "]"


def describe_devices(devices: DeviceRows, num_ranks: int) -> str:
    """Return the devices of all groups with one name as text.

    The handlers compare this text, and print it in errors.  If it is long, a digest replaces its
    end.
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
    """Return the axes of a group as text for an error."""
    return "axis " + repr(axes[0]) if len(axes) == 1 else f"axes {axes}"
