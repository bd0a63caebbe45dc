#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the documentation: links, anchors, code blocks, commands, names and the picture.

Links must lead to files and headings, every page must be in the menu of the site, C blocks must
compile, Python blocks must parse and be run by a test, and commands must name targets, files and
options that exist (commands.py).  Names of EPIC in the tables of other-libraries.md must exist.
With a library the whole C programs and the commands of docs/guide/traces.md run too, as one rank,
and so does the block of docs/guide/several-hosts.md that measures a network.

usage: check.py [--library LIBEPIC] CC [FLAG...]"""

import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from commands import bad_commands, bad_runs
from pages import NOT_RUN, ROOT, list_blocks, list_found_blocks, list_pages, list_programs

# Text around blocks that are parts of a program.  Whole programs include their own headers.
BEFORE = {
    "docs/guide/launching.md": "#include <mpi.h>\n#include <epic/epic.h>\n"
    "extern int level;\nextern struct ncclComm *nccl_comm;\n"
    "int main(int argc, char **argv)\n{\n    epic_context *ctx;\n",
    "docs/internals/backends.md": '#include "backend/transport.h"\n'
    "bool can_join(const epic_peer *, int, const epic_config *, char *);\n"
    "epic_result join(epic_group **, const epic_join *);\n"
    "void leave(epic_group *), forget(epic_group *);\n"
    "epic_result memory(const epic_config *, epic_memory_info *);\n"
    "extern const epic_transport transport;\n",
}
AFTER = {"docs/guide/launching.md": "    return 0;\n}\n"}


def without_code(text: str) -> str:
    """Remove blocks and spans of code, in which nothing is a link."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes from the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    found = set()
    for heading in re.findall(r"^#+ (.*)$", text, flags=re.M):
        kept = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(kept.strip().replace(" ", "-"))
    return found


def bad_links() -> list[str]:
    """Return dead links and anchors of all pages; addresses of the web are not opened."""
    bad = []
    for page in list_pages():
        text = without_code(page.read_text(encoding="utf-8"))
        links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
        for link in links:
            path, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link):
                continue
            target = (page.parent / path).resolve() if path else page
            where = f"{page.relative_to(ROOT)}: {link}"
            if not target.exists():
                bad.append(f"{where}: there is no such file")
            elif anchor and anchor not in anchors(target):
                bad.append(f"{where}: there is no such heading")
    return bad


def missing_pages() -> list[str]:
    """Return pages, other than those of docs/lab, that the menu of the site does not have."""
    menu = (ROOT / "docs/mkdocs.yml").read_text(encoding="utf-8")
    names = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    return [f"docs/{name} is not in the menu of docs/mkdocs.yml" for name in sorted(names)
            if not name.startswith("lab/") and f": {name}\n" not in menu]  # fmt: skip


def bad_code(compiler: list[str]) -> tuple[int, list[str]]:
    """Count the C blocks, and return those that do not compile."""
    num, bad = 0, []
    for page in list_pages():
        name = str(page.relative_to(ROOT))
        for block in list_blocks(page, "c"):
            num += 1
            whole = (
                block if "#include" in block else BEFORE.get(name, "") + block + AFTER.get(name, "")
            )
            if "mpi.h" in whole and not has_mpi(compiler):
                continue
            with tempfile.NamedTemporaryFile("w", suffix=".c") as file:
                file.write(whole)
                file.flush()
                command = [*compiler, "-fsyntax-only", file.name]
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=60, check=False
                )
            if done.returncode:
                bad.append(f"{name}: a block of C does not compile:\n{done.stderr}")
    return num, bad


def bad_python() -> list[str]:
    """Return Python blocks that do not parse."""
    bad = []
    for page in list_pages():
        for block in list_blocks(page, "python"):
            try:
                compile(block, str(page.relative_to(ROOT)), "exec")
            except SyntaxError as error:
                bad.append(f"{page.relative_to(ROOT)}: {error}: {error.text}")
    return bad


def untested_python() -> list[str]:
    """Return Python blocks that no test of the packages runs.  Blocks of the recipe are excerpts of
    scripts that tests run."""
    programs = {program.text for package in ("torch", "jax") for program in list_programs(package)}
    named = [*list_found_blocks(), *((page, begin) for page, begin, _ in NOT_RUN)]
    bad = []
    for page in list_pages():
        begins = tuple(begin for name, begin in named if name == page.stem)
        for block in list_blocks(page, "python"):
            if block in programs or block.startswith(begins) or page.stem == "recipe":
                continue
            bad.append(
                f"{page.relative_to(ROOT)}: no test runs this block; write one, or add the block "
                f"to NOT_RUN of tests/pages/pages.py with a reason:\n{block}"
            )
    return bad


def bad_excerpts() -> list[str]:
    """Return Python blocks of the recipe that are in none of the scripts which it explains."""
    page = ROOT / "docs/guide/recipe.md"
    scripts = [(ROOT / f"examples/{name}/recipe.py").read_text() for name in ("torch", "jax")]
    lines = ["\n".join(line.strip() for line in script.splitlines()) for script in scripts]
    bad = []
    for block in list_blocks(page, "python"):
        wanted = "\n".join(line.strip() for line in block.splitlines())
        if not any(wanted in script for script in lines):
            bad.append(f"docs/guide/recipe.md: no script contains this block:\n{block}")
    return bad


