# SPDX-License-Identifier: Apache-2.0
"""Sums over the replicas of an expert.

If the gradients of all replicas are added, weights that are equal at the start stay equal.
"""

from typing import Any

import torch
from torch import Tensor

from epic.errors import EpicArgumentError, EpicUnsupportedError
from epic.torch.arguments import (
    EpicFunction,
    check_floats,
    first_order_only,
    make_apply,
    mark_no_offload,
    needs_gradient,
)
from epic.torch.groups import Group
from epic.torch.ops import copy_into, note_write, translate_errors
from epic.torch.plans import Plan, PlanSpec

ops = torch.ops.epic


def add_replicas(order_token: Tensor, data: Tensor, x: Tensor, group: Group, tag: int) -> Tensor:
    """Return x [local experts, ...] in float32, with rows added over replicas. Collective.

    Args:
        order_token: The order token of the group for this call.
        data: The bytes of a plan.
        x: The rows.
        group: The group.
        tag: Tag of the sum.
    """
    out = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    rows = out.view(out.shape[0], -1)
    ops.sum_replicas_.default(order_token, data, rows, group.number, tag)
    return rows.view(out.shape)


class SumReplicas(EpicFunction):
    """The operator epic::sum_replicas_ with its gradient."""

    @staticmethod
    def forward(spec: PlanSpec, data: Tensor, x: Tensor) -> Tensor:
        """Call the operator."""
        return add_replicas(spec.group.order_token, data, x, spec.group, spec.tag)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Any) -> None:
        """Save the plan, which is all that backward needs."""
        ctx.spec, data, _ = inputs
        mark_no_offload(data)
        ctx.save_for_backward(data)

    @staticmethod
    @first_order_only
    @translate_errors
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """Add the gradients over replicas, because each replica's x is part of every sum."""
        (data,) = ctx.saved_tensors
        group, tag = ctx.spec.group, ctx.spec.tag
        whole = add_replicas(group.order_token_backward, data, gradient, group, tag)
        return None, None, whole.to(gradient.dtype)


sum_replicas_apply = make_apply(SumReplicas)


class Tied(EpicFunction):
    """The identity function of a weight; backward adds its gradient over replicas."""

    @staticmethod
    def forward(_way: PlanSpec, _data: Tensor, weight: Tensor) -> Tensor:
        """Return the weight unchanged."""
        return weight.view_as(weight)

    setup_context = SumReplicas.setup_context
    backward = SumReplicas.backward


tied_apply = make_apply(Tied)


def check_local_rows(plan: Plan, name: str, x: Tensor) -> None:
    """Raise an error if x does not have one row for each expert of this rank.

    name: the name of x in the error.
    """
    local = plan.spec.num_local
    if x.dim() < 1 or x.shape[0] != local:
        raise EpicArgumentError(
            f"{name} has the shape {list(x.shape)}: must be [{local}, ...], with one row for each "
            "local expert"
        )
    check_type(name, x)


def check_type(name: str, x: Tensor) -> None:
    """Raise an error if the core cannot add the dtype of x over replicas."""
    check_floats(name, x)
    if x.dtype == torch.float64:
        raise EpicUnsupportedError(
            f"{name} is float64: not supported with replicas, because their gradients are added in "
            "float32; train without replicas, or in float32"
        )


@translate_errors
def sum_replicas(plan: Plan, x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Add the rows of all replicas of each logical expert; each replica gets the sum.

    Collective: every rank of the group calls it. Use it for gradients that were computed without
    `sum_replica_grads`, for example to add them once after several backward passes.

    Args:
        plan: A plan of a layer with num_logical.
        x: [local experts, ...] float32: one row for each expert of this rank.
        out: Tensor with the shape of x, or x itself, into which the function writes. It returns
            this tensor, without a gradient.

    Returns:
        The sums, with the shape of x. For a layer without replicas x itself.

    Raises:
        EpicArgumentError: x has a wrong shape or dtype.
        EpicError: A rank failed, was late, or made a different call.

    Example:
        >>> import torch, epic.torch
        >>> layer = epic.torch.Layer(num_experts=2, top_k=1, num_logical=1)
        >>> ids, x = torch.zeros(2, 1, dtype=torch.int32), torch.tensor([[1.0], [2.0]])
        >>> with epic.torch.Group(num_ranks=1, max_tokens=2, max_row_bytes=32) as group:
        ...     plan = epic.torch.plan(group, layer, ids, logical_of_expert=[0, 0])
        ...     epic.torch.sum_replicas(plan, x).tolist()
        [[3.0], [3.0]]
    """
    check_local_rows(plan, "x", x)
    if x.dtype != torch.float32:
        raise EpicArgumentError(f"x is {x.dtype}: must be float32")
    if out is not None:
        copy_into(out, x)
    if not plan.spec.num_logical:
        return x if out is None else out
    spec, group = plan.spec, plan.spec.group
    if out is not None:
        rows = out.view(out.shape[0], -1)
        ops.sum_replicas_.default(group.order_token, plan.bytes, rows, group.number, spec.tag)
        note_write(out)
        return out
    if needs_gradient(x):
        return sum_replicas_apply(spec, plan.bytes, x)
    return add_replicas(group.order_token, plan.bytes, x, group, spec.tag)


@translate_errors
def sum_replica_grads(plan: Plan, weight: Tensor | None) -> Tensor | None:
    """Return a weight for which backward adds the gradient over the replicas of each expert.

    The sum in backward is collective. `moe` calls this function itself. Call it if your program has
    its own experts.

    Args:
        plan: A plan of a layer with num_logical.
        weight: [local experts, ...] in float32, bfloat16 or float16, or None.

    Returns:
        A tensor equal to the weight, to use in its place. None for None.

    Raises:
        EpicArgumentError: The weight has a wrong shape or dtype.
        EpicUnsupportedError: The weight is float64.

    Example:
        >>> import torch, epic.torch
        >>> layer = epic.torch.Layer(num_experts=2, top_k=1, num_logical=1)
        >>> ids, w = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1, requires_grad=True)
        >>> with epic.torch.Group(num_ranks=1, max_tokens=2, max_row_bytes=32) as group:
        ...     plan = epic.torch.plan(group, layer, ids, logical_of_expert=[0, 0])
        ...     out = epic.torch.sum_replica_grads(plan, w) * torch.tensor([[1.0], [2.0]])
        ...     out.sum().backward()
        >>> w.grad.tolist()
        [[3.0], [3.0]]
    """
    if weight is None or not plan.spec.num_logical:
        return weight
    check_local_rows(plan, "weight", weight)
    found = tied_apply(plan.spec, plan.bytes, weight)
    mark_no_offload(found)  # it has the memory of the parameter, which stays on the GPU
    return found
