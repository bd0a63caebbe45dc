# SPDX-License-Identifier: Apache-2.0
"""Tests programs without torch that torchrun starts."""

import os
import subprocess
import sys
from pathlib import Path

from world import free_port

STEP = Path(os.environ["EPIC_LIBRARY_PATH"].split(":")[0]).parent / "examples" / "step"


def test_c_program() -> None:
    """Check that the ranks of a C program do not use the port of torchrun's own store."""
    assert STEP.exists(), "build the target example_step"
    words = ["--no-python", "--nproc-per-node", "2", "--master-port", str(free_port()), str(STEP)]
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("returned as 19") == 2, ended.stdout
