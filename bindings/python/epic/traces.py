# SPDX-License-Identifier: Apache-2.0
"""What epic-place writes: which rank should own each expert, and whose replica it is."""

import os
from pathlib import Path
from typing import NamedTuple

from epic.errors import EpicArgumentError

MOST = 65536  # ranks, experts


class Placement(NamedTuple):
    """rank_of_expert [num_experts]; num_logical 0: no replicas, and logical_of_expert is None."""

    num_ranks: int
    num_experts: int
    num_logical: int
    rank_of_expert: list[int]
    logical_of_expert: list[int] | None


def read_placement(path: str | os.PathLike[str]) -> Placement:
    """Reads the file; epic/placement.h says what is in it."""
    words = Path(path).read_text(encoding="ascii", errors="replace").split()
    at = 0

    def numbers(name: str, num: int, least: int, most: int) -> list[int]:
        """The next `num` numbers, behind their name."""
        nonlocal at
        found = words[at : at + 1 + num]
        at += 1 + num
        good = len(found) == 1 + num and found[0] == name
        good = good and all(w.isdigit() and len(w) < 10 for w in found[1:])
        values = [int(w) for w in found[1:]] if good else []
        if not good or not all(least <= v <= most for v in values):
            raise EpicArgumentError(
                f"{path}: {name}: {num} of {least} to {most} needed, as epic-place writes them"
            )
        return values

    numbers("epic-placement", 1, 1, 1)
    (ranks,) = numbers("ranks", 1, 1, MOST)
    (experts,) = numbers("experts", 1, 1, MOST)
    (logical,) = numbers("logical", 1, 0, experts)
    rank_of = numbers("rank_of_expert", experts, 0, ranks - 1)
    logical_of = numbers("logical_of_expert", experts, 0, logical - 1) if logical else None
    if words[at:]:
        raise EpicArgumentError(
            f"{path}: {words[at][:40]!r} behind the last list: not as epic-place writes them"
        )
    return Placement(ranks, experts, logical, rank_of, logical_of)
