# SPDX-License-Identifier: Apache-2.0
"""Runs the programs of `make gpu-bench-layer`, shows their output, and prints a table of goals for
the layer: the goal, the value measured in this run, and whether the goal is reached.

layer_bars.py FOLDER_OF_PROGRAMS [OUTPUT]

OUTPUT: a file with the output of an earlier run, which is judged instead.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MOST = 300  # time limit of each program in seconds

# For each number of tokens, the time in us of a forward pass in a CUDA graph at commit 69eb564, on
# two H200 (docs/lab/cuda.md).
DECODED = {1: 97.4, 8: 226.8, 32: 269.4, 128: 280.4}

Row = tuple[str, str, float, bool]  # what is measured, goal, measured value, is the goal reached


def said_by(command: list[str]) -> str:
    """Return the output of a program, and show it while it runs. The program may end early."""
    lines = []
    print("$", *command, flush=True)
    words = ["timeout", "-k", "5", str(MOST), *command]
    run = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in run.stdout or ():
        print(line, end="", flush=True)
        lines.append(line)
    if run.wait() != 0:
        print(f"left out: the rest of {command[0]}, which ended with {run.returncode}", flush=True)
    return "".join(lines)


def libraries() -> str:
    """Return the folders in which epic.jax and epic.torch find their libraries."""
    given = os.environ.get("EPIC_LIBRARY_PATH")
    folders = [ROOT / "build" / name / "lib" for name in ("gpu-jax", "gpu-torch", ".")]
    return given or ":".join(str(folder) for folder in folders)


def all_said(programs: Path) -> str:
    """Return the output of all programs, which run one after the other with all GPUs."""
    os.environ["EPIC_LIBRARY_PATH"] = libraries()
    os.environ["PYTHONPATH"] = str(ROOT / "bindings" / "python")
    os.environ["JAX_PLATFORMS"] = "cuda,cpu"
    python = [sys.executable, "-W", "ignore"]
    in_jax = [*python, str(ROOT / "bench/gpu_jax.py"), "layer", "--ways", "core"]
    commands = (
        [str(programs / "gpu_layer")],
        [str(programs / "gpu_moe")],
        *([str(programs / "gpu_moe"), f"tokens={tokens}", "decode"] for tokens in DECODED),
        [*python, str(HERE / "layer_torch.py")],
        [*in_jax, "--c", str(programs / "gpu_moe")],
    )
    return "".join(map(said_by, commands))


# ------------------------------------------------------------------------------ bars ----


def at_least(what: str, bar: float, got: str) -> Row:
    """Return a row whose value must be at least the goal."""
    return what, f">= {bar:g}", float(got), float(got) >= bar


def at_most(what: str, bar: float, got: str) -> Row:
    """Return a row whose value must be at most the goal."""
    return what, f"<= {bar:g}", float(got), float(got) <= bar


def products(said: str) -> Iterator[Row]:
    """Yield the goals of products, with the groups of tiles that the library chooses."""
    bars = {"7168, n 4096": (725, 710), "2048, n 7168": (725, 705)}
    for shape, (forward, three) in bars.items():
        name = f"64 x 512 rows, k {shape}"
        pattern = rf"products, {name}.*?forward (\d+), three passes.*?(\d+) as chosen"
        for found in re.finditer(pattern, said, re.S):
            yield at_least(f"{name}: forward, TFLOP/s", forward, found[1])
            yield at_least(f"{name}: three passes, TFLOP/s", three, found[2])
    pattern = r"e4m3, 64 x 512 rows, k 7168.*?as chosen: .*?\(([\d.]+) times\)"
    for found in re.finditer(pattern, said, re.S):
        yield at_least("the first of them, e4m3: forward, times bf16", 1.6, found[1])


def experts(said: str) -> Iterator[Row]:
    """Yield the goals of the gated MLP, and of decoding."""
    pattern = r"^experts, 64 x 512.*?forward +([\d.]+) ms.*?backward +([\d.]+)"
    for found in re.finditer(pattern, said, re.M):
        yield at_most("experts, 64 x 512 rows: forward, ms", 4.4, found[1])
        yield at_most("experts: forward and backward, ms", 14.5, found[2])
    for found in re.finditer(r"decode, (bf16, 64 x [14] rows, .*?):.*?pairs.*?\((\d+) %\)", said):
        yield at_least(f"decode, {found[1]}: % of a read", 80, found[2])


def decoding(said: str) -> Iterator[Row]:
    """Yield the time of a layer with few tokens in a CUDA graph, relative to commit 69eb564."""
    pattern = r"decode, (Qwen3-30B), .*?, (2 ranks of (\d+) tokens): layer ([\d.]+) us"
    for found in re.finditer(pattern, said):
        if before := DECODED.get(int(found[3])):
            times = f"{float(found[4]) / before:.3f}"
            yield at_most(f"{found[1]} decodes, {found[2]}: times 69eb564", 0.85, times)


def parts(said: str) -> Iterator[Row]:
    """Yield the goals of the layer relative to its parts: timed alone, and on a GPU as warm as in
    the layer."""
    pattern = (
        r"layer, (7168, inner 2048, (?:8|128) a rank).*?parts.*?\(([\d.]+) x\)(.*?\(([\d.]+) x\))?"
    )
    for found in re.finditer(pattern, said):
        yield at_most(f"layer, {found[1]}: times its parts alone", 1.02, found[2])
        if found[4]:
            yield at_most(f"layer, {found[1]}: times its parts after layers", 1.02, found[4])


def against_torch(said: str) -> Iterator[Row]:
    """Yield the time of the layer relative to one with torch's products in EPIC's exchange; below 1
    is faster."""
    pattern = (
        r"compared with torch's products, (.*?): forward ([\d.]+), with backward ([\d.]+) times"
    )
    for found in re.finditer(pattern, said):
        yield at_most(f"{found[1]}: forward, times torch's", 1, found[2])
        yield at_most(f"{found[1]}: with backward, times torch's", 1, found[3])


def in_jax(said: str) -> Iterator[Row]:
    """Yield the time of JAX relative to C."""
    for found in re.finditer(r"layer, (.*?), \d+ ranks.*, core: .* and ([\d.]+) times", said):
        yield at_most(f"JAX, {found[1]}: with backward, times C", 1.05, found[2])


def main() -> None:
    """Show the output of the programs, then print the table."""
    programs = Path(sys.argv[1])
    said = Path(sys.argv[2]).read_text() if len(sys.argv) > 2 else all_said(programs)
    missing = []
    print(f"\n{'to be reached':66} {'wanted':>9} {'measured':>9}")
    for bars in (products, experts, decoding, parts, against_torch, in_jax):
        rows = list(bars(said))
        for what, wanted, got, holds in rows:
            print(f"{what:66} {wanted:>9} {got:9g}  {'holds' if holds else 'MISSED'}")
        if not rows:
            missing.append(bars.__name__)
    for name in missing:
        print(f"left out: {name.replace('_', ' ')}: no program has printed it")


if __name__ == "__main__":
    main()
