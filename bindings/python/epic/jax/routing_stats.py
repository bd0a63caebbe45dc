# SPDX-License-Identifier: Apache-2.0
"""read_plan: returns the content of finished plans on the host."""

from typing import Any

import jax
import numpy as np

from epic import routing_stats
from epic.errors import EpicArgumentError
from epic.jax.arrays import check_kind
from epic.jax.steps import PLAN_TAIL, Plan, Record
from epic.routing_stats import EXPERT_ABSENT, EXPERT_FULL, NO_EXPERT, RANK_FULL, RoutingStats

__all__ = [
    "EXPERT_ABSENT",
    "EXPERT_FULL",
    "NO_EXPERT",
    "RANK_FULL",
    "RoutingStats",
    "read_plan",
    "read_record",
]


def read_record(data: np.ndarray, top_k: int) -> RoutingStats:
    """Return the statistics of one plan; data: its bytes."""

    def ints(offset: int, rows: int) -> np.ndarray:
        return np.frombuffer(data, np.int32, rows * top_k, offset).reshape(rows, top_k)

    return routing_stats.read(data.ctypes.data, data.nbytes, ints)


def read_plan(plan: Plan | Record) -> list[RoutingStats]:
    """Return the slot of each choice of a plan, or why it was dropped.

    Call it outside of compiled programs.  It waits until the plan is finished.

    Args:
        plan: a plan, or `MoeOut.record`.

    Returns:
        A RoutingStats for each device, in the order in which a shard_map stacked their plans.

    Raises:
        EpicArgumentError: the plan's bytes are traced, or belong to other processes too.

    Example:
        >>> import jax.numpy as jnp
        >>> import epic.jax
        >>> layer = epic.jax.Layer(num_experts=2, top_k=1, overflow="drop")
        >>> topk_idx = jnp.zeros((3, 1), jnp.int32)
        >>> with epic.jax.open(max_tokens=3, max_row_bytes=64) as group:  # one rank
        ...     (stats,) = epic.jax.read_plan(epic.jax.plan(group, layer, topk_idx, capacity=2))
        >>> stats.kept, stats.rank_full
        (2, 1)

    """
    check_kind("plan", plan, Plan, Record)
    whole: Any = plan.bytes
    if isinstance(whole, jax.core.Tracer) or not whole.is_fully_addressable:
        raise EpicArgumentError(
            "plan.bytes is traced, or belongs to several processes: must be an array of this "
            "process; return the plan from the program, and for one shard pass "
            "dataclasses.replace(plan, bytes=plan.bytes.addressable_shards[i].data)"
        )
    size = plan.spec.group.plan_bytes(plan.spec.layer)
    every = np.asarray(whole).reshape(-1, size + PLAN_TAIL)
    return [read_record(row[:size].copy(), plan.spec.layer.top_k) for row in every]
