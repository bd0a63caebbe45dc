# SPDX-License-Identifier: Apache-2.0
"""A small decoder as MaxText builds it (its mesh axes, its logical names and rules, scan over
layers, remat, Flax linen) trains with the block dropped in: the losses of a dense layer."""

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

import epic.jax.linen
from epic.jax.block import Biases, parameters

pytestmark = pytest.mark.thorough

LAYERS, VOCABULARY, BATCH, LENGTH, HIDDEN, STEPS, RATE = 2, 31, 8, 6, 16, 5, 0.5
OPTIONS = Moe.of(
    num_experts=8, top_k=2, hidden=HIDDEN, inner=12, normalize="sum", balance_coeff=0.05,
    z_coeff=0.01,
)  # fmt: skip
AXES = ("data", "stage", "fsdp", "fsdp_transpose", "context", "tensor", "expert")
MESHES = {
    "fsdp2_expert2": (1, 1, 2, 1, 1, 1, 2),
    "context2_expert2": (1, 1, 1, 1, 2, 1, 2),
}
RULES = {
    "exp": ("expert",),
    "embed_moe": ("fsdp", "fsdp_transpose", "context"),
    "mlp_moe": ("fsdp_transpose", "tensor"),
    "embed": ("fsdp", "fsdp_transpose", "context", "expert"),
    "vocab": ("tensor",),
}
TOKENS = P(("data", "fsdp", "fsdp_transpose", "expert"), "context")


class DenseBlock(nn.Module):
    """Every expert on every token, weighted by the choice."""

    group: Any

    @nn.compact
    def __call__(self, x: Any) -> tuple[Any, Any]:
        """As MoEBlock."""
        wishes = parameters(self.group, OPTIONS, Biases())
        w: dict[str, Any] = {
            n: self.param(n, nn.with_logical_partitioning(p.init, p.names), p.shape)
            for n, p in wishes.items()
        }
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


class DecoderLayer(nn.Module):
    """Attention to what came before, then the block."""

    make_block: Any

    @nn.compact
    def __call__(self, carry: Any, _: Any) -> tuple[Any, None]:
        """carry: hidden states, and the losses so far."""
        x, loss = carry

        def kernel(name: str) -> Any:
            init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", None))
            return self.param(name, init, (HIDDEN, HIDDEN))

        y = nn.RMSNorm()(x)
        q, k, v = (y @ kernel(name) for name in ("query", "key", "value"))
        scores = jnp.einsum("bsh,bth->bst", q, k) / HIDDEN**0.5
        scores = jnp.where(np.tril(np.ones((LENGTH, LENGTH), bool)), scores, -1e9)
        x = x + jnp.einsum("bst,bth->bsh", jax.nn.softmax(scores), v)
        y, more = self.make_block(name="moe")(nn.RMSNorm()(x))
        return (x + y, loss + more), None


class Decoder(nn.Module):
    """Layers under scan and remat."""

    make_block: Any

    @nn.compact
    def __call__(self, text: Any) -> tuple[Any, Any]:
        """Logits and the layers' losses."""
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


def place(mesh: Any, names: Any) -> NamedSharding:
    """By the rules; an axis that an earlier dimension has falls out."""
    taken: set[str] = set()
    parts: list[tuple[str, ...]] = []
    for name in names:
        parts.append(tuple(a for a in RULES.get(name, ()) if a not in taken))
        taken |= set(parts[-1])
    return NamedSharding(mesh, P(*parts))


def train(model: Any, params: Any, text: Any) -> list[float]:
    """The loss at each step of gradient descent."""

    def loss_of(params: Any) -> Any:
        logits, loss = model.apply({"params": params}, text[:, :-1])
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), text[:, 1:, None], axis=-1)
        return loss - picked.mean()

    @jax.jit
    def step(params: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params)
        return loss, jax.tree.map(lambda p, g: p - RATE * g, params, grads)

    losses = []
    for _ in range(STEPS):
        loss, params = step(params)
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES.keys())
def test_a_decoder_trains(shape: tuple[int, ...]) -> None:
    """From the same parameters, the same losses to 1e-4; experts lie over expert and fsdp."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(shape), AXES)
    like = jax.ShapeDtypeStruct((BATCH, LENGTH, HIDDEN), jnp.float32)
    with epic.jax.open(mesh, "expert", like=like, token_axes=TOKENS, timeout_ms=60000) as group:

        def sparse(name: str) -> Any:
            return epic.jax.linen.MoEBlock(
                mesh, group, OPTIONS, token_axes=TOKENS, fsdp_axes=("fsdp",),
                loss_axes=("data", "fsdp", "fsdp_transpose", "context"), name=name,
            )  # fmt: skip

        text = np.random.default_rng(1).integers(0, VOCABULARY, (BATCH, LENGTH + 1))
        model, dense = Decoder(sparse), Decoder(lambda name: DenseBlock(group, name=name))
        key = jax.random.key(0)
        logical = nn.get_partition_spec(jax.eval_shape(model.init, key, text[:, :-1]))
        places = jax.tree.map(
            lambda names: place(mesh, names), logical, is_leaf=lambda x: isinstance(x, P)
        )
        variables = nn.meta.unbox(jax.jit(model.init, out_shardings=places)(key, text[:, :-1]))
        experts = variables["params"]["layers"]["moe"]["w_gate_up"]
        assert experts.shape[0] == LAYERS
        cut = shape[AXES.index("expert")] * shape[AXES.index("fsdp")] * shape[AXES.index("context")]
        assert experts.addressable_shards[0].data.size * cut == experts.size
        batch = jax.device_put(text, NamedSharding(mesh, P(TOKENS[0])))
        got = train(model, variables["params"], batch)
        wanted = train(dense, jax.tree.map(np.asarray, variables["params"]), jnp.asarray(text))
    assert wanted[-1] < 0.9 * wanted[0], wanted  # it learns
    assert np.abs(np.array(got) - wanted).max() < 1e-4, (got, wanted)
