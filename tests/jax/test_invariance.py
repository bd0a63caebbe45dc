# SPDX-License-Identifier: Apache-2.0
"""Tests that tokens have equal bits in all batches and groups with invariant=True.

Also tests check_invariance.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import epic.jax
from conftest import line_of, make_mesh
from steps import numbers

QUICK = bool(os.environ.get("EPIC_JAX_QUICK"))
HIDDEN, INNER, EXPERTS = 24, 16, 8
# The logical expert of each of 16 experts. The replicas of an expert are in one leaf of the tree.
LOGICAL = np.arange(16, dtype=np.int32) // 2
BLOCKS = {1: [0], 2: [1, 0], 4: [2, 0, 3, 1]}  # the rank of each block of experts, by ranks


def options_of(**more: Any) -> epic.jax.Moe:
    """A layer with a shared expert, a zero-expert and losses."""
    wish = {"invariant": True, "balance_coeff": 0.1, **more}
    return epic.jax.Moe.of(
        num_experts=EXPERTS, top_k=2, hidden=HIDDEN, inner=INNER, normalize="sum", zero_experts=1,
        shared=epic.jax.Experts(1, HIDDEN, INNER), **wish,
    )  # fmt: skip


def weights_of(dtype: Any) -> epic.jax.MoeWeights:
    """Random weights of all experts."""
    experts = {
        "w_gate_up": (EXPERTS, HIDDEN, 2 * INNER),
        "w_down": (EXPERTS, INNER, HIDDEN),
        "shared_gate_up": (1, HIDDEN, 2 * INNER),
        "shared_down": (1, INNER, HIDDEN),
    }
    made = {
        name: numbers(i, *shape).astype(dtype) for i, (name, shape) in enumerate(experts.items())
    }
    return epic.jax.MoeWeights(w_gate=numbers(9, HIDDEN, EXPERTS + 1), **made)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.night)])
def test_groups(opened: Any, dtype: str) -> None:
    """No bit differs between batches, devices and groups of 1, 2 and 4 ranks."""
    prints = set()
    for ranks, mesh in ((1, line_of(1)), (2, make_mesh(2)), (4, line_of(4))):
        group = opened(mesh, name=f"of {ranks}", max_tokens=32)
        report = epic.jax.check_invariance(mesh, group, options_of(), weights_of(dtype))
        assert report.is_invariant, report
        assert report.batches == (32, 7, 2, 1)
        prints.add(report.fingerprint)
    assert len(prints) == 1


def trained_weights(dtype: Any) -> dict[str, Any]:
    """Random weights of every kind that has a gradient."""
    shapes = {
        "b_gate": (EXPERTS + 1,),
        "b_gate_up": (EXPERTS, 2 * INNER),
        "b_down": (EXPERTS, HIDDEN),
        "shared_b_gate_up": (1, 2 * INNER),
        "shared_b_down": (1, HIDDEN),
    }
    biases = {name: numbers(20 + i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    cast = {name: b if name == "b_gate" else b.astype(dtype) for name, b in biases.items()}
    found = weights_of(dtype)._replace(**cast)._asdict()
    return {name: w for name, w in found.items() if w is not None}


Layer = Callable[[Any, dict[str, Any]], tuple[Any, Any]]


def moe_in_shard_map(mesh: Any, group: Any, options: epic.jax.Moe, vma: bool) -> Layer:
    """A layer in a shard_map of the caller, who also sums the loss."""

    def layer(x: Any, w: dict[str, Any]) -> tuple[Any, Any]:
        weights = epic.jax.MoeWeights(**w)

        def local(x: Any, weights: Any) -> tuple[Any, Any]:
            moe = epic.jax.moe(group, options, x, weights)
            return moe.out, jax.lax.psum(moe.loss, "ep")

        ins = (P("ep"), epic.jax.sharded.weight_specs(group, weights))
        outs = (P("ep"), P())
        run = jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=vma)
        return run(x, weights)

    return layer


def moe_of_global_arrays(mesh: Any, group: Any, options: epic.jax.Moe) -> Layer:
    """A layer in a plain jit.  All weights are sharded over the group, also those of the gate."""

    def layer(x: Any, w: dict[str, Any]) -> tuple[Any, Any]:
        place = NamedSharding(mesh, P("ep"))
        placed = {
            n: v if v.shape[0] % mesh.size else jax.device_put(v, place) for n, v in w.items()
        }
        moe = epic.jax.sharded.moe(mesh, group, options, x, epic.jax.MoeWeights(**placed))
        return moe.out, moe.loss

    return layer


def nnx_block(mesh: Any, group: Any, options: epic.jax.Moe) -> Layer:
    """The block of flax.nnx with these weights."""
    nnx = pytest.importorskip("flax.nnx")
    from epic.jax.nnx import Biases, MoEBlock

    biases = Biases(gate=True, experts=True, shared=True)
    block = MoEBlock(mesh, group, options, rngs=nnx.Rngs(0), biases=biases)
    graph, _, rest = nnx.split(block, nnx.Param, ...)

    def layer(x: Any, w: dict[str, Any]) -> tuple[Any, Any]:
        params = nnx.State({name: nnx.Param(value) for name, value in w.items()})
        out, loss = nnx.merge(graph, params, rest)(x)
        return out, loss

    return layer


def linen_block(mesh: Any, group: Any, options: epic.jax.Moe) -> Layer:
    """The block of flax.linen with these weights."""
    pytest.importorskip("flax.linen")
    from epic.jax.linen import Biases, MoEBlock

    block = MoEBlock(mesh, group, options, biases=Biases(gate=True, experts=True, shared=True))
    return lambda x, w: block.apply({"params": w}, x)


LAYERS: dict[str, Callable[..., Layer]] = {
    "vma": partial(moe_in_shard_map, vma=True),
    "no_vma": partial(moe_in_shard_map, vma=False),
    "global": moe_of_global_arrays,
    "nnx": nnx_block,
    "linen": linen_block,
}


def compare_groups(
    opened: Any, form: str, dtype: str, tokens: int = 40, options: Any = None, scale: float = 1.0
) -> None:
    """Check that no bit of a result or gradient differs between groups of 1, 2, 4 and 8 ranks.

    scale: factor of the gradient of the output.  The quick run compares all groups for global
    arrays, and 1 and 8 ranks for the other forms.
    """
    x, ct = numbers(1, tokens, HIDDEN).astype(dtype), numbers(2, tokens, HIDDEN) * scale
    options, first = options or options_of(z_coeff=0.01), None
    for ranks in (1, 8) if QUICK and form != "global" else (1, 2, 4, 8):
        if tokens % ranks:
            continue
        mesh = line_of(ranks)
        layer = LAYERS[form](mesh, opened(mesh, name=f"of {ranks}"), options)

        def loss_of(x: Any, w: Any, layer: Layer = layer) -> tuple[Any, Any]:
            out, loss = layer(x, w)
            return (out * ct).sum() + loss, (out, loss)

        run = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True))
        (_, (out, loss)), (d_x, d_w) = run(x, trained_weights(dtype))
        found = {"out": out, "loss": loss, "d_x": d_x, **d_w}
        bits = {name: np.asarray(value).tobytes() for name, value in found.items()}
        first = bits if first is None else first
        assert [name for name in bits if bits[name] != first[name]] == [], ranks
        never_zero = (v for n, v in found.items() if n != "loss" or options.balance_coeff)
        assert all(np.any(np.asarray(value)) for value in never_zero)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", LAYERS)
def test_gradients(opened: Any, form: str, dtype: str) -> None:
    """Losses and all gradients, for each way to call the layer."""
    compare_groups(opened, form, dtype)


def test_gradients_of_unequal_blocks(opened: Any) -> None:
    """20 tokens in 8 blocks of 2 or 3."""
    compare_groups(opened, "global", "float32", tokens=20)


def test_gradients_that_underflow(opened: Any) -> None:
    """Some gradients are rounded to -0, which XLA's sums over the ranks change to +0."""
    options = options_of(balance_coeff=0.0)
    compare_groups(opened, "global", "float16", options=options, scale=1e-7)


