# SPDX-License-Identifier: Apache-2.0
"""Runs the programs of README and of the guide for JAX."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import epic.jax
import reference
from conftest import make_mesh
from forked import server
from pages import ROOT, Program, find_block, list_programs
from steps import mapped

GUIDE = ROOT / "docs/guide/jax.md"


RECIPE = find_block(ROOT / "docs/guide/training.md", "import jax\n")
# The shapes of the meshes in the guide, for a number of devices.
MESHES = {1: ("(1, 1)", "(1, 1, 1)"), 2: ("(1, 2)", "(1, 1, 2)"), 4: ("(2, 2)", "(1, 2, 2)")}


def on_devices(text: str, devices: int) -> str:
    """Returns a program of the documentation changed from 4 devices to another number."""
    assert text.count('jax_num_cpu_devices", 4)') == 1
    text = text.replace('jax_num_cpu_devices", 4)', f'jax_num_cpu_devices", {devices})')
    for written, shape in zip(MESHES[4], MESHES[devices], strict=True):
        text = text.replace(f".reshape{written}", f".reshape{shape}")
    return text


def run_program(text: str) -> None:
    """Runs a program in a process of its own."""
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    server("epic.jax", "layers").run(text, timeout=240, env=env)


PROGRAMS = [program for program in list_programs("jax") if program.text != RECIPE]
# Those of the JAX guide run on 1, 2 and 4 devices, the others on 4.
RUNS = [
    pytest.param(p, n, marks=() if n == 4 else pytest.mark.night, id=f"{p.page}-{p.number}-{n}")
    for p in PROGRAMS
    for n in ([4, 1, 2] if p.page == "jax" else [4])
]


@pytest.mark.parametrize(("program", "devices"), RUNS)
def test_programs(program: Program, devices: int) -> None:
    """Runs every whole program of README and the guide."""
    if "flax" in program.text or "epic.jax.linen" in program.text:
        pytest.importorskip("flax")
    run_program(on_devices(program.text, devices))


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_recipe(tmp_path: Path, devices: int) -> None:
    """Check the gradients of the training recipe. They are those of the mean over all unmasked
    tokens, plus the mean of the groups' balance losses. Ranks have different numbers of such
    tokens."""
    file = tmp_path / "result.npz"
    kept = "x=x, mask=mask, **{f'w_{n}': v for n, v in weights._asdict().items() if v is not None}"
    found = "**{f'd_{n}': v for n, v in result._asdict().items() if v is not None}"
    run_program(on_devices(RECIPE, devices) + f"\nnp.savez({str(file)!r}, {kept}, {found})\n")
    saved = np.load(file)
    weights = {n[2:]: saved[n].astype(np.float64) for n in saved if n.startswith("w_")}
    groups = 2 if devices == 4 else 1  # the meshes are dp x ep
    wanted: dict[str, Any] = dict.fromkeys(weights, 0.0)
    options = reference.Options(2, "softmax", False, 0.01, 0.0, False, 0)
    for x, mask in zip(np.split(saved["x"], groups), np.split(saved["mask"], groups), strict=True):
        tokens = x[mask].astype(np.float64)
        out = reference.moe(options, tokens, weights, np.zeros_like(tokens), 0.0)[0]
        d_out = 2 * out / (saved["mask"].sum() * 32)
        d_weights = reference.moe(options, tokens, weights, d_out, 1 / groups)[3]
        wanted = {name: wanted[name] + d_weights[name] for name in wanted}
    for name, true in wanted.items():
        assert reference.relative(saved[f"d_{name}"], true) < 2e-5, name


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
    assert (np.asarray(flat) == 2).all()  # 1 from each of both ranks
