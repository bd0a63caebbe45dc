# SPDX-License-Identifier: Apache-2.0
"""Which GPU the calls of a thread mean: what the core asks CUDA when a context is opened."""

import contextlib
import ctypes
import functools
from collections.abc import Iterator

from epic.errors import EpicError


@functools.cache
def driver() -> ctypes.CDLL:
    """CUDA's driver, which JAX has in use by now."""
    return ctypes.CDLL("libcuda.so.1")


def must(code: int, what: str) -> None:
    """Raises what CUDA refuses."""
    if code != 0:
        raise EpicError("EPIC_EDEVICE", f"{what}: CUDA says {code}")


@contextlib.contextmanager
def current(ordinal: int) -> Iterator[None]:
    """Makes a GPU this thread's, by its primary context, which is XLA's too."""
    cuda, context, device = driver(), ctypes.c_void_p(), ctypes.c_int()
    must(cuda.cuDeviceGet(ctypes.byref(device), ordinal), f"GPU {ordinal}")
    must(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), f"GPU {ordinal}")
    try:
        must(cuda.cuCtxPushCurrent_v2(context), f"GPU {ordinal}")
        try:
            yield
        finally:
            cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
    finally:
        cuda.cuDevicePrimaryCtxRelease_v2(device)
