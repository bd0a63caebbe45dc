# SPDX-License-Identifier: Apache-2.0
"""Tests vmap (one element after the other), export, and the error for second derivatives."""

import re
from collections.abc import Callable
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
from reference import relative
from steps import ALL, HIDDEN, TOKENS, TOP_K, choices, mapped, numbers, through, true_round

GUIDE = Path(__file__).resolve().parents[2] / "docs/guide/jax.md"
COUNT = 3
ROWS = P(None, ("dp", "ep"))


def stacked(make: Callable[[int], Any]) -> Any:
    """Return one array for each element of the mapped axis."""
    return jnp.stack([make(i) for i in range(COUNT)])


def inputs() -> tuple[Any, ...]:
    """Return x, weights, choices and output gradients of COUNT different round trips."""
    return (
        stacked(lambda i: numbers(10 + i, 4 * TOKENS, HIDDEN)),
        stacked(lambda i: numbers(20 + i, 4 * TOKENS, TOP_K)),
        stacked(lambda i: choices(30 + i)),
        stacked(lambda i: numbers(40 + i, 4 * TOKENS, HIDDEN)),
    )


def round_with_gradients(run: Any) -> Any:
    """Return out, d_x and d_w."""

    def both(x: Any, w: Any, ids: Any, ct: Any) -> Any:
        out, pull = jax.vjp(lambda x, w: run(x, w, ids), x, w)
        return out, *pull(ct)

    return both


@pytest.mark.parametrize("where", ["inside", "outside", "over_gradients"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "single"])
def test_vmap_of_the_steps(where: str, fused: bool, vma: bool, opened: Any) -> None:
    """vmap in the shard_map, around it and around the gradient equals a loop, in float64."""
    mesh = make_mesh(2)
    group = opened(mesh)
    one = through(group, fused)
    args = inputs()
    if where == "inside":
        specs = (ROWS,) * 3
        inner = jax.shard_map(
            jax.vmap(one), mesh=mesh, in_specs=specs, out_specs=ROWS, check_vma=vma
        )
        run = round_with_gradients(inner)
    elif where == "outside":
        run = round_with_gradients(jax.vmap(mapped(mesh, one, 3, vma)))
    else:
        run = jax.vmap(round_with_gradients(mapped(mesh, one, 3, vma)))
    got = jax.jit(run)(*args)
    for i in range(COUNT):
        for a, b in zip(got, true_round(*(v[i] for v in args)), strict=True):
            assert relative(a[i], b) < 2e-6


@pytest.mark.parametrize("gemm", [None, jax.lax.ragged_dot], ids=["core", "ragged_dot"])
def test_vmap_of_layers(gemm: Any, opened: Any) -> None:
    """Check independent layers with weights of their own, and with some shared arguments."""
    mesh = make_mesh(2)
    group = opened(mesh)
    case = layers.CASES["normalized"]
    one = layers.step(mesh, group, case, grouped_gemm=gemm)
    x, ct = layers.arrays()
    w = layers.weights(case)
    many = jax.tree.map(lambda v: jnp.stack([v * (1 + i) for i in range(COUNT)]), w)
    got = jax.jit(jax.vmap(one, in_axes=(None, 0, None)))(x, many, ct)
    first = jax.tree.map(lambda v: v[0], got)
    layers.compare(first, layers.true_step(case, 2))
    for i in range(COUNT):
        alone = one(x, jax.tree.map(lambda v, i=i: v[i], many), ct)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(alone), strict=True):
            assert relative(a[i], b) < 1e-6


