# SPDX-License-Identifier: Apache-2.0
"""Replaces Mixture-of-Experts blocks of the transformers package (release 5) by epic.torch.MoE."""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from epic.errors import EpicError, EpicUnsupportedError
from epic.options import check_kind
from epic.torch.adapters import adapt_layer, adapters_of
from epic.torch.arguments import ROW_TYPES
from epic.torch.experts import GroupedMm
from epic.torch.families import (
    FAMILIES,
    Found,
    family_of,
    read_options,
    read_tensor,
    router_of,
    tensors_of,
    unwrapped,
    wrappers_of,
)
from epic.torch.groups import Group
from epic.torch.module import EXPERT_WEIGHTS, MoE, add_gradients
from epic.torch.moe import logits_of
from epic.torch.state import adapters_of_experts, check_sharding, is_of_experts


class Block(nn.Module):
    """The module that replaces a block: a `MoE` that is called like the original block.

    Attributes:
        kind: Name of the original block's class.
        moe: The layer. If the original had adapters of peft, it is wrapped in the same adapters.
        adapted: Names of the parameters of the layer that have adapters.
        original: A tuple with a copy of the original block, whose tensors are on "meta". The tuple
            hides the copy from torch, which would list its parameters as those of the model.
        router: A router without parameters. It is called with the router logits, so that
            transformers can record them.
    """

    def __init__(self, moe: MoE, original: nn.Module) -> None:
        super().__init__()
        self.kind = type(original).__name__
        self.moe = adapt_layer(moe, original, FAMILIES[self.kind], moe.group)
        self.adapted = {wrapper.parameter_name for wrapper in wrappers_of(self.moe)}
        self.original: tuple[Any] = (without_memory(original),)
        self.router = make_recorder(self.original[0])
        moe.register_forward_hook(self.record_logits)
        self.jitter_noise = float(getattr(original, "jitter_noise", 0.0))  # of Mixtral

    def forward(self, hidden_states: Tensor) -> Any:
        """Return what the replaced block would return."""
        family = FAMILIES[self.kind]
        if self.training and family.samples:
            raise EpicUnsupportedError(
                f"{self.kind} is in training mode: must be in evaluation mode, because in training "
                "its router draws experts at random; call model.eval(), which computes gradients "
                "too"
            )
        if self.training and self.jitter_noise > 0:
            noise = torch.empty_like(hidden_states)
            hidden_states = hidden_states * noise.uniform_(
                1.0 - self.jitter_noise, 1.0 + self.jitter_noise
            )
        out, _ = self.moe(hidden_states)
        return (out, None) if family.gives_pair else out

    def record_logits(self, layer: Any, args: tuple[Any, ...], _: Any) -> None:
        """Pass the router logits to the hooks of transformers, if there are any.

        It is a forward hook of the layer, because adapters are active only inside of the wrappers
        around the layer. transformers adds its own hooks to the router when a caller first requests
        output_router_logits or another recorded output.
        """
        if self.router._forward_hooks:
            rows = args[0].reshape(-1, args[0].shape[-1])
            self.router(logits_of(rows, layer.weights()))


def make_recorder(block: nn.Module) -> nn.Module:
    """Return a copy of a block's router without parameters, whose forward returns its input twice.

    transformers records a result of each module of the router's class. For some classes this is the
    first result, for others the second.
    """
    router = copy.deepcopy(router_of(block))
    for name, _ in list(router.named_parameters(recurse=False)):
        router.register_parameter(name, None)
    for name, _ in list(router.named_buffers(recurse=False)):
        router.register_buffer(name, None)
    for name, _ in list(router.named_children()):
        setattr(router, name, None)
    router.forward = returns_twice
    return router


