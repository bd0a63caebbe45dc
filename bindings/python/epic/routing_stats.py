# SPDX-License-Identifier: Apache-2.0
"""The content of a finished plan: the slot of each choice, or the reason why it has none."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from epic import _native

# the negative values of RoutingStats.fate
NO_EXPERT, EXPERT_FULL, RANK_FULL, EXPERT_ABSENT = -1, -2, -3, -4


@dataclass(frozen=True)
class RoutingStats:
    """The fate of all choices of one rank's tokens in one plan.

    kept + none + expert_full + rank_full + absent is the number of choices, num_tokens * top_k.

    Attributes:
        id: Id of the plan, equal on all ranks.
        num_tokens: Number of tokens of this rank.
        num_slots: Number of slots of this rank that are filled.
        capacity: Number of slots of this rank.
        kept: Number of choices that have a slot.
        none: Number of choices with a negative id.
        expert_full: Number of choices that were dropped because their expert had reached
            Layer.expert_capacity.
        rank_full: Number of choices that were dropped because a rank had no free slot.
        absent: Number of choices that were dropped because their logical expert has no replica
            (Layer.drop_absent).
        result: Name of the plan's result, for example "EPIC_OK".
        total_tokens: Number of tokens of all ranks.
        fate: [num_tokens, top_k] int32: the slot of each choice, on the rank that owns the expert.
            Or NO_EXPERT (-1), EXPERT_FULL (-2), RANK_FULL (-3) or EXPERT_ABSENT (-4).
        rank: [num_tokens, top_k] int32: the rank that owns the expert; -1 for a choice without an
            expert or with an absent one. On GPUs also -1 for every other dropped choice.
    """

    id: int
    num_tokens: int
    num_slots: int
    capacity: int
    kept: int
    none: int
    expert_full: int
    rank_full: int
    absent: int
    result: str
    total_tokens: int
    fate: Any
    rank: Any


def read(address: int, size: int, ints: Callable[[int, int], Any]) -> RoutingStats:
    """Read the statistics of one plan, whose bytes are in host memory.

    Args:
        address: Address of the bytes.
        size: Number of bytes.
        ints: A function (offset, num_tokens) that returns the int32 table [num_tokens, top_k] at
            this offset in the bytes.
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
        info.num_absent,
        _native.RESULTS[info.result],
        info.total_tokens,
        ints(info.fate_offset, info.num_tokens),
        ints(info.rank_offset, info.num_tokens),
    )
