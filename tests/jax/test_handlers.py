# SPDX-License-Identifier: Apache-2.0
"""Checks that handlers verify each array of each call themselves.

The test passes arrays to them that the checks in Python would refuse.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import epic.jax
import layers
from epic.jax import call, library

QUICK = bool(os.environ.get("EPIC_JAX_QUICK"))  # XLA compiles each refused call
T, K, E, H, INNER, SLOTS = 6, 2, 8, 16, 12, 16
LAYER, ROUTER = epic.jax.Layer(E, K), epic.jax.Router(E, K)
REFUSED = re.compile(
    r"has \d+ elements: must have|is an array of .*: must be of|has rows of \d+ by"
)


@dataclass
class Seen:
    """A call of a handler, as EPIC's functions make it."""

    target: str
    operands: list[Any]
    results: list[Any]
    aliases: Any
    attributes: dict[str, Any]


def make_programs(group: Any) -> list[Callable[[], Any]]:
    """Return programs that make all calls, forward and backward, with every array."""
    rng = np.random.default_rng(0)

    def real(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    ids = jnp.asarray(np.arange(T * K).reshape(T, K) % E, jnp.int32)
    table: dict[str, Any] = {"token_ids": jnp.zeros(T, jnp.int32), "table": ids[:3]}
    owners = jnp.zeros(E, jnp.int32)
    copies = jnp.arange(E, dtype=jnp.int32) % 4
    early = epic.jax.Experts(E, H, INNER, weighting="early")
    counts = jnp.full(E, 2, jnp.int32)
    mlp = epic.jax.ExpertWeights(
        real(E, H, 2 * INNER), real(E, INNER, H), real(E, 2 * INNER), real(E, H)
    )
    copied = epic.jax.Layer(E, K, num_logical=4)

    def steps(x: Any, w: Any) -> Any:
        limits: dict[str, Any] = {"capacity": SLOTS, "capacity_limit": jnp.int32(SLOTS)}
        plan = epic.jax.plan(group, LAYER, ids, rank_of_expert=owners, **limits)
        recv, slot = epic.jax.dispatch(plan, x, w)
        _, again, slots = epic.jax.plan_dispatch(group, LAYER, ids, x, w, **limits)
        return (
            epic.jax.combine(plan, recv, slot).sum() + epic.jax.sum(group, again * slots[0]).sum()
        )

    def flat(x: Any, w: Any) -> Any:
        plan = epic.jax.plan(group, epic.jax.Layer(E, K, layout="flat"), ids, capacity=SLOTS)
        rows, weights, _ = epic.jax.dispatch_flat(plan, x, w)
        return epic.jax.combine(plan, rows * weights.sum(axis=1, keepdims=True)).sum()

    def narrow(x: Any, w: Any) -> Any:
        plan = epic.jax.plan(group, LAYER, ids, capacity=SLOTS)
        for block in ("1x128", "1x32"):
            epic.jax.dispatch_quantized(plan, x, w, block)
        epic.jax.dispatch_quantized(plan, x.astype(jnp.float8_e4m3fn), w, scales=w)
        plan = epic.jax.plan(group, epic.jax.Layer(E, K, layout="flat"), ids, capacity=SLOTS)
        epic.jax.dispatch_flat_quantized(plan, x, w)
        epic.jax.dispatch_flat_quantized(plan, x.astype(jnp.float8_e4m3fn), w, scales=w)

    def layer(x: Any, weights: Any, shared: bool, **more: Any) -> Any:
        case = {"bias": True, "biases": True, "shared": shared, "balance_coeff": 0.5}
        options = layers.options(case, 1)
        if "logical_of_expert" in more:
            few = epic.jax.Router(4, K)
            options = replace(options, layer=copied, router=few)
        out = epic.jax.moe(group, options, x, weights, **more)
        return out.out.sum() + out.loss

    def weights_of(shared: bool, columns: int = E) -> Any:
        case = {"bias": True, "biases": True, "shared": shared}
        found = layers.weights(case) | {"b_gate": real(columns)}
        found |= {"w_gate": real(H, columns), "bias": real(columns)}
        if shared:
            found |= {"shared_b_gate_up": real(1, 2 * INNER), "shared_b_down": real(1, H)}
        return epic.jax.MoeWeights(**{n: jnp.asarray(v) for n, v in found.items()})

    def losses(logits: Any) -> Any:
        chosen, w = epic.jax.route(ROUTER, logits, bias=real(E), **table)
        args: dict[str, Any] = {"coeff": 0.5, "total_tokens": T}
        loss = epic.jax.balance_loss(ROUTER, logits, load=counts, **args)
        loss += epic.jax.balance_loss(ROUTER, logits, topk_idx=chosen, sequence_tokens=3, **args)
        return w.sum() + loss + epic.jax.z_loss(ROUTER, logits, **args)

    def replicas(x: Any) -> Any:
        plan = epic.jax.plan(group, copied, ids % 4, logical_of_expert=copies)
        return epic.jax.sum_replicas(plan, x).sum()

    x, w = real(T, H), real(T, K)
    return [
        lambda: jax.grad(steps, argnums=(0, 1))(x, w),
        lambda: jax.grad(flat, argnums=(0, 1))(x, w),
        lambda: narrow(x, w),
        lambda: jax.grad(layer, argnums=(0, 1))(x, weights_of(True), True, **table),
        lambda: jax.grad(layer, argnums=(0, 1))(
            x, weights_of(False, 4), False, rank_of_expert=owners, logical_of_expert=copies
        ),
        lambda: jax.grad(losses)(real(T, E)),
        lambda: jax.grad(replicas)(real(E, 3)),
        lambda: jax.grad(
            lambda x, s, w: epic.jax.experts(early, x, counts, counts, w, s).sum(),
            argnums=(0, 1, 2),
        )(real(SLOTS, H), real(SLOTS), mlp),
    ]


def watch(monkeypatch: pytest.MonkeyPatch, programs: list[Callable[[], Any]]) -> list[Seen]:
    """Run the programs; return each call that they make, once for each set of absent arrays."""
    true, found = jax.ffi.ffi_call, {}

    def ffi_call(target: str, results: Any, **how: Any) -> Any:
        def run(*operands: Any, **attributes: Any) -> Any:
            shapes = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.asarray(x).dtype) for x in operands]
            seen = Seen(target, shapes, results, how["input_output_aliases"], attributes)
            absent = [x.shape == (1,) and x.dtype == np.uint8 for x in (*shapes, *results)]
            found[(target, *absent)] = seen
            return true(target, results, **how)(*operands, **attributes)

        return run

    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    for program in programs:
        jax.block_until_ready(program())
    monkeypatch.undo()
    return list(found.values())


