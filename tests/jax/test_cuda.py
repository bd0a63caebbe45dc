# SPDX-License-Identifier: Apache-2.0
"""Lowers programs for GPUs on a machine without GPUs, and checks the calls in them.

tests/jax/gpu checks the results of these calls, and frames.c their handlers.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import epic.jax
from conftest import make_mesh
from epic.jax.groups import Group

ONE_CALL = {"epic_moe", "epic_moe_backward"}
EXPERTS = {"epic_experts", "epic_experts_backward"}
HIDDEN, INNER = 16, 8
SHAPES = {
    "w_gate": (HIDDEN, 4),
    "w_gate_up": (4, HIDDEN, 2 * INNER),
    "w_down": (4, INNER, HIDDEN),
}


def calls_of(graphs: bool = True, dtype: Any = jnp.bfloat16, **more: Any) -> tuple[set[str], str]:
    """Return the targets of forward and backward as lowered for CUDA, and the text."""
    mesh = make_mesh(4)
    group = Group("of_gpus", ("ep",), 4, 64, 4096, "gpu", graphs)
    given = {n: more.pop(n) for n in ("grouped_gemm", "token_mask", "rank_of_expert") if n in more}
    options = epic.jax.Moe.of(num_experts=4, top_k=2, hidden=HIDDEN, inner=INNER, **more)
    columns = 4 + more.get("zero_experts", 0)
    w = {n: np.zeros((HIDDEN, columns) if n == "w_gate" else s) for n, s in SHAPES.items()}
    w = {n: np.asarray(v, np.float32) for n, v in w.items()}
    specs = {n: P() if n == "w_gate" else P("ep") for n in w}

    def loss_of(x: Any, w: Any) -> Any:
        found = epic.jax.moe(group, options, x, epic.jax.MoeWeights(**w), **given)
        return jax.lax.psum(found.out.astype(jnp.float32).sum() + found.loss, "ep")

    whole = jax.shard_map(loss_of, mesh=mesh, in_specs=(P("ep"), specs), out_specs=P())
    x = jax.ShapeDtypeStruct((4, 8, HIDDEN), dtype)
    traced = jax.jit(jax.grad(whole, argnums=(0, 1))).trace(x, w)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return set(re.findall(r"@(epic_\w+)", text)), text


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_one_call(dtype: Any) -> None:
    """Check the core's own layer, in XLA's graphs or not. Its weights are converted to the rows'
    dtype, for the tensor cores."""
    names, text = calls_of(dtype=dtype, balance_coeff=0.5, alignment=128)
    assert names == ONE_CALL
    assert calls_of(graphs=False)[0] == {name + "_no_graph" for name in ONE_CALL}
    kind = "bf16" if dtype == jnp.bfloat16 else "f32"
    for shape in ("1x16x16", "1x8x16"):
        calls = [line for line in text.splitlines() if "@epic_moe" in line]
        assert len(calls) == 2 and all(f"tensor<{shape}x{kind}>" in line for line in calls)


ALSO: dict[str, dict[str, Any]] = {
    "zero_experts": {"zero_experts": 1},
    "tree": {"sum_order": "tree"},
    "owners": {"rank_of_expert": np.arange(4, dtype=np.int32)},
}


@pytest.mark.parametrize("wish", ALSO.values(), ids=ALSO.keys())
def test_one_call_for(wish: dict[str, Any]) -> None:
    """The other options of the core's layer are checked, too."""
    assert calls_of(**wish)[0] == ONE_CALL


REST: dict[str, tuple[dict[str, Any], bool]] = {
    "quantized": ({"quantize": "1x32"}, True),
    "mask": ({"token_mask": np.ones((1, 8), bool)}, True),
    "their_gemm": ({"grouped_gemm": jax.lax.ragged_dot}, False),
}


@pytest.mark.parametrize(("wish", "has_experts"), REST.values(), ids=REST.keys())
def test_steps(wish: dict[str, Any], has_experts: bool) -> None:
    """A layer that the core does not support on CUDA is composed, with the core's experts."""
    names, _ = calls_of(**wish)
    assert not names & ONE_CALL and {"epic_combine_backward", "epic_router"} <= names
    assert (names >= EXPERTS) == has_experts


def test_memory_of_experts() -> None:
    """The memory fits the platform; without a platform it fits both."""
    options = epic.jax.Experts(2, HIDDEN, INNER)
    counts = jnp.array([8, 8], jnp.int32)
    own = epic.jax.ExpertWeights(
        jnp.zeros((2, HIDDEN, 2 * INNER), jnp.bfloat16), jnp.zeros((2, INNER, HIDDEN), jnp.bfloat16)
    )
    rows = jnp.zeros((1024, HIDDEN), jnp.bfloat16)

    def saved(group: Group | None) -> int:
        run = jax.jit(lambda x: epic.jax.experts(options, x, counts, counts, own, group=group))
        text = run.trace(rows).lower(lowering_platforms=("cuda",)).as_text()
        (line,) = (line for line in text.splitlines() if "@epic_experts" in line)
        return int(re.findall(r"tensor<(\d+)xui8>", line.split("->")[1])[0])

    group = Group("of_gpus", ("ep",), 1, 64, 4096, "gpu")
    assert saved(group) == 1024 * 2 * INNER * 2  # bf16 on GPUs, float32 on CPUs
    assert saved(None) == 1024 * 2 * INNER * 4
