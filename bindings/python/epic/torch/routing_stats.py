# SPDX-License-Identifier: Apache-2.0
"""What a finished plan says, on the host."""

import torch
from torch import Tensor

from epic import routing_stats
from epic.torch.ops import translate_errors
from epic.torch.plans import Plan


@translate_errors
def read_plan(plan: Plan) -> routing_stats.RoutingStats:
    """Where each choice of this rank went, and why the others did not go; the host waits for the
    plan.  Its tables are tensors on the CPU."""
    data, top_k = plan.bytes.detach().cpu(), plan.spec.top_k

    def ints(offset: int, rows: int) -> Tensor:
        return data[offset : offset + 4 * rows * top_k].view(torch.int32).view(rows, top_k)

    return routing_stats.read(data.data_ptr(), data.numel(), ints)
