# SPDX-License-Identifier: Apache-2.0
"""Trains a small decoder built like MaxText's, with EPIC's block in place of a dense layer.

It uses MaxText's mesh axes, logical names and rules, scan over layers and remat, in linen and nnx.
Its losses must be those of the dense layer.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import epic.jax
from epic.jax import Moe

pytest.importorskip("flax")
import flax.linen as nn
from flax import nnx

import epic.jax.linen
import epic.jax.nnx
from epic.jax.block import Biases, constrain_sharding, make_parameters, parameter_sharding

LAYERS, VOCABULARY, BATCH, LENGTH, HIDDEN, STEPS, RATE = 2, 31, 8, 6, 16, 5, 0.5
OPTIONS = Moe.of(
    num_experts=8, top_k=2, hidden=HIDDEN, inner=12, normalize="sum", balance_coeff=0.05,
    z_coeff=0.01,
)  # fmt: skip
AXES = ("data", "stage", "fsdp", "fsdp_transpose", "context", "tensor", "expert")
MESHES = {
    "data2_fsdp2_expert2": (2, 1, 2, 1, 1, 1, 2),
    "context2_expert2": (1, 1, 1, 1, 2, 1, 2),
}
RULES = [
    ("exp", ("expert",)),
    ("embed_moe", ("fsdp", "fsdp_transpose", "context")),
    ("mlp_moe", ("fsdp_transpose", "tensor")),
    ("embed", ("fsdp", "fsdp_transpose", "context", "expert")),
    ("vocab", ("tensor",)),
    ("layers", None),
]
TOKENS = P(("data", "fsdp", "fsdp_transpose", "expert"), "context")


def dense(w: dict[str, Any], x: Any) -> tuple[Any, Any]:
    """Return (out, loss) of every expert on every token, weighted by the choice."""
    rows = x.reshape(-1, HIDDEN)
    logits = jnp.matmul(rows, w["w_gate"], precision="highest")
    scores = jax.nn.softmax(logits)
    best, ids = jax.lax.top_k(scores, 2)
    chosen = jax.nn.one_hot(ids, 8)
    weights = (chosen * (best / best.sum(-1, keepdims=True))[..., None]).sum(1)
    gate, up = jnp.split(jnp.einsum("th,ehw->tew", rows, w["w_gate_up"]), 2, axis=-1)
    each = jnp.einsum("tei,eih->teh", jax.nn.silu(gate) * up, w["w_down"])
    total = rows.shape[0]
    balance = 8 * OPTIONS.balance_coeff / (2 * total**2)
    loss = balance * (chosen.sum((0, 1)) * scores.sum(0)).sum()
    loss += OPTIONS.z_coeff / total * jnp.square(jax.nn.logsumexp(logits, axis=-1)).sum()
    return jnp.einsum("te,teh->th", weights, each).reshape(x.shape), loss


def attend(x: Any, y: Any, w: tuple[Any, Any, Any]) -> Any:
    """Return x plus attention, and its normalized form."""
    q, k, v = (y @ kernel for kernel in w)
    scores = jnp.einsum("bsh,bth->bst", q, k) / HIDDEN**0.5
    scores = jnp.where(np.tril(np.ones((LENGTH, LENGTH), bool)), scores, -1e9)
    return x + jnp.einsum("bst,bth->bsh", jax.nn.softmax(scores), v)


def whole_loss(of_model: Any, text: Any) -> Any:
    """Return the loss of the next tokens and of the layers."""
    logits, loss = of_model
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), text[:, 1:, None], axis=-1)
    return loss - picked.mean()


WHERE: dict[str, Any] = {
    "token_axes": TOKENS,
    "fsdp_axes": ("fsdp",),
    "loss_axes": ("data", "fsdp", "fsdp_transpose", "context"),
}


# ----------------------------------------------------------------------------- linen ----


class DenseBlock(nn.Module):
    """A dense block with the same parameters."""

    group: Any

    @nn.compact
    def __call__(self, x: Any) -> tuple[Any, Any]:
        """Run the layer like MoEBlock."""
        wishes = make_parameters(self.group, OPTIONS, Biases())
        w: dict[str, Any] = {
            n: self.param(n, nn.with_logical_partitioning(p.init, p.names), p.shape)
            for n, p in wishes.items()
        }
        return dense(w, x)


class DecoderLayer(nn.Module):
    """Attention to earlier tokens, then the block."""

    make_block: Any

    @nn.compact
    def __call__(self, carry: Any, _: Any) -> tuple[Any, None]:
        """carry: hidden states, and the losses so far."""
        x, loss = carry

        def kernel(name: str) -> Any:
            init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", None))
            return self.param(name, init, (HIDDEN, HIDDEN))

        kernels = kernel("query"), kernel("key"), kernel("value")
        x = attend(x, nn.RMSNorm()(x), kernels)
        y, more = self.make_block(name="moe")(nn.RMSNorm()(x))
        return (x + y, loss + more), None


class Decoder(nn.Module):
    """Layers under scan and remat."""

    make_block: Any

    @nn.compact
    def __call__(self, text: Any) -> tuple[Any, Any]:
        """Return logits and the losses of the layers."""
        init = nn.with_logical_partitioning(nn.initializers.normal(1.0), ("vocab", "embed"))
        table: Any = self.param("embedding", init, (VOCABULARY, HIDDEN))
        layers = nn.scan(
            nn.remat(DecoderLayer, prevent_cse=False),
            variable_axes={"params": 0, "losses": 0, "intermediates": 0},
            split_rngs={"params": True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )(self.make_block, name="layers")
        (x, loss), _ = layers((table[text], jnp.zeros((), jnp.float32)), None)
        return x @ table.T, loss


def train(model: Any, params: Any, text: Any) -> list[float]:
    """Return the loss at each step of gradient descent."""

    def loss_of(params: Any) -> Any:
        return whole_loss(model.apply({"params": params}, text[:, :-1]), text)

    @jax.jit
    def step(params: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params)
        return loss, jax.tree.map(lambda p, g: p - RATE * g, params, grads)

    losses = []
    for _ in range(STEPS):
        loss, params = step(params)
        losses.append(float(loss))
    return losses


def check(got: list[float], wanted: list[float]) -> None:
    """Check that the model learns like the dense one."""
    assert wanted[-1] < 0.9 * wanted[0], wanted
    assert np.abs(np.array(got) - wanted).max() < 1e-4, (got, wanted)


def check_places(experts: Any, mesh: Any) -> None:
    """Check that each device has only its part of the experts of a layer."""
    assert experts.shape[0] == LAYERS
    cut = mesh.shape["expert"] * mesh.shape["fsdp"] * mesh.shape["context"]
    assert experts.addressable_shards[0].data.size * cut == experts.size


def mesh_of(shape: tuple[int, ...]) -> Any:
    """Return a mesh with MaxText's axes."""
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.sharding.Mesh(np.array(devices).reshape(shape), AXES)


