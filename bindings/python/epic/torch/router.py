# SPDX-License-Identifier: Apache-2.0
"""Router and losses: local to each rank, differentiable in the logits."""

import functools
from typing import Any

import torch
from torch import Tensor

from epic.errors import EpicArgumentError
from epic.options import Router, options_by_key
from epic.torch.arguments import (
    EpicFunction,
    as_flat,
    as_int32,
    check_floats,
    first_order_only,
    make_apply,
    needs_gradient,
)
from epic.torch.groups import Group
from epic.torch.ops import note_write, parts_of, translate_errors, write_out

ops = torch.ops.epic


@functools.cache
def cached_numbers(router: str) -> tuple[Any, ...]:
    """They take time."""
    return tuple(options_by_key[router].numbers().values())


@torch._dynamo.assume_constant_result
def numbers_of(router: str) -> tuple[Any, ...]:
    """What the operators are passed for the router of that key.  Tracers look through a cache, so
    this has none itself."""
    return cached_numbers(router)


def number_of(group: Group | None, x: Tensor, name: str = "logits") -> int:
    """The group, which is needed on GPUs alone."""
    if x.device.type == "cpu" and not (group is not None and group.on_gpu):
        return 0
    if group is None:
        raise EpicArgumentError(f"{name} on {x.device}: group= is needed there")
    return group.number


def as_logits(router: Router, logits: Tensor) -> Tensor:
    """[num_tokens, E], checked."""
    columns = router.num_experts + router.zero_experts
    if logits.dim() < 2 or logits.shape[-1] != columns:
        raise EpicArgumentError(f"logits: shape {list(logits.shape)}: [..., {columns}] is needed")
    check_floats("logits", logits)
    return logits.reshape(-1, columns).contiguous()


# ---------------------------------------------------------------------------- router ----


def route_op(
    logits: Tensor, extras: tuple[Tensor | None, ...], group: int, numbers: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """The operator; extras: bias, token_ids, table."""
    return ops.route.default(logits, *extras, group, *numbers)


class Route(EpicFunction):
    """epic::route with its gradient."""

    @staticmethod
    def forward(
        logits: Tensor, extras: tuple[Any, ...], group: int, numbers: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor]:
        """Call the operator."""
        return route_op(logits, extras, group, numbers)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], out: tuple[Tensor, Tensor]) -> None:
        """Save the choice, so that backward does not make it again."""
        logits, _, ctx.group, ctx.numbers = inputs
        ctx.save_for_backward(logits, out[0])
        ctx.mark_non_differentiable(out[0])

    @staticmethod
    @first_order_only
    @translate_errors
    def backward(ctx: Any, _: Any, d_weights: Tensor) -> tuple[Any, ...]:
        """The weights' gradient; the choice has none."""
        logits, chosen = ctx.saved_tensors
        d_logits = ops.route_backward.default(
            logits, chosen, d_weights.contiguous(), ctx.group, *ctx.numbers
        )
        return d_logits, None, None, None


route_apply = make_apply(Route)


@translate_errors
def route(
    router: Router,
    logits: Tensor,
    *,
    bias: Tensor | None = None,
    token_ids: Tensor | None = None,
    table: Tensor | None = None,
    group: Group | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses experts: logits [..., E] -> topk_idx [num_tokens, top_k] int32 and weights.

    bias [E] float32 counts for the choice only and has no gradient.  table [rows, top_k] with
    token_ids [num_tokens]: experts by token id instead of a choice.  group: on GPUs, one there.
    out: these two, which are written and returned, without a gradient.
    """
    rows = as_logits(router, logits)
    if (token_ids is None) != (table is None):
        raise EpicArgumentError("token_ids and table come together")
    if bias is not None:
        check_floats("bias", bias)
        bias = bias.detach().to(torch.float32).contiguous()
    if table is not None and token_ids is not None:
        token_ids = as_flat("token_ids", token_ids, logits.shape[:-1])
        table = as_int32("table", table)
    extras, where = (bias, token_ids, table), number_of(group, rows)
    if out is not None:
        chosen, weights = parts_of(out, "topk_idx, weights")
        args = (rows, *extras, where, *numbers_of(router.key))
        write_out(ops.route_out.default, args, chosen, weights)
        return chosen, weights
    call = route_apply if needs_gradient(rows) else route_op
    return call(rows, extras, where, numbers_of(router.key))


# ---------------------------------------------------------------------------- losses ----


class BalanceLoss(EpicFunction):
    """epic::balance_loss with its gradient."""

    @staticmethod
    def forward(
        logits: Tensor,
        load: Tensor | None,
        chosen: Tensor | None,
        total_tokens: int,
        sequence_tokens: int,
        rest: tuple[Any, ...],
    ) -> Tensor:
        """Call the operator; rest: coeff, group, the router's numbers."""
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
        """In the logits; the load has none."""
        sizes = (ctx.total_tokens, ctx.sequence_tokens)
        d_logits = scale_gradient(ops.balance_loss_backward.default, ctx, d_loss, *sizes)
        return d_logits, None, None, None, None, None


balance_loss_apply = make_apply(BalanceLoss)


class ZLoss(EpicFunction):
    """epic::z_loss with its gradient."""

    @staticmethod
    def forward(logits: Tensor, total_tokens: int, rest: tuple[Any, ...]) -> Tensor:
        """Call the operator; rest: of BalanceLoss."""
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
        """In the logits."""
        return (
            scale_gradient(ops.z_loss_backward.default, ctx, d_loss, ctx.total_tokens),
            None,
            None,
        )


z_loss_apply = make_apply(ZLoss)


def scale_gradient(operator: Any, ctx: Any, d_loss: Tensor, *sizes: int) -> Tensor:
    """The core takes d_loss in float32; in float64 it is multiplied here."""
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
    """num_experts * coeff / (top_k * T^2) * sum over experts of load * sum over tokens of P.

    load: as a plan gives it; or, for each sequence by itself, topk_idx and sequence_tokens.  T is
    total_tokens, of all ranks; the ranks' losses add up to the loss.  out: [], written and
    returned, without a gradient.
    """
    rows = as_logits(router, logits)
    load, topk_idx = (None, topk_idx) if sequence_tokens else (load, None)
    if load is None and topk_idx is None:
        raise EpicArgumentError("load is needed, or topk_idx with sequence_tokens")
    rest = (float(coeff), number_of(group, rows), *numbers_of(router.key))
    if out is not None:
        args = (rows, load, topk_idx, total_tokens, sequence_tokens, *rest)
        return loss_into(ops.balance_loss_out.default, args, out)
    return balance_loss_apply(rows, load, topk_idx, total_tokens, sequence_tokens, rest)[0]


def loss_into(operator: Any, args: tuple[Any, ...], out: Tensor) -> Tensor:
    """A loss with out=."""
    if out.shape != ():
        raise EpicArgumentError(f"out: shape {list(out.shape)}: [] is needed")
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
    """coeff / T * sum over tokens of logsumexp(logits)^2; the ranks' parts add up.  out: as of
    balance_loss."""
    rows = as_logits(router, logits)
    rest = (float(coeff), number_of(group, rows), *numbers_of(router.key))
    if out is not None:
        return loss_into(ops.z_loss_out.default, (rows, total_tokens, *rest), out)
    return z_loss_apply(rows, total_tokens, rest)[0]


@translate_errors
def bias_update(bias: Tensor, load: Tensor, rate: float, group: Group | None = None) -> None:
    """bias += rate * sign(mean load - load), in place; without a gradient."""
    with torch.no_grad():
        ops.bias_update_.default(bias, load, float(rate), number_of(group, bias))
    note_write(bias)
