# SPDX-License-Identifier: Apache-2.0
"""Tests capacity_limit of the whole layer: a number of slots in a tensor, which each call reads."""

from typing import Any

import pytest
import torch

import epic.torch
from epic.torch.experts import slab_mm
from parts import SIZES, UNEVEN, group_of, numbers, same

WISH: dict[str, Any] = {
    "num_experts": 8, "top_k": 3, "hidden": 16, "inner": 12, "normalize": "sum",
    "balance_coeff": 0.1, "overflow": "drop",
}  # fmt: skip
CAPACITY = 20
LIMITS = ((6, 6), (100, CAPACITY), (0, 1), (-5, 1), (15, 15))  # limits, and the slots they give


def results_of(found: epic.torch.MoeOut, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return results and gradients."""
    gradients = torch.autograd.grad(found.out.square().sum() + found.loss, leaves)
    return [found.out.detach(), found.loss.detach(), found.load, found.demand, *gradients]


def limited(rank: int, kind: str) -> None:
    """Compare a layer whose limit changes with layers whose capacity is the limit."""
    wish = WISH | ({"quantize": "1x32"} if kind == "quantize" else {})
    if kind == "shared":
        wish["shared"] = epic.torch.Experts(1, 16, 8)
    options = epic.torch.Moe.of(**wish, capacity=CAPACITY)
    more: dict[str, Any] = {"grouped_mm": slab_mm} if kind == "grouped_mm" else {}
    limit = torch.zeros((), dtype=torch.int32)
    with group_of(4) as group:
        x = numbers(20 + rank, UNEVEN[rank], 16).requires_grad_()
        if kind == "token_mask":
            more["token_mask"] = torch.arange(UNEVEN[rank]) % 3 != 1
        layer = epic.torch.MoE(group, options)
        leaves = [x, *layer.parameters()]
        found = []
        for value, slots in LIMITS:
            limit.fill_(value)
            fixed = epic.torch.Moe.of(**wish, capacity=slots)
            weights = layer.weights()
            got = epic.torch.moe(group, options, x, weights, capacity_limit=limit, **more)
            wanted = epic.torch.moe(group, fixed, x, weights, **more)
            found.append(results_of(got, leaves))
            assert same(found[-1], results_of(wanted, leaves)), (kind, value)
        assert found[0][3].tolist() == found[1][3].tolist()  # the demand does not depend on it
        assert rank == 1 or not torch.equal(found[1][0], found[2][0])  # rank 1 has no tokens


@pytest.mark.parametrize("kind", ["plain", "shared", "grouped_mm", "token_mask", "quantize"])
def test_slots(world: Any, kind: str) -> None:
    """Check the layer of the core and composed layers, on ranks with unequal tokens."""
    world.run(limited, kind)


def unequal(rank: int) -> None:
    """Check limits that differ between the ranks, and the error of a layer that may not drop."""
    limit = torch.tensor(3 if rank == 2 else 60, dtype=torch.int32)
    kept = {"capacity": 60}
    with group_of(4) as group:
        x = numbers(20 + rank, 6, 16)
        layer = epic.torch.MoE(group, epic.torch.Moe.of(**WISH, **kept), seed=0)
        fixed = epic.torch.Moe.of(**WISH, capacity=int(limit))
        assert same(
            list(layer(x, capacity_limit=limit)), list(epic.torch.MoE(group, fixed, seed=0)(x))
        )
        strict = epic.torch.MoE(
            group, epic.torch.Moe.of(**WISH | {"overflow": "error"}, **kept), seed=0
        )
        wanted, _ = strict(x)
        with pytest.raises(epic.EpicError, match="rank 2 has 3 slots and needs"):
            strict(x, capacity_limit=limit)
        limit.fill_(60)
        assert torch.equal(strict(x, capacity_limit=limit)[0], wanted)


def test_unequal(world: Any) -> None:
    """Check one rank with a smaller limit."""
    world.run(unequal)


def test_out_and_compiled() -> None:
    """Check the limit with out=, and that a compiled layer reads the limit of each call."""
    options = epic.torch.Moe.of(**WISH, capacity=40)
    with epic.torch.Group(num_ranks=1, **SIZES) as group:
        layer, x = epic.torch.MoE(group, options), numbers(1, 7, 16)
        frames = 0

        def backend(graph: Any, _: Any) -> Any:
            nonlocal frames
            frames += 1
            return graph.forward

        def step(x: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
            return layer(x, capacity_limit=limit)[0]

        run = torch.compile(step, fullgraph=True, backend=backend)
        seen = []
        for value in (4, 11, 40):
            limit = torch.tensor(value, dtype=torch.int32)
            fixed = epic.torch.Moe.of(**WISH, capacity=value)
            wanted = epic.torch.moe(group, fixed, x, layer.weights()).out
            with torch.no_grad():
                out = torch.empty_like(x)
                given = epic.torch.MoeOut(out, *4 * (None,))
                weights = layer.weights()
                epic.torch.moe(group, options, x, weights, capacity_limit=limit, out=given)
            assert torch.equal(out, wanted) and torch.equal(run(x, limit), wanted)
            seen.append(wanted)
        assert frames == 1 and not torch.equal(seen[0], seen[1])
    torch._dynamo.reset()


def test_errors() -> None:
    """Check the errors of capacity_limit."""
    limit = torch.ones((), dtype=torch.int32)
    with epic.torch.Group(num_ranks=1, **SIZES) as group:
        layer, x = epic.torch.MoE(group, epic.torch.Moe.of(**WISH)), numbers(1, 7, 16)
        for wrong, words in (
            (3, "capacity_limit is 3: must be a 0-d int32 tensor, or None"),
            (limit.long(), r"capacity_limit is torch.int64 \[\]: must be a 0-d int32"),
            (limit.reshape(1), r"capacity_limit is torch.int32 \[1\]: must be a 0-d"),
            (limit.to("meta"), "capacity_limit is on meta: must be on cpu, as x"),
        ):
            for more in ({}, {"token_mask": torch.ones(7, dtype=torch.bool)}):
                with pytest.raises(epic.EpicArgumentError, match=words):
                    layer(x, capacity_limit=wrong, **more)  # type: ignore[arg-type]
