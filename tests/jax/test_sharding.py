# SPDX-License-Identifier: Apache-2.0
"""Tests the layer with weights sharded by FSDP and losses over data axes, and its collectives."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import epic.jax
import layers
from conftest import make_mesh
from epic.jax import call
from reference import relative
from steps import mapped, numbers

CASES = ["normalized", "biases", "shared"]
MESHES = {"fsdp2_ep2": (1, 2, 2), "dp2_fsdp2": (2, 2, 1), "fsdp4": (1, 4, 1), "dp2_ep2": (2, 1, 2)}


def three_axes(shape: tuple[int, ...]) -> Any:
    """Return a mesh dp x fsdp x ep."""
    devices = np.array(jax.devices()[:4]).reshape(shape)
    return jax.sharding.Mesh(devices, ("dp", "fsdp", "ep"))


def placed(mesh: Any, group: Any, case: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return x, weights and output gradient in their shardings."""
    weights = layers.weights(case)
    named = epic.jax.MoeWeights(**weights)
    specs = epic.jax.sharded.weight_specs(group, named, ("fsdp",))._asdict()
    w = {n: jax.device_put(v, NamedSharding(mesh, specs[n])) for n, v in weights.items()}
    rows = NamedSharding(mesh, P(("dp", "fsdp", "ep")))
    x, ct = (jax.device_put(v, rows) for v in layers.arrays())
    return x, w, ct


