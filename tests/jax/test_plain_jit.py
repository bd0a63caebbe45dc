# SPDX-License-Identifier: Apache-2.0
"""Tests the functions of epic.jax on global arrays in a plain jit, without a shard_map."""

import re
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import epic.jax
import layers
import reference
from conftest import make_mesh
from reference import relative
from steps import ALL, EXPERTS, HIDDEN, LAYER, TOKENS, TOP_K, choices, numbers, true_round

MOVES = re.compile(r" = \S+ (all-gather|reduce-scatter|all-to-all|collective-permute)\(")


def place(mesh: Mesh, spec: P, *arrays: Any) -> list[Any]:
    """Return the arrays in a NamedSharding."""
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]


def moves(run: Any, *args: Any) -> list[str]:
    """Return the collectives by which XLA moves arrays in the compiled program."""
    return MOVES.findall(run.lower(*args).compile().as_text())


def as_rows(x: Any) -> Any:
    """Return [..., n] as [rows, n]."""
    return x.reshape(-1, x.shape[-1])


def layer_args(mesh: Mesh, group: Any, case: dict[str, Any], tokens: P) -> tuple[Any, Any, Any]:
    """Return x, weights by name and output gradient of layers.py, sharded."""
    named = layers.weights(case)
    specs = epic.jax.sharded.weight_specs(group, epic.jax.MoeWeights(**named))._asdict()
    w = {n: place(mesh, specs[n], v)[0] for n, v in named.items()}
    x, ct = place(mesh, tokens, *layers.arrays())
    return x, w, ct


def layer_step(group: Any, case: dict[str, Any], **more: Any) -> Any:
    """Return a jitted step of epic.jax.moe: out, loss, d_x, d_weights."""
    wish = layers.options(case, group.num_ranks)
    extras = {**layers.tables(case), **more}

    def loss_of(x: Any, w: Any, ct: Any) -> Any:
        found = epic.jax.moe(group, wish, x, epic.jax.MoeWeights(**w), **extras)
        return (found.out * ct).sum() + found.loss, found

    def run(x: Any, w: Any, ct: Any) -> Any:
        (_, moe), (d_x, d_w) = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)(x, w, ct)
        return moe.out, moe.loss, d_x, d_w

    return jax.jit(run)


