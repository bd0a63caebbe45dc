# SPDX-License-Identifier: Apache-2.0
"""Placement: which experts the ranks of a group have, also after ranks have left the group."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from epic.errors import EpicArgumentError, EpicUnsupportedError
from epic.options import Layer, check_int, check_kind
from epic.torch.groups import Group

ABSENT = -1  # EPIC_ABSENT: the expert is a replica of no logical expert


class Placement:
    """The table logical_of_expert of a layer, which follows the members of its group.

    Each rank has num_experts / num_ranks experts, with ids in contiguous blocks by rank. The table
    contains the logical expert that each of them is a replica of. It is a tensor whose address
    never changes, so a captured CUDA graph stays valid.

    After `Group.shrink` some logical experts may have no replica on a member. `restore` makes
    experts of the members replicas of them, and calls a function that loads their parameters. All
    other experts of the members stay as they are, so a logical expert that still has a replica is
    never loaded.

    Pass the placement to `MoE` as logical_of_expert=, and its table to `plan`, `plan_dispatch` and
    `moe`. Several layers may share a placement.

    Args:
        group: The open group.
        layer: The layer, with num_logical. num_ranks must divide its num_experts. Its sum_order
            must not be "tree".
        logical_of_expert: Integers [num_experts], equal on all ranks: the first table. An entry -1
            marks an expert that is a replica of no logical expert. None: expert e is a replica of
            e % num_logical.

    Raises:
        EpicArgumentError: The layer does not fit the group, the table has a wrong length or
            contains an invalid number, or a logical expert has no replica.
        EpicUnsupportedError: The layer has sum_order "tree".

    Example:
        >>> import torch, epic.torch
        >>> layer = epic.torch.Layer(num_experts=4, top_k=1, num_logical=2)
        >>> with epic.torch.Group(num_ranks=1, max_tokens=2, max_row_bytes=32) as group:
        ...     placement = epic.torch.Placement(group, layer)
        ...     plan = epic.torch.plan(
        ...         group, layer, torch.tensor([[1], [0]]),
        ...         logical_of_expert=placement.logical_of_expert,
        ...     )
        ...     placement.local_experts, placement.absent
        ((0, 1, 0, 1), ())

    """

    def __init__(
        self, group: Group, layer: Layer, logical_of_expert: Sequence[int] | None = None
    ) -> None:
        check_kind("layer", layer, Layer)
        if not layer.num_logical:
            raise EpicArgumentError(
                "num_logical is 0: must be above 0; without replicas, pass the number of experts"
            )
        if layer.num_experts % group.num_ranks:
            raise EpicArgumentError(
                f"num_experts is {layer.num_experts}: must be a multiple of {group.num_ranks}, the "
                "number of ranks"
            )
        if layer.sum_order == "tree":
            raise EpicUnsupportedError(
                'sum_order is "tree": not supported, because its blocks of experts depend on the '
                'number of members; pass "by_rank"'
            )
        self.group, self.layer = group, layer
        self.num_local = layer.num_experts // group.num_ranks
        if logical_of_expert is None:
            logical_of_expert = [e % layer.num_logical for e in range(layer.num_experts)]
        table = [
            check_int(f"logical_of_expert[{expert}]", logical, ABSENT, layer.num_logical - 1)
            for expert, logical in enumerate(logical_of_expert)
        ]
        self.check_table(table)
        with torch.inference_mode(False):  # so that restore can change it outside of inference mode
            self.logical_of_expert = torch.tensor(table, dtype=torch.int32, device=group.device)

    def check_table(self, table: list[int]) -> None:
        """Raise an error for a first table that does not fit the layer."""
        layer = self.layer
        if len(table) != layer.num_experts:
            raise EpicArgumentError(
                f"logical_of_expert has {len(table)} elements: must have {layer.num_experts}, the "
                "number of experts"
            )
        missing = self.find_absent(table)
        if missing and not layer.drop_absent:
            raise EpicArgumentError(
                f"logical_of_expert has no replica of logical expert {missing[0]} on a member: "
                "must have one; or pass drop_absent=True to the layer"
            )

    def check_layer(self, group: Group, layer: Layer) -> None:
        """Raise an error if this placement was made for another group or layer."""
        if group is not self.group or layer != self.layer:
            raise EpicArgumentError(
                f"logical_of_expert is a Placement of {self.group!r} and {self.layer}: must be one "
                f"of {group!r} and {layer}"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Placement":
        """Return the placement itself: copies of a module share it and its table."""
        memo[id(self.logical_of_expert)] = self.logical_of_expert
        return self

    def find_absent(self, table: list[int]) -> list[int]:
        """Return the logical experts that have no replica on a member, in ascending order."""
        present = {table[expert] for expert in self.experts_of_members()}
        return [logical for logical in range(self.layer.num_logical) if logical not in present]

    def experts_of_members(self) -> list[int]:
        """Return the ids of the experts that members have, in ascending order."""
        count = self.num_local
        return [r * count + i for r in self.group.members.ranks for i in range(count)]

    @property
    def absent(self) -> tuple[int, ...]:
        """The logical experts that no member has, in ascending order; after a shrink the lost ones.

        On GPUs the host waits for the table.
        """
        return tuple(self.find_absent(self.logical_of_expert.tolist()))

    @property
    def local_experts(self) -> tuple[int, ...]:
        """The logical expert of each of this rank's experts, or -1. On GPUs the host waits."""
        first = self.group.rank * self.num_local
        return tuple(self.logical_of_expert[first : first + self.num_local].tolist())

    def restore(self, load: Callable[[int, int], object]) -> None:
        """Make experts of the members replicas of the lost logical experts.

        Call it on all members after `Group.shrink`, before the next step. It does not communicate.
        For each lost logical expert it first uses an expert that is a replica of none, and then an
        expert of the logical expert with the most replicas. It spreads the lost experts over the
        members. All ranks compute the same table. Experts of ranks that are not members get -1.

        Args:
            load: A function (logical, local). It writes the parameters of logical expert `logical`
                into row `local` of this rank's parameters, for all layers that share this
                placement, and the same rows of the optimizer's state. It is called only for
                experts of this rank that have changed. If it raises an error, the table of this
                rank stays as it was. Then call restore again before the next step. Otherwise the
                tables of the ranks differ, and the next plan breaks the group (EPIC_EMISMATCH).

        Raises:
            EpicArgumentError: The members have too few experts. With Layer(drop_absent=True) the
                last lost experts stay absent instead.

        Example:
            members = group.shrink(step=step)
            placement.restore(lambda logical, local: weight[local].copy_(saved[logical]))
        """
        old = self.logical_of_expert.tolist()
        table = self.find_table(old)
        first = self.group.rank * self.num_local
        for local, logical in enumerate(table[first : first + self.num_local]):
            if logical != old[first + local]:
                load(logical, local)
        self.logical_of_expert.copy_(torch.tensor(table, dtype=torch.int32))

    def find_table(self, old: list[int]) -> list[int]:
        """Return the table in which lost experts are replaced.

        Args:
            old: The table before.
        """
        on_members = self.experts_of_members()
        table = [ABSENT] * len(old)
        for expert in on_members:
            table[expert] = old[expert]
        replicas = Counter(table)
        loads: Counter[int] = Counter()  # number of experts that each rank has to load
        lost = self.find_absent(old)
        for logical in lost:
            free = [e for e in on_members if table[e] == ABSENT or replicas[table[e]] > 1]
            if not free and not self.layer.drop_absent:
                raise EpicArgumentError(
                    f"num_experts is {self.layer.num_experts}: the {len(on_members)} experts of "
                    f"the members must be at least {self.layer.num_logical}, num_logical; make "
                    "num_experts larger, or pass drop_absent=True to the layer"
                )
            if not free:
                break

            def cost(expert: int) -> tuple[bool, int, int, int]:
                """Return the key by which the cheapest expert is chosen."""
                is_used, rank = table[expert] != ABSENT, expert // self.num_local
                return is_used, -is_used * replicas[table[expert]], loads[rank], expert

            chosen = min(free, key=cost)
            replicas[table[chosen]] -= 1
            replicas[logical] += 1
            table[chosen] = logical
            loads[chosen // self.num_local] += 1
        return table
