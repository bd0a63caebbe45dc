# SPDX-License-Identifier: Apache-2.0
"""Router and losses, with gradients of the logits.

Each rank computes them for its own tokens. No function of this module communicates with other
ranks.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from epic.errors import EpicArgumentError
from epic.options import Router, check_rate, options_by_key
from epic.torch.arguments import (
    EpicFunction,
    as_flat,
    as_int32,
    assume_constant_result,
    check_floats,
    check_tensor,
    first_order_only,
    make_apply,
    needs_gradient,
)
from epic.torch.groups import Group
from epic.torch.ops import SMS_SHIFT, note_write, parts_of, translate_errors, write_out

ops = torch.ops.epic
# A number that no group has. The number of a closed group is 0, which stands for no group.
CLOSED_GROUP = (1 << SMS_SHIFT) - 1


@functools.cache
def cached_numbers(router: str) -> tuple[Any, ...]:
    """Return the operator arguments of the router with this key in options_by_key."""
    return tuple(options_by_key[router].numbers().values())


@assume_constant_result
def numbers_of(router: str) -> tuple[Any, ...]:
    """Return cached_numbers(router), which torch.compile treats as a constant.

    It is a separate function, because torch.compile would trace into one with functools.cache.
    """
    return cached_numbers(router)


def number_of(group: Group | None, x: Tensor, name: str = "logits") -> int:
    """Return the number of the group for operators that need a group only on GPUs; 0 on CPUs.

    Args:
        group: The group, or None.
        x: A tensor of the call.
        name: The name of x in the error.
    """
    if x.device.type == "cpu" and not (group is not None and group.on_gpu):
        return 0
    if group is None:
        raise EpicArgumentError(f"{name} is on {x.device}: pass group= for tensors on GPUs")
    return group.number or CLOSED_GROUP


def as_logits(router: Router, logits: Tensor) -> Tensor:
    """Check the logits and return them as [num_tokens, E]."""
    check_tensor("logits", logits)
    columns = router.num_experts + router.zero_experts
    if logits.dim() < 2 or logits.shape[-1] != columns:
        raise EpicArgumentError(
            f"logits has the shape {list(logits.shape)}: must be [..., {columns}]"
        )
    check_floats("logits", logits)
    return logits.reshape(-1, columns).contiguous()


# ---------------------------------------------------------------------------- router ----


def route_op(
    logits: Tensor, extras: tuple[Tensor | None, ...], group: int, numbers: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """Call the operator without a gradient; extras: bias, token_ids, table and forced ids."""
    return ops.route.default(logits, *extras, group, *numbers)


class Route(EpicFunction):
    """The operator epic::route with its gradient."""

    @staticmethod
    def forward(
        logits: Tensor, extras: tuple[Any, ...], group: int, numbers: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor]:
        """Call the operator."""
        return route_op(logits, extras, group, numbers)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], out: tuple[Tensor, Tensor]) -> None:
        """Save the logits and the chosen ids, so that backward does not choose again."""
        logits, _, ctx.group, ctx.numbers = inputs
        ctx.save_for_backward(logits, out[0])
        ctx.mark_non_differentiable(out[0])

    @staticmethod
    @first_order_only
    @translate_errors
    def backward(ctx: Any, _: Any, d_weights: Tensor) -> tuple[Any, ...]:
        """Return the gradient of the logits from that of the weights; ids have no gradient."""
        logits, chosen = ctx.saved_tensors
        d_logits = ops.route_backward.default(
            logits, chosen, d_weights.contiguous(), ctx.group, *ctx.numbers
        )
        return d_logits, None, None, None


route_apply = make_apply(Route)


def as_forced_ids(router: Router, ids: Tensor, rows: Tensor) -> Tensor:
    """Return forced ids as [num_tokens, top_k] int32, after checking them.

    Args:
        router: The router.
        ids: Integers [..., top_k] or [num_tokens, top_k].
        rows: The logits or tokens [..., n] of the ids.
    """
    check_tensor("forced ids", ids)
    count = math.prod(rows.shape[:-1])
    if ids.shape not in ((*rows.shape[:-1], router.top_k), (count, router.top_k)):
        raise EpicArgumentError(
            f"forced ids have the shape {list(ids.shape)}: must be "
            f"{[*rows.shape[:-1], router.top_k]}, with top_k ids for each token"
        )
    if ids.device != rows.device:
        raise EpicArgumentError(
            f"forced ids are on {ids.device} and x is on {rows.device}: must be on one device"
        )
    return as_int32("forced ids", ids).reshape(count, router.top_k)


@translate_errors
def route(
    router: Router,
    logits: Tensor,
    *,
    bias: Tensor | None = None,
    token_ids: Tensor | None = None,
    table: Tensor | None = None,
    forced: Tensor | None = None,
    group: Group | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose experts and weights for each token: logits [..., E] -> [num_tokens, top_k].

    No other rank takes part in this call. E is num_experts + zero_experts.

    Args:
        router: How experts are chosen and weighted.
        logits: [..., E] in float32, bfloat16, float16 or float64.
        bias: [E] float32, added to the scores only to choose experts. It has no gradient.
        token_ids: Integers [...], only with table: the row of the table for each token.
        table: Integers [rows, top_k]: the experts for each token id, which replace the router's
            choice.
        forced: Integers [..., top_k]: the experts of each token, which replace the router's choice;
            negative for no expert. Not together with token_ids.
        group: For logits on a GPU, a group on that GPU. For logits on the CPU None is enough.
        out: Tensors (topk_idx, weights) into which the function writes. It returns them, without
            a gradient.

    Returns:
        The ids topk_idx [num_tokens, top_k] int32, best first, and their weights [num_tokens,
        top_k] float32 (float64 with float64 logits).

    Raises:
        EpicArgumentError: A shape, dtype or device is wrong.

    Example:
        >>> import torch, epic.torch
        >>> router = epic.torch.Router(num_experts=4, top_k=2, normalize="sum")
        >>> ids, weights = epic.torch.route(router, torch.tensor([[0.0, 2.0, 1.0, -1.0]]))
        >>> ids.tolist(), round(float(weights.sum()), 4)
        ([[1, 2]], 1.0)
    """
    rows = as_logits(router, logits)
    if (token_ids is None) != (table is None):
        raise EpicArgumentError(
            f"{'token_ids' if token_ids is None else 'table'} is None: pass both token_ids and "
            "table, or none"
        )
    if bias is not None:
        check_floats("bias", bias)
        bias = bias.detach().to(torch.float32).contiguous()
    if table is not None and token_ids is not None:
        token_ids = as_flat("token_ids", token_ids, logits.shape[:-1])
        table = as_int32("table", table)
    if forced is not None and token_ids is not None:
        raise EpicArgumentError("forced is given and token_ids is given: pass one of them")
    if forced is not None:
        forced = as_forced_ids(router, forced, logits)
    extras, where = (bias, token_ids, table, forced), number_of(group, rows)
    if out is not None:
        chosen, weights = parts_of(out, "topk_idx, weights")
        args = (rows, *extras, where, *numbers_of(router.key))
        write_out(ops.route_out.default, args, chosen, weights)
        return chosen, weights
    call = route_apply if needs_gradient(rows) else route_op
    return call(rows, extras, where, numbers_of(router.key))


