# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of the peft package on the parameters of replaced blocks.

If a LoraConfig names target_parameters, peft wraps the module that owns a parameter in a
ParamWrapper. A module with several such parameters gets several wrappers, one around the other. A
wrapper stores the factors of all experts in two matrices, lora_A and lora_B.

This module turns wrappers of a transformers block into wrappers of `MoE`, in which each rank has
the factors of its own experts, and back. If a parameter is stored transposed, the two factors
change places and are transposed. Their bits never change. This module imports nothing of peft.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from epic.torch.families import MATRICES, Family, is_transposed, unwrapped, wrappers_of
from epic.torch.groups import Group
from epic.torch.moe import EXPERT_WEIGHTS
from epic.torch.state import adapters_of_experts

# Names of the parameters of MoE that can have adapters.
ADAPTABLE = tuple(key for key in MATRICES if not key.startswith("shared_"))
# The two factors of each adapter by its name: left [experts, rows, r], right [experts, r, columns].
Factors = dict[str, tuple[Tensor, Tensor]]


def wrapper_at(block: nn.Module, path: str) -> Any:
    """Return the wrapper of a parameter of a block, or None.

    path: path of the parameter in the block, such as "experts.down_proj".
    """
    *steps, name = path.split(".")
    owner: Any = block
    for step in steps:
        owner = getattr(unwrapped(owner), step)
    return next((w for w in wrappers_of(owner) if w.parameter_name == name), None)


def adapters_of(block: nn.Module, family: Family) -> dict[str, Any]:
    """Return the wrappers in a block, each by the name of its parameter in `MoE`."""
    found = {key: wrapper_at(block, family.names[key]) for key in ADAPTABLE}
    return {key: wrapper for key, wrapper in found.items() if wrapper is not None}


def is_swapped(wrapper: Any) -> bool:
    """Return whether peft treats a parameter of experts as [experts, out, in].

    _did_swap_in_out_features is a private name of peft, and the tests pin the version of peft. The
    shape of the parameter is not enough, because a matrix may be square.
    """
    return bool(getattr(wrapper, "_did_swap_in_out_features", False))


def read_factors(wrapper: Any, turn: bool, change: Callable[[Tensor], Tensor]) -> Factors:
    """Return the two factors of each adapter of a wrapper.

    An adapter adds left @ right times its scaling to the parameter [experts, rows, columns].

    Args:
        wrapper: The wrapper.
        turn: Whether to return the factors of the transposed parameter [experts, columns, rows].
        change: A function that is applied to each factor first. It selects or gathers experts.

    Returns:
        (left [experts, rows, r], right [experts, r, columns]) by the name of the adapter.
    """
    found = {}
    for adapter in wrapper.lora_A:
        a, b = wrapper.lora_A[adapter].weight.detach(), wrapper.lora_B[adapter].weight.detach()
        right = a.reshape(wrapper.num_experts, -1, a.shape[-1])
        left = b.reshape(b.shape[0], -1, wrapper.num_experts).permute(2, 0, 1)
        if wrapper.get_param().dim() == 3 and not is_swapped(wrapper):
            left, right = right.mT, left.mT
        left, right = change(left), change(right)
        found[adapter] = (right.mT, left.mT) if turn else (left, right)
    return found


def copy_wrapper(wrapper: Any, target: nn.Module, name: str, factors: Factors) -> Any:
    """Return a copy of a wrapper for a parameter of another module, with other factors.

    The copy has the adapters, scalings and modes of the wrapper. A factor of the copy requires a
    gradient if that of the wrapper does.

    Args:
        wrapper: The wrapper.
        target: The other module, possibly in wrappers already.
        name: Name of the parameter in the other module.
        factors: The factors for this parameter, as read_factors returns them.
    """
    new = copy.deepcopy(wrapper, {id(wrapper.base_layer): target})
    new.parameter_name = name
    shape = new.get_param().shape
    new.out_features, new.in_features = shape[-2:]
    if len(shape) == 3:
        new.num_experts = shape[0]
        new._did_swap_in_out_features = not getattr(unwrapped(target), "is_transposed", False)
        if not is_swapped(new):
            new.in_features, new.out_features = shape[-2:]
    for adapter, (left, right) in factors.items():
        if len(shape) == 3 and not is_swapped(new):
            left, right = right.mT, left.mT
        values = (right.flatten(0, 1), left.permute(1, 2, 0).flatten(1))
        linears = (new.lora_A[adapter], new.lora_B[adapter])
        for linear, value in zip(linears, values, strict=True):
            parameter = nn.Parameter(value.contiguous(), linear.weight.requires_grad)
            linear.weight = parameter
            linear.out_features, linear.in_features = value.shape
    return new


def adapt_layer(layer: nn.Module, block: nn.Module, family: Family, group: Group) -> nn.Module:
    """Return a layer in wrappers with the adapters of a block, for this rank's experts only.

    Args:
        layer: The `MoE`.
        block: The block, whose adapters have the factors of all experts.
        family: The family of the block.
        group: The group of the layer.
    """

    def own(key: str, value: Tensor) -> Tensor:
        count = len(value) // group.num_ranks
        part = value[group.rank * count :][:count] if key in EXPERT_WEIGHTS else value
        return part.to(group.device, copy=True)

    for key, wrapper in adapters_of(block, family).items():
        factors = read_factors(wrapper, is_transposed(family, key), partial(own, key))
        layer = copy_wrapper(wrapper, layer, key, factors)
        if group.num_ranks > 1:
            for parameter in adapters_of_experts(layer):
                # As on the experts themselves, see mark_experts.
                parameter.allreduce = False  # type: ignore[attr-defined]
    return layer


def adapt_block(
    block: nn.Module | None,
    layer: nn.Module,
    family: Family,
    gather: Callable[[str, Tensor], Tensor],
) -> None:
    """Wrap the modules of a block in the adapters of a layer, with the factors of all experts.

    Collective, because gather is.

    Args:
        block: The block, which is changed in place. None: this rank only calls gather.
        layer: The layer in its wrappers.
        family: The family of the block.
        gather: A collective function (key, factor) that returns the factor of all experts from that
            of this rank's experts. key is the name of the parameter in `MoE`.
    """
    for wrapper in wrappers_of(layer):
        key = wrapper.parameter_name
        turn = is_transposed(family, key)
        factors = read_factors(wrapper, turn, partial(gather, key))
        if block is None:
            continue
        path, _, name = family.names[key].rpartition(".")
        parent, _, last = path.rpartition(".")
        owner = block.get_submodule(parent)
        setattr(owner, last, copy_wrapper(wrapper, getattr(owner, last), name, factors))
