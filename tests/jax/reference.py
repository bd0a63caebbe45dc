# SPDX-License-Identifier: Apache-2.0
"""Expected results of the functions, in plain numpy in float64.

The code follows epic.h, processes all tokens of a group at once, and uses no code of EPIC.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray


def relative(got: Any, wanted: Any) -> float:
    """Return the largest error over the largest value."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    return float(np.abs(got - wanted).max(initial=0) / max(np.abs(wanted).max(initial=0), 1e-30))


# ------------------------------------------------------------------------------ slots ----


@dataclass
class Slots:
    """Return the choice (token of the group, k) in each slot of a rank, or (-1, -1)."""

    choices: list[tuple[int, int]]
    rows: list[int]
    tokens: list[int]


def slots_of(ids: Array, rank: int, num_ranks: int, experts: int, alignment: int) -> Slots:
    """Return the choices by local expert, then token in rank order, then k; slabs are padded."""
    local = experts // num_ranks
    slots = Slots([], [], [])
    for expert in range(rank * local, (rank + 1) * local):
        mine = [(t, k) for t, row in enumerate(ids) for k, e in enumerate(row) if e == expert]
        padding = -len(mine) % alignment
        slots.choices += mine + [(-1, -1)] * padding
        slots.rows.append(len(mine) + padding)
        slots.tokens.append(len(mine))
    return slots


# ------------------------------------------------------------------------------ router ----


def scores_of(score: str, z: Array) -> Array:
    """Return softmax or sigmoid of the logits."""
    if score == "sigmoid":
        return 1 / (1 + np.exp(-z))
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def scores_backward(score: str, s: Array, d_s: Array) -> Array:
    """Return the gradient of the logits from that of the scores."""
    if score == "sigmoid":
        return d_s * s * (1 - s)
    return s * (d_s - (d_s * s).sum(axis=1, keepdims=True))


@dataclass
class Routing:
    """The routing of all tokens of a group."""

    ids: Array
    weights: Array
    scores: Array
    chosen: Array


def route(
    score: str,
    normalize: bool,
    z: Array,
    bias: Array | None,
    top_k: int,
    ids: Array | None = None,
) -> Routing:
    """Choose the top_k experts by score plus bias (the lower id if scores are equal), or use
    `ids`."""
    s = scores_of(score, z)
    by = z if bias is None else s + bias
    if ids is None:
        ids = np.argsort(-by, axis=1, kind="stable")[:, :top_k]
    chosen = np.take_along_axis(s, ids, 1)
    total = chosen.sum(axis=1, keepdims=True) if normalize else 1
    return Routing(ids, chosen / total, s, chosen)


def route_backward(score: str, normalize: bool, r: Routing, d_w: Array) -> Array:
    """Return the gradient of the logits from that of the weights."""
    d_chosen = d_w
    if normalize:
        total = r.chosen.sum(axis=1, keepdims=True)
        d_chosen = (d_w - (d_w * r.weights).sum(axis=1, keepdims=True)) / total
    d_s = np.zeros_like(r.scores)
    np.put_along_axis(d_s, r.ids, d_chosen, 1)
    return scores_backward(score, r.scores, d_s)


def load_of(ids: Array, experts: int) -> Array:
    """Return the number of choices of each expert."""
    return np.bincount(ids[ids >= 0], minlength=experts)


def balance(score: str, z: Array, load: Array, top_k: int, coeff: float) -> tuple[float, Array]:
    """Return the balance loss over all tokens and its gradient."""
    experts, total = load.shape[0], z.shape[0]
    s = scores_of(score, z)
    whole = s.sum(axis=1, keepdims=True)
    factor = experts * coeff / (top_k * total**2)
    d_p = np.zeros_like(z)
    d_p[:, :experts] = factor * load
    p = s / whole
    d_s = (d_p - (d_p * p).sum(axis=1, keepdims=True)) / whole
    return float((p * d_p).sum()), scores_backward(score, s, d_s)


def z_loss(z: Array, coeff: float) -> tuple[float, Array]:
    """Return the z-loss over all tokens and its gradient."""
    top = z.max(axis=1, keepdims=True)
    e = np.exp(z - top)
    lse = np.log(e.sum(axis=1, keepdims=True)) + top
    factor = coeff / z.shape[0]
    return float(factor * (lse**2).sum()), factor * 2 * lse * e / e.sum(axis=1, keepdims=True)


# ------------------------------------------------------------------------------ experts ----


