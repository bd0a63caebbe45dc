# SPDX-License-Identifier: Apache-2.0
"""Tests the conversion of separate gate and up kernels, as MaxText has them, to EPIC's layout."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import epic.jax
from conftest import RANKS, make_mesh
from reference import relative

EXPERTS, HIDDEN, INNER, TOP_K = 8, 16, 12, 2


def params_of(with_shared: bool) -> dict[str, Any]:
    """Return random parameters of a block with MaxText's names, float32."""
    rng = np.random.default_rng(3)

    def real(*shape: int) -> Any:
        return jnp.asarray(0.4 * rng.normal(size=shape), jnp.float32)

    routed = {
        "gate": {"kernel": real(HIDDEN, EXPERTS), "bias": real(EXPERTS)},
        "wi_0": real(EXPERTS, HIDDEN, INNER),
        "wi_1": real(EXPERTS, HIDDEN, INNER),
        "wo": real(EXPERTS, INNER, HIDDEN),
        "wi_0_bias": real(EXPERTS, INNER),
        "wi_1_bias": real(EXPERTS, INNER),
        "wo_bias": real(EXPERTS, HIDDEN),
    }
    if not with_shared:
        return routed
    kernels = {"wi_0": (HIDDEN, INNER), "wi_1": (HIDDEN, INNER), "wo": (INNER, HIDDEN)}
    shared = {name: {"kernel": real(*shape)} for name, shape in kernels.items()}
    return {"MoeBlock_0": routed, "shared_experts": shared}


def dense(params: dict[str, Any], x: Any, gate_bias: str) -> Any:
    """Return a block of MaxText: all experts on every token, weighted by the choice."""
    routed = params.get("MoeBlock_0", params)
    rows = x.reshape(-1, HIDDEN)
    logits = jnp.matmul(rows, routed["gate"]["kernel"], precision="highest")
    by = jax.nn.softmax(logits)
    if gate_bias == "logits":
        by = jax.nn.softmax(logits + routed["gate"]["bias"])
        scores = by
    else:
        scores, by = by, by + routed["gate"]["bias"]
    ids = jax.lax.top_k(by, TOP_K)[1]
    weights = (jax.nn.one_hot(ids, EXPERTS) * jnp.take_along_axis(scores, ids, 1)[..., None]).sum(1)
    first = jnp.einsum("th,ehi->tei", rows, routed["wi_0"]) + routed["wi_0_bias"]
    second = jnp.einsum("th,ehi->tei", rows, routed["wi_1"]) + routed["wi_1_bias"]
    each = jnp.einsum("tei,eih->teh", jax.nn.silu(first) * second, routed["wo"])
    out = jnp.einsum("te,teh->th", weights, each + routed["wo_bias"])
    if "shared_experts" in params:
        shared = {name: part["kernel"] for name, part in params["shared_experts"].items()}
        out = out + (jax.nn.silu(rows @ shared["wi_0"]) * (rows @ shared["wi_1"])) @ shared["wo"]
    return out.reshape(x.shape)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("with_shared", [False, True])
@pytest.mark.parametrize("gate_bias", ["logits", "choice"])
@pytest.mark.parametrize("ep", RANKS)
def test_block_of_maxtext(
    ep: int, gate_bias: str, with_shared: bool, interleaved: bool, opened: Any
) -> None:
    """The layer computes the results of a dense block with MaxText's parameters. Its gradients have
    MaxText's names, and the conversion back is exact."""
    mesh = make_mesh(ep)
    group, params = opened(mesh), params_of(with_shared)
    options = epic.jax.Moe.of(
        num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, inner=INNER, interleaved=interleaved,
        shared=epic.jax.Experts(1, HIDDEN, INNER, interleaved=interleaved) if with_shared else None,
    )  # fmt: skip
    how: dict[str, Any] = {"interleaved": interleaved, "gate_bias": gate_bias}
    x, ct = jnp.asarray(np.random.default_rng(4).normal(size=(2, 8, 3, HIDDEN)), jnp.float32)

    def sparse(params: Any, x: Any) -> Any:
        found = epic.jax.moe(group, options, x, epic.jax.from_maxtext(params, **how))
        return (found.out * ct).sum(), found.out

    def true(params: Any, x: Any) -> Any:
        out = dense(params, x, gate_bias)
        return (out * ct).sum(), out

    runs = [jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True)) for f in (sparse, true)]
    got, wanted = (run(params, x) for run in runs)
    assert str(jax.tree.structure(got)) == str(jax.tree.structure(wanted))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert relative(a, b) < 2e-5 or np.abs(np.asarray(a) - np.asarray(b)).max() < 1e-5
    back = epic.jax.to_maxtext(epic.jax.from_maxtext(params, **how), **how)
    assert str(jax.tree.structure(back)) == str(jax.tree.structure(params))
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(params), strict=True):
        assert np.array_equal(a, b)


def test_columns() -> None:
    """`interleaved` decides the order of columns, also of biases and of stacked layers."""
    gate, up = jnp.arange(6.0).reshape(1, 2, 3), jnp.arange(10.0, 16.0).reshape(1, 2, 3)
    halves = epic.jax.merge_gate_up(gate, up)
    mixed = epic.jax.merge_gate_up(gate, up, interleaved=True)
    assert halves[0, 1].tolist() == [3, 4, 5, 13, 14, 15]
    assert mixed[0, 1].tolist() == [3, 13, 4, 14, 5, 15]
    for w, interleaved in ((halves, False), (mixed, True)):
        for a, b in zip(
            epic.jax.split_gate_up(w, interleaved=interleaved), (gate, up), strict=True
        ):
            assert np.array_equal(a, b)


def test_what_cannot_be() -> None:
    """Missing parameters, and those that do not fit, are refused by name."""
    params = params_of(False)
    weights, wrong = epic.jax.from_maxtext(params), cast("Any", params)
    calls: list[tuple[Any, str]] = [
        (lambda: epic.jax.from_maxtext({"wi_0": 1, "wi_1": 1}), "params has no 'gate'"),
        (lambda: epic.jax.from_maxtext({**params, "wi_1_bias": None}), "wi_1_bias is missing"),
        (lambda: epic.jax.from_maxtext(params, gate_bias="both"), "logits, choice"),
        (lambda: epic.jax.merge_gate_up(jnp.ones(3), jnp.ones(4)), r"up is float32\[4\]"),
        (lambda: epic.jax.split_gate_up(jnp.ones(3)), "3 columns: must have an even number"),
        (lambda: epic.jax.to_maxtext(weights, gate_bias="choice"), "b_gate is given"),
        (lambda: epic.jax.to_maxtext(epic.jax.scaled(weights)), "w_gate_up_scales is given"),
        (lambda: epic.jax.to_maxtext(wrong), "weights is a dict"),
    ]
    for call, sentence in calls:
        with pytest.raises(epic.jax.EpicArgumentError, match=sentence):
            call()
