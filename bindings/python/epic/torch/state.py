# SPDX-License-Identifier: Apache-2.0
"""Checks for the parameters of experts, which differ between the ranks of a group.

Data parallelism assumes that every parameter is equal on all ranks. That is false for parameters
of experts. So this module refuses DistributedDataParallel and fully_shard over ranks that have
different experts. A layer's state_dict contains the experts of one rank only. So it also contains
the numbers of these experts, and loading it on another rank is an error.
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
from epic.torch.moe import EXPERT_WEIGHTS

EXTRA = "_extra_state"  # the key under which torch saves get_extra_state()


# Matches the names of experts' parameters, and names that torch.nn.utils derives from them:
# w_down_orig and w_down_mask (prune), w_down_g and w_down_v (weight_norm), and
# parametrizations.w_down.original.
DERIVED = re.compile(rf"(parametrizations\.)?({'|'.join(EXPERT_WEIGHTS)})(_orig|_mask|_g|_v|\..*)?")


def is_of_experts(name: str) -> bool:
    """Return whether a parameter or buffer of a layer belongs to the experts of this rank.

    name: its name in the layer, without the name of the layer.
    """
    return DERIVED.fullmatch(name) is not None


# ------------------------------------------------------------------ which experts ----


class CheckedTensor(Tensor):
    """A tensor into which only equal values may be copied. Others show that a state does not fit.

    torch.save, safetensors and torch.distributed.checkpoint save it as a plain tensor.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.copy_ and isinstance(args[0], cls):
            args[0].check(args[1])
        return super().__torch_function__(func, types, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, _: Any) -> Tensor:
        return self.clone()

    def check(self, other: Tensor) -> None:
        """Raise an error if `other` has other values. One on "meta" has none, so it passes."""
        raise NotImplementedError


class HeldExperts(CheckedTensor):
    """The numbers of the experts in a state_dict: int64 [first, count, num_experts, ...].

    With replicas the logical expert of each of these experts follows. In
    dcp.load(layer.state_dict()) other numbers show that the checkpoint has the experts of another
    rank.
    """

    def check(self, other: Tensor) -> None:
        """Raise an error if `other` contains other experts."""
        check_held(self, other)


class ReplicaTable(CheckedTensor):
    """The table logical_of_expert of a layer: int64 [num_experts].

    The parameters of experts in a checkpoint are those of the experts in its table.
    """

    def check(self, other: Tensor) -> None:
        """Raise an error if `other` is another table."""
        if other.is_meta or other.tolist() == self.tolist():
            return
        raise EpicArgumentError(
            f"the checkpoint has logical_of_expert {other.tolist()}, and the layer has "
            f"{self.tolist()}: must be equal, because rows of its parameters are experts; make the "
            "layer with the table of the checkpoint"
        )


def held_experts(group: Group, num_experts: int, logical: Iterable[int] = ()) -> HeldExperts:
    """Return the numbers of this rank's experts, in contiguous blocks by rank.

    Args:
        group: The group.
        num_experts: Number of experts of all ranks.
        logical: The logical expert of each of this rank's experts; empty without replicas.
    """
    count = num_experts // group.num_ranks
    held = torch.tensor([group.rank * count, count, num_experts, *logical], device="cpu")
    return held.as_subclass(HeldExperts)


def replica_table(logical_of_expert: Tensor) -> ReplicaTable:
    """Return the table of a layer as an entry of a checkpoint."""
    on_meta = logical_of_expert.is_meta
    table = logical_of_expert if on_meta else logical_of_expert.to("cpu", torch.int64, copy=True)
    return table.as_subclass(ReplicaTable)


def format_experts(held: Tensor) -> str:
    """Return the experts that a HeldExperts stands for, as text for an error."""
    first, count, num_experts, *logical = held.tolist()
    replicas = f" (replicas of {', '.join(map(str, logical))})" if logical else ""
    return f"experts {first} to {first + count - 1} of {num_experts}{replicas}"


