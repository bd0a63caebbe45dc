# SPDX-License-Identifier: Apache-2.0
"""Tests the Flax modules: sharded initialization, results, dtypes, and the expert bias."""

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import epic.jax
import layers
from reference import relative
from test_sharding import three_axes

pytest.importorskip("flax")
import flax.linen as nn
from flax import nnx

import epic.jax.linen
import epic.jax.nnx
from epic.jax.block import Biases

FULL = {"normalize": True, "biases": True, "shared": True, "balance_coeff": 0.5, "z_coeff": 0.1}
TABLE = {"table": 5, "score": "sigmoid", "normalize": True}
MESHES = {"ep1": (2, 2, 1), "ep2": (2, 1, 2), "fsdp_ep2": (1, 2, 2), "ep4": (1, 1, 4)}
SPECS = {
    "w_gate": P("fsdp", None),
    "w_gate_up": P("ep", "fsdp", None),
    "w_down": P("ep", None, "fsdp"),
    "b_gate_up": P("ep", None),
    "b_down": P("ep", None),
    "shared_gate_up": P(None, "fsdp", None),
    "shared_down": P(None, None, "fsdp"),
}


EVERYWHERE = [
    pytest.param(shape, FULL, marks=pytest.mark.night if name in ("ep1", "ep2") else (), id=name)
    for name, shape in MESHES.items()
]
EVERYWHERE += [pytest.param((2, 1, 2), TABLE, id="table")]
everywhere = pytest.mark.parametrize(("shape", "case"), EVERYWHERE)
groups_and_one = pytest.mark.parametrize(
    "shape", [pytest.param((2, 1, 2), marks=pytest.mark.night), (1, 1, 4)], ids=["ep2", "ep4"]
)


