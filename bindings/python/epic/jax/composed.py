# SPDX-License-Identifier: Apache-2.0
"""The layer as a composition of route, plan, dispatch, experts and combine.

It can use a grouped product of the caller.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from epic.errors import EpicArgumentError
from epic.jax import dispatching, replicas, steps, sums
from epic.jax import router as routing
from epic.jax.call import cast_all_varying
from epic.jax.e4m3 import is_scaled
from epic.jax.experts import WEIGHTS, ExpertsStatic, ExpertWeights, apply_to_slabs, zero_tail
from epic.jax.gemm import GroupedGemm
from epic.jax.groups import Group
from epic.jax.layer_args import MoeWeights, expert_weights_of
from epic.options import Experts, Moe


@jax.custom_vjp
def gelu_erf(v: Any) -> Any:
    """Return v Phi(v), with erf.

    JAX 0.12 cannot differentiate jax.nn.gelu(approximate=False) in a shard_map with check_vma=True.
    So this function has its own derivative.
    """
    return v * 0.5 * (1 + jax.lax.erf(v * math.sqrt(0.5)))


def gelu_erf_forward(v: Any) -> tuple[Any, Any]:
    """Save the argument."""
    return gelu_erf(v), v


def gelu_erf_backward(v: Any, d: Any) -> tuple[Any]:
    """Return d (Phi(v) + v phi(v))."""
    slope = 0.5 * (1 + jax.lax.erf(v * math.sqrt(0.5)))
    slope = slope + v * jnp.exp(-0.5 * v * v) / math.sqrt(2 * math.pi)
    return (d * slope,)


gelu_erf.defvjp(gelu_erf_forward, gelu_erf_backward)


def apply_activation(options: Experts, z: Any) -> Any:
    """Apply the activation of the experts: z [rows, width] -> [rows, inner]."""
    plain: dict[str, Callable[[Any], Any]] = {
        "silu": jax.nn.silu,
        "gelu": gelu_erf,
        "gelu_tanh": partial(jax.nn.gelu, approximate=True),
        "relu2": lambda v: jnp.square(jax.nn.relu(v)),
    }
    if options.ungated:
        return plain[options.activation](z)
    gate, up = (z[:, 0::2], z[:, 1::2]) if options.interleaved else jnp.split(z, 2, axis=1)
    if options.activation in plain:
        return plain[options.activation](gate) * up
    of_deepseek = options.activation == "clamped_silu"
    limit = options.limit or (10.0 if of_deepseek else 7.0)
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    if of_deepseek:
        return jax.nn.silu(gate) * up
    return gate * jax.nn.sigmoid((options.alpha or 1.702) * gate) * (up + 1)


def apply_experts(
    group: Group,
    options: Experts,
    gemm: GroupedGemm | None,
    x: Any,
    counts: tuple[Any, Any],
    w: ExpertWeights,
    scale: Any,
    max_sms: int = 0,
) -> Any:
    """Run the experts on the slabs of a plan.

    Args:
        group: the group.
        options: the experts' options.
        gemm: a grouped product of the caller; None: the core's products.
        x: [slots, hidden].
        counts: expert_rows and expert_tokens of the plan.
        w: the weights of this rank's experts.
        scale: slot_weights [slots] with weighting "early" or "input"; else None.
        max_sms: as for `experts`.

    Returns:
        [slots, hidden], with zeros past the last slab.

    """
    sizes = counts[0]
    if gemm is None:
        how = ExpertsStatic(options, group.platform, False, max_sms)
        return apply_to_slabs(how, x, counts, w, scale)
    expert = jnp.repeat(jnp.arange(sizes.shape[0]), sizes, total_repeat_length=x.shape[0])
    column = None if scale is None else scale[:, None].astype(x.dtype)
    # A product leaves the rows past the last slab undefined, and so does its gradient.  Set them to
    # zero before and after each product, so that they do not reach the gradient of a parameter.
    x = x if options.weighting != "input" or column is None else x * column
    z = gemm(*cast_all_varying(None, zero_tail(x, sizes), w.w_gate_up.astype(x.dtype), sizes))
    if w.b_gate_up is not None:
        z = z + w.b_gate_up.astype(z.dtype)[expert]
    a = apply_activation(options, zero_tail(z, sizes))
    early = column if options.weighting == "early" else None
    a = a if early is None else a * early
    a = zero_tail(a.astype(x.dtype), sizes)
    y = gemm(*cast_all_varying(None, a, w.w_down.astype(x.dtype), sizes))
    if w.b_down is not None:
        b = w.b_down.astype(y.dtype)[expert]
        y = y + (b if early is None else b * early)
    return zero_tail(y.astype(x.dtype), sizes)


def dense_gemm(x: Any, w: Any, _: Any) -> Any:
    """Multiply all rows by the weight of one expert: the grouped product of the shared expert."""
    return x @ w[0]


def plan_and_dispatch(
    group: Group,
    options: Moe,
    chosen: Any,
    x: Any,
    w: Any,
    placed: dict[str, Any],
    after: dict[str, Any],
) -> tuple[steps.Plan, Any, Any]:
    """Make the plan and dispatch the rows, which are rounded to e4m3 with options.quantize.

    Args:
        group: the group.
        options: the options of the layer.
        chosen: [num_tokens, top_k] int32.
        x: [num_tokens, hidden].
        w: [num_tokens, top_k]: the weights of the choices.
        placed: rank_of_expert, logical_of_expert and capacity_limit.
        after: channel, after and max_sms, as for `plan`.

    Returns:
        The plan, the received rows, and the weights of the slots.

    """
    more = {
        "capacity": options.capacity,
        **placed,
        "num_local_experts": options.experts.num_local_experts,
        "moe": options,
        **after,
    }
    if options.quantize is None:
        return dispatching.plan_dispatch(group, options.layer, chosen, x, w, **more)
    plan = steps.plan(group, options.layer, chosen, **more)
    return plan, *dispatching.dispatch(plan, x, w, quantize=options.quantize)


def choose(
    options: Moe, logits: Any, bias: Any, *, forced: Any, forced_weights: Any, **ids: Any
) -> tuple[Any, Any]:
    """Return ids and weights [num_tokens, top_k]: those of the router, or those of the caller.

    A forced id that is too large is returned unchanged, so that the plan reports it on every rank.
    """
    if forced_weights is not None:
        return forced, forced_weights
    valid_ids = None if forced is None else jnp.where(forced < logits.shape[1], forced, -1)
    chosen, w = routing.route(options.router, logits, bias=bias, forced=valid_ids, **ids)
    return (chosen if forced is None else forced), w


def compose_layer(
    group: Group,
    options: Moe,
    gemm: GroupedGemm | None,
    x: Any,
    weights: MoeWeights,
    extras: dict[str, Any],
    after: dict[str, Any],
) -> tuple[Any, steps.Plan, Any, Any, Any]:
    """Run the layer as a composition of its functions.

    Args:
        group: the group.
        options: the options of the layer.
        gemm: a grouped product of the caller, or None.
        x: [num_tokens, hidden].
        weights: the weights of this device.
        extras: the checked arguments token_ids, table, forced, forced_weights, token_mask,
            rank_of_expert, logical_of_expert and capacity_limit.
        after: channel, after and max_sms, as for `plan`.

    Returns:
        out [num_tokens, hidden], the plan, the logits, the choices and their weights.

    """
    logits = router_logits(x, weights)
    names = ("rank_of_expert", "logical_of_expert", "capacity_limit")
    placed = {name: extras.pop(name) for name in names}
    mask = extras.pop("token_mask")
    chosen, w = choose(options, logits, weights.bias, **extras)
    if mask is not None:
        chosen = jnp.where(mask[:, None], chosen, -1)
    # The rows of identity experts are not sent, so their ids become -1.  Forced ids that are too
    # large stay unchanged, so that the plan reports them.
    zero = (chosen >= options.router.num_experts) & (chosen < logits.shape[1])
    plan, recv, slot = plan_and_dispatch(
        group, options, jnp.where(zero, -1, chosen), x, w, placed, after
    )
    late = options.experts.weighting == "late"
    rows = (plan.expert_rows, plan.expert_tokens)
    given = expert_weights_of(weights)
    trained = {n: w for n, w in given._asdict().items() if n in WEIGHTS and not is_scaled(w)}
    summed = {name: replicas.sum_replica_grads(plan, w) for name, w in trained.items()}
    mine = given._replace(**summed)
    limit, early = after["max_sms"], None if late else slot
    y = apply_experts(group, options.experts, gemm, recv, rows, mine, early, limit)
    out = steps.combine(plan, y, slot if late else None)
    if options.router.zero_experts:
        zero_weight = jnp.where(zero, w, 0).sum(axis=1, keepdims=True)
        out = (out + x * zero_weight).astype(x.dtype)
    if options.shared is not None:
        whole = jnp.full((1,), x.shape[0], jnp.int32)
        dense = None if gemm is None else dense_gemm
        shared = expert_weights_of(weights, "shared_")
        out = out + apply_experts(
            group, options.shared, dense, x, (whole, whole), shared, None, limit
        )
    return out, plan, logits, chosen, w


def router_logits(x: Any, weights: MoeWeights) -> Any:
    """Return the router's logits in float32 (float64 for float64 rows)."""
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    logits = jnp.matmul(x.astype(wide), weights.w_gate.astype(wide), precision="highest")
    return logits if weights.b_gate is None else logits + weights.b_gate.astype(wide)


