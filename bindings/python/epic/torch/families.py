# SPDX-License-Identifier: Apache-2.0
"""Families of Mixture-of-Experts blocks of the transformers package (release 5), as a table.

An entry says which options of EPIC compute what the block computes, and which parameters of the
block are those of `MoE`.  The same entry serves to read a block and to write one.  This module
imports nothing of transformers: it recognizes blocks by the names of their classes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from epic.errors import EpicUnsupportedError
from epic.options import Experts, Moe
from epic.torch.module import OF_EXPERTS

Weights = dict[str, Tensor]
Found = tuple[Moe, Weights]

MATRICES = ("w_gate", "w_gate_up", "w_down", "shared_gate_up", "shared_down")
VECTORS = ("bias", "w_shared_gate")
OPTIONAL = ("shared_experts", "expert_bias")  # parts that a configuration can leave out


class Family(NamedTuple):
    """How a class of blocks computes and stores what `MoE` computes and stores.

    Attributes:
        options: Returns fields of `Moe.of` for a block: those of its router, and what else differs
            from a gated MLP with SiLU.
        names: For each parameter of `MoE`, the path of the parameter in the block. Two paths,
            separated by a space: EPIC stores the two in one parameter.
        transposed: Whether the experts are stored as [E, out, in]; else as [E, in, out].
        gives_pair: Whether the block returns a second value, which its model does not use.
        samples: Whether the router draws experts at random in training.
    """

    options: Callable[[Any], dict[str, Any]]
    names: dict[str, str]
    transposed: bool = True
    gives_pair: bool = False
    samples: bool = False


# ------------------------------------------------------------------------- routers ----


def router_of(block: Any) -> Any:
    """Return the module that chooses the experts."""
    return unwrapped(block.gate if hasattr(block, "gate") else block.router)


def softmax_options(block: Any) -> dict[str, Any]:
    """Softmax over all experts; `norm_topk_prob` decides whether chosen scores are normalized."""
    normalizes = getattr(router_of(block), "norm_topk_prob", True)
    return {"normalize": "sum" if normalizes else "none"}


def softmax_of_chosen_options(_: Any) -> dict[str, Any]:
    """Softmax over the chosen logits."""
    return {"score": "logits", "weight_rule": "softmax_chosen"}


def deepseek_v2_options(block: Any) -> dict[str, Any]:
    """Softmax, not normalized, with or without groups, whose best expert counts."""
    gate = router_of(block)
    groups = {"greedy": 0, "group_limited_greedy": gate.num_group}[gate.topk_method]
    return {
        "num_groups": groups,
        "topk_groups": gate.topk_group if groups else 0,
        "scale": float(gate.routed_scaling_factor),
    }


def deepseek_v3_options(block: Any) -> dict[str, Any]:
    """Sigmoid and a bias for the choice, with or without groups, whose two best experts count."""
    gate = router_of(block)
    groups = gate.num_group if gate.num_group > 1 else 0
    return {
        "score": "sigmoid",
        "num_groups": groups,
        "topk_groups": gate.topk_group if groups else 0,
        "group_score": "sum" if groups else "max",
        "group_best": 2 if groups else 0,
        "normalize": "sum" if gate.norm_topk_prob else "none",
        "eps": 1e-20,
        "scale": float(gate.routed_scaling_factor),
    }


def ernie_options(block: Any) -> dict[str, Any]:
    """Softmax and a bias for the choice; the divisor has a lower limit."""
    return {"normalize": "clamped", "norm_min": float(router_of(block).norm_min)}


def lfm2_options(block: Any) -> dict[str, Any]:
    """Sigmoid, with or without a bias for the choice."""
    gate = router_of(block)
    return {
        "score": "sigmoid",
        "normalize": "sum" if gate.norm_topk_prob else "none",
        "eps": 1e-6,
        "scale": float(gate.routed_scaling_factor),
    }


def phimoe_options(block: Any) -> dict[str, Any]:
    """SparseMixer, as in evaluation."""
    return {
        "score": "logits",
        "weight_rule": "sparsemixer",
        "jitter": float(router_of(block).router_jitter_noise),
    }


def llama4_options(_: Any) -> dict[str, Any]:
    """The sigmoid of the chosen logits weighs the experts' input."""
    return {"score": "logits", "weight_rule": "sigmoid_chosen", "weighting": "input"}


def gpt_oss_options(block: Any) -> dict[str, Any]:
    """Softmax over the chosen logits; interleaved gate and up, which are clamped."""
    return {
        "weight_rule": "softmax_chosen",
        "activation": "clamped_swiglu",
        "interleaved": True,
        "limit": float(unwrapped(block.experts).limit),
        "alpha": float(unwrapped(block.experts).alpha),
    }


# --------------------------------------------------------------------------- table ----


EXPERTS = {"w_gate_up": "experts.gate_up_proj", "w_down": "experts.down_proj"}
GATE = {"w_gate": "gate.weight", **EXPERTS}
ROUTER = {"w_gate": "router.weight", **EXPERTS}


def shared_names(mlp: str) -> dict[str, str]:
    """Return the names of a gated MLP that every token passes."""
    return {
        "shared_gate_up": f"{mlp}.gate_proj.weight {mlp}.up_proj.weight",
        "shared_down": f"{mlp}.down_proj.weight",
    }


SOFTMAX = Family(softmax_options, GATE)
SOFTMAX_AND_SHARED = Family(
    softmax_options,
    {**GATE, **shared_names("shared_expert"), "w_shared_gate": "shared_expert_gate.weight"},
)
SIGMOID_AND_SHARED = Family(
    deepseek_v3_options,
    {**GATE, "bias": "gate.e_score_correction_bias", **shared_names("shared_experts")},
)

