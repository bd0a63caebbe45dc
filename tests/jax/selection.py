# SPDX-License-Identifier: Apache-2.0
"""Which tests of a suite run: options of pytest, and products of parameters."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that select parts of the suite."""
    text = "of a test with parameters the first case: what another JAX or Python breaks, it breaks"
    parser.addoption("--one-case", action="store_true", help=text)
    parser.addoption("--part", default="1/1", help="I,J/N: of each N test files the Ith and Jth")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that the options leave out."""
    wanted, parts = config.getoption("--part").split("/")
    places = {int(part) - 1 for part in wanted.split(",")}
    files = sorted({item.path for item in items})
    mine = [item for item in items if files.index(item.path) % int(parts) in places]
    if config.getoption("--one-case"):
        first: dict[tuple[object, str], pytest.Item] = {}
        for item in mine:
            first.setdefault((item.path, getattr(item, "originalname", item.name)), item)
        mine = list(first.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in mine])
    items[:] = mine


def name_of(value: Any) -> str:
    """Return the id of a parameter; None is the core's product of matrices."""
    return "core" if value is None else getattr(value, "__name__", str(value))


def covering(*dimensions: Sequence[Any], ids: Callable[[Any], str] = name_of) -> list[Any]:
    """Return all combinations of values, as parameters of a test.

    The quick run has those that are needed to have each two values of different dimensions
    together.  The others have the mark `night`.
    """
    every = list(itertools.product(*(range(len(values)) for values in dimensions)))

    def pairs(case: tuple[int, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(case), 2))

    missing = set().union(*map(pairs, every))
    chosen = set()
    while missing:
        best = max(every, key=lambda case: len(pairs(case) & missing))
        chosen.add(best)
        missing -= pairs(best)
    found = []
    for case in every:
        values = [values[i] for values, i in zip(dimensions, case, strict=True)]
        marks = () if case in chosen else pytest.mark.night
        found.append(pytest.param(*values, marks=marks, id="-".join(map(ids, values))))
    return found
