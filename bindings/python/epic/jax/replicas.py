# SPDX-License-Identifier: Apache-2.0
"""Sums over the replicas of an expert.

If the gradients of all replicas are summed, weights that are equal at the start stay equal.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from epic.errors import EpicArgumentError, EpicUnsupportedError
from epic.jax.arrays import ANY_ROWS, FLOATS, as_array
from epic.jax.call import (
    ArraySpec,
    call_handler,
    cast_all_varying,
    no_gradient,
    site_and_rank,
    spec_of,
)
from epic.jax.over_mesh import over_mesh
from epic.jax.steps import Plan, PlanSpec, check_plan


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_over_replicas(spec: PlanSpec, data: Any, x: Any) -> Any:
    """Run sum_replicas on checked arrays."""
    flat = x.reshape(x.shape[0], -1)
    results = [spec_of(flat), ArraySpec(flat.shape[1:], jnp.float32)]
    operands = [data, flat, *site_and_rank(spec.group, data, flat)]
    how: dict[str, Any] = {"aliases": {1: 0}, "max_sms": spec.max_sms}
    return call_handler("sum_replicas", results, operands, spec.group, **how)[0].reshape(x.shape)


def sum_over_replicas_forward(spec: PlanSpec, data: Any, x: Any) -> tuple[Any, Any]:
    """Save the plan, which is all that backward needs."""
    return sum_over_replicas.fun(spec, data, x), data


def sum_over_replicas_backward(spec: PlanSpec, data: Any, gradient: Any) -> tuple[Any, Any]:
    """Sum the gradients over replicas, because each replica's x is part of every sum."""
    return no_gradient(data), sum_over_replicas(spec, data, gradient)


sum_over_replicas.defvjp(sum_over_replicas_forward, sum_over_replicas_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_summed_gradient(_: PlanSpec, __: Any, x: Any) -> Any:
    """Return x.  Backward sums its gradient over replicas."""
    return x


def with_summed_gradient_forward(_: PlanSpec, data: Any, x: Any) -> tuple[Any, Any]:
    """Save the plan, which is all that backward needs."""
    return x, data


def with_summed_gradient_backward(spec: PlanSpec, data: Any, gradient: Any) -> tuple[Any, Any]:
    """Sum the gradient over replicas in float32."""
    return no_gradient(data), sum_over_replicas(spec, data, gradient.astype(jnp.float32)).astype(
        gradient.dtype
    )


with_summed_gradient.defvjp(with_summed_gradient_forward, with_summed_gradient_backward)


def as_rows_of_experts(name: str, plan: Plan, x: Any) -> Any:
    """Return x as an array, after checking that it has a row for each expert of this rank."""
    check_plan(plan)
    local = ("local experts", plan.expert_rows.shape[0])
    x = as_array(name, x, FLOATS, [local], (local, ANY_ROWS))
    refuse_float64(name, x)
    return x


def refuse_float64(name: str, x: Any) -> None:
    """Refuse float64 arrays of experts with replicas."""
    if x.dtype == jnp.float64:
        raise EpicUnsupportedError(
            f"{name} is float64: not supported with replicas, because their gradients are added in "
            "float32; train without replicas, or in float32"
        )


@over_mesh
def sum_replicas(plan: Plan, x: Any) -> Any:
    """Sum an array over the replicas of each logical expert; each replica gets the sum.

    Collective; differentiable in x.  Use it for gradients that were computed without
    `sum_replica_grads`, for example to add them once after several backward passes.

    Args:
        plan: a plan with replicas; without replicas x is returned unchanged.
        x: [local experts, ...] float32.  For global arrays, outside of a shard_map, the experts
            of all ranks of a group, equal in all groups.

    Returns:
        [local experts, ...] float32, sharded as x.

    Raises:
        EpicArgumentError: x has a wrong shape or dtype; raised while tracing.

    Example:
        >>> import jax.numpy as jnp
        >>> import epic.jax
        >>> layer = epic.jax.Layer(num_experts=2, top_k=1, num_logical=1)
        >>> topk_idx, logical = jnp.zeros((2, 1), jnp.int32), jnp.array([0, 0])
        >>> with epic.jax.open(max_tokens=2, max_row_bytes=64) as group:  # one rank
        ...     plan = epic.jax.plan(group, layer, topk_idx, logical_of_expert=logical)
        ...     epic.jax.sum_replicas(plan, jnp.array([[1.0], [2.0]])).tolist()
        [[3.0], [3.0]]

    """
    x = as_rows_of_experts("x", plan, x)
    if x.dtype != jnp.float32:
        raise EpicArgumentError(f"x is {x.dtype}: must be float32")
    if not plan.spec.layer.num_logical:
        return x
    return sum_over_replicas(plan.spec, *cast_all_varying(plan.spec.group, plan.bytes, x))


@over_mesh
def sum_replica_grads(plan: Plan, weight: Any) -> Any:
    """Return a weight for which backward sums the gradient over the replicas of each expert.

    Replicas whose weights are equal at the start then stay equal.  The sum is collective.
    `epic.jax.moe` calls this function itself.

    Args:
        plan: the plan with which the experts are computed.
        weight: [local experts, ...] float32, bfloat16 or float16; None stays None.  For global
            arrays, outside of a shard_map, the experts of all ranks of a group.

    Returns:
        An array equal to the weight, to use in its place; None for None.

    Raises:
        EpicArgumentError: the weight has a wrong shape or dtype; raised while tracing.
        EpicUnsupportedError: the weight is float64.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import epic.jax
        >>> layer = epic.jax.Layer(num_experts=2, top_k=1, num_logical=1)
        >>> topk_idx, logical = jnp.zeros((2, 1), jnp.int32), jnp.array([0, 0])
        >>> with epic.jax.open(max_tokens=2, max_row_bytes=64) as group:  # one rank
        ...     plan = epic.jax.plan(group, layer, topk_idx, logical_of_expert=logical)
        ...     def loss(w):
        ...         w = epic.jax.sum_replica_grads(plan, w)
        ...         return (w * jnp.array([[1.0], [2.0]])).sum()
        ...     jax.grad(loss)(jnp.ones((2, 1))).tolist()
        [[3.0], [3.0]]

    """
    check_plan(plan)
    if weight is None:
        return None
    if not plan.spec.layer.num_logical:
        return as_array("weight", weight, FLOATS, (ANY_ROWS,))
    weight = as_rows_of_experts("weight", plan, weight)
    return with_summed_gradient(plan.spec, *cast_all_varying(plan.spec.group, plan.bytes, weight))
