# SPDX-License-Identifier: Apache-2.0
"""Tests tokens that are sharded in several dimensions, and MaxText's logical axes of parameters."""

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
import steps
from conftest import make_mesh
from reference import relative
from steps import choices, numbers

SPECS = {
    "sequence": P(None, ("dp", "ep")),
    "batch_and_sequence": P("dp", "ep"),
    "sequence_over_dp": P("ep", "dp"),
    "all_of_the_batch": P(("dp", "ep"), None),
}


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use two sequences of twelve tokens, fewer sequences than devices."""
    layers.resize(monkeypatch, BATCH=2, LENGTH=12)


def one_group(ep: int) -> Any:
    """Count the loss over all batches, as in one group."""
    return make_mesh(ep)


@pytest.mark.usefixtures("long")
@pytest.mark.parametrize("name", ["normalized", "table", "shared"])
@pytest.mark.parametrize("key", ["sequence", "sequence_over_dp", "batch_and_sequence"])
def test_tokens_over_several_dimensions(key: str, name: str, opened: Any) -> None:
    """B = 2 and S are sharded over four devices; only EPIC's calls move tokens."""
    mesh = make_mesh(2)
    group = opened(mesh)
    case = layers.CASES[name]
    spec = SPECS[key]
    x, ct = (jax.device_put(v, NamedSharding(mesh, spec)) for v in layers.arrays())
    w = layers.weights(case)
    run = layers.step(mesh, group, case, token_axes=spec, loss_axes=("dp",))
    got = run(x, w, ct)
    # the losses count all tokens, on whichever device they are
    layers.compare(got, layers.true_step(case, 1))
    assert got[2].sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)
    text = run.lower(x, w, ct).compile().as_text() or ""
    assert not re.search(r"all-to-all|collective-permute|all-gather", text)


STEPS = {
    "sequence": ((2, 2, 1), P(None, ("dp", "ep")), None),
    "sequence_turned": ((2, 2, 1), P(None, ("ep", "dp")), None),
    "batch_and_sequence": ((2, 2, 1), P("dp", "ep"), None),
    "sequence_over_dp": ((2, 2, 1), P("ep", "dp"), None),
    "batch": ((2, 1, 2), ("dp", "ep"), "tp"),
    "with_hidden": ((1, 2, 2), P("dp", "ep"), "tp"),
}


