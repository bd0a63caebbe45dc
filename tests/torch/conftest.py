# SPDX-License-Identifier: Apache-2.0
"""Starts four processes that all tests share.

Importing torch takes longer than most tests, so the processes import it only once.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
# The folders of world.py; of reference.py, cases.py, core_layer.py, forked.py and selection.py; and
# of pages.py.
sys.path[:0] = [str(HERE), str(HERE.parent / "jax"), str(HERE.parent / "pages")]

import pytest

from selection import pytest_addoption, pytest_collection_modifyitems
from world import World

__all__ = ["pytest_addoption", "pytest_collection_modifyitems", "world"]


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Start four processes with torch.distributed, and stop them at the end."""
    with World(4) as four:
        yield four
