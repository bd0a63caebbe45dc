# SPDX-License-Identifier: Apache-2.0
"""Tests that tokens have equal bits in all batches and groups with invariant=True.

Also tests check_invariance.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import epic.jax
from conftest import make_mesh
from steps import numbers

HIDDEN, INNER, EXPERTS = 24, 16, 8
# The logical expert of each of 16 experts. The replicas of an expert are in one leaf of the tree.
LOGICAL = np.arange(16, dtype=np.int32) // 2
BLOCKS = {1: [0], 2: [1, 0], 4: [2, 0, 3, 1]}  # the rank of each block of experts, by ranks


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


def replicas_of(ranks: int) -> tuple[epic.jax.Moe, dict[str, Any]]:
    """Return the options of a layer with replicas, and its tables."""
    options = options_of()
    layer = replace(options.layer, num_experts=len(LOGICAL), num_logical=EXPERTS)
    owners = np.repeat(np.array(BLOCKS[ranks], np.int32), len(LOGICAL) // ranks)
    tables = {"rank_of_expert": owners, "logical_of_expert": LOGICAL}
    return replace(options, layer=layer), tables


def placed_weights(tables: dict[str, Any], factor: float = 1.0) -> epic.jax.MoeWeights:
    """Return the weights of all replicas, in the order of the ranks that own them.

    factor: by how much the weights of replica 4 differ from those of its expert.
    """
    whole = weights_of("float32")
    order = np.argsort(tables["rank_of_expert"], kind="stable")
    w_down = whole.w_down[LOGICAL].at[4].multiply(factor)
    return whole._replace(w_gate_up=whole.w_gate_up[LOGICAL[order]], w_down=w_down[order])


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.night), 4])
def test_replicas(opened: Any, ranks: int) -> None:
    """Replicas, and experts that other ranks own, have the bits of a layer without replicas."""
    mesh = make_mesh(ranks)
    group = opened(mesh)
    options, tables = replicas_of(ranks)
    report = epic.jax.check_invariance(mesh, group, options, placed_weights(tables), **tables)
    assert report.is_invariant, report
    alone = epic.jax.check_invariance(mesh, group, options_of(), weights_of("float32"))
    assert report.fingerprint == alone.fingerprint


def test_unequal_replicas(opened: Any) -> None:
    """A replica whose weights differ from those of its expert is found in the product."""
    mesh = make_mesh(1)
    options, tables = replicas_of(1)
    weights = placed_weights(tables, factor=1.5)
    report = epic.jax.check_invariance(mesh, opened(mesh), options, weights, **tables)
    assert report.first is not None and report.first.stage == "product", report


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
    group, options = opened(mesh, max_tokens=7), options_of(invariant=False)
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
    replicas, tables = replicas_of(2)
    placed = placed_weights(tables)
    with pytest.raises(refused, match="logical_of_expert is None and num_logical is 8"):
        epic.jax.check_invariance(mesh, group, replicas, placed)
    tables["logical_of_expert"] = np.arange(16, dtype=np.int32) % 8
    with pytest.raises(refused, match="is 0 for experts 0 and 8: with invariant=True replicas"):
        epic.jax.check_invariance(mesh, group, replicas, placed, **tables)
