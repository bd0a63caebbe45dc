# SPDX-License-Identifier: Apache-2.0
"""Tests flat rows (one row for each token and rank), and rows that are rounded to e4m3."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import epic.jax
import layers
from conftest import make_mesh
from reference import relative, slots_of
from steps import (
    ALIGN,
    EXPERTS,
    HIDDEN,
    LAYER,
    TOKENS,
    TOP_K,
    choices,
    mapped,
    numbers,
    true_round,
)

FLAT = epic.jax.Layer(EXPERTS, TOP_K, layout="flat")


def flat_step(group: Any) -> Any:
    """Return a step: dispatch flat rows, compute sin(x * (local expert + 1)) weighted, and
    combine."""

    def step(x: Any, w: Any, ids: Any) -> Any:
        plan = epic.jax.plan(group, FLAT, ids)
        rows, weights, experts = epic.jax.dispatch_flat(plan, x, w)
        live = (experts >= 0)[..., None]
        y = jnp.sin(rows[:, None, :] * (experts[..., None] + 1))
        partial = (jnp.where(live, y, 0) * weights[..., None]).sum(axis=1)
        return epic.jax.combine(plan, partial), rows, weights, experts

    return step


def test_flat(mesh: Any, opened: Any) -> None:
    """Rows, experts and weights are exact; the sum and its gradients match float64."""
    group = opened(mesh)
    ep = mesh.shape["ep"]
    local = EXPERTS // ep
    x, w, ids = numbers(1, 4 * TOKENS, HIDDEN), numbers(2, 4 * TOKENS, TOP_K), choices(3, 0.3)
    ct = numbers(4, 4 * TOKENS, HIDDEN)
    run = mapped(mesh, flat_step(group), 3)
    out, *received = run(x, w, ids)
    rows, weights, experts = map(np.asarray, received)
    tokens, choice_weights, chosen = map(np.asarray, (x, w, ids))
    capacity = group.capacity_bound(FLAT)
    for device in range(4):
        part = slice(device * capacity, (device + 1) * capacity)
        at = 0
        for token in range(device // ep * ep * TOKENS, (device // ep + 1) * ep * TOKENS):
            mine = [k for k in range(TOP_K) if chosen[token, k] // local == device % ep]
            mine = [k for k in mine if chosen[token, k] >= 0]
            if not mine:
                continue
            tail = TOP_K - len(mine)
            assert np.array_equal(rows[part][at], tokens[token])
            wanted = [int(chosen[token, k]) % local for k in mine]
            assert experts[part][at].tolist() == wanted + [-1] * tail
            wanted_weights = [float(choice_weights[token, k]) for k in mine]
            assert weights[part][at].tolist() == wanted_weights + [0.0] * tail
            at += 1
        assert not np.any(rows[part][at:]) and np.all(experts[part][at:] == -1)
    wide, wide_w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    factor = (np.where(chosen >= 0, chosen % local, 0) + 1)[..., None]
    live = (chosen >= 0)[..., None] * wide_w[..., None]
    true = (np.sin(wide[:, None] * factor) * live).sum(axis=1)
    assert relative(out, true) < 2e-6
    _, pull = jax.vjp(lambda x, w: run(x, w, ids)[0], x, w)
    d_x, d_w = pull(ct)
    slope = (np.cos(wide[:, None] * factor) * factor * live).sum(axis=1)
    dot = (np.sin(wide[:, None] * factor) * np.asarray(ct, np.float64)[:, None]).sum(axis=2)
    assert relative(d_x, slope * np.asarray(ct)) < 2e-6
    assert relative(d_w, dot * (chosen >= 0)) < 2e-6


def test_each_layout_has_its_dispatch(opened: Any) -> None:
    """The error names the function for the other layout."""
    group = opened(None)
    ids, x = choices(3)[:TOKENS], numbers(1, TOKENS, HIDDEN)
    with pytest.raises(ValueError, match="dispatch_flat"):
        epic.jax.dispatch(epic.jax.plan(group, FLAT, ids), x)
    with pytest.raises(ValueError, match="dispatch_flat"):
        epic.jax.plan_dispatch(group, FLAT, ids, x)
    with pytest.raises(ValueError, match="must be 'flat'"):
        epic.jax.dispatch_flat(epic.jax.plan(group, LAYER, ids), x)
    with pytest.raises(ValueError, match="or use dispatch_flat_quantized"):
        epic.jax.dispatch_quantized(epic.jax.plan(group, FLAT, ids), x)
    with pytest.raises(ValueError, match="must be 'flat', or use dispatch_quantized"):
        epic.jax.dispatch_flat_quantized(epic.jax.plan(group, LAYER, ids), x)
    with pytest.raises(ValueError, match="1x128, 1x32"):
        epic.jax.dispatch_flat(epic.jax.plan(group, FLAT, ids), x, quantize="1x64")
    with pytest.raises(ValueError, match="1x128, 1x32"):
        epic.jax.dispatch_quantized(epic.jax.plan(group, LAYER, ids), x, block="2x2")


WIDTH = 200  # a multiple of neither 128 nor 32


def true_e4m3(x: np.ndarray, block: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows in e4m3, their scales, and the values that they represent."""
    size = 128 if block == "1x128" else 32
    x = x.astype(np.float32)
    count = -(-x.shape[1] // size)
    padded = np.zeros((x.shape[0], count * size), np.float32)
    padded[:, : x.shape[1]] = x
    top = np.abs(padded.reshape(len(x), count, size)).max(axis=2)
    if block == "1x128":
        scale = np.where(top == 0, np.float32(1), top / np.float32(448))
        stored = scale
    else:
        power = np.where(top == 0, 0, np.ceil(np.log2(np.where(top == 0, 448, top) / 448)))
        scale, stored = np.exp2(power).astype(np.float32), (power + 127).astype(np.uint8)
    wide = np.repeat(scale, size, axis=1)[:, : x.shape[1]]
    q = (x / wide).astype(ml_dtypes.float8_e4m3fn)
    return q, stored, q.astype(np.float32) * wide


def flat_by_hand(ids: Any, rows: Any, capacity: int, ep: int) -> np.ndarray:
    """Return the rows that each device's slots must have in the flat layout."""
    found = np.zeros((4, capacity, *rows.shape[1:]), rows.dtype)
    for device in range(4):
        at = 0
        for token in range(device // ep * ep * TOKENS, (device // ep + 1) * ep * TOKENS):
            chosen = [e for e in np.asarray(ids)[token] if e >= 0]
            if any(e // (EXPERTS // ep) == device % ep for e in chosen):
                found[device, at] = rows[token]
                at += 1
    return found.reshape(-1, *rows.shape[1:])


@pytest.mark.parametrize("block", ["1x128", "1x32"])
def test_flat_quantized(block: str, mesh: Any, opened: Any) -> None:
    """Every byte and scale of every flat row is exact. Experts and weights are those of
    dispatch_flat, and dispatch_flat with rounding returns the values that these bytes represent."""
    group = opened(mesh)
    x = (numbers(1, 4 * TOKENS, WIDTH) * 10).at[3].set(0)
    w, ids = numbers(2, 4 * TOKENS, TOP_K), choices(3, 0.3)

    def step(x: Any, w: Any, ids: Any) -> Any:
        plan = epic.jax.plan(group, FLAT, ids)
        found = epic.jax.dispatch_flat_quantized(plan, x, w, block)
        rounded = epic.jax.dispatch_flat(plan, x, w, quantize=block)
        alone = epic.jax.dispatch_flat_quantized(plan, x, block=block)
        assert alone[2] is None
        return found, rounded, epic.jax.dispatch_flat(plan, x, w), alone

    found, rounded, plain, alone = mapped(mesh, step, 3)(x, w, ids)
    capacity, ep = group.capacity_bound(FLAT), mesh.shape["ep"]
    q, stored, wide = true_e4m3(np.asarray(x), block)
    for got, rows in ((found[0], q), (found[1], stored), (rounded[0], wide)):
        wanted = flat_by_hand(ids, rows, capacity, ep)
        assert np.array_equal(np.asarray(got), wanted)
    for a, b in zip((*found[2:], *rounded[1:]), (*plain[1:], *plain[1:]), strict=True):
        assert np.array_equal(a, b)
    for i, j in ((0, 0), (1, 1), (3, 3)):
        assert np.asarray(alone[i]).tobytes() == np.asarray(found[j]).tobytes()


def test_gradient_of_rounded_flat_rows(mesh: Any, opened: Any) -> None:
    """The gradient is that of dispatch_flat, in float64."""
    group = opened(mesh)
    x, w, ids = numbers(1, 4 * TOKENS, HIDDEN), numbers(2, 4 * TOKENS, TOP_K), choices(3, 0.3)
    ct = numbers(4, 4 * TOKENS, HIDDEN)

    def step(x: Any, w: Any, ids: Any) -> Any:
        plan = epic.jax.plan(group, FLAT, ids)
        rows, weights, _ = epic.jax.dispatch_flat(plan, x, w, quantize="1x128")
        return epic.jax.combine(plan, jnp.sin(rows) * weights.sum(axis=1, keepdims=True))

    out, pull = jax.vjp(mapped(mesh, step, 3), x, w, ids)
    d_x, d_w, _ = pull(ct)
    arrived = true_e4m3(np.asarray(x), "1x128")[2]
    for got, wanted in zip((out, d_x, d_w), true_round(arrived, w, ids, ct), strict=True):
        assert relative(got, wanted) < 2e-6


@pytest.mark.parametrize("scale_type", ["float32", "uint8"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "uint8"])
def test_flat_rows_of_eight_bits(dtype: str, scale_type: str, mesh: Any, opened: Any) -> None:
    """8-bit rows arrive bit for bit, one for each token and rank, alone and with scales."""
    group = opened(mesh)
    ids, w = choices(3, 0.3), numbers(2, 4 * TOKENS, TOP_K)
    bits = np.random.default_rng(5).integers(0, 120, (4 * TOKENS, HIDDEN), np.uint8)
    x = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.dtype(dtype))
    scales = (100 * jnp.abs(numbers(6, 4 * TOKENS, 3))).astype(scale_type)

    def step(x: Any, s: Any, w: Any, ids: Any) -> Any:
        plan = epic.jax.plan(group, FLAT, ids)
        rows, none, experts = epic.jax.dispatch_flat(plan, x)
        assert none is None
        found = epic.jax.dispatch_flat_quantized(plan, x, w, scales=s)
        return rows, experts, found, epic.jax.dispatch_flat(plan, s.astype(jnp.float32), w)

    rows, experts, found, plain = mapped(mesh, step, 4)(x, scales, w, ids)
    capacity, ep = group.capacity_bound(FLAT), mesh.shape["ep"]
    wanted = flat_by_hand(ids, bits, capacity, ep)
    for got in (rows, found[0]):
        assert got.dtype == x.dtype and np.asarray(got).tobytes() == wanted.tobytes()
    assert found[1].dtype == scales.dtype
    placed = flat_by_hand(ids, np.asarray(scales), capacity, ep)
    assert np.asarray(found[1]).tobytes() == placed.tobytes()
    assert np.array_equal(found[2], plain[1])
    assert np.array_equal(found[3], plain[2]) and np.array_equal(experts, plain[2])


@pytest.mark.parametrize("block", ["1x128", "1x32"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantized(block: str, dtype: str, mesh: Any, opened: Any) -> None:
    """Every byte and scale of every slot is exact; padding and tail are zeros."""
    group = opened(mesh)
    ep = mesh.shape["ep"]
    x = (numbers(1, 4 * TOKENS, WIDTH) * 10).at[3].set(0).astype(dtype)
    w, ids = numbers(2, 4 * TOKENS, TOP_K), choices(3)

    def step(x: Any, w: Any, ids: Any) -> Any:
        plan = epic.jax.plan(group, LAYER, ids)
        rows, scales, slot = epic.jax.dispatch_quantized(plan, x, w, block)
        return rows, scales, slot, epic.jax.dequantize(rows, scales, jnp.float32, block)

    rows, scales, slot, values = (np.asarray(v) for v in mapped(mesh, step, 3)(x, w, ids))
    q, stored, wide = true_e4m3(np.asarray(x.astype(jnp.float32)), block)
    capacity = group.capacity_bound(LAYER)
    for device in range(4):
        first = device // ep * ep * TOKENS
        mine = slots_of(
            np.asarray(ids)[first : first + ep * TOKENS], device % ep, ep, EXPERTS, ALIGN
        )
        part = slice(device * capacity, (device + 1) * capacity)
        live = np.zeros(capacity, bool)
        for i, (t, k) in enumerate(mine.choices):
            if t >= 0:
                live[i] = True
                assert rows[part][i].tobytes() == q[first + t].tobytes()
                assert np.array_equal(scales[part][i], stored[first + t])
                assert slot[part][i] == w[first + t, k]
                assert np.array_equal(values[part][i], wide[first + t])
        assert not np.any(values[part][~live]) and not np.any(slot[part][~live])


@pytest.mark.parametrize("gemm", [None, jax.lax.ragged_dot], ids=["core", "ragged_dot"])
@pytest.mark.parametrize("block", ["1x128", "1x32"])
def test_layer_with_rounded_rows(block: str, gemm: Any, mesh: Any, opened: Any) -> None:
    """Compare with a layer over rounded rows whose router gets the original rows. Gradients ignore
    the rounding."""
    group = opened(mesh)
    case = layers.CASES["shared"]
    x, ct = layers.arrays()
    weights = layers.weights(case)

    def run(quantize: str | None) -> Any:
        wish = replace(layers.options(case, group.num_ranks), quantize=quantize)

        def loss_of(x: Any, w: Any) -> Any:
            moe = epic.jax.sharded.moe(
                mesh, group, wish, x, epic.jax.MoeWeights(**w), grouped_gemm=gemm
            )
            return (moe.out * ct).sum() + moe.loss, moe.out

        step = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True))
        (_, out), (d_x, d_w) = step(x, weights)
        return out, d_x, d_w["w_down"], d_w["w_gate_up"], d_w["w_gate"]

    exact, rounded = run(None), run(block)
    errors = [relative(a, b) for a, b in zip(rounded, exact, strict=True)]
    # e4m3 has 3 bits of mantissa, so each element is off by up to 6 %
    assert all(1e-4 < e < 0.1 for e in errors), errors


def test_gradient_of_rounded_rows(opened: Any) -> None:
    """The gradient is that of dispatch."""
    mesh = make_mesh(2)
    group = opened(mesh)
    x, w, ids = numbers(1, 4 * TOKENS, HIDDEN), numbers(2, 4 * TOKENS, TOP_K), choices(3)
    ct = numbers(4, 4 * TOKENS, HIDDEN)

    def step(x: Any, w: Any, ids: Any) -> Any:
        plan = epic.jax.plan(group, LAYER, ids)
        recv, slot = epic.jax.dispatch(plan, x, w, quantize="1x128")
        return epic.jax.combine(plan, jnp.sin(recv), slot)

    out, pull = jax.vjp(mapped(mesh, step, 3), x, w, ids)
    d_x, d_w, _ = pull(ct)
    arrived = true_e4m3(np.asarray(x), "1x128")[2]
    for got, wanted in zip((out, d_x, d_w), true_round(arrived, w, ids, ct), strict=True):
        assert relative(got, wanted) < 2e-6


def test_a_layer_says_what_it_cannot(opened: Any) -> None:
    """Flat rows and unknown blocks are refused."""
    group = opened(None)
    x, _ = layers.arrays()
    wish = layers.options({}, 1)
    w = epic.jax.MoeWeights(**layers.weights({}))
    with pytest.raises(ValueError, match="1x128, 1x32"):
        epic.jax.moe(group, replace(wish, quantize="1x16"), x, w)
    with pytest.raises(epic.jax.EpicError, match="layout"):
        epic.jax.moe(group, replace(wish, layer=replace(wish.layer, layout="flat")), x, w)


def slots_by_hand(ids: Any, rows: Any, capacity: int, ep: int) -> np.ndarray:
    """Return the rows that each device's slots must have."""
    found = np.zeros((4, capacity, *rows.shape[1:]), rows.dtype)
    for device in range(4):
        first = device // ep * ep * TOKENS
        mine = slice(first, first + ep * TOKENS)
        slots = slots_of(np.asarray(ids)[mine], device % ep, ep, EXPERTS, ALIGN)
        for i, (token, _) in enumerate(slots.choices):
            if token >= 0:
                found[device, i] = rows[mine][token]
    return found.reshape(-1, *rows.shape[1:])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "uint8"])
