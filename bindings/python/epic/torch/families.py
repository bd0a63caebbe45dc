# SPDX-License-Identifier: Apache-2.0
"""Families of Mixture-of-Experts blocks of the transformers package (release 5), as a table.

An entry contains the options with which `MoE` computes the results of a block, and the names of the
parameters in the block. It is used to read a block and to write one. A block is recognized by the
name of its class, so this module imports nothing of transformers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from epic.errors import EpicUnsupportedError
from epic.options import Experts, Moe
from epic.torch.module import EXPERT_WEIGHTS

Weights = dict[str, Tensor]  # parameters by their names in MoE
Found = tuple[Moe, Weights]  # options and parameters of a block

# Names in MoE of matrices, which blocks may store transposed, and of vectors.
MATRICES = ("w_gate", "w_gate_up", "w_down", "shared_gate_up", "shared_down")
VECTORS = ("bias", "w_shared_gate")
# Children of blocks that are None if the configuration of the model leaves them out.
OPTIONAL = ("shared_experts", "expert_bias")


class Family(NamedTuple):
    """How one class of blocks corresponds to `MoE`.

    Attributes:
        options: A function that returns arguments of `Moe.of` for a block: those of its router, and
            those of experts that are not a gated MLP with SiLU.
        names: For each parameter of `MoE`, the path of the parameter in the block. Two paths,
            separated by a space, are two parameters that `MoE` stores as one.
        transposed: Whether the block stores matrices of experts as [E, out, in]. If False it stores
            them as [E, in, out], like `MoE`.
        gives_pair: Whether the block returns two values. Its model does not use the second one.
        samples: Whether the router draws experts at random in training mode.
    """

    options: Callable[[Any], dict[str, Any]]
    names: dict[str, str]
    transposed: bool = True
    gives_pair: bool = False
    samples: bool = False


# ------------------------------------------------------------------------- routers ----


def router_of(block: Any) -> Any:
    """Return the router of a block, without adapters."""
    return unwrapped(block.gate if hasattr(block, "gate") else block.router)


# Each function NAME_options(block) returns arguments of Moe.of for the router that its docstring
# describes.


def softmax_options(block: Any) -> dict[str, Any]:
    """Softmax over all experts. `norm_topk_prob` decides whether weights are divided by their sum.

    A router without this attribute divides them.
    """
    normalizes = getattr(router_of(block), "norm_topk_prob", True)
    return {"normalize": "sum" if normalizes else "none"}


def softmax_of_chosen_options(_: Any) -> dict[str, Any]:
    """Softmax over the chosen logits."""
    return {"score": "logits", "weight_rule": "softmax_chosen"}


def deepseek_v2_options(block: Any) -> dict[str, Any]:
    """Softmax over all experts, not normalized. A group has the score of its best expert."""
    gate = router_of(block)
    groups = {"greedy": 0, "group_limited_greedy": gate.num_group}[gate.topk_method]
    return {
        "num_groups": groups,
        "topk_groups": gate.topk_group if groups else 0,
        "scale": float(gate.routed_scaling_factor),
    }


def deepseek_v3_options(block: Any) -> dict[str, Any]:
    """Sigmoid, and a bias for the choice. A group has the sum of its two best scores."""
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
    """Softmax, and a bias for the choice. Weights are divided by their sum, at least norm_min."""
    return {"normalize": "clamped", "norm_min": float(router_of(block).norm_min)}


def lfm2_options(block: Any) -> dict[str, Any]:
    """Sigmoid, with a bias for the choice if the configuration has one."""
    gate = router_of(block)
    return {
        "score": "sigmoid",
        "normalize": "sum" if gate.norm_topk_prob else "none",
        "eps": 1e-6,
        "scale": float(gate.routed_scaling_factor),
    }


def phimoe_options(block: Any) -> dict[str, Any]:
    """SparseMixer, as in evaluation mode."""
    return {
        "score": "logits",
        "weight_rule": "sparsemixer",
        "jitter": float(router_of(block).router_jitter_noise),
    }


def llama4_options(_: Any) -> dict[str, Any]:
    """Sigmoid of the chosen logits, which multiplies the input of the experts."""
    return {"score": "logits", "weight_rule": "sigmoid_chosen", "weighting": "input"}


def gpt_oss_options(block: Any) -> dict[str, Any]:
    """Softmax over the chosen logits.

    The experts interleave the columns of gate and up, and clamp the values of both.
    """
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
    """Return Family.names of a shared expert, a gated MLP at the path `mlp`."""
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

# The supported blocks by the names of their classes.
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
    """Return the entry of a block's class; raise EpicUnsupportedError if there is none."""
    name = type(block).__name__
    if name not in FAMILIES:
        raise EpicUnsupportedError(f"{name} is not supported: must be one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def tensors_of(block: nn.Module, family: Family) -> dict[str, list[Tensor]]:
    """Return the parameters and buffers of a block by their names in `MoE`.

    A value has one tensor for each path of Family.names.
    """
    found = {}
    for key, paths in family.names.items():
        part = paths.split(".")[0]
        if part in OPTIONAL and getattr(block, part, None) is None:
            continue
        found[key] = [tensor_at(block, path) for path in paths.split()]
    return found


def tensor_at(block: nn.Module, path: str) -> Tensor:
    """Return the parameter or buffer at a path in a block, without adapters."""
    value: Any = block
    for step in path.split("."):
        value = unwrapped(getattr(value, step))
    return value


def unwrapped(module: Any) -> Any:
    """Return a module without the ParamWrappers of the peft package around it."""
    while type(module).__name__ == "ParamWrapper":
        module = module.base_layer
    return module


def wrappers_of(module: Any) -> list[Any]:
    """Return the ParamWrappers of the peft package around a module, the innermost first."""
    found: list[Any] = []
    while type(module).__name__ == "ParamWrapper":
        found.insert(0, module)
        module = module.base_layer
    return found


def is_transposed(family: Family, key: str) -> bool:
    """Return whether a block stores a parameter as [out, in], where `MoE` stores [in, out].

    key: name of the parameter in `MoE`.
    """
    return key in MATRICES and (family.transposed or key not in EXPERT_WEIGHTS)


def read_tensor(family: Family, key: str, parts: list[Tensor]) -> Tensor:
    """Return a parameter in the layout of `MoE`, as a view where that is possible.

    Args:
        family: The family of the block.
        key: Name of the parameter in `MoE`.
        parts: The tensors of the block that make up the parameter.
    """
    whole = torch.cat(parts) if len(parts) > 1 else parts[0]
    if key in VECTORS:
        return whole.flatten()
    whole = whole.mT if is_transposed(family, key) else whole
    return whole[None] if key.startswith("shared_") else whole


def write_tensor(family: Family, key: str, parts: list[Tensor], value: Tensor) -> None:
    """Copy a parameter of `MoE` into the tensors of a block; the reverse of read_tensor.

    Args:
        family: The family of the block.
        key: Name of the parameter in `MoE`.
        parts: The tensors of the block, which are written.
        value: The parameter.
    """
    whole = value[0] if key.startswith("shared_") else value
    whole = whole.mT if is_transposed(family, key) else whole
    pieces = whole.split([len(part) for part in parts]) if len(parts) > 1 else [whole]
    for part, piece in zip(parts, pieces, strict=True):
        part.copy_(piece.reshape(part.shape))


def fill_block(block: nn.Module, weights: Weights) -> None:
    """Copy the parameters of a layer with all experts into a block of transformers."""
    family = family_of(block)
    for key, parts in tensors_of(block, family).items():
        write_tensor(family, key, parts, weights[key])


def read_options(block: nn.Module, family: Family, found: Weights) -> Moe:
    """Return the options with which a layer computes the results of a block.

    found: the block's parameters by their names in `MoE`.
    """
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
    """Raise an error if the configuration of a model chose another activation than SiLU."""
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
