# SPDX-License-Identifier: Apache-2.0
"""Gradient clipping, loss scaling and label counts for models whose experts are spread over ranks.

torch's own functions see one rank's parameters only.  With expert parallelism each rank holds
other experts, so each rank would compute another norm, and the parameters that all ranks share
would drift apart without an error.  The functions here give every rank the same result.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from epic.errors import EpicArgumentError, EpicError
from epic.torch.groups import Group
from epic.torch.module import MoE
from epic.torch.state import adapters_of_experts, is_of_experts
from epic.torch.sums import sum as sum_over_ranks


class Sharing(NamedTuple):
    """How a parameter is divided among processes.

    is_expert: each rank of the group has its own.  shards: pairs (mesh, dimension) over which
    every process holds a part of the parameter.
    """

    is_expert: bool
    shards: tuple[tuple[Any, int], ...]


def clip_grad_norm_(
    parameters: nn.Module | Iterable[nn.Parameter] | nn.Parameter,
    max_norm: float,
    group: Group,
    norm_type: float = 2.0,
    *,
    mesh: Any = None,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip the gradients of a model to a total norm that is equal on all ranks.

    The total norm is that of the whole model: the gradients of the experts of all ranks, and once
    the gradients of every parameter that all ranks share.  Call it on every rank, after backward
    and after sum_gradients().  With a norm that is already at most max_norm the gradients stay
    unchanged.

    Args:
        parameters: A model, or its parameters.  In a model the experts are those of its MoE
            layers.  In a list they are the parameters with the attribute allreduce = False; pass
            the model if it is under fully_shard, which makes parameters without the attribute.
        max_norm: The largest total norm that is left unchanged.
        group: The group of the layers.
        norm_type: p of the p-norm; float("inf") for the largest absolute value.
        mesh: A one-dimensional mesh of tensor parallelism, for parameters that are plain tensors.
            Those with the attribute tensor_model_parallel = True are divided over it, and the
            others are equal on its processes.  DTensors carry their own mesh.
        error_if_nonfinite: Raise an error on all ranks if the total norm is NaN or infinite.  It
            makes the host wait for the device.
        foreach: As in torch.nn.utils.clip_grad_norm_.

    Returns:
        The total norm before clipping, a float32 scalar on the group's device, with the same bits
        on every rank of the group.

    Raises:
        EpicArgumentError: max_norm or norm_type is negative or NaN.
        EpicError: The total norm is not finite, with error_if_nonfinite.

    Example:
        >>> loss.backward()
        >>> layer.sum_gradients()
        >>> epic.torch.clip_grad_norm_(model, 1.0, group)
        >>> optimizer.step()

    """
    if not max_norm >= 0:
        raise EpicArgumentError(f"max_norm is {max_norm}: must be 0 or more")
    if not norm_type > 0:
        raise EpicArgumentError(f"norm_type is {norm_type}: must be above 0")
    with torch.no_grad():
        parts = sort_gradients(parameters, mesh)
        total = total_norm(parts, group, float(norm_type), foreach)
        if error_if_nonfinite and not total.isfinite():
            raise EpicError(
                "EPIC_EINVAL",
                f"the total norm of the gradients is {total.item()} and cannot be clipped: look "
                "for NaN and infinities in the loss, or pass error_if_nonfinite=False",
            )
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for gradients in parts.values():
            scale_gradients(gradients, scale, foreach)
    return total


def list_parameters(
    parameters: nn.Module | Iterable[nn.Parameter] | nn.Parameter,
) -> tuple[list[nn.Parameter], set[int]]:
    """Return the parameters, each once, and the identities of those that belong to one rank."""
    experts: set[int] = set()
    if isinstance(parameters, nn.Module):
        for module in parameters.modules():
            if isinstance(module, MoE):
                named = module.named_parameters()
                experts.update(id(p) for name, p in named if is_of_experts(name))
            experts.update(map(id, adapters_of_experts(module)))
        found = list(parameters.parameters())
    else:
        given = [parameters] if isinstance(parameters, Tensor) else parameters
        found = list({id(p): p for p in given}.values())
    experts.update(id(p) for p in found if getattr(p, "allreduce", True) is False)
    return found, experts


def sort_gradients(parameters: Any, mesh: Any) -> dict[Sharing, list[Tensor]]:
    """Return this process's part of each gradient, by how the parameter is divided.

    A list may be empty: every rank has the same keys in the same order, whatever gradients it has,
    because each key stands for collective calls.
    """
    found, experts = list_parameters(parameters)
    parts: dict[Sharing, list[Tensor]] = {}
    for parameter in found:
        if not parameter.requires_grad:
            continue
        sharing = Sharing(id(parameter) in experts, shards_of(parameter, mesh))
        gradients = parts.setdefault(sharing, [])
        gradient: Any = parameter.grad
        if gradient is None:
            continue
        if hasattr(gradient, "to_local"):
            placements = getattr(parameter, "placements", gradient.placements)
            if tuple(gradient.placements) != tuple(placements):
                parameter.grad = gradient = gradient.redistribute(placements=placements)
            gradient = gradient.to_local()
        if gradient.numel():  # under fully_shard a process may have no element of a small parameter
            gradients.append(gradient)
    return parts


