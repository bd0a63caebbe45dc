# SPDX-License-Identifier: Apache-2.0
"""The plan as a Python object, and the checked arguments from which a plan is made."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epic.errors import EpicArgumentError
from epic.options import Layer
from epic.torch.arguments import as_int32, as_rows, as_weights, count_of, is_traced
from epic.torch.groups import Group
from epic.torch.ops import SMS_SHIFT

EXACT = 0  # a value of capacity: as many slots as rows arrive
MAX_SPECS = 1024  # largest number of PlanSpecs that a group stores
MOST_SMS = (1 << 15) - 1  # largest value of max_sms


def limit_number(number: int, max_sms: int) -> int:
    """Put a limit of SMs into the high bits of the number of a group or layer.

    The operators read the limit from these bits.

    Args:
        number: Number of a group or layer; 0, which stands for no group, stays 0.
        max_sms: Largest number of SMs of a call; 0: that of the group.

    Raises:
        EpicArgumentError: max_sms is out of range.
    """
    if not isinstance(max_sms, int) or not 0 <= max_sms <= MOST_SMS:
        raise EpicArgumentError(f"max_sms is {max_sms!r}: must be an integer from 0 to {MOST_SMS}")
    bare = number & ((1 << SMS_SHIFT) - 1)
    return bare | max_sms << SMS_SHIFT if bare else 0


@dataclass(slots=True)
class PlanSpec:
    """The group, the tag and the sizes of a layer that the calls on a plan use.

    A call reads these fields about a dozen times. Reading a field of this class takes half the time
    of reading one of a NamedTuple.
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
    room: int  # elements of expert_rows, and of expert_tokens, in the counts: at least num_local
    layer: int  # number with which the library finds the layer and its group
    compared: tuple[Any, ...] = ()  # options of a whole layer that must be equal on all ranks
    count_bytes: int = 4  # size of an element of expert_rows and expert_tokens: 4 or 8


def make_spec(group: Group, layer: Layer, tag: int, count_bytes: int) -> PlanSpec:
    """Make the PlanSpec of a layer's calls. The group stores it, except inside of torch.compile."""
    size, bound, local, _, number, owner = group.facts(layer.key, count_bytes)
    # torch.compile treats the facts as constants, also the layer's number. But it guards each
    # branch of Python code. So with this branch it traces again for another group, or if the group
    # was closed. The statement in the branch changes nothing.
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
        count_bytes=count_bytes,
    )
    if not is_traced():
        if len(group.specs) >= MAX_SPECS:  # for example if each call has a new tag
            group.specs.clear()
        group.specs[layer.key, tag, count_bytes] = spec
    return spec


