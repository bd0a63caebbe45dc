# SPDX-License-Identifier: Apache-2.0
"""The grouped expert MLP: local to each device, differentiable in rows and parameters."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from epic import _native
from epic.errors import EpicArgumentError
from epic.jax.call import Spec, call, like, no_gradient, spread_all
from epic.jax.steps import check_floats
from epic.options import Experts


class ExpertWeights(NamedTuple):
    """Parameters of the local experts: gate and up in one array, as options.interleaved says."""

    w_gate_up: Any  # [local experts, hidden, width]
    w_down: Any  # [local experts, inner, hidden]
    b_gate_up: Any = None  # [local experts, width]
    b_down: Any = None  # [local experts, hidden]


def memory(options: Experts, slots: int) -> tuple[Spec, Spec, Spec]:
    """What is saved, and workspace forward and backward."""
    sizes = _native.experts_memory(options, slots)
    saved, forward, backward = sizes.saved_bytes, sizes.forward_bytes, sizes.backward_bytes
    return (
        Spec((saved,), jnp.uint8),
        Spec((forward,), jnp.uint8),
        Spec((backward,), jnp.uint8),
    )


def check_weights(options: Experts, weights: ExpertWeights) -> None:
    """The shapes that the options ask for, and one dtype."""
    local, hidden, inner, width = (
        options.num_local_experts,
        options.hidden,
        options.inner,
        options.width,
    )
    shapes = ((local, hidden, width), (local, inner, hidden), (local, width), (local, hidden))
    for name, x, shape in zip(ExpertWeights._fields, weights, shapes, strict=True):
        if x is None:
            continue
        if x.shape != shape:
            raise EpicArgumentError(f"{name}: shape {x.shape}: {list(shape)} is needed")
        if x.dtype != weights.w_gate_up.dtype:
            raise EpicArgumentError(f"{name}: dtype {x.dtype}: all weights have one dtype")


def counted(options: Experts, weights: ExpertWeights) -> Experts:
    """The options with as many experts as the weights have, where they leave it open."""
    return (
        options
        if options.num_local_experts
        else replace(options, num_local_experts=weights.w_gate_up.shape[0])
    )


def typed(options: Experts, rows: Any, weights: Any) -> Experts:
    """The options with the dtypes of the arrays."""
    return replace(options, row_type=rows.dtype.name, weight_type=weights.dtype.name)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def run(options: Experts, counts: Any, x: Any, slot_weights: Any, weights: Any) -> Any:
    """experts on checked arrays; counts: expert_rows, expert_tokens."""
    return forward(options, counts, x, slot_weights, weights)[0]


def forward(
    options: Experts, counts: Any, x: Any, slot_weights: Any, weights: Any
) -> tuple[Any, Any]:
    """The core saves what gate and up gave."""
    saved, workspace, _ = memory(options, x.shape[0])
    operands = [x, *counts, slot_weights, *weights]
    results = [like(x), saved, workspace]
    out = call("experts", results, operands, **options.numbers("experts_"))
    return out[0], (counts, x, slot_weights, weights, out[1])


def backward(options: Experts, kept: Any, d_y: Any) -> tuple[Any, ...]:
    """Weight gradients come in float32 and leave in the weights' dtype."""
    counts, x, slot_weights, weights, saved = kept
    kind = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    results = [like(x), None if slot_weights is None else like(slot_weights)]
    results += [None if w is None else Spec(w.shape, kind) for w in weights]
    results += [memory(options, x.shape[0])[2]]
    operands = [x, *counts, slot_weights, *weights, saved, d_y]
    out = call("experts_backward", results, operands, **options.numbers("experts_"))
    pairs = zip(weights, out[2:6], strict=True)
    d_weights = tuple(None if w is None else d.astype(w.dtype) for w, d in pairs)
    return tuple(no_gradient(c) for c in counts), out[0], out[1], d_weights


run.defvjp(forward, backward)


def experts(
    options: Experts,
    rows: Any,
    expert_rows: Any,
    expert_tokens: Any,
    weights: ExpertWeights,
    slot_weights: Any = None,
) -> Any:
    """The MLP of each slab: rows [slots, hidden] -> [slots, hidden].

    expert_rows and expert_tokens: as a plan gives them.  weights: of this device's experts, all of
    one dtype.  slot_weights [slots] with weighting
    "early" and "input".  Only occupied slots are computed; the others come out as zeros.
    """
    weights = ExpertWeights(*weights)
    options = counted(options, weights)
    check_floats("rows", rows)
    check_weights(options, weights)
    local = (options.num_local_experts,)
    if rows.ndim != 2 or rows.shape[1] != options.hidden:
        raise EpicArgumentError(f"rows: shape {rows.shape}: [slots, {options.hidden}] is needed")
    if expert_rows.shape != local or expert_tokens.shape != local:
        raise EpicArgumentError(f"expert_rows, expert_tokens: {list(local)} is needed")
    if (slot_weights is not None) != (options.weighting != "late"):
        raise EpicArgumentError(
            'slot_weights come with weighting "early" or "input", and only then'
        )
    options = typed(options, rows, weights.w_gate_up)
    arrays = spread_all(None, expert_rows, expert_tokens, rows, slot_weights, *weights)
    return run(options, tuple(arrays[:2]), arrays[2], arrays[3], tuple(arrays[4:]))
