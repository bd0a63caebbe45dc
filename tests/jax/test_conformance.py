# SPDX-License-Identifier: Apache-2.0
"""Tests stricter forms of cases from the test suites of other libraries.

Results must be exact, or have a small relative error against float64. Output gradients are random.
Other such cases are in the file of their subject: round trips, slots, capacity and tensor-parallel
hidden in test_steps.py, layers in test_moe.py and test_sharding.py, recomputation in test_order.py,
processes in test_processes.py, misuse in test_errors.py.
"""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import core_layer
import epic.jax
import layers
import reference
from conftest import make_mesh
from epic.jax.meshes import devices_by_rank
from reference import relative, slots_of
from steps import ALIGN, ALL, EXPERTS, HIDDEN, LAYER, TOKENS, TOP_K, choices, mapped, numbers

# ------------------------------------------------------------------ dispatch, combine ----


def routing(name: str) -> np.ndarray:
    """Return choices of 4 * TOKENS tokens."""
    token = np.arange(4 * TOKENS)[:, None]
    k = np.arange(TOP_K)[None, :]
    return {
        "uniform": (token * TOP_K + k) % EXPERTS,
        "skewed": np.where(token % 3 == 0, k, k + 1),
        "one_expert": np.full((4 * TOKENS, TOP_K), 5),
        "one_token": np.where(token == 4 * TOKENS - 1, k, -1),
        "no_expert": np.full((4 * TOKENS, TOP_K), -1),
    }[name].astype(np.int32)


@pytest.mark.parametrize("name", ["uniform", "skewed", "one_expert", "one_token", "no_expert"])
def test_each_half_and_its_gradient(name: str, mesh: Any, opened: Any) -> None:
    """dispatch alone and combine alone match slot by slot, with padding and idle ranks."""
    group = opened(mesh)
    ep, ids = mesh.shape["ep"], routing(name)
    capacity = group.capacity_bound(LAYER)
    x, w = numbers(1, 4 * TOKENS, HIDDEN), numbers(2, 4 * TOKENS, TOP_K)
    d_recv, d_slot = numbers(3, 4 * capacity, HIDDEN), numbers(4, 4 * capacity)
    y, v = numbers(5, 4 * capacity, HIDDEN), numbers(6, 4 * capacity)
    v = v.at[::3].set(0)  # a weight of 0 counts like any other
    d_out = numbers(7, 4 * TOKENS, HIDDEN)

    def send(x: Any, w: Any, ids: Any) -> Any:
        return epic.jax.plan_dispatch(group, LAYER, ids, x, w)[1:]

    def fetch(y: Any, v: Any, ids: Any) -> Any:
        return epic.jax.combine(epic.jax.plan(group, LAYER, ids), y, v)

    d_x, d_w, _ = jax.vjp(mapped(mesh, send, 3), x, w, ids)[1]((d_recv, d_slot))
    out, pull = jax.vjp(mapped(mesh, fetch, 3), y, v, ids)
    d_y, d_v, _ = pull(d_out)
    true = {n: np.zeros(a.shape) for n, a in (("x", x), ("w", w), ("y", y), ("v", v))}
    true_out = np.zeros(d_out.shape)
    wide = [np.asarray(a, np.float64) for a in (d_recv, d_slot, y, v, d_out)]
    for device in range(4):
        first = device // ep * ep * TOKENS
        mine = slots_of(ids[first : first + ep * TOKENS], device % ep, ep, EXPERTS, ALIGN)
        for i, (t, k) in enumerate(mine.choices):
            slot, token = device * capacity + i, first + t
            if t < 0:
                continue
            true["x"][token] += wide[0][slot]
            true["w"][token, k] = wide[1][slot]
            true_out[token] += wide[3][slot] * wide[2][slot]
            true["y"][slot] = wide[3][slot] * wide[4][token]
            true["v"][slot] = wide[4][token] @ wide[2][slot]
    # the gradient of each (token, k) is the number of its slot
    assert np.array_equal(d_w, true["w"])
    assert relative(d_x, true["x"]) < 2e-6 and relative(out, true_out) < 2e-6
    assert relative(d_y, true["y"]) < 1e-7 and relative(d_v, true["v"]) < 2e-6
    assert not np.any(np.asarray(d_y)[~true["y"].any(axis=1) & (true["v"] == 0)])


