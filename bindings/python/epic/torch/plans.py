# SPDX-License-Identifier: Apache-2.0
"""The plan as a Python object, and the request from which one is made."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epic.errors import EpicArgumentError
from epic.options import Layer
from epic.torch.arguments import as_int32, count_of, is_traced
from epic.torch.groups import Group

EXACT = 0  # as capacity: as many slots as rows arrive
MAX_SPECS = 1024  # that a group keeps
SMS_SHIFT = 48  # numbers of groups and layers are below 2^48; call.h has it, too
MOST_SMS = (1 << 15) - 1


def limit_number(number: int, max_sms: int) -> int:
    """Return the number of a group or layer for calls of at most this many SMs; 0: the group's.

    The operators find the limit in the high bits of the number. Number 0, no group, stays 0.
    """
    if not isinstance(max_sms, int) or not 0 <= max_sms <= MOST_SMS:
        raise EpicArgumentError(f"max_sms is {max_sms!r}: must be an integer from 0 to {MOST_SMS}")
    bare = number & ((1 << SMS_SHIFT) - 1)
    return bare | max_sms << SMS_SHIFT if bare else 0


@dataclass(slots=True)
class PlanSpec:
    """Where the calls of a plan go: group, tag, the facts of its layer and its number.

    Its fields are read a dozen times per call; those of a tuple take twice as long.
    """

    group: Group
    tag: int
    top_k: int
    flat: bool
    num_experts: int
    num_logical: int
    plan_bytes: int  # size of the plan without the counts
    capacity: int  # slots of a rank that always suffice
    num_local: int
    room: int  # length of expert_rows and of expert_tokens in the counts
    layer: int  # number with which the library finds the layer and its group
    compared: tuple[Any, ...] = ()  # options of a whole layer that must be equal on all ranks


def make_spec(group: Group, layer: Layer, tag: int) -> PlanSpec:
    """Return the spec of a layer's calls. The group keeps it; tracers see it made each time."""
    size, bound, local, _, number, owner = group.facts(layer.key)
    # torch.compile treats the facts as constants, also the layer's number. But it guards every
    # branch of Python. So this branch makes it trace again for another group, or if the group was
    # closed. The statement inside changes nothing.
    if group.number != owner:
        size += 0
    spec = PlanSpec(
        group,
        tag,
        layer.top_k,
        layer.layout == "flat",
        layer.num_experts,
        layer.num_logical,
        size,
        bound,
        local,
        local,
        number,
    )
    if not is_traced():
        if len(group.specs) >= MAX_SPECS:  # for example if each call has a new tag
            group.specs.clear()
        group.specs[layer.key, tag] = spec
    return spec


class Plan(NamedTuple):
    """Where every choice goes, as `plan` and `plan_dispatch` return it.

    The counts are views of `bytes`: clone those that you write into. In compiled functions they are
    copies.

    Attributes:
        bytes: [n] uint8, which dispatch, combine and their gradients read, followed by the counts.
        num_tokens: Number of tokens of this rank.
        capacity: Slots of this rank.
        spec: Group, layer and tag.
    """

    bytes: Tensor
    num_tokens: int
    capacity: int
    spec: PlanSpec

    def counts(self, begin: int, count: int) -> Tensor:
        """Return some of the int32 numbers that follow the plan."""
        begin = self.spec.plan_bytes + 4 * begin
        found = self.bytes[begin : begin + 4 * count].view(torch.int32)
        # A compiled function may return a view of its input in another dtype. Torch then makes the
        # view again from its offset, but interprets the offset as bytes. So return a copy.
        return found.clone() if is_traced() else found

    def counted(self, name: str) -> Tensor:
        """Return the counts of that name.

        Compiled functions of torch 2.9 accept methods of a plan, but no properties.
        """
        room, experts = self.spec.room, self.spec.num_experts
        if name == "expert_rows":
            return self.counts(0, self.spec.num_local)
        if name == "expert_tokens":
            return self.counts(room, self.spec.num_local)
        if name == "load":
            return self.counts(2 * room, experts)
        if name == "demand":
            return self.counts(2 * room + experts, 1)
        return self.counts(2 * room + experts + 1, self.spec.num_logical)

    @property
    def expert_rows(self) -> Tensor:
        """[local experts] int32: number of rows of each expert, with padding."""
        return self.counted("expert_rows")

    @property
    def expert_tokens(self) -> Tensor:
        """[local experts] int32: number of rows of each expert, without padding."""
        return self.counted("expert_tokens")

    @property
    def load(self) -> Tensor:
        """[num_experts] int32: choices of each expert in the group, before drops."""
        return self.counted("load")

    @property
    def demand(self) -> Tensor:
        """[1] int32: number of slots that all choices of this rank's experts would need."""
        return self.counted("demand")

    @property
    def logical_load(self) -> Tensor | None:
        """[num_logical] int32: load of the logical experts; None without replicas."""
        return self.counted("logical_load") if self.spec.num_logical else None

    @property
    def load_of_ids(self) -> Tensor:
        """The load by the ids of topk_idx: logical experts if there are replicas."""
        logical = self.logical_load
        return self.load if logical is None else logical


