# SPDX-License-Identifier: Apache-2.0
"""Which GPU the calls of a thread mean: what the core asks CUDA when a context is opened."""

import contextlib
import ctypes
import functools
from collections.abc import Iterator

from epic.errors import EpicError


@functools.cache
def load_driver() -> ctypes.CDLL:
    """CUDA's driver, which JAX has in use by now."""
    return ctypes.CDLL("libcuda.so.1")


def check_cuda(code: int, what: str) -> None:
    """Raises what CUDA refuses."""
    if code != 0:
        raise EpicError("EPIC_EDEVICE", f"{what}: CUDA says {code}")


@contextlib.contextmanager
def use_gpu(ordinal: int) -> Iterator[None]:
    """Makes a GPU this thread's, by its primary context, which is XLA's too."""
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