def wishes(case: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return arguments that both modules accept."""
    return {"biases": Biases(experts="biases" in case), "fsdp_axes": ("fsdp",), **more}


def linen_block(mesh: Any, group: Any, case: dict[str, Any], **more: Any) -> Any:
    """Return the module and its variables, created in their shardings."""
    module = epic.jax.linen.MoEBlock(
        mesh, group, layers.options(case, group.num_ranks), **wishes(case, **more)
    )
    x = jnp.zeros((1, 1, layers.HIDDEN))  # the size of the batch does not matter here
    key = jax.random.key(0)
    logical = nn.get_partition_spec(jax.eval_shape(module.init, key, x))
    rules = epic.jax.linen.logical_rules(group, ("fsdp",))
    shardings = nn.logical_to_mesh_sharding(logical, mesh, rules)
    variables = jax.jit(module.init, out_shardings=shardings)(key, x)
    return module, nn.meta.unbox(variables)


def nnx_block(mesh: Any, group: Any, case: dict[str, Any], **more: Any) -> Any:
    """Return the module, created under jit in its shardings."""
    make = nnx.jit(
        lambda: epic.jax.nnx.MoEBlock(
            mesh,
            group,
            layers.options(case, group.num_ranks),
            rngs=nnx.Rngs(0),
            **wishes(case, **more),
        )
    )
    return make()


def check_places(mesh: Any, params: dict[str, Any]) -> None:
    """Check that each parameter has its sharding and is not all zeros."""
    for name, value in params.items():
        place = NamedSharding(mesh, SPECS[name])
        assert value.sharding.is_equivalent_to(place, value.ndim), name
        assert name.startswith("b_") or np.abs(value).max() > 0.01, name


def placed(old: dict[str, Any], new: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the arrays of new in the shardings of old."""
    assert {n: v.shape for n, v in old.items()} == {n: v.shape for n, v in new.items()}
    return {n: jax.device_put(new[n], v.sharding) for n, v in old.items()}


@everywhere
def test_linen(shape: tuple[int, ...], case: dict[str, Any], opened: Any) -> None:
    """Compare linen's parameter shardings, out, loss and all gradients."""
    grid = three_axes(shape)
    group = opened(grid)
    module, variables = linen_block(grid, group, case)
    params = variables["params"]
    check_places(grid, params)
    params = placed(params, layers.weights(case))
    x, ct = layers.arrays()

    def loss_of(x: Any, params: Any) -> Any:
        out, loss = module.apply({"params": params}, x, **layers.tables(case))
        return (out * ct).sum() + loss, (out, loss)

    run = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True))
    (_, (out, loss)), (d_x, d_w) = run(x, params)
    layers.compare((out, loss, d_x, d_w), layers.true_step(case, 4 // group.num_ranks))


@everywhere
def test_nnx(shape: tuple[int, ...], case: dict[str, Any], opened: Any) -> None:
    """Compare the nnx module in the same way."""
    grid = three_axes(shape)
    group = opened(grid)
    module = nnx_block(grid, group, case)
    state = nnx.state(module, nnx.Param)
    params = {name: state[name][...] for name in state}
    check_places(grid, params)
    for name, value in placed(params, layers.weights(case)).items():
        getattr(module, name)[...] = value
    x, ct = layers.arrays()

    @nnx.jit
    def run(module: Any, x: Any) -> Any:
        def loss_of(module: Any, x: Any) -> Any:
            out, loss = module(x, **layers.tables(case))
            return (out * ct).sum() + loss, (out, loss)

        return nnx.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)(module, x)

    (_, (out, loss)), (d_module, d_x) = run(module, x)
    d_w = {name: d_module[name][...] for name in d_module}
    layers.compare((out, loss, d_x, d_w), layers.true_step(case, 4 // group.num_ranks))


def test_gate_dtype(opened: Any) -> None:
    """With gate_dtype the router's weights are rounded in each call, and have a gradient."""
    grid = three_axes((2, 1, 2))
    group, case = opened(grid), layers.CASES["softmax"]
    more: dict[str, Any] = {"gate_dtype": jnp.bfloat16}
    usual, variables = linen_block(grid, group, case)
    rounding, _ = linen_block(grid, group, case, **more)
    params = placed(variables["params"], layers.weights(case))
    rounded = {**params, "w_gate": params["w_gate"].astype(jnp.bfloat16).astype(jnp.float32)}
    x = jnp.asarray(layers.arrays()[0])

    def run(module: Any, params: Any) -> Any:
        return jax.jit(jax.grad(lambda p: (module.apply({"params": p}, x)[0] ** 2).sum()))(params)

    wanted, found = run(usual, rounded), run(rounding, params)
    assert found["w_gate"].dtype == jnp.float32
    for name, d in found.items():
        most = 2**-8 if name == "w_gate" else 1e-6  # this gradient is rounded to bfloat16
        assert np.abs(d - wanted[name]).max() <= most * np.abs(wanted[name]).max(), name
    module = nnx_block(grid, group, case, **more)
    for name, value in params.items():
        getattr(module, name)[...] = value
    outs = [usual.apply({"params": rounded}, x)[0], module(x)[0]]
    assert np.array_equal(*outs) and not np.array_equal(
        outs[0], usual.apply({"params": params}, x)[0]
    )


@pytest.mark.parametrize("test", [test_linen, pytest.param(test_nnx, marks=pytest.mark.night)])
def test_experts_that_the_ranks_do_not_divide(
    test: Any, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters are those of all experts, on every rank, sharded over fsdp as before."""
    layers.resize(monkeypatch, EXPERTS=7)
    for name in ("w_gate_up", "w_down", "b_gate_up", "b_down"):
        monkeypatch.setitem(SPECS, name, P(None, *SPECS[name][1:]))
    test((1, 2, 2), FULL, opened)


def true_biases(steps: int, rate: float) -> list[np.ndarray]:
    """Return the expert bias after each step over layers.arrays()."""
    x = layers.arrays()[0].reshape(-1, layers.HIDDEN).astype(np.float64)
    z = x @ layers.weights({})["w_gate"]
    scores, bias, found = 1 / (1 + np.exp(-z)), np.zeros(layers.EXPERTS), []
    for _ in range(steps):
        ids = np.argsort(-(scores + bias), axis=1, kind="stable")[:, :2]
        load = np.bincount(ids.ravel(), minlength=layers.EXPERTS)
        bias = bias + rate * np.sign(load.mean() - load)
        found.append(bias)
    return found


RATE = 0.125  # a power of two, so that sums are exact


@pytest.mark.parametrize("make_block", [linen_block, nnx_block])
@pytest.mark.parametrize("rate", [-1.0, float("nan"), "x"])
def test_a_wrong_bias_rate(make_block: Any, rate: Any, opened: Any) -> None:
    """The error is raised when the block is initialized, not at the first training step."""
    grid = three_axes((1, 2, 2))
    with pytest.raises(epic.jax.EpicArgumentError, match=f"bias_rate is {rate!r}: must be"):
        make_block(grid, opened(grid), {"score": "sigmoid"}, bias_rate=rate)


@groups_and_one
def test_linen_bias(shape: tuple[int, ...], opened: Any) -> None:
    """The bias follows the load if its collection is mutable, and has no gradient."""
    grid = three_axes(shape)
    group = opened(grid)
    case = {"score": "sigmoid"}
    module, variables = linen_block(grid, group, case, bias_rate=RATE)
    params = placed(variables["params"], layers.weights(case))
    state = {"moe": variables["moe"]}
    x, _ = layers.arrays()
    run = jax.jit(lambda s: module.apply({"params": params, **s}, x, mutable=["moe", "losses"]))
    for wanted in true_biases(3, RATE):
        (_, loss), updates = run(state)
        assert updates["losses"]["moe_loss"][0] == loss
        state = {"moe": updates["moe"]}
        assert state["moe"]["expert_bias"].tolist() == wanted.tolist()
    # If the collection is immutable, the bias does not change.
    jax.block_until_ready(jax.jit(lambda s: module.apply({"params": params, **s}, x))(state))


@groups_and_one
def test_nnx_bias(shape: tuple[int, ...], opened: Any) -> None:
    """The bias follows the load; it is no nnx.Param."""
    grid = three_axes(shape)
    group = opened(grid)
    case = {"score": "sigmoid"}
    module = nnx_block(grid, group, case, bias_rate=RATE)
    params = nnx.state(module, nnx.Param)
    assert "expert_bias" not in params
    for name, value in layers.weights(case).items():
        getattr(module, name)[...] = jax.device_put(value, params[name][...].sharding)
    x, _ = layers.arrays()
    run = nnx.jit(lambda m, x: m(x))
    for wanted in true_biases(3, RATE):
        run(module, x)
        assert module.expert_bias[...].tolist() == wanted.tolist()
    module.update_bias = False
    run(module, x)
    assert module.expert_bias[...].tolist() == wanted.tolist()
    module.update_bias = True
    if hasattr(nnx, "view"):  # newer Flax uses nnx.view in model.eval()
        run(nnx.view(module, deterministic=True), x)
        assert module.expert_bias[...].tolist() == wanted.tolist()


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_dtypes(param_dtype: str, opened: Any) -> None:
    """Rows in dtype, parameters and their gradients in param_dtype, the router in float32."""
    grid = three_axes((2, 1, 2))
    group = opened(grid)
    x, ct = layers.arrays()
    wish: dict[str, Any] = {"dtype": jnp.bfloat16, "param_dtype": jnp.dtype(param_dtype)}
    module, variables = linen_block(grid, group, {}, **wish)
    numbers = {n: np.asarray(v, wish["param_dtype"]) for n, v in layers.weights({}).items()}
    params = placed(variables["params"], numbers)

    def loss_of(params: Any) -> Any:
        out, loss = module.apply({"params": params}, x)
        return (out.astype(jnp.float32) * ct).sum() + loss, out

    (_, out), d_w = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(params)
    assert out.dtype == jnp.bfloat16
    assert {v.dtype for v in d_w.values()} == {wish["param_dtype"]}
    wanted = layers.true_step({}, 2)
    assert relative(out.astype(jnp.float32), wanted[0]) < 3e-2
    if param_dtype == "float32":  # otherwise the router's weights are rounded
        assert relative(d_w["w_down"], wanted[3]["w_down"]) < 5e-2
    other = nnx_block(grid, group, {}, **wish)
    assert other.w_down[...].dtype == wish["param_dtype"]
    found = jax.block_until_ready(nnx.jit(lambda m, x: m(x))(other, x))
    assert found[0].dtype == jnp.bfloat16


def test_a_group_of_another_mesh(opened: Any) -> None:
    """A group of another mesh is refused, also if a linen module gets the mesh later."""
    grid = three_axes((1, 1, 4))
    group = opened(grid)
    turned = jax.sharding.Mesh(grid.devices[..., ::-1], grid.axis_names)
    refused = pytest.raises(ValueError, match=r"the mesh has devices \[3 2 1 0\] along axis 'ep'")
    with refused:
        linen_block(turned, group, {})
    with refused:
        nnx_block(turned, group, {})
    module, variables = linen_block(grid, group, {})
    with refused:
        module.clone(mesh=turned).apply(variables, layers.arrays()[0])


def test_flax_is_imported_when_used() -> None:
    """epic.jax itself does not import flax."""
    text = "import epic.jax, sys; assert 'flax' not in sys.modules; epic.jax.nnx.MoEBlock"
    subprocess.run([sys.executable, "-c", text], check=True)
