# SPDX-License-Identifier: Apache-2.0
"""Checks that the docstrings of epic.jax describe every argument, and that their examples run."""

import doctest
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import epic.jax
from epic.jax import gemm

# These are described in the modules that all bindings share.
SHARED = {"EpicArgumentError", "EpicError", "EpicUnsupportedError", "Experts", "Layer", "Moe"}
SHARED |= {"EpicNonFiniteError", "Router", "RoutingStats", "Tcp", "error_code"}


def public_objects() -> Iterator[tuple[str, Any]]:
    """Yield the functions and classes that users call, with their full names."""
    for name in sorted(set(epic.jax.__all__) - SHARED):
        value = getattr(epic.jax, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            yield f"epic.jax.{name}", value
    for name in epic.jax.sharded.__all__:
        yield f"epic.jax.sharded.{name}", getattr(epic.jax.sharded, name)
    yield "epic.jax.gemm.best", gemm.best


OBJECTS = dict(public_objects())


def section(text: str, name: str) -> str:
    """Return a section of a docstring in Google's style; "" if it has none."""
    found = re.search(rf"^{name}:\n((?: .*\n|\n)*)", text + "\n", re.M)
    return found[1] if found else ""


@pytest.mark.parametrize("name", OBJECTS)
def test_every_argument_is_described(name: str) -> None:
    """Check the section Args of each function, or Attributes of each class."""
    value = OBJECTS[name]
    text = inspect.getdoc(value) or ""
    assert re.match(r"[A-Z][^\n]*\.$", text.splitlines()[0]), "a summary of one line"
    arguments = [p for p in inspect.signature(value).parameters if p not in ("_", "more")]
    described = section(text, "Attributes" if inspect.isclass(value) else "Args")
    listed = re.findall(r"^    (\w+):", described, re.M)
    assert listed == arguments
    if inspect.isfunction(value) and inspect.signature(value).return_annotation is not None:
        assert section(text, "Returns")
    if inspect.isfunction(value) and not name.startswith("epic.jax.gemm."):
        assert section(text, "Example")


def test_examples_run() -> None:
    """Run all examples of the docstrings and compare their output."""
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    examples = 0
    for name, value in OBJECTS.items():
        for test in finder.find(value, name, globs={}):
            examples += len(test.examples)
            assert runner.run(test).failed == 0, name
    assert examples > 30
    assert ">>> epic.jax.close(group)" in (epic.jax.moe.__doc__ or "")