def test_gradients_in_tree_order(opened: Any) -> None:
    """The tree order does not need invariant=True."""
    options = options_of(invariant=False, sum_order="tree", leaves=8)
    compare_groups(opened, "global", "float32", options=options)


def test_gradients_in_float64(opened: Any) -> None:
    """Rows and weights in float64."""
    with jax.enable_x64(True):
        compare_groups(opened, "global", "float64")


def row_products(x: Any, w: Any, rows: Any) -> Any:
    """A grouped product that adds in the same order for any number of rows and experts."""
    expert = jnp.repeat(jnp.arange(rows.shape[0]), rows, total_repeat_length=x.shape[0])
    return (x[:, :, None] * w[expert]).sum(axis=1)


# By form: options, arguments of the layer. All except "padding" are composed of several calls.
FORCED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "1x128": ({"quantize": "1x128"}, {}),
    "1x32": ({"quantize": "1x32"}, {}),
    "mask": ({}, {"token_mask": jnp.arange(40) % 7 != 3}),
    "product": ({}, {"grouped_gemm": row_products}),
    "padding": ({"invariant": True}, {}),
}


@pytest.mark.parametrize("form", FORCED)
def test_forced_weights(opened: Any, form: str) -> None:
    """Layers with forced weights, composed ones in tree order: no bit differs, except that XLA
    computes the router's gradients.  Some tokens have no expert."""
    wish, more = FORCED[form]
    options = epic.jax.Moe.of(
        num_experts=EXPERTS, top_k=3, hidden=HIDDEN, inner=INNER,
        **{"sum_order": "tree", "leaves": 8, **wish},
    )  # fmt: skip
    x, ct = numbers(1, 40, HIDDEN), numbers(2, 40, HIDDEN)
    ids = (jnp.arange(40)[:, None] + jnp.array([0, 3, 5])) % EXPERTS
    ids = jnp.where(jnp.arange(40)[:, None] % 9 == 4, -1, ids)
    experts = {n: w for n, w in trained_weights("float32").items() if n[2:] in ("gate_up", "down")}
    first = None
    for ranks in (1, 2, 4, 8):
        mesh = line_of(ranks)
        group = opened(mesh, name=f"of {ranks}")

        def loss_of(x: Any, chosen: Any, w: Any, mesh: Any = mesh, group: Any = group) -> Any:
            weights = epic.jax.MoeWeights(w_gate=jnp.zeros((HIDDEN, EXPERTS)), **w)
            moe = epic.jax.sharded.moe(
                mesh, group, options, x, weights, forced=(ids, chosen), **more
            )
            return (moe.out * ct).sum(), moe.out

        run = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1, 2), has_aux=True))
        found = [np.asarray(v) for v in jax.tree.leaves(run(x, numbers(3, 40, 3), experts))[1:]]
        bits = [value.tobytes() for value in found]
        first = bits if first is None else first
        assert bits == first, ranks
        assert all(np.any(value) for value in found)
        assert not np.any(found[0][4::9]) and np.any(found[0][5::9], axis=1).all()


