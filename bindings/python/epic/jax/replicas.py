# SPDX-License-Identifier: Apache-2.0
"""Replicas of experts: their gradients are added, so that weights that were equal stay equal."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from epic.errors import EpicArgumentError, EpicUnsupportedError
from epic.jax.call import Spec, call, like, marks, no_gradient, spread_all
from epic.jax.steps import Plan, Way


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def added(way: Way, data: Any, x: Any) -> Any:
    """sum_replicas on checked arrays."""
    flat = x.reshape(x.shape[0], -1)
    results = [like(flat), Spec(flat.shape[1:], jnp.float32)]
    operands = [data, flat, *marks(way.group, data, flat)]
    return call("sum_replicas", results, operands, way.group, aliases={1: 0})[0].reshape(x.shape)


def added_forward(way: Way, data: Any, x: Any) -> tuple[Any, Any]:
    """Nothing is saved but the plan."""
    return added.fun(way, data, x), data


def added_backward(way: Way, data: Any, gradient: Any) -> tuple[Any, Any]:
    """Each replica's numbers are in every replica's sum."""
    return no_gradient(data), added(way, data, gradient)


added.defvjp(added_forward, added_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def as_it_is(_: Way, __: Any, x: Any) -> Any:
    """x, whose gradient is added over replicas."""
    return x


def as_it_is_forward(_: Way, data: Any, x: Any) -> tuple[Any, Any]:
    """As added's."""
    return x, data


def as_it_is_backward(way: Way, data: Any, gradient: Any) -> tuple[Any, Any]:
    """In float32."""
    return no_gradient(data), added(way, data, gradient.astype(jnp.float32)).astype(gradient.dtype)


as_it_is.defvjp(as_it_is_forward, as_it_is_backward)


def check(plan: Plan, x: Any) -> None:
    """A row for each expert of this rank."""
    local = plan.expert_rows.shape[0]
    if x.ndim < 1 or x.shape[0] != local:
        raise EpicArgumentError(f"x: shape {x.shape}: [local experts {local}, ...] is needed")
    if x.dtype == jnp.float64:
        raise EpicUnsupportedError(
            "gradients of replicas are added in float32: x is float64; train without replicas, or "
            "in float32"
        )


def sum_replicas(plan: Plan, x: Any) -> Any:
    """Adds what the replicas of a logical expert have, x [local experts, ...] float32, and gives
    each the sum: of gradients that were made without `tied`, or over many steps."""
    x = jnp.asarray(x)
    check(plan, x)
    if x.dtype != jnp.float32:
        raise EpicArgumentError(f"x: dtype {x.dtype}: float32 is needed")
    if not plan.way.layer.num_logical:
        return x
    return added(plan.way, *spread_all(plan.way.group, plan.bytes, x))


def tied(plan: Plan, weight: Any) -> Any:
    """A weight [local experts, ...] as it is; its gradient is that of its logical expert, the sum
    over the replicas.  epic.jax.moe does it by itself."""
    if weight is None or not plan.way.layer.num_logical:
        return weight
    weight = jnp.asarray(weight)
    check(plan, weight)
    return as_it_is(plan.way, *spread_all(plan.way.group, plan.bytes, weight))