# ---------------------------------------------------------------------------- losses ----


class BalanceLoss(EpicFunction):
    """The operator epic::balance_loss with its gradient."""

    @staticmethod
    def forward(
        logits: Tensor,
        load: Tensor | None,
        chosen: Tensor | None,
        total_tokens: int,
        sequence_tokens: int,
        rest: tuple[Any, ...],
    ) -> Tensor:
        """Call the operator.

        Args:
            logits: [num_tokens, E].
            load: As for `balance_loss`.
            chosen: topk_idx, as for `balance_loss`.
            total_tokens: As for `balance_loss`.
            sequence_tokens: As for `balance_loss`.
            rest: coeff, the number of the group and the numbers of the router.
        """
        return ops.balance_loss.default(logits, load, chosen, total_tokens, sequence_tokens, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Any) -> None:
        """Save all inputs."""
        logits, load, chosen, ctx.total_tokens, ctx.sequence_tokens, ctx.rest = inputs
        ctx.save_for_backward(logits, load, chosen)

    @staticmethod
    @first_order_only
    @translate_errors
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Any, ...]:
        """Return the gradient of the logits; the load has none."""
        sizes = (ctx.total_tokens, ctx.sequence_tokens)
        d_logits = scale_gradient(ops.balance_loss_backward.default, ctx, d_loss, *sizes)
        return d_logits, None, None, None, None, None


