# SPDX-License-Identifier: Apache-2.0
"""Shared functions of the programs in this folder: GPU meshes, random numbers, printed results."""

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from steps import ALL, EXPERTS, TOP_K

SIZES: dict[str, Any] = {
    "max_tokens": 64,
    "max_row_bytes": 4096,
    "timeout_ms": 20000,
    "command_buffers": os.environ.get("EPIC_GRAPHS", "1") == "1",
}
Failure = jax.errors.JaxRuntimeError


class LeftOutError(Exception):
    """Raised by a case that cannot run here, with the reason."""


def say(*words: object) -> None:
    """Print a line immediately."""
    print(*words, flush=True)


def gpus() -> list[Any]:
    """Return the GPUs of all processes."""
    return jax.devices("gpu")


def gpu_mesh(ep: int) -> Mesh:
    """Return all GPUs as dp x ep."""
    return Mesh(np.array(gpus()).reshape(-1, ep), ("dp", "ep"))


def host_mesh(ep: int) -> Mesh:
    """Return a mesh of equally many CPU devices of this process."""
    devices = jax.local_devices(backend="cpu")[: len(gpus())]
    return Mesh(np.array(devices).reshape(-1, ep), ("dp", "ep"))


def rank_counts() -> list[int]:
    """Return every size of a group that the GPUs allow."""
    return [n for n in (1, 2, 4, 8) if len(gpus()) % n == 0]


def put(mesh: Mesh, value: Any, spec: P = ALL) -> Any:
    """Return a global array from an array that every process has."""
    value = np.asarray(value)
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def whole(x: Any) -> np.ndarray:
    """Return all elements of a global array."""
    if isinstance(x, np.ndarray) or x.is_fully_addressable:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def numbers(seed: int, *shape: int, dtype: Any = np.float32) -> Any:
    """Return random normal numbers."""
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def choices(seed: int, tokens: int, none: float = 0.1) -> np.ndarray:
    """Return different experts for each token; some choices are -1 (no expert)."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)])
    ids[rng.random(ids.shape) < none] = -1
    return ids.astype(np.int32)


def same(a: Any, b: Any) -> None:
    """Compare all leaves bit by bit."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.array_equal(whole(x), whole(y))


def failure(function: Any, *args: Any) -> str:
    """Return the text of the error that the function raises."""
    try:
        jax.block_until_ready(function(*args))
    except (Failure, ValueError) as error:
        return str(error)
    raise AssertionError("there was no error")