def replicas_of(ranks: int) -> tuple[epic.jax.Moe, dict[str, Any]]:
    """Return the options of a layer with replicas, and its tables."""
    options = options_of()
    layer = replace(options.layer, num_experts=len(LOGICAL), num_logical=EXPERTS)
    owners = np.repeat(np.array(BLOCKS[ranks], np.int32), len(LOGICAL) // ranks)
    tables = {"rank_of_expert": owners, "logical_of_expert": LOGICAL}
    return replace(options, layer=layer), tables


def placed_weights(tables: dict[str, Any], factor: float = 1.0) -> epic.jax.MoeWeights:
    """Return the weights of all replicas, in the order of the ranks that own them.

    factor: by how much the weights of replica 4 differ from those of its expert.
    """
    whole = weights_of("float32")
    order = np.argsort(tables["rank_of_expert"], kind="stable")
    w_down = whole.w_down[LOGICAL].at[4].multiply(factor)
    return whole._replace(w_gate_up=whole.w_gate_up[LOGICAL[order]], w_down=w_down[order])


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.night), 4])
def test_replicas(opened: Any, ranks: int) -> None:
    """Replicas, and experts that other ranks own, have the bits of a layer without replicas."""
    mesh = make_mesh(ranks)
    group = opened(mesh, max_tokens=32)  # XLA compiles a program for each batch up to this
    options, tables = replicas_of(ranks)
    report = epic.jax.check_invariance(mesh, group, options, placed_weights(tables), **tables)
    assert report.is_invariant, report
    alone = epic.jax.check_invariance(mesh, group, options_of(), weights_of("float32"))
    assert report.fingerprint == alone.fingerprint


