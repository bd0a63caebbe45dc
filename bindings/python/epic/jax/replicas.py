# SPDX-License-Identifier: Apache-2.0
"""Replicas of experts: their gradients are added, so that weights that were equal stay equal."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from epic.errors import EpicArgumentError, EpicUnsupportedError
from epic.jax.arrays import ANY_ROWS, FLOATS, as_array
from epic.jax.call import Spec, call, like, marks, no_gradient, spread_all
from epic.jax.steps import Plan, Way, check_plan


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


def as_rows_of_experts(name: str, plan: Plan, x: Any) -> Any:
    """Return x as an array with a row for each expert of this rank."""
    check_plan(plan)
    local = ("local experts", plan.expert_rows.shape[0])
    x = as_array(name, x, FLOATS, [local], (local, ANY_ROWS))
    if x.dtype == jnp.float64:
        raise EpicUnsupportedError(
            f"gradients of replicas are added in float32: {name} is float64; train without "
            "replicas, or in float32"
        )
    return x


def sum_replicas(plan: Plan, x: Any) -> Any:
    """Adds what the replicas of a logical expert have, x [local experts, ...] float32, and gives
    each the sum: of gradients that were made without `tied`, or over many steps."""
    x = as_rows_of_experts("x", plan, x)
    if x.dtype != jnp.float32:
        raise EpicArgumentError(f"x is {x.dtype}: must be float32")
    if not plan.way.layer.num_logical:
        return x
    return added(plan.way, *spread_all(plan.way.group, plan.bytes, x))


def tied(plan: Plan, weight: Any) -> Any:
    """A weight [local experts, ...] as it is; its gradient is that of its logical expert, the sum
    over the replicas.  epic.jax.moe does it by itself."""
    check_plan(plan)
    if weight is None:
        return None
    if not plan.way.layer.num_logical:
        return as_array("weight", weight, FLOATS, (ANY_ROWS,))
    weight = as_rows_of_experts("weight", plan, weight)
    return as_it_is(plan.way, *spread_all(plan.way.group, plan.bytes, weight))