def wrong_specs(spec: Any) -> list[Any]:
    """Return the array in another dtype, and with another last dimension; memory may be larger."""
    other = jax.ShapeDtypeStruct(spec.shape, np.dtype(np.int16))
    shape = (*spec.shape[:-1], spec.shape[-1] + 1) if spec.shape else (2,)
    if spec.dtype == np.uint8:
        return [other]
    return [other, jax.ShapeDtypeStruct(shape, spec.dtype)]


def refusal(seen: Seen, operands: list[Any], results: list[Any]) -> str:
    """Make the call with other arrays, full of zeros; return the error."""
    run = jax.ffi.ffi_call(seen.target, results)
    arrays = [np.zeros(x.shape, x.dtype) for x in operands]
    try:
        jax.block_until_ready(run(*arrays, **seen.attributes))
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return "no error"


def test_every_array_of_every_handler(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX itself compares arrays that share memory"""
    monkeypatch.setattr(call, "must_keep_call", lambda *_: False)
    seen = watch(monkeypatch, make_programs(opened(None)))
    wanted = {f"epic_{name}" for name in library.COLLECTIVES + library.LOCAL} - {"epic_keep"}
    assert {one.target for one in seen} == wanted
    tried: set[Any] = set()
    for one in seen:
        for side in ("operands", "results"):
            specs = getattr(one, side)
            for i, spec in enumerate(specs):
                if one.aliases and spec.dtype == np.float32:
                    continue  # JAX itself compares arrays that share memory
                for wrong in wrong_specs(spec):
                    # The quick run tries each array only once, not for each set of absent arrays.
                    key = (one.target, side, i, str(wrong), None if QUICK else id(one))
                    if key in tried:
                        continue
                    tried.add(key)
                    changed = {"operands": one.operands, "results": one.results}
                    changed[side] = [*specs[:i], wrong, *specs[i + 1 :]]
                    said = refusal(one, **changed)
                    assert REFUSED.search(said), (one.target, side, i, spec, wrong, said)
    assert len(tried) > (300 if QUICK else 500)