@pytest.mark.parametrize(("shape", "axes", "hidden"), STEPS.values(), ids=STEPS.keys())
def test_steps_over_several_dimensions(
    shape: tuple[int, ...], axes: Any, hidden: str | None, opened: Any
) -> None:
    """plan_dispatch and combine of [B, S, hidden] match float64, with all gradients."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(shape), ("dp", "ep", "tp"))
    group = opened(mesh)
    dims = (2, 2 * steps.TOKENS)
    place = P(*(axes if isinstance(axes, P) else (axes, None)), hidden)
    x, ct = (numbers(i, *dims, steps.HIDDEN) for i in (1, 4))
    w, ids = numbers(2, *dims, steps.TOP_K), choices(3).reshape(*dims, steps.TOP_K)
    where = {"token_axes": axes, "hidden_axis": hidden}

    def step(x: Any, w: Any) -> Any:
        args = (mesh, group, steps.LAYER, ids, x, w)
        plan, recv, slot = epic.jax.sharded.plan_dispatch(*args, **where)
        return epic.jax.sharded.combine(mesh, plan, jnp.sin(recv), slot, **where)

    x, ct = (jax.device_put(v, NamedSharding(mesh, place)) for v in (x, ct))
    run = jax.jit(lambda x, w, ct: [(v := jax.vjp(step, x, w))[0], *v[1](ct)])
    out, *gradients = run(x, w, ct)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, place), 3)
    flat = [np.asarray(v).reshape(4 * steps.TOKENS, -1) for v in (x, w, ids, ct)]
    for got, wanted in zip((out, *gradients), steps.true_round(*flat), strict=True):
        assert relative(np.asarray(got).reshape(wanted.shape), wanted) < 2e-6
    text = run.lower(x, w, ct).compile().as_text() or ""
    assert not re.search(r"all-to-all|collective-permute|all-gather", text)


def test_steps_on_a_placement(opened: Any) -> None:
    """sharded.plan_dispatch counts the experts of rank_of_expert outside of the shard_map."""
    mesh = make_mesh(4)
    group = opened(mesh)
    owners = np.array([3, 3, 3, 0, 1, 2, 0, 1], np.int32)
    x, w, ids = numbers(1, 24, 5), numbers(2, 24, steps.TOP_K), choices(3)
    plan, recv, slot = epic.jax.sharded.plan_dispatch(
        mesh, group, steps.LAYER, ids, x, w, rank_of_expert=owners, capacity=90
    )
    assert plan.expert_rows.shape == (4 * 3,) and recv.shape == (4 * 90, 5)
    out = epic.jax.sharded.combine(mesh, plan, jnp.sin(recv), slot)
    assert relative(out, steps.true_round(x, w, ids, x)[0]) < 2e-6


def test_specs_that_cannot_be(opened: Any) -> None:
    """Wrong axes are refused with the rule."""
    mesh = make_mesh(2)
    group = opened(mesh)
    case = layers.CASES["softmax"]
    x, ct = layers.arrays()
    w = layers.weights(case)
    for spec, sentence in (
        (P("dp"), r"must contain the axes of the group, \('ep',\)"),
        (P(), r"must contain the axes of the group, \('ep',\)"),
        (P("dp", None, "ep"), "must have at most 2 dimensions"),
    ):
        with pytest.raises(epic.jax.EpicArgumentError, match=sentence):
            jax.eval_shape(layers.step(mesh, group, case, token_axes=spec), x, w, ct)
        ids = np.zeros((*x.shape[:2], steps.TOP_K), np.int32)
        with pytest.raises(epic.jax.EpicArgumentError, match=sentence):
            epic.jax.sharded.plan_dispatch(mesh, group, steps.LAYER, ids, x, token_axes=spec)
    wish = layers.options(case, 2)
    sequences = epic.jax.Moe(
        wish.layer, wish.router, wish.experts, balance_coeff=0.1, sequence_tokens=3
    )
    with pytest.raises(epic.jax.EpicArgumentError, match="whole sequences"):
        epic.jax.sharded.moe(
            mesh,
            group,
            sequences,
            jnp.asarray(x),
            epic.jax.MoeWeights(**w),
            token_axes=P("dp", "ep"),
        )


# --------------------------------------------------------------------- MaxText's names ----

MESH = ("data", "fsdp", "fsdp_transpose", "context", "tensor", "expert")
RULES = {
    "exp": ("expert",),
    "embed_moe": ("fsdp", "fsdp_transpose", "context"),
    "mlp_moe": ("fsdp_transpose", "tensor"),
}
SHAPES = {"fsdp_expert": (1, 2, 1, 1, 1, 2), "tensor_expert": (1, 1, 1, 1, 2, 2)}
BATCH_AXES = P(("data", "fsdp", "fsdp_transpose", "expert"), "context")


def maxtext_mesh(shape: tuple[int, ...]) -> Any:
    """Return four devices under MaxText's axis names."""
    return jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(shape), MESH)


def spec_of(names: Any) -> P:
    """Leave out an axis that an earlier dimension uses, as MaxText does."""
    taken: set[str] = set()
    parts: list[tuple[str, ...]] = []
    for name in names:
        parts.append(tuple(a for a in RULES.get(name, ()) if a not in taken))
        taken |= set(parts[-1])
    return P(*parts)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_maxtexts_rules(shape: tuple[int, ...]) -> None:
    """MaxText's own rules shard experts over expert, fsdp and tensor; results match."""
    nn = pytest.importorskip("flax.linen")
    import epic.jax.linen

    mesh = maxtext_mesh(shape)
    case = layers.CASES["normalized"]
    with epic.jax.open(mesh, "expert", max_tokens=64, max_row_bytes=4096) as group:
        module = epic.jax.linen.MoEBlock(
            mesh, group, layers.options(case, 2), token_axes=BATCH_AXES,
            fsdp_axes=("fsdp",), loss_axes=("data", "fsdp"),
        )  # fmt: skip
        x, ct = layers.arrays()
        abstract = jax.eval_shape(module.init, jax.random.key(0), x)
        logical = nn.get_partition_spec(abstract)["params"]
        places = {n: NamedSharding(mesh, spec_of(names)) for n, names in logical.items()}
        params = {n: jax.device_put(v, places[n]) for n, v in layers.weights(case).items()}
        shard = params["w_gate_up"].addressable_shards[0].data
        assert shard.size * 4 == params["w_gate_up"].size

        def loss_of(x: Any, params: Any) -> tuple[Any, Any]:
            out, loss = module.apply({"params": params}, x)
            return (out * ct).sum() + loss, (out, loss)

        run = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True))
        (_, (out, loss)), (d_x, d_w) = run(x, params)
        layers.compare((out, loss, d_x, d_w), layers.true_step(case, 1))


