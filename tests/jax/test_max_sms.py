# SPDX-License-Identifier: Apache-2.0
"""Checks that max_sms= reaches every call of a program, forward and backward.

On CPUs it changes nothing; test_emulated.py and the GPU scripts run with it.
"""

import re
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

import epic.jax
import layers
from conftest import make_mesh
from steps import EXPERTS, HIDDEN, LAYER, TOKENS, TOP_K, choices, mapped, numbers

CALL = re.compile(r"@(epic_\w+)\(.*?max_sms = (\d+)")


def limits(run: Any, *args: Any) -> dict[str, set[int]]:
    """Return the limits of the calls of a program, by target."""
    found: dict[str, set[int]] = {}
    for target, limit in CALL.findall(jax.jit(run).lower(*args).as_text()):
        found.setdefault(target, set()).add(int(limit))
    return found


def test_steps(opened: Any) -> None:
    """A plan's limit applies to the calls on it, unless a call has a limit of its own."""
    mesh = make_mesh(2)
    group = opened(mesh)
    x, w, ids = numbers(1, 4 * TOKENS, HIDDEN), numbers(2, 4 * TOKENS, TOP_K), choices(3)

    def step(x: Any, w: Any, ids: Any) -> Any:
        plan = epic.jax.plan(group, LAYER, ids, max_sms=8)
        recv, slot = epic.jax.dispatch(plan, x, w)
        out = epic.jax.combine(plan, recv, slot, max_sms=4)
        other, again, _ = epic.jax.plan_dispatch(group, LAYER, ids, x, w, max_sms=16)
        return out + epic.jax.combine(other, again) + epic.jax.sum(group, x, max_sms=2)

    def run(x: Any, w: Any, ids: Any) -> Any:
        inner = mapped(mesh, step, 3)
        return jax.grad(lambda x, w: inner(x, w, ids).sum(), argnums=(0, 1))(x, w)

    found = limits(run, x, w, ids)
    assert found["epic_plan"] == {8} and found["epic_plan_dispatch"] == {16}, found
    assert found["epic_dispatch_backward"] == {8, 16}, found
    assert found["epic_combine_backward"] == {4, 16}, found
    assert found["epic_allreduce_sum"] == {2}, found


@pytest.mark.parametrize("masked", [False, True], ids=["core", "composed"])
def test_layer(masked: bool, opened: Any) -> None:
    """The limit of a layer applies to each of its operations, also in a composed layer."""
    mesh = make_mesh(2)
    group = opened(mesh)
    wish = layers.options({}, 2)
    x, ct = layers.arrays()
    weights = epic.jax.MoeWeights(**layers.weights({}))
    more: dict[str, Any] = {"token_mask": np.ones(x.shape[:2], bool)} if masked else {}

    def loss_of(x: Any, w: Any) -> Any:
        found = epic.jax.moe(group, wish, x, w, max_sms=12, **more)
        return (found.out * ct).sum()

    found = limits(jax.grad(loss_of, argnums=(0, 1)), x, weights)
    targets = {"epic_moe", "epic_moe_backward"}
    if masked:
        targets = {"epic_plan_dispatch", "epic_dispatch_backward", "epic_combine_backward"}
        targets |= {"epic_experts", "epic_experts_backward"}
    assert all(found[target] == {12} for target in targets), found


def test_wrong_limits(opened: Any) -> None:
    """A limit must be an integer of at least 0."""
    group = opened(None)
    ids, x = choices(3)[:TOKENS], numbers(1, TOKENS, HIDDEN)
    plan = epic.jax.plan(group, LAYER, ids)
    assert replace(plan.spec, max_sms=1) != plan.spec
    counts = np.zeros(EXPERTS, np.int32)
    options = epic.jax.Experts(hidden=HIDDEN, inner=4)
    weights = epic.jax.ExpertWeights(numbers(1, 8, HIDDEN, 8), numbers(2, 8, 4, HIDDEN))
    calls: list[Any] = [
        lambda n: epic.jax.plan(group, LAYER, ids, max_sms=n),
        lambda n: epic.jax.plan_dispatch(group, LAYER, ids, x, max_sms=n),
        lambda n: epic.jax.dispatch(plan, x, max_sms=n),
        lambda n: epic.jax.dispatch_quantized(plan, x, max_sms=n),
        lambda n: epic.jax.sum(group, x, max_sms=n),
        lambda n: epic.jax.experts(options, x, counts, counts, weights, max_sms=n),
    ]
    for call in calls:
        for wrong in (-1, 1.5, "8"):
            with pytest.raises(epic.jax.EpicArgumentError, match=r"max_sms .*an integer from 0"):
                call(wrong)
