# SPDX-License-Identifier: Apache-2.0
"""Grouped products on GPUs: rows [slots, k] of slabs times [experts, k, n] -> [slots, n].

The core has none on CUDA yet, so this is the choice among what JAX has.  docs/jax.md has the
figures.  Rows past the last slab come out as whatever was there: nothing of EPIC reads them.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from epic.jax.call import no_gradient, spread, varying

GroupedGemm = Callable[[Any, Any, Any], Any]
TILE = 128  # rows and columns of Pallas' kernels here, so that no tile has rows of two experts
BLOCK_K = 64

ragged_dot: GroupedGemm = jax.lax.ragged_dot


@cache
def kernels() -> Any:
    """Pallas' Mosaic GPU kernels for Hopper, two functions; None where this JAX has none."""
    try:
        from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu
    except ImportError:
        return None
    return ragged_dot_mgpu.ragged_dot, transposed_ragged_dot_mgpu.transposed_ragged_dot


def tiles(columns: int) -> dict[str, int]:
    """How the output of so many columns is cut."""
    return {
        "block_m": TILE,
        "block_n": TILE,
        "block_k": BLOCK_K,
        "max_concurrent_steps": 5,
        "grid_block_n": next(n for n in (8, 4, 2, 1) if columns % (n * TILE) == 0),
    }


def varied(function: Any, *operands: Any) -> Any:
    """Pallas' results do not say along which mesh axes they differ: with their operands."""
    out = function(*operands)
    return spread(frozenset().union(*(varying(x) for x in operands)), out)


@jax.custom_vjp
def mosaic(x: Any, w: Any, sizes: Any) -> Any:
    """By Pallas' Mosaic GPU kernels; sizes are multiples of TILE."""
    run, _ = kernels()
    return varied(lambda x, w, s: run(x, w, group_sizes=s, **tiles(w.shape[2])), x, w, sizes)


def mosaic_forward(x: Any, w: Any, sizes: Any) -> tuple[Any, Any]:
    """All operands are needed again."""
    return mosaic(x, w, sizes), (x, w, sizes)


def mosaic_backward(kept: Any, d_y: Any) -> tuple[Any, ...]:
    """d_x = d_y w^T by slab, d_w = x^T d_y by slab."""
    x, w, sizes = kept
    run, transposed = kernels()
    back = partial(run, transpose_rhs=True, **tiles(w.shape[1]))
    d_x = varied(lambda d, w, s: back(d, w, group_sizes=s), d_y, w, sizes)
    d_w = varied(
        lambda x, d, s: transposed(x, d, group_sizes=s, **tiles(w.shape[2])), x, d_y, sizes
    )
    return d_x, d_w, no_gradient(sizes)


mosaic.defvjp(mosaic_forward, mosaic_backward)


def fits(x: Any, w: Any) -> bool:
    """Can Pallas' kernels take these?"""
    small = x.dtype == w.dtype and x.dtype in (jnp.bfloat16, jnp.float16)
    return small and x.shape[0] % TILE == 0 and w.shape[1] % TILE == 0 and w.shape[2] % TILE == 0


def is_hopper() -> bool:
    """Of the GPUs of this process."""
    device = jax.local_devices(backend="gpu")[0]
    return str(getattr(device, "compute_capability", "")).startswith("9.")


def best(alignment: int) -> GroupedGemm:
    """The fastest for slabs that begin at multiples of the alignment."""

    def product(x: Any, w: Any, sizes: Any) -> Any:
        if alignment % TILE == 0 and fits(x, w) and kernels() is not None and is_hopper():
            return mosaic(x, w, sizes)
        return ragged_dot(x, w, sizes)

    return product
