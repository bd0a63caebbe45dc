# SPDX-License-Identifier: Apache-2.0
"""The files that epic-place writes: which rank owns each expert, and whose replica it is."""

import os
from pathlib import Path
from typing import NamedTuple

from epic.errors import EpicArgumentError

MOST = 65536  # largest number of ranks and of experts in a placement


class Placement(NamedTuple):
    """A placement of experts on ranks, as `read_placement` returns it.

    Attributes:
        num_ranks: Number of ranks.
        num_experts: Number of experts; replicas count.
        num_logical: Number of logical experts; 0: there are no replicas.
        rank_of_expert: [num_experts]: the rank that owns each expert.
        logical_of_expert: [num_experts]: the logical expert that each is a replica of, or None.
    """

    num_ranks: int
    num_experts: int
    num_logical: int
    rank_of_expert: list[int]
    logical_of_expert: list[int] | None


def read_placement(path: str | os.PathLike[str]) -> Placement:
    """Read a placement file that epic-place wrote.

    Args:
        path: The file. The header epic/placement.h describes its format.

    Returns:
        The placement. Pass its lists to `plan`, `moe` or a layer.

    Raises:
        EpicArgumentError: The file is not a placement.
    """
    words = Path(path).read_text(encoding="ascii", errors="replace").split()
    at = 0

    def numbers(name: str, num: int, least: int, most: int) -> list[int]:
        """Return the next `num` numbers, which follow their name."""
        nonlocal at
        found = words[at : at + 1 + num]
        at += 1 + num
        good = len(found) == 1 + num and found[0] == name
        good = good and all(w.isdigit() and len(w) < 10 for w in found[1:])
        values = [int(w) for w in found[1:]] if good else []
        if not good or not all(least <= v <= most for v in values):
            raise EpicArgumentError(
                f"{path}: {name} must be followed by {num} numbers from {least} to {most}; pass a "
                "file that epic-place wrote"
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
            f"{path}: {words[at][:40]!r} follows the last list: must end there; pass a file that "
            "epic-place wrote"
        )
    return Placement(ranks, experts, logical, rank_of, logical_of)