@pytest.mark.parametrize("name", ["normalized", "shared", "table", "zero_experts"])
def test_layer(name: str, mesh: Mesh, opened: Any) -> None:
    """The layer matches float64; XLA moves no tokens and no weights around it."""
    group, case = opened(mesh), layers.CASES[name]
    args = layer_args(mesh, group, case, ALL)
    run = layer_step(group, case)
    got = run(*args)
    layers.compare(got, layers.true_step(case, 4 // group.num_ranks))
    assert got[0].sharding.is_equivalent_to(args[0].sharding, 3)
    for key, weight in args[1].items():
        assert got[3][key].sharding.is_equivalent_to(weight.sharding, weight.ndim), key
    assert not moves(run, *args)


def test_layer_outside_of_jit(opened: Any) -> None:
    """A call without jit and arrays on one device work, too."""
    mesh = make_mesh(4)
    group, case = opened(mesh), layers.CASES["softmax"]
    x, _ = layers.arrays()
    weights = epic.jax.MoeWeights(**layers.weights(case))
    found = epic.jax.moe(group, layers.options(case, 4), jnp.asarray(x), weights)
    assert relative(found.out, layers.true_step(case, 1)[0]) < 5e-6
    assert found.demand.shape == (4,) and int(found.load.sum()) == 2 * x.shape[0] * x.shape[1]


def test_tokens_over_several_dimensions() -> None:
    """token_axes of open defines how tokens of two dimensions are sharded."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("ep", "context"))
    case, tokens = layers.CASES["softmax"], P("ep", "context")
    like = jax.ShapeDtypeStruct((8, 4, layers.HIDDEN), jnp.float32)
    x, ct = np.random.default_rng(8).normal(size=(2, *like.shape)).astype(np.float32)
    with epic.jax.open(mesh, "ep", like=like, token_axes=tokens, timeout_ms=60000) as group:
        named = layers.weights(case)
        w = {n: jnp.asarray(v) for n, v in named.items()}
        args = (*place(mesh, tokens, x), w, *place(mesh, tokens, ct))
        run = layer_step(group, case)
        out, _, d_x, d_w = run(*args)
        moved = moves(run, *args)
    wide = {n: v.astype(np.float64) for n, v in named.items()}
    halves = [np.split(v.astype(np.float64), 2, axis=1) for v in (x, ct)]
    parts: list[Any] = [  # each group has the devices of one half of the mesh
        reference.moe(reference.Options(2), as_rows(a), wide, as_rows(c), 0)
        for a, c in zip(*halves, strict=True)
    ]

    def whole(i: int) -> np.ndarray:
        return np.concatenate([p[i].reshape(8, 2, -1) for p in parts], axis=1)

    assert relative(out, whole(0)) < 5e-6 and relative(d_x, whole(2)) < 5e-6
    for name, d in d_w.items():
        assert relative(d, sum(p[3][name] for p in parts)) < 5e-6, name
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, tokens), 3)
    assert not moved


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_under_a_mesh_of_the_context(kind: AxisType) -> None:
    """Check the layer if the mesh comes from the context, with axes of both types."""
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("dp", "ep"), axis_types=(kind, kind))
    case = layers.CASES["normalized"]
    sizes: dict[str, Any] = {"max_tokens": 64, "max_row_bytes": 4096, "timeout_ms": 60000}
    with epic.jax.open(mesh, "ep", **sizes) as group, jax.set_mesh(mesh):
        got = layer_step(group, case)(*layer_args(mesh, group, case, ALL))
        layers.compare(got, layers.true_step(case, 2))


# ---------------------------------------------------------------------------- the steps ----


@pytest.mark.parametrize("fused", [False, True])
def test_steps(fused: bool, mesh: Mesh, opened: Any) -> None:
    """Plan, dispatch and combine match float64 with their gradients, and XLA moves nothing."""
    group = opened(mesh)
    x, w, ids = numbers(1, 4 * TOKENS, HIDDEN), numbers(2, 4 * TOKENS, TOP_K), choices(3)
    ct = numbers(4, 4 * TOKENS, HIDDEN)

    def forward(x: Any, w: Any, ids: Any) -> Any:
        if fused:
            plan, recv, slot = epic.jax.plan_dispatch(group, LAYER, ids, x, w)
        else:
            plan = epic.jax.plan(group, LAYER, ids)
            recv, slot = epic.jax.dispatch(plan, x, w)
        return epic.jax.combine(plan, jnp.sin(recv), slot)

    def run(x: Any, w: Any, ids: Any, ct: Any) -> Any:
        out, pull = jax.vjp(lambda x, w: forward(x, w, ids), x, w)
        return out, *pull(ct)

    args, step = place(mesh, ALL, x, w, ids, ct), jax.jit(run)
    for got, wanted in zip(step(*args), true_round(x, w, ids, ct), strict=True):
        assert relative(got, wanted) < 2e-6
        assert got.sharding.is_equivalent_to(args[0].sharding, 2)
    assert not moves(step, *args)


def test_a_layer_of_single_functions(mesh: Mesh, opened: Any) -> None:
    """Router, plan, dispatch, experts and combine make the layer of the reference."""
    group, case = opened(mesh), layers.CASES["biases"]
    wish = layers.options(case, group.num_ranks)
    x, w, ct = layer_args(mesh, group, case, ALL)

    def loss_of(x: Any, w: Any, ct: Any) -> Any:
        logits = jnp.matmul(x, w["w_gate"], precision="highest")
        ids, weights = epic.jax.route(wish.router, logits, group=group)
        plan, recv, slot = epic.jax.plan_dispatch(group, wish.layer, ids, x, weights)
        fields = epic.jax.ExpertWeights._fields
        mine = epic.jax.ExpertWeights(*(w.get(name) for name in fields))
        rows = (plan.expert_rows, plan.expert_tokens)
        y = epic.jax.experts(wish.experts, recv, *rows, mine, group=group)
        out = epic.jax.combine(plan, y, slot)
        return (out * ct).sum(), out

    step = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True))
    (_, out), (d_x, d_w) = step(x, w, ct)
    layers.compare((out, 0.0, d_x, d_w), layers.true_step(case, 4 // group.num_ranks))
    assert not moves(step, x, w, ct)


def test_other_forms_of_dispatch(mesh: Mesh, opened: Any) -> None:
    """Flat and quantized rows equal those that the functions return inside a shard_map."""
    group = opened(mesh)
    flat = epic.jax.Layer(EXPERTS, TOP_K, layout="flat")
    x, w, ids = numbers(1, 4 * TOKENS, 160), numbers(2, 4 * TOKENS, TOP_K), choices(3)
    q = x.astype(jnp.float8_e4m3fn)
    scales = numbers(5, 4 * TOKENS, 2)

    def run(x: Any, w: Any, ids: Any, q: Any, scales: Any) -> Any:
        plan, other = epic.jax.plan(group, LAYER, ids), epic.jax.plan(group, flat, ids)
        return (
            epic.jax.dispatch(plan, q, w),
            epic.jax.dispatch(plan, x, w, quantize="1x128"),
            epic.jax.dispatch_quantized(plan, x, w, "1x32"),
            epic.jax.dispatch_flat(other, x, w),
            epic.jax.dispatch_flat_quantized(other, x, w),
            epic.jax.dispatch_flat_quantized(other, q, w, scales=scales),
        )

    args = place(mesh, ALL, x, w, ids, q, scales)
    inner = jax.shard_map(run, mesh=mesh, in_specs=(ALL,) * 5, out_specs=ALL)
    step = jax.jit(run)
    for a, b in zip(*(jax.tree.leaves(f(*args)) for f in (step, jax.jit(inner))), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert not moves(step, *args)


def test_hidden_over_an_axis(opened: Any) -> None:
    """A plan records the axis over which hidden is sharded."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("ep", "tp"))
    group = opened(mesh, token_axes=("ep",))
    x, w, ids = numbers(1, 4 * TOKENS, HIDDEN), numbers(2, 4 * TOKENS, TOP_K), choices(3)

    def run(x: Any, w: Any, ids: Any) -> Any:
        more: dict[str, Any] = {"hidden_axis": "tp"}
        found = epic.jax.sharded.plan_dispatch(mesh, group, LAYER, ids, x, w, **more)
        return epic.jax.combine(found[0], jnp.sin(found[1]), None)

    ones = np.ones_like(w)
    wanted = true_round(x, ones, ids, x)[0]
    (whole,) = place(mesh, P("ep", "tp"), x)
    out = jax.jit(run)(whole, *place(mesh, P("ep"), w, ids))
    assert relative(out, wanted) < 2e-6
    assert out.sharding.is_equivalent_to(whole.sharding, 2)


# -------------------------------------------------------------------- sums and losses ----


def test_sum(mesh: Mesh, opened: Any) -> None:
    """The sum has the rows of one device for each group, and its gradient is the float64 one."""
    group = opened(mesh)
    ranks = group.num_ranks
    x, ct = numbers(1, 12, 5), numbers(2, 12 // ranks, 5)

    def run(x: Any, ct: Any) -> Any:
        out, pull = jax.vjp(lambda x: epic.jax.sum(group, x, tree=True), x)
        return out, pull(ct)[0]

    args = [*place(mesh, ALL, x), *place(mesh, P("dp"), ct)]
    step = jax.jit(run)
    out, d_x = step(*args)
    parts = np.asarray(x, np.float64).reshape(4 // ranks, ranks, 3, 5)
    wanted = np.repeat(np.asarray(ct).reshape(4 // ranks, 1, 3, 5), ranks, axis=1)
    assert relative(out, parts.sum(1).reshape(-1, 5)) < 1e-6
    assert relative(d_x, wanted.reshape(-1, 5)) < 1e-6
    assert out.sharding.is_equivalent_to(args[1].sharding, 2)
    assert d_x.sharding.is_equivalent_to(args[0].sharding, 2) and not moves(step, *args)


def test_replicas(mesh: Mesh, opened: Any) -> None:
    """sum_replicas and the gradient of sum_replica_grads are sums over the replicas."""
    group, table = opened(mesh), np.array([0, 3, 1, 2, 3, 0, 1, 3])
    layer = epic.jax.Layer(EXPERTS, TOP_K, num_logical=4)
    ids = jnp.where(choices(3) >= 4, -1, choices(3))
    w, ct = numbers(1, EXPERTS, 3), numbers(2, EXPERTS, 3)

    def run(ids: Any, w: Any, ct: Any) -> Any:
        plan = epic.jax.plan(group, layer, ids, logical_of_expert=table)
        same, pull = jax.vjp(lambda w: epic.jax.sum_replica_grads(plan, w), w)
        return epic.jax.sum_replicas(plan, ct), same, pull(ct)[0]

    args = [*place(mesh, ALL, ids), *place(mesh, P("ep"), w, ct)]
    step = jax.jit(run)
    total, same, d_w = step(*args)
    wide = np.asarray(ct, np.float64)
    wanted = np.stack([wide[table == table[e]].sum(0) for e in range(EXPERTS)])
    assert relative(total, wanted) < 1e-6 and relative(d_w, wanted) < 1e-6
    assert np.array_equal(np.asarray(same), np.asarray(w))
    for got in (total, same, d_w):
        assert got.sharding.is_equivalent_to(args[1].sharding, 2)
    assert not moves(step, *args)
    text = str(step.lower(*args).compile().as_text())
    assert not re.search(r" = \S+ all-reduce\(", text)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_losses(score: str, mesh: Mesh, opened: Any) -> None:
    """The losses count the tokens of all devices, and match float64 with their gradients."""
    group, router = opened(mesh), epic.jax.Router(EXPERTS, TOP_K, score=score)
    z = numbers(1, 8, 3, EXPERTS)

    def losses(z: Any) -> Any:
        ids, _ = epic.jax.route(router, z, group=group)
        load = epic.jax.plan(group, LAYER, ids).load
        more: dict[str, Any] = {"coeff": 0.5, "group": group}
        return (
            epic.jax.balance_loss(router, z, load=load, **more),
            epic.jax.z_loss(router, z, **more),
            epic.jax.balance_loss(router, z, topk_idx=ids, sequence_tokens=3, **more),
        )

    def run(z: Any, ct: Any) -> Any:
        out, pull = jax.vjp(losses, z)
        return out, jax.vmap(lambda row: pull(tuple(row))[0], axis_size=3)(ct)

    (args,), step = place(mesh, ALL, z), jax.jit(run)
    found, gradients = step(args, jnp.eye(3))
    wide = as_rows(np.asarray(z, np.float64))
    ids = reference.route(score, False, wide, None, TOP_K).ids
    load = reference.load_of(ids, EXPERTS)
    rows = [slice(3 * i, 3 * i + 3) for i in range(8)]
    each = [
        reference.balance(score, wide[r], reference.load_of(ids[r], EXPERTS), TOP_K, 0.5)
        for r in rows
    ]
    by_sequence = np.mean([v for v, _ in each]), np.concatenate([d for _, d in each]) / 8
    wanted = [reference.balance(score, wide, load, TOP_K, 0.5), reference.z_loss(wide, 0.5)]
    for got, d_z, (true, true_d) in zip(found, gradients, [*wanted, by_sequence], strict=True):
        assert abs(got - true) < 2e-6 * true
        assert relative(as_rows(d_z), true_d) < 5e-6
    only = jax.jit(losses)
    assert not moves(only, args)


def test_what_cannot_be(opened: Any) -> None:
    """Arrays that cannot be divided over the devices, and wrong axes, are refused while tracing."""
    mesh = make_mesh(2)
    group = opened(mesh)
    ids, x = choices(3), numbers(1, 4 * TOKENS, HIDDEN)
    plan = epic.jax.plan(group, LAYER, ids)
    assert plan.spec.num_tokens == TOKENS and plan.spec.token_axes == ALL
    stats = epic.jax.read_plan(plan)
    assert len(stats) == 4 and sum(len(s.fate) for s in stats) == 4 * TOKENS, stats
    rows = plan.expert_rows
    mine = epic.jax.ExpertWeights(jnp.ones((7, HIDDEN, 8)), jnp.ones((7, 4, HIDDEN)))
    options, wrong = epic.jax.Experts(hidden=HIDDEN, inner=4), cast("Any", "group")
    calls: list[tuple[Any, str]] = [
        (
            lambda: epic.jax.plan(group, LAYER, ids[:6]),
            "topk_idx has the shape .6, 3.: .* a multiple of 4",
        ),
        (
            lambda: epic.jax.dispatch(plan, x[:6]),
            "tokens has the shape .6, 20.: .* a multiple of 4",
        ),
        (lambda: epic.jax.combine(plan, x), r"rows is float32\[24, 20\]: must be"),
        (
            lambda: epic.jax.experts(options, x, rows, rows, mine, group=group),
            "w_gate_up has the shape .7, 20, 8.: .* a multiple of 2",
        ),
        (
            lambda: epic.jax.route(epic.jax.Router(8, 2), x[:6, :8], group=group),
            "logits has the shape",
        ),
        (lambda: epic.jax.plan(wrong, LAYER, ids), "group is a str"),
        (lambda: epic.jax.sum(group, x[:6]), "x has the shape .6, 20.: .* a multiple of 4"),
        (
            lambda: epic.jax.z_loss(epic.jax.Router(8, 2), x[:6, :8], coeff=1.0, group=group),
            "logits has the shape .6, 8.: .* a multiple of 4",
        ),
        (
            lambda: epic.jax.z_loss(epic.jax.Router(8, 2), x[:, :8], coeff=1.0),
            "total_tokens is None: must be the number of tokens",
        ),
    ]
    for call, sentence in calls:
        with pytest.raises(epic.jax.EpicArgumentError, match=sentence):
            call()
    with pytest.raises(epic.jax.EpicArgumentError, match="token_axes is 'row': must be an axis"):
        opened(mesh, token_axes=("row",), name="other")
