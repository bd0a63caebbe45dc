# SPDX-License-Identifier: Apache-2.0
"""Runs the programs of README and of the guide for JAX."""

import dataclasses
import os
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import epic.jax
from conftest import make_mesh
from pages import ROOT, Program, find_block, list_programs
from steps import mapped

GUIDE = ROOT / "docs/guide/jax.md"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "program", list_programs("jax"), ids=lambda program: f"{program.page}-{program.number}"
)
def test_programs(program: Program) -> None:
    """Run every whole program of the guide in a process of its own."""
    if "flax" in program.text or "epic.jax.linen" in program.text:
        pytest.importorskip("flax")
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run([sys.executable, "-c", program.text], check=True, timeout=240, env=env)


def test_the_steps(opened: Any) -> None:
    """Run the blocks of the guide that use the steps, in a shard_map over two devices."""
    mesh = make_mesh(2)
    group = opened(mesh)
    options = epic.jax.Moe.of(num_experts=4, top_k=2, hidden=8, inner=16)
    experts = epic.jax.ExpertWeights(jnp.ones((2, 8, 32)), jnp.ones((2, 16, 8)))

    def step(tokens: Any, topk_idx: Any, weights: Any) -> Any:
        names = {
            "epic": epic,
            "group": group,
            "layer": options.layer,
            "mlp": options.experts,
            "w": experts,
            "tokens": tokens,
            "topk_idx": topk_idx,
            "weights": weights,
            "x": tokens[0],
        }
        exec(find_block(GUIDE, "plan = "), names)
        flat = dataclasses.replace(options.layer, layout="flat")
        names["plan"] = epic.jax.plan(group, flat, topk_idx)
        steps = names["out"], names["recv"], names["total"]
        names["partials"] = jnp.ones((group.capacity_bound(flat), 8))
        exec(find_block(GUIDE, "rows, weights, experts = "), names)
        return *steps, names["out"]

    x, w = np.ones((24, 8), np.float32), np.full((24, 2), 0.5, np.float32)
    ids = np.array([[0, 3], [1, 2]] * 12, np.int32)
    out, recv, total, flat = mapped(mesh, step, 3)(x, ids, w)
    assert out.shape == x.shape and (np.asarray(out) > 0).all()
    assert np.asarray(recv).sum() == 2 * x.sum()
    assert set(np.asarray(total)) == {2.0}
    assert (np.asarray(flat) == 2).all()  # of both ranks, 1 each
