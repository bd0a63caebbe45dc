# SPDX-License-Identifier: Apache-2.0
"""Tests the grouped products for Hopper in Pallas' interpreter, which needs no GPU."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from reference import relative

plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
slabs = pytest.importorskip("epic.jax.slabs")
ROWS, K, N, SIZES = 512, 256, 384, np.array([128, 0, 256, 0], np.int32)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate two thread blocks."""
    if not hasattr(plgpu, "InterpretGPUParams"):
        pytest.skip("this JAX has no interpreter for Pallas' GPU kernels")
    monkeypatch.setattr(slabs, "interpreter", {"interpret": plgpu.InterpretGPUParams()})
    monkeypatch.setattr(slabs, "num_sms", lambda: 2)


def operand(seed: int, *shape: int) -> tuple[Any, np.ndarray]:
    """Return bfloat16 numbers, and the same in float64."""
    x = jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)
    return x, np.asarray(x, np.float64)


def rows(seed: int, columns: int) -> tuple[Any, np.ndarray]:
    """Return rows with NaN past the last slab, which the kernels must never read."""
    x, wide = operand(seed, ROWS, columns)
    return x.at[SIZES.sum() :].set(jnp.nan), wide


def parts() -> list[tuple[int, slice]]:
    """Yield each expert with the range of its rows."""
    end = np.cumsum(SIZES)
    return [(e, slice(end[e] - SIZES[e], end[e])) for e in range(len(SIZES))]


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_by_weights(transposed: bool) -> None:
    """Every slab is multiplied by its own weights."""
    x, wide_x = rows(1, N if transposed else K)
    w, wide_w = operand(2, len(SIZES), K, N)
    product = slabs.weights_transposed if transposed else slabs.rows_by_weights
    got = np.asarray(product(x, w, jnp.asarray(SIZES)), np.float64)
    for expert, part in parts():
        if part.stop > part.start:
            matrix = wide_w[expert].T if transposed else wide_w[expert]
            assert relative(got[part], wide_x[part] @ matrix) < 4e-3


def test_slab_products() -> None:
    """Gradients of experts without rows are zeros."""
    (x, wide_x), (y, wide_y) = rows(1, K), rows(2, N)
    got = np.asarray(slabs.slab_products(x, y, jnp.asarray(SIZES)), np.float64)
    for expert, part in parts():
        wanted = wide_x[part].T @ wide_y[part]
        assert np.abs(got[expert] - wanted).max() <= 4e-3 * np.abs(wanted).max()
