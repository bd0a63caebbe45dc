# SPDX-License-Identifier: Apache-2.0
"""Checks the commands of the documentation: targets of make, files, extras of pip, and options of
our programs, benchmarks and examples must exist.  Commands of epic-trace and epic-place run.
"""

import re
import shlex
import shutil
import struct
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = ("epic-trace", "epic-place", "epic-info", "epic-sim")
FILES = re.compile(r"^(?:examples|bench|tests|tools)/[\w/.-]+\.(?:py|sh)$")


def blocks(text: str) -> list[str]:
    """Return the blocks of shell."""
    return re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)


def commands(text: str) -> list[list[str]]:
    """Return the words of each command in blocks of shell, indented lines and code spans."""
    lines = [line for block in blocks(text) for line in block.splitlines()]
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    words_ = rf"make|pip|python|torchrun|git|mpiexec|gpu_\w+|(?:build|bench)/\S+|{'|'.join(OURS)}"
    begins = rf"(?:\w+=\S+ )*(?:{words_}) "
    lines += re.findall(rf"^ {{4}}({begins}.*)$", text, re.M)
    lines += re.findall(rf"`((?:sudo )?{begins}[^`]*)`", text)
    found = []
    for line in lines:
        words: list[str] = []
        splitter = shlex.shlex(line, posix=True, punctuation_chars=True)
        splitter.whitespace_split = True
        try:
            parts = list(splitter)
        except ValueError:
            parts = line.split("#")[0].split()
        for word in [*parts, ";"]:
            if set(word) <= set("();<>|&"):
                found.append(words)
                words = []
            elif words or not re.match(r"^(?:sudo$|\w+=)", word):
                words.append(word)
    return [words for words in found if words]


def targets() -> set[str]:
    """Return the targets of all makefiles."""
    found: set[str] = set()
    for path in (ROOT / "Makefile", *ROOT.glob("*.mk")):
        for line in re.findall(r"^([a-z][\w -]*):", path.read_text(encoding="utf-8"), re.M):
            found |= set(line.split())
    return found


def helps(programs: Path) -> dict[str, str]:
    """Return what each of our programs prints for --help."""
    return {
        name: subprocess.run(
            [programs / name, "--help"], capture_output=True, text=True, timeout=60, check=False
        ).stdout
        for name in OURS
    }


def sources(program: str) -> list[Path]:
    """Return the sources in which a program of the tree reads its options."""
    found: list[Path] = []
    if built := re.match(r"^build/(bench|examples)/(\w+)$", program):
        folder, name = ROOT / built[1], built[2]
        found = [folder / f"{name}.c", folder / "inner" / f"{name}.c", *folder.glob(f"{name}/*.c")]
    elif on_gpu := re.match(r"^(?:build/gpu/)?gpu_(\w+)$", program):
        found = [*(ROOT / "bench/gpu").glob(f"{on_gpu[1]}.c*")]
    elif re.match(r"^(?:bench|examples)/[\w/]+\.py$", program):
        shared = [*(ROOT / "examples/common").glob("*.py")] if program.startswith("ex") else []
        path = ROOT / program
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        modules = re.findall(r"^from (\w+) import", text, re.MULTILINE)  # also those of its folder
        found = [path, *(path.with_name(f"{name}.py") for name in modules), *shared]
    return [path for path in found if path.exists()]


def unread(words: list[str]) -> list[str]:
    """Return options, --NAME or NAME=VALUE, that a benchmark or an example does not read."""
    for at, program in enumerate(words):
        if not (paths := sources(program)):
            continue
        text = "".join(path.read_text(encoding="utf-8") for path in paths)
        options = [w.split("=")[0] for w in words[at + 1 :] if re.match(r"^(?:--)?[a-z][\w-]*=", w)]
        options += [w for w in words[at + 1 :] if re.match(r"^--[a-z-]+$", w)]
        return [f"{program} does not read {o}" for o in options if not re.search(f'"{o}["=]', text)]
    return []


def wrong_words(words: list[str], there: set[str], said: dict[str, str]) -> list[str]:
    """Return what a command names that does not exist."""
    bad = [f"there is no {w}" for w in words if FILES.match(w) and not (ROOT / w).exists()]
    bad += unread(words)
    if words[0] == "make":
        names = [w for w in words[1:] if re.match(r"^[a-z][\w-]*$", w)]
        bad += [f"no makefile has the target {name}" for name in names if name not in there]
    if words[0] == "pip":
        known = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        extras = re.findall(r"\.\[([\w,]+)\]", " ".join(words))
        names = [name for extra in extras for name in extra.split(",")]
        bad += [f"no extra {n} in pyproject.toml" for n in names if f"\n{n} = " not in known]
    if words[0] in OURS and said:
        options = [w.split("=")[0] for w in words[1:] if w.startswith("--")]
        if words[0] == "epic-trace" and len(words) > 1 and re.match(r"^[a-z]", words[1]):
            options.append(f"epic-trace {words[1]}")
        bad += [f"{words[0]} --help does not say {option}" for option in options
                if not re.search(rf"{option}(?![\w-])", said[words[0]])]  # fmt: skip
    return bad


def bad_commands(pages: list[Path], programs: Path | None) -> tuple[int, list[str]]:
    """Count the commands, and return what is wrong with them."""
    num, bad = 0, []
    there, said = targets(), helps(programs) if programs else {}
    for page in pages:
        text = page.read_text(encoding="utf-8")
        name = page.relative_to(ROOT)
        for block in blocks(text):
            done = subprocess.run(["sh", "-n"], input=block, capture_output=True, text=True,
                                  timeout=60, check=False)  # fmt: skip
            if done.returncode:
                bad.append(f"{name}: {done.stderr}")
        for words in commands(text):
            num += 1
            bad += [
                f"{name}: {shlex.join(words)}: {why}" for why in wrong_words(words, there, said)
            ]
    return num, bad


def write_loads(path: Path) -> None:
    """Write a table of loads [layers, experts] as numpy.save does, of a model of 58 layers."""
    layers, experts = 58, 256
    loads = [(i // experts * 7919 + i * 104729) % 1000 for i in range(layers * experts)]
    shape = (layers, experts)
    header = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    body = struct.pack(f"<{len(loads)}i", *loads)
    path.write_bytes(b"\x93NUMPY\x01\x00\x76\x00" + header.encode() + body)


def bad_runs(page: Path, programs: Path, folder: Path) -> tuple[int, list[str]]:
    """Run the commands of epic-trace and epic-place of a page in `folder`, which has a trace in
    `run`, and on a table of loads; count them, and return those that fail."""
    write_loads(folder / "loads.npy")
    num, bad = 0, []
    text = "\n".join(blocks(page.read_text(encoding="utf-8")))
    lines = [line.split("#")[0].strip().replace("/tmp/", "") for line in text.splitlines()]
    lines = [line for line in lines if line.startswith(("epic-trace", "epic-place"))]
    lines.sort(key=lambda line: not line.startswith("epic-place"))  # replay --place needs a place
    for line in lines:
        num += 1
        words = line.split()
        words[0] = str(programs / words[0])
        done = subprocess.run(
            words, cwd=folder, capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode:
            bad.append(f"{page.name}: {line}: {done.stderr}")
    shutil.rmtree(folder / "run2", ignore_errors=True)
    return num, bad
