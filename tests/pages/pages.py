# SPDX-License-Identifier: Apache-2.0
"""Reads the code blocks of the documentation, for the tests that run them.

A Python block that imports epic.torch or epic.jax is a whole program.  Its first line may be a
comment with torchrun's command, which says how many processes it takes.  Other Python blocks are
parts of a program: tests find them by their first words.
"""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Program(NamedTuple):
    """A whole program: the page, its number there, how many processes it takes, and its text."""

    page: str
    number: int
    processes: int
    text: str


def list_pages() -> list[Path]:
    """Return every Markdown file of the tree."""
    patterns = ("*.md", "docs/**/*.md", ".github/**/*.md")
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern))


def list_blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of one language."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def find_block(page: Path, begin: str) -> str:
    """Return the Python block that begins with these words."""
    found = [block for block in list_blocks(page, "python") if block.startswith(begin)]
    assert len(found) == 1, f"{page}: {len(found)} blocks begin with {begin!r}"
    return found[0]


def list_programs(package: str) -> list[Program]:
    """Return the whole programs that import epic.<package>, of README and the guide."""
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs/guide").glob("*.md"))]:
        for number, text in enumerate(list_blocks(page, "python")):
            if re.search(rf"^import .*\bepic\.{package}\b", text, re.M):
                wanted = re.match(r"# torchrun --nproc-per-node (\d+) ", text)
                processes = int(wanted[1]) if wanted else 1
                found.append(Program(page.stem, number, processes, text))
    return found
