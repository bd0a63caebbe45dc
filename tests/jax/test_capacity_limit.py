# SPDX-License-Identifier: Apache-2.0
"""Tests capacity_limit, a number of slots that a compiled program reads at each call."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import epic.jax
from conftest import make_mesh
from steps import EXPERTS, HIDDEN, TOKENS, mapped, numbers

DROP = epic.jax.Layer(EXPERTS, 1, overflow="drop")
LIMITS = ((3, 3), (100, 8), (0, 1), (-5, 1))  # capacity_limit, and the slots with capacity 8


def run(group: Any, x: Any, fused: bool, **more: Any) -> tuple[Any, ...]:
    """Send all tokens to expert 0 and back."""
    ids, w = jnp.zeros((x.shape[0], 1), jnp.int32), jnp.ones((x.shape[0], 1))
    if fused:
        plan, recv, slot = epic.jax.plan_dispatch(group, DROP, ids, x, w, **more)
    else:
        plan = epic.jax.plan(group, DROP, ids, **more)
        recv, slot = epic.jax.dispatch(plan, x, w)
    return epic.jax.combine(plan, recv, slot), plan.expert_rows, plan.has_overflow


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("inside", [False, True], ids=["plain_jit", "shard_map"])
def test_slots(fused: bool, inside: bool, opened: Any) -> None:
    """The plan keeps as many rows as with that capacity, and no limit compiles a program again."""
    mesh = make_mesh(2)
    group = opened(mesh)
    x, ct = numbers(1, 4 * TOKENS, HIDDEN), numbers(2, 4 * TOKENS, HIDDEN)
    traced = 0

    def step(x: Any, limit: Any, capacity: int) -> Any:
        nonlocal traced
        traced += 1
        more = {"capacity": capacity, "capacity_limit": limit}

        def local(x: Any) -> Any:
            return run(group, x, fused, **more)

        function = mapped(mesh, local, 1) if inside else local
        out, pull, (rows, over) = jax.vjp(lambda x: pair(function(x)), x, has_aux=True)
        return out, rows, over, pull(ct)[0]

    def pair(found: tuple[Any, ...]) -> Any:
        return found[0], found[1:]

    compiled = jax.jit(step, static_argnums=2)
    limited = [compiled(x, jnp.int32(limit), 8) for limit, _ in LIMITS]
    assert traced == 1
    for found, (_, slots) in zip(limited, LIMITS, strict=True):
        wanted = compiled(x, None, slots)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(a, b)
        assert found[2].tolist() == [True, False] * 2  # two groups of two ranks
        assert int(found[1].sum()) == 2 * slots


def test_error(opened: Any) -> None:
    """A plan that may not drop choices reports the limit as its number of slots."""
    group = opened(None)
    ids = jnp.zeros((4, 1), jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="has 3 slots and needs 4"):
        epic.jax.plan(group, epic.jax.Layer(EXPERTS, 1), ids, capacity_limit=jnp.int32(3))


@pytest.mark.parametrize("wrong", [np.float32(3), jnp.ones(1, jnp.int32), "3"])
def test_wrong_limits(wrong: Any, opened: Any) -> None:
    """Only an int32 array without dimensions is a limit."""
    group, ids = opened(None), jnp.zeros((4, 1), jnp.int32)
    for call in (
        lambda: epic.jax.plan(group, DROP, ids, capacity_limit=wrong),
        lambda: epic.jax.plan_dispatch(group, DROP, ids, ids * 1.0, capacity_limit=wrong),
    ):
        with pytest.raises(epic.jax.EpicArgumentError, match=r"capacity_limit is .*: must be"):
            call()
