# SPDX-License-Identifier: Apache-2.0
"""One rank of test_emulated.py: emulated_e4m3.py RANK RANKS PORT. The last line is "right".

Tests e4m3 experts and quantized flat rows on an emulated GPU, against loops in float64, and the
bits of an invariant layer against those of one rank. Each rank has a different number of tokens.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import epic.jax
import rounded
from emulated_worker import take_cpus_for_gpus
from epic.jax import e4m3
from reference import relative

TOKENS, TOP_K, EXPERTS, HIDDEN, INNER = (5, 3, 0, 6), 2, 4, 144, 136
SIZES: dict[str, Any] = {"max_tokens": 16, "max_row_bytes": 4 * HIDDEN, "timeout_ms": 120000}


def rows_of(seed: int, ranks: int) -> np.ndarray:
    """Return the tokens of all ranks, one rank after the other."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(sum(TOKENS[:ranks]), HIDDEN)).astype(np.float32)


def distance(got: Any, wanted: Any) -> float:
    """Return the norm of the difference over the norm; 0 without elements."""
    difference = np.asarray(got, np.float64) - np.asarray(wanted, np.float64)
    return float(np.linalg.norm(difference) / max(np.linalg.norm(wanted), 1e-30))


def check_layer(
    group: epic.jax.Group, rank: int, is_frozen: bool, dtype: str = "float32", **more: Any
) -> None:
    """Compare output and gradients of this rank; only the router's gradient is a sum.

    dtype: that of the rows; the weights are float32.
    """
    ranks = group.num_ranks
    mine = slice(sum(TOKENS[:rank]), sum(TOKENS[: rank + 1]))
    own = slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
    w, x, ct = rounded.weights_of(1, EXPERTS, HIDDEN, INNER), rows_of(2, ranks), rows_of(3, ranks)
    x, ct = (np.asarray(jnp.asarray(v, dtype).astype(jnp.float32)) for v in (x, ct))
    wide = [v.astype(np.float64) for v in (x, ct)]
    named = {n: v.astype(np.float64) for n, v in w.items()}
    out, d_x, d_w, load = rounded.moe(wide[0], named, wide[1], TOP_K, is_frozen)
    here = epic.jax.MoeWeights(
        **{n: jnp.asarray(v if n == "w_gate" else v[own]) for n, v in w.items()}
    )
    here = epic.jax.scaled(here) if is_frozen else here
    options = epic.jax.Moe.of(
        num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, inner=INNER,
        weight_type=None if is_frozen else "e4m3",
    )  # fmt: skip

    def loss_of(x: Any, w: Any) -> Any:
        found = epic.jax.moe(group, options, x, w, **more)
        return (found.out * ct[mine]).sum(), found

    step = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True))
    (_, found), (got_x, got_w) = step(jnp.asarray(x[mine], dtype), here)
    assert np.asarray(found.load).tolist() == load.tolist()
    pairs = [(found.out, out[mine]), (got_x, d_x[mine])]
    gate = jax.jit(lambda d: epic.jax.sum(group, d))(got_w.w_gate)
    pairs += [(gate, d_w["w_gate"]), (got_w.b_down, d_w["b_down"][own])]
    pairs += [(got_w.b_gate_up, d_w["b_gate_up"][own])]
    if is_frozen:
        assert not np.any(np.asarray(got_w.w_down.astype(jnp.float32)))
    else:
        pairs += [(getattr(got_w, n), d_w[n][own]) for n in ("w_gate_up", "w_down")]
    if dtype == "float32":
        errors = [relative(got, wanted) for got, wanted in pairs]
        assert max(errors) < 1e-3, errors
    else:  # rows of 16 bits are rounded twice, so single activations become the next e4m3 number
        errors = [distance(got.astype(jnp.float32), wanted) for got, wanted in pairs]
        assert max(errors) < 2e-2, errors
    plain = x.astype(np.float64)
    exact = np.array(rounded.round_rows(plain))
    assert relative(exact, plain) > 1e-2  # the rounding is much larger than the tolerance