def test_vmap_over_stages(opened: Any) -> None:
    """With spmd_axis_name each stage of a pipeline has groups of its own."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "ep"))
    group = opened(mesh)
    case = layers.CASES["normalized"]
    x, ct = layers.arrays()
    w = layers.weights(case)

    def one(x: Any, w: Any, ct: Any) -> Any:
        return layers.step(mesh, group, case, token_axes=("ep",)).__wrapped__(x, w, ct)

    stages = jax.vmap(one, spmd_axis_name="stage")
    both = jax.tree.map(lambda v: jnp.stack([v, v]), (x, w, ct))
    staged = jax.tree.map(
        lambda v: jax.device_put(v, jax.sharding.NamedSharding(mesh, P("stage"))), both
    )
    run = jax.jit(stages)
    got = run(*staged)
    for i in range(2):
        mine = jax.tree.map(lambda v, i=i: v[i], got)
        layers.compare(mine, layers.true_step(case, 1))
    text = run.lower(*staged).compile().as_text() or ""
    assert "all-to-all" not in text and "collective-permute" not in text


def test_vmap_of_a_sum(opened: Any) -> None:
    """The result uses the memory of the argument."""
    mesh = make_mesh(4)
    group = opened(mesh)
    x = numbers(1, COUNT, 4, 5)
    run = jax.shard_map(
        jax.vmap(lambda v: epic.jax.sum(group, v)), mesh=mesh, in_specs=ROWS, out_specs=ROWS
    )
    wanted = np.asarray(x, np.float64).sum(axis=1, keepdims=True)
    assert relative(jax.jit(run)(x), np.broadcast_to(wanted, x.shape)) < 1e-6


def test_vmap_under_remat_and_scan(opened: Any) -> None:
    """A recomputed call has a number of its own."""
    mesh = make_mesh(2)
    group = opened(mesh)
    one = mapped(mesh, through(group, True), 3)
    x, w, ids, _ = inputs()

    def loss(x: Any, plain: bool) -> Any:
        step = jax.vmap(one)
        step = step if plain else jax.checkpoint(step)

        def body(carry: Any, _: Any) -> tuple[Any, None]:
            return carry + step(carry, w, ids), None

        return (jax.lax.scan(body, x, None, length=2)[0] ** 2).sum()

    plain, again = (jax.jit(jax.grad(lambda x, p=p: loss(x, p)))(x) for p in (True, False))
    assert relative(again, plain) < 1e-6


# ---------------------------------------------------------------- second derivatives ----


@pytest.mark.parametrize("what", ["layer", "composed", "steps", "route", "experts"])
def test_second_derivatives_are_refused(what: str, opened: Any) -> None:
    """The error explains it for both orders of transformations, and first derivatives still
    work."""
    mesh = make_mesh(2)
    group = opened(mesh)
    case = layers.CASES["normalized"]
    x, _ = layers.arrays()
    w, wish = epic.jax.MoeWeights(**layers.weights(case)), layers.options(case, 2)
    weights, ids, rows = numbers(2, 24, TOP_K), choices(3), numbers(1, 24, HIDDEN)
    through_steps = mapped(mesh, through(group, False), 3)
    gate, one = numbers(5, 6, 8), jnp.full((8,), 1, jnp.int32)
    mlp = epic.jax.ExpertWeights(w.w_gate_up, w.w_down)

    def layer(gemm: Any) -> Callable[[Any], Any]:
        return lambda x: epic.jax.sharded.moe(mesh, group, wish, x, w, grouped_gemm=gemm).out

    cases: dict[str, tuple[Callable[[Any], Any], Any]] = {
        "layer": (layer(None), x),
        "composed": (layer(jax.lax.ragged_dot), x),
        "steps": (lambda v: through_steps(v, weights, ids), rows),
        "route": (lambda v: epic.jax.route(wish.router, v)[1], gate),
        "experts": (lambda v: epic.jax.experts(wish.experts, v, one, one, mlp), x[:, 0]),
    }
    if what == "experts":
        wish = layers.options(case, 1)
    function, at = cases[what]

    def loss(v: Any) -> Any:
        return (function(v) ** 2).sum()

    first = jax.grad(loss)
    assert jax.eval_shape(first, at).shape == at.shape
    refused = pytest.raises(epic.jax.EpicUnsupportedError, match="only first derivatives")
    with refused:
        jax.jit(jax.grad(lambda v: (first(v) ** 2).sum()))(at)
    with refused:
        jax.jit(lambda v: jax.jvp(first, (v,), (jnp.ones_like(v),)))(at)


def test_a_sum_has_a_second_derivative(opened: Any) -> None:
    """A sum is linear, and its gradient is a sum again."""
    mesh = make_mesh(2)
    group = opened(mesh)
    total = mapped(mesh, lambda v: epic.jax.sum(group, v), 1)
    first = jax.grad(lambda v: (total(v) ** 2).sum())
    v = numbers(1, 4)
    got = jax.jit(jax.grad(lambda v: (first(v) ** 2).sum()))(v)
    # A^T A = 2 A, where A is a sum over two ranks
    twice = 2 * 2 * np.kron(np.eye(2), np.ones((2, 2)))
    assert relative(got, 2 * twice @ twice @ np.asarray(v, np.float64)) < 1e-6


# ---------------------------------------------------------------------------- export ----


def test_export(opened: Any) -> None:
    """A layer with its gradient can be serialized and read again, and the targets have names."""
    mesh = make_mesh(2)
    group = opened(mesh)
    case = layers.CASES["normalized"]
    run = layers.step(mesh, group, case)
    sharding = jax.sharding.NamedSharding(mesh, ALL)
    whole = jax.sharding.NamedSharding(mesh, P())
    x, ct = (jax.device_put(v, sharding) for v in layers.arrays())
    w = jax.tree.map(lambda v: jax.device_put(v, whole), layers.weights(case))
    with pytest.raises(ValueError, match="epic_moe"):
        jax.export.export(run)(x, w, ct)
    allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in epic.jax.TARGETS]
    data = jax.export.export(run, disabled_checks=allowed)(x, w, ct).serialize()
    again = jax.export.deserialize(data)
    layers.compare(jax.jit(again.call)(x, w, ct), layers.true_step(case, 2))


def test_an_exported_program_on_another_mesh(opened: Any) -> None:
    """In this case JAX does not compare the devices, but the handlers do."""
    mesh = make_mesh(4)
    group = opened(mesh)
    run = mapped(mesh, lambda v: epic.jax.sum(group, v), 1)
    turned = jax.sharding.Mesh(mesh.devices[:, ::-1], mesh.axis_names)
    x, y = (
        jax.device_put(numbers(1, 4, 5), jax.sharding.NamedSharding(m, ALL)) for m in (mesh, turned)
    )
    allowed = [jax.export.DisabledSafetyCheck.custom_call("epic_allreduce_sum")]
    exported = jax.export.export(run, disabled_checks=allowed)(x)
    assert np.array_equal(jax.jit(exported.call)(x), run(x))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"another order|is rank"):
        jax.block_until_ready(jax.jit(exported.call)(y))


def test_the_guide_names_the_targets() -> None:
    """The guide names exactly the targets that exist."""
    text = GUIDE.read_text()
    part = text[text.index("- `jax.export`") :].split("\n\n")[0]
    named = set(re.findall(r"\bepic_[a-z_]+[a-z]\b", part))
    assert named == {t for t in epic.jax.TARGETS if not t.endswith("_no_graph")}
