# SPDX-License-Identifier: Apache-2.0
"""Tests recording and replaying the routing of layers and of Flax modules."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import epic.jax
import layers
from conftest import line_of, make_mesh
from reference import relative

TABLE = layers.CASES["table"]


def table_ids() -> np.ndarray:
    """The experts of the case "table" as ids of each token."""
    found = layers.tables(TABLE)
    return found["table"][found["token_ids"]]


@pytest.mark.parametrize("gemm", [None, jax.lax.ragged_dot], ids=["core", "composed"])
def test_forced_ids(mesh: Any, opened: Any, gemm: Any) -> None:
    """The results of the case "table", whose experts are forced here."""
    group, (x, ct) = opened(mesh), layers.arrays()
    wish, ids = layers.options(TABLE, group.num_ranks), table_ids()

    def loss_of(x: Any, w: Any) -> tuple[Any, Any]:
        moe = epic.jax.sharded.moe(
            mesh,
            group,
            wish,
            x,
            epic.jax.MoeWeights(**w),
            forced=ids,
            return_routing=True,
            grouped_gemm=gemm,
        )
        return (moe.out * ct).sum() + moe.loss, moe

    run = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True))
    (_, moe), (d_x, d_w) = run(x, layers.weights(TABLE))
    true = layers.true_step(TABLE, mesh.shape["dp"])
    layers.compare((moe.out, moe.loss, d_x, d_w), true)
    assert np.array_equal(moe.routing.topk_idx, ids)
    assert moe.routing.weights.shape == ids.shape


HIDDEN, INNER, EXPERTS, TOP_K, TOKENS = 16, 12, 8, 2, 16


def options_of(**more: Any) -> epic.jax.Moe:
    """A layer whose sums do not depend on the number of ranks."""
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "inner": INNER}
    return epic.jax.Moe.of(**sizes, normalize="sum", sum_order="tree", leaves=4, **more)


def weights_of() -> dict[str, Any]:
    """Random weights of all experts."""
    rng = np.random.default_rng(3)
    shapes = {
        "w_gate": (HIDDEN, EXPERTS),
        "w_gate_up": (EXPERTS, HIDDEN, 2 * INNER),
        "w_down": (EXPERTS, INNER, HIDDEN),
    }
    return {n: jnp.asarray(rng.normal(size=s) / 4, jnp.float32) for n, s in shapes.items()}


def numbers(seed: int, *shape: int) -> Any:
    """Random numbers, float32."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def true_layer(x: Any, w: dict[str, Any], ids: np.ndarray, weights: Any) -> Any:
    """The layer with forced ids and weights: every expert computes every token."""
    gate, up = jnp.split(jnp.einsum("th,ehw->etw", x, w["w_gate_up"], precision="highest"), 2, 2)
    a = jax.nn.silu(gate) * up
    y = jnp.einsum("eti,eih->eth", a, w["w_down"], precision="highest")
    out = jnp.zeros_like(x)
    for k in range(TOP_K):
        live = (ids[:, k] >= 0)[:, None]
        rows = y[np.maximum(ids[:, k], 0), np.arange(len(ids))]
        out = out + jnp.where(live, weights[:, k, None] * rows, 0)
    return out


@pytest.mark.parametrize("gemm", [None, jax.lax.ragged_dot], ids=["core", "composed"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_forced_weights(opened: Any, ranks: int, gemm: Any) -> None:
    """All gradients against a dense layer; the router has none, as there are no losses."""
    mesh = line_of(ranks)
    group, x, ct = opened(mesh), numbers(1, TOKENS, HIDDEN), numbers(2, TOKENS, HIDDEN)
    ids = np.random.default_rng(4).integers(-1, EXPERTS, (TOKENS, TOP_K))
    ids[0] = 3  # an expert twice
    wish, w, given = options_of(), weights_of(), numbers(5, TOKENS, TOP_K)

    def loss_of(x: Any, w: Any, weights: Any) -> Any:
        forced = epic.jax.Routing(ids, weights)
        weights_here = epic.jax.MoeWeights(**w)
        moe = epic.jax.sharded.moe(
            mesh, group, wish, x, weights_here, forced=forced, grouped_gemm=gemm
        )
        return (moe.out * ct).sum()

    def true_loss(x: Any, w: Any, weights: Any) -> Any:
        return (true_layer(x, w, ids, weights) * ct).sum()

    got = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1, 2)))(x, w, given)
    true = jax.value_and_grad(true_loss, argnums=(0, 1, 2))(x, w, given)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(true), strict=True):
        assert relative(a, b) < 1e-5 if np.abs(b).max() else not np.abs(a).max()


