# SPDX-License-Identifier: Apache-2.0
"""Tests many calls in one program: every call site has its own number, so any order works."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import epic.jax
from conftest import make_mesh
from reference import relative
from steps import HIDDEN, LAYER, TOKENS, TOP_K, choices, mapped, numbers, true_round

RUNS = 10


def layers_inputs(count: int) -> tuple[Any, Any, Any]:
    """Return different tokens, weights and choices for each layer."""
    x = jnp.stack([numbers(i, 4 * TOKENS, HIDDEN) for i in range(count)], 1)
    w = jnp.stack([numbers(100 + i, 4 * TOKENS, TOP_K) for i in range(count)], 1)
    return x, w, jnp.stack([choices(i) for i in range(count)], 1)


def one(group: Any, x: Any, w: Any, ids: Any, **more: Any) -> Any:
    """Run a layer whose experts apply sin."""
    plan = epic.jax.plan(group, LAYER, ids, **more)
    recv, slot = epic.jax.dispatch(plan, x, w)
    return epic.jax.combine(plan, jnp.sin(recv), slot)


@pytest.mark.parametrize("psum", [False, True])
def test_sixteen_independent_layers(psum: bool, opened: Any) -> None:
    """Independent layers match, forward and backward, with products and psums around them."""
    count = 16
    mesh = make_mesh(4)
    group = opened(mesh)
    x, w, ids = layers_inputs(count)
    eye = jnp.eye(HIDDEN) + 0 * numbers(5, HIDDEN, HIDDEN)

    def step(x: Any, w: Any, ids: Any) -> Any:
        out = []
        for i in range(count):
            big = jnp.ones((200 + 10 * i, 200)) * x[0, i, 0]
            wait = (big @ jnp.ones((200, 200))).sum() * 0
            y = one(group, x[:, i] @ eye + wait, w[:, i], ids[:, i])
            if psum:
                y = y + 0 * jax.lax.psum(y.sum(), "ep")
            out.append(y)
        return jnp.stack(out, 1)

    run = jax.jit(lambda x, w, ct: jax.vjp(mapped(mesh, step, 3), x, w, ids)[1](ct)[:2])
    ct = numbers(9, 4 * TOKENS, count, HIDDEN)
    true = [true_round(x[:, i], w[:, i], ids[:, i], ct[:, i]) for i in range(count)]
    first = jax.block_until_ready(run(x, w, ct))
    assert relative(first[0], np.stack([t[1] for t in true], 1)) < 5e-6
    assert relative(first[1], np.stack([t[2] for t in true], 1)) < 5e-6
    for _ in range(RUNS):
        again = run(x, w, ct)
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("remat", ["all", "nothing", "dots", None])
def test_scan_over_layers(vma: bool, remat: str | None, opened: Any) -> None:
    """Recomputed layers by several policies equal the same layers unrolled."""
    mesh = make_mesh(4)
    group = opened(mesh)
    x, w, ids = numbers(1, 4 * TOKENS, HIDDEN), numbers(2, 4 * TOKENS, TOP_K), choices(3)
    policies = {
        "all": jax.checkpoint_policies.everything_saveable,
        "nothing": jax.checkpoint_policies.nothing_saveable,
        "dots": jax.checkpoint_policies.dots_saveable,
    }

    def body(h: Any, w: Any, ids: Any) -> Any:
        return h + one(group, h, w, ids)

    kept = jax.checkpoint(body, policy=policies[remat]) if remat else body

    def scanned(x: Any, w: Any, ids: Any) -> Any:
        return jax.lax.scan(lambda h, _: (kept(h, w, ids), None), x, None, length=3)[0]

    def unrolled(x: Any, w: Any, ids: Any) -> Any:
        return body(body(body(x, w, ids), w, ids), w, ids)

    ct = numbers(4, 4 * TOKENS, HIDDEN)
    results = []
    for function in (scanned, unrolled):
        run = jax.jit(
            lambda x, w, f=function: jax.vjp(mapped(mesh, f, 3, vma), x, w, ids)[1](ct)[:2]
        )
        results.append(run(x, w))
    for got, wanted in zip(*results, strict=True):
        assert relative(got, wanted) < 2e-6


def shared_jit(group: Any, way: str, count: int = 12) -> Any:
    """Return an inner jit that is called several times: JAX lowers it once, with one number."""
    inner = jax.jit(
        lambda x, w, ids, channel, after: one(
            group, x, w, ids, channel=channel if way == "channel" else None, after=after
        )
    )

    def step(x: Any, w: Any, ids: Any) -> Any:
        out: list[Any] = []
        for i in range(count):
            big = jnp.ones((300, 300)) * x[0, i, 0]
            wait = (big @ big).sum() * 0
            after = out[-1:] if way == "after" else [x[0, 0, 0]]
            after = after or [x[:, 0]]
            out.append(inner(x[:, i] + wait, w[:, i], ids[:, i], jnp.int32(i), after))
        return jnp.stack(out, 1)

    return step


@pytest.mark.parametrize("way", ["channel", "after"])
def test_an_inner_jit_called_twice(way: str, opened: Any) -> None:
    """Both channel= and after= work."""
    count = 12
    mesh = make_mesh(4)
    group = opened(mesh)
    x, w, ids = layers_inputs(count)
    run = mapped(mesh, shared_jit(group, way), 3)
    wanted = [true_round(x[:, i], w[:, i], ids[:, i], x[:, i])[0] for i in range(count)]
    for _ in range(RUNS):
        assert relative(run(x, w, ids), np.stack(wanted, 1)) < 2e-6


def test_an_inner_jit_called_twice_is_refused() -> None:
    """Two operations with one number at the same time raise an error that names both remedies."""
    mesh = make_mesh(4)
    x, w, ids = layers_inputs(12)
    for _ in range(10):
        sizes: dict[str, Any] = {"max_tokens": 64, "max_row_bytes": 4096, "timeout_ms": 20000}
        with epic.jax.open(mesh, "ep", name="clash", **sizes) as group:
            run = mapped(mesh, shared_jit(group, "none"), 3)
            try:
                jax.block_until_ready(run(x, w, ids))
            except jax.errors.JaxRuntimeError as error:
                text = str(error)
                assert "channel=" in text and "after=" in text, text
                return
    pytest.fail("twelve independent calls of one number were never in flight together")