def returns_twice(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits twice."""
    return logits, logits


def without_memory(block: nn.Module) -> nn.Module:
    """Return a copy of a block without its adapters, with all tensors on the device "meta"."""
    tensors: Iterator[Any] = (*block.parameters(), *block.buffers()).__iter__()
    empty = {
        id(t): nn.Parameter(t.detach().to("meta"), requires_grad=t.requires_grad)
        if isinstance(t, nn.Parameter)
        else t.to("meta")
        for t in tensors
    }
    new_block = copy.deepcopy(block, empty)
    for parent in list(new_block.modules()):
        for name, child in parent.named_children():
            if wrappers_of(child):
                setattr(parent, name, unwrapped(child))
    return new_block


def read_block(block: nn.Module) -> Found:
    """Return options and weights of a block, without copies where possible.

    Raises:
        EpicUnsupportedError: The class is not supported, the parameters have another layout or
            names, or the experts are quantized.
    """
    family = family_of(block)
    try:
        tensors = tensors_of(block, family)
        # With gradients enabled, a tensor that is computed from a parameter requires a gradient if
        # and only if the parameter does. make_layer freezes parameters by this.
        with torch.enable_grad():
            found = {key: read_tensor(family, key, parts) for key, parts in tensors.items()}
        options = read_options(block, family, found)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, EpicError):
            raise
        raise other_layout(block, f"{type(error).__name__}: {error}") from error
    up = found["w_gate_up"]
    if up.dtype not in ROW_TYPES:
        raise EpicUnsupportedError(
            f"{type(block).__name__} has experts of {up.dtype}: must not be quantized; load the "
            "model without quantization"
        )
    mapped_ids = {id(part) for parts in tensors.values() for part in parts}
    for wrapper in adapters_of(block, family).values():
        factors = (*wrapper.lora_A.parameters(), *wrapper.lora_B.parameters())
        mapped_ids.update(map(id, factors))
    more = [name for name, p in block.named_parameters() if id(p) not in mapped_ids]
    if more:
        raise other_layout(block, f"it also has the parameter {more[0]}")
    return options, found


def check_block(block: nn.Module, group: Group) -> None:
    """Raise an error if a block, or its router on the group's device, is not supported."""
    check_kind("group", group, Group)
    options, _ = read_block(block)
    if group.on_gpu and options.router.weight_rule == "sparsemixer":
        raise EpicUnsupportedError(
            f"{type(block).__name__} is not supported on GPUs, which have no SparseMixer: use a "
            "group on CPUs"
        )


def other_layout(block: nn.Module, why: str) -> EpicUnsupportedError:
    """Return the error for a supported class whose parameters differ from those of transformers 5.

    why: the difference, for the text.
    """
    kind = type(block)
    return EpicUnsupportedError(
        f"{kind.__name__} of {kind.__module__} does not have the parameters of transformers 5 "
        f"({why}): use the class of the transformers package, without adapters"
    )


def from_block(
    block: nn.Module,
    group: Group,
    *,
    grouped_mm: GroupedMm | None = None,
    tag: int = 0,
    invariant: bool = False,
) -> MoE:
    """Make a layer from a block of transformers, with copies of its weights.

    The layer has the experts of this rank only. The block does not change. To replace all blocks of
    a model use `replace_moe`.

    Args:
        block: A block of transformers 5. The guide "transformers, Megatron-Core and torchtitan"
            lists the supported classes.
        group: The open group.
        grouped_mm: As for `MoE`.
        tag: As for `MoE`.
        invariant: As for `replace_moe`.

    Returns:
        The layer, on the group's device. Frozen parameters stay frozen.

    Raises:
        EpicUnsupportedError: The class is not supported, its parameters have another layout or are
            quantized, or it has adapters.
        EpicArgumentError: num_ranks of the group does not divide the number of experts.

    Example:
        block = model.model.layers[0].mlp  # for example a Qwen3MoeSparseMoeBlock
        layer = epic.torch.from_block(block, group)
    """
    adapted = [module.parameter_name for module in block.modules() if wrappers_of(module)]
    if adapted:
        raise EpicUnsupportedError(
            f"{type(block).__name__} has adapters of peft on {', '.join(adapted)}: must have none; "
            "call replace_moe on the whole model, or merge the adapters first"
        )
    check_block(block, group)
    return make_layer(block, group, grouped_mm, tag, invariant=invariant)


def make_layer(
    block: nn.Module,
    group: Group,
    grouped_mm: GroupedMm | None,
    tag: int = 0,
    fill: Callable[[str, Tensor], None] | None = None,
    invariant: bool = False,
) -> MoE:
    """Return the layer that from_block describes, without the adapters of the block.

    Args:
        block: The block.
        group: The open group.
        grouped_mm: As for `MoE`.
        tag: As for `MoE`.
        fill: A function (name, tensor) that writes one parameter of this rank's experts into the
            tensor. The experts in the block then need no values of their own. None: the experts are
            copied from the block.
        invariant: As for `replace_moe`.
    """
    options, found = read_block(block)
    options = options.as_invariant() if invariant else options
    up = found["w_gate_up"]
    with torch.no_grad():
        layer = MoE(
            group,
            options,
            dtype=up.dtype,
            device="meta",
            gate_bias="b_gate" in found,
            expert_biases="b_down" in found,
            shared_gate="w_shared_gate" in found,
            bias_rate=0.0 if "bias" in found else None,
            grouped_mm=grouped_mm,
            tag=tag,
        ).to_empty(device=group.device)
        own = slice(
            group.rank * layer.num_local_experts, (group.rank + 1) * layer.num_local_experts
        )
        for key, value in found.items():
            parameter = getattr(layer, key)
            value_here = value[own] if key in EXPERT_WEIGHTS else value
            if parameter.shape != value_here.shape:
                raise other_layout(block, f"{key} has the shape {list(value.shape)}")
            if fill is not None and key in EXPERT_WEIGHTS:
                fill(key, parameter)
            else:
                parameter.copy_(value_here)
            if key != "bias":  # the bias is a buffer, without a gradient
                parameter.requires_grad_(value.requires_grad)
        if layer.load is not None:
            layer.load.zero_()
    return layer.train(block.training)


def blocks_of(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield parent, name and block of each Mixture-of-Experts block, supported or not."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if is_block(child):
                yield parent, name, child


def is_block(module: nn.Module) -> bool:
    """Return whether a module is, or looks like, a Mixture-of-Experts block of transformers.

    It looks like one if it has a child "experts", or if its class has such a name. Layers and
    blocks of EPIC do not count.
    """
    kind = type(module).__name__
    if isinstance(module, MoE | Block) or kind in FAMILIES:
        return kind in FAMILIES
    has_experts = any(name == "experts" for name, _ in module.named_children())
    return has_experts or kind.endswith(("Moe", "MoE", "MoeBlock", "MoEBlock"))


def find_blocks(model: nn.Module, group: Group) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return parent, name and block of each block of a model.

    Raises:
        EpicUnsupportedError: The model has no block, or one that is not supported.
    """
    check_kind("model", model, nn.Module)
    found = list(blocks_of(model))
    other = sorted({type(block).__name__ for *_, block in found} - FAMILIES.keys())
    if other or not found:
        what = ", ".join(other) or "no Mixture-of-Experts block"
        raise EpicUnsupportedError(
            f"{type(model).__name__} has {what}: must have blocks of {', '.join(FAMILIES)}"
        )
    for *_, block in found:
        check_block(block, group)
    return found


def replace_moe(
    model: nn.Module,
    group: Group,
    *,
    grouped_mm: GroupedMm | None = None,
    invariant: bool = False,
) -> int:
    """Replace all Mixture-of-Experts blocks of a loaded transformers model, in place.

    Every rank calls it with the same model. Afterwards the model of a rank has the experts of this
    rank only. If the model has no block, or a block is not supported, it stays unchanged.

    Args:
        model: The model.
        group: The open group.
        grouped_mm: As for `MoE`.
        invariant: Whether the bits of a token in each layer depend only on the token, as with
            `Moe.invariant`.

    Returns:
        The number of blocks that were replaced.

    Raises:
        EpicUnsupportedError: A block is not supported, or the model has no block.
        EpicArgumentError: num_ranks of the group does not divide the number of experts.

    Example:
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
        epic.torch.replace_moe(model, group)
        model(ids, labels=ids).loss.backward()
        epic.torch.sum_gradients(model, group)
    """
    found = find_blocks(model, group)
    for parent, name, block in found:
        new_block = Block(make_layer(block, group, grouped_mm, invariant=invariant), block)
        setattr(parent, name, new_block.train(block.training))
    refuse_saving(saving_models(model))
    return len(found)


def refuse_to_save(*_: Any, **__: Any) -> None:
    """Take the place of save_pretrained in a model that replace_moe has changed.

    Raises:
        EpicUnsupportedError: Always. transformers would write the experts of one rank only, under
            names that it does not know. It would load such a folder without an error, with random
            experts and routers.
    """
    raise EpicUnsupportedError(
        "save_pretrained of a model with blocks of EPIC would write the experts of one rank only: "
        "call epic.torch.save_pretrained(model, folder, group) on every rank"
    )


def saving_models(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that have save_pretrained: the model, and models in it."""
    return [module for module in model.modules() if hasattr(type(module), "save_pretrained")]


def refuse_saving(modules: Iterable[nn.Module]) -> None:
    """Let save_pretrained of these models of transformers raise an error."""
    for module in modules:
        module.save_pretrained = refuse_to_save  # type: ignore[assignment]


def allow_saving(model: nn.Module) -> list[nn.Module]:
    """Undo refuse_saving for a model and the models in it; return those that were changed."""
    return [m for m in model.modules() if vars(m).pop("save_pretrained", None) is not None]


def sum_gradients(model: nn.Module, group: Group) -> None:
    """Sum the gradients of all shared parameters of a model over the ranks of the group.

    Shared parameters are those that every rank has: all except those of experts and the adapters on
    them. Parameters of experts have complete gradients after backward. Layers that add gradients
    during backward are left out too (see MoE.sum_gradients).

    Collective: every rank calls it, after backward. A parameter without a gradient on this rank
    counts as zeros. Gradients are added in float32 (float64 for float64 parameters). The parameters
    of layers with sum_order "tree" are added in a binary tree.

    Args:
        model: A model with `MoE` layers, or with blocks that `replace_moe` has replaced.
        group: The group of its layers.

    Raises:
        EpicArgumentError: fully_shard shards a parameter over ranks of the group.

    Example:
        model(ids, labels=ids).loss.backward()
        epic.torch.sum_gradients(model, group)
        optimizer.step()
    """
    check_sharding(group, model.named_parameters())
    done, tree = set(), set()
    for module in model.modules():
        if isinstance(module, MoE):
            for name, parameter in module.named_parameters():
                if is_of_experts(name) or module.sums_in_backward:
                    done.add(id(parameter))
                elif module.options.layer.sum_order == "tree":
                    tree.add(id(parameter))
        done.update(map(id, adapters_of_experts(module)))
    for parameter in model.parameters():
        if id(parameter) not in done and parameter.requires_grad:
            add_gradients(group, parameter, tree=id(parameter) in tree)
