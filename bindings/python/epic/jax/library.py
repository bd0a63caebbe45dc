# SPDX-License-Identifier: Apache-2.0
"""Loads libepic_jax.so and registers its handlers with XLA, once in each process."""

import ctypes
import functools
from typing import Any

import jax

from epic import _native
from epic.words import WORDS

# The handlers of collective calls, and of calls in which no other rank takes part.
COLLECTIVES = (
    "plan plan_dispatch dispatch dispatch_flat dispatch_quantized dispatch_flat_quantized "
    "dispatch_scaled dispatch_flat_scaled dispatch_backward combine combine_backward "
    "allreduce_sum sum_replicas moe moe_backward"
).split()
LOCAL = (
    "router router_backward balance_loss balance_loss_backward z_loss z_loss_backward "
    "experts experts_backward keep"
).split()
NO_GRAPH = "_no_graph"  # suffix of handlers that XLA does not put into command buffers
TARGETS = tuple(
    f"epic_{name}" for name in [*COLLECTIVES, *LOCAL, *(name + NO_GRAPH for name in COLLECTIVES)]
)


@functools.cache
def load_handlers() -> ctypes.CDLL:
    """Return libepic_jax.so with its handlers registered.

    XLA keeps pointers to the handlers, so the library is never unloaded.
    """
    _native.core()
    library = ctypes.CDLL(str(_native.find("libepic_jax.so")))
    member: list[Any] = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int32]
    library.epic_jax_member_add.argtypes = [
        *member,
        ctypes.c_char_p,
        ctypes.c_int32,
        ctypes.c_void_p,
    ]
    library.epic_jax_member_add.restype = ctypes.c_int
    library.epic_jax_member_remove.argtypes = member
    library.epic_jax_member_remove.restype = ctypes.c_void_p
    library.epic_watch_interrupts.argtypes = [ctypes.c_int]
    pairs = [word.encode() for pair in WORDS.items() for word in pair]
    library.epic_jax_set_words((ctypes.c_char_p * len(pairs))(*pairs), len(pairs))

    def register(target: str, symbol: str, platform: str) -> None:
        handler = jax.ffi.pycapsule(getattr(library, symbol))
        jax.ffi.register_ffi_target(f"epic_{target}", handler, platform=platform)

    for name in COLLECTIVES + LOCAL:
        register(name, f"epic_jax_{name}", "cpu")
    # JAX accepts handlers for CUDA also in a process without CUDA.
    for name in COLLECTIVES + LOCAL:
        register(name, f"epic_jax_cuda_{name}", "CUDA")
    for name in COLLECTIVES:
        register(name + NO_GRAPH, f"epic_jax_no_graph_{name}", "CUDA")
    return library
