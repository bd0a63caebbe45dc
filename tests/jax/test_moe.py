# SPDX-License-Identifier: Apache-2.0
"""Tests router, losses, experts and the whole layer."""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import core_layer
import epic.jax
import layers
import reference
from conftest import make_mesh
from reference import relative


@pytest.mark.parametrize("case", layers.CASES.values(), ids=layers.CASES.keys())
def test_layer(case: dict[str, Any], mesh: Any, opened: Any) -> None:
    """Out, loss and every gradient against float64, for every number of ranks."""
    group = opened(mesh)
    x, ct = layers.arrays()
    got = layers.step(mesh, group, case)(x, layers.weights(case), ct)
    layers.compare(got, layers.true_step(case, mesh.shape["dp"]))


@pytest.mark.parametrize("case", layers.CASES.values(), ids=layers.CASES.keys())
def test_layer_with_a_callers_gemm(case: dict[str, Any], opened: Any) -> None:
    """Check the layer that is composed of single functions around jax.lax.ragged_dot."""
    mesh = make_mesh(2)
    group = opened(mesh)
    x, ct = layers.arrays()
    run = layers.step(mesh, group, case, grouped_gemm=jax.lax.ragged_dot)
    got = run(x, layers.weights(case), ct)
    layers.compare(got, layers.true_step(case, mesh.shape["dp"]))


def test_no_other_collective(opened: Any) -> None:
    """Only EPIC's calls move rows in the compiled forward and backward."""
    mesh = make_mesh(2)
    group = opened(mesh)
    x, ct = layers.arrays()
    case = layers.CASES["normalized"]
    for more in ({}, {"grouped_gemm": jax.lax.ragged_dot}):
        run = layers.step(mesh, group, case, **more)
        place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("dp", "ep")))
        args = jax.device_put(x, place), layers.weights(case), jax.device_put(ct, place)
        text = run.lower(*args).compile().as_text()
        assert text.count("epic_") > 1
        assert not re.search(r"all-gather|all-to-all|collective-permute", text)
        out = jax.block_until_ready(run(*args))[0]
        assert out.sharding.is_equivalent_to(place, 3)


def test_same_bits_as_the_core(opened: Any) -> None:
    """Out and all gradients of a group of four have the core's bits."""
    case = {"normalize": True, "biases": True, "shared": True, "z_coeff": 0.1}
    mesh = make_mesh(4)
    group = opened(mesh)
    x, ct = layers.arrays()
    weights = layers.weights(case)
    got = layers.step(mesh, group, case)(x, weights, ct)
    wish = replace(layers.options(case, 4), capacity=group.capacity_bound(epic.jax.Layer(8, 2)))
    shards = [
        {n: v[2 * r : 2 * r + 2] if n[2:] in ("gate_up", "down") else v for n, v in weights.items()}
        for r in range(4)
    ]
    flat = [(a.reshape(4, -1, layers.HIDDEN)) for a in (x, ct)]
    each = [(flat[0][r], shards[r], flat[1][r]) for r in range(4)]
    config = group.config()
    config.timeout_ms = 60000
    parts = core_layer.run(config, wish, each)
    shape = x.shape
    assert np.array_equal(got[0], np.concatenate([p[0] for p in parts]).reshape(shape))
    assert np.array_equal(got[2], np.concatenate([p[1] for p in parts]).reshape(shape))
    for name in ("w_gate_up", "w_down", "b_gate_up", "b_down"):
        assert np.array_equal(got[3][name], np.concatenate([p[2][name] for p in parts])), name
    # these are summed by XLA, in its own order
    for name in ("w_gate", "shared_gate_up", "shared_down"):
        assert relative(got[3][name], sum(p[2][name].astype(np.float64) for p in parts)) < 1e-6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_small_types(dtype: str, opened: Any) -> None:
    """Gradients have the dtypes of their arrays."""
    mesh = make_mesh(2)
    group = opened(mesh)
    x, ct = (jnp.asarray(v, dtype) for v in layers.arrays())
    weights = {
        n: jnp.asarray(v, "float32" if n == "w_gate" else dtype)
        for n, v in layers.weights({}).items()
    }
    got = layers.step(mesh, group, {})(x, weights, ct)
    assert got[2].dtype == x.dtype and got[3]["w_down"].dtype == x.dtype
    layers.compare(got, layers.true_step({}, 2), 5e-2)


