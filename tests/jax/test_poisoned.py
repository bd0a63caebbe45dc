# SPDX-License-Identifier: Apache-2.0
"""Tests products that leave rows past the last slab undefined, forward and backward.

In a composed layer these rows must not change the gradient of any parameter.
"""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import epic.jax
from conftest import make_mesh

T, K, E, H, INNER = 12, 2, 4, 8, 6
NAN = float("nan")


def owners_of(slots: int, sizes: Any) -> tuple[Any, Any]:
    """Return the expert of each slot, and whether the slot belongs to a slab."""
    owner = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(slots), side="right")
    return jnp.minimum(owner, sizes.shape[0] - 1), (owner < sizes.shape[0])[:, None]


@jax.custom_vjp
def poisoned(x: Any, w: Any, sizes: Any) -> Any:
    """Return the grouped product, with NaN in the rows past the last slab."""
    owner, live = owners_of(x.shape[0], sizes)
    return jnp.where(live, jnp.einsum("sk,skn->sn", jnp.where(live, x, 0), w[owner]), NAN)


def poisoned_forward(x: Any, w: Any, sizes: Any) -> tuple[Any, Any]:
    """Save all operands."""
    return poisoned(x, w, sizes), (x, w, sizes)


def poisoned_backward(kept: Any, d_y: Any) -> tuple[Any, ...]:
    """Poison the gradient of the rows past the last slab, too."""
    x, w, sizes = kept
    owner, live = owners_of(x.shape[0], sizes)
    x, d = jnp.where(live, x, 0), jnp.where(live, d_y, 0)
    d_x = jnp.where(live, jnp.einsum("sn,skn->sk", d, w[owner]), NAN)
    experts = jax.nn.one_hot(owner, sizes.shape[0]) * live
    d_w = jnp.einsum("sk,sn,se->ekn", x, d, experts)
    return d_x, d_w.astype(w.dtype), np.zeros(sizes.shape, jax.dtypes.float0)


poisoned.defvjp(poisoned_forward, poisoned_backward)


# ------------------------------------------------------------------------ the truth ----


def act(name: str, gate: np.ndarray, up: np.ndarray | None) -> np.ndarray:
    """Return the nonlinearity of one token in float64. If up is None, the expert is not gated."""
    sigmoid = 1 / (1 + np.exp(-gate))
    erf = np.vectorize(math.erf)
    plain = {
        "silu": gate * sigmoid,
        "gelu": gate * 0.5 * (1 + erf(gate / math.sqrt(2))),
        "gelu_tanh": 0.5
        * gate
        * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))),
        "relu2": np.maximum(gate, 0) ** 2,
    }
    if up is None:
        return plain[name]
    if name in plain:
        return plain[name] * up
    limit = 10.0 if name == "clamped_silu" else 7.0
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    if name == "clamped_silu":
        return gate / (1 + np.exp(-gate)) * up
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


