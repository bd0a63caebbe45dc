# SPDX-License-Identifier: Apache-2.0
"""Tests plan, dispatch, combine, plan_dispatch and sum on 4 devices of one process."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import epic.jax
from conftest import make_mesh
from reference import load_of, relative, slots_of
from steps import (
    ALIGN,
    ALL,
    EXPERTS,
    HIDDEN,
    LAYER,
    TOKENS,
    TOP_K,
    choices,
    mapped,
    numbers,
    through,
    true_round,
)


@pytest.mark.parametrize("fused", [False, True])
def test_round_trip_and_gradients(mesh: Any, vma: bool, fused: bool, opened: Any) -> None:
    """The round trip matches float64, with random cotangents."""
    group = opened(mesh)
    x, w = numbers(1, 4 * TOKENS, HIDDEN), numbers(2, 4 * TOKENS, TOP_K)
    ids, ct = choices(3), numbers(4, 4 * TOKENS, HIDDEN)
    out, pull = jax.vjp(mapped(mesh, through(group, fused), 3, vma), x, w, ids)
    d_x, d_w, _ = pull(ct)
    for got, wanted in zip((out, d_x, d_w), true_round(x, w, ids, ct), strict=True):
        assert relative(got, wanted) < 2e-6


def test_every_slot(mesh: Any, opened: Any) -> None:
    """Rows, weights and counts are exact, with padding and tail."""
    group = opened(mesh)
    ep = mesh.shape["ep"]
    x, w, ids = numbers(1, 4 * TOKENS, HIDDEN), numbers(2, 4 * TOKENS, TOP_K), choices(3)

    def step(x: Any, w: Any, ids: Any) -> Any:
        return epic.jax.plan_dispatch(group, LAYER, ids, x, w)

    plan, recv, slot = mapped(mesh, step, 3)(x, w, ids)
    capacity = group.capacity_bound(LAYER)
    for device in range(4):
        first = device // ep * ep * TOKENS
        mine = slice(first, first + ep * TOKENS)
        slots = slots_of(np.asarray(ids)[mine], device % ep, ep, EXPERTS, ALIGN)
        rows, weights = np.zeros((capacity, HIDDEN), np.float32), np.zeros(capacity, np.float32)
        for i, (t, k) in enumerate(slots.choices):
            if t >= 0:
                rows[i], weights[i] = x[mine][t], w[mine][t, k]
        part = slice(device * capacity, (device + 1) * capacity)
        assert np.array_equal(recv[part], rows) and np.array_equal(slot[part], weights)
        local = slice(device * EXPERTS // ep, (device + 1) * EXPERTS // ep)
        assert plan.expert_rows[local].tolist() == slots.rows
        assert plan.expert_tokens[local].tolist() == slots.tokens
        whole = slice(device * EXPERTS, (device + 1) * EXPERTS)
        assert plan.load[whole].tolist() == load_of(np.asarray(ids)[mine], EXPERTS).tolist()
        assert int(plan.demand[device]) == len(slots.choices)


def test_weight_gradients_are_exact(mesh: Any, opened: Any) -> None:
    """The weight gradient of each (token, k) is the number of its slot, exactly."""
    group = opened(mesh)
    x, w, ids = numbers(1, 4 * TOKENS, HIDDEN), numbers(2, 4 * TOKENS, TOP_K), choices(3, 0)

    def step(w: Any, x: Any, ids: Any) -> Any:
        _, _, slot = epic.jax.plan_dispatch(group, LAYER, ids, x, w)
        return slot

    slot, pull = jax.vjp(lambda w: mapped(mesh, step, 3)(w, x, ids), w)
    assert np.array_equal(pull(slot)[0], w)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_small_types(dtype: str, opened: Any) -> None:
    """Sums are rounded once for each rank and once at the end."""
    mesh = make_mesh(4)
    group = opened(mesh)
    x = numbers(1, 4 * TOKENS, HIDDEN, dtype=dtype)
    w, ids, ct = numbers(2, 4 * TOKENS, TOP_K), choices(3), numbers(4, 4 * TOKENS, HIDDEN)
    ct = ct.astype(dtype)
    out, pull = jax.vjp(mapped(mesh, through(group, True), 3), x, w, ids)
    assert out.dtype == x.dtype
    for got, wanted in zip((out, *pull(ct)[:2]), true_round(x, w, ids, ct), strict=True):
        assert relative(got, wanted) < (2e-2 if dtype == "bfloat16" else 3e-3)


def test_float64(opened: Any) -> None:
    """float64 rows are summed in float64."""
    with jax.enable_x64(True):
        mesh = make_mesh(2)
        group = opened(mesh)
        x = numbers(1, 4 * TOKENS, HIDDEN, dtype=jnp.float64)
        w, ids = numbers(2, 4 * TOKENS, TOP_K), choices(3).astype(jnp.int64)
        ct = numbers(4, 4 * TOKENS, HIDDEN, dtype=jnp.float64)
        out, pull = jax.vjp(mapped(mesh, through(group, False), 3), x, w, ids)
        wanted = true_round(x, w, ids, ct)
        assert relative(out, wanted[0]) < 1e-14
        assert relative(pull(ct)[0], wanted[1]) < 1e-14


def test_a_plan_that_moved(opened: Any) -> None:
    """A copy of a plan works like the plan."""
    mesh = make_mesh(4)
    group = opened(mesh)
    x, w, ids = numbers(1, 4 * TOKENS, HIDDEN), numbers(2, 4 * TOKENS, TOP_K), choices(3)
    moved = mapped(mesh, through(group, False, lambda v: jnp.flip(jnp.flip(v))), 3)(x, w, ids)
    assert np.array_equal(moved, mapped(mesh, through(group, False), 3)(x, w, ids))


def test_three_dimensions(opened: Any) -> None:
    """[B, S, H] tokens return [tokens, H] rows."""
    mesh = make_mesh(2)
    group = opened(mesh)
    x, ids = numbers(1, 4, TOKENS, HIDDEN), choices(3).reshape(4, TOKENS, TOP_K)

    def step(x: Any, ids: Any) -> Any:
        plan = epic.jax.plan(group, LAYER, ids)
        recv, none = epic.jax.dispatch(plan, x)
        assert none is None
        return epic.jax.combine(plan, recv).reshape(x.shape)

    out = mapped(mesh, step, 2)(x, ids)
    live = (np.asarray(ids) >= 0).sum(axis=-1, keepdims=True)
    assert relative(out, np.asarray(x, np.float64) * live) < 1e-6


def test_no_tokens(opened: Any) -> None:
    """Calls without rows work."""
    mesh = make_mesh(4)
    group = opened(mesh)
    x, w = jnp.zeros((0, HIDDEN)), jnp.zeros((0, TOP_K))
    ids = jnp.zeros((0, TOP_K), jnp.int32)
    out, pull = jax.vjp(mapped(mesh, through(group, True), 3), x, w, ids)
    assert out.shape == x.shape and pull(out)[1].shape == w.shape


def test_rank_of_expert(opened: Any) -> None:
    """Any placement gives the same sums."""
    mesh = make_mesh(4)
    group = opened(mesh)
    table = jnp.asarray([3, 3, 3, 0, 1, 2, 0, 1], jnp.int32)
    x, w, ids = numbers(1, 4 * TOKENS, HIDDEN), numbers(2, 4 * TOKENS, TOP_K), choices(3)

    def step(x: Any, w: Any, ids: Any) -> Any:
        plan, recv, slot = epic.jax.plan_dispatch(
            group,
            LAYER,
            ids,
            x,
            w,
            rank_of_expert=table,
            num_local_experts=3,
            capacity=4 * TOKENS * TOP_K + 16,
        )
        assert plan.expert_rows.shape == (3,)
        return epic.jax.combine(plan, jnp.sin(recv), slot)

    wanted = true_round(x, w, ids, x)[0]
    assert relative(mapped(mesh, step, 3)(x, w, ids), wanted) < 2e-6


def test_drop(opened: Any) -> None:
    """Choices that do not fit return zeros, forward and backward; load and demand are exact."""
    mesh = make_mesh(4)
    group = opened(mesh)
    layer = epic.jax.Layer(EXPERTS, 1, overflow="drop", expert_capacity=2)
    ids = jnp.zeros((4 * TOKENS, 1), jnp.int32)
    x, ct = numbers(1, 4 * TOKENS, HIDDEN), numbers(2, 4 * TOKENS, HIDDEN)

    def step(x: Any, ids: Any) -> Any:
        plan, recv, _ = epic.jax.plan_dispatch(group, layer, ids, x, capacity=8)
        return epic.jax.combine(plan, recv), plan.load, plan.demand, plan.has_overflow

    (out, load, demand, over), pull = jax.vjp(lambda x: mapped(mesh, step, 2)(x, ids), x)
    kept = np.zeros((4 * TOKENS, 1))
    kept[:2] = 1
    zero = [np.zeros(v.shape, jax.dtypes.float0) for v in (load, demand, over)]
    assert np.array_equal(out, x * kept)
    assert np.array_equal(pull((ct, *zero))[0], ct * kept)
    assert load[0] == 4 * TOKENS and demand.tolist() == [4 * TOKENS, 0, 0, 0]
    assert over.tolist() == [True, False, False, False]


@pytest.mark.parametrize("tree", [False, True])
def test_sum(mesh: Any, vma: bool, tree: bool, opened: Any) -> None:
    """All ranks get the same bits, and the gradient of a sum is the sum of the gradients."""
    group = opened(mesh)
    ep = mesh.shape["ep"]
    x, ct = numbers(1, 4, 7, 3), numbers(2, 4, 7, 3)
    step = mapped(mesh, lambda x: epic.jax.sum(group, x, tree=tree), 1, vma)
    out, pull = jax.vjp(step, x)
    for got, of in ((out, x), (pull(ct)[0], ct)):
        parts = np.asarray(of, np.float64).reshape(4 // ep, ep, 7, 3).sum(axis=1)
        assert relative(got, np.repeat(parts, ep, axis=0)) < 1e-6
        same = np.asarray(got).reshape(4 // ep, ep, 7, 3)
        assert np.array_equal(same, np.broadcast_to(same[:, :1], same.shape))


def test_donated_and_eager(opened: Any) -> None:
    """Donation changes nothing, and a group of one rank needs neither shard_map nor jit."""
    mesh = make_mesh(4)
    group = opened(mesh)
    x, w, ids = numbers(1, 4 * TOKENS, HIDDEN), numbers(2, 4 * TOKENS, TOP_K), choices(3)
    wanted = mapped(mesh, through(group, True), 3)(x, w, ids)
    inner = jax.shard_map(through(group, True), mesh=mesh, in_specs=(ALL,) * 3, out_specs=ALL)
    donated = jax.jit(inner, donate_argnums=0)(jnp.array(x), w, ids)
    assert np.array_equal(donated, wanted)
    alone = opened(None, name="alone")
    got = through(alone, True)(x, w, ids)
    assert relative(got, true_round(x, w, ids, x)[0]) < 2e-6


def test_hidden_over_tensor_parallel_devices(opened: Any) -> None:
    """Global arrays under plain jit, hidden sharded over a second axis."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("ep", "tp"))
    group = opened(mesh)
    x, w = numbers(1, 2 * TOKENS, HIDDEN), numbers(2, 2 * TOKENS, TOP_K)
    ids, ct = choices(3)[: 2 * TOKENS], numbers(4, 2 * TOKENS, HIDDEN)

    def step(x: Any, w: Any) -> Any:
        plan, recv, slot = epic.jax.sharded.plan_dispatch(
            mesh, group, LAYER, ids, x, w, hidden_axis="tp"
        )
        return epic.jax.sharded.combine(mesh, plan, jnp.sin(recv), slot, hidden_axis="tp")

    out, pull = jax.vjp(jax.jit(step), x, w)
    for got, wanted in zip((out, *pull(ct)), true_round(x, w, ids, ct), strict=True):
        assert relative(got, wanted) < 2e-6
