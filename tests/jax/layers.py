# SPDX-License-Identifier: Apache-2.0
"""The layer of cases.py in JAX, for tests in one process and in several."""

import sys
from typing import Any

import jax
import pytest

import cases
import epic.jax
from cases import (
    BATCH,
    CASES,
    EXPERTS,
    HIDDEN,
    INNER,
    LENGTH,
    arrays,
    compare,
    options,
    tables,
    true_step,
    weights,
)

__all__ = [
    "BATCH",
    "CASES",
    "EXPERTS",
    "HIDDEN",
    "INNER",
    "LENGTH",
    "arrays",
    "compare",
    "options",
    "resize",
    "step",
    "tables",
    "true_step",
    "weights",
]


def resize(monkeypatch: pytest.MonkeyPatch, **sizes: int) -> None:
    """Set other sizes for one test."""
    for name, size in sizes.items():
        monkeypatch.setattr(cases, name, size)
        monkeypatch.setattr(sys.modules[__name__], name, size)


def step(mesh: Any, group: Any, case: dict[str, Any], **more: Any) -> Any:
    """Return a jitted function of x, weights and ct: out, loss, d_x, d_weights."""
    wish = options(case, group.num_ranks)
    extras = {**tables(case), **more}

    def loss_of(x: Any, w: Any, ct: Any) -> Any:
        moe = epic.jax.sharded.moe(mesh, group, wish, x, epic.jax.MoeWeights(**w), **extras)
        return (moe.out * ct).sum() + moe.loss, moe

    def run(x: Any, w: Any, ct: Any) -> Any:
        (_, moe), (d_x, d_w) = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)(x, w, ct)
        return moe.out, moe.loss, d_x, d_w

    return jax.jit(run)
