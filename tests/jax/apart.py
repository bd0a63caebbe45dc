# SPDX-License-Identifier: Apache-2.0
"""One process of test_apart.py, with a program of its own: apart.py WHAT RANK RANKS PORT."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import epic.jax
import layers
import reference

T, K, E, H = 5, 2, 8, 16
QUICK = bool(os.environ.get("EPIC_JAX_QUICK"))  # each process compiles every program itself
LAYER = epic.jax.Layer(E, K)


def open_group(rank: int, ranks: int, port: int, **more: Any) -> Any:
    """Open the group of all processes, which know nothing of each other's programs."""
    sizes: dict[str, Any] = {"max_tokens": 32, "max_row_bytes": 512, "timeout_ms": 30000, **more}
    return epic.jax.open(ranks=[rank], num_ranks=ranks, bootstrap=epic.jax.Tcp(port=port), **sizes)


def make_rounds(group: Any, ids: Any) -> dict[str, Callable[..., Any]]:
    """Return functions of x [tokens, H] that double every row by way of its two experts."""

    def steps(x: Any) -> Any:
        plan = epic.jax.plan(group, LAYER, ids)
        return epic.jax.combine(plan, epic.jax.dispatch(plan, x)[0])

    def fused(x: Any) -> Any:
        w = jnp.ones(ids.shape, jnp.float32)
        plan, recv, slot = epic.jax.plan_dispatch(group, LAYER, ids, x, w)
        return epic.jax.combine(plan, recv, slot)

    def flat(x: Any) -> Any:
        plan = epic.jax.plan(group, epic.jax.Layer(E, K, layout="flat"), ids)
        rows, _, experts = epic.jax.dispatch_flat(plan, x, jnp.ones(ids.shape, jnp.float32))
        return epic.jax.combine(plan, rows * (experts >= 0).sum(axis=1, keepdims=True))

    def rounded(x: Any) -> Any:
        plan = epic.jax.plan(group, LAYER, ids)
        return epic.jax.combine(plan, epic.jax.dispatch(plan, x, quantize="1x32")[0])

    def looped(x: Any) -> Any:
        return jax.lax.scan(lambda y, _: (fused(y) / 2, None), x, length=3)[0] * 2

    rounds = {"steps": steps, "fused": fused, "flat": flat, "rounded": rounded, "looped": looped}
    rounds |= {"checkpoint": jax.checkpoint(lambda x: steps(fused(x) / 2))}
    return {n: f for n, f in rounds.items() if n in ("flat", "looped", "checkpoint") or not QUICK}


def check_rounds(rank: int, group: Any, tokens: int, is_used: bool) -> None:
    """Run forward and gradient of each round, jitted; some ranks use no result."""
    ids = jnp.asarray(np.arange(tokens * K).reshape(tokens, K) * 3 % E, jnp.int32)
    x = jnp.asarray(np.random.default_rng(rank).integers(-4, 5, (tokens, H)), jnp.float32)
    for name, function in make_rounds(group, ids).items():
        forward = jax.jit(lambda x, f=function: f(x) if is_used else (f(x), x)[1])

        def both(x: Any, f: Any = function) -> Any:
            gradient = jax.grad(lambda x: (f(x) * x).sum())(x)
            return gradient if is_used else x

        out, gradient = forward(x), jax.jit(both)(x)
        jax.block_until_ready((out, gradient))
        if is_used:
            assert np.array_equal(out, 2 * x), name
            assert np.array_equal(gradient, 4 * x), name
    total = jax.jit(lambda v: epic.jax.sum(group, v) if is_used else (epic.jax.sum(group, v), v)[1])
    one = jax.block_until_ready(total(jnp.ones(3, jnp.float32)))
    assert not is_used or one.tolist() == [group.num_ranks] * 3


def check_layers(rank: int, group: Any, is_busy: bool, is_used: bool) -> None:
    """Compare both forms of the layer with float64; all tokens are on rank 0."""
    case = layers.CASES["shared"]
    case = {name: value for name, value in case.items() if name != "z_coeff"}
    x, ct = (jnp.asarray(v.reshape(-1, layers.HIDDEN)) for v in layers.arrays())
    x, ct = (v if is_busy else v[:0] for v in (x, ct))
    local = layers.EXPERTS // group.num_ranks
    mine = slice(rank * local, (rank + 1) * local)
    expert_weights = ("w_gate_up", "w_down")
    weights = {n: w[mine] if n in expert_weights else w for n, w in layers.weights(case).items()}
    options = layers.options(case, group.num_ranks)
    true = layers.true_step(case, 1)
    for gemm in (None,) if QUICK else (None, jax.lax.ragged_dot):

        def loss_of(x: Any, w: Any, gemm: Any = gemm) -> Any:
            out = epic.jax.moe(group, options, x, epic.jax.MoeWeights(**w), grouped_gemm=gemm).out
            return (out * ct).sum(), out

        def run(x: Any, w: Any, loss_of: Any = loss_of) -> Any:
            found = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)(x, w)
            return found if is_used else x

        found = jax.block_until_ready(jax.jit(run)(x, weights))
        if not is_used:
            continue
        (_, out), (d_x, d_w) = found
        for name in expert_weights:
            assert reference.relative(d_w[name], true[3][name][mine]) < 5e-6, name
        if is_busy:
            assert reference.relative(out, true[0].reshape(out.shape)) < 5e-6
            assert reference.relative(d_x, true[2].reshape(out.shape)) < 5e-6
        else:
            assert out.shape == d_x.shape == (0, layers.HIDDEN)
            assert not np.any(d_w["w_gate"]) and not np.any(d_w["shared_down"])


