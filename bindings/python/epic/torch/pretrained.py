# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-Experts blocks of the transformers package (release 5) as epic.torch.MoE."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from epic.errors import EpicError, EpicUnsupportedError
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
from epic.torch.module import OF_EXPERTS, MoE, add_gradients
from epic.torch.moe import logits_of
from epic.torch.state import adapters_of_experts, check_sharding, is_of_experts


class Block(nn.Module):
    """The module that replaces a block: a `MoE` with the calling convention of the original.

    moe is the layer, in the wrappers that peft's adapters had in the original. router is called
    with the router logits when transformers records outputs.
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

        A hook of the layer, because adapters are active inside of it.  transformers makes its own
        hooks when output_router_logits, or another output, is asked for the first time.
        """
        if self.router._forward_hooks:
            rows = args[0].reshape(-1, args[0].shape[-1])
            self.router(logits_of(rows, layer.weights()))


def make_recorder(block: nn.Module) -> nn.Module:
    """Return a router of a block's class without parameters, which returns what it is called with.

    transformers records the results of the modules of that class: the first value, or the second.
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
    """Return a copy of a block without adapters, with all tensors on the device "meta"."""
    tensors: Iterator[Any] = (*block.parameters(), *block.buffers()).__iter__()
    empty = {
        id(t): nn.Parameter(t.detach().to("meta"), requires_grad=t.requires_grad)
        if isinstance(t, nn.Parameter)
        else t.to("meta")
        for t in tensors
    }
    made = copy.deepcopy(block, empty)
    for parent in list(made.modules()):
        for name, child in parent.named_children():
            if wrappers_of(child):
                setattr(parent, name, unwrapped(child))
    return made


def read_block(block: nn.Module) -> Found:
    """Return options and weights of a block; refuse another layout before anything is made."""
    family = family_of(block)
    try:
        tensors = tensors_of(block, family)
        with torch.enable_grad():  # a tensor made from a frozen parameter shows that it is frozen
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
    known = {id(part) for parts in tensors.values() for part in parts}
    for wrapper in adapters_of(block, family).values():
        known.update(id(p) for p in (*wrapper.lora_A.parameters(), *wrapper.lora_B.parameters()))
    more = [name for name, p in block.named_parameters() if id(p) not in known]
    if more:
        raise other_layout(block, f"it also has the parameter {more[0]}")
    return options, found


def check_block(block: nn.Module, group: Group) -> None:
    """Refuse a block that is not known, or that the device of the group does not support."""
    options, _ = read_block(block)
    if group.on_gpu and options.router.weight_rule == "sparsemixer":
        raise EpicUnsupportedError(
            f"{type(block).__name__} is not supported on GPUs, which have no SparseMixer: use a "
            "group on CPUs"
        )


def other_layout(block: nn.Module, why: str) -> EpicUnsupportedError:
    """Return the error of a block whose class is known but whose parameters are not."""
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
    """Return a layer with the weights of a transformers block, with this rank's experts.

    Args:
        block: A block of transformers 5, of a class in the table of docs/guide/frameworks.md.
        group: The open group.
        grouped_mm: As for `MoE`.
        tag: As for `MoE`.
        invariant: As for `replace_moe`.

    Returns:
        The layer. Frozen parameters stay frozen.

    Raises:
        EpicUnsupportedError: The class is not known, its parameters have another layout, or they
            have adapters.
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
    """Return the layer of from_block, without the adapters that the block may have.

    Args:
        block: The block.
        group: The open group.
        grouped_mm: As for `MoE`.
        tag: As for `MoE`.
        fill: Called with the name and the tensor of each parameter of this rank's experts, which it
            writes. The experts in the block are on "meta" then. None: they are copied.
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
            kept, value_here = getattr(layer, key), value[own] if key in OF_EXPERTS else value
            if kept.shape != value_here.shape:
                raise other_layout(block, f"{key} has the shape {list(value.shape)}")
            if fill is not None and key in OF_EXPERTS:
                fill(key, kept)
            else:
                kept.copy_(value_here)
            if key != "bias":  # a buffer: the choice has no gradient
                kept.requires_grad_(value.requires_grad)
        if layer.load is not None:
            layer.load.zero_()
    return layer.train(block.training)


def blocks_of(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield parent, name and block of each Mixture-of-Experts block, known or not."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if is_block(child):
                yield parent, name, child


def is_block(module: nn.Module) -> bool:
    """Returns whether a module is, or looks like, a Mixture-of-Experts block: by its class, or by
    its part "experts"."""
    kind = type(module).__name__
    if isinstance(module, MoE | Block) or kind in FAMILIES:
        return kind in FAMILIES
    has_experts = any(name == "experts" for name, _ in module.named_children())
    return has_experts or kind.endswith(("Moe", "MoE", "MoeBlock", "MoEBlock"))


def find_blocks(model: nn.Module, group: Group) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return parent, name and block of each block; refuse a model that replace_moe refuses."""
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

    Collective: every rank calls it with the same model, and keeps its own experts. A model that has
    no block, or one that is not known, is left unchanged.

    Args:
        model: The model.
        group: The open group.
        grouped_mm: As for `MoE`.
        invariant: Whether the bits of a token in each layer depend only on the token, as with
            `Moe.invariant`.

    Returns:
        The number of blocks that were replaced.

    Raises:
        EpicUnsupportedError: A block is not known, or the model has none.

    Example:
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
        epic.torch.replace_moe(model, group)
        model(ids, labels=ids).loss.backward()
        epic.torch.sum_gradients(model, group)
    """
    found = find_blocks(model, group)
    for parent, name, block in found:
        made = Block(make_layer(block, group, grouped_mm, invariant=invariant), block)
        setattr(parent, name, made.train(block.training))
    return len(found)


def sum_gradients(model: nn.Module, group: Group) -> None:
    """Add the gradients of all parameters that every rank has over the ranks of the group.

    Call it after backward, on every rank, for a model with `MoE` layers or replaced blocks. The
    experts of a rank have complete gradients without it, and so have layers that add them in
    backward (see MoE.sum_gradients). A parameter without a gradient on this rank counts as zeros.
    Gradients are added in float32 (float64 for float64 parameters), those of layers with sum_order
    "tree" in a tree.

    Args:
        model: The model.
        group: The group of its layers.

    Raises:
        EpicArgumentError: fully_shard shards a parameter over ranks of the group.
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
