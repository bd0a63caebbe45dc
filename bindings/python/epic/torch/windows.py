# SPDX-License-Identifier: Apache-2.0
"""Windows: tensors into which the other ranks of a group store rows directly."""

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import IO

import torch
from torch import Tensor

from epic import _native
from epic.errors import EpicArgumentError, EpicError
from epic.options import check_int, check_kind
from epic.torch.groups import Group

MOST_BYTES = (1 << 48) - 1  # largest size of a window in C


def window(shape: int | Sequence[int], dtype: torch.dtype, group: Group) -> Tensor:
    """Return a new tensor of zeros into which the other ranks store rows directly.

    Pass this tensor, or a part of it, as out= of `plan_dispatch`, `dispatch` or `combine`. EPIC
    recognizes a window by the address of the output. Without a window a sender stores each row in
    staging memory, and the receiver copies it from there. The results have the same bits.

    In dispatch a row is stored directly if its token has exactly one slot on the receiving rank.
    With layout "flat" this is true for every token. In combine a row is stored directly if all
    choices of its token are on one rank. On GPUs there are more conditions: see Windows in the
    guide of the C library.

    The group keeps the memory until it closes, even if the program deletes the tensor. So make a
    window once, not in each step. A group has at most 256 windows.

    Args:
        shape: Shape of the tensor, possibly with a dimension of 0. It may differ between ranks.
        dtype: Dtype of the tensor. It may differ between ranks.
        group: The group. All its ranks call this function or `register_window`, in the same order.
            With backend "mpi" a window is an ordinary tensor. Backend "hosts" has no windows.

    Returns:
        The tensor of zeros, on the group's device. On a GPU its memory is of torch's allocator.

    Raises:
        EpicArgumentError: An argument is invalid.
        EpicError: A rank is out of memory, or does not support windows, for example because torch's
            allocator uses cudaMallocAsync and ranks are processes. All ranks get this error, which
            names the rank.

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
    check_kind("group", group, Group)
    group.must_be_open()
    sizes = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    for size in sizes:
        check_int("shape", size, most=MOST_BYTES)
    if not isinstance(dtype, torch.dtype):
        raise EpicArgumentError(f"dtype is {dtype!r}: must be a torch.dtype")
    count = dtype.itemsize
    for size in sizes:
        count *= size
    if count > MOST_BYTES:
        raise EpicArgumentError(f"shape is {sizes}: must have at most {MOST_BYTES} bytes")
    if count == 0:
        register(group, 0, 0)
        return torch.zeros(sizes, dtype=dtype, device=group.device)
    with naming_rank(group, count):
        octets, file = new_memory(group, count)
    with file or contextlib.nullcontext():
        register(group, octets.data_ptr(), count, file.fileno() if file else 0)
    group.windows.append(octets)
    return octets.view(dtype).view(sizes)


def register_window(tensor: Tensor, group: Group) -> None:
    """Make the memory of a tensor a window, into which the other ranks store rows directly.

    Use it instead of `window` if another library allocates the memory, for example
    torch.distributed._symmetric_memory.empty(). The group keeps the memory until it closes. Several
    windows may overlap.

    Args:
        tensor: A contiguous tensor on the group's GPU, possibly without elements. Its shape and
            dtype may differ between ranks. If ranks are processes, other processes must be able to
            map its memory, so it must be memory of torch's allocator (with or without expandable
            segments, but not with cudaMallocAsync) or symmetric memory.
        group: A group on GPUs, with backend "p2p". All its ranks call this function or `window`, in
            the same order.

    Raises:
        EpicArgumentError: An argument is invalid.
        EpicError: The memory of a rank cannot be shared. All ranks get this error, which names the
            rank.

    Example:
        >>> import epic.torch
        >>> def add_window(tensor, group):  # for a group on GPUs
        ...     epic.torch.register_window(tensor, group)
    """
    check_kind("group", group, Group)
    group.must_be_open()
    if not isinstance(tensor, Tensor):
        raise EpicArgumentError(f"tensor is {type(tensor).__name__}: must be a torch.Tensor")
    if not group.on_gpu:
        raise EpicArgumentError("group is on CPUs: must be on GPUs; on CPUs use window()")
    if tensor.device != group.device:
        raise EpicArgumentError(
            f"tensor is on {tensor.device}: must be on {group.device}, the group's device"
        )
    if not tensor.is_contiguous():
        raise EpicArgumentError("tensor is not contiguous: must be contiguous")
    count = tensor.numel() * tensor.element_size()
    register(group, tensor.data_ptr() if count else 0, count)
    group.windows.append(tensor.detach())


@contextlib.contextmanager
def naming_rank(group: Group, count: int) -> Iterator[None]:
    """Report an error of the body to the other ranks, which wait in epic_window_register."""
    try:
        yield
    except (OSError, torch.OutOfMemoryError) as error:
        why = f"rank {group.rank} has no memory for a window of {count} bytes: {error}"
        group.abort(why)
        raise EpicError("EPIC_ENOMEM", why) from error


def new_memory(group: Group, count: int) -> tuple[Tensor, IO[bytes] | None]:
    """Return `count` bytes of zeros on the group's device, and on CPUs the file of the memory."""
    if not group.on_gpu:
        return map_new_file(count)
    octets = torch.zeros(count, dtype=torch.uint8, device=group.device)
    torch.cuda.synchronize(group.device)  # before a rank stores rows there
    return octets, None


def map_new_file(count: int) -> tuple[Tensor, IO[bytes]]:
    """Return a tensor over a new anonymous file of `count` bytes, and the file.

    The descriptor of the file is at least 3, because 0 stands for no file.
    """
    first = os.memfd_create("epic-window", os.MFD_CLOEXEC)
    file = os.fdopen(fcntl.fcntl(first, fcntl.F_DUPFD_CLOEXEC, 3), "r+b")
    os.close(first)
    file.truncate(count)
    return torch.frombuffer(mmap.mmap(file.fileno(), count), dtype=torch.uint8), file


def register(group: Group, data: int, count: int, file: int = 0) -> None:
    """Call epic_window_register, and raise its error if it fails. Collective."""
    args = _native.WindowArgs(bytes=count, data=data, fd=file)
    found = _native.WindowInfo()
    code = _native.core().epic_window_register_v1(group.context, *_native.sized(args, found))
    _native.check(code, group.context)
