# SPDX-License-Identifier: Apache-2.0
"""Router and losses: local to each device, differentiable in the logits."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from epic import _native
from epic.errors import EpicArgumentError
from epic.jax.call import Spec, call, like, spread_all, zero_gradient
from epic.options import Router


def workspace(router: Router) -> Spec:
    """What the core's loops need beside the arrays."""
    return Spec((_native.size("epic_router_workspace_v1", router),), jnp.uint8)


def as_logits(router: Router, logits: Any) -> Any:
    """[num_tokens, E], checked."""
    logits = jnp.asarray(logits)
    columns = router.num_experts + router.zero_experts
    if logits.ndim < 2 or logits.shape[-1] != columns:
        raise EpicArgumentError(f"logits: shape {logits.shape}: [..., {columns}] is needed")
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise EpicArgumentError(f"logits: dtype {logits.dtype}: a float type is needed")
    return logits.reshape(-1, columns)


# ---------------------------------------------------------------------------- router ----


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def choose(router: Router, logits: Any, extras: tuple[Any, Any, Any]) -> tuple[Any, Any]:
    """router on checked arrays; extras: bias, token_ids, table."""
    shape = (logits.shape[0], router.top_k)
    kind = jnp.float64 if logits.dtype == jnp.float64 else jnp.float32
    results = [Spec(shape, jnp.int32), Spec(shape, kind), workspace(router)]
    out = call("router", results, [logits, *extras], **router.numbers())
    return out[0], out[1]


def choose_forward(router: Router, logits: Any, extras: Any) -> tuple[Any, Any]:
    """The choice is saved, not made again."""
    chosen, weights = choose.fun(router, logits, extras)
    return (chosen, weights), (logits, chosen, extras)


def choose_backward(router: Router, saved: Any, gradients: tuple[Any, Any]) -> tuple[Any, ...]:
    """The weights' gradient; the choice has none."""
    logits, chosen, extras = saved
    results = [like(logits), workspace(router)]
    operands = [logits, chosen, gradients[1]]
    d_logits = call("router_backward", results, operands, **router.numbers())[0]
    return d_logits, jax.tree.map(zero_gradient, extras)


choose.defvjp(choose_forward, choose_backward)


def route(
    router: Router, logits: Any, *, bias: Any = None, token_ids: Any = None, table: Any = None
) -> tuple[Any, Any]:
    """Chooses experts: logits [..., E] -> topk_idx [num_tokens, top_k] int32 and weights.

    bias [E] float32 counts for the choice only and has no gradient.  table [rows, top_k] with
    token_ids [num_tokens]: experts by token id instead of a choice.
    """
    rows = as_logits(router, logits)
    if (token_ids is None) != (table is None):
        raise EpicArgumentError("token_ids and table come together")
    if bias is not None:
        bias = jax.lax.stop_gradient(jnp.asarray(bias, jnp.float32))
    if table is not None:
        token_ids = jnp.asarray(token_ids).reshape(rows.shape[0])
        table = jnp.asarray(table, jnp.int32)
    rows, *extras = spread_all(None, rows, bias, token_ids, table)
    return choose(router, rows, tuple(extras))


# ---------------------------------------------------------------------------- losses ----


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def loss(
    name: str, router: Router, numbers: tuple[Any, ...], logits: Any, ints: tuple[Any, Any]
) -> Any:
    """A loss of this device's tokens; ints: load, topk_idx."""
    results = [Spec((1,), jnp.float32), workspace(router)]
    attributes = {**router.numbers(), **dict(numbers)}
    return call(name, results, [logits, *ints, None], **attributes)[0][0]


def loss_forward(
    name: str, router: Router, numbers: tuple[Any, ...], logits: Any, ints: Any
) -> tuple[Any, Any]:
    """All inputs are needed again."""
    return loss.fun(name, router, numbers, logits, ints), (logits, ints)


