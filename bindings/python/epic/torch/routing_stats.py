# SPDX-License-Identifier: Apache-2.0
"""read_plan: returns the content of a finished plan on the host."""

import torch
from torch import Tensor

from epic import routing_stats
from epic.torch.ops import translate_errors
from epic.torch.plans import Plan


@translate_errors
def read_plan(plan: Plan) -> routing_stats.RoutingStats:
    """Return the slot of each choice of this rank, or why it was dropped.

    No other rank takes part in this call. The host waits until the plan is finished.

    Args:
        plan: A plan of this rank.

    Returns:
        A `RoutingStats`, whose tables are tensors on the CPU.

    Raises:
        EpicError: The plan is not finished or was overwritten.

    Example:
        >>> import torch, epic.torch
        >>> layer = epic.torch.Layer(num_experts=2, top_k=1, overflow="drop")
        >>> ids = torch.zeros((3, 1), dtype=torch.int32)
        >>> with epic.torch.Group(num_ranks=1, max_tokens=3, max_row_bytes=4) as group:
        ...     stats = epic.torch.read_plan(epic.torch.plan(group, layer, ids, capacity=2))
        >>> stats.kept, stats.rank_full, stats.fate.tolist()
        (2, 1, [[0], [1], [-3]])
    """
    data, top_k = plan.bytes.detach().cpu(), plan.spec.top_k

    def ints(offset: int, rows: int) -> Tensor:
        return data[offset : offset + 4 * rows * top_k].view(torch.int32).view(rows, top_k)

    return routing_stats.read(data.data_ptr(), data.numel(), ints)
