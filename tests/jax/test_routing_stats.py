# SPDX-License-Identifier: Apache-2.0
"""Tests the statistics of each choice of a plan, and those of a training step of an nnx block."""

from typing import Any

import jax
import numpy as np
import pytest

import epic.jax
import layers
from conftest import make_mesh
from epic.jax import routing_stats
from steps import EXPERTS, TOKENS, TOP_K, choices, mapped


def places(ids: np.ndarray, priority: str) -> np.ndarray:
    """Return [ranks, tokens, k]: how many choices of the same expert precede each choice."""
    ranks, tokens, top_k = ids.shape
    order = [(r, t, k) for r in range(ranks) for t in range(tokens) for k in range(top_k)]
    if priority == "by_k":
        order.sort(key=lambda choice: choice[2])
    seen, found = np.zeros(EXPERTS, int), np.zeros(ids.shape, int)
    for choice in order:
        if ids[choice] >= 0:
            found[choice] = seen[ids[choice]]
            seen[ids[choice]] += 1
    return found


@pytest.mark.parametrize("expert_capacity", [0, 5])
@pytest.mark.parametrize("capacity", [None, 7])
@pytest.mark.parametrize("priority", ["by_token", "by_k"])
def test_the_fate_of_each_choice(
    priority: str, capacity: int | None, expert_capacity: int, mesh: Any, opened: Any
) -> None:
    """Compare with a count by hand. Each expert keeps its first choices by rank, token and k, or
    all first choices before second ones."""
    group = opened(mesh)
    ep = group.num_ranks
    layer = epic.jax.Layer(
        EXPERTS, TOP_K, overflow="drop", expert_capacity=expert_capacity, priority=priority
    )
    ids = choices(3)
    run = mapped(mesh, lambda i: epic.jax.plan(group, layer, i, capacity=capacity), 1)
    plan = run(ids)
    books = epic.jax.read_plan(plan)
    assert len(books) == 4 and len({b.id for b in books}) == 4 // ep
    all_ids = np.asarray(ids).reshape(4 // ep, ep, TOKENS, TOP_K)
    for g, its in enumerate(all_ids):
        place, limit = places(its, priority), common_limit(its, layer, capacity, ep)
        for r, book in enumerate(books[g * ep : (g + 1) * ep]):
            assert (book.num_tokens, book.total_tokens) == (TOKENS, ep * TOKENS)
            assert book.result == "EPIC_OK"
            for at, expert in np.ndenumerate(its[r]):
                fate, rank = book.fate[at], book.rank[at]
                if expert < 0:
                    assert (fate, rank) == (routing_stats.NO_EXPERT, -1)
                elif expert_capacity and place[r][at] >= expert_capacity:
                    assert fate == routing_stats.EXPERT_FULL
                elif place[r][at] >= limit:
                    assert fate == routing_stats.RANK_FULL
                else:
                    assert fate >= 0 and rank == expert * ep // EXPERTS
            counts = [np.sum(book.fate >= 0)] + [np.sum(book.fate == f) for f in (-1, -2, -3)]
            assert counts == [book.kept, book.none, book.expert_full, book.rank_full]
            assert sum(counts) == TOKENS * TOP_K


def common_limit(ids: Any, layer: Any, capacity: int | None, ep: int) -> int:
    """Return the largest number of rows of each expert that fits on every rank."""
    load = np.bincount(ids[ids >= 0], minlength=EXPERTS)
    if layer.expert_capacity:
        load = np.minimum(load, layer.expert_capacity)
    if capacity is None or load.reshape(ep, -1).sum(axis=1).max() <= capacity:
        return 1 << 30
    fits = [
        c for c in range(99) if np.minimum(load, c).reshape(ep, -1).sum(axis=1).max() <= capacity
    ]
    return max(fits)


def test_plans_that_cannot_be_read(opened: Any) -> None:
    """A traced plan and damaged bytes are refused."""
    group = opened(None)
    layer = epic.jax.Layer(EXPERTS, TOP_K)
    with pytest.raises(epic.jax.EpicArgumentError, match="traced"):
        jax.jit(lambda i: epic.jax.read_plan(epic.jax.plan(group, layer, i)))(choices(3)[:6])
    with pytest.raises(epic.jax.EpicArgumentError):
        routing_stats.read_record(np.zeros(4096, np.uint8), TOP_K)


@pytest.mark.parametrize("gemm", [None, jax.lax.ragged_dot], ids=["core", "composed"])
def test_the_fate_of_a_layers_choices(gemm: Any, mesh: Any, opened: Any) -> None:
    """MoeOut.record equals the statistics of a plan of the router's choices, under jit and with
    gradients."""
    group = opened(mesh)
    case = layers.CASES["drop"]
    options = layers.options(case, group.num_ranks)
    x, _ = layers.arrays()
    w = layers.weights(case)

    def loss_of(x: Any) -> Any:
        weights = epic.jax.MoeWeights(**w)
        out = epic.jax.sharded.moe(mesh, group, options, x, weights, grouped_gemm=gemm)
        return out.out.sum(), out

    _, out = jax.jit(jax.grad(loss_of, has_aux=True))(x)
    rows = x.reshape(-1, layers.HIDDEN)
    ids, _ = epic.jax.route(options.router, rows @ w["w_gate"])
    plan = mapped(mesh, lambda i: epic.jax.plan(group, options.layer, i), 1)(ids)
    for book, other in zip(*map(epic.jax.read_plan, (out.record, plan)), strict=True):
        assert np.array_equal(book.fate, other.fate) and np.array_equal(book.rank, other.rank)
        assert book.expert_full == other.expert_full
    assert sum(b.expert_full for b in epic.jax.read_plan(plan)) > 0


def test_a_layer_has_memory_for_distinct_choices(opened: Any) -> None:
    """A router chooses no expert twice, even with NaN, so four ranks with one expert each need a
    quarter of the slots. A table may repeat an expert."""
    mesh = make_mesh(4)
    group = opened(mesh)
    options = epic.jax.Moe.of(num_experts=4, top_k=4, hidden=16, inner=12)
    w = {n: v[..., :4] if n == "w_gate" else v[:4] for n, v in layers.weights({}).items()}
    x = layers.arrays()[0].copy()
    x[0, 0], x[1, 1, 3] = np.nan, np.inf
    ids, rows = np.zeros(x.shape[:2], np.int32), np.zeros((1, 4), np.int32)
    table: dict[str, Any] = {"token_ids": ids, "table": rows}
    whole = group.capacity_bound(options.layer)
    none: dict[str, Any] = {}
    for more, slots in ((none, whole // 4), (table, whole)):
        out = epic.jax.sharded.moe(mesh, group, options, x, epic.jax.MoeWeights(**w), **more)
        assert out.record.spec.capacity == slots
        assert int(out.load.sum()) == 4 * layers.BATCH * layers.LENGTH


def test_nnx_says_load_and_demand(opened: Any) -> None:
    """moe() returns load and demand; eval() stops the bias, train() resumes it."""
    pytest.importorskip("flax")
    from flax import nnx

    import epic.jax.nnx

    mesh = make_mesh(2)
    group = opened(mesh)
    wish = layers.options({"score": "sigmoid"}, 2)

    class Model(nnx.Module):
        """A model with a block inside."""

        def __init__(self) -> None:
            self.block = epic.jax.nnx.MoEBlock(mesh, group, wish, rngs=nnx.Rngs(0), bias_rate=0.125)

    model = Model()
    x, _ = layers.arrays()
    run = nnx.jit(lambda m, x: m.block.moe(x))
    out = run(model, x)
    assert int(out.load.sum()) == 2 * layers.BATCH * layers.LENGTH
    assert int(out.demand.sum()) == int(out.load.sum())
    books = epic.jax.read_plan(out.record)
    assert [b.num_slots for b in books] == out.demand.tolist()
    assert sum(b.kept for b in books) == int(out.load.sum())
    moved = model.block.expert_bias[...].tolist()
    assert any(moved)
    model.eval()
    run(model, x)
    assert model.block.expert_bias[...].tolist() == moved
    model.train()
    run(model, x)
    assert model.block.expert_bias[...].tolist() != moved
