# SPDX-License-Identifier: Apache-2.0
"""Gradient clipping, loss scaling and label counts for models whose experts are spread over ranks.

torch's own functions see the parameters of one rank only. With expert parallelism each rank has
different experts, so torch would compute a different norm on each rank. The parameters that all
ranks share, such as the router, would then become different without an error. The functions of this
module return the same result on every rank.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from epic.errors import EpicArgumentError, EpicError
from epic.options import check_kind
from epic.torch.arguments import check_tensor
from epic.torch.groups import Group
from epic.torch.module import MoE
from epic.torch.state import adapters_of_experts, is_of_experts
from epic.torch.sums import sum as sum_over_ranks


class Sharing(NamedTuple):
    """How a parameter is divided among processes.

    Attributes:
        is_expert: True if the parameter belongs to the experts of one rank of the group. False if
            all ranks of the group have this parameter.
        shards: Pairs (mesh, dimension of the mesh). Each process of this dimension has a different
            part of the parameter. Empty: each process has the whole parameter.
    """

    is_expert: bool
    shards: tuple[tuple[Any, int], ...]


def clip_grad_norm_(
    parameters: nn.Module | Iterable[nn.Parameter] | nn.Parameter,
    max_norm: float,
    group: Group,
    norm_type: float | str = 2.0,
    *,
    mesh: Any = None,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip the gradients of a model, in place, by a total norm that is equal on all ranks.

    The total norm covers the gradients of all experts of all ranks. It counts the gradient of each
    parameter that all ranks share once, not once for each rank. Replicas of a logical expert count
    one by one, so the norm depends on their number. As in torch, every gradient is multiplied by
    min(1, max_norm / (total norm + 1e-6)).

    Collective: every rank of the group calls it, after backward and after sum_gradients().

    Args:
        parameters: A model, its parameters, or one parameter. In a model the parameters of experts
            are those of its `MoE` layers, and the peft adapters on them. In a list they are the
            parameters whose attribute allreduce is False. Pass the model, not a list, if it is
            under fully_shard, because fully_shard makes parameters without this attribute.
        max_norm: The largest total norm after clipping; 0 or more.
        group: The group of the layers.
        norm_type: p of the p-norm, above 0; float("inf") or "inf" for the largest absolute value.
        mesh: A one-dimensional DeviceMesh of tensor parallelism, for parameters that are plain
            tensors. Each of its processes has a different part of a parameter with the attribute
            tensor_model_parallel = True. All other plain parameters are equal on its processes.
            DTensors do not need this argument. None: no plain tensor is divided.
        error_if_nonfinite: Whether a total norm that is NaN or infinite is an error on all ranks.
            The host then waits for the device.
        foreach: Whether to use torch's functions on lists of tensors, as in
            torch.nn.utils.clip_grad_norm_. None: on GPUs only.

    Returns:
        The total norm before clipping, a float32 scalar on the group's device, with the same bits
        on every rank of the group.

    Raises:
        EpicArgumentError: max_norm is negative or NaN, or norm_type is not above 0.
        EpicError: The total norm is NaN or infinite, and error_if_nonfinite is True.

    Example:
        >>> loss.backward()
        >>> layer.sum_gradients()
        >>> epic.torch.clip_grad_norm_(model, 1.0, group)
        >>> optimizer.step()

    """
    check_kind("group", group, Group)
    max_norm = as_number("max_norm", max_norm)
    norm_type = as_number("norm_type", norm_type)  # "inf" is a number, as for torch
    if not max_norm >= 0:
        raise EpicArgumentError(f"max_norm is {max_norm}: must be 0 or more")
    if not norm_type > 0:
        raise EpicArgumentError(f"norm_type is {norm_type}: must be above 0")
    with torch.no_grad():
        parts = sort_gradients(parameters, mesh)
        total = total_norm(parts, group, norm_type, foreach)
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


def as_number(name: str, value: Any) -> float:
    """Return the value as a float; it may be infinite or NaN. name: its name in the error."""
    try:
        return float(value)
    except (RuntimeError, TypeError, ValueError):
        raise EpicArgumentError(f"{name} is {value!r}: must be a number") from None


def list_parameters(
    parameters: nn.Module | Iterable[nn.Parameter] | nn.Parameter,
) -> tuple[list[nn.Parameter], set[int]]:
    """Return the parameters, each once, and the id() of each parameter of experts."""
    experts: set[int] = set()
    if isinstance(parameters, nn.Module):
        for module in parameters.modules():
            if isinstance(module, MoE):
                named = module.named_parameters()
                experts.update(id(p) for name, p in named if is_of_experts(name))
            experts.update(map(id, adapters_of_experts(module)))
        found = list(parameters.parameters())
    else:
        is_one = isinstance(parameters, Tensor) or not isinstance(parameters, Iterable)
        given: Iterable[Any] = [parameters] if is_one else parameters
        found = list({id(p): p for p in given}.values())
        for parameter in found:
            check_kind("parameters", parameter, Tensor)
    experts.update(id(p) for p in found if getattr(p, "allreduce", True) is False)
    return found, experts


