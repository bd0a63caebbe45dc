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


def run_without(
    lost: Sequence[int], work: Callable[[epic.torch.Group], Any], ranks: int = RANKS
) -> list[Any]:
    """Return the results of work(group) on the ranks that are left after others have left."""
    bootstraps = epic.torch.threads(ranks)

    def run(rank: int) -> Any:
        with epic.torch.Group(bootstrap=bootstraps[rank], **SIZES) as group:
            if rank in lost:
                group.leave()
                return None
            group.shrink()
            return work(group)

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(run, range(ranks)))
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


def test_float64_tree() -> None:
    """Float64 sums have the bits of a new group that has only the members."""
    values = [1.0, 2.0**-53, -1.0, 2.0**-53]
    members = (0, 1, 3, 4)

    def work(group: epic.torch.Group) -> list[torch.Tensor]:
        x = torch.tensor([values[members.index(group.rank)], -0.0], dtype=torch.float64)
        return [epic.torch.sum(group, x, tree=tree) for tree in (False, True)]

    for in_order, in_tree in run_without((2, 5), work, ranks=6):
        first, second, third, fourth = values
        assert in_order[0].item() == ((first + second) + third) + fourth
        assert in_tree[0].item() == (first + second) + (third + fourth)
        assert torch.signbit(in_order[1]) and torch.signbit(in_tree[1])


def test_invariance() -> None:
    """The logits of equal batches are equal on all ranks, also after rank 0 has left."""

    def work(group: epic.torch.Group) -> bool:
        options = epic.torch.Moe.of(
            num_experts=4, top_k=2, hidden=8, inner=16, drop_absent=True, sum_order="by_rank"
        )
        layer = epic.torch.MoE(group, options)
        report = epic.torch.check_invariance(layer)
        largest = [d.stage for d in report.differences if d.num_tokens == report.batches[0]]
        return "gate" not in largest

    assert run_without((0,), work) == [True] * 3


def test_finite() -> None:
    """The search for a NaN drops the choices of absent experts, as the layer does."""

    def work(group: epic.torch.Group) -> None:
        options = epic.torch.Moe.of(
            num_experts=RANKS, num_logical=RANKS, top_k=2, hidden=8, inner=16, drop_absent=True,
            sum_order="by_rank",
        )  # fmt: skip
        placement = epic.torch.Placement(group, options.layer)
        layer = epic.torch.MoE(group, options, logical_of_expert=placement)
        assert placement.absent == (1,)
        if group.rank == 2:
            with torch.no_grad():
                layer.w_down.fill_(torch.nan)
        found = pytest.raises(epic.torch.EpicNonFiniteError, match="expert 2; look at the weights")
        with found, epic.torch.check_finite(layer):
            layer(numbers(group.rank, 9, 8))

    run_without((1,), work)