def test_names_of_ones_own(opened: Any) -> None:
    """axis_names= works for any parameter, in both kinds of block; a wrong one is refused."""
    nn = pytest.importorskip("flax.linen")
    from flax import nnx

    import epic.jax.linen
    import epic.jax.nnx

    mesh = make_mesh(2)
    group = opened(mesh)
    wish = layers.options(layers.CASES["softmax"], 2)
    names = {"w_gate": ("embed", None), "w_down": ("exp", "mlp", "embed")}
    module = epic.jax.linen.MoEBlock(mesh, group, wish, axis_names=names)
    x = jnp.asarray(layers.arrays()[0])
    logical = nn.get_partition_spec(jax.eval_shape(module.init, jax.random.key(0), x))["params"]
    assert logical["w_gate"] == P("embed", None) and logical["w_down"] == P("exp", "mlp", "embed")
    assert logical["w_gate_up"] == P("exp", "embed_moe", "mlp_moe")
    rules = (("embed", "dp"), ("mlp", None), ("exp", "ep"), ("embed_moe", None), ("mlp_moe", None))
    with nnx.logical_axis_rules(rules):
        other = epic.jax.nnx.MoEBlock(mesh, group, wish, rngs=nnx.Rngs(0), axis_names=names)
    down: Any = other.w_down  # type: ignore[attr-defined]
    assert down[...].sharding.spec == P("ep", None, "dp")
    for wrong, sentence in (
        ({"w_up": ("exp",)}, "axis_names is 'w_up': must be one of w_gate"),
        ({"w_gate": ("embed",)}, r"axis_names\['w_gate'\] is \('embed',\): must have 2 names"),
    ):
        with pytest.raises(epic.jax.EpicArgumentError, match=sentence):
            epic.jax.nnx.MoEBlock(mesh, group, wish, rngs=nnx.Rngs(0), axis_names=wrong)


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    (
        {"fsdp_axes": ("fsdp",)},
        r"fsdp_axes is 'fsdp': must be an axis of the mesh, one of \('dp', 'ep'\)",
    ),
    ({"fsdp_axes": "dp"}, r"fsdp_axes is 'dp': must be a tuple of axes, \('dp',\)"),
    ({"fsdp_axes": ("ep",)}, "fsdp_axes is 'ep': must not be an axis of the group"),
    ({"loss_axes": ("data",)}, "loss_axes is 'data': must be an axis of the mesh"),
    ({"token_axes": ("data", "ep")}, "token_axes is 'data': must be an axis of the mesh"),
    ({"tensor_axis": "tp"}, "tensor_axis is 'tp': must be an axis of the mesh"),
)


def test_axes_that_cannot_be(opened: Any) -> None:
    """The error names the arguments of the call, not those of the shard_map that it makes."""
    mesh = make_mesh(2)
    group = opened(mesh)
    wish = layers.options({}, 2)
    weights = epic.jax.MoeWeights(**layers.weights({}))
    x = jnp.asarray(layers.arrays()[0])
    hidden = x.shape[-1]
    for more, sentence in WRONG:
        with pytest.raises(epic.jax.EpicArgumentError, match=sentence):
            epic.jax.sharded.moe(mesh, group, wish, x, weights, **more)
    with pytest.raises(epic.jax.EpicArgumentError, match="dimension 0 must be a multiple of"):
        epic.jax.sharded.moe(mesh, group, wish, x[:7], weights)

    def local(x: Any, weights: Any) -> Any:
        return epic.jax.moe(group, wish, x, weights, fsdp_axes=("dp", "ep")).out

    specs = epic.jax.sharded.weight_specs(group, weights)
    inner = jax.shard_map(local, mesh=mesh, in_specs=(P(("dp", "ep")), specs), out_specs=P("ep"))
    with pytest.raises(epic.jax.EpicArgumentError, match="fsdp_axes is 'ep': must not be an axis"):
        inner(x, weights)
    odd, ids, half = np.zeros((4, 3, hidden)), np.zeros((4, 3, 2), np.int32), np.zeros((4, 3, 2))
    layer = epic.jax.Layer(num_experts=4, top_k=2)
    places: tuple[tuple[dict[str, Any], str], ...] = (
        (
            {"token_axes": P("ep", "dp")},
            r"tokens has .* dimension 1 must be a multiple of \d, .*'dp'",
        ),
        ({"hidden_axis": "tp"}, "hidden_axis is 'tp': must be an axis of the mesh"),
        ({"hidden_axis": "ep"}, "hidden_axis is 'ep': must not be an axis of the group"),
    )
    for more, sentence in places:
        with pytest.raises(epic.jax.EpicArgumentError, match=sentence):
            epic.jax.sharded.plan_dispatch(mesh, group, layer, ids, odd, half, **more)
    wide = np.zeros((4, 1, 1025), np.float32)
    with pytest.raises(epic.jax.EpicArgumentError, match=r"tokens has rows of 4100 bytes: .* 4096"):
        epic.jax.sharded.plan_dispatch(mesh, group, layer, ids[:, :1], wide, half[:, :1])
