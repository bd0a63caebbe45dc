# SPDX-License-Identifier: Apache-2.0
"""Compares the losses of examples/jax/recipe.py with those of dense layers in float64.

The example runs with several numbers of devices. Each run continues the run before.
"""

import importlib.util
import math
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forked import server
from pages import ROOT

pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")

SCRIPT = ROOT / "examples/jax/recipe.py"
STEPS = 2  # of each part of a run
MAX_NORM = 1.83  # some steps have a larger norm, and others a smaller one
Groups = tuple[int, int]  # devices of a group, and of all groups


def import_recipe() -> Any:
    """Return the script as a module."""
    spec = importlib.util.spec_from_file_location("recipe", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


recipe = import_recipe()


def rms_norm(x: Any) -> Any:
    """Return the RMS norm without a scale."""
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def attend(w: Any, x: Any) -> Any:
    """Return causal attention of sequences [sequences, length, hidden]."""
    q, k, v = jnp.split(rms_norm(x) @ w["qkv"], 3, axis=-1)
    heads = []
    size = recipe.HIDDEN // recipe.HEADS
    for first in range(0, recipe.HIDDEN, size):
        own = slice(first, first + size)
        products = q[..., own] @ k[..., own].swapaxes(1, 2)
        scores = jnp.exp(products / math.sqrt(size)) * np.tri(recipe.LENGTH)
        heads.append(scores / scores.sum(-1, keepdims=True) @ v[..., own])
    return jnp.concatenate(heads, -1) @ w["out"]


def mix(w: Any, x: Any) -> tuple[Any, Any, Any]:
    """Return the output of all experts, the probabilities, and a table of the chosen experts."""
    probabilities = jax.nn.softmax(x @ w.w_gate)
    second = jnp.sort(probabilities)[..., -2:-1]
    chosen = probabilities >= second
    weights = jnp.where(chosen, probabilities, 0)
    weights = weights / weights.sum(-1, keepdims=True)
    out = jnp.zeros_like(x)
    for expert in range(recipe.EXPERTS):
        gate, up = jnp.split(x @ w.w_gate_up[expert], 2, axis=-1)
        y = (gate / (1 + jnp.exp(-gate)) * up) @ w.w_down[expert]
        out += weights[..., expert, None] * y
    return out, probabilities, chosen


def losses_of(params: Any, owner: Any, ids: Any, labels: Any) -> tuple[Any, Any]:
    """Return the sum of the losses of all labels, and the mean of the groups' balance losses.

    `owner` [4, sequences] is 1 where a sequence belongs to a group, of which there may be fewer.
    """
    x = params["words"][ids] + params["places"]
    live = owner[..., None] * (ids != 0)
    balance = jnp.zeros(())
    for w in params["layers"]:
        x += attend(w, x)
        out, *routing = mix(w["moe"], rms_norm(x))
        x += out
        count = jnp.maximum(live.sum((1, 2)), 1)[:, None]
        mean, share = (jnp.einsum("gsl,sle->ge", live, v) / count for v in routing)
        balance += 0.01 * recipe.EXPERTS * (mean * share / 2).sum() / owner.max(1).sum()
    logits = rms_norm(x) @ params["head"]
    logits -= jnp.log(jnp.exp(logits).sum(-1, keepdims=True))
    wanted = labels[..., None] == jnp.arange(recipe.WORDS)
    return -(wanted * logits).sum(), balance


class Dense:
    """The whole run without a mesh: parameters, and the moments of AdamW."""

    def __init__(self) -> None:
        self.w, self.tree = jax.tree.flatten(recipe.first_params(np.float64))
        self.moments = [(np.zeros_like(w), np.zeros_like(w)) for w in self.w]

        def loss(w: Any, total: Any, *batch: Any) -> Any:
            entropy, balance = losses_of(jax.tree.unflatten(self.tree, w), *batch)
            return entropy / total + balance / recipe.MICRO_BATCHES, entropy / total

        self.function = jax.jit(jax.value_and_grad(loss, has_aux=True))

    def gradients(self, part: int, step: int, groups: Groups) -> tuple[float, list[Any]]:
        """Return the mean loss and the gradients, which are sums over the micro-batches."""
        owner = np.zeros((4, recipe.SEQUENCES))
        for i in range(groups[1] // groups[0]):
            owner[i, np.array_split(np.arange(recipe.SEQUENCES), groups[1] // groups[0])[i]] = 1
        ids, labels = recipe.make_batches(part, step)
        total = (labels != -100).sum()
        parts = [self.function(self.w, total, owner, *b) for b in zip(ids, labels, strict=True)]
        every = zip(*(p[1] for p in parts), strict=True)
        gradients = [sum(np.asarray(g) for g in each) for each in every]
        return sum(float(p[0][1]) for p in parts), gradients

    def held_out(self, groups: Groups) -> float:
        """Return the mean loss of the text that is not used for training."""
        return self.gradients(recipe.HELD_OUT, 0, groups)[0]

    def step(self, step: int, groups: Groups) -> tuple[float, float]:
        """Change the parameters; return the loss and the norm of the gradients."""
        loss, gradients = self.gradients(recipe.TRAINING, step, groups)
        norm = math.sqrt(sum((g**2).sum() for g in gradients))
        done = step / recipe.WARMUP
        rate = recipe.RATE * (1 / recipe.WARMUP + done * (1 - 1 / recipe.WARMUP))
        if step >= recipe.WARMUP:
            cosine = math.cos(math.pi * (step - recipe.WARMUP) / 100)
            rate = recipe.RATE * (0.55 + 0.45 * cosine)
        for i, gradient in enumerate(gradients):
            g = gradient * min(1.0, MAX_NORM / norm)
            first, second = self.moments[i]
            first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g**2
            self.moments[i] = first, second
            root = np.sqrt(second / (1 - 0.999 ** (step + 1))) + 1e-8
            update = first / (1 - 0.9 ** (step + 1)) / root + 0.01 * self.w[i]
            self.w[i] = self.w[i] - rate * update
        return loss, norm


def run_part(folder: Path, last: int, groups: Groups) -> str:
    """Continue the run in a process of its own; return what it prints."""
    words = ["--folder", str(folder), "--steps", str(last), "--save-every", "2", "--float64"]
    words += ["--devices", str(groups[1]), "--ep", str(groups[0]), "--max-norm", str(MAX_NORM)]
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return server("epic.jax", "optax", "orbax.checkpoint").run(
        str(SCRIPT), *words, timeout=240, env=env
    )


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([(2, 4), (1, 1)], marks=pytest.mark.night),
        pytest.param([(4, 4), (2, 2), (1, 1)], marks=pytest.mark.night),
        pytest.param([(2, 2), (2, 4), (1, 2), (4, 4)], marks=pytest.mark.night),
        pytest.param([(1, 1), (1, 4), (4, 4), (2, 2)], marks=pytest.mark.night),
    ],
    ids=["2x2-1", "4-2-1", "2-2x2-1x2-4", "1-1x4-4-2"],
)
def test_the_recipe(tmp_path: Path, parts: list[Groups]) -> None:
    """Check losses, norms and evaluations. Each part continues the run of the part before.
    Devices have different numbers of tokens and labels."""
    norms, evaluations = [], []
    with jax.enable_x64(True):
        dense = Dense()
        for number, groups in enumerate(parts):
            first, last = STEPS * number, STEPS * (number + 1)
            text = run_part(tmp_path, last, groups)
            wanted = [dense.held_out(groups)]
            for step in range(first, last):
                wanted += dense.step(step, groups)
                norms.append(wanted[-1])
            wanted.append(dense.held_out(groups))
            evaluations += [wanted[0], wanted[-1]]
            assert f"begin at step {first}," in text
            got = [float(n) for n in re.findall(r"(?:loss|norm) ([\d.]+)", text)]
            losses = [i for i in range(len(wanted)) if i % 2 or i == 0]
            assert [got[i] for i in losses] == pytest.approx([wanted[i] for i in losses], rel=1e-8)
            assert got == pytest.approx(wanted, rel=1e-3)  # norms have four digits
    assert 0 < sum(norm > MAX_NORM for norm in norms) < len(norms)  # the test covers both
    assert evaluations[-1] < evaluations[0]
