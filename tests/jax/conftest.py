# SPDX-License-Identifier: Apache-2.0
"""Sets up eight CPU devices in this process, and the meshes of the tests, most of four devices."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "pages"))
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import epic.jax

Mesh = jax.sharding.Mesh


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


def make_mesh(ep: int) -> Mesh:
    """Return four devices as dp x ep."""
    devices = np.array(jax.devices()[:4]).reshape(4 // ep, ep)
    return Mesh(devices, ("dp", "ep"))


@pytest.fixture(params=[1, 2, 4])
def mesh(request: pytest.FixtureRequest) -> Mesh:
    """Return a mesh for every number of ranks that four devices allow."""
    return make_mesh(request.param)


@pytest.fixture(params=[True, False], ids=["vma", "no_vma"])
def vma(request: pytest.FixtureRequest) -> bool:
    """Run with shard_map's check of varying values, and without it."""
    return request.param


@pytest.fixture
def opened() -> Iterator[Callable[..., Any]]:
    """Return epic.jax.open; its groups are closed after the test."""
    groups = []

    def open_group(mesh: Mesh | None, **more: Any) -> Any:
        wish = {"max_tokens": 64, "max_row_bytes": 4096, "timeout_ms": 60000, **more}
        groups.append(epic.jax.open(mesh, "ep", **wish))
        return groups[-1]

    yield open_group
    for group in groups:
        epic.jax.close(group)
