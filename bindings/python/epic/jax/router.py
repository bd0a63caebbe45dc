# SPDX-License-Identifier: Apache-2.0
"""Router and losses, with gradients of the logits.

Each device computes them for its own tokens.  No function of this module communicates with other
ranks.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from epic import _native
from epic.errors import EpicArgumentError
from epic.jax.arrays import (
    ANY_ROWS,
    FLOATS,
    INDICES,
    INTEGERS,
    as_array,
    as_array_or_none,
    as_int32,
    check_kind,
)
from epic.jax.call import ArraySpec, call_handler, cast_all_varying, spec_of, zero_gradient
from epic.jax.groups import Group
from epic.jax.over_mesh import over_mesh
from epic.options import INT64_MAX, Router, check_float, check_int, check_rate


def router_workspace(router: Router) -> ArraySpec:
    """Return the spec of the workspace that the core needs for router and losses."""
    return ArraySpec((_native.size("epic_router_workspace_v1", router),), jnp.uint8)


def as_logits(router: Router, logits: Any) -> Any:
    """Return the logits as [num_tokens, E], after checking them."""
    check_kind("router", router, Router)
    logits = as_array("logits", logits, FLOATS, (ANY_ROWS, columns_of(router)))
    return logits.reshape(-1, logits.shape[-1])


def columns_of(router: Router) -> tuple[str, int]:
    """Return E, the number of columns of the logits, as a named dimension."""
    name = "num_experts + zero_experts" if router.zero_experts else "num_experts"
    return name, router.num_experts + router.zero_experts


def as_ids(token_ids: Any, table: Any, top_k: int, dims: tuple[int, ...]) -> tuple[Any, Any]:
    """Return token_ids as [num_tokens] and table as int32 [rows, top_k], after checking them.

    Both must be given, or neither.  dims: the dimensions of the tokens.  token_ids must have these
    dimensions, or be [num_tokens].
    """
    if (token_ids is None) != (table is None):
        raise EpicArgumentError(
            f"{'token_ids' if token_ids is None else 'table'} is None: pass both token_ids and "
            "table, or none"
        )
    if table is None:
        return None, None
    flat = ("num_tokens", math.prod(dims))
    shapes = [[flat]] if len(dims) == 1 else [list(dims), [flat]]
    ids = as_array("token_ids", token_ids, INTEGERS, *shapes).reshape(flat[1])
    ids = ids if ids.dtype.name in INDICES else as_int32(ids)
    table = as_array("table", table, INTEGERS, ("rows", ("top_k", top_k)))
    return ids, as_int32(table)


def refuse_both(token_ids: Any, forced: Any) -> None:
    """Raise an error if both token_ids and forced ids are given."""
    if token_ids is not None and forced is not None:
        raise EpicArgumentError("forced is given and token_ids is given: pass one of them")


def as_forced_ids(router: Router, ids: Any, dims: tuple[int, ...]) -> Any:
    """Return forced ids as [num_tokens, top_k] int32; dims: the dimensions of the tokens."""
    found = as_array("forced ids", ids, INTEGERS, [*dims, ("top_k", router.top_k)])
    return as_int32(found).reshape(math.prod(dims), router.top_k)


def as_bias(router: Router, bias: Any) -> Any:
    """Return the bias as float32 [E] without a gradient; None stays None."""
    bias = as_array_or_none("bias", bias, FLOATS, [columns_of(router)])
    return None if bias is None else jax.lax.stop_gradient(bias.astype(jnp.float32))


# ---------------------------------------------------------------------------- router ----


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def choose_experts(router: Router, logits: Any, extras: tuple[Any, ...]) -> tuple[Any, Any]:
    """Run the router on checked arrays; extras are bias, token_ids, table and forced ids."""
    shape = (logits.shape[0], router.top_k)
    kind = jnp.float64 if logits.dtype == jnp.float64 else jnp.float32
    results = [ArraySpec(shape, jnp.int32), ArraySpec(shape, kind), router_workspace(router)]
    out = call_handler("router", results, [logits, *extras], **router.numbers())
    return out[0], out[1]


def choose_experts_forward(router: Router, logits: Any, extras: Any) -> tuple[Any, Any]:
    """Save the choice, so that backward does not choose again."""
    chosen, weights = choose_experts.fun(router, logits, extras)
    return (chosen, weights), (logits, chosen, extras)


def choose_experts_backward(
    router: Router, saved: Any, gradients: tuple[Any, Any]
) -> tuple[Any, ...]:
    """Return the gradient of the logits from that of the weights; ids have no gradient."""
    logits, chosen, extras = saved
    results = [spec_of(logits), router_workspace(router)]
    operands = [logits, chosen, gradients[1]]
    d_logits = call_handler("router_backward", results, operands, **router.numbers())[0]
    return d_logits, jax.tree.map(zero_gradient, extras)


choose_experts.defvjp(choose_experts_forward, choose_experts_backward)


@over_mesh
def route(
    router: Router,
    logits: Any,
    *,
    bias: Any = None,
    token_ids: Any = None,
    table: Any = None,
    forced: Any = None,
    group: Group | None = None,
) -> tuple[Any, Any]:
    """Choose top_k experts for each token.

    No other rank takes part in this call.  It is differentiable in the logits, through the weights.

    Args:
        router: the router's options; static.
        logits: [..., E] float32, bfloat16, float16 or float64; E is num_experts + zero_experts.
        bias: [E] any float dtype, or None: added to the scores only to choose experts.  It has no
            gradient.
        token_ids: [...] integers, only with `table`: the row of the table for each token.
        table: [rows, top_k] integers: the experts for each token id, which replace the choice.
        forced: [..., top_k] integers: the experts of each token, which replace the choice;
            negative for no expert.  Not together with token_ids.
        group: the group.  It is needed only for global arrays, outside of a shard_map.

    Returns:
        topk_idx [num_tokens, top_k] int32, best first, and weights [num_tokens, top_k] float32
        (float64 with float64 logits).  For global arrays they are [..., top_k].

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.

    Example:
        >>> import jax.numpy as jnp
        >>> import epic.jax
        >>> router = epic.jax.Router(num_experts=4, top_k=2, normalize="sum")
        >>> logits = jnp.array([[0.0, 2.0, 1.0, -1.0]])
        >>> topk_idx, weights = epic.jax.route(router, logits)
        >>> topk_idx.tolist(), round(float(weights.sum()), 3)
        ([[1, 2]], 1.0)

    """
    if group is not None:
        check_kind("group", group, Group)
    rows = as_logits(router, logits)
    bias = as_bias(router, bias)
    dims = jnp.asarray(logits).shape[:-1]
    token_ids, table = as_ids(token_ids, table, router.top_k, dims)
    refuse_both(token_ids, forced)
    forced = None if forced is None else as_forced_ids(router, forced, dims)
    rows, *extras = cast_all_varying(None, rows, bias, token_ids, table, forced)
    return choose_experts(router, rows, tuple(extras))


# ---------------------------------------------------------------------------- losses ----


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def run_loss(
    name: str, router: Router, numbers: tuple[Any, ...], logits: Any, ints: tuple[Any, Any]
) -> Any:
    """Run a loss of this device's tokens on checked arrays.

    Args:
        name: "balance_loss" or "z_loss".
        router: the router's options.
        numbers: pairs of name and value of the attributes of the loss.
        logits: [num_tokens, E].
        ints: load and topk_idx, or None.

    """
    results = [ArraySpec((1,), jnp.float32), router_workspace(router)]
    attributes = {**router.numbers(), **dict(numbers)}
    return call_handler(name, results, [logits, *ints, None], **attributes)[0][0]


def run_loss_forward(
    name: str, router: Router, numbers: tuple[Any, ...], logits: Any, ints: Any
) -> tuple[Any, Any]:
    """Save all inputs."""
    return run_loss.fun(name, router, numbers, logits, ints), (logits, ints)


def run_loss_backward(
    name: str, router: Router, numbers: tuple[Any, ...], saved: Any, gradient: Any
) -> tuple[Any, Any]:
    """Return the gradient of the logits; load and topk_idx have none."""
    logits, ints = saved
    operands = [logits, *ints, gradient.reshape(1)]
    results = [spec_of(logits), router_workspace(router)]
    attributes = {**router.numbers(), **dict(numbers)}
    d_logits = call_handler(name + "_backward", results, operands, **attributes)[0]
    return d_logits, jax.tree.map(zero_gradient, ints)


run_loss.defvjp(run_loss_forward, run_loss_backward)


def make_loss(name: str, router: Router, logits: Any, ints: tuple[Any, Any], **numbers: Any) -> Any:
    """Run a loss on checked arrays that may vary over mesh axes."""
    rows, *rest = cast_all_varying(None, logits, *ints)
    return run_loss(name, router, tuple(sorted(numbers.items())), rows, tuple(rest))


def as_total(total_tokens: int | None) -> int:
    """Return total_tokens, checked."""
    if total_tokens is None:
        raise EpicArgumentError(
            "total_tokens is None: must be the number of tokens of all devices; only global "
            "arrays, outside of a shard_map and with group=, do not need it"
        )
    return check_int("total_tokens", total_tokens, most=INT64_MAX)


@over_mesh
def balance_loss(
    router: Router,
    logits: Any,
    *,
    coeff: float,
    total_tokens: int | None = None,
    load: Any = None,
    topk_idx: Any = None,
    sequence_tokens: int = 0,
    group: Group | None = None,
) -> Any:
    """Return this device's part of the balance loss.

    The loss is num_experts * coeff / (top_k * T^2) * sum over experts of (load * sum over tokens of
    P).  T is total_tokens.  P is the score of the expert, divided by the sum of the token's scores.
    Sum the parts of all devices with `jax.lax.psum`.  For global arrays the result is the whole
    loss.

    No other rank takes part in this call.  It is differentiable in the logits.

    Args:
        router: the router's options; static.
        logits: [..., E] a float dtype: the logits of this device's tokens.
        coeff: the factor of the loss.
        total_tokens: the number of tokens of all devices.  For global arrays None: as many as
            logits has.
        load: [num_experts] int32 or int64: `Plan.load`, or with replicas `Plan.logical_load`.  Not
            used with sequence_tokens.
        topk_idx: [num_tokens, top_k] int32 or int64: the chosen experts.  Used only with
            sequence_tokens.
        sequence_tokens: the length of a sequence.  The result is then the mean of the losses of all
            sequences, each with its own choices as load and its length as T.  A sequence must not
            be divided between devices.  0: one loss for all tokens.
        group: the group; needed for global arrays, outside of a shard_map.

    Returns:
        [] float32.

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.

    Example:
        >>> import jax.numpy as jnp
        >>> import epic.jax
        >>> router = epic.jax.Router(num_experts=2, top_k=1)
        >>> logits = jnp.zeros((4, 2))  # the probability of each expert is 1/2 for each token
        >>> load = jnp.array([2, 2])
        >>> float(epic.jax.balance_loss(router, logits, coeff=1.0, total_tokens=4, load=load))
        1.0

    """
    if group is not None:
        check_kind("group", group, Group)
    rows = as_logits(router, logits)
    numbers = {"coeff": check_float("coeff", coeff), "total_tokens": as_total(total_tokens)}
    each = check_int("sequence_tokens", sequence_tokens)
    ints: tuple[Any, Any]
    if each:
        check_sequences(rows.shape[0], each)
        choices = (("num_tokens", rows.shape[0]), ("top_k", router.top_k))
        chosen = as_array("topk_idx", topk_idx, INDICES, choices)
        ints = (None, chosen.astype(jnp.int32))
    elif load is None:
        raise EpicArgumentError("load is None: pass load, or topk_idx with sequence_tokens")
    else:
        ids = [("num_experts", router.num_experts)]
        ints = (as_array("load", load, INDICES, ids).astype(jnp.int32), None)
    return make_loss("balance_loss", router, rows, ints, sequence_tokens=each, **numbers)


def check_sequences(num_tokens: int, sequence_tokens: int, name: str = "logits") -> None:
    """Raise an error if sequence_tokens does not divide the number of tokens."""
    if num_tokens % sequence_tokens:
        raise EpicArgumentError(
            f"sequence_tokens is {sequence_tokens}: must divide the {num_tokens} tokens of {name}"
        )


@over_mesh
def z_loss(
    router: Router,
    logits: Any,
    *,
    coeff: float,
    total_tokens: int | None = None,
    group: Group | None = None,
) -> Any:
    """Return this device's part of the router z-loss.

    The loss is coeff / T * sum over tokens of logsumexp(logits)^2.  Sum the parts of all devices
    with `jax.lax.psum`.  For global arrays the result is the whole loss.

    No other rank takes part in this call.  It is differentiable in the logits.

    Args:
        router: the router's options; static.
        logits: [..., E] a float dtype: the logits of this device's tokens.
        coeff: the factor of the loss.
        total_tokens: T, the number of tokens of all devices.  For global arrays None: as many as
            logits has.
        group: the group; needed for global arrays, outside of a shard_map.

    Returns:
        [] float32.

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.

    Example:
        >>> import jax.numpy as jnp
        >>> import epic.jax
        >>> router = epic.jax.Router(num_experts=2, top_k=1)
        >>> loss = epic.jax.z_loss(router, jnp.zeros((4, 2)), coeff=1.0, total_tokens=4)
        >>> round(float(loss), 4)  # log(2)^2
        0.4805

    """
    if group is not None:
        check_kind("group", group, Group)
    rows = as_logits(router, logits)
    numbers = {"coeff": check_float("coeff", coeff), "total_tokens": as_total(total_tokens)}
    return make_loss("z_loss", router, rows, (None, None), sequence_tokens=0, **numbers)


def probabilities(router: Router, logits: Any) -> Any:
    """Return P of the balance loss: the scores of all E columns, divided by their sum."""
    if router.score in ("softmax", "logits"):
        return jax.nn.softmax(logits)
    scores = jax.nn.sigmoid(logits)
    if router.score == "sqrtsoftplus":
        scores = jnp.sqrt(jax.nn.softplus(logits))
    return scores / scores.sum(axis=-1, keepdims=True)


def masked_losses(
    router: Router, logits: Any, load: Any, mask: Any, total: Any, coeffs: tuple[float, float]
) -> Any:
    """Return balance loss plus z-loss over the tokens whose element of the mask is True.

    The losses of the core have no mask, so this function computes the losses with JAX.

    Args:
        router: the router's options.
        logits: [num_tokens, E].
        load: [num_experts]: the choices of these tokens, over the group.
        mask: [num_tokens] bool.
        total: []: the number of these tokens, over all devices.
        coeffs: the factors of balance loss and z-loss.

    """
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
    """Return the bias after one step towards an even load, without a gradient.

    The result is bias + rate * sign(mean(load) - load).  The sign is computed without rounding.

    Args:
        bias: [num_experts] a float dtype.
        load: [num_experts] int32 or int64: `MoeOut.load_of_ids` or `Plan.load_of_ids`.
        rate: by how much an element of the bias changes, for example 0.001: a number or an array.

    Returns:
        [num_experts], dtype of bias.

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.

    Example:
        >>> import jax.numpy as jnp
        >>> import epic.jax
        >>> epic.jax.bias_update(jnp.zeros(3), jnp.array([5, 1, 3]), 0.5).tolist()
        [-0.5, 0.5, 0.0]

    """
    load = as_array("load", load, INDICES, ["num_experts"])
    bias = as_array("bias", bias, FLOATS, ["num_experts"])
    if bias.shape != load.shape:
        raise EpicArgumentError(
            f"bias has {bias.shape[0]} experts and load has {load.shape[0]}: must have equally many"
        )
    if not isinstance(rate, jax.Array):  # a traced array has no value to check
        rate = check_rate("rate", rate)
    mean, rest = jnp.divmod(load.sum(), load.shape[0])
    above = jnp.sign(mean - load) + jnp.where((load == mean) & (rest > 0), 1, 0)
    return (bias + rate * above.astype(bias.dtype)).astype(bias.dtype)
