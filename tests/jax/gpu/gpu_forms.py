# SPDX-License-Identifier: Apache-2.0
"""Cases of other forms: flat rows, drops by k.  GPUs give the bits of CPU devices, which the suite
holds against counts by hand and float64."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_world import (
    SIZES,
    choices,
    gpu_mesh,
    gpus,
    host_mesh,
    numbers,
    put,
    rank_counts,
    same,
    whole,
)

import epic.jax
from steps import EXPERTS, TOKENS, TOP_K, mapped

Step = Callable[[Any], Callable[..., Any]]


def compare(step_of: Step, hidden: int, dtype: str) -> None:
    """step_of(group): rows, weights, ids and a gradient of rows -> arrays, on both platforms."""
    tokens = TOKENS * len(gpus())
    x, ct = (np.asarray(jnp.asarray(numbers(s, tokens, hidden), dtype)) for s in (1, 4))
    w, ids = numbers(2, tokens, TOP_K), choices(3, tokens, 0.3)
    for ep in rank_counts():
        results = []
        for name, mesh in (("device", gpu_mesh(ep)), ("host", host_mesh(ep))):
            with epic.jax.open(mesh, "ep", **SIZES, name=name) as group:
                args = [put(mesh, v) for v in (x, w, ids, ct)]
                results.append(jax.tree.map(whole, mapped(mesh, step_of(group), 4)(*args)))
        same(*results)


def case_flat() -> None:
    """Rows with their experts and weights, their sum at home, the gradients of both."""
    layer = epic.jax.Layer(EXPERTS, TOP_K, layout="flat")

    def step_of(group: Any) -> Callable[..., Any]:
        def step(x: Any, w: Any, ids: Any, ct: Any) -> Any:
            plan = epic.jax.plan(group, layer, ids)

            def forward(x: Any, w: Any) -> Any:
                rows, weights, experts = epic.jax.dispatch_flat(plan, x, w)
                return (epic.jax.combine(plan, rows), weights), (rows, experts)

            out, pull, more = jax.vjp(forward, x, w, has_aux=True)
            return out, pull((ct, 2 * out[1])), more, plan.load, plan.demand

        return step

    for hidden, dtype in ((20, "float32"), (33, "bfloat16"), (512, "float16")):
        compare(step_of, hidden, dtype)


def case_drop_by_k() -> None:
    """Full experts keep all first choices before second ones."""
    layer = epic.jax.Layer(EXPERTS, TOP_K, overflow="drop", expert_capacity=2, priority="by_k")

    def step_of(group: Any) -> Callable[..., Any]:
        def step(x: Any, w: Any, ids: Any, ct: Any) -> Any:
            plan = epic.jax.plan(group, layer, ids)

            def forward(x: Any, w: Any) -> Any:
                recv, slot = epic.jax.dispatch(plan, x, w)
                return epic.jax.combine(plan, recv, slot), (recv, slot)

            out, pull, more = jax.vjp(forward, x, w, has_aux=True)
            return out, pull(ct), more, plan.expert_rows, plan.load

        return step

    for hidden, dtype in ((20, "float32"), (64, "bfloat16")):
        compare(step_of, hidden, dtype)
