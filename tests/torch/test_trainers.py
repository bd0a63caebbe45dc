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
    folders = (str(EXAMPLES), str(EXAMPLES.parent / "common"), os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(folders)
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


def check_trainer(example: str, folder: Path, model: Path) -> None:
    """Compare the trained model with that of the same trainer without EPIC, in one process. Four
    ranks begin the run, and two ranks continue it; they have different numbers of labels."""
    module = importlib.import_module(example)
    # The norm of two of the four steps is above 2.4, so the scale of the gradients matters.
    words = [str(model), "--save-every", "2", "--float64", "--max-norm", "2.4"]
    for ranks, steps in ((4, "2"), (2, "4")):
        more = ("--folder", str(folder / "run"), "--steps", steps)
        run_example(example, ranks, *words, *more)
    eager = {"dtype": torch.float64, "experts_implementation": "eager"}
    first, got = (
        transformers.AutoModelForCausalLM.from_pretrained(path, **eager).train()
        for path in (model, folder / "run" / "final")
    )
    before = {name: value.clone() for name, value in first.state_dict().items()}
    hf_trainer = importlib.import_module("hf_trainer")
    args = hf_trainer.read_arguments([*words, "--folder", str(folder / "alone"), "--steps", "4"])
    module.make_trainer(args, first, 1).train()
    found = got.state_dict()
    for name, value in first.state_dict().items():
        # transformers computes norms and router in float32.
        change = found[name] - before[name], value - before[name]
        assert relative(*change) < 5e-5, name


def test_transformers(tmp_path: Path) -> None:
    """Check the Trainer of transformers."""
    pytest.importorskip("torchtitan", reason="runs in make test-torch-adapters")
    model_of("Qwen3Moe").save_pretrained(tmp_path / "model")
    check_trainer("hf_trainer", tmp_path, tmp_path / "model")


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of letters."""
    tokenizers = importlib.import_module("tokenizers")
    words = ["<pad>", "<end>", "<unknown>", *map(chr, range(ord("a"), ord("z") + 1))]
    table = {word: number for number, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(table, unk_token="<unknown>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unknown>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)


def test_trl(tmp_path: Path) -> None:
    """Check the SFTTrainer of TRL, which pads, and has labels for completions only. It adds the
    balance loss of each rank's micro-batch, so its result depends on the number of ranks: compare
    with one process without balance loss, and with DDP on as many ranks with it."""
    pytest.importorskip("trl", reason="there is no trl: make test-torch-adapters")
    model = model_of("Qwen3Moe")
    for name, coefficient in (("plain", 0.0), ("balanced", 0.1)):
        model.config.router_aux_loss_coef = coefficient
        model.save_pretrained(tmp_path / name)
        save_tokenizer(tmp_path / name)
    check_trainer("sft_trainer", tmp_path, tmp_path / "plain")
    balanced = str(tmp_path / "balanced")
    for name, more in (("epic", ()), ("own", ("--own",))):
        words = (balanced, "--folder", str(tmp_path / name), "--steps", "2", "--float64", *more)
        run_example("sft_trainer", 4, *words)
    kind = transformers.AutoModelForCausalLM
    before, got, wanted = (
        kind.from_pretrained(path, dtype=torch.float64).state_dict()
        for path in (balanced, tmp_path / "epic/final", tmp_path / "own/final")
    )
    for name, value in wanted.items():
        assert relative(got[name] - before[name], value - before[name]) < 5e-5, name


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


def test_megatron(tmp_path: Path) -> None:
    """Compare losses with one rank without EPIC, in float64. A run continues with other sizes of
    expert, data and tensor parallelism, with and without the distributed optimizer."""
    pytest.importorskip("megatron.core", reason="there is no megatron: make test-torch-adapters")

    def losses_of(ranks: int, name: str, steps: int, *more: str) -> list[float]:
        words = ("--folder", str(tmp_path / name), "--steps", str(steps), "--float64", *more)
        return losses_in(run_example("megatron_trainer", ranks, *words))

    losses_of(1, "first", 1, "--own")
    start = ("--parameters-of", str(tmp_path / "first/000001"))
    wanted = losses_of(1, "own", 4, "--own", *start)
    assert len(wanted) == 4
    got = losses_of(4, "epic", 2, "--ep", "2", *start)
    got += losses_of(4, "epic", 3, "--ep", "4", "--tp", "2")
    got += losses_of(4, "epic", 4, "--ep", "1")
    assert got == pytest.approx(wanted, rel=1e-9)
    got = losses_of(4, "plain", 2, "--tp", "2", "--plain", *start)
    got += losses_of(2, "plain", 4, "--plain")
    assert got == pytest.approx(wanted, rel=1e-9)