class Plan(NamedTuple):
    """The plan of one step: where every choice goes. `plan` and `plan_dispatch` return it.

    The counts (expert_rows, expert_tokens, load, demand and logical_load) are views of `bytes`. So
    clone a count before you write into it. In compiled functions the counts are copies.

    Attributes:
        bytes: [n] uint8: the plan, which dispatch, combine and their gradients read, and the counts
            after it.
        num_tokens: Number of tokens of this rank.
        capacity: Number of slots of this rank.
        spec: Group, layer and tag.
        capacity_limit: The tensor that limited the number of slots further, or None.
    """

    bytes: Tensor
    num_tokens: int
    capacity: int
    spec: PlanSpec
    capacity_limit: Tensor | None = None

    def counts(self, begin: int, count: int, size: int = 4) -> Tensor:
        """Return `count` integers of `size` bytes each, from byte `begin` after the plan on."""
        begin += self.spec.plan_bytes
        dtype = torch.int64 if size == 8 else torch.int32
        found = self.bytes[begin : begin + size * count].view(dtype)
        # If a compiled function returns a view of its input in another dtype, torch makes the view
        # again after the call. But it takes the offset of the view for a number of bytes, so the
        # new view is wrong. A copy avoids this.
        return found.clone() if is_traced() else found

    def counted(self, name: str) -> Tensor:
        """Return the count with this name.

        Use it in code that torch.compile traces, because torch 2.9 cannot trace the properties.
        """
        spec = self.spec
        room, size = spec.room * spec.count_bytes, spec.count_bytes
        if name == "expert_rows":
            return self.counts(0, spec.num_local, size)
        if name == "expert_tokens":
            return self.counts(room, spec.num_local, size)
        demand = 2 * room + 4 * spec.num_experts
        if name == "load":
            return self.counts(2 * room, spec.num_experts)
        if name == "demand":
            return self.counts(demand, 1)
        return self.counts(demand + 4, spec.num_logical)

    @property
    def expert_rows(self) -> Tensor:
        """Number of rows of each local expert with padding: [local experts], of counts_dtype."""
        return self.counted("expert_rows")

    @property
    def expert_tokens(self) -> Tensor:
        """Number of rows of each local expert without padding: [local experts], of counts_dtype."""
        return self.counted("expert_tokens")

    @property
    def load(self) -> Tensor:
        """Choices of each expert over the whole group, before drops: [num_experts] int32."""
        return self.counted("load")

    @property
    def demand(self) -> Tensor:
        """Number of slots that all choices of this rank's experts would need: [1] int32."""
        return self.counted("demand")

    @property
    def has_overflow(self) -> Tensor:
        """[1] bool: whether all choices of this rank's experts need more slots than it has.

        On GPUs the host does not wait. With overflow="drop" such a plan has dropped choices. With
        "error" the plan's calls return zeros, and group.check() raises the error. Choices that
        expert_capacity drops count as choices, so with expert_capacity it is often true. With
        capacity_limit, read it before the limit changes.
        """
        if self.capacity_limit is None:
            return self.counted("demand") > self.capacity
        return self.counted("demand") > self.capacity_limit.clamp(1, self.capacity)

    @property
    def logical_load(self) -> Tensor | None:
        """Load of each logical expert: [num_logical] int32; None without replicas."""
        return self.counted("logical_load") if self.spec.num_logical else None

    @property
    def load_of_ids(self) -> Tensor:
        """The load by the ids in topk_idx: logical_load with replicas, else load."""
        logical = self.logical_load
        return self.load if logical is None else logical


def limit_spec(spec: PlanSpec, max_sms: int | None) -> PlanSpec:
    """Return a spec for calls that use at most max_sms SMs; None: the spec unchanged."""
    if max_sms is None:
        return spec
    return replace(spec, layer=limit_number(spec.layer, max_sms))


def limit_plan(plan: Plan, max_sms: int | None) -> Plan:
    """Return a plan for calls that use at most max_sms SMs; None: the plan unchanged."""
    return plan if max_sms is None else plan._replace(spec=limit_spec(plan.spec, max_sms))


