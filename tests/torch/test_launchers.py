# SPDX-License-Identifier: Apache-2.0
"""Tests programs without torch that torchrun starts."""

import os
from pathlib import Path

from world import run_torchrun

STEP = Path(os.environ["EPIC_LIBRARY_PATH"].split(":")[0]).parent / "examples" / "step"


def test_c_program() -> None:
    """Check that the ranks of a C program do not use the port of torchrun's own store."""
    assert STEP.exists(), "build the target example_step"
    said = run_torchrun("--no-python", "--nproc-per-node", "2", str(STEP))
    assert said.count("returned as 19") == 2, said
