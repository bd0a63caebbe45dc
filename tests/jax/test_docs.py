# SPDX-License-Identifier: Apache-2.0
"""Runs the programs of README and of the guide for JAX."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import epic.jax
import reference
from conftest import line_of, make_mesh
from forked import server
from pages import Program, find_block, list_programs
from steps import ALL, mapped, numbers

RECIPE = find_block("training", "import jax\n")
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
    early = "epic.jax.close(group)" in text  # without it, the shutdown of Python closes the group
    server("epic.jax", "layers").run(text, timeout=240, env=env, ends_early=early)


PROGRAMS = [program for program in list_programs("jax") if program.text != RECIPE]


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: f"{p.page}-{p.number}")
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


E, H, T = 4, 128, 6  # experts, hidden, and tokens of a device
LAYER = epic.jax.Layer(num_experts=E, top_k=2)
EPS = pytest.mark.parametrize("ep", [1, 2, 4])  # ranks of a group


def draw() -> tuple[Any, ...]:
    """Return tokens, ids and weights of four devices. They are small numbers, so that sums are
    exact. Devices have different numbers of tokens with a choice, and one device has none."""
    rng = np.random.default_rng(0)
    ids = np.array([rng.permutation(E)[:2] for _ in range(4 * T)], np.int32)
    for device, live in enumerate((5, 0, 6, 3)):
        ids[device * T + live : (device + 1) * T] = -1
    tokens = rng.integers(-2, 3, (4 * T, H)).astype(np.float32)
    return tokens, ids, rng.integers(1, 4, ids.shape).astype(np.float32) / 4


def names_of(group: Any, tokens: Any, topk_idx: Any, weights: Any, **more: Any) -> dict[str, Any]:
    """Return the names that the blocks use."""
    names = {"epic": epic, "group": group, "layer": LAYER, "tokens": tokens, "topk_idx": topk_idx}
    return names | {"weights": weights, **more}


@EPS
def test_the_steps(opened: Any, ep: int) -> None:
    """Compare with plain loops over tokens and choices, and with a sum over the group."""
    mesh = make_mesh(ep)
    group = opened(mesh)
    experts = np.asarray(numbers(1, E, H, 32)) / 8, np.asarray(numbers(2, E, 16, H)) / 4

    def step(tokens: Any, topk_idx: Any, weights: Any, *own: Any) -> Any:
        names = names_of(group, tokens, topk_idx, weights, x=tokens[:2, :3])
        names |= {"mlp": epic.jax.Experts(hidden=H, inner=16), "w": epic.jax.ExpertWeights(*own)}
        exec(find_block("jax", "plan = "), names)
        return names["out"], names["total"]

    specs = (ALL, ALL, ALL, P("ep"), P("ep"))
    run = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=ALL)
    tokens, ids, weights = draw()
    out, total = jax.jit(run)(tokens, ids, weights, *experts)
    w = {n: v.astype(np.float64) for n, v in zip(("w_gate_up", "w_down"), experts, strict=True)}
    true = np.zeros((4 * T, H))
    for t, k in zip(*np.nonzero(ids >= 0), strict=True):
        true[t] += (
            weights[t, k] * reference.mlp(tokens[t : t + 1].astype(float), w, ids[t, k])[0][0]
        )
    assert reference.relative(out, true) < 1e-6
    parts = tokens.reshape(4 // ep, ep, T, H)[:, :, :2, :3].sum(axis=1)
    assert np.array_equal(total, np.repeat(parts, ep, axis=0).reshape(8, 3))


def flat_step(group: Any, line: int) -> Any:
    """Return a function that runs a line of a block for the flat layout: 0 dispatches and combines,
    and 1 and 2 dispatch e4m3 rows."""

    def step(tokens: Any, topk_idx: Any, weights: Any) -> Any:
        names = names_of(group, tokens, topk_idx, weights)
        flat = dataclasses.replace(LAYER, layout="flat")
        names["plan"] = epic.jax.plan(group, flat, topk_idx)
        if line:
            names |= {"fp8_tokens": tokens.astype(jnp.float8_e4m3fn), "s": jnp.ones((T, 1))}
            block = find_block("jax", "rows, scales, weights, experts = ")
            exec(block.splitlines()[line - 1], names)
            rows = names["rows"].astype(jnp.float32) * names["scales"]
            return rows.reshape(-1, H), (names["experts"] >= 0).any(axis=1)
        dispatch, combine = find_block("jax", "rows, weights, experts = ").splitlines()
        exec(dispatch, names)
        first = jax.lax.axis_index("ep") * (E // group.num_ranks)
        factors = (names["experts"] + first + 1) * names["weights"]
        factors = jnp.where(names["experts"] >= 0, factors, 0).sum(axis=1, keepdims=True)
        names["partials"] = names["rows"] * factors  # expert e multiplies by e + 1
        exec(combine, names)
        return names["out"], names["out"]

    return step


@EPS
def test_flat_rows(opened: Any, ep: int) -> None:
    """Check what comes back from experts that multiply rows, and that every rank gets the row of a
    token that has chosen any of its experts."""
    mesh = make_mesh(ep)
    group = opened(mesh)
    tokens, ids, weights = draw()
    out, _ = mapped(mesh, flat_step(group, 0), 3)(tokens, ids, weights)
    factors = np.where(ids >= 0, (ids + 1) * weights, 0).sum(axis=1, keepdims=True)
    assert np.array_equal(out, tokens * factors)
    owners = np.where(ids >= 0, ids // (E // ep), -1)
    for line in (1, 2):
        rows, is_used = mapped(mesh, flat_step(group, line), 3)(tokens, ids, weights)
        for device in range(4):
            members = slice(device // ep * ep * T, (device // ep + 1) * ep * T)
            mine = (owners[members] == device % ep).any(axis=1)
            got = np.split(np.asarray(rows), 4)[device][np.split(np.asarray(is_used), 4)[device]]
            wanted = tokens[members][mine]
            assert sorted(got.tolist()) == sorted(wanted.tolist()), (line, device)


def test_loss_of_step(capsys: pytest.CaptureFixture[str]) -> None:
    """Check the result, and what is printed and raised if a rank is late or a group is closed."""
    names: dict[str, Any] = {"epic": epic}
    exec(find_block("jax", "def loss_of_step("), names)
    assert names["loss_of_step"](lambda w, x: w * x, 2, 3.0) == 6.0
    mesh = make_mesh(4)
    more: dict[str, Any] = {"max_tokens": 8, "max_row_bytes": 64, "timeout_ms": 500}
    with epic.jax.open(mesh, "ep", name="loss of step", **more) as group:

        def step(late: Any, x: Any) -> Any:
            is_late = jax.lax.axis_index("ep") == late
            return jax.lax.cond(is_late, lambda v: v, lambda v: epic.jax.sum(group, v), x)

        specs = (P(), ALL)
        inner = jax.jit(
            jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=ALL, check_vma=False)
        )

        def run(late: Any, x: Any) -> Any:  # XLA ends a process if a psum waits for a failed device
            return np.asarray(inner(late, x)).sum()

        x = jnp.ones(4, jnp.float32)
        assert names["loss_of_step"](run, jnp.int32(-1), x) == 16.0
        for late, code, printed in ((1, "EPIC_ETIMEOUT", True), (-1, "EPIC_ECLOSED", False)):
            with pytest.raises(Exception, match=code):
                names["loss_of_step"](run, jnp.int32(late), x)
            assert ("a rank is gone" in capsys.readouterr().out) == printed
            epic.jax.close(group)


def test_find_non_finite() -> None:
    """Check that the part of the guide names the layer, and that finite layers raise nothing."""
    block = find_block("debugging", "# find the first row of these layers")
    options = epic.jax.Moe.of(num_experts=4, top_k=1, hidden=8, inner=8)
    mesh = line_of(2)
    w = {
        "w_gate": numbers(1, 8, 4),
        "w_gate_up": numbers(2, 4, 8, 16),
        "w_down": numbers(3, 4, 8, 8),
    }
    broken = {**w, "w_gate": np.full((8, 4), np.nan, np.float32)}
    names: dict[str, Any] = {"epic": epic, "jax": jax, "P": P, "mesh": mesh, "options": options}
    with epic.jax.open(mesh, "ep", max_tokens=8, max_row_bytes=64) as group:
        names |= {"group": group, "x": numbers(4, 8, 8)}
        exec(block, names | {"layers": {"a": epic.jax.MoeWeights(**w)}})
        with pytest.raises(epic.jax.EpicNonFiniteError, match=r"layer 'b', rank 0, token 0"):
            layers = {name: epic.jax.MoeWeights(**v) for name, v in (("a", w), ("b", broken))}
            exec(block, names | {"layers": layers})
