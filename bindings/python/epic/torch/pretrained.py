# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-Experts blocks of the transformers package (release 5) as epic.torch.MoE.

This module imports nothing of transformers: it recognizes blocks by the names of their classes, and
reads their parameters by name.
"""

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from epic.errors import EpicError, EpicUnsupportedError
from epic.options import Experts, Moe
from epic.torch.arguments import ROW_TYPES
from epic.torch.experts import GroupedMm
from epic.torch.groups import Group
from epic.torch.module import OF_EXPERTS, MoE, add_gradients
from epic.torch.state import check_sharding, is_of_experts

Weights = dict[str, Tensor]
Found = tuple[Moe, Weights]


def must_be_silu(block: Any) -> None:
    """Check the activation of experts whose configuration chooses it."""
    name = type(block.experts.act_fn).__name__
    if "silu" not in name.lower():
        raise EpicUnsupportedError(f"experts with {name}: SiLU is what these blocks may have here")


def transposed(experts: Any) -> Weights:
    """Return weights [E, 2 I, H] and [E, H, I] in EPIC's layout, gate first."""
    return {
        "w_gate_up": experts.gate_up_proj.transpose(1, 2),
        "w_down": experts.down_proj.transpose(1, 2),
    }


def shared_expert(mlp: Any) -> tuple[Experts, Weights]:
    """Return the options and weights of a gated MLP that every token passes."""
    options = Experts(1, mlp.gate_proj.in_features, mlp.gate_proj.out_features)
    both = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    return options, {
        "shared_gate_up": both.T[None],
        "shared_down": mlp.down_proj.weight.T[None],
    }


def softmax_block(block: Any) -> Found:
    """Read Mixtral, Qwen3-MoE: softmax over all experts, the chosen ones normalized or not."""
    must_be_silu(block)
    gate, experts = block.gate, block.experts
    options = Moe.of(
        num_experts=experts.num_experts,
        top_k=gate.top_k,
        hidden=experts.hidden_dim,
        inner=experts.intermediate_dim,
        normalize="sum" if getattr(gate, "norm_topk_prob", True) else "none",
    )
    return options, {"w_gate": gate.weight.T, **transposed(experts)}


def sigmoid_block(block: Any) -> Found:
    """Read DeepSeek-V3, GLM-4.5: sigmoid, groups, a bias for the choice, a shared expert."""
    must_be_silu(block)
    gate, experts = block.gate, block.experts
    shared, shared_weights = shared_expert(block.shared_experts)
    groups = gate.num_group if gate.num_group > 1 else 0
    options = Moe.of(
        num_experts=experts.num_experts,
        top_k=gate.top_k,
        hidden=experts.hidden_dim,
        inner=experts.intermediate_dim,
        score="sigmoid",
        num_groups=groups,
        topk_groups=gate.topk_group if groups else 0,
        group_score="sum" if groups else "max",
        group_best=2 if groups else 0,
        normalize="sum" if gate.norm_topk_prob else "none",
        eps=1e-20,
        scale=float(gate.routed_scaling_factor),
        shared=shared,
    )
    return options, {
        "w_gate": gate.weight.T,
        "bias": gate.e_score_correction_bias,
        **shared_weights,
        **transposed(experts),
    }


def llama4_block(block: Any) -> Found:
    """Read Llama 4: sigmoid of the chosen logits weighs the experts' input; a shared expert."""
    must_be_silu(block)
    router, experts = block.router, block.experts
    shared, shared_weights = shared_expert(block.shared_expert)
    options = Moe.of(
        num_experts=experts.num_experts,
        top_k=router.top_k,
        hidden=experts.hidden_size,
        inner=experts.expert_dim,
        score="logits",
        weight_rule="sigmoid_chosen",
        weighting="input",
        shared=shared,
    )
    return options, {
        "w_gate": router.weight.T,
        "w_gate_up": experts.gate_up_proj,
        "w_down": experts.down_proj,
        **shared_weights,
    }