def check_held(own: Tensor, other: Tensor) -> None:
    """Raise an error if `other`, of a state, is not equal to `own`, of this rank.

    A tensor on "meta" has no values, so it passes.
    """
    if other.is_meta or other.tolist() == own.tolist():
        return
    found = f"the state contains {format_experts(other)}, and this rank has {format_experts(own)}: "
    if other.tolist()[:3] == own.tolist()[:3]:
        raise EpicArgumentError(
            found + "must have the same table logical_of_expert; load each expert by its logical id"
        )
    raise EpicArgumentError(
        found + "a state_dict contains the experts of one rank; save and load with "
        "epic.torch.sharded_state(layer, mesh), which contains those of all ranks"
    )


def check_loaded(own: Tensor, state: dict[str, Any], prefix: str) -> None:
    """Raise an error if load_state_dict would load the experts of another rank.

    Call it before anything is loaded. A state without parameters of experts passes, because router
    and shared expert are equal on all ranks.

    Args:
        own: The HeldExperts of this rank.
        state: The state_dict of a whole model.
        prefix: Prefix of the layer's names in the state.
    """
    names = (key.removeprefix(prefix) for key in state if key.startswith(prefix))
    if prefix + EXTRA in state and any(map(is_of_experts, names)):
        check_held(own, state[prefix + EXTRA])


# ------------------------------------------------------------- parameters of experts ----


def mark_experts(layer: nn.Module, group: Group) -> None:
    """Set the attribute `allreduce` to False on the parameters of experts.

    Megatron-Core and DeepSpeed read this attribute. They add gradients of such parameters only over
    ranks that have the same experts.
    """
    if group.num_ranks == 1:
        return
    for _, parameter in experts_in(layer):
        parameter.allreduce = False  # type: ignore[attr-defined]


def process_ranks(group: Group) -> set[int]:
    """Return the global ranks, in torch.distributed, of the group's ranks.

    Returns an empty set if they are not known: the group was opened without a process group, and
    its ranks are not those of torch.distributed.
    """
    if group.process_ranks is not None:
        return set(group.process_ranks)
    is_world = (
        dist.is_initialized()
        and (dist.get_rank(), dist.get_world_size()) == (group.rank, group.num_ranks)
    )  # fmt: skip
    return set(range(group.num_ranks)) if is_world else set()


# For each layer that passed check_ddp: a weak reference to the DistributedDataParallel around it.
CHECKED: "weakref.WeakKeyDictionary[nn.Module, Any]" = weakref.WeakKeyDictionary()


def check_ddp(layer: nn.Module, group: Group) -> None:
    """Raise an error in DistributedDataParallel or replicate() over ranks with different experts.

    Call it in the forward of a layer, because only there torch knows which wrapper is active.
    _active_ddp_module is a private name of torch, so a test checks it in each supported version.
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
    """Raise an error if fully_shard has sharded one of the parameters over ranks of the group.

    fully_shard assumes that all its ranks have the same experts. It also adds the gradients of all
    other parameters over its ranks, and sum_gradients would add them a second time.

    Args:
        group: The group of the layer.
        parameters: Names and parameters, as named_parameters() returns them.
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
    """Return the names and parameters of a layer's experts."""
    return [(name, p) for name, p in layer.named_parameters() if is_of_experts(name)]


def adapters_of_experts(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of the adapters on one parameter of experts.

    Like the experts, these adapters belong to one rank.

    Args:
        module: Any module. Only a ParamWrapper of the peft package on a parameter of experts has
            such adapters; the result is empty for all others.
    """
    if getattr(module, "parameter_name", None) not in EXPERT_WEIGHTS:
        return []
    return [p for name, p in module.named_parameters() if not name.startswith("base_layer.")]


def format_ranks(ranks: set[int]) -> str:
    """Return ranks as text for an error."""
    return ", ".join(map(str, sorted(ranks)))
