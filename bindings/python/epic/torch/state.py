# SPDX-License-Identifier: Apache-2.0
"""Checks for parameters that belong to one rank: those of its experts.

Data parallelism assumes that all parameters are equal on all ranks, but those of experts differ.
A state_dict contains the experts of one rank, and records which ones.
"""

import re
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from epic.errors import EpicArgumentError
from epic.torch.groups import Group
from epic.torch.moe import OF_EXPERTS

EXTRA = "_extra_state"  # the key under which torch saves get_extra_state()


# Names that torch.nn.utils makes of theirs: w_down_orig and w_down_mask (prune), w_down_g and
# w_down_v (weight_norm), parametrizations.w_down.original.
DERIVED = re.compile(rf"(parametrizations\.)?({'|'.join(OF_EXPERTS)})(_orig|_mask|_g|_v|\..*)?")


def is_of_experts(name: str) -> bool:
    """Returns whether a parameter or buffer of a layer belongs to this rank's own experts."""
    return DERIVED.fullmatch(name) is not None


# ------------------------------------------------------------------ which experts ----


class HeldExperts(Tensor):
    """[first, count, num_experts] int64: the experts that a state holds.

    Everything that copies or saves it sees a plain tensor: torch.save, safetensors and
    torch.distributed.checkpoint. Copying other numbers into it is an error, because
    dcp.load(layer.state_dict()) would load another rank's experts that way.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.copy_ and isinstance(args[0], cls):
            check_held(args[0], args[1])
        return super().__torch_function__(func, types, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, _: Any) -> Tensor:
        return self.clone()


def held_experts(group: Group, num_experts: int) -> HeldExperts:
    """Return the experts of this rank."""
    count = num_experts // group.num_ranks
    held = torch.tensor([group.rank * count, count, num_experts], device="cpu")
    return held.as_subclass(HeldExperts)


def format_experts(held: Tensor) -> str:
    """Return the experts of a state as text for an error."""
    first, count, num_experts = held.tolist()
    return f"experts {first} to {first + count - 1} of {num_experts}"


def check_held(own: Tensor, other: Tensor) -> None:
    """Refuse a state with the experts of another rank; one on "meta" has no numbers."""
    if not other.is_meta and other.tolist() != own.tolist():
        raise EpicArgumentError(
            f"the state contains {format_experts(other)}, and this rank has {format_experts(own)}: "
            "a state_dict contains the experts of one rank; save and load with "
            "epic.torch.sharded_state(layer, mesh), which contains those of all ranks"
        )


def check_loaded(own: Tensor, state: dict[str, Any], prefix: str) -> None:
    """Refuse another rank's state before load_state_dict writes anything.

    The router and the shared expert are equal on all ranks, so that they may come from any.
    """
    names = (key.removeprefix(prefix) for key in state if key.startswith(prefix))
    if prefix + EXTRA in state and any(map(is_of_experts, names)):
        check_held(own, state[prefix + EXTRA])


# ------------------------------------------------------------- parameters of experts ----


def mark_experts(layer: nn.Module, group: Group) -> None:
    """Set `allreduce` = False on the parameters of experts.

    Megatron-Core and DeepSpeed read it, and add their gradients over ranks with the same experts
    only.
    """
    if group.num_ranks == 1:
        return
    for _, parameter in experts_in(layer):
        parameter.allreduce = False  # type: ignore[attr-defined]


def process_ranks(group: Group) -> set[int]:
    """Return the group's ranks as torch.distributed numbers them; empty if not known."""
    if group.process_ranks is not None:
        return set(group.process_ranks)
    is_world = (
        dist.is_initialized()
        and (dist.get_rank(), dist.get_world_size()) == (group.rank, group.num_ranks)
    )  # fmt: skip
    return set(range(group.num_ranks)) if is_world else set()


CHECKED: "weakref.WeakKeyDictionary[nn.Module, Any]" = weakref.WeakKeyDictionary()


def check_ddp(layer: nn.Module, group: Group) -> None:
    """Refuse DistributedDataParallel and replicate() over ranks that have different experts.

    It runs in a forward, because torch knows only there what wraps a module.  The name in torch is
    private, so a test checks it in each supported version.
    """
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is None or group.num_ranks == 1:
        return
    checked = CHECKED.get(layer)
    if checked is not None and checked() is wrapper:
        return
    ranks = process_ranks(group) & set(dist.get_process_group_ranks(wrapper.process_group))
    named = wrapper.module.named_parameters()
    taken = {id(p) for name, p in named if name not in wrapper.parameters_to_ignore}
    if len(ranks) > 1 and any(id(p) in taken for _, p in experts_in(layer)):
        raise EpicArgumentError(
            f"DistributedDataParallel is over ranks {format_ranks(ranks)}, which have different "
            "experts, and has made them equal to those of one rank: must be over ranks that have "
            'the same experts; pass process_group=mesh.get_group("dp"), for example, or use '
            "sum_gradients() without DistributedDataParallel; then make or load the model again"
        )
    CHECKED[layer] = weakref.ref(wrapper)


def check_sharding(group: Group, parameters: Iterable[tuple[str, Any]]) -> None:
    """Refuse parameters under fully_shard over ranks of the group.

    fully_shard assumes that the parameters of experts are equal on all its ranks.  It also adds the
    gradients of all other parameters, which sum_gradients would add again.
    """
    for name, parameter in parameters:
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None or group.num_ranks == 1:
            continue
        ranks = process_ranks(group) & set(mesh.mesh.flatten().tolist())
        if len(ranks) < 2:
            continue
        where = f"{name} is sharded over ranks {format_ranks(ranks)} of the group"
        if is_of_experts(name):
            raise EpicArgumentError(
                f"{where}, which have different experts: pass fully_shard the mesh of the other "
                'dimensions, for example mesh["dp"]; then make or load the model again'
            )
        raise EpicArgumentError(
            f"{where}, so fully_shard has already added its gradients: do not call sum_gradients, "
            'or pass fully_shard the mesh of the other dimensions, for example mesh["dp"]'
        )


def experts_in(layer: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a layer's own experts, with their names."""
    return [(name, p) for name, p in layer.named_parameters() if is_of_experts(name)]


def adapters_of_experts(module: nn.Module) -> list[nn.Parameter]:
    """Return the adapters in a wrapper of the peft package around a parameter of experts.

    Like the experts they belong to one rank.
    """
    if getattr(module, "parameter_name", None) not in OF_EXPERTS:
        return []
    return [p for name, p in module.named_parameters() if not name.startswith("base_layer.")]


def format_ranks(ranks: set[int]) -> str:
    """Return ranks as text for an error."""
    return ", ".join(map(str, sorted(ranks)))
