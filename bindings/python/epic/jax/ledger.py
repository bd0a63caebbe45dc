# SPDX-License-Identifier: Apache-2.0
"""What a finished plan says, on the host: where each choice went, and why the others did not go."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from epic import _native
from epic.errors import EpicArgumentError
from epic.jax.steps import PLAN_TAIL, Plan, Record

NO_EXPERT, EXPERT_FULL, RANK_FULL = -1, -2, -3


@dataclass(frozen=True)
class Ledger:
    """One device's plan.  kept + none + expert_full + rank_full are its num_tokens * top_k choices.

    fate [num_tokens, top_k] int32: the slot on the rank that owns the expert, or NO_EXPERT,
    EXPERT_FULL (past Layer.expert_capacity), RANK_FULL (past the capacity of a device); rank, of
    the same shape: that rank, -1 if there is none.
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
    fate: np.ndarray
    rank: np.ndarray


def read(data: np.ndarray, top_k: int) -> Ledger:
    """One plan's bytes."""
    info = _native.PlanInfo()
    _native.check(
        _native.core().epic_plan_read_v1(data.ctypes.data, data.nbytes, *_native.sized(info))
    )
    shape = (info.num_tokens, top_k)

    def ints(offset: int) -> np.ndarray:
        return np.frombuffer(data, np.int32, shape[0] * top_k, offset).reshape(shape)

    return Ledger(
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
        ints(info.fate_offset),
        ints(info.rank_offset),
    )


def read_plan(plan: Plan | Record) -> list[Ledger]:
    """The plan of each device, in the order in which a shard_map stacked them; waits for them.
    plan: of the steps, or MoeOut.record.  Outside of compiled programs, of arrays that this process
    has."""
    whole: Any = plan.bytes
    if isinstance(whole, jax.core.Tracer) or not whole.is_fully_addressable:
        raise EpicArgumentError(
            "plan: its bytes are traced, or of other processes too: return the plan from the "
            "program, and of one shard give dataclasses.replace(plan, "
            "bytes=plan.bytes.addressable_shards[i].data)"
        )
    size = plan.way.group.plan_bytes(plan.way.layer)
    every = np.asarray(whole).reshape(-1, size + PLAN_TAIL)
    return [read(row[:size].copy(), plan.way.layer.top_k) for row in every]