balance_loss_apply = make_apply(BalanceLoss)


class ZLoss(EpicFunction):
    """The operator epic::z_loss with its gradient."""

    @staticmethod
    def forward(logits: Tensor, total_tokens: int, rest: tuple[Any, ...]) -> Tensor:
        """Call the operator. rest: coeff, the number of the group and the numbers of the router."""
        return ops.z_loss.default(logits, total_tokens, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Any) -> None:
        """Save all inputs."""
        logits, ctx.total_tokens, ctx.rest = inputs
        ctx.save_for_backward(logits)

    @staticmethod
    @first_order_only
    @translate_errors
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Any, ...]:
        """Return the gradient of the logits."""
        return (
            scale_gradient(ops.z_loss_backward.default, ctx, d_loss, ctx.total_tokens),
            None,
            None,
        )


z_loss_apply = make_apply(ZLoss)


def scale_gradient(operator: Any, ctx: Any, d_loss: Tensor, *sizes: int) -> Tensor:
    """Call the backward operator of a loss, and return the gradient of the logits.

    The operator takes d_loss only in float32. A float64 d_loss is multiplied in this function.

    Args:
        operator: The operator.
        ctx: The ctx of the autograd function.
        d_loss: Gradient of the loss, [1].
        *sizes: Arguments of the operator after d_loss.
    """
    saved = ctx.saved_tensors
    if d_loss.dtype == torch.float64:
        return operator(*saved, None, *sizes, *ctx.rest) * d_loss
    return operator(*saved, d_loss.contiguous(), *sizes, *ctx.rest)


