#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prepares the documentation for MkDocs.

Copies docs/ with its folders, the README as the first page and the other pages of the top folder,
and writes the references. The C reference is made from the headers. Those of Python are lists of
names that mkdocstrings fills from the docstrings. Links to files that are not pages become plain
text.

usage: site.py FOLDER       writes FOLDER/mkdocs.yml and FOLDER/pages
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOP = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "CHANGELOG.md": "project/changelog.md",
}
PACKAGES = ("torch", "jax")
MODULES = {"torch": (), "jax": ("linen", "nnx", "gemm")}  # public modules that are not in __all__
# Pages with single names, which are not those of one package.
PAGES = {
    "epic": ("read_trace", "TraceStep", "TraceWriter", "read_placement", "Placement", "Members"),
    "adapters": (
        "torch.megatron.use_epic",
        "torch.titan.epic",
        "torch.titan.EpicTokenDispatcher.Config",
        "torch.transformers.register",
        "vllm.options.Options",
    ),
}
HEADERS = ("placement.h", "epic_abi.h")  # headers that are printed as they are
PICTURE = re.compile(r"<picture>.*?srcset=\"(?P<dark>[^\"]+)\".*?alt=\"(?P<alt>[^\"]*)\""
                     r" src=\"(?P<light>[^\"]+)\".*?</picture>", re.S)  # fmt: skip


def list_pages() -> dict[Path, str]:
    """Return the page name of each Markdown file in the tree that is a page."""
    found = {ROOT / name: page for name, page in TOP.items()}
    docs = ROOT / "docs"
    return found | {path: str(path.relative_to(docs)) for path in sorted(docs.rglob("*.md"))}


def rewrite_links(text: str, source: Path, pages: dict[Path, str]) -> str:
    """Make links point to pages; a link to another file becomes plain text."""
    here = Path(pages[source]).parent

    def rewrite(match: re.Match[str]) -> str:
        words, target = match[1], match[2]
        if re.match(r"[a-z]+:", target) or target.startswith("#"):
            return match[0]
        path, _, anchor = target.partition("#")
        page = pages.get((source.parent / path).resolve())
        if page is None:
            return words
        return f"[{words}]({os.path.relpath(page, here)}{'#' + anchor if anchor else ''})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)
    parts[::2] = [re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", rewrite, part) for part in parts[::2]]
    return "".join(parts)


def rewrite_picture(match: re.Match[str]) -> str:
    """Replace <picture> by two images, because the site has its own switch of colors."""
    light, dark = (name.removeprefix("docs/") for name in (match["light"], match["dark"]))
    return f"![{match['alt']}]({light}#only-light)\n![{match['alt']}]({dark}#only-dark)"


def separate_lists(text: str) -> str:
    """Put an empty line before each list, which MkDocs needs and GitHub does not."""
    return re.sub(r"^(?!\s*(?:[-*]|\d+\.) |\s*$|```|\||#)(.+)\n((?:- |\d+\. ))", r"\1\n\n\2", text,
                  flags=re.M)  # fmt: skip


def public_names(source: Path) -> list[str]:
    """Return __all__ of a module, read without importing it."""
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    raise SystemExit(f"{source} has no __all__")


def python_directive(name: str, heading: str) -> list[str]:
    """Return the lines by which mkdocstrings prints one object under a heading."""
    return [f"::: {name}", "    options:", f"      heading: {heading}", ""]


def python_reference(package: str) -> str:
    """Return the directives by which mkdocstrings prints one Python package.

    A function may have the name of its module, as in epic.jax.moe.  A module of the package, as in
    epic.jax.sharded, is printed as the names in its __all__.
    """
    folder = ROOT / "bindings/python/epic" / package
    names = [*public_names(folder / "__init__.py"), *MODULES[package]]
    constants = [name for name in names if name.isupper()]
    lines = ["", "**Constants**: " + ", ".join(f"`{name}`" for name in constants), ""]
    for name in names:
        path, module = f"epic.{package}.{name}", folder / f"{name}.py"
        if name in constants:
            continue
        if not module.exists():
            lines += python_directive(path, path)
        elif re.search(rf"^def {name}\(", module.read_text(encoding="utf-8"), re.M):
            lines += python_directive(f"{path}.{name}", path)
        else:
            for member in public_names(module):
                lines += python_directive(f"{path}.{member}", f"{path}.{member}")
    return "\n".join(lines)


def print_header(name: str) -> str:
    """Return a chapter with a whole header, which begins with a comment that describes it."""
    text = (ROOT / "include/epic" / name).read_text(encoding="utf-8")
    return f"\n## epic/{name}\n\n```c\n{text.partition(chr(10))[2]}```\n"


def main() -> int:
    """Return the exit status of reference.py."""
    folder = Path(sys.argv[1])
    pages = folder / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    found = list_pages()
    for source, name in found.items():
        text = source.read_text(encoding="utf-8")
        text = PICTURE.sub(rewrite_picture, rewrite_links(text, source, found))
        (pages / name).parent.mkdir(parents=True, exist_ok=True)
        (pages / name).write_text(separate_lists(text), encoding="utf-8")
    for file in [*(ROOT / "docs").glob("*.svg"), ROOT / "docs/site.css"]:
        shutil.copy(file, pages)
    shutil.copy(ROOT / "docs/mkdocs.yml", folder)
    for package in PACKAGES:
        with (pages / f"reference/{package}.md").open("a", encoding="utf-8") as out:
            out.write(python_reference(package))
    for page, names in PAGES.items():
        with (pages / f"reference/{page}.md").open("a", encoding="utf-8") as out:
            for name in names:
                lines = python_directive(f"epic.{name}", f"epic.{name}")
                out.write("\n".join(["", *lines]))
    header, maker = ROOT / "include/epic/epic.h", ROOT / "tools/reference.py"
    command = [sys.executable, str(maker), str(header), str(pages / "reference/c.md")]
    status = subprocess.run(command, check=False).returncode
    with (pages / "reference/c.md").open("a", encoding="utf-8") as out:
        out.writelines(print_header(name) for name in HEADERS)
    return status


if __name__ == "__main__":
    sys.exit(main())
