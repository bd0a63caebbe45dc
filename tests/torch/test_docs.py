# SPDX-License-Identifier: Apache-2.0
"""The guide's program runs, as its first line says."""

import re
import subprocess
import sys
from pathlib import Path

import epic.torch
from ports import free_port

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = DOCS / "torch.md"
ADAPTERS = {"megatron", "titan"}  # modules that need their packages


def test_the_layer(tmp_path: Path) -> None:
    """With 4 processes."""
    text = GUIDE.read_text().split("## A layer")[1]
    code = re.search(r"\n\n((?: {4}.*\n|\n)+)", text)
    assert code is not None
    script = tmp_path / "this.py"
    script.write_text("\n".join(line[4:] for line in code[1].splitlines()))
    words = ["--nproc-per-node", "4", "--master-port", str(free_port()), str(script)]
    subprocess.run([sys.executable, "-m", "torch.distributed.run", *words], check=True, timeout=200)


def test_names() -> None:
    """Every name of epic.torch that the guides have is there."""
    for guide in (GUIDE, DOCS / "torch-frameworks.md"):
        names = set(re.findall(r"epic\.torch\.([A-Za-z_0-9]+)", guide.read_text()))
        assert {n for n in names - ADAPTERS if not hasattr(epic.torch, n)} == set()
