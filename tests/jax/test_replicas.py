# SPDX-License-Identifier: Apache-2.0
"""Tests that replicas of experts have the results and gradients of their logical experts."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import epic.jax
import layers
from conftest import make_mesh
from epic.jax.placement import EXPERT_WEIGHTS
from steps import choices, mapped, numbers

# The logical expert of each of twelve or ten experts.
TWELVE = np.array([0, 3, 1, 2, 3, 4, 5, 3, 6, 7, 0, 0], np.int32)
TEN = np.array([7, 0, 1, 2, 3, 4, 5, 6, 7, 7], np.int32)
RAGGED = jax.lax.ragged_dot
FULL = {"normalize": True, "biases": True, "balance_coeff": 0.5, "z_coeff": 0.1}


def replicated(case: dict[str, Any], table: np.ndarray) -> tuple[Any, dict[str, np.ndarray]]:
    """Return the case's options and weights, with replicas."""
    wish = layers.options(case, 3)  # this does not set the number of experts of a rank
    layer = replace(wish.layer, num_experts=len(table), num_logical=layers.EXPERTS)
    w = layers.weights(case)
    return replace(wish, layer=layer), {
        n: v[table] if n in EXPERT_WEIGHTS else v for n, v in w.items()
    }


RUNS = {
    "core": (FULL, TWELVE, 4, {}),
    "core_ep1": (FULL, TWELVE, 1, {}),
    "zero_experts": (layers.CASES["zero_experts"], TWELVE, 2, {"grouped_gemm": RAGGED}),
    "zero_experts_core": (layers.CASES["zero_experts"], TWELVE, 2, {}),
    "ragged": (FULL, TWELVE, 2, {"grouped_gemm": RAGGED}),
    "uneven": (FULL, TEN, 4, {}),
    "uneven_ragged": (FULL, TEN, 4, {"grouped_gemm": RAGGED}),
    "losses_over_dp": (FULL, TWELVE, 2, {"loss_axes": ("dp",)}),
    "early": (layers.CASES["early"], TWELVE, 4, {}),
    "table": (layers.CASES["table"], TWELVE, 2, {}),
    "mask": (FULL, TWELVE, 2, {"token_mask": np.ones((layers.BATCH, layers.LENGTH), bool)}),
}


