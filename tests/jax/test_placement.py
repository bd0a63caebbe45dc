# SPDX-License-Identifier: Apache-2.0
"""Tests reading a file of epic-place in Python."""

from pathlib import Path

import pytest

import epic

PLAIN = "epic-placement 1\nranks 2\nexperts 4\nlogical 0\nrank_of_expert\n0 1\n1 0\n"
COPIES = "epic-placement 1 ranks 2 experts 4 logical 3 rank_of_expert 0 0 1 1 "


def test_it_is_read(tmp_path: Path) -> None:
    """Placements with and without replicas work."""
    path = tmp_path / "place.txt"
    path.write_text(PLAIN)
    assert epic.read_placement(path) == (2, 4, 0, [0, 1, 1, 0], None)
    path.write_text(COPIES + "logical_of_expert 0 1 2 0")
    assert epic.read_placement(str(path)).logical_of_expert == [0, 1, 2, 0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        PLAIN.replace("placement 1", "placement 2"),
        PLAIN.replace("ranks 2", "ranks 0"),
        PLAIN.replace("1 0\n", "1\n"),
        PLAIN.replace("1 0\n", "1 2\n"),
        PLAIN.replace("1 0\n", "1 -1\n"),
        PLAIN.replace("ranks 2", "ranks " + 5000 * "1"),
        PLAIN + "0\n",
        COPIES,
        COPIES + "logical_of_expert 0 1 2 3",
    ],
)
def test_others_are_refused(tmp_path: Path, text: str) -> None:
    """The error names the wrong value."""
    path = tmp_path / "place.txt"
    path.write_text(text)
    with pytest.raises(epic.EpicArgumentError, match="a file that epic-place wrote"):
        epic.read_placement(path)
