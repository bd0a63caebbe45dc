# SPDX-License-Identifier: Apache-2.0
"""Tests ranks in separate processes, each of which runs its own program.

A rank without tokens, or one that uses no result, must still make its calls.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import epic.jax
import layers
from conftest import make_mesh
from epic.jax import call
from forked import server
from ports import free_port

WORKER = Path(__file__).with_name("apart.py")
LIMIT = 240


def run_apart(what: str, ranks: int) -> list[str]:
    """Return what each process printed."""
    port = str(free_port())
    running = [
        server("epic.jax", "layers").start(
            str(WORKER), what, str(rank), str(ranks), port, merged=True
        )
        for rank in range(ranks)
    ]
    try:
        return [process.communicate(timeout=LIMIT)[0] for process in running]
    finally:
        for process in running:
            process.kill()


RUNS = [("zero", 2), ("unused", 2), pytest.param("zero", 4, marks=pytest.mark.night)]


@pytest.mark.parametrize(("what", "ranks"), RUNS)
def test_every_call_is_made(what: str, ranks: int) -> None:
    """Check steps, all forms of dispatch, sum and layer, forward and backward, in loops and under
    jax.checkpoint. Results are correct on the rank with tokens, and no rank waits forever."""
    for said in run_apart(what, ranks):
        assert said.endswith("right\n"), said[-3000:]


def test_names_in_errors_of_several_ranks() -> None:
    """Check that the error has the Python argument, its values on both ranks, and the code."""
    wanted = ["passed distinct=False, rank 1 passed True (a layer passes distinct=True unless"]
    wanted += ["passed drop_absent=False, rank 1 passed True", "passed overflow 'error', rank 1 p"]
    wanted += ["passed partial_type None, rank 1 passed float32"]
    # Only rank 1 passes forced.
    forced = "passed distinct=True, rank 1 passed False (a layer passes distinct=True unless it "
    forced += "has forced or table: pass these on every rank or on none); pass the same"
    wanted += [forced, forced]
    for said in run_apart("differs", 2):
        lines = [line for line in said.splitlines() if line.startswith("EPIC_")]
        assert len(lines) == len(wanted), said[-3000:]
        for line, text in zip(lines, wanted, strict=True):
            assert line.startswith("EPIC_EMISMATCH ") and text in line, line


DIFFERENT = {
    "activation": "experts.activation is silu on rank 0 and gelu on rank 1",
    "inner": "experts.inner is 12 on rank 0 and 20 on rank 1",
    "score": "router.score is softmax on rank 0 and sigmoid on rank 1",
    "z_coeff": "z_coeff is 0.25 on rank 0 and 0.5 on rank 1",
    "sequence_tokens": "sequence_tokens is 0 on rank 0 and 5 on rank 1",
    "shared": "shared is 0 on rank 0 and 1 on rank 1",
    "dtype": "experts.weight_type is float32 on rank 0 and bfloat16 on rank 1",
}


@pytest.mark.parametrize("kind", ["core", "loss_axes", "composed", "quantized", "masked"])
def test_options_that_differ(kind: str) -> None:
    """Options that differ between ranks raise an error, even if all arrays have equal shapes."""
    wanted = dict(DIFFERENT)
    if kind in ("masked", "loss_axes"):
        del wanted["sequence_tokens"]  # both values refuse this option
    for said in run_apart(kind, 2):
        lines = [line for line in said.splitlines() if line.split(" ")[0] in wanted]
        assert len(lines) == len(wanted), said[-3000:]
        for line, (name, text) in zip(lines, wanted.items(), strict=True):
            assert line.startswith(f"{name} EPIC_EMISMATCH ") and text in line, line


def count_calls(function: Any, *args: Any) -> int:
    """Return how many EPIC calls the compiled program has, without those that only keep other
    calls."""
    text = jax.jit(function).lower(*args).compile().as_text() or ""
    return text.count('custom_call_target="epic_') - text.count('custom_call_target="epic_keep')


@pytest.mark.parametrize("tokens", [4, 0])
def test_calls_of_a_compiled_program(tokens: int, opened: Any) -> None:
    """Check the number of calls without tokens. A program of one process keeps all calls. On a mesh
    all ranks run one program, so XLA removes them on all ranks."""
    layer = epic.jax.Layer(8, 2)
    options = epic.jax.Moe.of(num_experts=8, top_k=2, hidden=16, inner=12)
    weights = epic.jax.MoeWeights(**layers.weights({}))
    ids, x = jnp.zeros((tokens, 2), jnp.int32), jnp.zeros((tokens, 16))

    def steps(group: Any, ids: Any, x: Any) -> Any:
        plan, recv, _ = epic.jax.plan_dispatch(group, layer, ids, x)
        return epic.jax.combine(plan, recv)

    def gradient(group: Any, ids: Any, x: Any) -> Any:
        return jax.value_and_grad(lambda x: jnp.square(steps(group, ids, x)).sum())(x)

    with epic.jax.open(name="alone", max_tokens=8, max_row_bytes=64) as alone:
        assert count_calls(lambda i, x: steps(alone, i, x), ids, x) == 2
        assert count_calls(lambda i, x: gradient(alone, i, x), ids, x) == 4
        assert count_calls(lambda x: epic.jax.moe(alone, options, x, weights).out, x) == 1
    mesh = make_mesh(4)
    group = opened(mesh)
    spec = P("ep")

    def inside(function: Any) -> Any:
        return jax.shard_map(
            lambda i, x: function(group, i, x), mesh=mesh, in_specs=spec, out_specs=spec
        )

    run = inside(steps)
    assert tokens == 0 or count_calls(run, ids, x) == 2
    assert jax.block_until_ready(jax.jit(run)(ids, x)).shape == x.shape
    whole = jax.grad(lambda x: jnp.square(run(ids, x)).sum())
    assert jax.block_until_ready(jax.jit(whole)(x)).shape == x.shape
    out = epic.jax.sharded.moe(mesh, group, options, x, weights)
    assert out.out.shape == x.shape and int(out.load.sum()) == 2 * tokens


def test_checkpoint_and_vmap_of_kept_calls() -> None:
    """Check side effects under checkpoint and vmap, in one process with two devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("any",))
    layer = epic.jax.Layer(8, 2)
    sizes: dict[str, Any] = {"max_tokens": 16, "max_row_bytes": 64}
    with epic.jax.open(ranks=[0, 1], num_ranks=2, name="two", **sizes) as group:
        assert call.has_own_programs(group)
        ids = jnp.asarray(np.arange(12).reshape(6, 2) % 8, jnp.int32)
        x = jnp.asarray(np.random.default_rng(0).integers(-4, 5, (6, 16)), jnp.float32)

        def step(ids: Any, x: Any) -> Any:
            plan, recv, _ = epic.jax.plan_dispatch(group, layer, ids, x)
            return epic.jax.combine(plan, recv)

        kept = jax.checkpoint(step)
        one = jax.shard_map(kept, mesh=mesh, in_specs=P("any"), out_specs=P("any"))
        gradient = jax.jit(jax.grad(lambda x: jnp.square(one(ids, x)).sum()))(x)
        assert np.array_equal(gradient, 8 * x)
        many = jax.shard_map(
            jax.vmap(step), mesh=mesh, in_specs=P(None, "any"), out_specs=P(None, "any")
        )
        out = jax.jit(many)(jnp.stack([ids, ids[::-1]]), jnp.stack([x, 3 * x]))
        assert np.array_equal(out, jnp.stack([2 * x, 6 * x]))