def mlp(options: Any, x: np.ndarray, w: dict[str, np.ndarray], e: int, weight: float) -> np.ndarray:
    """Return one expert's weighted output for one token."""
    x = x * weight if options.weighting == "input" else x
    z = x @ w["w_gate_up"][e] + w["b_gate_up"][e]
    if options.ungated:
        a = act(options.activation, z, None)
    elif options.interleaved:
        a = act(options.activation, z[0::2], z[1::2])
    else:
        a = act(options.activation, z[: len(z) // 2], z[len(z) // 2 :])
    y = a @ w["w_down"][e] + w["b_down"][e]
    return y if options.weighting == "input" else y * weight


def true_out(options: Any, x: np.ndarray, w: dict[str, np.ndarray], mask: Any) -> np.ndarray:
    """Return the layer's output by plain loops in float64; softmax scores are the weights."""
    out = np.zeros_like(x)
    logits = x @ w["w_gate"]
    for t in range(len(x)):
        if mask is not None and not mask[t]:
            continue
        p = np.exp(logits[t] - logits[t].max())
        p /= p.sum()
        for e in np.argsort(-p, kind="stable")[:K]:
            out[t] += mlp(options.experts, x[t], w, int(e), float(p[e]))
        if options.shared is not None:
            shared = {name.replace("shared_", ""): value for name, value in w.items()}
            shared = {"w_gate_up": shared["gate_up"], "w_down": shared["down"]} | {
                "b_gate_up": w["shared_b_gate_up"],
                "b_down": w["shared_b_down"],
            }
            out[t] += mlp(options.shared, x[t], shared, 0, 1.0)
    return out


def make_weights(options: Any) -> dict[str, np.ndarray]:
    """Return random weights of all experts."""
    rng = np.random.default_rng(1)
    width = options.experts.width
    shapes = {"w_gate": (H, E), "w_gate_up": (E, H, width), "w_down": (E, INNER, H)}
    shapes |= {"b_gate_up": (E, width), "b_down": (E, H)}
    if options.shared is not None:
        shapes |= {"shared_gate_up": (1, H, width), "shared_down": (1, INNER, H)}
        shapes |= {"shared_b_gate_up": (1, width), "shared_b_down": (1, H)}
    return {name: rng.normal(size=shape) * 0.5 for name, shape in shapes.items()}


EXPERTS = [
    {"activation": a, "weighting": w, "ungated": u, "interleaved": i}
    for a, w, u, i in (
        ("silu", "late", False, False),
        ("silu", "early", False, True),
        ("silu", "input", False, False),
        ("gelu", "input", True, False),
        ("gelu_tanh", "early", False, False),
        ("relu2", "late", True, False),
        ("clamped_swiglu", "early", False, True),
        ("clamped_silu", "input", False, False),
    )
]


RUNS = [("plain", experts) for experts in EXPERTS]
RUNS += [(form, EXPERTS[i]) for form in ("mask", "shared") for i in (1, 2)]


@pytest.mark.parametrize(("form", "experts"), RUNS, ids=str)
def test_a_poisoned_tail(form: str, experts: dict[str, Any], opened: Any) -> None:
    """The output, and each gradient along a random direction, match float64."""
    mesh = make_mesh(2)
    group = opened(mesh)
    options = epic.jax.Moe.of(
        num_experts=E, top_k=K, hidden=H, inner=INNER, alignment=4, capacity=96, **experts
    )
    if form == "shared":
        shared = epic.jax.Experts(1, H, INNER, **{**experts, "weighting": "late"})
        options = replace(options, shared=shared)
    rng = np.random.default_rng(0)
    x, ct = rng.normal(size=(2, T, H))
    mask = rng.random(T) < 0.7 if form == "mask" else None
    weights = make_weights(options)

    def loss_of(x: Any, w: Any) -> Any:
        out = epic.jax.sharded.moe(
            mesh,
            group,
            options,
            x,
            epic.jax.MoeWeights(**w),
            token_mask=mask,
            grouped_gemm=poisoned,
        ).out
        return (out * ct.astype(np.float32)).sum(), out

    narrow = jax.tree.map(lambda v: v.astype(np.float32), (x, weights))
    run = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True))
    (_, out), (d_x, d_w) = run(*narrow)
    assert np.abs(np.asarray(out) - true_out(options, x, weights, mask)).max() < 1e-4
    step = 1e-5
    for name, gradient in {"x": d_x, **d_w}.items():
        value = x if name == "x" else weights[name]
        direction = rng.normal(size=value.shape)
        ends = []
        for sign in (1, -1):
            moved = value + sign * step * direction
            tokens = moved if name == "x" else x
            others = weights if name == "x" else {**weights, name: moved}
            ends.append((true_out(options, tokens, others, mask) * ct).sum())
        slope = (ends[0] - ends[1]) / (2 * step)
        got = (np.asarray(gradient, np.float64) * direction).sum()
        assert abs(got - slope) < 2e-3 * max(abs(slope), 1), (name, got, slope)


@pytest.mark.parametrize("form", ["rounded", "replicas", "zero_experts", "uneven"])
def test_other_layers_are_as_with_a_product_of_zeros(form: str, opened: Any) -> None:
    """All gradients equal those of jax.lax.ragged_dot, whose tail is zero."""
    mesh = make_mesh(2)
    group = opened(mesh)
    wish: dict[str, Any] = {"num_experts": E, "top_k": K, "hidden": H, "inner": INNER}
    more: dict[str, Any] = {}
    wish |= {"capacity": 96, "balance_coeff": 0.1}
    if form == "rounded":
        wish["quantize"] = "1x32"
    if form == "replicas":
        wish |= {"num_logical": 2}
        more["logical_of_expert"] = np.arange(E, dtype=np.int32) % 2
    if form == "zero_experts":
        wish["zero_experts"] = 2
    if form == "uneven":
        wish["num_experts"] = 3
    options = epic.jax.Moe.of(**wish)
    rng = np.random.default_rng(2)
    columns = options.router.num_experts + options.router.zero_experts
    count, width = options.layer.num_experts, 2 * INNER
    shapes = {"w_gate": (H, columns), "w_gate_up": (count, H, width), "w_down": (count, INNER, H)}
    shapes |= {"b_gate_up": (count, width), "b_down": (count, H)}
    weights = {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    x = rng.normal(size=(T, H)).astype(np.float32)

    def gradients(gemm: Any) -> Any:
        def loss_of(x: Any, w: Any) -> Any:
            found = epic.jax.sharded.moe(
                mesh, group, options, x, epic.jax.MoeWeights(**w), grouped_gemm=gemm, **more
            )
            return jnp.square(found.out).sum() + found.loss

        return jax.jit(jax.grad(loss_of, argnums=(0, 1)))(x, weights)

    for a, b in zip(
        *map(jax.tree.leaves, map(gradients, (poisoned, jax.lax.ragged_dot))), strict=True
    ):
        assert np.all(np.isfinite(a))
        assert np.abs(a - b).max() <= 1e-4 * max(1.0, float(np.abs(b).max()))
