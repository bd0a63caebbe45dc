# SPDX-License-Identifier: Apache-2.0
"""Tests that programs with EPIC's types among their arguments and results pass through
jax.export."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import epic.jax
import layers
from conftest import make_mesh

CHECKS = [export.DisabledSafetyCheck.custom_call(target) for target in epic.jax.TARGETS]
LAYER = epic.jax.Layer(8, 2, alignment=4)


def travel(function: Any, *args: Any) -> Any:
    """Return the program after it was serialized and read again."""
    written = export.export(jax.jit(function), disabled_checks=CHECKS)(*args).serialize()
    return export.deserialize(written)


def test_weights_and_results_of_a_layer(opened: Any) -> None:
    """MoeWeights and MoeOut can be exported, over a mesh and with a gradient of MoeWeights."""
    mesh = make_mesh(2)
    group = opened(mesh)
    case = layers.CASES["biases"]
    options = layers.options(case, 2)
    weights = epic.jax.MoeWeights(**layers.weights(case))
    x = jnp.asarray(layers.arrays()[0])

    def layer(x: Any, weights: Any) -> Any:
        return epic.jax.sharded.moe(mesh, group, options, x, weights)

    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    x, weights = jax.device_put((x, weights), sharding)
    wanted, got = jax.jit(layer)(x, weights), travel(layer, x, weights).call(x, weights)
    assert isinstance(got, epic.jax.MoeOut) and got.record.spec == wanted.record.spec
    assert np.array_equal(got.out, wanted.out) and np.array_equal(got.load, wanted.load)
    records = [epic.jax.read_plan(out.record) for out in (got, wanted)]
    assert [one.kept for one in records[0]] == [one.kept for one in records[1]]

    def gradient(x: Any, weights: Any) -> Any:
        return jax.grad(lambda w: jnp.square(layer(x, w).out).sum())(weights)

    d_wanted, d_got = jax.jit(gradient)(x, weights), travel(gradient, x, weights).call(x, weights)
    assert isinstance(d_got, epic.jax.MoeWeights)
    assert np.array_equal(d_got.w_gate_up, d_wanted.w_gate_up)


def test_plans_and_weights_of_experts(opened: Any) -> None:
    """A Plan and ExpertWeights can be passed from one exported program to another."""
    group = opened(None)
    ids = jnp.asarray(np.arange(12).reshape(6, 2) % 8, jnp.int32)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 16)), jnp.float32)
    plan = travel(lambda i: epic.jax.plan(group, LAYER, i), ids).call(ids)
    assert isinstance(plan, epic.jax.Plan) and plan.spec == epic.jax.plan(group, LAYER, ids).spec

    def there_and_back(plan: Any, x: Any) -> Any:
        return epic.jax.combine(plan, epic.jax.dispatch(plan, x)[0])

    assert np.array_equal(travel(there_and_back, plan, x).call(plan, x), 2 * x)
    weights = epic.jax.ExpertWeights(jnp.ones((8, 16, 24)), jnp.ones((8, 12, 16)))
    options = epic.jax.Experts(hidden=16, inner=12)
    recv = epic.jax.dispatch(plan, x)[0]

    def mlp(w: Any, recv: Any, plan: Any) -> Any:
        return epic.jax.experts(options, recv, plan.expert_rows, plan.expert_tokens, w)

    got = travel(mlp, weights, recv, plan).call(weights, recv, plan)
    assert np.array_equal(got, mlp(weights, recv, plan))


def test_every_type_is_known() -> None:
    """Every public named tuple or dataclass of arrays is registered in export_types.py."""
    from epic.jax import export_types

    tuples = [getattr(epic.jax, name) for name in epic.jax.__all__]
    tuples = [kind for kind in tuples if hasattr(kind, "_fields")]
    assert set(tuples) == set(export_types.TUPLES)
    with pytest.raises(ValueError, match="Duplicate serialization"):
        export_types.register_types()
