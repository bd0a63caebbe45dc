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
from selection import pytest_addoption, pytest_collection_modifyitems

__all__ = ["RANKS", "line_of", "make_mesh", "pytest_addoption", "pytest_collection_modifyitems"]
Mesh = jax.sharding.Mesh


# The group sizes that four devices allow. make test runs the smallest and the largest.
RANKS = [1, pytest.param(2, marks=pytest.mark.night), 4]


def make_mesh(ep: int) -> Mesh:
    """Return four devices as dp x ep."""
    devices = np.array(jax.devices()[:4]).reshape(4 // ep, ep)
    return Mesh(devices, ("dp", "ep"))


def line_of(ranks: int) -> Mesh:
    """Return a mesh of one group."""
    return Mesh(np.array(jax.devices()[:ranks]), ("ep",))


@pytest.fixture(params=RANKS)
def mesh(request: pytest.FixtureRequest) -> Mesh:
    """Return a mesh for each of these numbers of ranks.

    A test that combines them with other parameters says `indirect=["mesh"]`.
    """
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
