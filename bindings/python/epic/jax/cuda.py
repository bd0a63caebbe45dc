# SPDX-License-Identifier: Apache-2.0
"""Makes a GPU current in a thread, because the core opens a context on the current GPU."""

import contextlib
import ctypes
import functools
from collections.abc import Iterator

from epic.errors import EpicError


@functools.cache
def load_driver() -> ctypes.CDLL:
    """Return CUDA's driver library, which JAX has loaded already."""
    return ctypes.CDLL("libcuda.so.1")


def check_cuda(code: int, what: str) -> None:
    """Raise an error if a CUDA call failed."""
    if code != 0:
        raise EpicError("EPIC_EDEVICE", f"{what}: CUDA returned error {code}")


@contextlib.contextmanager
def use_gpu(ordinal: int) -> Iterator[None]:
    """Make a GPU current in this thread, with its primary context, which XLA also uses."""
    cuda, context, device = load_driver(), ctypes.c_void_p(), ctypes.c_int()
    check_cuda(cuda.cuDeviceGet(ctypes.byref(device), ordinal), f"GPU {ordinal}")
    check_cuda(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), f"GPU {ordinal}")
    try:
        check_cuda(cuda.cuCtxPushCurrent_v2(context), f"GPU {ordinal}")
        try:
            yield
        finally:
            cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
    finally:
        cuda.cuDevicePrimaryCtxRelease_v2(device)
