# SPDX-License-Identifier: Apache-2.0
"""Prints which parts of the library the tests of a --coverage build have run.

python3 tools/coverage.py BUILD

Prints the lines of each folder. Functions that no test has called go to BUILD/uncalled.txt.
"""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "kernels/host", "include")
BATCH = 64  # number of files in one call of gcov

Lines = dict[str, dict[int, int]]
Functions = dict[tuple[str, str], int]


def read(build: Path, lines: Lines, functions: Functions) -> None:
    """Add up the counts of all programs of the build; a header counts once."""
    counted = [str(path) for path in sorted(build.rglob("*.gcda"))]
    for first in range(0, len(counted), BATCH):
        command = ["gcov", "--json-format", "--stdout", *counted[first : first + BATCH]]
        said = subprocess.run(command, cwd=build, check=True, capture_output=True, text=True)
        for unit in said.stdout.splitlines():
            report = json.loads(unit)
            for file in report["files"]:
                path = Path(report["current_working_directory"], file["file"]).resolve()
                if not path.is_relative_to(ROOT):
                    continue
                name = str(path.relative_to(ROOT))
                if not name.startswith(FOLDERS):
                    continue
                for line in file["lines"]:
                    at = line["line_number"]
                    lines[name][at] = lines[name].get(at, 0) + line["count"]
                for function in file["functions"]:
                    functions[name, function["name"]] += function["execution_count"]


def main() -> int:
    """Print the table; return 1 if nothing was counted."""
    build = Path(sys.argv[1]).resolve()
    lines: Lines = defaultdict(dict)
    functions: Functions = defaultdict(int)
    read(build, lines, functions)
    if not lines:
        print(f"{build} has counted nothing: make coverage", file=sys.stderr)
        return 1
    rooms: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, counts in lines.items():
        for room in (str(Path(name).parent), "all"):
            rooms[room][0] += sum(count > 0 for count in counts.values())
            rooms[room][1] += len(counts)
    print(f"{'folder':<24} {'lines':>7} {'run':>7}")
    for room in sorted(rooms, key=lambda room: (room == "all", room)):
        run, every = rooms[room]
        print(f"{room:<24} {every:>7} {run / every:>7.1%}")
    uncalled = sorted(f"{file}: {name}" for (file, name), count in functions.items() if not count)
    (build / "uncalled.txt").write_text("".join(line + "\n" for line in uncalled))
    print(f"{len(uncalled)} of {len(functions)} functions were never called: {build}/uncalled.txt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