def layer_losses(
    group: Group,
    options: Moe,
    logits: Any,
    load: Any,
    chosen: Any,
    axes: tuple[str, ...],
    channel: Any,
) -> Any:
    """Return this device's part of balance loss and z-loss.

    The losses are those of all tokens of the group, and of all devices along `axes` (loss_axes).
    """
    loss = jnp.zeros((), jnp.float32)
    if not options.balance_coeff and not options.z_coeff:
        return loss
    if axes and options.sequence_tokens:
        raise EpicArgumentError(
            f"loss_axes is {axes}: must be empty with sequence_tokens, because each sequence has "
            "its own loss"
        )
    total = max(logits.shape[0], 1) * group.num_ranks * math.prod(map(jax.lax.axis_size, axes))
    share = share_of_tokens(group, logits.shape[0], total, channel)
    load = jax.lax.psum(load, axes) if axes else load
    if options.balance_coeff:
        balance = routing.balance_loss(
            options.router,
            logits,
            coeff=options.balance_coeff,
            total_tokens=total,
            load=load,
            topk_idx=chosen,
            sequence_tokens=options.sequence_tokens,
        )
        loss = loss + balance * (share if options.sequence_tokens else share * share)
    if options.z_coeff:
        z = routing.z_loss(options.router, logits, coeff=options.z_coeff, total_tokens=total)
        loss = loss + z * share
    return loss


