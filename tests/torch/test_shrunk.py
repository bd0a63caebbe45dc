# SPDX-License-Identifier: Apache-2.0
"""Tests functions that add over the ranks, in groups that rank 0 or other ranks have left."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import epic.torch
from parts import SIZES, numbers

RANKS = 4


def run_without(lost: Sequence[int], work: Callable[[epic.torch.Group], Any]) -> list[Any]:
    """Return the results of work(group) on the ranks that are left after others have left."""
    bootstraps = epic.torch.threads(RANKS)

    def run(rank: int) -> Any:
        with epic.torch.Group(bootstrap=bootstraps[rank], **SIZES) as group:
            if rank in lost:
                group.leave()
                return None
            group.shrink()
            return work(group)

    with ThreadPoolExecutor(RANKS) as pool:
        found = list(pool.map(run, range(RANKS)))
    return [result for rank, result in enumerate(found) if rank not in lost]


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping(norm_type: float) -> None:
    """The norm contains the shared parameters once, whichever ranks have left."""

    def work(group: epic.torch.Group) -> tuple[float, list[torch.Tensor]]:
        shared, own = (nn.Parameter(torch.zeros(5)) for _ in range(2))
        own.allreduce = False  # type: ignore[attr-defined]
        shared.grad, own.grad = 9 * numbers(9, 5), numbers(group.rank, 5)
        norm = epic.torch.clip_grad_norm_([shared, own], 1e9, group, norm_type)
        return norm.item(), [shared.grad, own.grad]

    found = run_without((0, 2), work)
    every = torch.cat([found[0][1][0], *(gradients[1] for _, gradients in found)]).double()
    wanted = torch.linalg.vector_norm(every, norm_type).item()
    assert [norm for norm, _ in found] == [pytest.approx(wanted, rel=1e-6)] * 2