def silu(x: Array) -> tuple[Array, Array]:
    """Return silu and its derivative."""
    s = 1 / (1 + np.exp(-x))
    return x * s, s * (1 + x * (1 - s))


def mlp(x: Array, w: dict[str, Array], e: int) -> tuple[Array, Any]:
    """Apply one expert to rows."""
    z = x @ w["w_gate_up"][e] + w.get("b_gate_up", np.zeros((e + 1, 1)))[e]
    gate, up = np.split(z, 2, axis=1)
    value, slope = silu(gate)
    a = value * up
    y = a @ w["w_down"][e] + w.get("b_down", np.zeros((e + 1, 1)))[e]
    return y, (x, value, slope, up, a)


def mlp_backward(w: dict[str, Array], d: dict[str, Array], e: int, kept: Any, d_y: Array) -> Array:
    """Add to the gradients d; return the gradient of the rows."""
    x, value, slope, up, a = kept
    d["w_down"][e] += a.T @ d_y
    d_a = d_y @ w["w_down"][e].T
    d_z = np.concatenate([d_a * up * slope, d_a * value], axis=1)
    d["w_gate_up"][e] += x.T @ d_z
    if "b_down" in w:
        d["b_down"][e] += d_y.sum(axis=0)
        d["b_gate_up"][e] += d_z.sum(axis=0)
    return d_z @ w["w_gate_up"][e].T


# ------------------------------------------------------------------------------ layer ----


@dataclass
class Options:
    """Options of the layer below."""

    top_k: int
    score: str = "softmax"
    normalize: bool = False
    balance_coeff: float = 0.0
    z_coeff: float = 0.0
    weigh_input: bool = False
    expert_capacity: int = 0


def weighted_experts(
    o: Options, x: Array, w: dict[str, Array], d: dict[str, Array], r: Routing, d_out: Array
) -> tuple[Array, Array, Array]:
    """Return out, d_x and the gradient of the weights; add those of the experts to d."""
    out, d_x, d_w = np.zeros_like(x), np.zeros_like(x), np.zeros_like(r.weights)
    experts = w["w_down"].shape[0]
    for e in range(experts):
        token, k = np.nonzero(r.ids == e)
        if o.expert_capacity:
            token, k = token[: o.expert_capacity], k[: o.expert_capacity]
        weight, mine = r.weights[token, k][:, None], d_out[token]
        y, kept = mlp(x[token] * weight if o.weigh_input else x[token], w, e)
        np.add.at(out, token, y if o.weigh_input else weight * y)
        d_rows = mlp_backward(w, d, e, kept, mine if o.weigh_input else weight * mine)
        d_w[token, k] = ((d_rows * x[token]) if o.weigh_input else (mine * y)).sum(axis=1)
        np.add.at(d_x, token, weight * d_rows if o.weigh_input else d_rows)
    token, k = np.nonzero(r.ids >= experts)  # identity experts
    weight = r.weights[token, k][:, None]
    np.add.at(out, token, weight * x[token])
    np.add.at(d_x, token, weight * d_out[token])
    d_w[token, k] = (d_out[token] * x[token]).sum(axis=1)
    return out, d_x, d_w


def moe(
    o: Options,
    x: Array,
    w: dict[str, Array],
    d_out: Array,
    d_loss: float,
    ids: Array | None = None,
) -> tuple[Array, float, Array, dict[str, Array]]:
    """Return out, loss, d_x and d_w of a layer whose weights are dicts of float64 arrays."""
    z = x @ w["w_gate"]
    r = route(o.score, o.normalize, z, w.get("bias"), o.top_k, ids)
    experts = w["w_down"].shape[0]
    load = load_of(np.where(r.ids < experts, r.ids, -1), experts)
    losses = [balance(o.score, z, load, o.top_k, o.balance_coeff), z_loss(z, o.z_coeff)]
    d = {name: np.zeros_like(value) for name, value in w.items()}
    out, d_x, d_w = weighted_experts(o, x, w, d, r, d_out)
    d_z = route_backward(o.score, o.normalize, r, d_w)
    d_z += d_loss * (losses[0][1] + losses[1][1])
    d["w_gate"] = x.T @ d_z
    if "shared_gate_up" in w:
        names = {"shared_gate_up": "w_gate_up", "shared_down": "w_down"}
        inner = {new: w[old] for old, new in names.items()}
        y, kept = mlp(x, inner, 0)
        out += y
        d_x += mlp_backward(inner, {new: d[old] for old, new in names.items()}, 0, kept, d_out)
    return out, losses[0][0] + losses[1][0], d_x + d_z @ w["w_gate"].T, d
