# SPDX-License-Identifier: Apache-2.0
"""Tests that tokens have equal bits in all batches and groups with invariant=True.

Also tests check_invariance.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import epic.jax
from conftest import make_mesh
from steps import numbers

HIDDEN, INNER, EXPERTS = 24, 16, 8


def options_of(**more: Any) -> epic.jax.Moe:
    """A layer with a shared expert, a zero-expert and losses."""
    wish = {"invariant": True, "balance_coeff": 0.1, **more}
    return epic.jax.Moe.of(
        num_experts=EXPERTS, top_k=2, hidden=HIDDEN, inner=INNER, normalize="sum", zero_experts=1,
        shared=epic.jax.Experts(1, HIDDEN, INNER), **wish,
    )  # fmt: skip


def weights_of(dtype: Any) -> epic.jax.MoeWeights:
    """Random weights of all experts."""
    experts = {
        "w_gate_up": (EXPERTS, HIDDEN, 2 * INNER),
        "w_down": (EXPERTS, INNER, HIDDEN),
        "shared_gate_up": (1, HIDDEN, 2 * INNER),
        "shared_down": (1, INNER, HIDDEN),
    }
    made = {
        name: numbers(i, *shape).astype(dtype) for i, (name, shape) in enumerate(experts.items())
    }
    return epic.jax.MoeWeights(w_gate=numbers(9, HIDDEN, EXPERTS + 1), **made)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.night)])
def test_groups(opened: Any, dtype: str) -> None:
    """No bit differs between batches, devices and groups of 1, 2 and 4 ranks."""
    prints = set()
    for ranks in (1, 2, 4):
        mesh = make_mesh(ranks)
        group = opened(mesh, name=f"of {ranks}")
        report = epic.jax.check_invariance(mesh, group, options_of(), weights_of(dtype))
        assert report.is_invariant, report
        assert report.batches == (64, 32, 7, 2, 1)
        prints.add(report.fingerprint)
    assert len(prints) == 1


def test_few_tokens(opened: Any) -> None:
    """One token of a device has the bits that it has among 48 tokens."""
    mesh = make_mesh(4)
    group, weights, x = opened(mesh), weights_of("float32"), numbers(1, 192, HIDDEN)

    @jax.jit
    def run(x: Any) -> Any:
        return epic.jax.sharded.moe(mesh, group, options_of(), x, weights).out

    whole = np.asarray(run(x))
    assert np.array_equal(run(x[:4]), whole[:4])
    assert np.array_equal(run(x[100:112]), whole[100:112])


def test_found(opened: Any) -> None:
    """A product that depends on the number of tokens is found."""
    mesh = make_mesh(1)
    group, options = opened(mesh), options_of(invariant=False)
    report = epic.jax.check_invariance(
        mesh, group, options, weights_of("float32"), grouped_gemm=product
    )
    assert not report.is_invariant
    assert report.first is not None
    assert report.first.stage in ("gate", "product")


def product(x: Any, w: Any, rows: Any) -> Any:
    """A grouped product with an error of the number of rows."""
    return jax.lax.ragged_dot(x, w, rows) + rows.sum().astype(x.dtype)


def test_refused(opened: Any) -> None:
    """Options and arguments that contradict invariant=True."""
    mesh = make_mesh(2)
    group, weights, x = opened(mesh), weights_of("float32"), jnp.ones((8, HIDDEN))
    refused = epic.jax.EpicArgumentError
    with pytest.raises(refused, match="leaves is 0: with invariant=True"):
        options_of(leaves=0)
    values: dict[str, Any] = {"grouped_gemm": product, "token_mask": jnp.ones(8, bool)}
    for name, value in values.items():
        with pytest.raises(refused, match=f"{name} is given: must be None"):
            epic.jax.sharded.moe(mesh, group, options_of(), x, weights, **{name: value})
    replicas = epic.jax.Moe.of(
        num_experts=8, num_logical=4, top_k=2, hidden=HIDDEN, inner=INNER, invariant=True
    )
    with pytest.raises(epic.jax.EpicUnsupportedError, match="num_logical is given"):
        epic.jax.check_invariance(mesh, group, replicas, weights)
