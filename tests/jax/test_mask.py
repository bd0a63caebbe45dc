# SPDX-License-Identifier: Apache-2.0
"""Tests that a layer ignores padding tokens: its results are those of the other tokens alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import epic.jax
import layers
from conftest import make_mesh
from reference import relative

WIDE = 5  # the length of a sequence with its padding
CASES = {
    "normalized": layers.CASES["normalized"],
    "sigmoid": layers.CASES["sigmoid"],
    "zero_experts": layers.CASES["zero_experts"],
    "shared": layers.CASES["shared"],
}


def padded() -> tuple[np.ndarray, ...]:
    """Return the tokens of layers.arrays() among padding (huge or NaN), and their positions."""
    rng = np.random.default_rng(3)
    mask = np.zeros((layers.BATCH, WIDE), bool)
    for row in mask:
        row[rng.permutation(WIDE)[: layers.LENGTH]] = True
    x = np.full((layers.BATCH, WIDE, layers.HIDDEN), 1e20, np.float32)
    x[::2] = np.nan
    ct = rng.normal(size=x.shape).astype(np.float32)
    for whole, part in zip((x, ct), layers.arrays(), strict=True):
        whole[mask] = part.reshape(-1, layers.HIDDEN)
    return x, ct, mask


RAGGED = jax.lax.ragged_dot
RUNS = [("normalized", None, 1), ("normalized", RAGGED, 2), ("sigmoid", None, 4)]
RUNS += [("zero_experts", RAGGED, 4), ("shared", None, 2)]


@pytest.mark.parametrize(("name", "gemm", "ep"), RUNS, ids=lambda x: getattr(x, "__name__", None))
def test_a_mask(name: str, gemm: Any, ep: int, opened: Any) -> None:
    """Forward, losses and gradients of the other tokens match float64; padding returns zeros."""
    mesh = make_mesh(ep)
    group = opened(mesh)
    case = CASES[name]
    x, ct, mask = padded()
    run = layers.step(mesh, group, case, token_mask=mask, grouped_gemm=gemm)
    out, loss, d_x, d_w = run(x, layers.weights(case), ct)
    wanted = layers.true_step(case, 4 // group.num_ranks)
    shape = (layers.BATCH, layers.LENGTH, layers.HIDDEN)
    kept = [np.asarray(v)[mask].reshape(shape) for v in (out, d_x)]
    layers.compare((kept[0], loss, kept[1], d_w), wanted)
    assert not np.any(np.asarray(out)[~mask]) and not np.any(np.asarray(d_x)[~mask])


def test_load_and_ranks_without_tokens(opened: Any) -> None:
    """A rank, or a whole group, may have only padding."""
    mesh = make_mesh(2)
    group = opened(mesh)
    case = CASES["normalized"]
    x, _, _ = padded()
    wish = layers.options(case, 2)
    weights = epic.jax.MoeWeights(**layers.weights(case))
    run = jax.jit(
        lambda m: epic.jax.sharded.moe(
            mesh, group, wish, x, weights, token_mask=m, loss_axes=("dp",)
        )
    )
    x = np.where(np.isfinite(x) & (x < 1e19), x, 0.5)
    for rows in ([0, 1, 2, 3, 4, 5], [0], []):
        mask = np.zeros((layers.BATCH, WIDE), bool)
        mask[rows] = True
        out = run(jnp.asarray(mask))
        assert int(out.load.sum()) == 2 * mask.sum()
        assert np.isfinite(out.loss) and (out.loss > 0) == bool(rows)
        assert not np.any(np.asarray(out.out)[~mask])


def test_a_mask_in_blocks(opened: Any) -> None:
    """Both blocks accept a mask, and the bias ignores padding."""
    pytest.importorskip("flax")
    from flax import nnx

    import epic.jax.linen
    import epic.jax.nnx

    mesh = make_mesh(2)
    group = opened(mesh)
    case = {"score": "sigmoid"}
    x, _, mask = padded()
    weights = layers.weights(case)
    wish = layers.options(case, 2)
    true = layers.true_step(case, 2)[0].reshape(-1, layers.HIDDEN)
    linen = epic.jax.linen.MoEBlock(mesh, group, wish)
    out, _ = jax.jit(linen.apply)({"params": weights}, x, token_mask=mask)
    assert relative(np.asarray(out)[mask], true) < 5e-6
    block = epic.jax.nnx.MoEBlock(mesh, group, wish, rngs=nnx.Rngs(0), bias_rate=0.125)
    for name, value in weights.items():
        getattr(block, name)[...] = jnp.asarray(value)
    out, _ = nnx.jit(lambda m, x, mask: m(x, token_mask=mask))(block, x, mask)
    assert relative(np.asarray(out)[mask], true) < 5e-6
    z = layers.arrays()[0].reshape(-1, layers.HIDDEN).astype(np.float64) @ weights["w_gate"]
    load = np.bincount(np.argsort(-z, axis=1, kind="stable")[:, :2].ravel(), minlength=8)
    bias: Any = block.expert_bias
    assert bias[...].tolist() == (0.125 * np.sign(load.mean() - load)).tolist()


def test_masks_that_cannot_be(opened: Any) -> None:
    """Masks of another shape or dtype are refused, and losses by sequence."""
    group = opened(None)
    x = jnp.asarray(layers.arrays()[0])
    wish = layers.options({}, 1)
    weights = epic.jax.MoeWeights(**layers.weights({}))
    turned = jnp.ones((3, 8), bool)  # as many entries as tokens, but in another order
    for mask in (jnp.ones((8,), bool), jnp.ones((8, 3), jnp.int32), turned):
        with pytest.raises(
            epic.jax.EpicArgumentError, match=r"token_mask is .*: must be (bool|of shape )\[8, 3\]"
        ):
            epic.jax.moe(group, wish, x, weights, token_mask=mask)
    by_sequence = epic.jax.Moe(
        wish.layer, wish.router, wish.experts, balance_coeff=1.0, sequence_tokens=3
    )
    with pytest.raises(epic.jax.EpicUnsupportedError, match="sequence_tokens"):
        epic.jax.moe(group, by_sequence, x, weights, token_mask=jnp.ones((8, 3), bool))
