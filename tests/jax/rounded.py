# SPDX-License-Identifier: Apache-2.0
"""A layer with e4m3 experts, in plain numpy loops in float64.

Rows have one scale for each 128 elements, and weights one for each block of 128 x 128. Gradients
ignore the rounding. This file uses no code of EPIC.
"""

from typing import Any

import ml_dtypes
import numpy as np

from reference import load_of, route, route_backward, silu

Array = np.ndarray
BLOCK = 128


def round_block(x: Array) -> Array:
    """Round a block that shares a scale, in float32; return the values that it represents."""
    x = x.astype(np.float32)
    top = np.abs(x).max(initial=0)
    scale = np.float32(1) if top == 0 else np.float32(top / np.float32(448))
    return (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * np.float64(scale)


def round_rows(x: Array) -> Array:
    """Round rows [rows, n]."""
    out = np.zeros(x.shape, np.float64)
    for t in range(x.shape[0]):
        for begin in range(0, x.shape[1], BLOCK):
            out[t, begin : begin + BLOCK] = round_block(x[t, begin : begin + BLOCK])
    return out


def round_weight(w: Array) -> Array:
    """Round weights [experts, n, m]."""
    out = np.zeros(w.shape, np.float64)
    for e in range(w.shape[0]):
        for i in range(0, w.shape[1], BLOCK):
            for j in range(0, w.shape[2], BLOCK):
                tile = (e, slice(i, i + BLOCK), slice(j, j + BLOCK))
                out[tile] = round_block(w[tile])
    return out


def moe(
    x: Array, w: dict[str, Array], d_out: Array, top_k: int, is_frozen: bool
) -> tuple[Array, Array, dict[str, Array], Array]:
    """Return out, d_x, d_w and the load.

    With is_frozen the weights of the experts are kept in e4m3. They have no gradient, and backward
    multiplies rounded gradients by them.
    """
    z = x @ w["w_gate"]
    r = route("softmax", False, z, None, top_k)
    up, down = round_weight(w["w_gate_up"]), round_weight(w["w_down"])
    back_up, back_down = (up, down) if is_frozen else (w["w_gate_up"], w["w_down"])
    arrived = round_rows(x)
    d = {name: np.zeros_like(value) for name, value in w.items()}
    out, d_x, d_weights = np.zeros_like(x), np.zeros_like(x), np.zeros_like(r.weights)
    for t in range(x.shape[0]):
        for k in range(top_k):
            e, weight = r.ids[t, k], r.weights[t, k]
            gate, other = np.split(arrived[t] @ up[e] + w["b_gate_up"][e], 2)
            value, slope = silu(gate)
            a = value * other
            y = round_rows(a[None])[0] @ down[e] + w["b_down"][e]
            out[t] += weight * y
            d_y = weight * d_out[t]
            rounded = round_rows(d_y[None])[0] if is_frozen else d_y
            d_a = rounded @ back_down[e].T
            d_weights[t, k] = (d_a * a).sum() / weight + d_out[t] @ w["b_down"][e]
            d_gates = np.concatenate([d_a * other * slope, d_a * value])
            d["w_down"][e] += np.outer(a, d_y)
            d["b_down"][e] += d_y
            d["w_gate_up"][e] += np.outer(x[t], d_gates)
            d["b_gate_up"][e] += d_gates
            sent = round_rows(d_gates[None])[0] if is_frozen else d_gates
            d_x[t] += sent @ back_up[e].T
    d_z = route_backward("softmax", False, r, d_weights)
    d["w_gate"] = x.T @ d_z
    return out, d_x + d_z @ w["w_gate"].T, d, load_of(r.ids, w["w_down"].shape[0])


def weights_of(seed: int, experts: int, hidden: int, inner: int) -> dict[str, Any]:
    """Return random weights of all experts, float32."""
    rng = np.random.default_rng(seed)
    shapes = {
        "w_gate": (hidden, experts),
        "w_gate_up": (experts, hidden, 2 * inner),
        "w_down": (experts, inner, hidden),
        "b_gate_up": (experts, 2 * inner),
        "b_down": (experts, hidden),
    }
    return {n: (rng.normal(size=s) / s[-2] ** 0.5).astype(np.float32) for n, s in shapes.items()}