def share_of_tokens(group: Group, num_tokens: int, total: int, channel: Any) -> Any:
    """Return `total` divided by the number of tokens of the group.

    The result is 1 with a mesh, where all ranks have equally many tokens.  Without a mesh they may
    have different numbers, and ranks may have left the group.  So the number of tokens is known
    only when the program runs.

    Args:
        group: the group.
        num_tokens: the number of tokens of this rank.
        total: the number of tokens, if all ranks had as many as this rank.
        channel: the channel of the sum over the ranks.

    """
    if group.axes or group.num_ranks == 1:
        return 1
    tokens = sums.sum(group, jnp.full(1, num_tokens, jnp.float32), channel=channel)[0]
    return total / jnp.maximum(tokens, 1)


def masked_layer_losses(
    group: Group,
    options: Moe,
    logits: Any,
    load: Any,
    mask: Any,
    axes: tuple[str, ...],
    channel: Any,
) -> Any:
    """Return layer_losses() of the tokens whose element of the mask is True.

    The number of these tokens is known only when the program runs.
    """
    total = sums.sum(group, mask.sum(dtype=jnp.float32)[None], channel=channel)[0]
    if axes:
        total, load = jax.lax.psum((total, load), axes)
    coeffs = (options.balance_coeff, options.z_coeff)
    return routing.masked_losses(options.router, logits, load, mask, total, coeffs)
