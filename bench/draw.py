#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the results of `make bench`, and prints them as tables for docs/guide/benchmarks.md.

python bench/draw.py build/bench/results.json build/bench/results.svg

The upper part of the picture shows the ratio of each time to that of the strong form on MPI. 1 is
equal, and the thin line goes from quartile to quartile. The lower part shows how EPIC's times grow.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

Row = dict[str, Any]
LEFT, WIDTH, BAR, GAP = 290, 560, 12, 10
MOST = 4.0  # end of the axis of ratios
COLOURS = {"EPIC shm": "#2f6fd0", "EPIC mpi": "#2c9a5b", "MPI simple": "#c08a2b"}
OPERATIONS = ("plan + dispatch", "combine", "gradients", "layer")
CASE = ("operation", "hidden", "tokens", "ranks")


def read(path: Path) -> list[Row]:
    """Return the lines of the file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def case_of(row: Row) -> tuple[Any, ...]:
    """Return the values that are equal for both times of a ratio."""
    return tuple(row[name] for name in CASE) + (row["experts"],)


def compared(rows: list[Row]) -> dict[tuple[Any, ...], dict[str, Row]]:
    """Return case -> form -> row, for cases that have the strong form. The forms on MPI run
    together with each backend. The faster run counts."""
    cases: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        ways = cases.setdefault(case_of(row), {})
        fastest = ways.get(row["way"])
        if fastest is None or row["median_us"] < fastest["median_us"]:
            ways[row["way"]] = row
    found = {case: ways for case, ways in cases.items() if "MPI strong" in ways}
    return dict(
        sorted(found.items(), key=lambda item: (OPERATIONS.index(item[0][0]), *item[0][1:]))
    )


def text(x: float, y: float, words: str, more: str = "") -> str:
    """Return a text element of the picture."""
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{words}</text>'


def at(ratio: float) -> float:
    """Return the position of a ratio on the axis."""
    return LEFT + WIDTH * min(ratio, MOST) / MOST


def ratio_bars(cases: dict[tuple[Any, ...], dict[str, Row]], top: float) -> tuple[list[str], float]:
    """Draw a bar for each form of each case."""
    lines, y = [], top
    for case, ways in cases.items():
        strong = ways["MPI strong"]["median_us"]
        ours = [way for way in COLOURS if way in ways]
        words = f"{case[0]}, hidden {case[1]}, T = {case[2]}, {case[3]} ranks"
        lines.append(text(LEFT - 8, y + len(ours) * BAR / 2 + 4, words, 'text-anchor="end"'))
        for way in ours:
            row = ways[way]
            ratio = strong / row["median_us"]
            low, high = strong / row["high_us"], strong / row["low_us"]
            middle = y + BAR / 2 - 1
            lines.append(
                f'<rect x="{LEFT}" y="{y:.1f}" width="{at(ratio) - LEFT:.1f}" height="{BAR - 2}" '
                f'fill="{COLOURS[way]}"/><line x1="{at(low):.1f}" x2="{at(high):.1f}" '
                f'y1="{middle:.1f}" y2="{middle:.1f}" stroke="#222"/>'
            )
            lines.append(
                text(at(max(ratio, high)) + 5, y + BAR - 3, f"{ratio:.2f}", 'font-size="10"')
            )
            y += BAR
        y += GAP
    lines.insert(
        0,
        f'<line x1="{at(1):.1f}" x2="{at(1):.1f}" y1="{top - 6:.1f}" y2="{y:.1f}" stroke="#999" '
        'stroke-dasharray="3 3"/>',
    )
    return lines, y


def growth(rows: list[Row], name: str, fixed: dict[str, Any]) -> list[Row]:
    """Return EPIC's rows of one operation in which only `name` differs."""
    chosen = [
        row
        for row in rows
        if row["way"] == "EPIC shm" and not row["inner"]
        and all(row[key] == value for key, value in fixed.items())
    ]  # fmt: skip
    return sorted({row[name]: row for row in chosen}.values(), key=lambda row: row[name])


