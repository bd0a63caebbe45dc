# SPDX-License-Identifier: Apache-2.0
"""Experts whose inner dimension is sharded over a mesh axis.

Every device of the axis has a part of each expert.  If all have the same tokens, one sum completes
the output.  If the tokens are sharded over the axis, they are gathered first, and a reduce-scatter
leaves each device the output of its own tokens.  It moves half the bytes of the sum.
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
    """Return the options of one device's part of the experts, checked."""
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
    """Refuse experts that this many devices of the axis cannot share."""
    experts_of_part("experts", options.experts, axis, parts)
    if options.shared is not None:
        experts_of_part("shared", options.shared, axis, parts)


def take_part(options: Any, weights: Any, axis: str) -> tuple[Any, Any]:
    """Return Moe and MoeWeights of one device of the axis.

    inner is the device's part.  Only the first device keeps the down biases, which the sum over the
    axis must count once.
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
    """Return arrays [..., ] of all devices of the axis, one after the other in the first dimension.

    None stays None.
    """
    found = []
    for x in arrays:
        x = None if x is None else jnp.asarray(x)
        found.append(x if x is None else jax.lax.all_gather(x, axis, axis=0, tiled=True))
    return found


def sum_parts(out: Any, axis: str, scatter: bool) -> Any:
    """Return MoeOut after the sum of `out`.

    The other fields are equal on the devices of the axis.  scatter: each device keeps its own
    tokens, as gather_tokens() put them together.
    """

    def equal_on_all(x: Any) -> Any:
        return None if x is None else jax.lax.pmax(jax.lax.stop_gradient(x), axis)

    def of_the_first(x: Any) -> Any:  # the plans of the devices have different ids
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
