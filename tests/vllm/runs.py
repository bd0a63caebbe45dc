# SPDX-License-Identifier: Apache-2.0
"""Runs that several tests compare with each other."""

import random
from pathlib import Path

from generate import Job, Result, generate
from models import write_model


def make_prompts() -> list[list[int]]:
    """Return prompts of several lengths; two have more tokens than a step."""
    draw = random.Random(1)
    return [[draw.randrange(3, 256) for _ in range(n)] for n in (5, 80, 17, 40, 3, 120)]


class Runs:
    """Runs jobs, and keeps their results, so that each job runs only once.

    Args:
        folder: A folder for the models and for the files of the ranks.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept: dict[Job, list[Result]] = {}

    def model(self, name: str) -> Path:
        """Return the folder of a model, and write the model first if it is missing."""
        folder = self.folder / name
        if not folder.exists():
            write_model(name, folder)
        return folder

    def results(
        self, name: str, dp: int, tp: int, dtype: str = "float32", compiled: bool = False
    ) -> list[Result]:
        """Return what is generated for make_prompts()."""
        prompts = tuple(map(tuple, make_prompts()))
        job = Job(self.model(name), dp, tp, dtype, compiled, prompts)
        if job not in self.kept:
            files = self.folder / f"run-{len(self.kept)}"
            files.mkdir()
            self.kept[job], logs = generate(job, files)
            is_used = "EPIC: expert-parallel rank 0 of" in logs
            assert is_used == (dp * tp > 1), "EPIC must be on if there are several ranks"
        return self.kept[job]
