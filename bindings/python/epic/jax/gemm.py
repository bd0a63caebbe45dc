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

from epic.jax.call import cast_all_varying, cast_varying, no_gradient, varying_axes

GroupedGemm = Callable[[Any, Any, Any], Any]

ragged_dot: GroupedGemm = jax.lax.ragged_dot


@cache
def load_slab_kernels() -> Any:
    """The kernels for Hopper; None where this JAX has not what they are written in."""
    try:
        from epic.jax import slabs as module
    except ImportError:
        return None
    return module


def with_varying_axes(function: Any, *operands: Any) -> Any:
    """Pallas' results do not say along which mesh axes they differ: with their operands."""
    out = function(*operands)
    return cast_varying(frozenset().union(*(varying_axes(x) for x in operands)), out)


@jax.custom_vjp
def mosaic_gemm(x: Any, w: Any, sizes: Any) -> Any:
    """By epic.jax.slabs; sizes are multiples of its tiles."""
    return with_varying_axes(load_slab_kernels().rows_by_weights, x, w, sizes)


def mosaic_gemm_forward(x: Any, w: Any, sizes: Any) -> tuple[Any, Any]:
    """All operands are needed again."""
    return mosaic_gemm(x, w, sizes), (x, w, sizes)


def mosaic_gemm_backward(kept: Any, d_y: Any) -> tuple[Any, ...]:
    """d_x = d_y w^T by slab, d_w = x^T d_y by slab."""
    x, w, sizes = kept
    d_x = with_varying_axes(load_slab_kernels().weights_transposed, d_y, w, sizes)
    return (
        d_x,
        with_varying_axes(load_slab_kernels().slab_products, x, d_y, sizes),
        no_gradient(sizes),
    )


mosaic_gemm.defvjp(mosaic_gemm_forward, mosaic_gemm_backward)


def fits_kernels(alignment: int, x: Any, w: Any) -> bool:
    """Can the kernels take these, forward and backward?"""
    if (
        load_slab_kernels() is None
        or x.dtype != w.dtype
        or x.dtype not in (jnp.bfloat16, jnp.float16)
    ):
        return False
    tile = load_slab_kernels().TILE
    whole = alignment % tile == 0 and x.shape[0] % tile == 0
    return whole and w.shape[1] % tile == 0 and w.shape[2] % tile == 0


def is_hopper() -> bool:
    """Of the GPUs of this process."""
    device = jax.local_devices(backend="gpu")[0]
    return str(getattr(device, "compute_capability", "")).startswith("9.")


def best(alignment: int) -> GroupedGemm:
    """The fastest for slabs that begin at multiples of the alignment."""

    def product(x: Any, w: Any, sizes: Any) -> Any:
        if fits_kernels(alignment, x, w) and is_hopper():
            return mosaic_gemm(*cast_all_varying(None, x, w, sizes))
        return ragged_dot(x, w, sizes)

    return product
