# SPDX-License-Identifier: Apache-2.0
"""Mistakes and failures become exceptions that say what to do."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import epic.jax
from conftest import make_mesh
from steps import ALL, EXPERTS, HIDDEN, LAYER, TOKENS, TOP_K, choices, mapped, numbers

RuntimeFailure = jax.errors.JaxRuntimeError


def failure(function: Any, *args: Any) -> str:
    """The text of the runtime error."""
    with pytest.raises(RuntimeFailure) as caught:
        jax.block_until_ready(function(*args))
    return str(caught.value)


def test_data_errors_leave_the_group_usable(opened: Any) -> None:
    """A bad expert id, and too many slots: on every rank, and the next step is right."""
    mesh = make_mesh(4)
    group = opened(mesh)
    x, w, ids = numbers(1, 4 * TOKENS, HIDDEN), numbers(2, 4 * TOKENS, TOP_K), choices(3, 0)

    def step(x: Any, w: Any, ids: Any, capacity: int | None = None) -> Any:
        plan, recv, slot = epic.jax.plan_dispatch(group, LAYER, ids, x, w, capacity=capacity)
        return epic.jax.combine(plan, recv, slot)

    good = mapped(mesh, step, 3)
    wanted = good(x, w, ids)
    text = failure(good, x, w, ids.at[7, 1].set(EXPERTS + 5))
    assert text.startswith("INVALID_ARGUMENT") and "13" in text and "rank 1" in text, text
    tight = mapped(mesh, lambda x, w, ids: step(x, w, ids, 4), 3)
    text = failure(tight, x, w, ids)
    assert text.startswith("RESOURCE_EXHAUSTED"), text
    assert np.array_equal(good(x, w, ids), wanted)
    epic.jax.check(group)


def test_closed_and_opened_again(opened: Any) -> None:
    """A compiled program finds the new group by its name."""
    mesh = make_mesh(2)
    group = opened(mesh)
    x = numbers(1, 4, 5)
    step = mapped(mesh, lambda x: epic.jax.sum(group, x), 1)
    wanted = step(x)
    epic.jax.close(group)
    assert 'group "epic" is not open' in failure(step, x)
    assert jax.eval_shape(step, x).shape == x.shape  # communicates with nobody
    opened(mesh)
    assert np.array_equal(step(x), wanted)


def test_several_groups(opened: Any) -> None:
    """Over different axes, at a time, in one program."""
    mesh = make_mesh(2)
    ep = opened(mesh)
    wish: dict[str, Any] = {"max_tokens": 8, "max_row_bytes": 64, "name": "other"}
    with epic.jax.open(mesh, "dp", **wish) as dp:
        x = jnp.arange(4.0, dtype=jnp.float32)
        both = mapped(mesh, lambda x: (epic.jax.sum(ep, x), epic.jax.sum(dp, x)), 1)(x)
    assert both[0].tolist() == [1, 1, 5, 5] and both[1].tolist() == [2, 4, 2, 4]


def test_any_device_order(opened: Any) -> None:
    """Ranks follow the mesh, not the devices' ids."""
    devices = np.array(jax.devices()[:4])[[2, 0, 3, 1]].reshape(1, 4)
    mesh = jax.sharding.Mesh(devices, ("dp", "ep"))
    group = opened(mesh)
    ids = choices(3, 0)
    x, w = numbers(1, 4 * TOKENS, HIDDEN), jnp.ones((4 * TOKENS, TOP_K))

    def step(x: Any, w: Any, ids: Any) -> Any:
        return epic.jax.plan_dispatch(group, LAYER, ids, x, w)[0].expert_tokens

    assert np.array_equal(mapped(mesh, step, 3)(x, w, ids), np.bincount(np.ravel(ids)))


def test_misuse_is_explained(opened: Any) -> None:
    """While tracing, with the argument, its value and the rule."""
    mesh = make_mesh(4)
    with pytest.raises(ValueError, match="'nope' is not an axis"):
        epic.jax.open(mesh, "nope", max_tokens=1, max_row_bytes=1)
    with pytest.raises(ValueError, match="has 8 devices"):
        epic.jax.open(ranks=range(9), num_ranks=9, max_tokens=1, max_row_bytes=1)
    group = opened(mesh)
    with pytest.raises(ValueError, match="is open"):
        opened(mesh)
    ids, x = choices(1), numbers(1, 4 * TOKENS, HIDDEN)
    with pytest.raises(ValueError, match="int32 or int64"):
        epic.jax.plan(group, LAYER, x[:, :TOP_K])
    with pytest.raises(ValueError, match="top_k 3"):
        epic.jax.plan(group, LAYER, ids[:, :2])
    with pytest.raises(ValueError, match="max_tokens 64"):
        epic.jax.plan(group, LAYER, jnp.zeros((65, TOP_K), jnp.int32))


def test_a_peer_that_never_comes() -> None:
    """The deadline is an error that names the rank, not a hang."""
    mesh = make_mesh(4)
    sizes: dict[str, Any] = {"max_tokens": 8, "max_row_bytes": 64, "timeout_ms": 2000}
    with epic.jax.open(mesh, "ep", name="slow", **sizes) as group:

        def step(x: Any) -> Any:
            late = jax.lax.axis_index("ep") == 2
            return jax.lax.cond(late, lambda v: v, lambda v: epic.jax.sum(group, v), x)

        inner = jax.shard_map(step, mesh=mesh, in_specs=ALL, out_specs=ALL, check_vma=False)
        text = failure(jax.jit(inner), jnp.ones(4, jnp.float32))
        assert "DEADLINE_EXCEEDED" in text and "rank 2" in text, text
        with pytest.raises(epic.jax.EpicError, match="EPIC_ETIMEOUT"):
            epic.jax.check(group)


def test_weights_of_e4m3_are_told_to_be_elsewhere() -> None:
    """Options are shared with epic.torch, which has them."""
    options = epic.jax.Experts(hidden=4, inner=4, weight_type="e4m3")
    weights = epic.jax.ExpertWeights(jnp.ones((2, 4, 8)), jnp.ones((2, 4, 4)))
    counts = jnp.zeros(2, jnp.int32)
    with pytest.raises(epic.jax.EpicUnsupportedError, match=r"epic\.torch has it"):
        epic.jax.experts(options, jnp.ones((3, 4)), counts, counts, weights)
