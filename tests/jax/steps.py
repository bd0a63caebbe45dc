# SPDX-License-Identifier: Apache-2.0
"""The round trip that tests run on CPU and GPU devices, and its expected results in float64."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import epic.jax

TOKENS, TOP_K, EXPERTS, HIDDEN, ALIGN = 6, 3, 8, 20, 4
ALL = P(("dp", "ep"))
LAYER = epic.jax.Layer(EXPERTS, TOP_K, alignment=ALIGN)


def mapped(mesh: Any, function: Callable[..., Any], inputs: int, vma: bool = True) -> Any:
    """Return a jitted function of arrays that are sharded over all devices."""
    specs = (ALL,) * inputs
    inner = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=ALL, check_vma=vma)
    return jax.jit(inner)


def numbers(seed: int, *shape: int, dtype: Any = jnp.float32) -> Any:
    """Return random normal numbers."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def choices(seed: int, none: float = 0.1) -> Any:
    """Return different experts for each of 4 * TOKENS tokens; some choices are -1 (no expert)."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(4 * TOKENS)])
    ids[rng.random(ids.shape) < none] = -1
    return jnp.asarray(ids, jnp.int32)


def through(group: Any, fused: bool, data: Any = lambda x: x, **more: Any) -> Callable[..., Any]:
    """Return a function that dispatches tokens, applies sin as the expert, and combines."""

    def step(x: Any, w: Any, ids: Any) -> Any:
        if fused:
            plan, recv, slot = epic.jax.plan_dispatch(group, LAYER, ids, x, w, **more)
        else:
            plan = jax.tree.map(data, epic.jax.plan(group, LAYER, ids, **more))
            recv, slot = epic.jax.dispatch(plan, x, w)
        return epic.jax.combine(plan, jnp.sin(recv), slot)

    return step


def true_round(x: Any, w: Any, ids: Any, ct: Any) -> tuple[np.ndarray, ...]:
    """Return out, d_x and d_w of through() in float64."""
    x, w, ct = (np.asarray(v, np.float64) for v in (x, w, ct))
    live = np.asarray(ids) >= 0
    total = (w * live).sum(axis=1, keepdims=True)
    dot = (ct * np.sin(x)).sum(axis=1, keepdims=True)
    return np.sin(x) * total, np.cos(x) * total * ct, dot * live
