# SPDX-License-Identifier: Apache-2.0
"""Checks that the modules of the package import each other without circles.

Also checks that epic.torch does not import torch._dynamo, whose import takes seconds.
"""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import torch

import epic
from epic.torch.arguments import assume_constant_result

ROOT = Path(epic.__file__).parent


def name_of(path: Path) -> str:
    """Return the dotted name of a module, or of a package for its __init__.py."""
    parts = ("epic", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """Return the modules of the package that a file imports, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names} & modules
            found.update(inside or {node.module})
    return (found & modules) - {"epic"}  # a package is imported before each of its modules


def test_no_circles() -> None:
    """Check that no module imports, even in a function, one that depends on it."""
    folders = (".", "torch", "vllm")
    paths = {name_of(path): path for folder in folders for path in (ROOT / folder).glob("*.py")}
    graph = {name: imports_of(path, set(paths)) for name, path in paths.items()}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError if there is a circle
    assert set(order) >= set(paths) >= {"epic.torch.moe", "epic.vllm.layer"}


COMPILER = """import sys, torch, torch.distributed, torch.nn.parallel, torch.utils.checkpoint
before = "torch._dynamo" in sys.modules
import epic.torch
assert ("torch._dynamo" in sys.modules) == before
"""


def test_the_compiler_is_imported_when_it_is_used() -> None:
    """Check that epic.torch does not import torch._dynamo, and marks constants as it does."""
    subprocess.run([sys.executable, "-c", COMPILER], check=True, timeout=200)

    def one() -> None:
        pass

    def other() -> None:
        pass

    assert vars(assume_constant_result(one)) == vars(torch._dynamo.assume_constant_result(other))