def test_rows_say_where_they_come_from(opened: Any) -> None:
    """Every row contains its source's number: wide rows, 32 experts per rank, top-8."""
    tokens, hidden, top_k, experts = 32, 7168, 8, 128
    mesh = make_mesh(4)
    group = opened(mesh, max_row_bytes=4 * hidden)
    layer = epic.jax.Layer(experts, top_k)
    rng = np.random.default_rng(1)
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(4 * tokens)]).astype(np.int32)
    rank = jnp.repeat(jnp.arange(4.0), tokens)
    x = jnp.broadcast_to(rank[:, None], (4 * tokens, hidden)).astype(jnp.bfloat16)

    def step(x: Any, ids: Any) -> Any:
        plan, recv, _ = epic.jax.plan_dispatch(group, layer, ids, x)
        return recv, plan.expert_tokens, epic.jax.combine(plan, recv)

    recv, counts, out = mapped(mesh, step, 2)(x, ids)
    recv = np.asarray(recv, np.float32).reshape(4, -1, hidden)
    assert np.array_equal(recv.min(axis=2), recv.max(axis=2))
    counts = np.asarray(counts).reshape(4, -1)
    for device in range(4):
        ends = np.cumsum(counts[device])
        for start, end in zip(ends - counts[device], ends, strict=True):
            assert np.all(np.diff(recv[device, start:end, 0]) >= 0)
    assert np.array_equal(np.asarray(out, np.float32), np.asarray(8 * x, np.float32))