def test_unequal_replicas(opened: Any) -> None:
    """A replica whose weights differ from those of its expert is found in the product."""
    mesh = make_mesh(1)
    options, tables = replicas_of(1)
    weights = placed_weights(tables, factor=1.5)
    group = opened(mesh, max_tokens=7)
    report = epic.jax.check_invariance(mesh, group, options, weights, **tables)
    assert report.first is not None and report.first.stage == "product", report


def test_few_tokens(opened: Any) -> None:
    """One token of a device has the bits that it has among 48 tokens."""
    mesh = make_mesh(4)
    group, weights, x = opened(mesh), weights_of("float32"), numbers(1, 192, HIDDEN)

    @jax.jit
    def run(x: Any) -> Any:
        return epic.jax.sharded.moe(mesh, group, options_of(), x, weights).out

    whole = np.asarray(run(x))
    assert np.array_equal(run(x[:4]), whole[:4])
    assert np.array_equal(run(x[100:112]), whole[100:112])


def test_found(opened: Any) -> None:
    """A product that depends on the number of tokens is found."""
    mesh = make_mesh(1)
    group, options = opened(mesh, max_tokens=7), options_of(invariant=False)
    report = epic.jax.check_invariance(
        mesh, group, options, weights_of("float32"), grouped_gemm=product
    )
    assert not report.is_invariant
    assert report.first is not None
    assert report.first.stage in ("gate", "product")


def product(x: Any, w: Any, rows: Any) -> Any:
    """A grouped product with an error of the number of rows."""
    return jax.lax.ragged_dot(x, w, rows) + rows.sum().astype(x.dtype)


def test_refused(opened: Any) -> None:
    """Options and arguments that contradict invariant=True."""
    mesh = make_mesh(2)
    group, weights, x = opened(mesh), weights_of("float32"), jnp.ones((8, HIDDEN))
    refused = epic.jax.EpicArgumentError
    with pytest.raises(refused, match="leaves is 0: with invariant=True"):
        options_of(leaves=0)
    with pytest.raises(refused, match="quantize is '1x32': must be None with invariant=True"):
        options_of(quantize="1x32")
    values: dict[str, tuple[Any, str]] = {
        "grouped_gemm": (product, "because only EPIC's own products"),
        "token_mask": (jnp.ones(8, bool), "leave it out, because padding does not change"),
    }
    for name, (value, why) in values.items():
        with pytest.raises(refused, match=f"{name} is given: must be None .*{why}"):
            epic.jax.sharded.moe(mesh, group, options_of(), x, weights, **{name: value})
    replicas, tables = replicas_of(2)
    placed = placed_weights(tables)
    with pytest.raises(refused, match="logical_of_expert is None and num_logical is 8"):
        epic.jax.check_invariance(mesh, group, replicas, placed)
    tables["logical_of_expert"] = np.arange(16, dtype=np.int32) % 8
    with pytest.raises(refused, match="is 0 for experts 0 and 8: with invariant=True replicas"):
        epic.jax.check_invariance(mesh, group, replicas, placed, **tables)


@pytest.mark.parametrize("axes", [("ep",), P("dp", "ep")], ids=["fewer axes", "two dimensions"])
def test_groups_with_token_axes(opened: Any, axes: Any) -> None:
    """check_invariance spreads its tokens over all devices, whatever token_axes the group has."""
    mesh = make_mesh(2)
    plain = opened(mesh, name="plain", max_tokens=2)
    group = opened(mesh, name="other", max_tokens=2, token_axes=axes)
    reports = [
        epic.jax.check_invariance(mesh, g, options_of(), weights_of("float32"))
        for g in (plain, group)
    ]
    assert reports[0] == reports[1]


def test_wrong_classes_in_check_invariance(opened: Any) -> None:
    """A wrong mesh, group, layer or wrong weights raise an error that names the argument."""
    mesh = line_of(1)
    right = {"mesh": mesh, "group": opened(mesh), "options": options_of()}
    right |= {"weights": weights_of("float32")}
    for name in right:
        call: Any = epic.jax.check_invariance
        with pytest.raises(epic.jax.EpicArgumentError, match=f"{name} is a str: must be a"):
            call(**right | {name: "x"})