def test_rows_of_eight_bits(dtype: str, mesh: Any, opened: Any) -> None:
    """8-bit rows arrive bit for bit, with and without weights."""
    group = opened(mesh)
    ids, w = choices(3), numbers(2, 4 * TOKENS, TOP_K)
    bits = np.random.default_rng(5).integers(0, 256, (4 * TOKENS, HIDDEN), np.uint8)
    # values that are no numbers in float8_e5m2, which XLA itself does not keep
    bits[(bits & 127) > 124] = 0
    x = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.dtype(dtype))

    def step(x: Any, w: Any, ids: Any) -> Any:
        plan = epic.jax.plan(group, LAYER, ids)
        alone, none = epic.jax.dispatch(plan, x)
        assert none is None
        return (alone, *epic.jax.dispatch(plan, x, w))

    alone, recv, slot = mapped(mesh, step, 3)(x, w, ids)
    assert recv.dtype == jnp.dtype(dtype)
    wanted = slots_by_hand(ids, bits, group.capacity_bound(LAYER), mesh.shape["ep"])
    for got in (alone, recv):
        assert np.array_equal(jax.lax.bitcast_convert_type(got, jnp.uint8), wanted)
    assert np.count_nonzero(slot) == np.count_nonzero(np.asarray(ids) >= 0)


