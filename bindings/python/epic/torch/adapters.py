# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of the peft package on the parameters of replaced blocks.

For target_parameters peft wraps the module that owns a parameter in a ParamWrapper, one for each
parameter, nested.  A wrapper holds the two factors of each expert in one matrix each.  Here a
wrapper of a block of transformers becomes one of `MoE`, in which each rank keeps the factors of its
own experts, and back.  The factors only change their order and their roles, never their bits.  This
module imports nothing of peft.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from epic.torch.families import MATRICES, Family, is_transposed, unwrapped, wrappers_of
from epic.torch.groups import Group
from epic.torch.moe import OF_EXPERTS
from epic.torch.state import adapters_of_experts

ADAPTABLE = tuple(key for key in MATRICES if not key.startswith("shared_"))
Factors = dict[str, tuple[Tensor, Tensor]]  # by adapter: left, right


def wrapper_at(block: nn.Module, path: str) -> Any:
    """Return the wrapper of the parameter with a path in a block, or None."""
    *steps, name = path.split(".")
    owner: Any = block
    for step in steps:
        owner = getattr(unwrapped(owner), step)
    return next((w for w in wrappers_of(owner) if w.parameter_name == name), None)


def adapters_of(block: nn.Module, family: Family) -> dict[str, Any]:
    """Return the wrappers of a block by the name that `MoE` has for the parameter."""
    found = {key: wrapper_at(block, family.names[key]) for key in ADAPTABLE}
    return {key: wrapper for key, wrapper in found.items() if wrapper is not None}


def is_swapped(wrapper: Any) -> bool:
    """Return whether peft takes a parameter of experts as [experts, out, in].

    The name is private to peft, and the tests pin its version.  The shapes of square matrices do
    not show it.
    """
    return bool(getattr(wrapper, "_did_swap_in_out_features", False))


def read_factors(wrapper: Any, turn: bool, change: Callable[[Tensor], Tensor]) -> Factors:
    """Return left [experts, rows, r] and right [experts, r, columns] of each adapter.

    Their product times the scaling is what the adapter adds to the parameter [experts, rows,
    columns].

    Args:
        wrapper: The wrapper.
        turn: Whether to return those of the parameter with rows and columns exchanged.
        change: Called for each factor first.
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
    """Return a copy of a wrapper that wraps a parameter of another module, with other factors.

    The copy has the adapters, scalings and modes of the wrapper, and the same parameters require a
    gradient.

    Args:
        wrapper: The wrapper.
        target: The other module, or a wrapper of it.
        name: The parameter in it.
        factors: As read_factors returns them for that parameter.
    """
    made = copy.deepcopy(wrapper, {id(wrapper.base_layer): target})
    made.parameter_name = name
    shape = made.get_param().shape
    made.out_features, made.in_features = shape[-2:]
    if len(shape) == 3:
        made.num_experts = shape[0]
        made._did_swap_in_out_features = not getattr(unwrapped(target), "is_transposed", False)
        if not is_swapped(made):
            made.in_features, made.out_features = shape[-2:]
    for adapter, (left, right) in factors.items():
        if len(shape) == 3 and not is_swapped(made):
            left, right = right.mT, left.mT
        values = (right.flatten(0, 1), left.permute(1, 2, 0).flatten(1))
        linears = (made.lora_A[adapter], made.lora_B[adapter])
        for linear, value in zip(linears, values, strict=True):
            kept = nn.Parameter(value.contiguous(), linear.weight.requires_grad)
            linear.weight = kept
            linear.out_features, linear.in_features = value.shape
    return made


def adapt_layer(layer: nn.Module, block: nn.Module, family: Family, group: Group) -> nn.Module:
    """Return a layer with wrappers that have a block's adapters, each of this rank's experts."""

    def own(key: str, value: Tensor) -> Tensor:
        count = len(value) // group.num_ranks
        part = value[group.rank * count :][:count] if key in OF_EXPERTS else value
        return part.to(group.device, copy=True)

    for key, wrapper in adapters_of(block, family).items():
        factors = read_factors(wrapper, is_transposed(family, key), partial(own, key))
        layer = copy_wrapper(wrapper, layer, key, factors)
        if group.num_ranks > 1:
            for parameter in adapters_of_experts(layer):
                parameter.allreduce = False  # type: ignore[attr-defined]  # as of the experts
    return layer


def adapt_block(
    block: nn.Module | None,
    layer: nn.Module,
    family: Family,
    gather: Callable[[str, Tensor], Tensor],
) -> None:
    """Wrap the modules of a block as a layer is wrapped, with the adapters of all experts.

    Args:
        block: The block; None on a rank that only takes part in gather.
        layer: The layer in its wrappers.
        family: The family of the block.
        gather: Returns the factor of all experts from the key and this rank's factor; collective.
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