def shards_of(parameter: Any, mesh: Any) -> tuple[tuple[Any, int], ...]:
    """Return the mesh dimensions over which a parameter is divided."""
    if hasattr(parameter, "placements"):
        over = parameter.device_mesh
        return tuple((over, i) for i, p in enumerate(parameter.placements) if p.is_shard())
    if mesh is not None and getattr(parameter, "tensor_model_parallel", False):
        return ((mesh, 0),)
    return ()


def total_norm(
    parts: dict[Sharing, list[Tensor]], group: Group, p: float, foreach: bool | None
) -> Tensor:
    """Return the norm of the whole model from the parts of all processes, [] float32.

    Norms of parts are added as p-th powers in float64.  Each rank writes its two sums into a row of
    its own, so that the sum over the ranks is exact; all ranks then add the rows in one order.
    """
    largest = p == float("inf")
    rows = torch.zeros(group.num_ranks, 2, dtype=torch.float64, device=group.device)
    for sharing, gradients in parts.items():
        norm = torch.nn.utils.get_total_norm(gradients, p, foreach=foreach)
        power = norm.to(group.device, torch.float64)
        if not largest:
            power = power**p
        for mesh, dimension in sharing.shards:
            operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            dist.all_reduce(power, operation, group=mesh.get_group(dimension))
        cell = rows[group.rank, 0 if sharing.is_expert else 1]
        cell.copy_(torch.maximum(cell, power) if largest else cell + power)
    rows = sum_over_ranks(group, rows)
    # Gradients that all ranks share count with rank 0's values, so the result is equal on all ranks
    # even if those gradients differ.
    experts, shared = rows[:, 0], rows[0, 1]
    if largest:
        return torch.maximum(experts.max(), shared).float()
    return (experts.sum() + shared).pow(1 / p).float()


def scale_gradients(gradients: list[Tensor], scale: Tensor, foreach: bool | None) -> None:
    """Multiply gradients by a scalar tensor, in place."""
    by_place: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        by_place.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, _), some in by_place.items():
        factor = scale.to(device)
        if foreach or (foreach is None and device.type == "cuda"):
            # One launch for all gradients instead of one for each. torch.nn.utils calls the same
            # function.
            torch._foreach_mul_(some, factor)
        else:
            for gradient in some:
                gradient.mul_(factor)


class GradScaler(torch.amp.GradScaler):
    """A torch.amp.GradScaler that skips a step on all ranks together.

    torch's scaler skips the step of a rank whose gradients overflowed.  The gradients of experts
    differ between ranks, so some ranks would skip a step that others make.  This one skips it on
    every rank of the group if any rank found an overflow, and then lowers the scale on every rank.

    Args:
        group: The group of the layers.
        device: As in torch.amp.GradScaler; default: that of the group.
        **options: Arguments of torch.amp.GradScaler, such as init_scale.

    Example:
        >>> scaler = epic.torch.GradScaler(group)
        >>> scaler.scale(loss).backward()
        >>> layer.sum_gradients()
        >>> scaler.unscale_(optimizer)
        >>> epic.torch.clip_grad_norm_(model, 1.0, group)
        >>> scaler.step(optimizer)
        >>> scaler.update()

    """

    def __init__(self, group: Group, device: str | None = None, **options: Any) -> None:
        super().__init__(device or group.device.type, **options)
        self.group = group

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        """Unscale, and report an overflow of any rank.

        A private method of torch (2.9 to 2.15, tests/torch/test_gradients.py): unscale_() and
        step() both look for overflows through it, and there is no public place for this.
        """
        found = super()._unscale_grads_(*args, **kwargs)
        some = torch.zeros(1, device=self.group.device)
        for value in found.values():
            some += value.to(some.device)
        some = sum_over_ranks(self.group, some)
        for value in found.values():
            value.copy_(some.reshape(value.shape))
        return found or {self.group.device: some.reshape(())}


def count_labels(
    labels: Tensor, group: Group, *, ignore_index: int = -100, process_group: Any = None
) -> Tensor:
    """Count the labels of all ranks, by which each rank divides its sum of losses.

    Ranks may have different numbers of labels.  A mean over each rank's own labels would weigh
    the labels of some ranks more than those of others.

    Args:
        labels: This rank's labels, of any integer dtype and shape.
        group: The group of the layers.
        ignore_index: The label of positions that have none, as in cross_entropy.
        process_group: A ProcessGroup of data parallelism over other ranks, whose labels count too.

    Returns:
        The number of labels, a float64 scalar on the group's device, equal on all ranks.

    Example:
        >>> losses = cross_entropy(logits, labels, reduction="sum")
        >>> loss = losses / epic.torch.count_labels(labels, group)

    """
    mine = (labels != ignore_index).sum().to(group.device, torch.float64).reshape(1)
    total = sum_over_ranks(group, mine)
    if process_group is not None:
        dist.all_reduce(total, group=process_group)
    return total[0]