def limit_spec(spec: PlanSpec, max_sms: int | None) -> PlanSpec:
    """Return the spec for calls of at most this many SMs; None: as it is."""
    if max_sms is None:
        return spec
    return replace(spec, layer=limit_number(spec.layer, max_sms))


def limit_plan(plan: Plan, max_sms: int | None) -> Plan:
    """Return the plan for calls of at most this many SMs; None: as it is."""
    return plan if max_sms is None else plan._replace(spec=limit_spec(plan.spec, max_sms))


def wrong_layout(spec: PlanSpec, other: str) -> EpicArgumentError:
    """Return the error of a dispatch that does not fit the layer's layout."""
    is_, needed = ("flat", "expert_major") if spec.flat else ("expert_major", "flat")
    return EpicArgumentError(f"layout is {is_!r}: must be {needed!r}, or use {other}")


def table_of(layer: Layer, table: Any, like: Tensor, name: str = "rank_of_expert") -> Any:
    """Return a table of one number per expert as an int32 tensor; None for None."""
    if table is None:
        return None
    found = as_int32(name, torch.as_tensor(table, device=like.device))
    if found.shape != (layer.num_experts,):
        raise EpicArgumentError(
            f"{name} has the shape {list(found.shape)}: must be [{layer.num_experts}]"
        )
    return found


def tables_of(layer: Layer, ranks: Any, logical: Any, like: Tensor) -> tuple[Any, Any]:
    """Return rank_of_expert and logical_of_expert as tensors, checked."""
    if bool(layer.num_logical) != (logical is not None):
        raise EpicArgumentError(
            f"logical_of_expert is {'None' if logical is None else 'given'} and num_logical is "
            f"{layer.num_logical}: must be given if num_logical is above 0, and None if it is 0"
        )
    whose = table_of(layer, logical, like, "logical_of_expert")
    return table_of(layer, ranks, like), whose


def check_local(spec: PlanSpec, ranks: Any, local: int, room: int) -> None:
    """Check num_local_experts against the largest number of experts of a rank.

    The host does not read a table on a GPU, so that only the range is checked there.
    """
    least = room if ranks is None else 1
    if ranks is not None and not is_traced() and getattr(ranks, "is_cpu", True):
        known = torch.as_tensor(ranks)  # the core reports invalid ranks
        known = known[(known >= 0) & (known < spec.group.num_ranks)]
        least = int(known.bincount(minlength=1).max())
    if not least <= local <= room:
        raise EpicArgumentError(
            f"num_local_experts is {local}: must be from {least} to {room}, the number of experts "
            "that a rank has"
        )


# A spec, num_tokens, capacity, and (rank_of_expert, logical_of_expert).
PlanRequest = tuple[PlanSpec, int, int, tuple[Any, Any]]


def resolve_request(
    group: Group,
    layer: Layer,
    topk_idx: Tensor,
    capacity: int | None,
    placed: tuple[Any, Any, int | None],
    tag: int,
    compared: tuple[Any, ...] = (),
) -> PlanRequest:
    """Return the request of a plan: its spec, num_tokens, capacity and tables.

    placed: rank_of_expert, logical_of_expert and num_local_experts; compared: as in PlanSpec.
    """
    spec = None if is_traced() else group.specs.get((layer.key, tag))
    if spec is None:
        spec = make_spec(group, layer, tag)
    if compared:
        spec = replace(spec, compared=compared)
    shape, top_k = topk_idx.shape, spec.top_k
    num_tokens = shape[0] if len(shape) == 2 and shape[1] == top_k else count_of(shape, top_k)
    slots = spec.capacity if capacity is None else capacity
    if not isinstance(slots, (int, torch.SymInt)) or slots < 0:
        raise EpicArgumentError(f"capacity is {slots!r}: must be an int, 0 (EXACT) or more")
    ranks, logical, local = placed
    if ranks is None and logical is None and local is None and not spec.num_logical:
        return spec, num_tokens, slots, (None, None)
    tables = tables_of(layer, ranks, logical, topk_idx)
    if ranks is not None:  # the core may write counts for more experts than num_local_experts
        if capacity is None or local is None:
            raise EpicArgumentError(
                f"capacity is {capacity} and num_local_experts is {local} with rank_of_expert: "
                "must both be given, because a placement may need more slots than the default "
                "capacity"
            )
        room = spec.num_experts
        spec = replace(spec, room=room)
    if local is not None:
        check_local(spec, ranks, local, spec.room)
        spec = replace(spec, num_local=local)
    return spec, num_tokens, slots, tables