def sort_gradients(parameters: Any, mesh: Any) -> dict[Sharing, list[Tensor]]:
    """Return this process's parts of the gradients, as one list for each kind of division.

    total_norm makes collective calls for each key. So all ranks must have the same keys in the same
    order. A rank that has no gradient for a key has an empty list.
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
        # Under fully_shard a process may have no element of a small parameter.
        if gradient.numel():
            gradients.append(gradient)
    return parts


def shards_of(parameter: Any, mesh: Any) -> tuple[tuple[Any, int], ...]:
    """Return the mesh dimensions over which a parameter is divided, as in Sharing.shards.

    mesh: as for clip_grad_norm_.
    """
    if hasattr(parameter, "placements"):
        over = parameter.device_mesh
        return tuple((over, i) for i, p in enumerate(parameter.placements) if not p.is_replicate())
    if mesh is not None and getattr(parameter, "tensor_model_parallel", False):
        return ((mesh, 0),)
    return ()


def total_norm(
    parts: dict[Sharing, list[Tensor]], group: Group, p: float, foreach: bool | None
) -> Tensor:
    """Return the norm of the whole model, [] float32, with the same bits on every rank.

    Each rank adds the p-th powers of the norms of its parts in float64, in two sums: one for the
    experts, one for shared parameters. It writes the two sums into its own row of a table that is
    otherwise zero. So the sum of the tables over the ranks is exact, and contains the rows of all
    ranks. All ranks then add these rows in the same order.

    Args:
        parts: The result of sort_gradients.
        group: The group of the layers.
        p: The exponent of the norm; infinity: the largest absolute value.
        foreach: As for clip_grad_norm_.
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
    # All ranks use the largest sum for the shared parameters. So the result is equal on all ranks
    # even if these gradients are not. The rows of ranks that have left the group are zero.
    experts, shared = rows[:, 0], rows[:, 1].max()
    if largest:
        return torch.maximum(experts.max(), shared).float()
    return (experts.sum() + shared).pow(1 / p).float()


def scale_gradients(gradients: list[Tensor], scale: Tensor, foreach: bool | None) -> None:
    """Multiply gradients by the scalar tensor `scale`, in place."""
    by_place: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        by_place.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, _), some in by_place.items():
        factor = scale.to(device)
        if foreach or (foreach is None and device.type == "cuda"):
            # A private function of torch, which torch.nn.utils.clip_grad_norm_ also calls. It
            # launches few kernels for all gradients, not one for each.
            torch._foreach_mul_(some, factor)
        else:
            for gradient in some:
                gradient.mul_(factor)


class GradScaler(torch.amp.GradScaler):
    """A torch.amp.GradScaler that skips a step on all ranks together.

    If the gradients of any rank of the group overflow, this scaler skips the step on all of them,
    and update() lowers the scale on all of them. torch's scaler would skip the step only on ranks
    whose own gradients overflow, and the gradients of experts differ between ranks.

    Every rank calls unscale_() and step() in the same order.

    Args:
        group: The group of the layers.
        device: Device type, as in torch.amp.GradScaler. None: that of the group.
        **options: Other arguments of torch.amp.GradScaler, such as init_scale.

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
        check_kind("group", group, Group)
        super().__init__(device or group.device.type, **options)
        self.group = group

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        """Divide the gradients by the scale, and return whether any rank found an overflow.

        This overrides a private method of torch, because torch has no public one for it. Both
        unscale_() and step() find overflows through this method. tests/torch/test_gradients.py
        checks it with torch 2.9 and 2.15.

        Returns:
            For each device a float32 tensor with one element: 1 if any rank found an overflow, else
            0. Fused optimizers skip a step only if it is exactly 1.
        """
        found = super()._unscale_grads_(*args, **kwargs)
        some = torch.zeros(1, device=self.group.device)
        for value in found.values():
            some += value.to(some.device)
        some = sum_over_ranks(self.group, some).clamp(max=1)
        for value in found.values():
            value.copy_(some.reshape(value.shape))
        # A rank without gradients found nothing, but must skip the step with the others.
        return found or {self.group.device: some.reshape(())}


def count_labels(
    labels: Tensor, group: Group, *, ignore_index: int = -100, process_group: Any = None
) -> Tensor:
    """Count the labels of all ranks.

    If each rank divides the sum of its losses by this number, the losses of all ranks add up to the
    mean over all labels. Do not divide by the number of labels of one rank: a label on a rank with
    few labels would then count more than one on a rank with many.

    Collective: every rank of the group, and of process_group, calls it.

    Args:
        labels: Labels of this rank, of any integer dtype and shape.
        group: The group of the layers.
        ignore_index: The label of positions that do not count, as in cross_entropy.
        process_group: ProcessGroup of data parallelism: the counts of its ranks, each of another
            group, are added too. None: there are no other groups.

    Returns:
        The number of labels, a float64 scalar on the group's device, equal on all ranks.

    Example:
        >>> losses = cross_entropy(logits, labels, reduction="sum")
        >>> loss = losses / epic.torch.count_labels(labels, group)

    """
    check_tensor("labels", labels)
    check_kind("group", group, Group)
    mine = (labels != ignore_index).sum().to(group.device, torch.float64).reshape(1)
    total = sum_over_ranks(group, mine)
    if process_group is not None:
        dist.all_reduce(total, group=process_group)
    return total[0]