# ------------------------------------------------------------------- the local parts ----

ROUTERS = [
    ("softmax", False, False),
    ("softmax", True, False),
    ("sigmoid", True, False),
    ("sigmoid", True, True),
    ("sigmoid", False, True),
]


@pytest.mark.parametrize(("score", "normalize", "bias"), ROUTERS)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(128, 32, 4), (64, 256, 8), (5, 7, 7)])
def test_router(
    score: str, normalize: bool, bias: bool, tokens: int, experts: int, top_k: int
) -> None:
    """The choice is exact; weights and gradient match float64."""
    rng = np.random.default_rng(1)
    z = rng.normal(size=(tokens, experts)).astype(np.float32)
    b = rng.normal(size=experts).astype(np.float32) if bias else None
    ct = rng.normal(size=(tokens, top_k)).astype(np.float32)
    options = epic.jax.Router(experts, top_k, score=score, normalize="sum" if normalize else "none")
    run = jax.jit(lambda z: epic.jax.route(options, z, bias=b))
    (chosen, weights), pull = jax.vjp(run, z)
    r = reference.route(score, normalize, z.astype(np.float64), b, top_k)
    assert np.array_equal(chosen, r.ids)
    assert relative(weights, r.weights) < 1e-6
    d_z = pull((np.zeros(chosen.shape, jax.dtypes.float0), ct))[0]
    wanted = reference.route_backward(score, normalize, r, ct.astype(np.float64))
    assert np.abs(d_z - wanted).max() < 1e-6 * max(1, np.abs(wanted).max())