def rows_and_weights(
    plan: Plan, tokens: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return tokens as [num_tokens, hidden] and weights as [num_tokens, top_k], after checks."""
    num_tokens = plan.num_tokens
    rows = as_rows("tokens", tokens, num_tokens)
    return rows, as_weights("weights", weights, (num_tokens, plan.spec.top_k), tokens)


def wrong_layout(spec: PlanSpec, other: str) -> EpicArgumentError:
    """Return the error for a function that does not support the layer's layout.

    other: the function to use instead.
    """
    is_, needed = ("flat", "expert_major") if spec.flat else ("expert_major", "flat")
    return EpicArgumentError(f"layout is {is_!r}: must be {needed!r}, or use {other}")


def table_of(layer: Layer, table: Any, like: Tensor, name: str = "rank_of_expert") -> Any:
    """Return a table with one number for each expert as int32 [num_experts]; None for None.

    Args:
        layer: The layer.
        table: The table, anything that torch.as_tensor accepts, or None.
        like: A tensor on the device of the result.
        name: The name of the table in errors.
    """
    if table is None:
        return None
    try:
        found = torch.as_tensor(table, device=like.device)
    except (RuntimeError, TypeError, ValueError):
        kind = type(table).__name__
        raise EpicArgumentError(f"{name} is a {kind}: must be integers [num_experts]") from None
    found = as_int32(name, found)
    if found.shape != (layer.num_experts,):
        raise EpicArgumentError(
            f"{name} has the shape {list(found.shape)}: must be [{layer.num_experts}]"
        )
    return found


def tables_of(layer: Layer, ranks: Any, logical: Any, like: Tensor) -> tuple[Any, Any]:
    """Return rank_of_expert and logical_of_expert as int32 tensors, after checking them.

    Args:
        layer: The layer.
        ranks: rank_of_expert, or None.
        logical: logical_of_expert, a Placement, or None.
        like: A tensor on the device of the results.
    """
    logical = getattr(logical, "logical_of_expert", logical)
    if bool(layer.num_logical) != (logical is not None):
        raise EpicArgumentError(
            f"logical_of_expert is {'None' if logical is None else 'given'} and num_logical is "
            f"{layer.num_logical}: must be given if num_logical is above 0, and None if it is 0"
        )
    whose = table_of(layer, logical, like, "logical_of_expert")
    return table_of(layer, ranks, like), whose


def check_local(spec: PlanSpec, ranks: Any, local: int, room: int) -> None:
    """Raise an error if num_local_experts is too small or too large.

    It must be at least the largest number of experts of a rank. If the table is on a GPU, only the
    range is checked, because reading the table would make the host wait.

    Args:
        spec: The spec.
        ranks: rank_of_expert, or None.
        local: num_local_experts.
        room: Largest valid value.
    """
    least = room if ranks is None else 1
    if ranks is not None and not is_traced() and getattr(ranks, "is_cpu", True):
        valid_ranks = torch.as_tensor(ranks)  # the core reports invalid ranks
        valid_ranks = valid_ranks[(valid_ranks >= 0) & (valid_ranks < spec.group.num_ranks)]
        least = int(valid_ranks.bincount(minlength=1).max())
    if not least <= local <= room:
        raise EpicArgumentError(
            f"num_local_experts is {local}: must be from {least} to {room}, the number of experts "
            "that a rank has"
        )


# The checked arguments of a plan: spec, num_tokens, capacity, (rank_of_expert, logical_of_expert).
# With a capacity_limit it is a third element of the last tuple.
PlanRequest = tuple[PlanSpec, int, int, tuple[Any, ...]]


def check_limit(limit: Any, name: str, like: Tensor) -> None:
    """Check the argument capacity_limit.

    Args:
        limit: The argument.
        name: Name of a tensor of the call, for errors.
        like: This tensor, on whose device the limit must be.
    """
    if not isinstance(limit, Tensor) or limit.dtype != torch.int32 or limit.dim() != 0:
        found = f"{limit.dtype} {list(limit.shape)}" if isinstance(limit, Tensor) else repr(limit)
        raise EpicArgumentError(f"capacity_limit is {found}: must be a 0-d int32 tensor, or None")
    if limit.device != like.device:
        raise EpicArgumentError(
            f"capacity_limit is on {limit.device}: must be on {like.device}, as {name}"
        )


def limit_capacity(request: PlanRequest, limit: Any, chosen: Tensor, out: Any) -> PlanRequest:
    """Check the argument capacity_limit, and return the request with it.

    Args:
        request: The request without the limit.
        limit: The argument capacity_limit.
        chosen: The argument topk_idx.
        out: The argument out.
    """
    spec, num_tokens, slots, tables = request
    check_limit(limit, "topk_idx", chosen)
    if slots == EXACT or out is not None:
        name = "capacity=EXACT" if slots == EXACT else "out="
        raise EpicArgumentError(f"capacity_limit is a tensor with {name}: must be None")
    return spec, num_tokens, slots, (*tables, limit)


def resolve_request(
    group: Group,
    layer: Layer,
    topk_idx: Tensor,
    capacity: int | None,
    placed: tuple[Any, Any, int | None],
    tag: int,
    compared: tuple[Any, ...] = (),
    counts_dtype: torch.dtype = torch.int32,
) -> PlanRequest:
    """Check the arguments of a plan and return them as a PlanRequest.

    Args:
        group: As for `plan`.
        layer: As for `plan`.
        topk_idx: As for `plan`.
        capacity: As for `plan`.
        placed: rank_of_expert, logical_of_expert and num_local_experts, as for `plan`.
        tag: As for `plan`.
        compared: As for `plan`.
        counts_dtype: As for `plan`.
    """
    count_bytes = 4
    if counts_dtype != torch.int32:
        if counts_dtype != torch.int64:
            raise EpicArgumentError(
                f"counts_dtype is {counts_dtype!r}: must be torch.int32 or torch.int64"
            )
        count_bytes = 8
    spec = None if is_traced() else group.specs.get((layer.key, tag, count_bytes))
    if spec is None:
        spec = make_spec(group, layer, tag, count_bytes)
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
    # With a table, the core may write counts for more experts than num_local_experts.
    if ranks is not None:
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
