# SPDX-License-Identifier: Apache-2.0
"""Cases with other forms: flat rows, drops by k, and e4m3 experts.

GPUs must return the bits of CPU devices, which the CPU tests compare with counts by hand and with
float64. e4m3 experts do not work on CPUs, so they are compared with loops.
"""

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
import rounded
from reference import relative
from steps import EXPERTS, TOKENS, TOP_K, mapped

Step = Callable[[Any], Callable[..., Any]]


def compare(step_of: Step, hidden: int, dtype: str) -> None:
    """Compare step_of(group), a function of rows, weights, ids and a row gradient, on both
    platforms."""
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
    """Check rows with their experts and weights, the combined sums, and both gradients."""
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
    """Check that full experts keep all first choices before second ones."""
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


def case_flat_quantized() -> None:
    """Check e4m3 rows with scales in the flat layout, with a limit on SMs."""
    layer = epic.jax.Layer(EXPERTS, TOP_K, layout="flat")

    def step_of(group: Any) -> Callable[..., Any]:
        def step(x: Any, w: Any, ids: Any, _: Any) -> Any:
            plan = epic.jax.plan(group, layer, ids, max_sms=8)
            rows, scales, *rest = epic.jax.dispatch_flat_quantized(plan, x, w, max_sms=4)
            return rows.view(jnp.uint8), scales, *rest

        return step

    for hidden, dtype in ((160, "float32"), (512, "bfloat16")):
        compare(step_of, hidden, dtype)


def case_e4m3() -> None:
    """Check layers with e4m3 experts, rounded in each call or once, against loops in float64."""
    tokens, hidden, inner = 5 * len(gpus()), 144, 160
    x, ct = numbers(1, tokens, hidden), numbers(2, tokens, hidden)
    named = rounded.weights_of(3, EXPERTS, hidden, inner)
    wide = {n: v.astype(np.float64) for n, v in named.items()}
    for ep in rank_counts():
        mesh = gpu_mesh(ep)
        with epic.jax.open(mesh, "ep", **SIZES) as group:
            for is_frozen in (False, True):
                options = epic.jax.Moe.of(
                    num_experts=EXPERTS, top_k=2, hidden=hidden, inner=inner,
                    weight_type=None if is_frozen else "e4m3",
                )  # fmt: skip
                weights = epic.jax.MoeWeights(**{n: jnp.asarray(v) for n, v in named.items()})
                weights = epic.jax.scaled(weights) if is_frozen else weights
                specs = epic.jax.sharded.weight_specs(group, weights)
                pairs = zip(weights, specs, strict=True)
                weights = epic.jax.MoeWeights(
                    *(None if w is None else put(mesh, w, spec) for w, spec in pairs)
                )

                def loss_of(x: Any, w: Any, ct: Any, group: Any = group, o: Any = options) -> Any:
                    out = epic.jax.moe(group, o, x, w).out
                    return (out * ct).sum(), out

                step = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True))
                (_, out), (d_x, d_w) = step(put(mesh, x), weights, put(mesh, ct))
                true = rounded.moe(x.astype(np.float64), wide, ct.astype(np.float64), 2, is_frozen)
                found = [(out, true[0]), (d_x, true[1])]
                found += [(d_w.w_gate, true[2]["w_gate"]), (d_w.b_down, true[2]["b_down"])]
                if not is_frozen:
                    found += [(d_w.w_gate_up, true[2]["w_gate_up"])]
                errors = [relative(whole(got), wanted) for got, wanted in found]
                assert max(errors) < 2e-3, (ep, is_frozen, errors)
                epic.jax.check(group)
