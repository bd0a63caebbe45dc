# SPDX-License-Identifier: Apache-2.0
"""The sums and losses of epic.jax over global arrays, for a plain jit."""

from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from epic.errors import EpicArgumentError
from epic.jax import replicas, router, steps, sums
from epic.jax.arrays import ANY_ROWS, FLOATS, INDICES, as_array, check_array, check_kind
from epic.jax.call import no_gradient
from epic.jax.groups import Group
from epic.jax.token_specs import (
    TokenAxes,
    axes_of_spec,
    check_divisible,
    map_over_mesh,
    token_spec,
)
from epic.options import Router

# ------------------------------------------------------------------------------ sums ----


def sum(
    mesh: Mesh,
    group: Group,
    x: Any,
    *,
    token_axes: TokenAxes = None,
    **more: Any,
) -> Any:
    """Sum the parts that the ranks of each group have of an array, over global arrays.

    See `epic.jax.sum`.

    Args:
        mesh: the mesh that the group was opened with.
        group: the group.
        x: [n * devices, ...] float32: the parts of all devices, stacked along the first dimension.
        token_axes: the axes over which the first dimension is sharded; see `moe`.
        **more: further arguments of `epic.jax.sum`: tree, channel, after, max_sms.

    Returns:
        [n * groups, ...] float32: the sums of all groups, stacked along the first dimension.

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import epic.jax
        >>> mesh = jax.sharding.Mesh(jax.devices(), ("ep",))
        >>> with epic.jax.open(mesh, "ep", max_tokens=8, max_row_bytes=64) as group:
        ...     x = jnp.ones((mesh.size, 3))  # a row from each device
        ...     total = epic.jax.sharded.sum(mesh, group, x)
        ...     total.shape, bool((total == mesh.size).all())
        ((1, 3), True)

    """
    check_kind("group", group, Group)
    x = as_array("x", x, ("float32",), (ANY_ROWS, "any"), ["any"])
    given = group.token_axes if token_axes is None else token_axes
    if isinstance(given, P):
        given = axes_of_spec(given)
    _, axes = token_spec(mesh, group, given, x.ndim + 1)
    check_divisible(mesh, "x", x, P(axes))
    other_axes = tuple(axis for axis in axes if axis not in group.axes)
    run = partial(sums.sum, group, **more)
    # All ranks of a group have the same sum, which JAX cannot see.
    return map_over_mesh(mesh, run, P(axes), P(other_axes), check=False)(x)