def step_on(opened: Any, ranks: int, forced: Any, bias: Any) -> tuple[Any, Any]:
    """out, d_x, gradients; and the routing."""
    mesh = line_of(ranks)
    name = f"ranks-{ranks}-{forced is not None}-{isinstance(forced, tuple)}"
    group, x = opened(mesh, name=name), numbers(1, TOKENS, HIDDEN)
    wish = options_of(balance_coeff=0.1)

    def loss_of(x: Any, w: Any) -> tuple[Any, Any]:
        moe = epic.jax.sharded.moe(
            mesh,
            group,
            wish,
            x,
            epic.jax.MoeWeights(bias=bias, **w),
            forced=forced,
            return_routing=True,
        )
        return (moe.out**2).sum(), moe

    run = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True))
    (_, moe), (d_x, d_w) = run(x, weights_of())
    d_experts = {n: d_w[n] for n in ("w_gate_up", "w_down")}
    return jax.tree.map(np.asarray, (moe.out, d_x, d_experts)), moe.routing


def test_record_on_one_rank_and_replay_on_more(opened: Any) -> None:
    """The tree order: the same bits on 1, 2 and 4 ranks, with a bias that chooses others."""
    found, routing = step_on(opened, 1, None, None)
    routing = jax.tree.map(np.asarray, routing)
    bias = jnp.arange(EXPERTS) % 3 * 10.0
    for ranks in (1, 2, 4):
        again, used = step_on(opened, ranks, routing.topk_idx, bias)
        assert jax.tree.all(jax.tree.map(np.array_equal, again, found)), ranks
        assert np.array_equal(used.topk_idx, routing.topk_idx)
        assert np.array_equal(used.weights, routing.weights)
        out = step_on(opened, ranks, routing, bias)[0][0]
        assert np.array_equal(out, found[0]), ranks