def invariant_step(group: epic.jax.Group, tokens: slice, experts: slice, ranks: int) -> Any:
    """Return output, gradient of the tokens and gradients of the experts of an invariant layer."""
    w, x, ct = rounded.weights_of(1, EXPERTS, HIDDEN, INNER), rows_of(2, ranks), rows_of(3, ranks)
    here = epic.jax.MoeWeights(
        **{n: jnp.asarray(v if n == "w_gate" else v[experts]) for n, v in w.items()}
    )
    options = epic.jax.Moe.of(
        num_experts=EXPERTS, top_k=3, hidden=HIDDEN, inner=INNER, weight_type="e4m3",
        invariant=True,
    )  # fmt: skip

    def loss_of(x: Any, w: Any) -> Any:
        out = epic.jax.moe(group, options, x, w).out
        return (out * ct[tokens]).sum(), out

    step = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True))
    (_, out), (d_x, d_w) = step(jnp.asarray(x[tokens]), here)
    return jax.tree.map(np.asarray, (out, d_x, d_w._replace(w_gate=None)))


def check_bits(found: Any, rank: int, ranks: int) -> None:
    """Compare the results of invariant_step() with those of one rank for all tokens."""
    mine = slice(sum(TOKENS[:rank]), sum(TOKENS[: rank + 1]))
    own = slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
    with epic.jax.open(ranks=[0], num_ranks=1, name="alone", **SIZES) as alone:
        out, d_x, d_w = invariant_step(alone, slice(None), slice(None), ranks)
    assert np.array_equal(found[0], out[mine]) and np.array_equal(found[1], d_x[mine])
    for got, whole in zip(found[2], d_w, strict=True):
        assert whole is None or (np.array_equal(got, whole[own]) and whole.any())


def check_flat(group: epic.jax.Group, rank: int) -> None:
    """Rows in e4m3 with scales, one for each token and rank, are exact."""
    ranks = group.num_ranks
    mine = slice(sum(TOKENS[:rank]), sum(TOKENS[: rank + 1]))
    x, local = rows_of(4, ranks), EXPERTS // ranks
    rng = np.random.default_rng(5)
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in x]).astype(np.int32)
    weights = rng.normal(size=ids.shape).astype(np.float32)
    layer = epic.jax.Layer(EXPERTS, TOP_K, layout="flat")

    def step(x: Any, w: Any, ids: Any) -> Any:
        plan = epic.jax.plan(group, layer, ids, max_sms=3)
        found = epic.jax.dispatch_flat_quantized(plan, x, w, max_sms=2)
        return *found, epic.jax.dequantize(*found[:2], jnp.float32)

    found = jax.jit(step)(*(jnp.asarray(v[mine]) for v in (x, weights, ids)))
    rows, _, got_weights, experts, values = (np.asarray(v) for v in found)
    true, at = rounded.round_rows(x), 0
    for t in range(len(x)):
        chosen = [k for k in range(TOP_K) if ids[t, k] // local == rank]
        if not chosen:
            continue
        assert relative(values[at], true[t]) < 1e-6
        tail = TOP_K - len(chosen)
        assert experts[at].tolist() == [ids[t, k] % local for k in chosen] + [-1] * tail
        assert got_weights[at].tolist() == [weights[t, k] for k in chosen] + [0.0] * tail
        at += 1
    assert not np.any(rows[at:].view(np.uint8)) and np.all(experts[at:] == -1)


def main(rank: int, ranks: int, port: int) -> None:
    """Run all cases on one group."""
    take_cpus_for_gpus("gpu")
    checks: Any = e4m3
    checks.check_e4m3 = lambda *_: None  # in this test the core treats CPU devices as GPUs
    where: Any = {"ranks": [rank], "num_ranks": ranks}
    where["bootstrap"] = epic.jax.Tcp("127.0.0.1", port)
    with epic.jax.open(**where, **SIZES) as group:
        check_layer(group, rank, False)
        check_layer(group, rank, True, max_sms=2)
        check_layer(group, rank, False, "bfloat16")
        check_flat(group, rank)
        tokens = slice(sum(TOKENS[:rank]), sum(TOKENS[: rank + 1]))
        own = slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
        found = invariant_step(group, tokens, own, ranks)
    check_bits(found, rank, ranks)
    print("right", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