def gpt_oss_block(block: Any) -> Found:
    """Read gpt-oss: softmax over the chosen, interleaved gate and up, clamped, with biases."""
    router, experts = block.router, block.experts
    options = Moe.of(
        num_experts=experts.num_experts,
        top_k=router.top_k,
        hidden=experts.hidden_size,
        inner=experts.intermediate_size,
        weight_rule="softmax_chosen",
        activation="clamped_swiglu",
        interleaved=True,
        limit=float(experts.limit),
        alpha=float(experts.alpha),
    )
    return options, {
        "w_gate": router.weight.T,
        "b_gate": router.bias,
        "w_gate_up": experts.gate_up_proj,
        "b_gate_up": experts.gate_up_proj_bias,
        "w_down": experts.down_proj,
        "b_down": experts.down_proj_bias,
    }


BLOCKS: dict[str, Callable[[Any], Found]] = {
    "MixtralSparseMoeBlock": softmax_block,
    "Qwen3MoeSparseMoeBlock": softmax_block,
    "DeepseekV3MoE": sigmoid_block,
    "Glm4MoeMoE": sigmoid_block,
    "GptOssMLP": gpt_oss_block,
    "Llama4TextMoe": llama4_block,
}
PAIRS = ("GptOssMLP", "Llama4TextMoe")  # give a second value, which their layers do not use


class Block(nn.Module):
    """The module that replaces a block. jitter_noise: that of Mixtral, in training."""

    def __init__(
        self, moe: MoE, gives_pair: bool, jitter_noise: float = 0.0, original: Any = None
    ) -> None:
        super().__init__()
        self.original: tuple[Any] = (None if original is None else without_memory(original),)
        self.moe, self.gives_pair, self.jitter_noise = moe, gives_pair, jitter_noise

    def forward(self, hidden_states: Tensor) -> Any:
        """Return what the replaced block would return."""
        if self.training and self.jitter_noise > 0:
            noise = torch.empty_like(hidden_states)
            hidden_states = hidden_states * noise.uniform_(
                1.0 - self.jitter_noise, 1.0 + self.jitter_noise
            )
        out, _ = self.moe(hidden_states)
        return (out, None) if self.gives_pair else out


def without_memory(block: nn.Module) -> nn.Module:
    """Return a copy of a block whose parameters and buffers are on the device "meta"."""
    tensors: Iterator[Any] = (*block.parameters(), *block.buffers()).__iter__()
    empty = {
        id(t): nn.Parameter(t.detach().to("meta"), requires_grad=t.requires_grad)
        if isinstance(t, nn.Parameter)
        else t.to("meta")
        for t in tensors
    }
    return copy.deepcopy(block, empty)


def read_block(block: nn.Module) -> Found:
    """Return options and weights of a block; refuse another layout before anything is made."""
    name = type(block).__name__
    if name not in BLOCKS:
        raise EpicUnsupportedError(f"{name} is not supported: must be one of {', '.join(BLOCKS)}")
    try:
        with torch.enable_grad():  # a tensor made from a frozen parameter shows that it is frozen
            options, found = BLOCKS[name](block)
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        if isinstance(error, EpicError):
            raise
        raise other_layout(block, f"{type(error).__name__}: {error}") from error
    up = found["w_gate_up"]
    if up.dtype not in ROW_TYPES:
        raise EpicUnsupportedError(
            f"{name}: experts of {up.dtype}: load the model with weights that are not quantized"
        )
    read = sum(value.numel() for key, value in found.items() if key != "bias")
    had = sum(parameter.numel() for parameter in block.parameters())
    if read != had:
        raise other_layout(block, f"it has {had} parameters where {read} are known")
    return options, found


def other_layout(block: nn.Module, why: str) -> EpicUnsupportedError:
    """Return the error of a block whose class is known but whose parameters are not."""
    kind = type(block)
    return EpicUnsupportedError(
        f"{kind.__name__} of {kind.__module__} is not laid out as in transformers 5 ({why}): use "
        "the class of the transformers package, without adapters"
    )