def test_router_with_groups_and_tables() -> None:
    """Groups of experts limit the choice, and a table replaces it."""
    rng = np.random.default_rng(1)
    z = rng.normal(size=(32, 32)).astype(np.float32)
    options = epic.jax.Router(32, 4, num_groups=8, topk_groups=2, score="softmax")
    chosen, _ = epic.jax.route(options, z)
    best = np.argsort(-z.reshape(32, 8, 4).max(axis=2), axis=1, kind="stable")[:, :2]
    assert all(set(np.asarray(c) // 4) <= set(b) for c, b in zip(chosen, best, strict=True))
    table = rng.integers(0, 32, size=(10, 4)).astype(np.int32)
    ids = rng.integers(0, 10, size=32).astype(np.int32)
    chosen, _ = epic.jax.route(epic.jax.Router(32, 4), z, token_ids=ids, table=table)
    assert np.array_equal(chosen, table[ids])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_losses(score: str) -> None:
    """Values and gradients match float64, scaled by the incoming gradient."""
    rng = np.random.default_rng(1)
    z = (3 * rng.normal(size=(40, 8))).astype(np.float32)
    ids = reference.route(score, False, z.astype(np.float64), None, 2).ids
    load = reference.load_of(ids, 8).astype(np.int32)
    options = epic.jax.Router(8, 2, score=score)

    def both(z: Any) -> Any:
        more: dict[str, Any] = {"coeff": 0.25, "total_tokens": 40}
        balance = epic.jax.balance_loss(options, z, load=jnp.asarray(load), **more)
        return balance, epic.jax.z_loss(options, z, **more)

    got, pull = jax.vjp(jax.jit(both), z)
    wide = z.astype(np.float64)
    b, d_b = reference.balance(score, wide, load, 2, 0.25)
    v, d_v = reference.z_loss(wide, 0.25)
    assert abs(got[0] - b) < 1e-6 * b and abs(got[1] - v) < 1e-6 * v
    assert relative(pull((jnp.float32(2), jnp.float32(-3)))[0], 2 * d_b - 3 * d_v) < 2e-6


def test_experts_and_empty_ones() -> None:
    """Slabs may have any length; padding, tail and gradients of idle experts are zeros."""
    rng = np.random.default_rng(1)
    hidden, inner, slots = 10, 6, 20
    tokens, rows = np.array([3, 0, 5], np.int32), np.array([4, 0, 8], np.int32)
    w = {
        "w_gate_up": rng.normal(size=(3, hidden, 2 * inner)).astype(np.float32),
        "w_down": rng.normal(size=(3, inner, hidden)).astype(np.float32),
    }
    x = np.zeros((slots, hidden), np.float32)
    live = np.r_[0:3, 4:9]
    x[live] = rng.normal(size=(8, hidden))
    ct = np.zeros_like(x)
    ct[live] = rng.normal(size=(8, hidden))
    options = epic.jax.Experts(3, hidden, inner)
    run = jax.jit(lambda x, w: epic.jax.experts(options, x, rows, tokens, w))
    y, pull = jax.vjp(run, x, epic.jax.ExpertWeights(**w))
    d_x, d_w = pull(ct)
    wide = {n: v.astype(np.float64) for n, v in w.items()}
    grads = {n: np.zeros_like(v) for n, v in wide.items()}
    for e, part in ((0, slice(0, 3)), (2, slice(4, 9))):
        wanted, kept = reference.mlp(x[part].astype(np.float64), wide, e)
        assert relative(y[part], wanted) < 2e-6
        assert relative(d_x[part], reference.mlp_backward(wide, grads, e, kept, ct[part])) < 2e-6
    assert relative(d_w.w_gate_up, grads["w_gate_up"]) < 2e-6
    assert relative(d_w.w_down, grads["w_down"]) < 2e-6
    idle = np.setdiff1d(np.arange(slots), live)
    assert not np.any(y[idle]) and not np.any(d_x[idle])


@pytest.mark.parametrize("policy", ["nothing_saveable", "everything_saveable"])
def test_recomputed_layers(policy: str, opened: Any) -> None:
    """Layers in a scan that backward recomputes have the same gradients."""
    mesh = make_mesh(2)
    group = opened(mesh)
    x, ct = layers.arrays()
    weights = layers.weights({})
    wish = layers.options({}, 2)

    def body(h: Any, w: Any) -> Any:
        return h + epic.jax.sharded.moe(mesh, group, wish, h, epic.jax.MoeWeights(**w)).out

    kept = jax.checkpoint(body, policy=getattr(jax.checkpoint_policies, policy))

    def gradients(body: Any) -> Any:
        def model(x: Any, w: Any) -> Any:
            return jax.lax.scan(lambda h, _: (body(h, w), None), x, None, length=3)[0]

        return jax.jit(lambda x, w: jax.vjp(model, x, w)[1](ct))(x, weights)

    pairs = zip(*(jax.tree.leaves(gradients(b)) for b in (kept, body)), strict=True)
    assert all(relative(a, b) < 2e-6 for a, b in pairs)


def test_exported(opened: Any) -> None:
    """A serialized program, forward and backward, finds the group by its name."""
    pytest.importorskip("flatbuffers")
    from jax import export

    mesh = make_mesh(2)
    group = opened(mesh)
    case = layers.CASES["normalized"]
    x, ct = layers.arrays()
    run = layers.step(mesh, group, case)
    checks = [export.DisabledSafetyCheck.custom_call(f"epic_{n}") for n in ("moe", "moe_backward")]
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    args = jax.device_put((x, layers.weights(case), ct), place)
    data = export.export(run, disabled_checks=checks)(*args).serialize()
    assert group.name.encode() in bytes(data)
    got = jax.jit(export.deserialize(data).call)(*args)
    layers.compare(got, layers.true_step(case, 2))
