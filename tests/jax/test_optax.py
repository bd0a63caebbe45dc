# SPDX-License-Identifier: Apache-2.0
"""Checks clipping by optax, which sees global arrays and so the experts of all ranks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import epic.jax
from conftest import make_mesh


@pytest.mark.parametrize("ep", [1, 4])
def test_global_norm(opened: Any, ep: int) -> None:
    """The norm counts every expert and every shared parameter once, for any mesh."""
    optax = pytest.importorskip("optax")
    mesh = make_mesh(ep)
    group = opened(mesh)
    options = epic.jax.Moe.of(num_experts=8, top_k=2, hidden=16, inner=12)
    draw = np.random.default_rng(1)

    def normal(*shape: int) -> np.ndarray:
        return draw.normal(size=shape).astype(np.float32)

    weights = epic.jax.MoeWeights(normal(16, 8), normal(8, 16, 24), normal(8, 12, 16))
    x = normal(8, 4, 16)

    def loss(weights: Any) -> Any:
        return jnp.sum(epic.jax.sharded.moe(mesh, group, options, x, weights).out ** 2)

    gradients = jax.block_until_ready(jax.jit(jax.grad(loss))(weights))
    clip = optax.clip_by_global_norm(0.5)
    clipped = jax.jit(lambda g: clip.update(g, clip.init(g))[0])(gradients)
    arrays = [np.asarray(g, np.float64) for g in jax.tree.leaves(gradients)]
    norm = np.sqrt(sum((a**2).sum() for a in arrays))
    assert norm > 1
    for array, got in zip(arrays, jax.tree.leaves(clipped), strict=True):
        np.testing.assert_allclose(np.asarray(got), array * (0.5 / norm), rtol=1e-5, atol=1e-9)
