# SPDX-License-Identifier: Apache-2.0
"""Checks that help() of every public name describes all arguments and results.

Also runs the examples in the docstrings.
"""

import doctest
import inspect
from typing import Any

import pytest

import epic
import epic.torch

PUBLIC = {
    name: getattr(epic.torch, name)
    for name in epic.torch.__all__
    if callable(getattr(epic.torch, name))
}
FIELDS = {
    name: kind
    for name, kind in PUBLIC.items()
    if hasattr(kind, "_fields") or hasattr(kind, "__dataclass_fields__")
}


def documented(thing: Any, section: str) -> set[str]:
    """Return the names in one section of a Google-style docstring."""
    text = inspect.getdoc(thing) or ""
    _, _, rest = text.partition(f"\n{section}:\n")
    names = set()
    for line in rest.splitlines():
        if line and not line.startswith("    "):
            break
        if line[4:5].strip() and ": " in line + " ":
            names.add(line.strip().partition(":")[0].lstrip("*"))
    return names


@pytest.mark.parametrize("name", PUBLIC)
def test_summary(name: str) -> None:
    """Check that the summary is one line and a sentence."""
    lines = (inspect.getdoc(PUBLIC[name]) or "").splitlines()
    assert lines and lines[0][0].isalnum() and lines[0].endswith((".", "].")), lines[:1]
    assert len(lines) == 1 or not lines[1]


@pytest.mark.parametrize("name", FIELDS)
def test_fields(name: str) -> None:
    """Check that every field is described."""
    kind = FIELDS[name]
    own = getattr(kind, "_fields", None)
    if own is None:
        own = [n for n, field in kind.__dataclass_fields__.items() if field.init]
    assert documented(kind, "Attributes") == set(own)


@pytest.mark.parametrize("name", [n for n, v in PUBLIC.items() if n not in FIELDS])
def test_arguments_and_results(name: str) -> None:
    """Check that every argument and the result are described."""
    thing = PUBLIC[name]
    if isinstance(thing, type) and issubclass(thing, Exception):
        return
    signature = inspect.signature(thing)
    wanted = {parameter for parameter in signature.parameters if not parameter.startswith("_")}
    assert documented(thing, "Args") == wanted
    if inspect.isfunction(thing) and signature.return_annotation not in (None, "None", Any):
        assert "\nReturns:\n" in (inspect.getdoc(thing) or "")
    if inspect.isfunction(thing):
        assert "\nExample:\n" in (inspect.getdoc(thing) or "")


@pytest.mark.parametrize("name", [n for n, v in PUBLIC.items() if ">>> import" in str(v.__doc__)])
def test_examples(name: str) -> None:
    """Check that the examples run and print what they show."""
    thing = PUBLIC[name]
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for case in doctest.DocTestFinder(recurse=True).find(thing, name, module=False, globs={}):
        runner.run(case)
    assert runner.summarize().failed == 0


def test_the_layer_has_an_example() -> None:
    """Check that help(epic.torch.MoE) contains an example that is enough to write a layer."""
    text = inspect.getdoc(epic.torch.MoE) or ""
    assert all(word in text for word in (">>> ", "Args:", "Raises:", "Moe.of", "sum_gradients"))
