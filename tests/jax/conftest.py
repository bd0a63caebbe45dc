# SPDX-License-Identifier: Apache-2.0
"""Eight CPU devices in this process, and the meshes that the tests run on: mostly of four."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import epic.jax

Mesh = jax.sharding.Mesh


def make_mesh(ep: int) -> Mesh:
    """Four devices as dp x ep."""
    devices = np.array(jax.devices()[:4]).reshape(4 // ep, ep)
    return Mesh(devices, ("dp", "ep"))


@pytest.fixture(params=[1, 2, 4])
def mesh(request: pytest.FixtureRequest) -> Mesh:
    """Every number of ranks that four devices allow."""
    return make_mesh(request.param)


@pytest.fixture(params=[True, False], ids=["vma", "no_vma"])
def vma(request: pytest.FixtureRequest) -> bool:
    """With shard_map's check of varying values, and without."""
    return request.param


@pytest.fixture
def opened() -> Iterator[Callable[..., Any]]:
    """epic.jax.open, whose groups are closed after the test."""
    groups = []

    def open_group(mesh: Mesh | None, **more: Any) -> Any:
        wish = {"max_tokens": 64, "max_row_bytes": 4096, "timeout_ms": 60000, **more}
        groups.append(epic.jax.open(mesh, "ep", **wish))
        return groups[-1]

    yield open_group
    for group in groups:
        epic.jax.close(group)