def from_block(
    block: nn.Module, group: Group, *, grouped_mm: GroupedMm | None = None, tag: int = 0
) -> MoE:
    """Return a layer with the weights of a transformers block, with this rank's experts.

    Args:
        block: A block of a class that transformers 5 has: MixtralSparseMoeBlock,
            Qwen3MoeSparseMoeBlock, DeepseekV3MoE, Glm4MoeMoE, GptOssMLP or Llama4TextMoe.
        group: The open group.
        grouped_mm: As for `MoE`.
        tag: As for `MoE`.

    Returns:
        The layer. Frozen parameters stay frozen.

    Raises:
        EpicUnsupportedError: The class is not known, or its parameters have another layout.
    """
    options, found = read_block(block)
    up = found["w_gate_up"]
    with torch.no_grad():
        layer = MoE(
            group,
            options,
            dtype=up.dtype,
            device="meta",
            gate_bias="b_gate" in found,
            expert_biases="b_down" in found,
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
            kept.copy_(value_here)
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
    if isinstance(module, MoE | Block) or kind in BLOCKS:
        return kind in BLOCKS
    has_experts = any(name == "experts" for name, _ in module.named_children())
    return has_experts or kind.endswith(("Moe", "MoE", "MoeBlock", "MoEBlock"))


def check_router_logits(model: nn.Module, _: Any, wishes: dict[str, Any]) -> None:
    """Refuse output_router_logits before a forward, because they are not recorded."""
    given = wishes.get("output_router_logits")
    if given or (given is None and wants_router_logits(model)):
        raise EpicUnsupportedError(
            "output_router_logits is True: must be False after replace_moe, as router logits are "
            "not recorded; for a balance loss take epic.torch.MoE or balance_loss"
        )


# The handle of this hook, for each model that replace_moe has changed.
ROUTER_HOOKS: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def forget_router_hook(model: nn.Module) -> None:
    """Allow router logits again, after restore_moe."""
    hook = ROUTER_HOOKS.pop(model, None)
    if hook is not None:
        hook.remove()


def wants_router_logits(model: nn.Module) -> bool:
    """Returns whether a configuration of the model asks for them, or its part for text."""
    config = getattr(model, "config", None)
    parts = (config, getattr(config, "text_config", None))
    return any(getattr(part, "output_router_logits", False) for part in parts)


def replace_moe(model: nn.Module, group: Group, *, grouped_mm: GroupedMm | None = None) -> int:
    """Replace all Mixture-of-Experts blocks of a loaded transformers model, in place.

    Collective: every rank calls it with the same model, and keeps its own experts. A model that has
    no block, or one that is not known, is left unchanged.

    Args:
        model: The model.
        group: The open group.
        grouped_mm: As for `MoE`.

    Returns:
        The number of blocks that were replaced.

    Raises:
        EpicUnsupportedError: A block is not known, the model has none, or output_router_logits is
            True, as router logits are not recorded.

    Example:
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
        epic.torch.replace_moe(model, group)
        model(ids, labels=ids).loss.backward()
        epic.torch.sum_gradients(model, group)
    """
    found = list(blocks_of(model))
    other = sorted({type(block).__name__ for *_, block in found} - BLOCKS.keys())
    if other or not found:
        what = ", ".join(other) or "no Mixture-of-Experts block"
        raise EpicUnsupportedError(
            f"{type(model).__name__} has {what}: supported are {', '.join(BLOCKS)}"
        )
    check_router_logits(model, (), {})
    for *_, block in found:
        read_block(block)
    for parent, name, block in found:
        layer = from_block(block, group, grouped_mm=grouped_mm)
        noise = getattr(block, "jitter_noise", 0.0)
        made = Block(layer, type(block).__name__ in PAIRS, noise, block)
        setattr(parent, name, made.train(block.training))
    ROUTER_HOOKS[model] = model.register_forward_pre_hook(check_router_logits, with_kwargs=True)
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
        elif getattr(module, "parameter_name", None) in OF_EXPERTS:  # peft's ParamWrapper
            adapters = (p for n, p in module.named_parameters() if not n.startswith("base_layer."))
            done.update(map(id, adapters))
    for parameter in model.parameters():
        if id(parameter) not in done and parameter.requires_grad:
            add_gradients(group, parameter, tree=id(parameter) in tree)