def bad_names() -> list[str]:
    """Return the names of EPIC in the tables of other-libraries.md that do not exist."""
    page = ROOT / "docs/reference/other-libraries.md"
    headers = "".join(h.read_text(encoding="utf-8") for h in (ROOT / "include/epic").glob("*.h"))
    in_c = set(re.findall(r"\w+", headers))
    bad = []
    for name in re.findall(
        r"\b(?:epic_|EPIC_|epic\.(?:torch|jax)\.)[\w.]+", page.read_text("utf-8")
    ):
        parts = name.rstrip(".").split(".")
        if parts[0] != "epic":  # a type, a field, a function or a constant of C
            bad += [f"{page.name}: no {word} in the header" for word in set(parts) - in_c]
            continue
        classes = [i for i, part in enumerate(parts) if part[0].isupper()]
        last = classes[0] if classes else len(parts) - 1  # after a class follow its methods
        module, name = parts[:last], parts[last]
        folder = ROOT / "bindings/python" / "/".join(module)
        source = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        if not source.exists() or f'"{name}"' not in source.read_text(encoding="utf-8"):
            bad.append(f"{page.name}: no {name} in __all__ of {'.'.join(module)}")
    return bad


def bad_programs(compiler: list[str], library: Path) -> tuple[int, list[str]]:
    """Run the C blocks that have a main; count them, and return those that fail."""
    num, bad = 0, []
    strangers = ("RANK", "WORLD_SIZE", "EPIC_", "OMPI_", "PMI", "SLURM")
    alone = {k: v for k, v in os.environ.items() if not k.startswith(strangers)}
    for page in list_pages():
        for block in list_blocks(page, "c"):
            if "int main(" not in block:
                continue
            num += 1
            with tempfile.TemporaryDirectory() as folder:
                source, program = Path(folder, "program.c"), Path(folder, "program")
                source.write_text(block, encoding="utf-8")
                link = [str(library), f"-Wl,-rpath,{library.parent}", "-o", str(program)]
                for command in ([*compiler, str(source), *link], [str(program)]):
                    done = subprocess.run(
                        command, capture_output=True, text=True, timeout=60, check=False, env=alone
                    )
                    if done.returncode:
                        bad.append(f"{page.name}: {command[0]}: {done.stdout}{done.stderr}")
                        break
    return num, bad


def bad_traces(compiler: list[str], library: Path) -> tuple[int, list[str]]:
    """Run the commands of docs/guide/traces.md on a trace of examples/step.c with more experts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        link = [str(library), f"-Wl,-rpath,{library.parent}", "-o", str(folder / "step")]
        source = (ROOT / "examples/step.c").read_text(encoding="utf-8")
        many = source.replace("EXPERTS = 8", "EXPERTS = 64")  # enough experts for 8 ranks and more
        (folder / "step.c").write_text(many, encoding="utf-8")
        command = [*compiler, str(folder / "step.c"), *link]
        subprocess.run(command, timeout=60, check=True)
        alone = {"EPIC_TRACE": str(folder / "run"), "PATH": os.environ["PATH"]}
        subprocess.run(
            [folder / "step"], stdout=subprocess.DEVNULL, timeout=60, check=True, env=alone
        )
        return bad_runs(ROOT / "docs/guide/traces.md", library.parent.parent / "bin", folder)


def bad_report(programs: Path) -> list[str]:
    """Run the block of docs/guide/several-hosts.md that measures a network of one machine."""
    page = ROOT / "docs/guide/several-hosts.md"
    (block,) = (b for b in list_blocks(page, "sh") if b.startswith("# four processes of this"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        block = block.replace("29500", str(free.getsockname()[1]))
    with tempfile.TemporaryDirectory() as folder:
        alone = {"PATH": f"{programs}:{os.environ['PATH']}"}
        subprocess.run(["sh", "-e"], input=block, text=True, cwd=folder, timeout=60, check=True,
                       env=alone, stdout=subprocess.DEVNULL)  # fmt: skip
        report = Path(folder, "report.txt").read_text(encoding="utf-8")
    rows = re.findall(r"^ +[0-3](?: +\d+\.\d+){4}$", report, re.M)
    measured = len(rows) == 4 or "UCX none" in report
    return [] if measured else [f"{page.name}: the report has no table of bandwidth:\n{report}"]


def has_mpi(compiler: list[str]) -> bool:
    """Return whether the compiler finds mpi.h."""
    command = [*compiler, "-fsyntax-only", "-include", "mpi.h", "-x", "c", "/dev/null"]
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


def main() -> int:
    """Return 1 if something is wrong."""
    bad = (
        bad_links()
        + missing_pages()
        + bad_python()
        + untested_python()
        + bad_excerpts()
        + bad_names()
    )
    drawn = subprocess.run([sys.executable, str(ROOT / "tools/picture.py"), "--check"], check=False)
    if drawn.returncode:
        bad.append("docs/step-*.svg: run tools/picture.py")
    flags = ["-std=c11", "-Wall", "-Werror", "-D_GNU_SOURCE", f"-I{ROOT}/include", f"-I{ROOT}/src"]
    arguments = sys.argv[1:]
    library = None
    if arguments[0] == "--library":
        library, arguments = Path(arguments[1]), arguments[2:]
    num, code = bad_code([*arguments, *flags])
    bad += code
    said, commands = bad_commands(list_pages(), library.parent.parent / "bin" if library else None)
    bad += commands
    ran = traced = 0
    if library:
        ran, programs = bad_programs([*arguments, *flags], library)
        traced, runs = bad_traces([*arguments, *flags], library)
        bad += programs + runs + bad_report(library.parent.parent / "bin")
    print("\n".join(bad))
    print(f"{len(list_pages())} pages, {num} blocks of C, {ran} programs run, {said} commands, "
          f"{traced} run, {len(bad)} things wrong")  # fmt: skip
    few = num < 7 or said < 100 or (library and (ran < 4 or traced < 17))
    return 1 if bad or few else 0


if __name__ == "__main__":
    sys.exit(main())