@pytest.mark.parametrize("scatter", [False, True])
def test_tensor_axis(opened: Any, scatter: bool) -> None:
    """The routing of each device's own tokens, also if they are sharded over the axis."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("ep", "tp"))
    group, x, w = opened(mesh), numbers(1, TOKENS, HIDDEN), weights_of()
    wish = options_of(interleaved=True)
    token_axes = ("ep", "tp") if scatter else ("ep",)

    @jax.jit
    def run(x: Any, forced: Any) -> Any:
        return epic.jax.sharded.moe(
            mesh,
            group,
            wish,
            x,
            epic.jax.MoeWeights(**w),
            tensor_axis="tp",
            token_axes=token_axes,
            forced=forced,
            return_routing=True,
        )

    first = run(x, None)
    logits = np.asarray(x) @ np.asarray(w["w_gate"])
    assert np.array_equal(first.routing.topk_idx, np.argsort(-logits, axis=1)[:, :TOP_K])
    again = run(x, first.routing)
    assert np.array_equal(again.out, first.out)
    assert np.array_equal(again.routing.topk_idx, first.routing.topk_idx)


def test_mask(opened: Any) -> None:
    """A masked token has no expert."""
    mesh = line_of(2)
    group, x = opened(mesh), numbers(1, TOKENS, HIDDEN)
    mask = np.arange(TOKENS) % 3 > 0
    out = epic.jax.sharded.moe(
        mesh,
        group,
        options_of(),
        x,
        epic.jax.MoeWeights(**weights_of()),
        token_mask=mask,
        return_routing=True,
    )
    assert np.array_equal((out.routing.topk_idx < 0).all(1), ~mask)


def test_route() -> None:
    """Forced ids of the router alone get the same bits again."""
    router = options_of().router
    z = numbers(3, 2, 4, EXPERTS)
    ids, weights = epic.jax.route(router, z)
    again = epic.jax.route(router, z, forced=ids.reshape(2, 4, TOP_K))
    assert np.array_equal(again[0], ids) and np.array_equal(again[1], weights)


def test_errors(opened: Any) -> None:
    """Shapes, dtypes and combinations while tracing, and ids that do not exist at run time."""
    mesh = line_of(2)
    group, x, w = opened(mesh), numbers(1, TOKENS, HIDDEN), epic.jax.MoeWeights(**weights_of())
    ids = np.zeros((TOKENS, TOP_K), np.int32)

    def run(forced: Any, **more: Any) -> Any:
        return epic.jax.sharded.moe(mesh, group, options_of(), x, w, forced=forced, **more)

    for forced, text in (
        (ids[:4], "forced ids"),
        (ids[:, :1], "forced ids"),
        (ids.astype(np.float32), "forced ids"),
        ((ids, np.zeros((TOKENS, 1), np.float32)), "forced weights"),
        ((ids, ids), "forced weights"),
    ):
        with pytest.raises(epic.EpicArgumentError, match=text):
            run(forced)
    with pytest.raises(epic.EpicArgumentError, match="forced is given and token_ids is given"):
        run(ids, token_ids=ids[:, 0], table=ids[:1])
    ids[9, 1] = EXPERTS
    with pytest.raises(jax.errors.JaxRuntimeError, match="rank 1, token 1, k 1 has expert 8"):
        jax.block_until_ready(run(ids).out)
    with pytest.raises(jax.errors.JaxRuntimeError, match="rank 1, token 1, k 1 has expert 8"):
        jax.block_until_ready(run(ids, grouped_gemm=jax.lax.ragged_dot).out)


# -------------------------------------------------------------------------------- flax ----


def test_linen(opened: Any) -> None:
    """The collection "routing" records and replays, with other routers too."""
    pytest.importorskip("flax.linen")
    import flax.linen as nn

    from epic.jax.linen import MoEBlock

    mesh = make_mesh(2)
    group, x = opened(mesh), numbers(1, 4, 4, HIDDEN)

    class Model(nn.Module):
        """Two blocks."""

        @nn.compact
        def __call__(self, x: Any) -> Any:
            for i in range(2):
                x = x + MoEBlock(mesh, group, options_of(), name=f"moe{i}")(x)[0]
            return x

    model: Any = Model()
    variables = nn.meta.unbox(model.init(jax.random.key(0), x))
    assert "routing" not in variables
    apply = jax.jit(model.apply)
    record_of = jax.jit(lambda v: model.apply(v, x, mutable=["routing"]))
    out, record = record_of(variables)
    assert np.array_equal(out, apply(variables, x))
    assert record["routing"]["moe1"]["topk_idx"].shape == (4, 4, TOP_K)
    again = apply({**variables, **record}, x)
    assert np.array_equal(again, out)
    other = jax.tree.map(lambda p: p, variables)
    gate = other["params"]["moe0"]["w_gate"]
    other["params"]["moe0"]["w_gate"] = gate[:, ::-1]
    plain = apply(other, x)

    def loss_of(v: Any) -> Any:
        return (model.apply({**v, **record}, x) ** 2).sum()

    replayed = apply({**other, **record}, x)
    assert not np.array_equal(plain, replayed)
    _, recorded = record_of({**other, **record})
    assert not np.array_equal(
        recorded["routing"]["moe0"]["topk_idx"], record["routing"]["moe0"]["topk_idx"]
    )
    d = jax.jit(jax.grad(loss_of))(other)["params"]["moe0"]["w_gate"]
    assert np.abs(d).max() > 0


def test_nnx(opened: Any) -> None:
    """Two attributes record and replay, also under nnx.jit."""
    nnx = pytest.importorskip("flax.nnx")
    from epic.jax.nnx import MoEBlock, Routed

    mesh = make_mesh(2)
    group, x = opened(mesh), numbers(1, 4, 4, HIDDEN)
    model = MoEBlock(mesh, group, options_of(), rngs=nnx.Rngs(0))
    run = nnx.jit(lambda model, x: model(x)[0])
    out = run(model, x)
    assert not nnx.state(model, Routed)
    model.set_attributes(replay_routing=True)
    with pytest.raises(epic.jax.EpicArgumentError, match="replay_routing is True and the block"):
        model(x)
    model.set_attributes(replay_routing=False)
    model.set_attributes(record_routing=True)
    assert np.array_equal(run(model, x), out)
    assert model.topk_idx[...].shape == (4, 4, TOP_K)
    ids = np.asarray(model.topk_idx[...])
    model.set_attributes(record_routing=False, replay_routing=True)
    assert np.array_equal(run(model, x), out)
    block: Any = model
    block.w_gate[...] = block.w_gate[...][:, ::-1]
    replayed = run(model, x)
    model.set_attributes(replay_routing=False)
    assert not np.array_equal(run(model, x), replayed)
    found = model.moe(x, forced=ids, return_routing=True)
    assert np.array_equal(found.out, replayed) and np.array_equal(found.routing.topk_idx, ids)