@pytest.mark.parametrize("scale_type", ["float32", "uint8"])
def test_rows_with_their_scales(scale_type: str, mesh: Any, opened: Any) -> None:
    """Rows in e4m3 and their scales, as in DeepSeek's recipe, are sent together."""
    group = opened(mesh)
    ids, w = choices(3), numbers(2, 4 * TOKENS, TOP_K)
    x = numbers(1, 4 * TOKENS, HIDDEN).astype(jnp.float8_e4m3fn)
    scales = (100 * jnp.abs(numbers(6, 4 * TOKENS, 3))).astype(scale_type)

    def step(x: Any, s: Any, w: Any, ids: Any) -> Any:
        plan = epic.jax.plan(group, LAYER, ids)
        return epic.jax.dispatch_quantized(plan, x, w, scales=s)

    recv, got, _ = mapped(mesh, step, 4)(x, scales, w, ids)
    assert (recv.dtype, got.dtype) == (x.dtype, scales.dtype)
    capacity = group.capacity_bound(LAYER)
    for a, b in ((recv, x), (got, scales)):
        wanted = slots_by_hand(ids, np.asarray(b), capacity, mesh.shape["ep"])
        assert np.asarray(a).tobytes() == wanted.tobytes()


def test_scales_come_with_narrow_rows(opened: Any) -> None:
    """Scales are refused for rows that are not quantized."""
    group = opened(None)
    plan = epic.jax.plan(group, LAYER, choices(3))
    x, s = numbers(1, 4 * TOKENS, HIDDEN), numbers(2, 4 * TOKENS, 1)
    with pytest.raises(
        epic.jax.EpicArgumentError, match=r"tokens is float32\[24, 20\]: must be int8 or"
    ):
        epic.jax.dispatch_quantized(plan, x, scales=s)
