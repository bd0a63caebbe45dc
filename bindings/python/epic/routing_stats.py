# SPDX-License-Identifier: Apache-2.0
"""What a finished plan says, on the host: where each choice went, and why the others did not go."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from epic import _native

NO_EXPERT, EXPERT_FULL, RANK_FULL = -1, -2, -3


@dataclass(frozen=True)
class RoutingStats:
    """One rank's plan.  kept + none + expert_full + rank_full are its num_tokens * top_k choices.

    fate [num_tokens, top_k] int32: the slot on the rank that owns the expert, or NO_EXPERT,
    EXPERT_FULL (past Layer.expert_capacity), RANK_FULL (past the capacity of a rank); rank, of the
    same shape: that rank, -1 if there is none; on GPUs also of a choice that was dropped.
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
    """One plan's bytes, on the host; ints: the table of num_tokens rows from an offset."""
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
