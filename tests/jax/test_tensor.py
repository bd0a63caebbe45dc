# SPDX-License-Identifier: Apache-2.0
"""Tests experts whose inner dimension is sharded over a mesh axis."""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import epic.jax
import layers

FULL = {"normalize": True, "biases": True, "shared": True, "balance_coeff": 0.5, "z_coeff": 0.1}
CASES = {"full": FULL, "early": layers.CASES["early"], "input": layers.CASES["input"]}
MESHES = {"ep2_tp2": (1, 1, 2, 2), "tp4": (1, 1, 1, 4), "fsdp2_tp2": (1, 2, 1, 2)}
# Gate and up columns alternate, so that each shard of the weight has both.
MIXED = np.arange(2 * layers.INNER).reshape(2, layers.INNER).T.reshape(-1)


def mixed(name: str, value: Any) -> Any:
    """Return a weight of layers.py with interleaved columns."""
    return value[..., MIXED] if name.endswith("gate_up") else value


def options(case: dict[str, Any], ranks: int) -> epic.jax.Moe:
    """Return the options of layers.py, interleaved."""
    wish = layers.options(case, ranks)
    shared = wish.shared and replace(wish.shared, interleaved=True)
    return replace(wish, experts=replace(wish.experts, interleaved=True), shared=shared)


RAGGED = jax.lax.ragged_dot
RUNS = [("full", None, "ep2_tp2"), ("full", RAGGED, "ep2_tp2"), ("full", None, "fsdp2_tp2")]
RUNS += [("early", None, "tp4"), ("early", RAGGED, "ep2_tp2"), ("input", None, "ep2_tp2")]


@pytest.mark.parametrize(("name", "gemm", "shape"), RUNS)
def test_inner_over_an_axis(shape: str, name: str, gemm: Any, opened: Any) -> None:
    """Forward and all gradients match float64; weights are not moved, and there is one sum."""
    grid = np.array(jax.devices()[:4]).reshape(MESHES[shape])
    mesh = jax.sharding.Mesh(grid, ("dp", "fsdp", "ep", "tp"))
    group = opened(mesh)
    case = CASES[name]
    wish = options(case, group.num_ranks)
    x, ct = layers.arrays()
    true = {n: mixed(n, v) for n, v in layers.weights(case).items()}
    how: dict[str, Any] = {"fsdp_axes": ("fsdp",), "tensor_axis": "tp"}
    specs = epic.jax.sharded.weight_specs(group, epic.jax.MoeWeights(**true), **how)._asdict()
    w = {n: jax.device_put(v, NamedSharding(mesh, specs[n])) for n, v in true.items()}
    assert w["w_gate_up"].addressable_shards[0].data.size * 4 == true["w_gate_up"].size

    def loss_of(x: Any, w: Any) -> tuple[Any, Any]:
        weights = epic.jax.MoeWeights(**w)
        moe = epic.jax.sharded.moe(
            mesh, group, wish, x, weights, grouped_gemm=gemm, loss_axes=("fsdp",), **how
        )
        return (moe.out * ct).sum() + moe.loss, moe

    run = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True))
    (_, moe), (d_x, d_w) = run(x, w)
    out, loss, true_x, true_w = layers.true_step(case, 1)
    layers.compare(
        (moe.out, moe.loss, d_x, d_w),
        (out, loss, true_x, {n: mixed(n, v) for n, v in true_w.items()}),
    )
    assert int(moe.load.sum()) == 2 * layers.BATCH * layers.LENGTH
    for key, weight in w.items():
        assert d_w[key].sharding.is_equivalent_to(weight.sharding, weight.ndim), key
    text = run.lower(x, w).compile().as_text() or ""
    assert not re.search("all-to-all|collective-permute", text)


@pytest.mark.parametrize(("name", "gemm"), [("full", None), ("early", RAGGED)])
@pytest.mark.parametrize("shape", ["ep2_tp2", "tp4"])
def test_tokens_over_the_tensor_axis(shape: str, name: str, gemm: Any, opened: Any) -> None:
    """Tokens that are sharded over the axis are gathered, and the output is reduce-scattered: XLA
    does not sum rows over all devices."""
    grid = np.array(jax.devices()[:4]).reshape(MESHES[shape])
    mesh = jax.sharding.Mesh(grid, ("dp", "fsdp", "ep", "tp"))
    group = opened(mesh)
    case = CASES[name]
    wish = options(case, group.num_ranks)
    true = {n: mixed(n, v) for n, v in layers.weights(case).items()}
    specs = epic.jax.sharded.weight_specs(group, epic.jax.MoeWeights(**true), (), "tp")._asdict()
    w = {n: jax.device_put(v, NamedSharding(mesh, specs[n])) for n, v in true.items()}
    tokens = P(("ep", "tp"))
    x, ct = (jax.device_put(v, NamedSharding(mesh, tokens)) for v in layers.arrays())

    def loss_of(x: Any, w: Any, ct: Any) -> tuple[Any, Any]:
        weights = epic.jax.MoeWeights(**w)
        more: dict[str, Any] = {"grouped_gemm": gemm, "token_axes": ("ep", "tp")}
        moe = epic.jax.sharded.moe(mesh, group, wish, x, weights, tensor_axis="tp", **more)
        return (moe.out * ct).sum() + moe.loss, moe

    run = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True))
    (_, moe), (d_x, d_w) = run(x, w, ct)
    out, loss, true_x, true_w = layers.true_step(case, 1)
    layers.compare(
        (moe.out, moe.loss, d_x, d_w),
        (out, loss, true_x, {n: mixed(n, v) for n, v in true_w.items()}),
    )
    assert int(moe.load.sum()) == 2 * layers.BATCH * layers.LENGTH
    assert moe.demand.shape == (group.num_ranks,)
    assert moe.out.sharding.is_equivalent_to(x.sharding, 3)
    text = run.lower(x, w, ct).compile().as_text() or ""
    assert "reduce-scatter(" in text and not re.search("all-to-all|collective-permute", text)
    rows = layers.BATCH * layers.LENGTH // group.num_ranks
    sums = [line for line in text.splitlines() if " all-reduce(" in line]
    assert sums and not any(f"f32[{rows},{layers.HIDDEN}]" in line for line in sums)