def run_zero(rank: int, ranks: int, port: int) -> None:
    """Rank 0 has tokens and the others have none. Their calls must stay in their programs."""
    with open_group(rank, ranks, port) as group:
        check_rounds(rank, group, T if rank == 0 else 0, True)
        check_layers(rank, group, rank == 0, True)
        epic.jax.check(group)
    print("right", flush=True)


def run_unused(rank: int, ranks: int, port: int) -> None:
    """Rank 0 uses its results and the others do not. Their calls must stay in their programs."""
    with open_group(rank, ranks, port) as group:
        check_rounds(rank, group, T, rank == 0)
        check_layers(rank, group, rank == 0, rank == 0)
        epic.jax.check(group)
    print("right", flush=True)


@contextlib.contextmanager
def printed_error() -> Iterator[None]:
    """Print an error of EPIC in one line, and continue after the block."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        print(epic.jax.error_code(error), " ".join(str(error).split()), flush=True)


def run_differs(rank: int, ranks: int, port: int) -> None:
    """The layers of the ranks differ in a Python argument; the error has its name and values."""
    ids = jnp.zeros((3, 1), jnp.int32)
    differ: list[dict[str, Any]] = [
        {"distinct": True},
        {"drop_absent": True},
        {"overflow": "drop"},
        {"partial_type": "float32"},
    ]
    for one in differ:
        layer = epic.jax.Layer(E, 1)
        layer = layer if rank == 0 else replace(layer, **one)
        with printed_error(), open_group(rank, ranks, port) as group:
            jax.block_until_ready(epic.jax.plan(group, layer, ids).load)
    options = layers.options({}, ranks)
    x, weights = jnp.ones((T, layers.HIDDEN)), local_weights(options, ranks)
    forced = {"forced": np.zeros((T, options.layer.top_k), np.int32)} if rank == 1 else {}
    for product in ({}, {"grouped_gemm": jax.lax.ragged_dot}):
        with printed_error(), open_group(rank, ranks, port) as group:
            jax.block_until_ready(call_layer(group, options, x, weights, product | forced))


SHARED = epic.jax.Experts(1, layers.HIDDEN, layers.INNER)
# Changes of the layer that rank 1 makes: fields of Moe or of one of its parts.
CHANGES: dict[str, dict[str, Any]] = {
    "activation": {"experts": {"activation": "gelu"}},
    "inner": {"experts": {"inner": 20}},
    "score": {"router": {"score": "sigmoid"}},
    "z_coeff": {"z_coeff": 0.5},
    "sequence_tokens": {"sequence_tokens": T},
    "shared": {"shared": SHARED},
    "dtype": {},  # the dtype of the weights changes
}
KINDS: dict[str, dict[str, Any]] = {
    "core": {},
    "loss_axes": {"loss_axes": ("any",)},
    "composed": {"grouped_gemm": jax.lax.ragged_dot},
    "quantized": {"quantize": "1x32"},
    "masked": {"token_mask": np.ones(T, bool)},
}


def run_options(rank: int, ranks: int, port: int, kind: str) -> None:
    """Call a layer of this kind once for each change, which rank 1 alone makes."""
    more = dict(KINDS[kind])
    base = replace(layers.options({"z_coeff": 0.25}, ranks), quantize=more.pop("quantize", None))
    x = jnp.ones((T, layers.HIDDEN), jnp.float32)
    for name, change in CHANGES.items():
        if kind in ("masked", "loss_axes") and name == "sequence_tokens":
            continue  # both dtypes refuse this option
        options = base if rank == 0 else change_options(base, change)
        weights = local_weights(options, ranks)
        if name == "dtype" and rank > 0:
            expert_weights = {
                n: w.astype(jnp.bfloat16) for n, w in weights.items() if n != "w_gate"
            }
            weights |= expert_weights
        try:
            with open_group(rank, ranks, port) as group:
                jax.block_until_ready(call_layer(group, options, x, weights, more))
                print(name, "no error", flush=True)
        except jax.errors.JaxRuntimeError as error:
            code = epic.jax.error_code(error)
            print(name, code, " ".join(str(error).split()), flush=True)


def call_layer(group: Any, options: Any, x: Any, weights: Any, more: dict[str, Any]) -> Any:
    """Return the layer's output; loss_axes need a mesh, here one of this process's device."""

    def run(x: Any, weights: Any) -> Any:
        return epic.jax.moe(group, options, x, epic.jax.MoeWeights(**weights), **more).out

    if "loss_axes" not in more:
        return run(x, weights)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("any",))
    return jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P("any"))(x, weights)


def change_options(base: epic.jax.Moe, change: dict[str, Any]) -> epic.jax.Moe:
    """Return the options with other fields; a dict has those of a part."""
    parts = {
        name: replace(getattr(base, name), **value) if isinstance(value, dict) else value
        for name, value in change.items()
    }
    return replace(base, **parts)


def local_weights(options: epic.jax.Moe, ranks: int) -> dict[str, Any]:
    """Return this rank's weights, of the shapes that the options need."""
    local, inner = layers.EXPERTS // ranks, options.experts.inner
    shapes = {
        "w_gate": (layers.HIDDEN, layers.EXPERTS),
        "w_gate_up": (local, layers.HIDDEN, 2 * inner),
        "w_down": (local, inner, layers.HIDDEN),
    }
    if options.shared is not None:
        shapes |= {"shared_gate_up": (1, layers.HIDDEN, 2 * layers.INNER)}
        shapes |= {"shared_down": (1, layers.INNER, layers.HIDDEN)}
    return {name: jnp.ones(shape, jnp.float32) for name, shape in shapes.items()}


if __name__ == "__main__":
    what = sys.argv[1]
    rank, ranks, port = map(int, sys.argv[2:])
    if what in KINDS:
        run_options(rank, ranks, port, what)
    else:
        globals()[f"run_{what}"](rank, ranks, port)
