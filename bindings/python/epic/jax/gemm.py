# SPDX-License-Identifier: Apache-2.0
"""Grouped products of JAX on GPUs, for `grouped_gemm=`: rows [slots, k] of slabs times
[experts, k, n] -> [slots, n].

Without it the products are the core's.  docs/lab/benchmarks.md has the figures.  Rows past the
last slab come out as whatever was there: nothing of EPIC reads them.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from epic.jax.call import no_gradient, spread, spread_all, varying

GroupedGemm = Callable[[Any, Any, Any], Any]

ragged_dot: GroupedGemm = jax.lax.ragged_dot


@cache
def slabs() -> Any:
    """The kernels for Hopper; None where this JAX has not what they are written in."""
    try:
        from epic.jax import slabs as module
    except ImportError:
        return None
    return module


def varied(function: Any, *operands: Any) -> Any:
    """Pallas' results do not say along which mesh axes they differ: with their operands."""
    out = function(*operands)
    return spread(frozenset().union(*(varying(x) for x in operands)), out)


@jax.custom_vjp
def mosaic(x: Any, w: Any, sizes: Any) -> Any:
    """By epic.jax.slabs; sizes are multiples of its tiles."""
    return varied(slabs().rows_by_weights, x, w, sizes)


def mosaic_forward(x: Any, w: Any, sizes: Any) -> tuple[Any, Any]:
    """All operands are needed again."""
    return mosaic(x, w, sizes), (x, w, sizes)


def mosaic_backward(kept: Any, d_y: Any) -> tuple[Any, ...]:
    """d_x = d_y w^T by slab, d_w = x^T d_y by slab."""
    x, w, sizes = kept
    d_x = varied(slabs().weights_transposed, d_y, w, sizes)
    return d_x, varied(slabs().slab_products, x, d_y, sizes), no_gradient(sizes)


mosaic.defvjp(mosaic_forward, mosaic_backward)


def fits(alignment: int, x: Any, w: Any) -> bool:
    """Can the kernels take these, forward and backward?"""
    if slabs() is None or x.dtype != w.dtype or x.dtype not in (jnp.bfloat16, jnp.float16):
        return False
    tile = slabs().TILE
    whole = alignment % tile == 0 and x.shape[0] % tile == 0
    return whole and w.shape[1] % tile == 0 and w.shape[2] % tile == 0


def is_hopper() -> bool:
    """Of the GPUs of this process."""
    device = jax.local_devices(backend="gpu")[0]
    return str(getattr(device, "compute_capability", "")).startswith("9.")


def best(alignment: int) -> GroupedGemm:
    """The fastest for slabs that begin at multiples of the alignment."""

    def product(x: Any, w: Any, sizes: Any) -> Any:
        if fits(alignment, x, w) and is_hopper():
            return mosaic(*spread_all(None, x, w, sizes))
        return ragged_dot(x, w, sizes)

    return product
