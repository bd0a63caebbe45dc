# SPDX-License-Identifier: Apache-2.0
"""Runs the examples in which a trainer of another package trains with EPIC on CPU processes."""

import atexit
import functools
import importlib
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from forked import Server, finish, start_ranks
from pages import ROOT
from ports import free_port
from reference import relative
from test_pretrained import model_of, transformers

EXAMPLES = ROOT / "examples/torch"
sys.path.append(str(EXAMPLES))


@functools.cache
def server_of(name: str) -> Server:
    """Return a server that has imported an example."""
    path = os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}  # as torchrun sets it
    server = Server("torch._dynamo", name, env=env)
    atexit.register(server.close)
    return server


def run_example(name: str, ranks: int, *words: str) -> str:
    """Return what rank 0 of an example prints."""
    program = str(EXAMPLES / f"{name}.py")
    running = start_ranks(server_of(name), program, *words, ranks=ranks, port=free_port())
    return finish(running, 400)[0]


def losses_in(text: str) -> list[float]:
    """Return the losses of all steps."""
    return [float(loss) for loss in re.findall(r"^step \d+ loss ([\d.]+)", text, re.M)]


def test_transformers(tmp_path: Path) -> None:
    """Compare the trained model with that of the same trainer without EPIC, in one process. Four
    ranks begin the run, and two ranks continue it; they have different numbers of labels."""
    pytest.importorskip("torchtitan", reason="runs in make test-torch-adapters")
    hf_trainer = importlib.import_module("hf_trainer")
    folder = str(tmp_path / "model")
    model_of("Qwen3Moe").save_pretrained(folder)
    # The norm of two of the four steps is above 2.4, so the scale of the gradients matters.
    words = [folder, "--save-every", "2", "--float64", "--max-norm", "2.4"]
    for ranks, steps in ((4, "2"), (2, "4")):
        more = ("--folder", str(tmp_path / "run"), "--steps", steps)
        run_example("hf_trainer", ranks, *words, *more)
    eager = {"dtype": torch.float64, "experts_implementation": "eager"}
    first, got = (
        transformers.AutoModelForCausalLM.from_pretrained(path, **eager).train()
        for path in (folder, tmp_path / "run" / "final")
    )
    before = {name: value.clone() for name, value in first.state_dict().items()}
    args = hf_trainer.read_arguments([*words, "--folder", str(tmp_path / "alone"), "--steps", "4"])
    hf_trainer.make_trainer(args, first, 1).train()
    found = got.state_dict()
    for name, value in first.state_dict().items():
        # transformers computes norms and router in float32.
        change = found[name] - before[name], value - before[name]
        assert relative(*change) < 5e-5, name


def test_titan(tmp_path: Path) -> None:
    """Compare losses with torchtitan's own dispatcher; the run is resumed with other groups."""
    pytest.importorskip("torchtitan", reason="there is no torchtitan: make test-torch-adapters")
    first, other = str(tmp_path / "epic"), str(tmp_path / "own")
    own = run_example("titan_trainer", 4, "--folder", other, "--steps", "4", "--own")
    epic = run_example("titan_trainer", 4, "--folder", first, "--steps", "2")
    epic += run_example("titan_trainer", 4, "--folder", first, "--steps", "4", "--ep", "2")
    assert "dispatcher EpicTokenDispatcher" in epic
    assert "dispatcher AllToAllTokenDispatcher" in own
    assert len(losses_in(own)) == 4
    # The products of the experts are in bfloat16.
    assert losses_in(epic) == pytest.approx(losses_in(own), rel=2e-3)