@pytest.mark.parametrize("alignment", [8, 16, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(128, 5, 128, 3), (256, 8, 64, 8), (300, 64, 40, 6)])
def test_permutation(sizes: tuple[int, ...], dtype: str, alignment: int, opened: Any) -> None:
    """A group of one rank is an exact permutation, and combine reverses it."""
    tokens, experts, hidden, top_k = sizes
    group = opened(None, max_tokens=tokens)
    layer = epic.jax.Layer(experts, top_k, alignment=alignment)
    rng = np.random.default_rng(2)
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
    x, w = numbers(3, tokens, hidden, dtype=dtype), numbers(4, tokens, top_k)

    @jax.jit
    def step(x: Any, w: Any) -> Any:
        plan, recv, slot = epic.jax.plan_dispatch(group, layer, ids, x, w)
        return recv, slot, plan.expert_rows, epic.jax.combine(plan, recv, jnp.abs(jnp.sign(slot)))

    recv, slot, rows, out = step(x, w)
    true = slots_of(ids, 0, 1, experts, alignment)
    assert rows.tolist() == true.rows and not np.any(np.asarray(rows) % alignment)
    found = [(recv[i], slot[i]) if t < 0 else None for i, (t, _) in enumerate(true.choices)]
    assert not any(np.any(a) or np.any(b) for a, b in filter(None, found[:200]))
    at = np.array([(i, t, k) for i, (t, k) in enumerate(true.choices) if t >= 0])
    assert np.array_equal(np.asarray(recv)[at[:, 0]], np.asarray(x)[at[:, 1]])
    assert np.array_equal(np.asarray(slot)[at[:, 0]], np.asarray(w)[at[:, 1], at[:, 2]])
    wide = top_k * np.asarray(x, np.float64)
    assert relative(np.asarray(out, np.float64), wide) < (1e-6 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("backward", [False, True])
def test_steps_have_no_other_collective(backward: bool, opened: Any) -> None:
    """Global arrays under plain jit: XLA gathers and exchanges nothing."""
    mesh = make_mesh(2)
    group = opened(mesh)

    def forward(x: Any, w: Any, ids: Any) -> Any:
        plan, recv, slot = epic.jax.sharded.plan_dispatch(mesh, group, LAYER, ids, x, w)
        return epic.jax.sharded.combine(mesh, plan, jnp.sin(recv), slot)

    def gradient(x: Any, w: Any, ids: Any) -> Any:
        return jax.vjp(lambda x, w: forward(x, w, ids), x, w)[1](x)

    place = NamedSharding(mesh, ALL)
    arrays = numbers(1, 4 * TOKENS, HIDDEN), numbers(2, 4 * TOKENS, TOP_K), choices(3)
    args = [jax.device_put(a, place) for a in arrays]
    run = jax.jit(gradient if backward else forward)
    text = run.lower(*args).compile().as_text()
    assert text is not None and text.count("epic_") > 1
    assert not re.search(r"all-gather|all-to-all|collective-permute|all-reduce", text)
    # the loop waits, so that the group closes after all calls
    for out in jax.tree.leaves(jax.block_until_ready(run(*args))):
        assert out.sharding.is_equivalent_to(place, out.ndim)


def test_groups_of_a_mesh() -> None:
    """A group is all devices that share the other coordinates, in any order of the axes."""

    class Fake:
        """A mesh with numbers in place of devices."""

        def __init__(self, devices: np.ndarray, names: tuple[str, ...]) -> None:
            self.devices, self.axis_names = devices, names

    grid: Any = Fake(np.arange(8).reshape(4, 2), ("ep", "tp"))
    assert devices_by_rank(grid, ("ep",)) == ([[0, 2, 4, 6], [1, 3, 5, 7]], 4)
    grid = Fake(np.arange(8).reshape(2, 2, 2), ("dp", "ep", "tp"))
    assert devices_by_rank(grid, ("ep",)) == ([[0, 2], [1, 3], [4, 6], [5, 7]], 2)
    assert devices_by_rank(grid, ("dp", "ep")) == ([[0, 2, 4, 6], [1, 3, 5, 7]], 4)


# ------------------------------------------------------------------------------ layer ----


def one_run(group: Any, mesh: Any, case: dict[str, Any]) -> tuple[Any, ...]:
    """Return x, weights, output gradient, and the layer's results."""
    x, ct = layers.arrays()
    weights = layers.weights(case)
    if "big_bias" in case:
        weights["bias"] = np.resize(np.array([5, -5, 5], np.float32), layers.EXPERTS)
    return x, weights, ct, layers.step(mesh, group, case)(x, weights, ct)


@pytest.mark.parametrize("case", ["sigmoid", "early", "zero_experts", "drop", "shared"])
def test_same_bits_as_the_core(case: str, mesh: Any, opened: Any) -> None:
    """Out and the gradients of rows and experts have the core's bits in every group."""
    wish_case = layers.CASES[case]
    group = opened(mesh)
    ep, dp = mesh.shape["ep"], mesh.shape["dp"]
    x, weights, ct, got = one_run(group, mesh, wish_case)
    wish = layers.options(wish_case, ep)
    wish = replace(wish, capacity=group.capacity_bound(wish.layer))
    config = group.config()
    config.timeout_ms = 60000
    local = layers.EXPERTS // ep
    expert_weights = ("w_gate_up", "w_down", "b_gate_up", "b_down")
    flat = [a.reshape(dp, ep, -1, layers.HIDDEN) for a in (x, ct)]
    parts = []
    for g in range(dp):
        each = [
            (
                flat[0][g, r],
                {
                    n: v[local * r : local * (r + 1)] if n in expert_weights else v
                    for n, v in weights.items()
                },
                flat[1][g, r],
            )
            for r in range(ep)
        ]
        parts.append(core_layer.run(config, wish, each, 1 / dp))
    out, d_x = (np.concatenate([p[i] for part in parts for p in part]) for i in (0, 1))
    assert np.array_equal(got[0], out.reshape(x.shape))
    assert np.array_equal(got[2], d_x.reshape(x.shape))
    for name in set(expert_weights) & set(weights):
        summed = [np.concatenate([p[2][name] for p in part]) for part in parts]
        total = summed[0] if dp == 1 else np.sum(summed, axis=0, dtype=np.float64)
        if dp == 1:
            assert np.array_equal(got[3][name], total), name
        else:  # these gradients are added by XLA
            assert relative(got[3][name], total) < 1e-6, name


@pytest.mark.parametrize("which", ["loss", "out", "both"])
def test_where_gradients_come_from(which: str, opened: Any) -> None:
    """The losses alone have gradients in the gate and the rows only, and gradients add up."""
    mesh = make_mesh(2)
    group = opened(mesh)
    case = layers.CASES["normalized"]
    x, ct = layers.arrays()
    w = layers.weights(case)
    wish = layers.options(case, 2)

    def loss_of(x: Any, w: Any) -> Any:
        moe = epic.jax.sharded.moe(mesh, group, wish, x, epic.jax.MoeWeights(**w))
        return {"loss": moe.loss, "out": (moe.out * ct).sum()}.get(
            which, moe.loss + (moe.out * ct).sum()
        )

    d_x, d_w = jax.jit(jax.grad(loss_of, argnums=(0, 1)))(x, w)
    rows = {"loss": ct * 0}.get(which, ct).astype(np.float64)
    share = 0.0 if which == "out" else 0.5
    o = reference.Options(2, "softmax", True, 0.5, 0.1)
    wide = {n: v.astype(np.float64) for n, v in w.items()}
    halves = (a.astype(np.float64).reshape(2, -1, layers.HIDDEN) for a in (x, rows))
    parts = [reference.moe(o, a, wide, b, share) for a, b in zip(*halves, strict=True)]
    true_x = np.concatenate([p[2] for p in parts]).reshape(x.shape)
    assert relative(d_x, true_x) < 5e-6
    assert relative(d_w["w_gate"], sum(p[3]["w_gate"] for p in parts)) < 5e-6
    if which == "loss":
        assert not np.any(d_w["w_gate_up"]) and not np.any(d_w["w_down"])
    assert np.abs(true_x).max() > 1e-3


def test_a_bias_that_decides(mesh: Any, opened: Any) -> None:
    """With biases of 5 and -5 the choice follows the bias, but the weights do not."""
    group = opened(mesh)
    case = {"score": "sigmoid", "normalize": True, "bias": True, "big_bias": True}
    x, weights, ct, got = one_run(group, mesh, case)
    o = reference.Options(2, "sigmoid", True)
    wide = {n: v.astype(np.float64) for n, v in weights.items()}
    dp = mesh.shape["dp"]
    a, b = (v.astype(np.float64).reshape(dp, -1, layers.HIDDEN) for v in (x, ct))
    parts = [reference.moe(o, a[g], wide, b[g], 1 / dp) for g in range(dp)]
    d_w = {n: sum(p[3][n] for p in parts) for n in wide if n != "bias"}
    out, d_x = (np.concatenate([p[i] for p in parts]).reshape(x.shape) for i in (0, 2))
    layers.compare(got, (out, 0.0, d_x, d_w))


def test_repetition_changes_no_bit(opened: Any) -> None:
    """A program returns equal bits five times; other alignments differ by rounding only."""
    mesh = make_mesh(4)
    group = opened(mesh)
    case = {"alignment": 1, "normalize": True}
    x, weights, ct, first = one_run(group, mesh, case)
    run = layers.step(mesh, group, case)
    for _ in range(5):
        again = jax.tree.leaves(run(x, weights, ct))
        assert all(map(np.array_equal, again, jax.tree.leaves(first)))
    for alignment in (8, 16, 128):
        again = one_run(group, mesh, {**case, "alignment": alignment})[3]
        assert relative(again[0], first[0]) < 1e-6 and relative(again[2], first[2]) < 1e-6


@pytest.mark.parametrize("gemm", [None, jax.lax.ragged_dot], ids=["core", "ragged_dot"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu2", "clamped_swiglu", "ungated"])
def test_activations(activation: str, gemm: Any, opened: Any) -> None:
    """The core's and the composed activations match JAX's, with gradients in float64."""
    hidden, inner, tokens = 12, 10, 24
    options = epic.jax.Experts(
        4,
        hidden,
        inner,
        activation="silu" if activation == "ungated" else activation,
        ungated=activation == "ungated",
        interleaved=activation == "clamped_swiglu",
    )
    rng = np.random.default_rng(5)
    w = {
        "w_gate": rng.normal(size=(hidden, 4)),
        "w_gate_up": rng.normal(size=(4, hidden, options.width)),
        "w_down": rng.normal(size=(4, inner, hidden)),
    }
    x, ct = rng.normal(size=(2, tokens, hidden))
    moe = epic.jax.Moe(
        epic.jax.Layer(4, 2), epic.jax.Router(4, 2, weight_rule="softmax_chosen"), options
    )
    group = opened(None)

    def layer(x: Any, w: Any) -> Any:
        return epic.jax.moe(group, moe, x, epic.jax.MoeWeights(**w), grouped_gemm=gemm).out

    def true(x: Any, w: Any) -> Any:
        z = x @ w["w_gate"]
        top, ids = jax.lax.top_k(z, 2)
        share = (jax.nn.one_hot(ids, 4) * jax.nn.softmax(top)[..., None]).sum(axis=1)
        a = jnp.einsum("th,ehf->tef", x, w["w_gate_up"])
        gate, up = (a[..., 0::2], a[..., 1::2]) if options.interleaved else jnp.split(a, 2, -1)
        act = {
            "gelu": lambda: jax.nn.gelu(gate, approximate=False) * up,
            "gelu_tanh": lambda: jax.nn.gelu(gate, approximate=True) * up,
            "relu2": lambda: jnp.maximum(gate, 0) ** 2 * up,
            "ungated": lambda: jax.nn.silu(a),
            "clamped_swiglu": lambda: (
                jnp.minimum(gate, 7.0)
                * jax.nn.sigmoid(1.702 * jnp.minimum(gate, 7.0))
                * (jnp.clip(up, -7.0, 7.0) + 1)
            ),
        }[activation]()
        return jnp.einsum("te,tef,efh->th", share, act, w["w_down"])

    narrow = jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), (x, w))
    out, pull = jax.vjp(jax.jit(layer), *narrow)
    got = (out, *jax.tree.leaves(pull(jnp.asarray(ct, jnp.float32))))
    with jax.enable_x64(True):
        out, pull = jax.vjp(
            true, *jax.tree.map(lambda v: jnp.asarray(np.float32(v), float), (x, w))
        )
        wanted = (out, *jax.tree.leaves(pull(jnp.asarray(np.float32(ct), float))))
    for a, b in zip(got, wanted, strict=True):
        assert relative(a, b) < 2e-5


# ----------------------------------------------------------------------------- router ----


def true_route(o: epic.jax.Router, z: np.ndarray, bias: Any, d_w: np.ndarray) -> tuple[Any, ...]:
    """Return ids, weights, d_z in float64, and each token's distance from a tie."""
    s = {
        "softmax": lambda: reference.scores_of("softmax", z),
        "sigmoid": lambda: reference.scores_of("sigmoid", z),
        "sqrtsoftplus": lambda: np.sqrt(np.logaddexp(0, z)),
    }[o.score]()
    by = s if bias is None else s + bias
    rows = np.arange(len(z))[:, None]
    if o.num_groups:
        blocks = by.reshape(len(z), o.num_groups, -1)
        best = -np.sort(-blocks, axis=2)[..., : o.group_best or o.top_k // o.topk_groups]
        value = best.sum(axis=2) if o.group_score == "sum" else blocks.max(axis=2)
        kept = np.argsort(-value, axis=1, kind="stable")[:, : o.topk_groups]
        mask = np.zeros(value.shape, bool)
        mask[rows, kept] = True
        by = np.where(np.repeat(mask, blocks.shape[2], axis=1), by, -np.inf)
        edge = -np.sort(-value, axis=1)
        gap = edge[:, o.topk_groups - 1] - edge[:, o.topk_groups]
    else:
        gap = np.full(len(z), np.inf)
    order = -np.sort(-by, axis=1)
    gap = np.minimum(gap, (order[:, : o.top_k] - order[:, 1 : o.top_k + 1]).min(axis=1))
    ids = np.argsort(-by, axis=1, kind="stable")[:, : o.top_k]
    scale = o.scale or 1.0
    d_w, d_z = d_w * scale, np.zeros_like(z)
    if o.weight_rule == "softmax_chosen":
        weights = reference.scores_of("softmax", z[rows, ids])
        d_z[rows, ids] = weights * (d_w - (d_w * weights).sum(axis=1, keepdims=True))
        return ids, weights * scale, d_z, gap
    chosen = s[rows, ids]
    total = chosen.sum(axis=1, keepdims=True) if o.normalize == "sum" else np.ones((len(z), 1))
    weights = chosen / total
    if o.normalize == "sum":
        d_w = (d_w - (d_w * weights).sum(axis=1, keepdims=True)) / total
    d_s = np.zeros_like(z)
    d_s[rows, ids] = d_w
    if o.score == "sqrtsoftplus":
        d_z = d_s / (2 * s * (1 + np.exp(-z)))
    else:
        d_z = reference.scores_backward(o.score, s, d_s)
    return ids, weights * scale, d_z, gap


ROUTERS: dict[str, dict[str, Any]] = {
    "pre_softmax": {},
    "post_softmax": {"weight_rule": "softmax_chosen"},
    "sigmoid": {"score": "sigmoid", "normalize": "sum"},
    "sigmoid_bias": {"score": "sigmoid", "normalize": "sum", "with_bias": True},
    "sqrtsoftplus": {"score": "sqrtsoftplus", "normalize": "sum", "with_bias": True},
}


@pytest.mark.parametrize("limits", ["all", "groups", "groups_sum"])
@pytest.mark.parametrize("scale", [1.0, 1.2])
@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(2048, 32, 8), (2048, 256, 8)])
def test_router(
    tokens: int, experts: int, top_k: int, name: str, scale: float, limits: str
) -> None:
    """Choice, weights and gradient; a token within rounding of a tie may choose either way."""
    fields = dict(ROUTERS[name])
    with_bias = fields.pop("with_bias", False)
    if limits != "all":
        fields |= {"num_groups": 8, "topk_groups": 4}
        fields["group_score"] = "sum" if limits == "groups_sum" else "max"
    options = epic.jax.Router(experts, top_k, scale=scale, **fields)
    rng = np.random.default_rng(tokens + experts)
    z = rng.normal(size=(tokens, experts)).astype(np.float32)
    bias = rng.normal(size=experts).astype(np.float32) if with_bias else None
    d_w = rng.normal(size=(tokens, top_k)).astype(np.float32)
    (chosen, weights), pull = jax.vjp(jax.jit(lambda z: epic.jax.route(options, z, bias=bias)), z)
    d_z = pull((np.zeros(chosen.shape, jax.dtypes.float0), d_w))[0]
    ids, true_w, true_z, gap = true_route(options, z.astype(np.float64), bias, d_w.astype(float))
    clear = gap > 2e-6
    assert clear.mean() > 0.95
    assert np.array_equal(np.asarray(chosen)[clear], ids[clear])
    assert relative(np.asarray(weights)[clear], true_w[clear]) < 2e-6
    assert relative(np.asarray(d_z)[clear], true_z[clear]) < 3e-6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_router_in_small_types(dtype: str) -> None:
    """Scores are float32 whatever the logits are; their gradient has the logits' type."""
    rng = np.random.default_rng(3)
    z = jnp.asarray(rng.normal(size=(64, 16)), dtype)
    options = epic.jax.Router(16, 4, normalize="sum")
    d_w = rng.normal(size=(64, 4)).astype(np.float32)
    (chosen, weights), pull = jax.vjp(lambda z: epic.jax.route(options, z), z)
    d_z = pull((np.zeros(chosen.shape, jax.dtypes.float0), d_w))[0]
    wide = np.asarray(z.astype(jnp.float32), np.float64)
    ids, true_w, true_z, gap = true_route(options, wide, None, d_w.astype(float))
    clear = gap > 2e-6
    assert weights.dtype == jnp.float32 and d_z.dtype == z.dtype and clear.mean() > 0.5
    assert np.array_equal(np.asarray(chosen)[clear], ids[clear])
    assert relative(np.asarray(weights)[clear], true_w[clear]) < 2e-6
    assert relative(d_z.astype(jnp.float32)[clear], true_z[clear]) < 1e-2


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(2048, 32, 4), (2048, 256, 8)])
def test_losses(tokens: int, experts: int, top_k: int, score: str) -> None:
    """The parts of sharded tokens add up to the loss over all tokens."""
    rng = np.random.default_rng(4)
    z = rng.normal(size=(tokens, experts)).astype(np.float32)
    wide = z.astype(np.float64)
    ids = reference.route(score, False, wide, None, top_k).ids
    load = jnp.asarray(reference.load_of(ids, experts), jnp.int32)
    options = epic.jax.Router(experts, top_k, score=score)
    mesh = make_mesh(4)

    def both(z: Any) -> Any:
        more: dict[str, Any] = {"coeff": 0.5, "total_tokens": tokens}
        parts = (
            epic.jax.balance_loss(options, z, load=load, **more),
            epic.jax.z_loss(options, z, **more),
        )
        return jax.lax.psum(parts, ("dp", "ep"))

    run = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=ALL, out_specs=P()))
    got, pull = jax.vjp(run, z)
    b, d_b = reference.balance(score, wide, np.asarray(load), top_k, 0.5)
    v, d_v = reference.z_loss(wide, 0.5)
    assert abs(got[0] - b) < 2e-6 * b and abs(got[1] - v) < 2e-6 * v
    for cotangent, true in (
        ((1.0, 0.0), d_b),
        ((0.0, 1.0), d_v),
        ((0.5, -2.0), 0.5 * d_b - 2 * d_v),
    ):
        d_z = pull(tuple(jnp.float32(c) for c in cotangent))[0]
        assert relative(d_z, true) < 5e-6