LIKE = jax.ShapeDtypeStruct((BATCH, LENGTH, HIDDEN), jnp.float32)
TEXT = np.random.default_rng(1).integers(0, VOCABULARY, (BATCH, LENGTH + 1))
night = pytest.mark.night
SHAPES = [
    pytest.param(shape, marks=() if place == 0 else night, id=name)
    for place, (name, shape) in enumerate(MESHES.items())
]
meshes = pytest.mark.parametrize("shape", SHAPES)


@meshes
def test_a_decoder_trains(shape: tuple[int, ...]) -> None:
    """The losses equal those of the dense model to 1e-4. Experts are sharded over expert and
    fsdp."""
    mesh = mesh_of(shape)
    with epic.jax.open(mesh, "expert", like=LIKE, token_axes=TOKENS, timeout_ms=60000) as group:

        def sparse(name: str) -> Any:
            return epic.jax.linen.MoEBlock(mesh, group, OPTIONS, **WHERE, name=name)

        model, other = Decoder(sparse), Decoder(lambda name: DenseBlock(group, name=name))
        key = jax.random.key(0)
        logical = nn.get_partition_spec(jax.eval_shape(model.init, key, TEXT[:, :-1]))
        places = jax.tree.map(
            lambda names: parameter_sharding(mesh, names, RULES),
            logical,
            is_leaf=lambda x: isinstance(x, P),
        )
        variables = nn.meta.unbox(jax.jit(model.init, out_shardings=places)(key, TEXT[:, :-1]))
        check_places(variables["params"]["layers"]["moe"]["w_gate_up"], mesh)
        batch = jax.device_put(TEXT, NamedSharding(mesh, P(TOKENS[0])))
        got = train(model, variables["params"], batch)
        wanted = train(other, jax.tree.map(np.asarray, variables["params"]), jnp.asarray(TEXT))
    check(got, wanted)