@pytest.mark.parametrize(("case", "table", "ep", "more"), RUNS.values(), ids=RUNS.keys())
def test_layer(
    case: dict[str, Any], table: np.ndarray, ep: int, more: dict[str, Any], opened: Any
) -> None:
    """Out, loss and all gradients match float64: each replica has its logical expert's gradient."""
    mesh = make_mesh(ep)
    group = opened(mesh)
    options, w = replicated(case, table)
    x, ct = layers.arrays()
    wish = {**layers.tables(case), **more, "logical_of_expert": table}

    def loss_of(x: Any, w: Any) -> Any:
        moe = epic.jax.sharded.moe(mesh, group, options, x, epic.jax.MoeWeights(**w), **wish)
        return (moe.out * ct).sum() + moe.loss, moe

    run = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True))
    (_, moe), (d_x, d_w) = run(x, w)
    out, loss, true_x, true_w = layers.true_step(case, 1 if "loss_axes" in more else 4 // ep)
    true_w = {n: d[table] if n in EXPERT_WEIGHTS else d for n, d in true_w.items()}
    layers.compare((moe.out, moe.loss, d_x, d_w), (out, loss, true_x, true_w))
    for logical in range(layers.EXPERTS):
        same = np.asarray(d_w["w_down"])[table == logical]
        assert np.array_equal(same, np.broadcast_to(same[:1], same.shape)), logical
    of_logical = np.zeros(layers.EXPERTS, int)
    np.add.at(of_logical, table, np.asarray(moe.load))
    assert moe.logical_load.tolist() == of_logical.tolist()
    turns = [np.ptp(np.asarray(moe.load)[table == e]) for e in range(layers.EXPERTS)]
    assert max(turns) <= 4 // ep, "copies take turns in each group"


def test_steps(mesh: Any, opened: Any) -> None:
    """Check experts of the caller: sum_replica_grads adds their gradients, and sum_replicas adds
    sums that the caller kept. The replicas may be on any ranks."""
    group = opened(mesh)
    ep = group.num_ranks
    owners = np.array([0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3], np.int32) % ep
    layer = epic.jax.Layer(12, 3, num_logical=8)
    x, ids, factor = numbers(1, 24, 5), choices(3, 0), numbers(2, 8)
    order = np.argsort(owners, kind="stable")  # rows in the order of the ranks

    def step(x: Any, ids: Any, w: Any) -> Any:
        def out_of(w: Any, use: Any) -> Any:
            plan, recv, _ = epic.jax.plan_dispatch(
                group, layer, ids, x, rank_of_expert=owners, logical_of_expert=TWELVE
            )
            sizes = plan.expert_rows
            rows = jnp.repeat(use(plan, w), sizes, total_repeat_length=recv.shape[0])
            return epic.jax.combine(plan, recv * rows[:, None]), plan

        out, pull, plan = jax.vjp(lambda w: out_of(w, epic.jax.sum_replica_grads), w, has_aux=True)
        plain = jax.vjp(lambda w: out_of(w, lambda _, w: w)[0], w)[1]
        later = epic.jax.sum_replicas(plan, plain(x)[0])
        return out, pull(x)[0], later, plan.logical_load, plan.load

    w = jnp.tile(factor[TWELVE[order]].reshape(ep, -1), (4 // ep, 1)).reshape(-1)
    out, d_w, later, logical, load = mapped(mesh, step, 3)(x, ids, w)
    per_group = np.asarray(ids).reshape(4 // ep, -1, 3)
    wide = np.asarray(x, np.float64).reshape(4 // ep, -1, 5)
    true = np.asarray(factor, np.float64)[per_group].sum(-1)[..., None] * wide
    assert np.abs(np.asarray(out).reshape(true.shape) - true).max() < 1e-5
    for g in range(4 // ep):
        square = (wide[g] ** 2).sum(axis=1)
        wanted = [((per_group[g] == e).sum(-1) * square).sum() for e in range(8)]
        for got in (d_w, later):
            mine = np.asarray(got).reshape(4 // ep, -1)[g]
            assert np.abs(mine - np.array(wanted)[TWELVE[order]]).max() < 1e-4
        of_logical = np.bincount(per_group[g].ravel(), minlength=8)
        assert np.array_equal(np.asarray(logical).reshape(4, 8)[g * ep], of_logical)
        assert np.asarray(load).reshape(4, 12)[g * ep].sum() == of_logical.sum()


def test_blocks(opened: Any) -> None:
    """Replicas begin equal and stay equal in training. The bias has one entry per logical
    expert."""
    pytest.importorskip("flax")
    from flax import nnx

    import epic.jax.linen
    import epic.jax.nnx

    mesh = make_mesh(2)
    group = opened(mesh)
    options, _ = replicated({"score": "sigmoid", "normalize": True}, TWELVE)
    x, ct = layers.arrays()
    more: dict[str, Any] = {"bias_rate": 0.125, "logical_of_expert": tuple(map(int, TWELVE))}

    def check(weights: Any, bias: Any) -> None:
        copies = np.asarray(weights)[np.flatnonzero(TWELVE == 3)]
        assert np.abs(copies).max() > 0.01 and np.array_equal(copies[0], copies[1])
        assert np.array_equal(copies[0], copies[2])
        assert bias.shape == (layers.EXPERTS,)

    linen = epic.jax.linen.MoEBlock(mesh, group, options, **more)
    variables = jax.jit(linen.init)(jax.random.key(0), x)
    params, state = (nn_unboxed(variables)[name] for name in ("params", "moe"))

    def loss_of(params: Any) -> Any:
        (out, loss), new = linen.apply({"params": params, "moe": state}, x, mutable=["moe"])
        return (out * ct).sum() + loss, new["moe"]

    grads, new = jax.jit(jax.grad(loss_of, has_aux=True))(params)
    moved = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
    check(moved["w_gate_up"], new["expert_bias"])
    assert np.abs(moved["w_gate_up"] - params["w_gate_up"]).max() > 1e-3
    assert any(new["expert_bias"].tolist())

    block: Any = epic.jax.nnx.MoEBlock(mesh, group, options, rngs=nnx.Rngs(0), **more)
    before = np.asarray(block.w_gate_up[...])
    grads = nnx.jit(nnx.grad(lambda m: (m(x)[0] * ct).sum()))(block)
    moved = before - 0.5 * np.asarray(grads["w_gate_up"][...])
    check(moved, block.expert_bias[...])
    assert np.abs(moved - before).max() > 1e-3


def nn_unboxed(variables: Any) -> Any:
    """Return the arrays without linen's boxes of names."""
    import flax.linen as nn

    return nn.meta.unbox(variables)


def test_what_cannot_be(opened: Any) -> None:
    """Wrong tables are refused while tracing; traced ones when the program runs."""
    group = opened(None)
    ids, x = choices(3, 0)[:6], numbers(1, 6, 5)
    layer = epic.jax.Layer(12, 3, num_logical=8)
    with pytest.raises(epic.jax.EpicArgumentError, match="given if num_logical is above 0"):
        epic.jax.plan(group, layer, ids)
    with pytest.raises(epic.jax.EpicArgumentError, match="given if num_logical is above 0"):
        epic.jax.plan(group, epic.jax.Layer(8, 3), ids, logical_of_expert=TWELVE)
    with pytest.raises(
        epic.jax.EpicArgumentError, match=r"int32\[10\]: must be of shape \[num_experts 12\]"
    ):
        epic.jax.plan(group, layer, ids, logical_of_expert=TEN)
    with pytest.raises(epic.jax.EpicArgumentError, match=r"num_logical is 13"):
        epic.jax.Layer(12, 3, num_logical=13)
    with pytest.raises(
        epic.jax.EpicArgumentError, match=r"layer.num_logical is 8 and router.num_ex"
    ):
        epic.jax.Moe(layer, epic.jax.Router(12, 3), epic.jax.Experts(hidden=4, inner=4))
    of = epic.jax.Moe.of(num_experts=12, num_logical=8, top_k=3, hidden=4, inner=4)
    assert (of.router.num_experts, of.layer.num_experts) == (8, 12)
    missing = np.minimum(TWELVE, 6)
    with pytest.raises(Exception, match="logical"):
        jax.block_until_ready(epic.jax.plan(group, layer, ids, logical_of_expert=missing).load)
    plan = epic.jax.plan(group, layer, ids, logical_of_expert=TWELVE)
    with pytest.raises(epic.jax.EpicArgumentError, match=r"\[local experts 12, ...\]"):
        epic.jax.sum_replicas(plan, x)
    with jax.enable_x64(True), pytest.raises(epic.jax.EpicUnsupportedError, match="float64"):
        epic.jax.sum_replica_grads(plan, jnp.zeros((12, 2), jnp.float64))
