# SPDX-License-Identifier: Apache-2.0
"""The programs of docs/guide/jax.md run as they stand there."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import epic.jax
from conftest import make_mesh
from steps import mapped

GUIDE = Path(__file__).resolve().parents[2] / "docs/guide/jax.md"
CHECKS = """
assert out.shape == (8, 64, 256) and out.dtype == jnp.bfloat16 and 0 < loss < 1
assert first.shape == out.shape and first.dtype == jnp.float32
assert np.count_nonzero(state["moe"]["expert_bias"])
"""


@pytest.mark.thorough
def test_the_guide() -> None:
    """Its layer, and then its module, in one session."""
    pytest.importorskip("flax")
    indented = re.findall(r"(?:^(?: {4}.*)?\n)+", GUIDE.read_text(), re.MULTILINE)
    layer, module = (b for b in map(dedent, indented) if b.lstrip().startswith("import "))
    program = layer + "first = out\n" + module + CHECKS
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240, env=env)


def block_of(begin: str) -> str:
    """The indented lines of the guide that begin with these words."""
    text = GUIDE.read_text()
    code = re.search(r"(?:^ {4}.*\n)+", text[text.index(f"    {begin}") :], re.MULTILINE)
    assert code is not None
    return dedent(code[0])


def test_the_steps(opened: Any) -> None:
    """As they stand there, in a shard_map over two devices."""
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
        exec(block_of("plan                        = "), names)
        flat = dataclasses.replace(options.layer, layout="flat")
        names["plan"] = epic.jax.plan(group, flat, topk_idx)
        steps = names["out"], names["recv"], names["total"]
        names["partials"] = jnp.ones((group.capacity_bound(flat), 8))
        exec(block_of("rows, weights, experts      = "), names)
        return *steps, names["out"]

    x, w = np.ones((24, 8), np.float32), np.full((24, 2), 0.5, np.float32)
    ids = np.array([[0, 3], [1, 2]] * 12, np.int32)
    out, recv, total, flat = mapped(mesh, step, 3)(x, ids, w)
    assert out.shape == x.shape and (np.asarray(out) > 0).all()
    assert np.asarray(recv).sum() == 2 * x.sum()
    assert set(np.asarray(total)) == {2.0}
    assert (np.asarray(flat) == 2).all()  # of both ranks, 1 each
