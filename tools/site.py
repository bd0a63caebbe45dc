#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Lays out the pages of the documentation for MkDocs: README as the first page, docs/*.md, what
stands beside README, and the reference made from the header.  Links to files that are no page
become their names.

usage: site.py FOLDER       writes FOLDER/mkdocs.yml and FOLDER/pages"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = {
    "Start": ["index", "tutorial", "launchers", "sizes", "glossary"],
    "Frameworks": ["jax", "torch", "torch-frameworks"],
    "Running": ["debugging", "traces", "reproducibility", "security", "benchmarks"],
    "How it works": ["design", "cuda", "cuda-diary", "hosts", "backends", "abi", "train_text"],
    "Reference": ["reference"],
    "Project": ["testing", "contributing", "reporting", "changelog"],
}
BESIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md", # docs/security.md has the other name
    "CHANGELOG.md": "changelog.md",
}  # fmt: skip


def sources() -> dict[Path, str]:
    """File of the tree -> name of its page."""
    found = {ROOT / name: page for name, page in BESIDE.items()}
    return found | {path: path.name for path in sorted((ROOT / "docs").glob("*.md"))}


def relinked(text: str, source: Path, pages: dict[Path, str]) -> str:
    """Links as they are among the pages."""

    def link(match: re.Match[str]) -> str:
        words, target = match[1], match[2]
        if re.match(r"[a-z]+:", target) or target.startswith("#"):
            return match[0]
        path, _, anchor = target.partition("#")
        page = pages.get((source.parent / path).resolve())
        if page is None:
            return words
        return f"[{words}]({page}{'#' + anchor if anchor else ''})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)
    parts[::2] = [re.sub(r"\[([^\]\n]*)\]\(([^)\s]+)\)", link, part) for part in parts[::2]]
    return "".join(parts).replace('"docs/step-', '"step-')


def lists(text: str) -> str:
    """A blank line before lists: GitHub needs none, MkDocs does."""
    return re.sub(r"^(?!\s*(?:[-*]|\d+\.) |\s*$|```|\||#)(.+)\n((?:- |\d+\. ))", r"\1\n\n\2", text,
                  flags=re.M)  # fmt: skip


def write_config(folder: Path) -> None:
    """The navigation has every page once."""
    lines = ["site_name: EPIC", "docs_dir: pages", "site_dir: site", "theme: readthedocs",
             "use_directory_urls: false", "validation:", "  anchors: warn", "  nav:",
             "    omitted_files: warn", "markdown_extensions:", "  - tables", "  - fenced_code",
             "  - toc:", "      permalink: true", "nav:"]  # fmt: skip
    for chapter, names in CHAPTERS.items():
        lines.append(f"  - {chapter}:")
        lines += [f"      - {name}.md" for name in names]
    (folder / "mkdocs.yml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    """What reference.py returns."""
    folder = Path(sys.argv[1])
    pages = folder / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    pages.mkdir(parents=True)
    found = sources()
    for source, name in found.items():
        text = relinked(source.read_text(encoding="utf-8"), source, found)
        (pages / name).write_text(lists(text), encoding="utf-8")
    for picture in (ROOT / "docs").glob("*.svg"):
        shutil.copy(picture, pages)
    write_config(folder)
    header, maker = ROOT / "include/epic/epic.h", ROOT / "tools/reference.py"
    command = [sys.executable, str(maker), str(header)]
    return subprocess.run([*command, str(pages / "reference.md")], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
