# SPDX-License-Identifier: Apache-2.0
"""Four processes that the tests share: importing torch once in each is most of a test's time."""

import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
# world.py; reference.py, cases.py, core_layer.py; pages.py
sys.path[:0] = [str(HERE), str(HERE.parent / "jax"), str(HERE.parent / "pages")]

import pytest

from world import World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Four processes with torch.distributed."""
    with World(4) as four:
        yield four
