# SPDX-License-Identifier: Apache-2.0
"""Reads the code blocks of the documentation, for the tests that run them.

A Python block that imports epic.torch or epic.jax is a whole program.  Other Python blocks are
parts of a program: tests find them by their first words with find_block().  check.py fails for a
block that is neither a program nor found by a test nor in NOT_RUN.
"""

import ast
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


# Python blocks that no test runs: the page, the first words, and the reason.
NOT_RUN = [
    ("frameworks", "from epic.torch.megatron import use_epic", "it needs a model of Megatron-Core; "
     "test_megatron.py calls use_epic with one in make test-torch-adapters"),
    ("torch", "import torch.distributed._symmetric_memory", "it needs GPUs; the case windows of "
     "tests/torch/gpu/gpu_cases.py registers such memory in make gpu-test-torch"),
]  # fmt: skip


class Program(NamedTuple):
    """A whole program: the page, its number there, and its text."""

    page: str
    number: int
    text: str


def list_pages() -> list[Path]:
    """Return every Markdown file of the tree."""
    patterns = ("*.md", "docs/**/*.md", ".github/**/*.md")
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern))


def list_blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of one language."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def find_block(page: str, begin: str) -> str:
    """Return the Python block of a page of the guide that begins with these words."""
    path = ROOT / f"docs/guide/{page}.md"
    found = [block for block in list_blocks(path, "python") if block.startswith(begin)]
    assert len(found) == 1, f"{path}: {len(found)} blocks begin with {begin!r}"
    return found[0]


def list_programs(package: str) -> list[Program]:
    """Return the whole programs that import epic.<package>, of README and the guide."""
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs/guide").glob("*.md"))]:
        for number, text in enumerate(list_blocks(page, "python")):
            if re.search(rf"^import .*\bepic\.{package}\b", text, re.M):
                found.append(Program(page.stem, number, text))
    return found


def list_found_blocks() -> list[tuple[str, str]]:
    """Return the page and the first words of every block that a test finds with find_block()."""
    found = []
    for path in [*(ROOT / "tests/torch").glob("*.py"), *(ROOT / "tests/jax").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "find_block":
                page, begin = (ast.literal_eval(argument) for argument in node.args)
                found.append((page, begin))
    return found