def sum_replicas(mesh: Mesh, plan: steps.Plan, x: Any) -> Any:
    """Sum an array over the replicas of each logical expert, over global arrays.

    See `epic.jax.sum_replicas`.

    Args:
        mesh: the mesh that the group was opened with.
        plan: the plan of all devices.
        x: [experts of all ranks, ...] float32, equal in all groups of the mesh.

    Returns:
        [experts of all ranks, ...] float32, sharded over the group's axes.

    Raises:
        EpicArgumentError: x has a wrong shape or dtype; raised while tracing.

    Example:
        See `epic.jax.sum_replicas`, and pass the plan of `epic.jax.sharded.plan`.

    """
    check_kind("plan", plan, steps.Plan)
    group, spec = plan.spec.group, plan.spec
    x = as_array("x", x, FLOATS, (ANY_ROWS, "any"), ["any"])
    axes = token_spec(mesh, group, spec.token_axes, len(spec.token_dims) + 1)[1]
    check_divisible(mesh, "x", x, P(group.axes))
    own = P((*axes, spec.hidden_axis) if spec.hidden_axis else axes)
    experts = P(group.axes)
    # All groups have the same sums, because their x are equal.
    run = map_over_mesh(mesh, replicas.sum_replicas, (own, experts), experts, check=False)
    return run(plan, x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_summed_gradient(_: Mesh, __: steps.Plan, weight: Any) -> Any:
    """Return the weight; its gradient is summed over replicas."""
    return weight


def with_summed_gradient_forward(_: Mesh, plan: steps.Plan, weight: Any) -> tuple[Any, Any]:
    """Save the plan only."""
    return weight, plan


def with_summed_gradient_backward(mesh: Mesh, plan: steps.Plan, gradient: Any) -> tuple[Any, Any]:
    """Sum the gradient over replicas in float32."""
    total = sum_replicas(mesh, plan, gradient.astype("float32"))
    return jax.tree.map(no_gradient, plan), total.astype(gradient.dtype)


with_summed_gradient.defvjp(with_summed_gradient_forward, with_summed_gradient_backward)


def sum_replica_grads(mesh: Mesh, plan: steps.Plan, weight: Any) -> Any:
    """Return a weight unchanged, but sum its gradient over the replicas of each expert.

    See `epic.jax.sum_replica_grads`.

    Args:
        mesh: the mesh that the group was opened with.
        plan: the plan of all devices.
        weight: [experts of all ranks, ...] float32, bfloat16 or float16; None stays None.

    Returns:
        The weight.

    Raises:
        EpicArgumentError: the weight has a wrong shape or dtype; raised while tracing.
        EpicUnsupportedError: the weight is float64.

    Example:
        See `epic.jax.sum_replica_grads`, and pass the plan of `epic.jax.sharded.plan`.

    """
    check_kind("plan", plan, steps.Plan)
    if weight is None:
        return None
    weight = as_array("weight", weight, FLOATS, (ANY_ROWS, "any"), ["any"])
    if not plan.spec.layer.num_logical:
        return weight
    replicas.refuse_float64("weight", weight)
    return with_summed_gradient(mesh, plan, weight)


# ---------------------------------------------------------------------------- losses ----


def balance_loss(
    mesh: Mesh,
    options: Router,
    logits: Any,
    *,
    coeff: float,
    total_tokens: int | None = None,
    load: Any = None,
    topk_idx: Any = None,
    sequence_tokens: int = 0,
    group: Group,
    token_axes: TokenAxes = None,
) -> Any:
    """Return the load balance loss of all tokens, over global arrays.

    See `epic.jax.balance_loss`.

    Args:
        mesh: the mesh that the group was opened with.
        options: the router's options; static.
        logits: [B, ..., E] a float dtype.
        coeff: the coefficient.
        total_tokens: the number of tokens; None: as many as logits has.
        load: [devices * num_experts] integers: `Plan.load` of all devices.
        topk_idx: [B, ..., top_k] integers, with `sequence_tokens`.
        sequence_tokens: see `epic.jax.balance_loss`; each device must have whole sequences.
        group: the group.
        token_axes: see `moe`.

    Returns:
        [] float32.

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.

    Example:
        See `z_loss`, and pass load=plan.load.

    """
    logits, spec, axes = as_global_logits(mesh, options, logits, group, token_axes)
    if load is not None:
        load = check_array("load", load, INDICES, ["devices * num_experts"])
        check_divisible(mesh, "load", load, P(axes))
    if topk_idx is not None:
        choices = (*logits.shape[:-1], ("top_k", options.top_k))
        topk_idx = check_array("topk_idx", topk_idx, INDICES, choices)
    if sequence_tokens and len(axes) > len(axes_of_spec(P(spec[0]))):
        raise EpicArgumentError(
            f"token_axes is {spec}: must shard only the first dimension, because sequence_tokens "
            f"({sequence_tokens}) needs whole sequences on each device"
        )
    others = tuple(axis for axis in axes if axis not in group.axes)
    numbers: dict[str, Any] = {"coeff": coeff, "sequence_tokens": sequence_tokens}
    numbers["total_tokens"] = count_tokens(logits, total_tokens)

    def local(logits: Any, load: Any, chosen: Any) -> Any:
        if load is not None and others:
            load = jax.lax.psum(load, others)
        if chosen is not None:
            chosen = chosen.reshape(-1, options.top_k)
        part = router.balance_loss(options, logits, load=load, topk_idx=chosen, **numbers)
        return jax.lax.psum(part, axes)

    return map_over_mesh(mesh, local, (spec, P(axes), spec), P())(logits, load, topk_idx)


def z_loss(
    mesh: Mesh,
    options: Router,
    logits: Any,
    *,
    coeff: float,
    total_tokens: int | None = None,
    group: Group,
    token_axes: TokenAxes = None,
) -> Any:
    """Return the router z-loss of all tokens, over global arrays.

    See `epic.jax.z_loss`.

    Args:
        mesh: the mesh that the group was opened with.
        options: the router's options; static.
        logits: [B, ..., E] a float dtype.
        coeff: the coefficient.
        total_tokens: the number of tokens; None: as many as logits has.
        group: the group.
        token_axes: see `moe`.

    Returns:
        [] float32.

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import epic.jax
        >>> router, logits = epic.jax.Router(num_experts=2, top_k=1), jnp.zeros((8, 2))
        >>> mesh = jax.sharding.Mesh(jax.devices(), ("ep",))
        >>> with epic.jax.open(mesh, "ep", max_tokens=8, max_row_bytes=64) as group:
        ...     loss = epic.jax.sharded.z_loss(mesh, router, logits, coeff=1.0, group=group)
        >>> round(float(loss), 4)  # log(2)^2
        0.4805

    """
    logits, spec, axes = as_global_logits(mesh, options, logits, group, token_axes)
    total = count_tokens(logits, total_tokens)

    def local(logits: Any) -> Any:
        part = router.z_loss(options, logits, coeff=coeff, total_tokens=total)
        return jax.lax.psum(part, axes)

    return map_over_mesh(mesh, local, (spec,), P())(logits)


def as_global_logits(
    mesh: Mesh, options: Router, logits: Any, group: Group, token_axes: TokenAxes
) -> tuple[Any, P, tuple[str, ...]]:
    """Return the logits, how their tokens are sharded, and the axes of this sharding, checked."""
    check_kind("options", options, Router)
    logits = check_array("logits", logits, FLOATS, (ANY_ROWS, router.columns_of(options)))
    spec, axes = token_spec(mesh, group, token_axes, logits.ndim)
    check_divisible(mesh, "logits", logits, spec)
    return logits, spec, axes


def count_tokens(logits: Any, total_tokens: int | None) -> int:
    """Return total_tokens, by default the number of tokens of the logits."""
    return logits.size // logits.shape[-1] if total_tokens is None else total_tokens