@pytest.mark.parametrize("gemm", [None, jax.lax.ragged_dot], ids=["core", "ragged_dot"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", MESHES)
def test_fsdp(shape: str, name: str, gemm: Any, opened: Any) -> None:
    """Results match, and gradients are sharded like the weights."""
    mesh, case = three_axes(MESHES[shape]), layers.CASES[name]
    group = opened(mesh)
    args = placed(mesh, group, case)
    run = layers.step(mesh, group, case, fsdp_axes=("fsdp",), grouped_gemm=gemm)
    got = run(*args)
    layers.compare(got, layers.true_step(case, 4 // group.num_ranks))
    for key, weight in args[1].items():
        assert got[3][key].sharding.is_equivalent_to(weight.sharding, weight.ndim), key


def test_axes_of_size_one_without_a_type(opened: Any) -> None:
    """Check FSDP over an axis of size 1 if JAX leaves such axes out of the types of arrays."""
    option = "jax_remove_size_one_mesh_axis_from_type"  # MaxText sets it
    mesh, case = three_axes((2, 1, 2)), layers.CASES["softmax"]
    before = getattr(jax.config, option)
    jax.config.update(option, True)
    try:
        group = opened(mesh)
        args = placed(mesh, group, case)
        got = layers.step(mesh, group, case, fsdp_axes=("fsdp",))(*args)
    finally:
        jax.config.update(option, before)
    layers.compare(got, layers.true_step(case, 2))


def collectives(text: str) -> list[tuple[str, str]]:
    """Return name and replica groups of each collective of XLA."""
    kinds = "all-gather|reduce-scatter|all-to-all|collective-permute"
    pattern = rf"= \S+ ({kinds})\(.*?replica_groups=(.+?), (?:dimensions|use_global)"
    return re.findall(pattern, text)


def test_fsdp_gathers_over_its_axis_alone(opened: Any) -> None:
    """XLA gathers and reduce-scatters weights over fsdp, and does nothing else."""
    mesh, case = three_axes((1, 2, 2)), layers.CASES["softmax"]
    group = opened(mesh)
    args = placed(mesh, group, case)
    text = layers.step(mesh, group, case, fsdp_axes=("fsdp",)).lower(*args).compile().as_text()
    found = collectives(text)
    assert {kind for kind, _ in found} == {"all-gather", "reduce-scatter"}, found
    # Devices 0 and 2 differ only in fsdp, and so do 1 and 3. XLA has three ways to write this.
    across = ("{{0,2},{1,3}}", "[2,2]<=[2,2]T(1,0)", "{'fsdp'}")
    assert all(groups.endswith(across) for _, groups in found), found
    assert f"f32[{layers.BATCH // 4}" not in "".join(
        line for line in text.splitlines() if "all-gather(" in line
    )


@pytest.mark.parametrize("gemm", [None, jax.lax.ragged_dot], ids=["core", "ragged_dot"])
@pytest.mark.parametrize("name", ["normalized", "sigmoid", "zero_experts"])
def test_losses_over_data_axes(name: str, gemm: Any, mesh: Any, opened: Any) -> None:
    """The losses count all tokens together, as one group of all devices would."""
    case = layers.CASES[name]
    group = opened(mesh)
    x, ct = layers.arrays()
    run = layers.step(mesh, group, case, loss_axes=("dp",), grouped_gemm=gemm)
    layers.compare(run(x, layers.weights(case), ct), layers.true_step(case, 1))


def test_load_of_all_groups(mesh: Any, opened: Any) -> None:
    """sharded.moe adds the load over all devices, and the bias follows it."""
    case = layers.CASES["softmax"]
    group = opened(mesh)
    x, _ = layers.arrays()
    weights = layers.weights(case)
    wish = layers.options(case, group.num_ranks)
    run = jax.jit(
        lambda x, w: epic.jax.sharded.moe(mesh, group, wish, x, epic.jax.MoeWeights(**w)).load
    )
    load = np.asarray(run(x, weights))
    z = x.reshape(-1, layers.HIDDEN).astype(np.float64) @ weights["w_gate"]
    ids = np.argsort(-z, axis=1, kind="stable")[:, :2]
    wanted = np.bincount(ids.ravel(), minlength=layers.EXPERTS)
    assert load.tolist() == wanted.tolist()
    bias = epic.jax.bias_update(jnp.zeros(layers.EXPERTS), jnp.asarray(load), 0.25)
    assert bias.tolist() == (0.25 * np.sign(wanted.mean() - wanted)).tolist()


def test_bias_update_is_exact() -> None:
    """The update is exact for loads whose sum or mean is not exact in float32."""
    for load in ([3, 4, 4], [2**30, 2**30 - 1], [16777217, 16777216], [5, 5]):
        mean = sum(load) / len(load)
        wanted = [float(np.sign(mean - v)) for v in load]
        got = epic.jax.bias_update(jnp.zeros(len(load)), jnp.asarray(load, jnp.int32), 1.0)
        assert got.tolist() == wanted, load


def test_early_and_late_weighting_agree(opened: Any) -> None:
    """Output and every gradient, including that of the down bias, agree up to rounding."""
    mesh = make_mesh(2)
    group = opened(mesh)
    case = {"biases": True, "normalize": True}
    x, ct = layers.arrays()
    w = layers.weights(case)
    late, early = (
        layers.step(mesh, group, {**case, "weighting": kind})(x, w, ct)
        for kind in ("late", "early")
    )
    for a, b in zip(jax.tree.leaves(late), jax.tree.leaves(early), strict=True):
        assert relative(a, b) < 2e-6 or np.abs(np.asarray(a) - np.asarray(b)).max() < 1e-6


def test_too_small_a_capacity(opened: Any) -> None:
    """Too few slots raise an error on every rank, or drop choices. Dropped tokens return zeros."""
    mesh = make_mesh(4)
    group = opened(mesh)
    case = layers.CASES["softmax"]
    x, _ = layers.arrays()
    w = epic.jax.MoeWeights(**layers.weights(case))
    wish = layers.options(case, 4)

    def run(overflow: str, capacity: int) -> Any:
        layer = epic.jax.Layer(layers.EXPERTS, 2, overflow=overflow)
        options = epic.jax.Moe(layer, wish.router, wish.experts, capacity=capacity)
        return jax.jit(lambda x: epic.jax.sharded.moe(mesh, group, options, x, w))(x)

    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        jax.block_until_ready(run("error", 3))
    out = run("drop", 2)  # space for one row per expert
    live = np.abs(np.asarray(out.out)).sum(axis=-1).ravel() > 0
    assert 1 <= live.sum() <= layers.EXPERTS
    assert int(out.load.sum()) == 2 * x.shape[0] * x.shape[1]
    assert int(out.demand.sum()) == int(out.load.sum())


def test_without_numbers_of_call_sites(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the primitive, dependent layers work, and independent layers work with channel=."""
    monkeypatch.setattr(call, "site_primitive", lambda: None)
    mesh = make_mesh(2)
    group = opened(mesh)
    case = layers.CASES["normalized"]
    x, ct = layers.arrays()
    w = layers.weights(case)
    layers.compare(layers.step(mesh, group, case)(x, w, ct), layers.true_step(case, 2))

    def side_by_side(x: Any, w: Any, ct: Any) -> Any:
        return [layers.step(mesh, group, case, channel=i)(x, w, ct) for i in range(6)]

    for got in jax.jit(side_by_side)(x, w, ct):
        layers.compare(got, layers.true_step(case, 2))
    total = mapped(mesh, lambda x: epic.jax.sum(group, epic.jax.sum(group, x)), 1)
    v = numbers(1, 4, 3)
    pairs = np.asarray(v, np.float64).reshape(2, 2, 3).sum(axis=1)
    assert relative(total(v), np.repeat(2 * pairs, 2, axis=0)) < 1e-6


def test_devices_with_the_same_tokens(opened: Any) -> None:
    """Devices along an axis that shards neither tokens nor weights compute the same results."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("ep", "tp"))
    group = opened(mesh)
    case = layers.CASES["normalized"]
    x, ct = layers.arrays()
    for gemm in (None, jax.lax.ragged_dot):
        run = layers.step(mesh, group, case, token_axes=("ep",), grouped_gemm=gemm)
        # compare() reads one copy of each result; the devices with other copies may still run.
        got = jax.block_until_ready(run(x, layers.weights(case), ct))
        layers.compare(got, layers.true_step(case, 1))


def test_experts_over_two_axes() -> None:
    """A group may be several axes of the mesh."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("expert", "tensor"))
    case = layers.CASES["normalized"]
    x, ct = layers.arrays()
    wish: dict[str, Any] = {"max_tokens": 64, "max_row_bytes": 4096, "timeout_ms": 60000}
    with epic.jax.open(mesh, ("expert", "tensor"), **wish) as group:
        assert group.num_ranks == 4
        got = layers.step(mesh, group, case)(x, layers.weights(case), ct)
        layers.compare(got, layers.true_step(case, 1))
