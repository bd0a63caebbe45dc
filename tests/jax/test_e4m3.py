# SPDX-License-Identifier: Apache-2.0
"""Tests e4m3 experts: rounding, against loops, and what is refused while tracing.

Their products run only on GPUs: see test_emulated.py and gpu/gpu_forms.py.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import epic.jax
import layers
import rounded
from conftest import make_mesh
from epic.jax import e4m3

HIDDEN, INNER = 200, 144  # not multiples of 128


def values_of(w: Any, scales: Any) -> np.ndarray:
    """Return the values of a transposed weight [experts, m, n], as [experts, n, m]."""
    wide = np.asarray(w.astype(jnp.float32), np.float64)
    factors = np.asarray(scales, np.float64).repeat(128, axis=1).repeat(128, axis=2)
    return np.swapaxes(wide * factors[:, : wide.shape[1], : wide.shape[2]], 1, 2)


def check_rounded(x: Any, q: Any, scales: Any, size: tuple[int, int]) -> None:
    """Compare [n, m] with its rounded form, block by block; scales may differ in the last bit."""
    x, q, scales = (
        np.asarray(x).astype(np.float32),
        np.asarray(q).astype(np.float32),
        np.asarray(scales),
    )
    for i in range(0, x.shape[0], size[0]):
        for j in range(0, x.shape[1], size[1]):
            block = (slice(i, i + size[0]), slice(j, j + size[1]))
            top, scale = np.abs(x[block]).max(), scales[i // size[0], j // size[1]]
            wanted = np.float32(1) if top == 0 else np.float32(top / np.float32(448))
            assert abs(scale - wanted) <= np.spacing(wanted)
            quotient = np.clip(x[block] / scale, -448, 448)
            assert np.array_equal(q[block], quotient.astype(ml_dtypes.float8_e4m3fn))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rounding(dtype: str) -> None:
    """Rows and weights are rounded in blocks, with zeros and large numbers; sizes are uneven."""
    w = rounded.weights_of(1, 3, HIDDEN, INNER)
    given = {n: jnp.asarray(v, dtype) for n, v in w.items() if n != "w_gate"}
    given["w_down"] = given["w_down"].at[1].set(0).at[2, :128, :128].multiply(1000)
    found = epic.jax.scaled(epic.jax.ExpertWeights(**given))
    assert found.b_down is given["b_down"]
    assert found.w_gate_up.shape == (3, 2 * INNER, HIDDEN)
    assert found.w_gate_up_scales.shape == (3, 3, 2) and found.w_down_scales.shape == (3, 2, 2)
    for name in ("w_gate_up", "w_down"):
        arrays = (given[name], getattr(found, name), getattr(found, name + "_scales"))
        for x, q, scales in zip(*map(np.asarray, arrays), strict=True):
            check_rounded(x.T, q, scales, (128, 128))
    tokens = jnp.asarray(np.random.default_rng(2).normal(size=(5, HIDDEN)), dtype).at[3].set(0)
    rows, row_scales = jax.jit(e4m3.quantize_rows)(tokens)
    check_rounded(tokens, rows, row_scales, (1, 128))


@pytest.mark.parametrize("size", [1e-40, 2e-38, 5e-36, 1e-35])
def test_blocks_of_tiny_numbers(size: float) -> None:
    """The zeros of a block stay zeros, also if CPUs round its scale to 0."""
    w = jnp.zeros((1, 128, 128)).at[0, 0, 0].set(size)
    for scaled in (epic.jax.scaled, jax.jit(epic.jax.scaled)):
        found = epic.jax.unscaled(scaled(epic.jax.ExpertWeights(w, w)), jnp.float32).w_down
        assert abs(float(found[0, 0, 0]) - size) <= size
        assert int((found == 0).sum()) >= found.size - 1
    rows, _ = jax.jit(e4m3.quantize_rows)(w[0])
    assert int((rows.astype(jnp.float32) == 0).sum()) >= rows.size - 1


def test_every_tie() -> None:
    """Numbers next to e4m3 numbers and halfway between them are rounded to nearest even."""
    every = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middle = (every[1:] + every[:-1]) / 2
    x = np.concatenate([every, middle, np.nextafter(middle, 0), np.nextafter(middle, 999)])
    x = np.concatenate([x, -x, [449, -1e9]]).astype(np.float32)
    got = np.asarray(jax.jit(e4m3.as_e4m3)(x))
    wanted = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(got.astype(np.float32), wanted.astype(np.float32))


def test_transposing_keeps_the_values() -> None:
    """The weights of the backward call represent the same numbers."""
    w = jnp.asarray(rounded.weights_of(1, 2, HIDDEN, INNER)["w_down"])
    turned, scales = e4m3.quantize_weight(w)
    back, back_scales = e4m3.transpose_scaled(turned, scales)
    assert np.array_equal(
        values_of(back, back_scales), np.swapaxes(values_of(turned, scales), 1, 2)
    )


def layer_of(**more: Any) -> tuple[epic.jax.Moe, epic.jax.MoeWeights, Any]:
    """Return a layer of layers.py with other options of the experts."""
    wish = layers.options({"biases": True}, 1)
    weights = {n: jnp.asarray(v) for n, v in layers.weights({"biases": True}).items()}
    x = jnp.asarray(layers.arrays()[0])
    experts = replace(wish.experts, num_local_experts=0, **more)
    return replace(wish, experts=experts), epic.jax.MoeWeights(**weights), x


def test_cpus_refuse_them(opened: Any) -> None:
    """Groups on CPUs refuse e4m3 while tracing, from the options or from the weights."""
    mesh = make_mesh(2)
    group = opened(mesh)
    asked, weights, x = layer_of(weight_type="e4m3")
    plain = layer_of()[0]
    kept, one = epic.jax.scaled(weights), opened(None, name="one")
    for options, w, cause in (
        (asked, weights, "weight_type is 'e4m3'"),
        (plain, kept, "w_gate_up is float8_e4m3fn"),
    ):
        sentence = f"{cause}: groups on CPUs do not support it; use a group of GPUs"
        with pytest.raises(epic.jax.EpicUnsupportedError, match=sentence):
            jax.eval_shape(lambda x, w, o=options: epic.jax.moe(group, o, x, w), x, w)
        mine = epic.jax.ExpertWeights(*(getattr(w, n) for n in epic.jax.ExpertWeights._fields))
        counts = jnp.zeros(8, jnp.int32)
        how: dict[str, Any] = {"group": one}
        with pytest.raises(epic.jax.EpicUnsupportedError, match=sentence):
            epic.jax.experts(options.experts, x[0], counts, counts, mine, **how)


def test_wrong_scales() -> None:
    """Scales must come with e4m3 weights and have a fitting shape."""
    _, weights, x = layer_of()
    options = epic.jax.Experts(hidden=layers.HIDDEN, inner=layers.INNER)
    fields = epic.jax.ExpertWeights._fields
    mine = epic.jax.ExpertWeights(*(getattr(weights, n) for n in fields))
    counts, kept = jnp.zeros(8, jnp.int32), epic.jax.scaled(mine)
    for wrong, sentence in (
        (kept._replace(w_down_scales=None), "w_down_scales is None and w_gate_up is float8_e4m3fn"),
        (mine._replace(w_down_scales=kept.w_down_scales), "w_down_scales is given and w_gate_up"),
        (kept._replace(w_down_scales=jnp.ones((8, 2, 1))), r"w_down_scales is float32\[8, 2, 1\]"),
        (kept._replace(w_down=mine.w_down), "w_down is float32"),
        (kept._replace(b_down=jnp.ones((8, 3))), r"b_down is float32\[8, 3\]"),
    ):
        with pytest.raises(epic.jax.EpicArgumentError, match=sentence):
            epic.jax.experts(options, x[0], counts, counts, wrong)
    with pytest.raises(epic.jax.EpicArgumentError, match="must be a float type to be scaled"):
        epic.jax.scaled(kept)
    with pytest.raises(epic.jax.EpicArgumentError, match=r"w_gate_up is int32"):
        epic.jax.scaled(mine._replace(w_gate_up=mine.w_gate_up.astype(jnp.int32)))


def mx_weight(seed: int, *shape: int) -> tuple[Any, Any, np.ndarray]:
    """Return e4m3 numbers, e8m0 scales for 32 columns as bytes, and the values in float64."""
    rng = np.random.default_rng(seed)
    octets = rng.integers(0, 127, shape, np.uint8) | (rng.integers(0, 2, shape, np.uint8) << 7)
    q = octets.view(ml_dtypes.float8_e4m3fn)
    scales = rng.integers(100, 140, (*shape[:-1], -(-shape[-1] // 32)), np.uint8)
    wide = 2.0 ** (scales.astype(np.float64).repeat(32, axis=-1)[..., : shape[-1]] - 127)
    return jnp.asarray(q), jnp.asarray(scales), q.astype(np.float64) * wide


@pytest.mark.parametrize("kind", ["uint8", "float8_e8m0fnu"])
def test_mxfp8(kind: str) -> None:
    """MXFP8 weights become bfloat16 exactly, and e4m3 in blocks of 128 x 128."""
    up, up_scales, up_values = mx_weight(1, 2, 2 * INNER, HIDDEN)
    down, down_scales, down_values = mx_weight(2, 2, HIDDEN, INNER)
    scales = [jnp.asarray(np.asarray(s).view(kind)) for s in (up_scales, down_scales)]
    given = epic.jax.ExpertWeights(up, down, None, None, *scales)
    for dtype in (jnp.float32, jnp.bfloat16):
        found = jax.jit(lambda w, d=dtype: epic.jax.unscaled(w, d))(given)
        assert found.w_gate_up_scales is None and found.w_down_scales is None
        for got, values in ((found.w_gate_up, up_values), (found.w_down, down_values)):
            assert got.dtype == dtype
            assert np.array_equal(np.asarray(got, np.float64), np.swapaxes(values, 1, 2))
    kept = epic.jax.scaled(given)
    for i in range(2):
        check_rounded(up_values[i], kept.w_gate_up[i], kept.w_gate_up_scales[i], (128, 128))
        check_rounded(down_values[i], kept.w_down[i], kept.w_down_scales[i], (128, 128))
    back = epic.jax.unscaled(kept, jnp.float32)
    values = values_of(kept.w_down, kept.w_down_scales)
    assert np.array_equal(back.w_down, values.astype(np.float32))
    rows = epic.jax.dequantize(up[0], scales[0][0], jnp.float32, "1x32")
    assert np.array_equal(np.asarray(rows, np.float64), up_values[0])
    options, counts = epic.jax.Experts(hidden=HIDDEN, inner=INNER), jnp.zeros(2, jnp.int32)
    with pytest.raises(epic.jax.EpicUnsupportedError, match="MXFP8 weights are not supported"):
        epic.jax.experts(options, jnp.ones((4, HIDDEN)), counts, counts, given)
    wrong = given._replace(w_down_scales=scales[1][:, :, 1:])
    with pytest.raises(epic.jax.EpicArgumentError, match="w_down_scales is"):
        epic.jax.scaled(wrong)


def test_shardings_of_scaled_weights(opened: Any) -> None:
    """Experts are sharded over the group's axes; axes that would cut blocks are refused."""
    mesh = make_mesh(2)
    group = opened(mesh)
    _, weights, _ = layer_of()
    kept = epic.jax.scaled(weights)
    specs = epic.jax.sharded.weight_specs(group, kept)
    for name in ("w_gate_up", "w_down", "w_gate_up_scales", "w_down_scales"):
        assert getattr(specs, name) == P(("ep",), None, None), name
    for more in ({"fsdp_axes": ("dp",)}, {"tensor_axis": "dp"}):
        with pytest.raises(epic.jax.EpicUnsupportedError, match="blocks of 128 x 128"):
            epic.jax.sharded.weight_specs(group, kept, **more)
