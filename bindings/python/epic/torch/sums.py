# SPDX-License-Identifier: Apache-2.0
"""Sums over the ranks of a group, in a fixed order, with gradients."""

import functools
from typing import Any

import torch
from torch import Tensor

from epic.errors import EpicArgumentError
from epic.torch.arguments import (
    EpicFunction,
    first_order_only,
    is_traced,
    make_apply,
    needs_gradient,
    no_vmap,
)
from epic.torch.groups import Group
from epic.torch.ops import copy_into, note_write, translate_errors
from epic.torch.plans import limit_number

ops = torch.ops.epic


def sum_op(
    group: Group, order_token: Tensor, x: Tensor, order: int, tag: int, max_sms: int = 0
) -> Tensor:
    """Return the sum of x over the ranks.

    The operator adds only float32. A float64 x is sent as float32 numbers and added here.

    Args:
        group: The group.
        order_token: The order token of the group for this call.
        x: [n] in float32 or float64.
        order: 0: in the order of ranks. 1: in a binary tree.
        tag: Tag of the sum.
        max_sms: As for `sum`.
    """
    out = with_zeros_of_others(group, x) if x.dtype == torch.float64 else x.clone()
    ops.sum_.default(order_token, out, order, limit_number(group.number, max_sms), tag)
    return add_in_order(group, out, order) if x.dtype == torch.float64 else out


def refuse_vmap(x: Tensor) -> None:
    """Raise an error under torch.func.vmap; torch 2.9 would report views of another dtype."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_batchedtensor(x):
            raise no_vmap()
        x = torch._C._functorch.get_unwrapped(x)


def with_zeros_of_others(group: Group, x: Tensor) -> Tensor:
    """Return float64 numbers [n] as float32 [num_ranks * 4 * n], to gather them with a sum.

    Each float32 contains 16 bits of a number as an integer. The parts of all other ranks are zero.
    So the sum over the ranks is exact, and contains the numbers of every rank.

    The numbers are negated, so that add_in_order reads -0 for ranks that have left the group.
    Adding -0 changes no number.
    """
    if not is_traced():
        refuse_vmap(x)
    parts = x.new_zeros((group.num_ranks, 4 * x.numel()), dtype=torch.float32)
    parts[group.rank] = x.neg().view(torch.int16)
    return parts.view(-1)


def add_in_order(group: Group, parts: Tensor, order: int) -> Tensor:
    """Add the float64 numbers of all ranks in an order.

    A compiled function does not look which ranks are members. In a tree it adds the numbers of the
    members in the order that its ranks had when it was compiled.

    Args:
        group: The group.
        parts: The sum of the results of with_zeros_of_others over the ranks.
        order: As for sum_op.

    Returns:
        The sums [n] float64.
    """
    rows = list(parts.to(torch.int16).view(torch.float64).view(group.num_ranks, -1).neg())
    if order and not is_traced():
        rows = [rows[rank] for rank in group.members.ranks]
    while order and len(rows) > 1:
        rows = [functools.reduce(torch.add, rows[i : i + 2]) for i in range(0, len(rows), 2)]
    return functools.reduce(torch.add, rows)


class Sum(EpicFunction):
    """The operator epic::sum_ with its gradient."""

    @staticmethod
    def forward(group: Group, x: Tensor, order: int, tag: int, max_sms: int) -> Tensor:
        """Call the operator."""
        return sum_op(group, group.order_token, x, order, tag, max_sms)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Any) -> None:
        """Store the numbers that backward needs; it needs no tensor."""
        ctx.group, _, *ctx.place = inputs

    @staticmethod
    @first_order_only
    @translate_errors
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """Add the gradients over the ranks, because each rank's x is part of every rank's sum."""
        whole = sum_op(ctx.group, ctx.group.order_token_backward, gradient.contiguous(), *ctx.place)
        return None, whole, None, None, None


sum_apply = make_apply(Sum)


@translate_errors
def sum(
    group: Group,
    x: Tensor,
    *,
    tree: bool = False,
    tag: int = 0,
    max_sms: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Sum a tensor over the ranks (all-reduce), with the same bits on every rank.

    Collective: every rank of the group calls it.

    Args:
        group: The open group.
        x: float32 or float64, with the same shape and dtype on all ranks. float64 takes 4 *
            num_ranks times the memory and time of float32.
        tree: Whether ranks are added in a binary tree. num_ranks must then be a power of two. If
            False they are added in the order of ranks.
        tag: Calls with equal tags run in the same order on every rank.
        max_sms: On GPUs the largest number of SMs of this call and its gradient; 0: the group's.
        out: Tensor with the shape and dtype of x, or x itself, into which the function writes. It
            returns this tensor, without a gradient.

    Returns:
        The sum, with the shape and dtype of x.

    Raises:
        EpicArgumentError: x or out has a wrong dtype or shape, or tree is True and num_ranks is no
            power of two.
        EpicError: A rank failed, was late, or made a different call.

    Example:
        >>> import torch, epic.torch
        >>> with epic.torch.Group(num_ranks=1, max_tokens=1, max_row_bytes=32) as group:
        ...     epic.torch.sum(group, torch.ones(3)).tolist()
        [1.0, 1.0, 1.0]
    """
    if x.dtype not in (torch.float32, torch.float64):
        raise EpicArgumentError(f"x is {x.dtype}: must be float32 or float64")
    order = int(tree)
    if out is not None:
        copy_into(out, x)
        if x.dtype == torch.float64:
            return out.copy_(
                sum_op(group, group.order_token, out.view(-1), order, tag, max_sms).view(out.shape)
            )
        number = limit_number(group.number, max_sms)
        ops.sum_.default(group.order_token, out.view(-1), order, number, tag)
        note_write(out)
        return out
    flat = x.reshape(-1).contiguous()
    if needs_gradient(x):
        return sum_apply(group, flat, order, tag, max_sms).reshape(x.shape)
    return sum_op(group, group.order_token, flat, order, tag, max_sms).reshape(x.shape)


class SumGradient(EpicFunction):
    """The identity function of a weight; backward adds its gradient over the ranks."""

    @staticmethod
    def forward(_group: Group, _order: int, _tag: int, weight: Tensor) -> Tensor:
        """Return the weight unchanged."""
        return weight.view_as(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Any) -> None:
        """Store the numbers that backward needs; it needs no tensor."""
        ctx.group, ctx.order, ctx.tag, _ = inputs

    @staticmethod
    @first_order_only
    @translate_errors
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """Add the gradient over the ranks."""
        (whole,) = sum_gradients_now(ctx.group, ctx.order, ctx.tag, [gradient])
        return None, None, None, whole


sum_gradient_apply = make_apply(SumGradient)


def sum_gradients_now(group: Group, order: int, tag: int, parts: list[Tensor]) -> list[Tensor]:
    """Add gradients over the ranks in one sum. Collective.

    Args:
        group: The group.
        order: As for sum_op.
        tag: Tag of the sum.
        parts: The gradients. They are added in float64 if the first one is float64, else in
            float32.

    Returns:
        The sums, each with the shape and dtype of its gradient.
    """
    wide = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
    flat = torch.cat([part.reshape(-1).to(wide) for part in parts])
    whole = sum_op(group, group.order_token_backward, flat, order, tag).split(
        [p.numel() for p in parts]
    )
    return [w.view(p.shape).to(p.dtype) for w, p in zip(whole, parts, strict=True)]