FAMILIES: dict[str, Family] = {
    "DeepseekV2Moe": Family(deepseek_v2_options, {**GATE, **shared_names("shared_experts")}),
    "DeepseekV3MoE": SIGMOID_AND_SHARED,
    "Ernie4_5_MoeSparseMoeBlock": Family(
        ernie_options,
        {
            **GATE,
            "bias": "gate.moe_statics.e_score_correction_bias",
            **shared_names("shared_experts"),
        },
    ),
    "Glm4MoeLiteMoE": SIGMOID_AND_SHARED,
    "Glm4MoeMoE": SIGMOID_AND_SHARED,
    "GptOssMLP": Family(
        gpt_oss_options,
        {
            **ROUTER,
            "b_gate": "router.bias",
            "b_gate_up": "experts.gate_up_proj_bias",
            "b_down": "experts.down_proj_bias",
        },
        transposed=False,
        gives_pair=True,
    ),
    "GraniteMoeMoE": Family(softmax_of_chosen_options, ROUTER),
    "HunYuanMoEV1Moe": Family(
        softmax_options, {**EXPERTS, "w_gate": "gate.wg.weight", **shared_names("shared_mlp")}
    ),
    "Lfm2MoeSparseMoeBlock": Family(lfm2_options, {**GATE, "bias": "expert_bias"}),
    "Llama4TextMoe": Family(
        llama4_options,
        {**ROUTER, **shared_names("shared_expert")},
        transposed=False,
        gives_pair=True,
    ),
    "MixtralSparseMoeBlock": SOFTMAX,
    "OlmoeSparseMoeBlock": SOFTMAX,
    "PhimoeSparseMoeBlock": Family(phimoe_options, ROUTER, samples=True),
    "Qwen2MoeSparseMoeBlock": SOFTMAX_AND_SHARED,
    "Qwen3MoeSparseMoeBlock": SOFTMAX,
    "Qwen3NextSparseMoeBlock": SOFTMAX_AND_SHARED,
    "Qwen3_5MoeSparseMoeBlock": SOFTMAX_AND_SHARED,
}


# ---------------------------------------------------------------- reading, writing ----


def family_of(block: nn.Module) -> Family:
    """Return the entry of a block's class."""
    name = type(block).__name__
    if name not in FAMILIES:
        raise EpicUnsupportedError(f"{name} is not supported: must be one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def tensors_of(block: nn.Module, family: Family) -> dict[str, list[Tensor]]:
    """Return the parameters and buffers of a block by the name that `MoE` has for them."""
    found = {}
    for key, paths in family.names.items():
        part = paths.split(".")[0]
        if part in OPTIONAL and getattr(block, part, None) is None:
            continue
        found[key] = [tensor_at(block, path) for path in paths.split()]
    return found


def tensor_at(block: nn.Module, path: str) -> Tensor:
    """Return a parameter or buffer of a block, without adapters."""
    value: Any = block
    for step in path.split("."):
        value = unwrapped(getattr(value, step))
    return value


def unwrapped(module: Any) -> Any:
    """Return what the wrappers of the peft package for single parameters wrap."""
    while type(module).__name__ == "ParamWrapper":
        module = module.base_layer
    return module


def wrappers_of(module: Any) -> list[Any]:
    """Return the wrappers of the peft package around a module, the innermost first."""
    found: list[Any] = []
    while type(module).__name__ == "ParamWrapper":
        found.insert(0, module)
        module = module.base_layer
    return found


def is_transposed(family: Family, key: str) -> bool:
    """Return whether the block stores a parameter as [out, in]; `MoE` stores [in, out]."""
    return key in MATRICES and (family.transposed or key not in OF_EXPERTS)


def read_tensor(family: Family, key: str, parts: list[Tensor]) -> Tensor:
    """Return a parameter of `MoE` from its parts in a block, as a view where that is possible."""
    whole = torch.cat(parts) if len(parts) > 1 else parts[0]
    if key in VECTORS:
        return whole.flatten()
    whole = whole.mT if is_transposed(family, key) else whole
    return whole[None] if key.startswith("shared_") else whole


def write_tensor(family: Family, key: str, parts: list[Tensor], value: Tensor) -> None:
    """Copy a parameter of `MoE` into its parts in a block."""
    whole = value[0] if key.startswith("shared_") else value
    whole = whole.mT if is_transposed(family, key) else whole
    pieces = whole.split([len(part) for part in parts]) if len(parts) > 1 else [whole]
    for part, piece in zip(parts, pieces, strict=True):
        part.copy_(piece.reshape(part.shape))


def fill_block(block: nn.Module, weights: Weights) -> None:
    """Write the parameters of a whole `MoE` into a block of transformers."""
    family = family_of(block)
    for key, parts in tensors_of(block, family).items():
        write_tensor(family, key, parts, weights[key])


def read_options(block: nn.Module, family: Family, found: Weights) -> Moe:
    """Return the options of a layer that computes what a block computes."""
    check_activation(block)
    num_experts, hidden, width = found["w_gate_up"].shape
    shared = None
    if "shared_down" in found:
        shared = Experts(1, hidden, found["shared_down"].shape[1])
    return Moe.of(
        num_experts=num_experts,
        top_k=router_of(block).top_k,
        hidden=hidden,
        inner=width // 2,
        shared=shared,
        **family.options(block),
    )


def check_activation(block: Any) -> None:
    """Check the activation of experts whose configuration chooses it."""
    experts = unwrapped(block.experts)
    if not hasattr(experts, "act_fn"):  # a class with one activation
        return
    function = experts.act_fn
    name = getattr(function, "__name__", type(function).__name__)
    if "silu" not in name.lower():
        raise EpicUnsupportedError(
            f"{type(block).__name__} has experts with {name}: must be SiLU, as no other activation "
            "of this class is supported"
        )
