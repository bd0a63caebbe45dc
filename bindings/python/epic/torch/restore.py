# SPDX-License-Identifier: Apache-2.0
"""Turns a model with replaced blocks back into a model of the transformers package, and saves it.

After replace_moe the model of a rank has the experts of this rank only. This module gathers the
experts of all ranks, one rank's experts at a time. It writes them into a block of the original
class, under the original names. To save a model it also gathers what fully_shard has sharded.
"""

import contextlib
import copy
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from epic.errors import EpicUnsupportedError
from epic.options import check_kind
from epic.torch.adapters import adapt_block
from epic.torch.families import (
    FAMILIES,
    Family,
    fill_block,
    router_of,
    tensors_of,
    unwrapped,
    wrappers_of,
)
from epic.torch.groups import Group
from epic.torch.module import EXPERT_WEIGHTS, MoE
from epic.torch.pretrained import Block, allow_saving, refuse_saving
from epic.torch.state import check_sharding, experts_in
from epic.torch.sums import sum as sum_over_ranks


def replaced_blocks(model: nn.Module) -> Iterator[tuple[nn.Module, str, Block]]:
    """Yield parent, name and block of each block that replace_moe made, in the model's order."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, Block):
                yield parent, name, child


def gather_experts(group: Group, own: Tensor, keep: bool, device: Any) -> Tensor | None:
    """Return one parameter of the experts of all ranks, with unchanged bits.

    Collective. It makes one sum over the ranks for each rank, to which all other ranks add zeros. A
    float32 of the sum contains 16 bits of the parameter as an integer. Adding zeros does not change
    it.

    Args:
        group: The group.
        own: The parameter of this rank's experts [local experts, ...], in a dtype of at least 16
            bits.
        keep: Whether this rank needs the result.
        device: Where the result is stored.

    Returns:
        [num_experts, ...] in the dtype of own; None if keep is False.
    """
    local = own.detach().contiguous()
    whole = None
    if keep:
        shape = (group.num_ranks, *local.shape)
        whole = torch.empty(shape, dtype=local.dtype, device=device)
    for rank in range(group.num_ranks):
        words = local.view(-1).view(torch.int16)
        part = words.float() if rank == group.rank else torch.zeros_like(words, dtype=torch.float32)
        part = sum_over_ranks(group, part)
        if whole is not None:
            whole[rank].copy_(part.to(torch.int16).view(local.dtype).view(local.shape))
    return None if whole is None else whole.flatten(0, 1)


def complete(value: Any) -> Any:
    """Return a tensor with all its elements. Collective on its mesh if it is a DTensor."""
    if not hasattr(value, "full_tensor"):
        return value
    # With CPU offload the part is in CPU memory, where NCCL cannot read it.
    return value.detach().to(value.device_mesh.device_type).full_tensor()


@contextlib.contextmanager
def complete_parameters(model: nn.Module, blocks: list[Block], keep: bool) -> Iterator[None]:
    """Give a model complete parameters in CPU memory in place of its DTensors.

    Collective on the meshes of the DTensors.

    Args:
        model: The model.
        blocks: Blocks of the model, whose parameters stay unchanged.
        keep: Whether this rank needs the parameters. If False, the model stays unchanged.
    """
    ignored = {id(p) for block in blocks for p in block.parameters()}
    sharded = [
        (module, name, p)
        for module in model.modules()
        for name, p in module._parameters.items()
        if hasattr(p, "full_tensor") and id(p) not in ignored
    ]
    whole: dict[int, nn.Parameter] = {}  # tied parameters stay tied
    for p in {id(p): p for _, _, p in sharded}.values():
        value = complete(p)
        if keep:
            whole[id(p)] = nn.Parameter(value.cpu(), requires_grad=p.requires_grad)
    try:
        for module, name, p in sharded:
            module._parameters[name] = whole.get(id(p), p)
        yield
    finally:
        for module, name, p in sharded:
            module._parameters[name] = p


def original_block(
    block: Block, group: Group, keep: bool, device: Any, adapters_only: bool = False
) -> nn.Module | None:
    """Return a block of transformers with the current weights and adapters of all ranks.

    Collective: every rank of the group calls it.

    Args:
        block: The block that replace_moe made.
        group: The group of its layer.
        keep: Whether this rank needs the result.
        device: Where the weights are stored. None: the device of the group.
        adapters_only: Whether to gather only the adapters. All other weights then stay on "meta".

    Returns:
        The block; None if keep is False.
    """
    layer: MoE = unwrapped(block.moe)
    place = device or group.device

    def gather(name: str, value: Tensor) -> Tensor:
        value = complete(value)
        if name in EXPERT_WEIGHTS:
            full = gather_experts(group, value, keep, place)
            return value if full is None else full
        return value.detach().to(place) if keep else value

    original = copy.deepcopy(block.original[0]) if keep else None
    with torch.enable_grad():  # so that a computed tensor requires a gradient if its parameter does
        found = {name: v for name, v in layer.weights()._asdict().items() if v is not None}
    if not adapters_only:
        weights = {name: gather(name, value) for name, value in found.items()}
        if original is not None:
            convert(original, FAMILIES[block.kind], found["w_gate_up"].dtype)
            with torch.no_grad():
                fill_block(original.to_empty(device=place), weights)
    if original is not None:
        router_of(original)._forward_hooks = block.router._forward_hooks.copy()  # of transformers
        templates = block.original[0].parameters()
        for parameter, like in zip(original.parameters(), templates, strict=True):
            parameter.requires_grad_(like.requires_grad)
        freeze_as(original, FAMILIES[block.kind], found)
    adapt_block(original, block.moe, FAMILIES[block.kind], gather)
    return None if original is None else original.train(block.training)


def convert(original: nn.Module, family: Family, dtype: torch.dtype) -> None:
    """Convert a block to a dtype if the experts had another one when replace_moe was called.

    Then the caller has converted the model since. Buffers stay unchanged, as in `MoE`.
    """
    if tensors_of(original, family)["w_gate_up"][0].dtype != dtype:
        for parameter in original.parameters():
            parameter.data = parameter.data.to(dtype)


def freeze_as(original: nn.Module, family: Family, weights: Mapping[str, Tensor]) -> None:
    """Freeze the parameters of a block that the caller has frozen in the layer, or the reverse.

    weights: the tensors of the layer by their names in `MoE`.
    """
    for key, parts in tensors_of(original, family).items():
        if key == "bias":  # in `MoE` a buffer
            continue
        if any(part.requires_grad for part in parts) != weights[key].requires_grad:
            for part in parts:
                part.requires_grad_(weights[key].requires_grad)


def check_restorable(model: nn.Module, group: Group) -> None:
    """Raise an error if the blocks of a model cannot be converted to their original classes.

    Raises:
        EpicUnsupportedError: The model has no replaced block, one has an adapter that was added
            after replace_moe, or a rank has left the group.
        EpicArgumentError: fully_shard shards experts over ranks of the group.
    """
    check_kind("group", group, Group)
    lost = sorted(set(range(group.num_ranks)) - set(group.members.ranks))
    if lost:
        raise EpicUnsupportedError(
            f"group {group.name!r} has lost rank {lost[0]} and its experts: must have all "
            f"{group.num_ranks} ranks; load the last checkpoint in a new group"
        )
    blocks = list(replaced_blocks(model))
    if not blocks:
        raise EpicUnsupportedError(
            f"{type(model).__name__} has no block that replace_moe made: pass the model that was "
            "passed to epic.torch.replace_moe"
        )
    for _, name, block in blocks:
        later = {wrapper.parameter_name for wrapper in wrappers_of(block.moe)} - block.adapted
        if later:
            raise EpicUnsupportedError(
                f"{name}.moe has an adapter on {later.pop()} that replace_moe did not find: must "
                "be added before replace_moe, under the name that transformers has for it"
            )
        check_sharding(group, experts_in(unwrapped(block.moe)))


def restore_moe(model: nn.Module, group: Group, *, device: Any = None) -> int:
    """Replace the layers that replace_moe made by blocks of the transformers package, in place.

    The blocks get the current weights of all ranks, with the same bits. Collective: every rank of
    the group calls it, and afterwards has the experts of all ranks. To write a checkpoint use
    `save_pretrained`, which stores the experts of all ranks on one rank only.

    Args:
        model: A model that `replace_moe` has changed.
        group: The group of its layers.
        device: Where the restored blocks are stored. None: the device of the group.

    Returns:
        The number of blocks that were restored.

    Raises:
        EpicUnsupportedError: The model has no replaced block, fully_shard has sharded a parameter,
            a block has an adapter that was added after `replace_moe`, or a rank has left the group.
        EpicError: A rank failed, was late, or made a different call.

    Example:
        epic.torch.replace_moe(model, group)
        train(model)
        epic.torch.restore_moe(model, group, device="cpu")
        model.generate(ids)  # without EPIC
    """
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "full_tensor"):
            raise EpicUnsupportedError(
                f"{name} is sharded by fully_shard: must be complete on its rank; call restore_moe "
                "before fully_shard, or write the model with epic.torch.save_pretrained"
            )
    check_restorable(model, group)
    found = list(replaced_blocks(model))
    for parent, name, block in found:
        setattr(parent, name, original_block(block, group, True, device))
    allow_saving(model)
    return len(found)


def save_pretrained(
    model: Any, folder: str | os.PathLike[str], group: Group, **options: Any
) -> None:
    """Save a model that replace_moe has changed, as transformers would save the original model.

    transformers can load the folder without EPIC, and `from_pretrained` of EPIC can load it with
    any number of ranks. The model does not change, so training can continue. For a model of peft
    only the adapters are saved, as in peft's own save_pretrained.

    Collective: every rank of the group calls it, and returns when the folder is complete. Rank 0 of
    the group writes the folder. While it writes, its CPU memory contains the experts of all ranks.

    With data parallelism several groups have equal models. Then only the group that contains
    process 0 of torch.distributed as its rank 0 writes. The other groups do not wait for it.

    The parameters may be sharded by fully_shard over ranks that are in different groups. Then all
    ranks of all groups call it, and the CPU memory of the rank that writes contains the model.

    Args:
        model: A model that `replace_moe` has changed.
        folder: The folder, on a disk that rank 0 can write to.
        group: The group of the model's layers.
        **options: Arguments of the model's own save_pretrained, such as max_shard_size.

    Raises:
        EpicUnsupportedError: The model has no replaced block, one has an adapter that was added
            after `replace_moe`, or a rank has left the group.
        EpicArgumentError: fully_shard shards experts over ranks of the group.
        EpicError: A rank failed, was late, or made a different call.
        OSError: Rank 0 could not write the folder. All other ranks raise this error. Rank 0 raises
            the error that it got.

    Example:
        epic.torch.replace_moe(model, group)
        train(model)
        epic.torch.save_pretrained(model, "out", group)
        model = AutoModelForCausalLM.from_pretrained("out")

    """
    check_restorable(model, group)
    for module in model.modules():
        if hasattr(module, "reshard"):  # of fully_shard, which keeps some parameters after forward
            module.reshard()
    writes = group.rank == 0 and (not dist.is_initialized() or dist.get_rank() == 0)
    found = list(replaced_blocks(model))
    # A model of peft writes its adapters only.
    only = any(kind.__name__ == "PeftModel" for kind in type(model).__mro__)
    blocks = [original_block(block, group, writes, "cpu", only) for *_, block in found]
    failure: Exception | None = None
    with complete_parameters(model, [block for *_, block in found], writes):
        if writes:
            refusing = allow_saving(model)
            try:
                for (parent, name, _), original in zip(found, blocks, strict=True):
                    setattr(parent, name, original)
                model.save_pretrained(folder, **options)
            except Exception as error:  # raised after the sum below, in which the other ranks wait
                failure = error
            finally:
                for parent, name, block in found:
                    setattr(parent, name, block)
                refuse_saving(refusing)
    failed = torch.full((1,), float(failure is not None), device=group.device)
    failed = sum_over_ranks(group, failed)
    if failure is not None:
        raise failure
    if failed.item():
        raise OSError(
            f"rank 0 could not write {os.fspath(folder)}: the error of rank 0 explains why"
        )