def operands_of_sums(jaxpr: Any) -> list[int]:
    """Return how many operands each sum in a program has."""
    found: list[int] = []
    for equation in jaxpr.eqns:
        if equation.params.get("target_name") == "epic_allreduce_sum":
            found.append(len(equation.invars))
        for parameter in equation.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            found += operands_of_sums(inner) if hasattr(inner, "eqns") else []
    return found


@pytest.mark.parametrize("kind", ["jit", "scan"])
def test_order_around_an_inner_trace(kind: str) -> None:
    """Check that a call after an inner jit or a loop waits for the call before it, and that the
    calls inside wait for each other. A waiting call has one more operand: the result of the call
    for which it waits."""

    def inner(x: Any) -> Any:
        return epic.jax.sum(group, epic.jax.sum(group, x))

    def program(x: Any) -> Any:
        epic.jax.sum(group, x)
        if kind == "jit":
            jax.jit(inner)(x)
        else:
            jax.lax.scan(lambda carry, _: (inner(carry), None), x, length=2)
        return epic.jax.sum(group, x)

    sizes: dict[str, Any] = {"max_tokens": 8, "max_row_bytes": 64}
    with epic.jax.open(ranks=[0, 1], num_ranks=2, name="two", **sizes) as group:
        sums = operands_of_sums(jax.make_jaxpr(program)(jnp.ones(3, jnp.float32)).jaxpr)
    first, inside, waiting, last = sums
    assert (inside, waiting, last) == (first, first + 1, first + 1)


def test_an_error_stays_with_its_call() -> None:
    """Check that the group stays usable after a data error, also outside of jit."""
    sizes: dict[str, Any] = {"max_tokens": 8, "max_row_bytes": 64}
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("any",))
    layer = epic.jax.Layer(8, 1)
    with epic.jax.open(ranks=[0, 1], num_ranks=2, name="two", **sizes) as group:

        def load_of(ids: Any) -> Any:
            return epic.jax.plan(group, layer, ids).load

        run = jax.shard_map(load_of, mesh=mesh, in_specs=P("any"), out_specs=P("any"))
        good = jnp.zeros((4, 1), jnp.int32)
        for _ in range(2):
            with pytest.raises(jax.errors.JaxRuntimeError, match="has expert 99"):
                jax.block_until_ready(run(good.at[0, 0].set(99)))
            assert run(good).tolist() == [4, *[0] * 7] * 2
