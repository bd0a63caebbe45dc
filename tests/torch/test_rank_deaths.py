# SPDX-License-Identifier: Apache-2.0
"""Compares the losses of examples/torch/rank_deaths.py with and without lost ranks."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import epic.torch
from pages import ROOT
from world import World

SCRIPT = ROOT / "examples/torch/rank_deaths.py"
# With seed 1 both processes that have the same experts are killed.
SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.night) for seed in range(2, 22))]
STEPS, ROUNDING = 13, 2e-6


def import_example() -> Any:
    """Return the script as a module, which processes that it starts can import, too."""
    if str(SCRIPT.parent) not in sys.path:
        sys.path.append(str(SCRIPT.parent))
    return importlib.import_module(SCRIPT.stem)


@pytest.mark.usefixtures("world")  # it has started a server that has imported torch
@pytest.mark.parametrize("seed", SEEDS)
def test_kills(
    seed: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Check that two processes were killed, and that the loss is that of a run without kills."""
    words = ["--check", "--steps", "40", "--seed", str(seed)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    assert import_example().main() == 0
    said = capfd.readouterr().out
    assert len(re.findall(r"kill -9 of rank \d", said)) == 2, said
    loss, wanted = (float(text) for text in re.findall(r"^loss (\S+) ", said, re.M))
    assert abs(loss - wanted) < ROUNDING * wanted, said


def train_ahead(rank: int, folder: str, at: int, lost: tuple[int, ...]) -> float | None:
    """Rank 0 finishes step `at`, in which the lost ranks close their groups and the others fail."""
    example = import_example()
    group = epic.torch.Group(max_tokens=example.BATCH, max_row_bytes=4 * example.HIDDEN)
    trainer = example.Trainer(group, Path(folder))
    steps = iter(range(1, at + 1))
    true_step = trainer.optimizer.step

    def step() -> None:
        if next(steps, 0) == at:
            dist.barrier()
            if rank in lost:
                raise KeyboardInterrupt
            if rank != 0:
                raise epic.torch.EpicError("EPIC_EPEER", "a test")
        true_step()

    trainer.optimizer.step = step
    try:
        return float(trainer.train(STEPS, [0] * group.num_ranks))
    except KeyboardInterrupt:
        return None
    finally:
        group.close()


# After step 10 rank 0 also writes its part of a checkpoint.  Ranks 1 and 3 have the same experts.
@pytest.mark.parametrize(("at", "lost"), [(7, (3,)), (10, (3,)), (10, (1, 3))])
def test_rank_that_is_ahead(world: World, at: int, lost: tuple[int, ...], tmp_path: Path) -> None:
    """A rank that has finished one step more than the others undoes it.

    If experts are lost, all ranks use the checkpoint before, of which all parts exist.
    """
    example = import_example()
    (tmp_path / "one").mkdir()
    (tmp_path / "four").mkdir()
    with epic.torch.Group(num_ranks=1, max_tokens=example.BATCH, max_row_bytes=64) as group:
        wanted = example.Trainer(group, tmp_path / "one").train(STEPS, [0])
    answers = world.run(train_ahead, str(tmp_path / "four"), at, lost)
    for rank, loss in enumerate(answers):
        assert (loss is None) == (rank in lost)
        assert loss is None or abs(loss - wanted) < ROUNDING * wanted, (answers, wanted)