def curve(rows: list[Row], name: str, title: str, x: float, y: float) -> list[str]:
    """Draw time over a number, both on logarithmic axes."""
    wide, high = 230.0, 150.0
    if len(rows) < 2:
        return []
    logs = [(math.log10(row[name]), math.log10(row["median_us"])) for row in rows]
    first, last = logs[0][0], logs[-1][0]
    low, top = math.floor(min(v for _, v in logs)), math.ceil(max(v for _, v in logs))
    places = [
        (x + wide * (a - first) / (last - first), y + high * (1 - (b - low) / max(top - low, 1)))
        for a, b in logs
    ]
    lines = [text(x, y - 12, title)]
    for power in range(low, top + 1):
        level = y + high * (1 - (power - low) / max(top - low, 1))
        lines.append(f'<line x1="{x}" x2="{x + wide}" y1="{level}" y2="{level}" stroke="#ddd"/>')
        lines.append(
            text(x - 5, level + 4, f"{10.0**power:g} us", 'text-anchor="end" font-size="10"')
        )
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
    lines.append(f'<polyline fill="none" stroke="#2f6fd0" stroke-width="2" points="{points}"/>')
    for (a, b), row in zip(places, rows, strict=True):
        lines.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="#2f6fd0"/>')
        lines.append(text(a, y + high + 14, f"{row[name]}", 'text-anchor="middle" font-size="9"'))
    return lines


def draw(rows: list[Row]) -> str:
    """Return the whole picture."""
    cases = compared(rows)
    bars, y = ratio_bars(cases, 70)
    alone: Row = {"operation": "plan + dispatch", "hidden": 2048}
    tokens = growth(rows, "tokens", alone | {"ranks": 4, "experts": 64})
    ranks = growth(rows, "ranks", alone | {"tokens": 64, "experts": 64})
    experts = growth(rows, "experts", alone | {"tokens": 256, "ranks": 4})
    bars += curve(tokens, "tokens", "plan + dispatch by tokens, 4 ranks", 60, y + 50)
    bars += curve(ranks, "ranks", "by ranks, 64 tokens each", 360, y + 50)
    bars += curve(experts, "experts", "by experts, 256 tokens", 660, y + 50)
    height = y + (240 if len(tokens) > 1 else 20)
    cores = rows[0]["cores"] if rows else 0
    key = "  ".join(f'<tspan fill="{colour}">{way}</tspan>' for way, colour in COLOURS.items())
    head = text(
        LEFT, 24, f"times as fast as the strong form on MPI, {cores} cores", 'font-size="14"'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="930" height="{height:.0f}" '
        'font-family="sans-serif" font-size="11">\n'
        '<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join([head, text(LEFT, 44, key), *bars])
        + "\n</svg>\n"
    )


def table(rows: list[Row]) -> None:
    """Print the comparison as Markdown."""
    cases = compared(rows)
    ways = [way for way in ("MPI simple", "MPI strong", "EPIC shm", "EPIC mpi")
            if any(way in found for found in cases.values())]  # fmt: skip
    print("| operation, hidden, T, ranks | " + " | ".join(ways) + " |")
    print("| --- |" + " --- |" * len(ways))
    for case, found in cases.items():
        strong = found["MPI strong"]["median_us"]
        cells = []
        for way in ways:
            row = found.get(way)
            spread = f"{row['low_us']:.0f}-{row['high_us']:.0f}" if row else ""
            ratio = f", {strong / row['median_us']:.2f} x" if row and way.startswith("EPIC") else ""
            cells.append(f"{row['median_us']:.0f} ({spread}{ratio})" if row else "-")
        print(f"| {case[0]}, {case[1]}, {case[2]}, {case[3]} | " + " | ".join(cells) + " |")


def main() -> int:
    """Read the results, print tables, and draw the picture."""
    rows = read(Path(sys.argv[1]))
    table(rows)
    Path(sys.argv[2]).write_text(draw(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
