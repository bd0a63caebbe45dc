# SPDX-License-Identifier: Apache-2.0
"""A layer of random numbers, and its expected results. This file uses no framework."""

from typing import Any

import numpy as np

import epic
import reference

BATCH, LENGTH, EXPERTS, HIDDEN, INNER = 8, 3, 8, 16, 12
CASES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "normalized": {"normalize": True, "balance_coeff": 0.5, "z_coeff": 0.1},
    "sigmoid": {"score": "sigmoid", "normalize": True, "bias": True, "balance_coeff": 0.5},
    "biases": {"biases": True, "alignment": 8},
    "shared": {"shared": True, "z_coeff": 0.1},
    "early": {"weighting": "early", "biases": True},
    "input": {"weighting": "input", "biases": True, "normalize": True},
    "top1": {"top_k": 1},
    "zero_experts": {"zero_experts": 3, "balance_coeff": 0.5, "z_coeff": 0.1},
    "table": {"table": 5, "score": "sigmoid", "normalize": True},
    "drop": {"expert_capacity": 2, "alignment": 4},
    "tree": {
        "leaves": 8,
        "normalize": True,
        "biases": True,
        "shared": True,
        "balance_coeff": 0.5,
        "z_coeff": 0.1,
    },
}


def options(case: dict[str, Any], ranks: int) -> epic.Moe:
    """Return the options of a case for this many ranks."""
    top_k = case.get("top_k", 2)
    return epic.Moe(
        epic.Layer(
            EXPERTS,
            top_k,
            alignment=case.get("alignment", 1),
            overflow="drop" if "expert_capacity" in case else "error",
            expert_capacity=case.get("expert_capacity", 0),
            sum_order="tree" if "leaves" in case else "by_hosts",
            leaves=case.get("leaves", 0),
        ),
        epic.Router(
            EXPERTS,
            top_k,
            zero_experts=case.get("zero_experts", 0),
            score=case.get("score", "softmax"),
            normalize="sum" if case.get("normalize") else "none",
        ),
        epic.Experts(
            0 if EXPERTS % ranks else EXPERTS // ranks,
            HIDDEN,
            INNER,
            weighting=case.get("weighting", "late"),
        ),
        shared=epic.Experts(1, HIDDEN, INNER) if case.get("shared") else None,
        balance_coeff=case.get("balance_coeff", 0.0),
        z_coeff=case.get("z_coeff", 0.0),
    )


def weights(case: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the weights of all experts, float32."""
    rng = np.random.default_rng(7)
    shapes = {
        "w_gate": (HIDDEN, EXPERTS + case.get("zero_experts", 0)),
        "w_gate_up": (EXPERTS, HIDDEN, 2 * INNER),
        "w_down": (EXPERTS, INNER, HIDDEN),
    }
    if case.get("bias"):
        shapes["bias"] = (EXPERTS,)
    if case.get("biases"):
        shapes |= {"b_gate_up": (EXPERTS, 2 * INNER), "b_down": (EXPERTS, HIDDEN)}
    if case.get("shared"):
        shapes |= {"shared_gate_up": (1, HIDDEN, 2 * INNER), "shared_down": (1, INNER, HIDDEN)}
    return {n: (0.4 * rng.normal(size=s)).astype(np.float32) for n, s in shapes.items()}


def arrays() -> tuple[np.ndarray, np.ndarray]:
    """Return x and a random gradient of out."""
    rng = np.random.default_rng(8)
    x, ct = rng.normal(size=(2, BATCH, LENGTH, HIDDEN)).astype(np.float32)
    return x, ct


def tables(case: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return token_ids and the table of experts, if the case has one."""
    if "table" not in case:
        return {}
    rng = np.random.default_rng(9)
    table = [rng.permutation(EXPERTS)[: case.get("top_k", 2)] for _ in range(case["table"])]
    ids = rng.integers(0, case["table"], size=(BATCH, LENGTH))
    return {"token_ids": ids.astype(np.int32), "table": np.array(table, np.int32)}


def true_step(case: dict[str, Any], groups: int) -> tuple[Any, ...]:
    """Return out, loss, d_x and d_weights in float64, for this many groups."""
    o = reference.Options(
        case.get("top_k", 2),
        case.get("score", "softmax"),
        case.get("normalize", False),
        case.get("balance_coeff", 0.0),
        case.get("z_coeff", 0.0),
        case.get("weighting") == "input",
        case.get("expert_capacity", 0),
    )
    w = {name: value.astype(np.float64) for name, value in weights(case).items()}
    x, ct = (v.astype(np.float64).reshape(groups, -1, HIDDEN) for v in arrays())
    ids: Any = [None] * groups
    if "table" in case:
        extra = tables(case)
        ids = extra["table"][extra["token_ids"]].reshape(groups, -1, o.top_k)
    parts = [reference.moe(o, x[g], w, ct[g], 1 / groups, ids[g]) for g in range(groups)]
    whole = (BATCH, LENGTH, HIDDEN)
    out = np.concatenate([p[0] for p in parts]).reshape(whole)
    d_x = np.concatenate([p[2] for p in parts]).reshape(whole)
    d_w = {name: sum(p[3][name] for p in parts) for name in w if name != "bias"}
    return out, sum(p[1] for p in parts) / groups, d_x, d_w


def compare(got: tuple[Any, ...], wanted: tuple[Any, ...], most: float = 5e-6) -> None:
    """Compare each array with a relative tolerance."""
    out, loss, d_x, d_w = wanted
    assert reference.relative(got[0], out) < most
    assert abs(float(got[1]) - loss) <= most * max(abs(loss), 1e-3)
    assert reference.relative(got[2], d_x) < most
    for name, value in d_w.items():
        assert reference.relative(got[3][name], value) < most, name
    if "bias" in got[3]:
        assert not np.any(got[3]["bias"])
