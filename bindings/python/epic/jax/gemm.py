# SPDX-License-Identifier: Apache-2.0
"""Grouped products of JAX for `grouped_gemm=`, on GPUs.

A grouped product multiplies the rows [slots, k] of each slab by the weight of its expert, [experts,
k, n].  Without `grouped_gemm=` a layer uses the core's products.  docs/lab/benchmarks.md compares
both.  The products of this module leave rows past the last slab undefined.  EPIC does not read
these rows.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from epic.jax.call import cast_all_varying, cast_varying, no_gradient, varying_axes

__all__ = ["best", "ragged_dot"]

GroupedGemm = Callable[[Any, Any, Any], Any]

ragged_dot: GroupedGemm = jax.lax.ragged_dot


@cache
def load_slab_kernels() -> Any:
    """Return epic.jax.slabs, the kernels for Hopper GPUs; None if this JAX cannot import it."""
    try:
        from epic.jax import slabs as module
    except ImportError:
        return None
    return module


def with_varying_axes(function: Any, *operands: Any) -> Any:
    """Run a Pallas function and mark the result as varying over the mesh axes of its operands."""
    out = function(*operands)
    return cast_varying(frozenset().union(*(varying_axes(x) for x in operands)), out)


@jax.custom_vjp
def mosaic_gemm(x: Any, w: Any, sizes: Any) -> Any:
    """Multiply with the kernels of epic.jax.slabs; all sizes must be multiples of their TILE."""
    return with_varying_axes(load_slab_kernels().rows_by_weights, x, w, sizes)


def mosaic_gemm_forward(x: Any, w: Any, sizes: Any) -> tuple[Any, Any]:
    """Save all operands."""
    return mosaic_gemm(x, w, sizes), (x, w, sizes)


def mosaic_gemm_backward(residuals: Any, d_y: Any) -> tuple[Any, ...]:
    """Return d_x = d_y w^T and d_w = x^T d_y, slab by slab."""
    x, w, sizes = residuals
    d_x = with_varying_axes(load_slab_kernels().weights_transposed, d_y, w, sizes)
    return (
        d_x,
        with_varying_axes(load_slab_kernels().slab_products, x, d_y, sizes),
        no_gradient(sizes),
    )


mosaic_gemm.defvjp(mosaic_gemm_forward, mosaic_gemm_backward)


def fits_kernels(alignment: int, x: Any, w: Any) -> bool:
    """Return whether the kernels for Hopper support a product of x and w, and its gradients."""
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
    """Return whether the GPUs of this process are Hopper GPUs."""
    device = jax.local_devices(backend="gpu")[0]
    return str(getattr(device, "compute_capability", "")).startswith("9.")


def best(alignment: int) -> GroupedGemm:
    """Return the fastest grouped product for slabs that begin at multiples of the alignment.

    Args:
        alignment: `Layer.alignment`.  The kernels for Hopper GPUs need a multiple of 128.

    Returns:
        A function for `grouped_gemm=`: (rows [slots, k], weights [experts, k, n], sizes [experts])
        returns [slots, n].

    """

    def product(x: Any, w: Any, sizes: Any) -> Any:
        if fits_kernels(alignment, x, w) and is_hopper():
            return mosaic_gemm(*cast_all_varying(None, x, w, sizes))
        return ragged_dot(x, w, sizes)

    return product
