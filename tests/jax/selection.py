# SPDX-License-Identifier: Apache-2.0
"""Options of pytest that select a part of the tests and of their parameters."""

from collections.abc import Sequence

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that select parts of the suite."""
    text = "of a test with parameters the first case: what another JAX or Python breaks, it breaks"
    parser.addoption("--one-case", action="store_true", help=text)
    text = "of a test with several lists of parameters as many cases as each value needs to occur"
    parser.addoption("--each-value", action="store_true", help=text)
    parser.addoption("--part", default="1/1", help="I,J/N: of each N test files the Ith and Jth")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that the options leave out."""
    wanted, parts = config.getoption("--part").split("/")
    places = {int(part) - 1 for part in wanted.split(",")}
    files = sorted({item.path for item in items})
    mine = [item for item in items if files.index(item.path) % int(parts) in places]
    tests: dict[tuple[object, str], list[pytest.Item]] = {}
    for item in mine:
        tests.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    if config.getoption("--one-case"):
        mine = [cases[0] for cases in tests.values()]
    elif config.getoption("--each-value"):
        mine = [case for cases in tests.values() for case in cover_values(cases)]
    chosen = set(mine)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = mine


def values_of(case: pytest.Item) -> set[tuple[str, str]]:
    """Return the parameters of a case, as names and text.  A list of tuples has several names."""
    params = dict(case.callspec.params) if hasattr(case, "callspec") else {}
    found = set()
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        values = [repr(params.pop(name.strip(), None)) for name in names]
        found.add((str(names), str(values)))
    return found | {(name, repr(value)) for name, value in params.items()}


def cover_values(cases: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return cases in which each value of each parameter occurs, and each test without parameters.

    Cases with the mark `night` count as absent.  The tuples of a list for several parameters at
    once all occur.
    """
    cases = [case for case in cases if case.get_closest_marker("night") is None]
    missing = set().union(*map(values_of, cases))
    chosen = [case for case in cases if not values_of(case)]
    while missing:
        best = max(cases, key=lambda case: len(values_of(case) & missing))
        chosen.append(best)
        missing -= values_of(best)
    return [case for case in cases if case in chosen]
