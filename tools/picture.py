#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the README's picture of a step: docs/step-light.svg and docs/step-dark.svg.

python tools/picture.py writes them. With --check it compares them and exits with 1 if they differ.

Every slot is drawn where the library puts it: by local expert, then source rank, token, k.
"""

import sys
from pathlib import Path

RANKS, LOCAL, TOKENS = 3, 2, 2  # number of ranks, experts per rank, tokens per rank
# [rank][token]: the experts of a token
CHOSEN = [[(0, 3), (2, 5)], [(1, 2), (3, 4)], [(0, 4), (1, 5)]]
WIDTH, BAND, TOP, CELL = 960, 124, 74, 24
HOME, AWAY, BACK = 96, 440, 840  # left edges of tokens, slots and sums
SLAB = 78 + 3 * (CELL + 4)  # width of an expert's box
PALETTES = {
    "light": {
        "page": "#ffffff", "band": "#f3f5f8", "ink": "#1f2933", "faint": "#66737f",
        "ranks": ("#2f6fd0", "#d8741c", "#2c9a5b"), "slab": "#ffffff", "line": "#c3ccd6",
    },
    "dark": {
        "page": "#0d1117", "band": "#171d26", "ink": "#e6edf3", "faint": "#93a1b0",
        "ranks": ("#5b9bff", "#f2994a", "#4cc38a"), "slab": "#0d1117", "line": "#394452",
    },
}  # fmt: skip


def slots() -> dict[tuple[int, int, int], int]:
    """Return (rank, token, expert) -> index in the expert's slab."""
    place, found = [0] * (RANKS * LOCAL), {}
    for rank, tokens in enumerate(CHOSEN):
        for token, experts in enumerate(tokens):
            for expert in experts:
                found[rank, token, expert] = place[expert]
                place[expert] += 1
    return found


def top(rank: int) -> float:
    """Return the top of a rank's band."""
    return TOP + rank * (BAND + 12)


def home(rank: int, token: int) -> float:
    """Return the vertical center of a token."""
    return top(rank) + 40 + token * 44


def slab(expert: int) -> tuple[float, float]:
    """Return the upper left corner of an expert's slab."""
    return AWAY, top(expert // LOCAL) + 28 + expert % LOCAL * 44


class Sheet:
    """A picture in one palette."""

    def __init__(self, palette: dict) -> None:
        self.palette = palette
        self.height = int(top(RANKS)) + 46
        self.lines: list[str] = []

    def text(self, x: float, y: float, words: str, *, size: int = 13, anchor: str = "start",
             ink: str = "ink", weight: str = "normal") -> None:  # fmt: skip
        """Draw a text."""
        self.lines.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" '
            f'font-weight="{weight}" fill="{self.palette[ink]}">{words}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, fill: str,
            edge: str | None = None) -> None:  # fmt: skip
        """Draw a rounded rectangle."""
        stroke = f' stroke="{edge}"' if edge else ""
        self.lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
            f'fill="{fill}"{stroke}/>'
        )

    def way(self, x: float, y: float, to_x: float, to_y: float, ink: str) -> None:
        """Draw the path of a row."""
        bend = (to_x - x) * 0.45
        self.lines.append(
            f'<path d="M{x:g} {y:g} C{x + bend:g} {y:g} {to_x - bend:g} {to_y:g} {to_x:g} '
            f'{to_y:g}" fill="none" stroke="{ink}" stroke-width="1.6" opacity="0.75"/>'
        )

    def row(self, x: float, y: float, rank: int, name: str) -> None:
        """Draw a token's row in the color of its rank."""
        self.box(x, y - CELL / 2, CELL, CELL, self.palette["ranks"][rank])
        self.lines.append(
            f'<text x="{x + CELL / 2:g}" y="{y + 4:g}" font-size="11" text-anchor="middle" '
            f'font-weight="bold" fill="{self.palette["page"]}">{name}</text>'
        )

    def svg(self) -> str:
        """Return the whole file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" '
            f'width="{WIDTH}" height="{self.height}" font-family="sans-serif" role="img">\n'
            "<title>One step: each token's row goes to the ranks of its experts, and their "
            "weighted sum returns</title>\n"
            f'<rect width="{WIDTH}" height="{self.height}" fill="{self.palette["page"]}"/>\n'
        )
        return head + "\n".join(self.lines) + "\n</svg>\n"


def draw_ways(sheet: Sheet, places: dict[tuple[int, int, int], int]) -> None:
    """Draw two lines for each choice: to its expert, and back to its token."""
    for rank, token, expert in places:
        x, y = slab(expert)
        ink, middle = sheet.palette["ranks"][rank], y + CELL / 2 + 2
        sheet.way(HOME + CELL, home(rank, token), x, middle, ink)
        sheet.way(x + SLAB, middle, BACK, home(rank, token), ink)


def draw_rank(sheet: Sheet, rank: int) -> None:
    """Draw a rank's band and everything in it except the rows."""
    palette = sheet.palette
    sheet.text(24, top(rank) + BAND / 2 + 5, f"rank {rank}", weight="bold")
    for expert in range(rank * LOCAL, (rank + 1) * LOCAL):
        x, y = slab(expert)
        sheet.box(x, y - 2, SLAB, CELL + 8, palette["slab"], palette["line"])
        sheet.text(x + 8, y + 19, f"expert {expert}", size=12)


def draw_words(sheet: Sheet) -> None:
    """Draw the labels."""
    steps = (
        (HOME, "start", "tokens", "each has chosen 2 experts"),
        (AWAY + 81, "middle", "slots, expert by expert", "one matrix product per expert"),
        (BACK + CELL, "end", "weighted sums", "added in a fixed order"),
    )
    for x, anchor, head, foot in steps:
        sheet.text(x, 30, head, size=15, anchor=anchor, weight="bold")
        sheet.text(x, 50, foot, size=12, anchor=anchor, ink="faint")
    below = top(RANKS) + 22
    for x, words in ((290, "plan, dispatch →"), (730, "combine →")):
        sheet.text(x, below, words, anchor="middle", weight="bold")
    sheet.text(290, below + 18, "← dispatch_backward", size=12, anchor="middle", ink="faint")
    sheet.text(730, below + 18, "← combine_backward", size=12, anchor="middle", ink="faint")


def draw(palette: dict) -> str:
    """Return the picture."""
    sheet, places = Sheet(palette), slots()
    for rank in range(RANKS):
        sheet.box(12, top(rank), WIDTH - 24, BAND, palette["band"])
    draw_words(sheet)
    draw_ways(sheet, places)  # below the boxes, so that no line crosses a label
    for rank in range(RANKS):
        draw_rank(sheet, rank)
    for (rank, token, expert), place in places.items():
        x, y = slab(expert)
        sheet.row(x + 78 + place * (CELL + 4), y + CELL / 2 + 2, rank, "ab"[token])
    for rank in range(RANKS):
        for token in range(TOKENS):
            for x in (HOME, BACK):
                sheet.row(x, home(rank, token), rank, "ab"[token])
    return sheet.svg()


def main() -> int:
    """Write the files, or compare them and return 1 if one differs."""
    folder = Path(__file__).resolve().parents[1] / "docs"
    for name, palette in PALETTES.items():
        path, wanted = folder / f"step-{name}.svg", draw(palette)
        if "--check" not in sys.argv[1:]:
            path.write_text(wanted, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != wanted:
            print(f"{path} is not what tools/picture.py draws: run it", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
