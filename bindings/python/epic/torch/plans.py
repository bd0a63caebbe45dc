# SPDX-License-Identifier: Apache-2.0
"""What a plan is in Python, and what one is made of."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epic.errors import EpicArgumentError
from epic.options import Layer
from epic.torch.arguments import as_int32, count_of, is_traced
from epic.torch.groups import Group

EXACT = 0  # as capacity: as many slots as land
MAX_SPECS = 1024  # that a group keeps


@dataclass(slots=True)
class PlanSpec:
    """Where the calls of a plan go, what its layer counts, and what the operators are passed.  Its
    fields are read a dozen times a call: of a tuple that takes twice as long."""

    group: Group
    tag: int
    top_k: int
    flat: bool
    num_experts: int
    num_logical: int
    plan_bytes: int  # without the counts
    capacity: int  # of a rank, that can never overflow
    num_local: int
    room: int  # of expert_rows and of expert_tokens among the counts
    layer: int  # the layer's number, by which the library finds it and its group
    compared: tuple[Any, ...] = ()  # options of a whole layer that all ranks must have alike


def make_spec(group: Group, layer: Layer, tag: int) -> PlanSpec:
    """Of a layer's calls; the group keeps it, and tracers see it made."""
    size, bound, local, _, number = group.facts(layer.key)
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
        if len(group.specs) >= MAX_SPECS:  # a tag for each call, say
            group.specs.clear()
        group.specs[layer.key, tag] = spec
    return spec


class Plan(NamedTuple):
    """Where every choice goes.

    bytes [n] uint8: what dispatch, combine and their gradients read, and behind that int32 counts,
    of which the properties are views, so clone what you would write (in compiled functions they are
    copies): expert_rows and expert_tokens
    [num_local]; load [num_experts]; demand [1]; logical_load [num_logical], None without replicas.
    """

    bytes: Tensor
    num_tokens: int
    capacity: int
    spec: PlanSpec

    def counts(self, begin: int, count: int) -> Tensor:
        """A part of them."""
        begin = self.spec.plan_bytes + 4 * begin
        found = self.bytes[begin : begin + 4 * count].view(torch.int32)
        # What leaves a compiled function as a view in another dtype of what it was given, torch
        # makes anew from the offset, and takes that for one of bytes.
        return found.clone() if is_traced() else found

    def counted(self, name: str) -> Tensor:
        """One of the counts by its name; compiled functions of torch 2.9 take methods of a plan and
        no properties."""
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
        """Of each slab, padding included."""
        return self.counted("expert_rows")

    @property
    def expert_tokens(self) -> Tensor:
        """Of each slab, without padding."""
        return self.counted("expert_tokens")

    @property
    def load(self) -> Tensor:
        """Choices of each expert over the group, before any is dropped."""
        return self.counted("load")

    @property
    def demand(self) -> Tensor:
        """Slots that this rank would have needed."""
        return self.counted("demand")

    @property
    def logical_load(self) -> Tensor | None:
        """The load of logical experts."""
        return self.counted("logical_load") if self.spec.num_logical else None

    @property
    def load_of_ids(self) -> Tensor:
        """Of what ids name: experts, or the logical ones."""
        logical = self.logical_load
        return self.load if logical is None else logical


def wrong_layout(spec: PlanSpec, other: str) -> EpicArgumentError:
    """Each layout has a dispatch of its own, as their results differ in shape."""
    is_, needed = ("flat", "expert_major") if spec.flat else ("expert_major", "flat")
    return EpicArgumentError(f"layout {is_!r}: {needed!r} is needed here, else {other}")


def table_of(layer: Layer, table: Any, like: Tensor, name: str = "rank_of_expert") -> Any:
    """A number for each expert as a tensor; None stays None."""
    if table is None:
        return None
    found = as_int32(name, torch.as_tensor(table, device=like.device))
    if found.shape != (layer.num_experts,):
        raise EpicArgumentError(
            f"{name}: shape {list(found.shape)}: [{layer.num_experts}] is needed"
        )
    return found


def tables_of(layer: Layer, ranks: Any, logical: Any, like: Tensor) -> tuple[Any, Any]:
    """rank_of_expert and logical_of_expert."""
    if bool(layer.num_logical) != (logical is not None):
        raise EpicArgumentError(
            f"num_logical {layer.num_logical}: logical_of_expert [num_experts] comes with "
            "num_logical, and only then"
        )
    whose = table_of(layer, logical, like, "logical_of_expert")
    return table_of(layer, ranks, like), whose


def check_local(spec: PlanSpec, ranks: Any, local: int, room: int) -> None:
    """num_local_experts: as many as a rank has.  Of a table on a GPU the host does not know it."""
    least = room if ranks is None else 1
    if ranks is not None and not is_traced() and getattr(ranks, "is_cpu", True):
        known = torch.as_tensor(ranks)  # what is no rank the core says
        known = known[(known >= 0) & (known < spec.group.num_ranks)]
        least = int(known.bincount(minlength=1).max())
    if not least <= local <= room:
        raise EpicArgumentError(f"num_local_experts {local}: a rank has {least} of {room}")


# Way, num_tokens, slots, and (rank_of_expert, logical_of_expert).
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
    """What a plan is made of.  placed: rank_of_expert, logical_of_expert, num_local_experts;
    compared: as Way has them."""
    spec = None if is_traced() else group.specs.get((layer.key, tag))
    if spec is None:
        spec = make_spec(group, layer, tag)
    if compared:
        spec = replace(spec, compared=compared)
    shape, top_k = topk_idx.shape, spec.top_k
    num_tokens = shape[0] if len(shape) == 2 and shape[1] == top_k else count_of(shape, top_k)
    slots = spec.capacity if capacity is None else capacity
    if not isinstance(slots, (int, torch.SymInt)) or slots < 0:
        raise EpicArgumentError(f"capacity {slots!r}: an int, 0 (EXACT) or more, is needed")
    ranks, logical, local = placed
    if ranks is None and logical is None and local is None and not spec.num_logical:
        return spec, num_tokens, slots, (None, None)
    tables = tables_of(layer, ranks, logical, topk_idx)
    if ranks is not None:  # the core may write counts of more experts than the caller reckons with
        if capacity is None or local is None:
            raise EpicArgumentError(
                "rank_of_expert needs capacity=, as any placement may need more than the bound, "
                "and num_local_experts="
            )
        room = spec.num_experts
        spec = replace(spec, room=room)
    if local is not None:
        check_local(spec, ranks, local, spec.room)
        spec = replace(spec, num_local=local)
    return spec, num_tokens, slots, tables