@translate_errors
def balance_loss(
    router: Router,
    logits: Tensor,
    *,
    coeff: float,
    total_tokens: int,
    load: Tensor | None = None,
    topk_idx: Tensor | None = None,
    sequence_tokens: int = 0,
    group: Group | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return this rank's part of the balance loss; the parts of all ranks add up to the loss.

    loss = num_experts * coeff / (top_k * T^2) * sum over experts of load * sum over tokens of P.
    T is total_tokens. P is the score of the expert, divided by the sum of the token's scores.

    No other rank takes part in this call.

    Args:
        router: The router of the logits.
        logits: [..., E] in float32, bfloat16, float16 or float64.
        coeff: Factor of the loss.
        total_tokens: Number of tokens of all ranks.
        load: [num_experts] int32: number of choices of each expert over the group, as a plan
            returns it. Not used with sequence_tokens.
        topk_idx: [num_tokens, top_k] int32: the chosen experts. Used only with sequence_tokens.
        sequence_tokens: Length of a sequence. The result is then the mean of the losses of all
            sequences, each with its own choices as load and its length as T. A sequence must not
            be divided between ranks. 0: one loss for all tokens.
        group: For logits on a GPU, a group on that GPU. For logits on the CPU None is enough.
        out: Scalar tensor into which the function writes. It returns it, without a gradient.

    Returns:
        A float32 scalar (float64 with float64 logits).

    Raises:
        EpicArgumentError: load and topk_idx are both missing, or a shape or dtype is wrong.

    Example:
        >>> import torch, epic.torch
        >>> router = epic.torch.Router(num_experts=2, top_k=1)
        >>> logits = torch.zeros(4, 2)  # the probability of each expert is 1/2 for each token
        >>> load = torch.tensor([2, 2], dtype=torch.int32)
        >>> float(epic.torch.balance_loss(router, logits, coeff=1.0, total_tokens=4, load=load))
        1.0
    """
    rows = as_logits(router, logits)
    load, topk_idx = (None, topk_idx) if sequence_tokens else (load, None)
    if load is None and topk_idx is None:
        raise EpicArgumentError("load is None: pass load, or topk_idx with sequence_tokens")
    rest = (float(coeff), number_of(group, rows), *numbers_of(router.key))
    if out is not None:
        args = (rows, load, topk_idx, total_tokens, sequence_tokens, *rest)
        return loss_into(ops.balance_loss_out.default, args, out)
    return balance_loss_apply(rows, load, topk_idx, total_tokens, sequence_tokens, rest)[0]


def loss_into(operator: Any, args: tuple[Any, ...], out: Tensor) -> Tensor:
    """Compute a loss into the scalar tensor `out`, and return it."""
    if out.shape != ():
        raise EpicArgumentError(f"out has the shape {list(out.shape)}: must be []")
    write_out(operator, args, out.view(1))
    return out


@translate_errors
def z_loss(
    router: Router,
    logits: Tensor,
    *,
    coeff: float,
    total_tokens: int,
    group: Group | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return this rank's part of the z-loss: coeff / T * sum over tokens of logsumexp(logits)^2.

    No other rank takes part in this call.

    Args:
        router: The router of the logits.
        logits: [..., E] in float32, bfloat16, float16 or float64.
        coeff: Factor of the loss.
        total_tokens: T, the number of tokens of all ranks.
        group: For logits on a GPU, a group on that GPU. For logits on the CPU None is enough.
        out: Scalar tensor into which the function writes. It returns it, without a gradient.

    Returns:
        A float32 scalar (float64 with float64 logits). The parts of all ranks add up to the loss.

    Raises:
        EpicArgumentError: A shape, dtype or device is wrong.

    Example:
        >>> import torch, epic.torch
        >>> router = epic.torch.Router(num_experts=2, top_k=1)
        >>> loss = epic.torch.z_loss(router, torch.zeros(4, 2), coeff=1.0, total_tokens=4)
        >>> round(float(loss), 4)  # log(2)^2
        0.4805
    """
    rows = as_logits(router, logits)
    rest = (float(coeff), number_of(group, rows), *numbers_of(router.key))
    if out is not None:
        return loss_into(ops.z_loss_out.default, (rows, total_tokens, *rest), out)
    return z_loss_apply(rows, total_tokens, rest)[0]


@translate_errors
def bias_update(bias: Tensor, load: Tensor, rate: float, group: Group | None = None) -> None:
    """Move the bias towards an even load, in place: bias += rate * sign(mean(load) - load).

    No other rank takes part in this call. If all ranks pass equal tensors, their biases stay equal.

    Args:
        bias: [num_experts] float32.
        load: [num_experts] int32: choices of each expert over the group since the last update.
        rate: By how much an element of the bias changes, for example 0.001.
        group: For a bias on a GPU, a group on that GPU. For a bias on the CPU None is enough.

    Example:
        >>> import torch, epic.torch
        >>> bias, load = torch.zeros(3), torch.tensor([5, 1, 3], dtype=torch.int32)
        >>> epic.torch.bias_update(bias, load, 0.5)
        >>> bias.tolist()
        [-0.5, 0.5, 0.0]
    """
    with torch.no_grad():
        ops.bias_update_.default(bias, load, check_rate("rate", rate), number_of(group, bias))
    note_write(bias)
