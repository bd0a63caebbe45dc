# SPDX-License-Identifier: Apache-2.0
"""Experts whose inner dimension is sharded over a mesh axis, tensor_axis.

Each device of the axis has a part of each expert.  If all these devices have the same tokens, a sum
over the axis completes the output.  If the tokens are sharded over the axis, they are gathered
first.  A reduce-scatter then gives each device the output of its own tokens, and sends half the
bytes of a sum.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from epic.errors import EpicArgumentError, EpicUnsupportedError
from epic.jax import e4m3
from epic.options import Experts

# For each weight the dimension that tensor_axis shards. It is the dimension of size inner.
DIMENSION = {
    "w_gate_up": 2,
    "w_down": 1,
    "b_gate_up": 1,
    "shared_gate_up": 2,
    "shared_down": 1,
    "shared_b_gate_up": 1,
}


def experts_of_part(name: str, experts: Experts, axis: str, parts: int) -> Experts:
    """Return the options for one device's part of the experts, after checking them.

    Args:
        name: "experts" or "shared", for errors.
        experts: the options of the whole experts.
        axis: tensor_axis, for errors.
        parts: the number of devices of the axis.

    """
    if experts.inner % parts:
        raise EpicArgumentError(
            f"{name}.inner is {experts.inner}: must be a multiple of {parts}, the number of "
            f"devices of tensor_axis {axis!r}"
        )
    if not experts.ungated and not experts.interleaved:
        raise EpicArgumentError(
            f"{name}.interleaved is False: must be True with tensor_axis, so that each part of the "
            "weight has columns of gate and of up"
        )
    return replace(experts, inner=experts.inner // parts)


def check_tensor_axis(options: Any, axis: str, parts: int) -> None:
    """Raise an error for experts that cannot be divided among the devices of the axis."""
    experts_of_part("experts", options.experts, axis, parts)
    if options.shared is not None:
        experts_of_part("shared", options.shared, axis, parts)


def take_part(options: Any, weights: Any, axis: str) -> tuple[Any, Any]:
    """Return the Moe and the MoeWeights of one device of the axis.

    inner of the options is that of the device's part.  All devices except the first get down biases
    of 0, because the sum over the axis must contain these biases only once.
    """
    e4m3.refuse_parts(weights, "tensor_axis")
    parts, first = jax.lax.axis_size(axis), jax.lax.axis_index(axis) == 0
    if options.router.zero_experts:
        raise EpicUnsupportedError(
            "tensor_axis with identity experts is not supported, because each of its devices would "
            "add them: leave one of them out"
        )
    once = {name: getattr(weights, name) for name in ("b_down", "shared_b_down")}
    once = {name: None if b is None else jnp.where(first, b, 0) for name, b in once.items()}
    experts = experts_of_part("experts", options.experts, axis, parts)
    shared = options.shared and experts_of_part("shared", options.shared, axis, parts)
    return replace(options, experts=experts, shared=shared), weights._replace(**once)


def gather_tokens(axis: str, *arrays: Any) -> list[Any]:
    """Return arrays [n, ...] gathered over the devices of the axis, along the first dimension.

    None stays None.
    """
    found = []
    for x in arrays:
        x = None if x is None else jnp.asarray(x)
        found.append(x if x is None else jax.lax.all_gather(x, axis, axis=0, tiled=True))
    return found


def sum_parts(out: Any, axis: str, scatter: bool) -> Any:
    """Return a MoeOut whose field `out` is summed over the axis.

    All other fields are equal on all devices of the axis, or become equal.

    Args:
        out: the results of one device's part of the experts.
        axis: tensor_axis.
        scatter: whether each device gets only its own tokens, of those that gather_tokens()
            gathered.

    """

    def equal_on_all(x: Any) -> Any:
        return None if x is None else jax.lax.pmax(jax.lax.stop_gradient(x), axis)

    def of_the_first(x: Any) -> Any:  # the plans of the devices differ in their ids
        first = jax.lax.axis_index(axis) == 0
        return jax.lax.psum(jnp.where(first, x.astype(jnp.int32), 0), axis).astype(x.dtype)

    def of_own_tokens(x: Any) -> Any:
        x = equal_on_all(x)
        count = x.shape[0] // jax.lax.axis_size(axis)
        first = jax.lax.axis_index(axis) * count
        return jax.lax.dynamic_slice_in_dim(x, first, count) if scatter else x

    if scatter:
        total = jax.lax.psum_scatter(out.out, axis, scatter_dimension=0, tiled=True)
    else:
        total = jax.lax.psum(out.out, axis)
    return out._replace(
        out=total,
        loss=jax.lax.pmean(out.loss, axis),
        load=equal_on_all(out.load),
        demand=equal_on_all(out.demand),
        logical_load=equal_on_all(out.logical_load),
        record=jax.tree.map(of_the_first, out.record),
        routing=jax.tree.map(of_own_tokens, out.routing),
    )
