# SPDX-License-Identifier: Apache-2.0
"""Compares two builds of gpu_bench, which run in turn on the same GPUs.

compare.py BEFORE AFTER [--rounds 3] [--limit 1.0] [OPTION=VALUE ...]

BEFORE, AFTER: the two programs. OPTION=VALUE: options of gpu_bench, in place of the cases below. In
each round both programs run each case, and the program that runs first alternates. The result for a
figure is the median over the rounds. The exit status is 1 if a figure became slower by more than
--limit percent and by more than 0.1 us, the resolution of a GPU's clock.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

MODELS = ("deepseek-v3", "gpt-oss-120b", "qwen3-30b")
CASES = [
    *([f"model={model}", "ops=PDCGBL", "tokens=4096", "sms=64,132"] for model in MODELS),
    ["alignment=1", "ops=PDCL", "tokens=1,8,128", "sms=64"],
    ["type=e4m3", "scales=128", "quantize=1", "ops=PD", "tokens=4096", "sms=64"],
    ["layout=flat", "ops=PU", "tokens=4096", "sms=32"],
]
NAMED_BY = (
    "op", "hidden", "top_k", "experts", "type", "quantize", "scales", "layout", "alignment",
    "padding", "routing", "windows", "tokens", "sms",
)  # fmt: skip
CLOCK_US = 0.1
MOST = 120  # time limit of each run in seconds

Figures = dict[tuple[str, ...], list[float]]


def run(program: Path, case: list[str], figures: Figures) -> None:
    """Run a program once, and add its figures to those of this program."""
    with tempfile.NamedTemporaryFile(suffix=".json") as results:
        command = ["timeout", "-k", "5", str(MOST), str(program), *case, f"json={results.name}"]
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if ended.returncode != 0:
            sys.exit(f"{ended.stdout}{program} {' '.join(case)} ended with {ended.returncode}")
        for line in Path(results.name).read_text().splitlines():
            figure = json.loads(line)
            figures[tuple(str(figure.get(name, 0)) for name in NAMED_BY)].append(figure["us"])


def run_alternately(programs: list[Path], cases: list[list[str]], rounds: int) -> list[Figures]:
    """Return the figures of each program."""
    figures: list[Figures] = [defaultdict(list) for _ in programs]
    for case in cases:
        for number in range(rounds):
            order = range(len(programs))
            for which in order if number % 2 == 0 else reversed(order):
                run(programs[which], case, figures[which])
    return figures


def table(before: Figures, after: Figures, limit: float) -> int:
    """Print all figures that both programs have, and return how many became slower."""
    slower = 0
    width = max(len(" ".join(name)) for name in (NAMED_BY, *after))
    print(f"{' '.join(NAMED_BY):{width}} {'before us':>10} {'after us':>10} {'after / before':>15}")
    for name, figures in after.items():
        if name not in before:
            continue
        was, now = statistics.median(before[name]), statistics.median(figures)
        worse = now > was * (1 + limit / 100) and now > was + CLOCK_US
        slower += worse
        said = "  SLOWER" if worse else ""
        print(f"{' '.join(name):{width}} {was:10.2f} {now:10.2f} {now / was:15.3f}{said}")
    return slower


def main() -> None:
    """Run the comparison of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=1.0, help="percent")
    parser.add_argument("options", nargs="*", metavar="OPTION=VALUE")
    args = parser.parse_intermixed_args()
    cases = [args.options] if args.options else CASES
    before, after = run_alternately(
        [args.before.resolve(), args.after.resolve()], cases, args.rounds
    )
    slower = table(before, after, args.limit)
    print(f"{slower} of {len(after)} figures became slower by more than {args.limit} %")
    sys.exit(slower > 0)


if __name__ == "__main__":
    main()
