# SPDX-License-Identifier: Apache-2.0
"""Tests numbers of experts that are not multiples of the number of ranks.

The caller passes the weights of all experts. The layer makes the table and the padding, and its
results are those of one device.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import epic.jax
import layers
from conftest import make_mesh
from epic.jax import placement
from steps import ALL, mapped, numbers

COUNTS = [(6, 4), (7, 2), (3, 4), (9, 4)]
counts = pytest.mark.parametrize(("experts", "ep"), COUNTS)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch, experts: int) -> int:
    """Return the layer of layers.py with another number of experts."""
    layers.resize(monkeypatch, EXPERTS=experts)
    return experts


RAGGED = jax.lax.ragged_dot
RUNS = [("normalized", None, 6, 4), ("normalized", RAGGED, 7, 2), ("biases", None, 7, 2)]
RUNS += [("biases", RAGGED, 9, 4), ("shared", None, 3, 4), ("shared", RAGGED, 3, 4)]


@pytest.mark.parametrize(("name", "gemm", "experts", "ep"), RUNS)
def test_global_arrays(
    experts: int, ep: int, name: str, gemm: Any, count: int, opened: Any
) -> None:
    """Compare sharded.moe, forward and all gradients, with float64."""
    assert count == experts
    mesh = make_mesh(ep)
    case = layers.CASES[name]
    x, ct = layers.arrays()
    got = layers.step(mesh, opened(mesh), case, grouped_gemm=gemm)(x, layers.weights(case), ct)
    layers.compare(got, layers.true_step(case, 4 // ep))


@pytest.mark.usefixtures("count")
@pytest.mark.parametrize("form", ["whole", "own"])
@counts
def test_in_a_shard_map(experts: int, ep: int, form: str, opened: Any) -> None:
    """epic.jax.moe takes the weights of all experts, or this rank's rows."""
    mesh = make_mesh(ep)
    group = opened(mesh)
    case = layers.CASES["normalized"]
    wish = layers.options(case, ep)
    x, ct = layers.arrays()
    weights = epic.jax.MoeWeights(**layers.weights(case))
    specs = jax.tree.map(lambda _: P(), weights)
    if form == "own":
        weights = placement.pad_weights(group, wish.layer, weights)
        specs = epic.jax.sharded.weight_specs(group, weights)
        assert specs.w_gate_up[0] == "ep"
    assert weights.w_gate_up.shape[0] == (experts if form == "whole" else ep * -(-experts // ep))

    def local(x: Any, w: Any) -> tuple[Any, Any]:
        out = epic.jax.moe(group, wish, x, w)
        return out.out, jax.lax.pmean(jax.lax.psum(out.loss, "ep"), "dp")

    inner = jax.shard_map(local, mesh=mesh, in_specs=(ALL, specs), out_specs=(ALL, P()))

    def loss_of(x: Any, w: Any) -> tuple[Any, Any]:
        out, loss = inner(x, w)
        return (out * ct).sum() + loss, (out, loss)

    run = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True))
    (_, (out, loss)), (d_x, d_w) = run(x, weights)
    gradients = {n: d for n, d in d_w._asdict().items() if d is not None}
    if form == "own":
        rows = placement.experts_of_ranks(group, wish.layer).reshape(-1)
        for name in ("w_gate_up", "w_down"):
            assert not np.any(np.asarray(gradients[name])[rows == experts]), "padding has none"
            gradients[name] = np.asarray(gradients[name])[rows < experts]
    layers.compare((out, loss, d_x, gradients), layers.true_step(case, 4 // ep))


@pytest.mark.usefixtures("count")
@counts
def test_the_steps(experts: int, ep: int, opened: Any) -> None:
    """Without a table, each rank's slabs are those of its own experts."""
    mesh = make_mesh(ep)
    group = opened(mesh)
    layer = epic.jax.Layer(experts, 1)
    ids = np.arange(4 * 9, dtype=np.int32)[:, None] % experts

    def step(x: Any, ids: Any) -> tuple[Any, Any]:
        plan, recv, _ = epic.jax.plan_dispatch(group, layer, ids, x)
        return epic.jax.combine(plan, 2 * recv), plan.expert_tokens

    x = numbers(1, 36, 5)
    out, tokens = mapped(mesh, step, 2)(x, ids)
    assert np.array_equal(out, 2 * x)
    per_group = np.asarray(tokens).reshape(4 // ep, ep, -1)
    sent = ids.reshape(4 // ep, -1)
    for g, row in enumerate(per_group):
        wanted = np.append(np.bincount(sent[g], minlength=experts), 0)
        assert row.tolist() == wanted[placement.experts_of_ranks(group, layer)].tolist()


def test_blocks_are_as_even_as_they_can_be() -> None:
    """Blocks of experts are contiguous and in order, and their sizes differ by at most one."""
    for experts in range(1, 20):
        for ranks in range(1, 9):
            group = epic.jax.Group("g", ("ep",), ranks, 1, 1)
            layer = epic.jax.Layer(experts, 1)
            owner, rows = (
                placement.default_owners(group, layer),
                placement.experts_of_ranks(group, layer),
            )
            assert np.all(np.diff(owner) >= 0)
            load = np.bincount(owner, minlength=ranks)
            assert load.max() - load.min() <= 1 and load.max() == rows.shape[1]
            assert np.array_equal(np.sort(rows[rows < experts]), np.arange(experts))
            if experts % ranks == 0:
                assert np.array_equal(owner, np.arange(experts) // (experts // ranks))


def test_local_experts_are_derived(opened: Any) -> None:
    """With Experts(hidden=, inner=) the group derives how many experts each rank has."""
    mesh = make_mesh(2)
    group = opened(mesh)
    case = layers.CASES["shared"]
    wish = layers.options(case, 2)
    assert wish.shared
    open_wish = replace(
        wish,
        experts=replace(wish.experts, num_local_experts=0),
        shared=replace(wish.shared, num_local_experts=0),
    )
    x, _ = layers.arrays()
    w = epic.jax.MoeWeights(**layers.weights(case))
    both = [epic.jax.sharded.moe(mesh, group, o, x, w).out for o in (wish, open_wish)]
    assert np.array_equal(*both)
    rows, one = numbers(1, 8, layers.HIDDEN), jnp.full((8,), 1, jnp.int32)
    mlp = epic.jax.ExpertWeights(w.w_gate_up, w.w_down)
    got = epic.jax.experts(epic.jax.Experts(hidden=16, inner=12), rows, one, one, mlp)
    assert np.array_equal(got, epic.jax.experts(epic.jax.Experts(8, 16, 12), rows, one, one, mlp))
