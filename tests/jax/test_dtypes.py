# SPDX-License-Identifier: Apache-2.0
"""Tests parameters with other dtypes than the rows.

The layer converts those of the router. Those of experts must all have one dtype.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import epic.jax
import layers
from conftest import make_mesh
from reference import relative

CASE = {"shared": True, "normalize": True, "balance_coeff": 0.5}


def rounded(dtype: Any) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return weights and tokens that the dtype holds exactly, as float32."""
    weights = layers.weights(CASE)
    x = layers.arrays()[0]
    return jax.tree.map(lambda v: np.asarray(v, dtype).astype(np.float32), (weights, x))


@pytest.mark.parametrize("gemm", [None, jax.lax.ragged_dot], ids=["core", "composed"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_all_parameters_of_one_dtype(dtype: str, gemm: Any, opened: Any) -> None:
    """Check weights converted by tree.map(astype): output and gradients match float64, the load is
    exact, and each gradient has its parameter's dtype."""
    mesh = make_mesh(2)
    group = opened(mesh)
    weights, x = rounded(jnp.dtype(dtype))
    options = layers.options(CASE, 2)
    narrow = epic.jax.MoeWeights(**{n: jnp.asarray(w, dtype) for n, w in weights.items()})

    def loss_of(w: Any) -> Any:
        out = epic.jax.sharded.moe(mesh, group, options, x, w, grouped_gemm=gemm)
        return (out.out.astype(jnp.float32) * layers.arrays()[1]).sum() + out.loss, out

    (_, out), gradient = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(narrow)
    wide = epic.jax.MoeWeights(**{n: jnp.asarray(w) for n, w in weights.items()})
    plain = jax.jit(partial(epic.jax.sharded.moe, mesh, group, options))(x, wide)
    assert np.array_equal(out.load, plain.load)
    for name, got in gradient._asdict().items():
        if got is not None:
            assert got.dtype == jnp.dtype(dtype), name
    # Computed in float64 from the rounded weights.
    true = true_of(weights, x)
    assert relative(out.out, true[0]) < 5e-6
    for name, value in true[3].items():
        step = 2.0**-7 if dtype == "bfloat16" else 2.0**-10  # the rounding of the gradient itself
        got = np.asarray(getattr(gradient, name), np.float64)
        assert relative(got, value) < step, name


def true_of(weights: dict[str, np.ndarray], x: np.ndarray) -> Any:
    """Return layers.true_step of other weights and tokens."""
    found = pytest.MonkeyPatch()
    with found.context() as patch:
        import cases

        ct = layers.arrays()[1]
        patch.setattr(cases, "weights", lambda _: weights)
        patch.setattr(cases, "arrays", lambda: (x, ct))
        return layers.true_step(CASE, 2)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"shared_gate_up": "bfloat16"}, r"shared_gate_up is bfloat16.*: must be float32\["),
    ({"shared_down": "float16"}, r"shared_down is float16.*: must be float32\["),
    ({"w_down": "bfloat16"}, r"w_down is bfloat16.*: must be float32\["),
    ({"w_gate": "int32"}, r"w_gate is int32.*: must be a float type"),
    ({"w_gate": "complex64"}, r"w_gate is complex64.*: must be a float type"),
    ({"bias": "int32"}, r"bias is int32.*: must be a float type"),
]


@pytest.mark.parametrize(("wrong", "sentence"), WRONG, ids=str)
def test_dtypes_that_cannot_be(wrong: dict[str, Any], sentence: str, opened: Any) -> None:
    """Wrong dtypes are refused while tracing, by name."""
    group = opened(None)
    given = layers.weights({**CASE, "bias": True})
    given |= {name: np.asarray(given[name], jnp.dtype(dtype)) for name, dtype in wrong.items()}
    x = layers.arrays()[0]
    with pytest.raises(epic.jax.EpicArgumentError, match=sentence):
        epic.jax.moe(group, layers.options(CASE, 1), x, epic.jax.MoeWeights(**given))


def test_float64_goes_with_float64(opened: Any) -> None:
    """Rows of one and weights of the other are refused, as the core cannot mix them."""
    group = opened(None)
    given = layers.weights({})
    options = layers.options({}, 1)
    x = layers.arrays()[0]
    with (
        jax.enable_x64(True),
        pytest.raises(epic.jax.EpicArgumentError, match="must both be float64"),
    ):
        epic.jax.moe(group, options, x.astype(np.float64), epic.jax.MoeWeights(**given))
    with jax.enable_x64(True):
        wide = epic.jax.MoeWeights(**{n: w.astype(np.float64) for n, w in given.items()})
        wide = wide._replace(w_gate=given["w_gate"])  # the router's weight is converted
        out = epic.jax.moe(group, options, x.astype(np.float64), wide).out
    assert relative(out, layers.true_step({}, 1)[0]) < 1e-12
