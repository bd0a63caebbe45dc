# SPDX-License-Identifier: Apache-2.0
"""Checks that the modules of epic.jax import each other in one direction only.

An import inside a function, or one only for types, counts too, because both can hide a circle.
"""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import epic.jax

FOLDER = Path(epic.jax.__file__).parent
MODULES = {path.stem: path for path in FOLDER.glob("*.py") if path.stem != "__init__"}


def imported_modules(path: Path) -> set[str]:
    """Return the modules of epic.jax that a module imports, anywhere in its text."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "epic.jax":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("epic.jax."):
            found.add((node.module or "").removeprefix("epic.jax."))
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("epic.jax.") for alias in node.names}
    return found & set(MODULES)


def test_no_circle() -> None:
    """Check for circles: graphlib raises CycleError, which names the modules of the circle."""
    graph = {name: imported_modules(path) for name, path in MODULES.items()}
    order = list(TopologicalSorter(graph).static_order())
    assert len(order) == len(MODULES) > 20
    assert order.index("groups") < order.index("call") < order.index("moe")