def test_a_mask_of_sharded_tokens(opened: Any) -> None:
    """Masks are gathered with the tokens, and unmasked tokens get the results of a layer without a
    mask."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("ep", "tp"))
    group = opened(mesh)
    wish = options({}, 2)
    x, _ = layers.arrays()
    true = {n: jnp.asarray(mixed(n, v)) for n, v in layers.weights({}).items()}
    weights = epic.jax.MoeWeights(**true)
    mask = np.random.default_rng(5).random(x.shape[:2]) < 0.6
    more: dict[str, Any] = {"token_axes": ("ep", "tp"), "tensor_axis": "tp", "token_mask": mask}
    found = jax.jit(lambda x: epic.jax.sharded.moe(mesh, group, wish, x, weights, **more))(x)
    wanted = np.where(mask[..., None], layers.true_step({}, 1)[0], 0)
    assert np.abs(np.asarray(found.out) - wanted).max() < 1e-5
    assert int(found.load.sum()) == 2 * mask.sum()


def test_blocks_over_a_tensor_axis(opened: Any) -> None:
    """Both kinds of block work; nnx shards its parameters over the axis."""
    nn = pytest.importorskip("flax.linen")
    from flax import nnx

    import epic.jax.linen
    import epic.jax.nnx

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("ep", "tp"))
    group = opened(mesh)
    wish = options({}, 2)
    x, _ = layers.arrays()
    true = {n: jnp.asarray(mixed(n, v)) for n, v in layers.weights({}).items()}
    wanted = layers.true_step({}, 1)[0]
    linen = epic.jax.linen.MoEBlock(mesh, group, wish, tensor_axis="tp")
    logical = nn.get_partition_spec(jax.eval_shape(linen.init, jax.random.key(0), x))
    rules = epic.jax.linen.logical_rules(group, (), "tp")
    places = nn.logical_to_mesh_sharding(logical, mesh, rules)["params"]
    assert places["w_down"].spec == P("ep", "tp", None)
    params = {n: jax.device_put(v, places[n]) for n, v in true.items()}
    out, _ = jax.jit(linen.apply)({"params": params}, x)
    assert np.abs(np.asarray(out) - wanted).max() < 1e-5
    block = epic.jax.nnx.MoEBlock(mesh, group, wish, rngs=nnx.Rngs(0), tensor_axis="tp")
    down: Any = block.w_down  # type: ignore[attr-defined]
    assert down[...].sharding.spec == P("ep", "tp", None)
    for name, value in params.items():
        getattr(block, name)[...] = value
    assert np.abs(np.asarray(nnx.jit(lambda m, x: m(x)[0])(block, x)) - wanted).max() < 1e-5


def test_what_cannot_be(opened: Any) -> None:
    """Wrong arguments are refused while tracing, with the remedy."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(1, 4), ("ep", "tp"))
    group = opened(mesh)
    x = jnp.asarray(layers.arrays()[0])
    good = options({}, 1)
    odd = replace(good, experts=replace(good.experts, inner=10))
    columns = options({"zero_experts": 3}, 1)
    plain = layers.options({}, 1)
    for wish, given, kind, sentence in (
        (plain, {}, epic.jax.EpicArgumentError, "interleaved is False: must be True"),
        (odd, {}, epic.jax.EpicArgumentError, "experts.inner is 10: must be a multiple of 4"),
        (columns, {}, epic.jax.EpicUnsupportedError, "identity experts"),
        (
            good,
            {"token_axes": ("ep", "tp"), "loss_axes": ("tp",)},
            epic.jax.EpicArgumentError,
            "loss_axes contains 'tp': must not",
        ),
    ):
        case = {"zero_experts": 3} if wish is columns else {}
        inner = wish.experts.inner
        more: dict[str, Any] = dict(given)
        w = layers.weights(case)
        # The axis must divide the arrays whatever inner is, otherwise JAX reports its own error
        # first.
        w |= {"w_gate_up": np.zeros((8, 16, 24)), "w_down": np.zeros((8, 12, 16))}
        assert inner in (10, 12)
        with pytest.raises(kind, match=sentence):
            epic.jax.sharded.moe(
                mesh, group, wish, x, epic.jax.MoeWeights(**w), tensor_axis="tp", **more
            )
    weights = epic.jax.MoeWeights(**layers.weights({}))
    inside = jax.shard_map(
        lambda x: epic.jax.moe(group, plain, x, weights, scatter_tokens=True).out,
        mesh=mesh, in_specs=P("ep"), out_specs=P("ep"),
    )  # fmt: skip
    with pytest.raises(epic.jax.EpicArgumentError, match="must be False without tensor_axis"):
        inside(x)
