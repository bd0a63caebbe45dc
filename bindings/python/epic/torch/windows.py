# SPDX-License-Identifier: Apache-2.0
"""Windows: tensors into which the other ranks of a group store rows directly."""

import ctypes
import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import IO

import torch
from torch import Tensor

from epic import _native
from epic.errors import EpicArgumentError, EpicError
from epic.options import check_int
from epic.torch.groups import Group

MOST_BYTES = (1 << 48) - 1  # largest size of a window in C


def window(shape: int | Sequence[int], dtype: torch.dtype, group: Group) -> Tensor:
    """Return a new tensor of zeros into which the other ranks store rows directly.

    Pass this tensor, or a part of it, as out= of `plan_dispatch`, `dispatch` or `combine`. EPIC
    recognizes a window by the address of the output. Without a window a sender stores each row in
    staging memory, and the receiver copies it from there. The results have the same bits.

    In dispatch a row is stored directly if its token has exactly one slot on the receiving rank.
    With layout "flat" this is true for every token. In combine a row is stored directly if all
    choices of its token are on one rank.

    The group keeps the memory until it closes, even if the program deletes the tensor. So make a
    window once, not in each step. A group has at most 256 windows.

    Args:
        shape: Shape of the tensor, possibly with a dimension of 0. It may differ between ranks.
        dtype: Dtype of the tensor. It may differ between ranks.
        group: The group. All its ranks call this function in the same order. Groups on GPUs have no
            windows. With backend "mpi" a window is an ordinary tensor.

    Returns:
        The tensor of zeros, on the CPU.

    Raises:
        EpicArgumentError: An argument is invalid.
        EpicError: A rank is out of memory, or does not support windows. All ranks get this error,
            which names the rank.

    Example:
        >>> import torch, epic.torch
        >>> layer = epic.torch.Layer(num_experts=4, top_k=1)
        >>> ids, x = torch.tensor([[3], [0]]), torch.ones(2, 8)
        >>> with epic.torch.Group(num_ranks=1, max_tokens=2, max_row_bytes=32) as group:
        ...     rows = epic.torch.window((group.capacity_bound(layer), 8), x.dtype, group)
        ...     plan = epic.torch.plan(group, layer, ids)
        ...     recv, _ = epic.torch.dispatch(plan, x, out=(rows, None))
        >>> recv is rows, float(rows.sum())
        (True, 16.0)
    """
    group.must_be_open()
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    for size in sizes:
        check_int("shape", size, most=MOST_BYTES)
    if not isinstance(dtype, torch.dtype):
        raise EpicArgumentError(f"dtype is {dtype!r}: must be a torch.dtype")
    count = dtype.itemsize
    for size in sizes:
        count *= size
    if count > MOST_BYTES:
        raise EpicArgumentError(f"shape is {sizes}: must have at most {MOST_BYTES} bytes")
    if group.on_gpu:
        raise EpicError(
            "EPIC_ENOTSUP", "group is on GPUs: must be on CPUs; in C, GPUs have windows, too"
        )
    args = _native.WindowArgs(bytes=count)
    found = _native.WindowInfo()
    if count == 0:
        register(group, args, found)
        return torch.zeros(sizes, dtype=dtype, device="cpu")
    file, memory = map_new_file(group, count)
    with file:
        octets = torch.frombuffer(memory, dtype=torch.uint8)
        args.data, args.fd = octets.data_ptr(), file.fileno()
        register(group, args, found)
    group.windows.append(octets)
    return octets.view(dtype).view(sizes)


def map_new_file(group: Group, count: int) -> tuple[IO[bytes], mmap.mmap]:
    """Return an anonymous file of `count` bytes and its mapping in this process.

    The descriptor of the file is at least 3, because 0 stands for no file. If the file cannot be
    made, the function reports the error to the other ranks, which wait in epic_window_register.
    """
    try:
        first = os.memfd_create("epic-window", os.MFD_CLOEXEC)
        file = os.fdopen(fcntl.fcntl(first, fcntl.F_DUPFD_CLOEXEC, 3), "r+b")
        os.close(first)
        file.truncate(count)
        return file, mmap.mmap(file.fileno(), count)
    except OSError as error:
        why = f"rank {group.rank} has no memory for a window of {count} bytes: {error}"
        group.abort(why)
        raise EpicError("EPIC_ENOMEM", why) from error


def register(group: Group, args: ctypes.Structure, found: ctypes.Structure) -> None:
    """Call epic_window_register, and raise its error if it fails. Collective."""
    code = _native.core().epic_window_register_v1(group.context, *_native.sized(args, found))
    _native.check(code, group.context)