def loss_backward(
    name: str, router: Router, numbers: tuple[Any, ...], saved: Any, gradient: Any
) -> tuple[Any, Any]:
    """In the logits; the load has none."""
    logits, ints = saved
    operands = [logits, *ints, gradient.reshape(1)]
    results = [like(logits), workspace(router)]
    attributes = {**router.numbers(), **dict(numbers)}
    d_logits = call(name + "_backward", results, operands, **attributes)[0]
    return d_logits, jax.tree.map(zero_gradient, ints)


loss.defvjp(loss_forward, loss_backward)


def make_loss(name: str, router: Router, logits: Any, ints: tuple[Any, Any], **numbers: Any) -> Any:
    """Checks and spreads."""
    rows, *rest = spread_all(None, as_logits(router, logits), *ints)
    return loss(name, router, tuple(sorted(numbers.items())), rows, tuple(rest))


def balance_loss(
    router: Router,
    logits: Any,
    *,
    coeff: float,
    total_tokens: int,
    load: Any = None,
    topk_idx: Any = None,
    sequence_tokens: int = 0,
) -> Any:
    """num_experts * coeff / (top_k * T^2) * sum over experts of load * sum over tokens of P, which
    are the scores of logits [..., E] over their sum.

    load: as a plan gives it; or, for each sequence by itself, topk_idx and sequence_tokens.  T is
    total_tokens, of all devices; the devices' losses add up to the loss.
    """
    if sequence_tokens:
        ints: tuple[Any, Any] = (None, topk_idx)
    else:
        ints = (load, None)
    if all(x is None for x in ints):
        raise EpicArgumentError("load is needed, or topk_idx with sequence_tokens")
    if load is not None and load.shape != (router.num_experts,):
        raise EpicArgumentError(f"load: shape {load.shape}: [{router.num_experts}] is needed")
    numbers = {"coeff": float(coeff), "total_tokens": int(total_tokens)}
    return make_loss(
        "balance_loss", router, logits, ints, sequence_tokens=int(sequence_tokens), **numbers
    )


def z_loss(router: Router, logits: Any, *, coeff: float, total_tokens: int) -> Any:
    """coeff / T * sum over tokens of logsumexp(logits)^2, T total_tokens of all devices; what they
    get adds up."""
    numbers = {"coeff": float(coeff), "total_tokens": int(total_tokens), "sequence_tokens": 0}
    return make_loss("z_loss", router, logits, (None, None), **numbers)


def probabilities(router: Router, logits: Any) -> Any:
    """P of the balance loss: the scores of all columns, divided by their sum."""
    if router.score in ("softmax", "logits"):
        return jax.nn.softmax(logits)
    scores = jax.nn.sigmoid(logits)
    if router.score == "sqrtsoftplus":
        scores = jnp.sqrt(jax.nn.softplus(logits))
    return scores / scores.sum(axis=-1, keepdims=True)


def masked_losses(
    router: Router, logits: Any, load: Any, mask: Any, total: Any, coeffs: tuple[float, float]
) -> Any:
    """balance_loss and z_loss over the tokens that the mask [num_tokens] keeps, `total` [] of
    them on all devices; the core counts all tokens that it sees."""
    total = jnp.maximum(total, 1).astype(logits.dtype)
    loss = jnp.zeros((), logits.dtype)
    if coeffs[0]:
        p = probabilities(router, logits)[:, : router.num_experts]
        factor = router.num_experts * coeffs[0] / (router.top_k * total * total)
        loss += factor * jnp.where(mask[:, None], p * load, 0).sum()
    if coeffs[1]:
        z = jnp.square(jax.nn.logsumexp(logits, axis=-1))
        loss += coeffs[1] / total * jnp.where(mask, z, 0).sum()
    return loss.astype(jnp.float32)


# ------------------------------------------------------------------------------ bias ----


def bias_update(bias: Any, load: Any, rate: float) -> Any:
    """bias + rate * sign(mean load - load), as epic_bias_update: exact, and +-0 where they meet.

    bias and load [num_experts]; without a gradient.
    """
    mean, rest = jnp.divmod(load.sum(), load.shape[0])
    above = jnp.sign(mean - load) + jnp.where((load == mean) & (rest > 0), 1, 0)
    return bias + rate * above.astype(bias.dtype)