# ------------------------------------------------------------------------------- nnx ----


class DenseNnx(nnx.Module):
    """A dense block with the same parameters."""

    def __init__(self, group: Any, rngs: nnx.Rngs) -> None:
        for name, wish in make_parameters(group, OPTIONS, Biases()).items():
            setattr(self, name, nnx.Param(wish.init(rngs.params(), wish.shape)))

    def __call__(self, x: Any) -> tuple[Any, Any]:
        """Run the layer like MoEBlock."""
        return dense({n: getattr(self, n)[...] for n in ("w_gate", "w_gate_up", "w_down")}, x)


class NnxLayer(nnx.Module):
    """DecoderLayer."""

    def __init__(self, make_block: Any, kernel: Any, rngs: nnx.Rngs) -> None:
        self.query, self.key, self.value = (kernel(rngs) for _ in range(3))
        self.before, self.between = (nnx.RMSNorm(HIDDEN, rngs=rngs) for _ in range(2))
        self.moe = make_block(rngs)

    def __call__(self, carry: Any) -> Any:
        """Run the layer like DecoderLayer of linen."""
        x, loss = carry
        x = attend(x, self.before(x), (self.query[...], self.key[...], self.value[...]))
        y, more = self.moe(self.between(x))
        return x + y, loss + more


class NnxDecoder(nnx.Module):
    """Decoder: layers stacked by vmap, run by scan under remat."""

    def __init__(self, make_block: Any, param: Any, rngs: nnx.Rngs) -> None:
        square, normal = nnx.initializers.lecun_normal(), nnx.initializers.normal(1.0)

        def kernel(rngs: nnx.Rngs) -> Any:
            return param(square(rngs.params(), (HIDDEN, HIDDEN)), ("embed", None))

        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def stack(rngs: nnx.Rngs) -> Any:
            return NnxLayer(make_block, kernel, rngs)

        self.table = param(normal(rngs.params(), (VOCABULARY, HIDDEN)), ("vocab", "embed"))
        self.layers = stack(rngs)

    def __call__(self, text: Any) -> tuple[Any, Any]:
        """Return logits and the losses of the layers."""

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat(prevent_cse=False)
        def run(carry: Any, layer: Any) -> Any:
            return layer(carry)

        table = self.table[...]
        x, loss = run((table[text], jnp.zeros((), jnp.float32)), self.layers)
        return x @ table.T, loss


def train_nnx(model: Any, text: Any) -> list[float]:
    """Train like train()."""

    @nnx.jit
    def step(model: Any) -> Any:
        def loss_of(model: Any) -> Any:
            return whole_loss(model(text[:, :-1]), text)

        loss, grads = nnx.value_and_grad(loss_of)(model)
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - RATE * g, params, grads))
        return loss

    return [float(step(model)) for _ in range(STEPS)]


@night
def test_an_nnx_decoder_trains() -> None:
    """Train the nnx model on data x fsdp x expert, with parameters created in a jit."""
    mesh = mesh_of(MESHES["data2_fsdp2_expert2"])
    with epic.jax.open(mesh, "expert", like=LIKE, token_axes=TOKENS, timeout_ms=60000) as group:

        def sparse(rngs: nnx.Rngs) -> Any:
            return epic.jax.nnx.MoEBlock(mesh, group, OPTIONS, rngs=rngs, **WHERE)

        def param(value: Any, names: Any) -> Any:
            return nnx.Param(constrain_sharding(value, parameter_sharding(mesh, names, RULES)))

        with nnx.logical_axis_rules(RULES):
            model = nnx.jit(lambda: NnxDecoder(sparse, param, nnx.Rngs(0)))()
        other = NnxDecoder(partial(DenseNnx, group), lambda value, _: nnx.Param(value), nnx.Rngs(1))
        state = nnx.state(model, nnx.Param)
        nnx.update(other, jax.tree.map(np.asarray, state))
        check_places(state["layers"]["moe"]["w_gate_up"][...], mesh)
        batch = jax.device_put(TEXT, NamedSharding(mesh, P(TOKENS[0])))
        got = train_nnx(model, batch)
        wanted = train_nnx(other, jnp.asarray(TEXT))
    check(got, wanted)
