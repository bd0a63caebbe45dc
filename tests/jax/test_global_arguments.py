# SPDX-License-Identifier: Apache-2.0
"""Tests the arguments of the calls on global arrays: large integers, lists and wrong classes."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import epic.jax
from conftest import line_of, make_mesh
from epic.jax import ExpertWeights, Moe, MoeWeights

K, E, H, INNER = 2, 8, 16, 12
LAYER, ROUTER = epic.jax.Layer(E, K), epic.jax.Router(E, K)


def test_integers_of_global_arrays_that_int32_cannot_represent(opened: Any) -> None:
    """Check that sharded calls refuse 2^32 + 1, too, and do not use it as id 1."""
    mesh = line_of(2)
    group, wide, sharded = opened(mesh), (1 << 32) + 1, epic.jax.sharded
    z, x, options = (
        jnp.zeros((2, E)),
        jnp.zeros((2, H)),
        Moe.of(num_experts=E, top_k=K, hidden=H, inner=INNER),
    )
    w = MoeWeights(jnp.zeros((H, E)), jnp.zeros((E, H, 2 * INNER)), jnp.zeros((E, INNER, H)))
    ids, table, owners = np.full((2, K), wide), np.array([[0, 1], [2, 3]]), np.full(E, wide)
    route = partial(sharded.route, mesh, ROUTER, z, group=group)
    moe = partial(sharded.moe, mesh, group, options, x, w)
    zeros = np.zeros(2, np.int64)
    of_table: dict[str, Any] = {"table": table, "token_ids": ids[:, 0]}
    plan = sharded.plan(mesh, group, LAYER, np.zeros((2, K), np.int32))
    rows, counts = jnp.zeros((2 * plan.spec.capacity, H)), np.full(E, wide)
    mlp = partial(sharded.experts, mesh, options.experts, rows, group=group)
    weights = ExpertWeights(*w[1:3])
    for call, text in (
        (lambda: moe(forced=ids).out, "forced ids: rank"),
        (lambda: moe(forced=(ids, np.ones((2, K)))).out, "forced ids: rank"),
        (lambda: moe(**of_table).out, "token_ids: rank"),
        (lambda: moe(table=table + (1 << 32), token_ids=zeros).out, "table: rank"),
        (lambda: moe(rank_of_expert=owners).out, "w_gate_up has|rank_of_expert: rank"),
        (lambda: route(forced=ids), "forced ids of token"),
        (lambda: route(**of_table), "token_ids of token"),
        (lambda: route(table=table + (1 << 32), token_ids=zeros), "table row"),
        (
            lambda: sharded.plan(mesh, group, LAYER, ids % 2, rank_of_expert=owners).load,
            "rank_of_expert: rank",
        ),
        (lambda: mlp(counts, plan.expert_tokens, weights), "expert_rows"),
        (lambda: mlp(plan.expert_rows, counts, weights), "expert_tokens"),
    ):
        with pytest.raises((epic.jax.EpicArgumentError, jax.errors.JaxRuntimeError), match=text):
            jax.block_until_ready(call())


def test_lists_in_place_of_global_arrays(opened: Any) -> None:
    """Check that sharded calls take lists as arrays, as all other calls do."""
    mesh = line_of(2)
    group, sharded, x = opened(mesh), epic.jax.sharded, jnp.ones((2, H))
    options, table = Moe.of(num_experts=E, top_k=K, hidden=H, inner=INNER), [[0, 1], [2, 3]]
    w = MoeWeights(jnp.ones((H, E)), jnp.ones((E, H, 2 * INNER)), jnp.ones((E, INNER, H)))
    moe = partial(sharded.moe, mesh, group, options, x)
    found = moe(w, forced=(table, [[1.0, 1.0]] * 2), token_mask=[True, False])
    assert found.load.tolist() == [1, 1, *[0] * (E - 2)]
    found = moe(w._replace(bias=[0.0] * E), token_ids=[1, 1], table=table, return_routing=True)
    assert found.routing.topk_idx.tolist() == [[2, 3]] * 2
    owners = [0, 1] * (E // 2)
    assert moe(w, rank_of_expert=owners, forced=table).load.tolist()[:4] == [1, 1, 1, 1]
    plan = sharded.plan(mesh, group, LAYER, table, rank_of_expert=owners)
    rows, slot_weights = sharded.dispatch(mesh, plan, x.tolist(), [[1.0, 1.0]] * 2)
    counts = plan.expert_rows.tolist(), plan.expert_tokens.tolist()
    experts = partial(sharded.experts, mesh, options.experts, group=group)
    weights = ExpertWeights(*w[1:3])
    given = experts(rows.tolist(), *counts, weights)
    assert (given == experts(rows, plan.expert_rows, plan.expert_tokens, weights)).all()
    sums = sharded.combine(mesh, plan, rows.tolist(), slot_weights.tolist())
    assert (sums == K * x).all()
    route = partial(sharded.route, mesh, ROUTER, jnp.zeros((2, E)), group=group)
    assert route(forced=table)[0].tolist() == table
    assert route(token_ids=[1, 0], table=table)[0].tolist() == table[::-1]


def test_axes_and_classes_of_global_calls(opened: Any) -> None:
    """Arguments that global arrays do not allow, and wrong classes, are named in an error."""
    mesh, sharded, x = make_mesh(2), epic.jax.sharded, jnp.ones((4, H))
    group, options = opened(mesh), Moe.of(num_experts=E, top_k=K, hidden=H, inner=INNER)
    w = MoeWeights(jnp.ones((H, E)), jnp.ones((E, H, 2 * INNER)), jnp.ones((E, INNER, H)))
    plan = sharded.plan(mesh, group, LAYER, jnp.zeros((4, K), jnp.int32))
    call: Any = sharded
    for run, text in (
        (
            lambda: epic.jax.moe(group, options, x, w, scatter_tokens=True),
            "scatter_tokens is given",
        ),
        (
            lambda: call.moe(mesh, group, options, x, w, token_axes=("ep",), fsdp_axes=("dp",)),
            "fsdp_axes contains 'dp': must contain only axes in token_axes",
        ),
        (lambda: call.sum(mesh, "x", x), "group is a str: must be a Group"),
        (lambda: call.sum_replicas("x", plan, x), "mesh is a str: must be a Mesh"),
    ):
        with pytest.raises(epic.jax.EpicArgumentError, match=text):
            run()


@pytest.mark.parametrize("wrong", [None, {}, (1, 2)], ids=["None", "dict", "tuple"])
def test_classes_of_scaled_weights(wrong: Any) -> None:
    """Weights of another class are named in an error."""
    for run in (epic.jax.scaled, partial(epic.jax.unscaled, dtype=jnp.float32)):
        with pytest.raises(epic.jax.EpicArgumentError, match="must be an ExpertWeights"):
            run(wrong)
