# SPDX-License-Identifier: Apache-2.0
"""The content of a finished plan: where each choice went, and why others were dropped."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from epic import _native

NO_EXPERT, EXPERT_FULL, RANK_FULL = -1, -2, -3


@dataclass(frozen=True)
class RoutingStats:
    """One rank's plan. kept + none + expert_full + rank_full are its num_tokens * top_k choices.

    Attributes:
        id: Number of the plan.
        num_tokens: Tokens of this rank.
        num_slots: Slots that this rank fills.
        capacity: Slots of this rank.
        kept: Choices that have a slot.
        none: Choices with a negative id.
        expert_full: Choices that were dropped because their expert had reached
            Layer.expert_capacity.
        rank_full: Choices that were dropped because a rank had no slots left.
        result: Name of the plan's result, "EPIC_OK" for example.
        total_tokens: Tokens of all ranks.
        fate: [num_tokens, top_k] int32: the slot on the rank that owns the expert, or NO_EXPERT
            (-1), EXPERT_FULL (-2), RANK_FULL (-3).
        rank: [num_tokens, top_k] int32: that rank, or -1 if there is none. On GPUs it is set also
            for a choice that was dropped.
    """

    id: int
    num_tokens: int
    num_slots: int
    capacity: int
    kept: int
    none: int
    expert_full: int
    rank_full: int
    result: str
    total_tokens: int
    fate: Any
    rank: Any


def read(address: int, size: int, ints: Callable[[int, int], Any]) -> RoutingStats:
    """Return the statistics of one plan, whose bytes are in host memory.

    ints(offset, num_tokens) returns num_tokens rows of the table at an offset of the plan.
    """
    info = _native.PlanInfo()
    _native.check(_native.core().epic_plan_read_v1(address, size, *_native.sized(info)))
    return RoutingStats(
        info.id,
        info.num_tokens,
        info.num_slots,
        info.capacity,
        info.num_kept,
        info.num_none,
        info.num_expert_full,
        info.num_rank_full,
        _native.RESULTS[info.result],
        info.total_tokens,
        ints(info.fate_offset, info.num_tokens),
        ints(info.rank_offset, info.num_tokens),
    )
