# SPDX-License-Identifier: Apache-2.0
"""The grouped expert MLP: local to each device, differentiable in rows and parameters."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from epic import _native
from epic.errors import EpicArgumentError, EpicUnsupportedError
from epic.jax.arrays import (
    FLOATS,
    INTEGERS,
    as_array,
    as_array_or_none,
    check_array,
    check_kind,
    dtype_of,
)
from epic.jax.call import (
    ArraySpec,
    call_handler,
    cast_all_varying,
    memory_specs,
    no_gradient,
    spec_of,
)
from epic.jax.groups import Group
from epic.options import Experts


class ExpertWeights(NamedTuple):
    """Weights of the experts of this device, all of one float dtype.

    width is 2 * inner (gate columns, then up columns; `Experts.interleaved`: alternating), or inner
    for ungated experts.

    Attributes:
        w_gate_up: [experts, hidden, width].
        w_down: [experts, inner, hidden].
        b_gate_up: [experts, width] or None: no bias.
        b_down: [experts, hidden] or None: no bias.

    """

    w_gate_up: Any
    w_down: Any
    b_gate_up: Any = None
    b_down: Any = None


@dataclass(frozen=True)
class ExpertsStatic:
    """Static facts of the experts' forward and backward call.

    Attributes:
        options: the options, with dtypes and the number of experts filled in.
        platform: where the call will run, "cpu" or "gpu"; None: not known.
        tail: whether slots past the last slab must be zeros.

    """

    options: Experts
    platform: str | None
    tail: bool

    def memory(self, slots: int) -> tuple[ArraySpec, ArraySpec, ArraySpec]:
        """Return the saved memory and the workspaces of forward and backward, as array specs."""
        return memory_specs(partial(_native.experts_memory, self.options, slots), self.platform)

    def finished(self, slots: Any, expert_rows: Any) -> Any:
        """Return the slots with zeros in the tail.

        On CPUs the handler has written them; on GPUs it has left the tail as it was.
        """
        if slots is None or not self.tail or self.platform == "cpu":
            return slots
        if self.platform == "gpu":
            return zero_tail(slots, expert_rows)
        return jax.lax.platform_dependent(
            slots, expert_rows, cpu=lambda slots, _: slots, default=zero_tail
        )


def zero_tail(slots: Any, expert_rows: Any) -> Any:
    """Return slots [slots, ...] with zeros past the last slab."""
    occupied = jnp.arange(slots.shape[0]) < expert_rows.sum()
    return jnp.where(jnp.expand_dims(occupied, tuple(range(1, slots.ndim))), slots, 0)


def check_weights(
    options: Experts, weights: ExpertWeights, rows: Any, prefix: str = "", like: Any = None
) -> None:
    """Refuse weights of shapes other than the options ask for, and of several dtypes.

    Args:
        options: the experts' options.
        weights: the weights.
        rows: float64 weights are allowed with float64 rows only.
        prefix: "shared_" in the names of the shared expert's weights.
        like: an array whose dtype the weights must have; None: they must agree with each other.

    """
    local = ("experts", options.num_local_experts)
    hidden, width = ("hidden", options.hidden), ("width", options.width)
    inner = ("inner", options.inner)
    names = [prefix + name for name in ("gate_up", "down", "b_gate_up", "b_down")]
    names = names if prefix else list(ExpertWeights._fields)
    dtypes = FLOATS if like is None else (dtype_of(like).name,)
    first = dtype_of(check_array(names[0], weights[0], dtypes, (local, hidden, width)))
    if (first == jnp.float64) != (dtype_of(rows) == jnp.float64):
        raise EpicArgumentError(
            f"{names[0]} is {first} and the rows are {dtype_of(rows)}: float64 goes with float64 "
            "only; convert one of them"
        )
    check_array(names[1], weights[1], (first.name,), (local, inner, hidden))
    for name, bias, columns in zip(names[2:], weights[2:], (width, hidden), strict=True):
        if bias is not None:
            check_array(name, bias, (first.name,), (local, columns))


def as_expert_weights(weights: ExpertWeights) -> ExpertWeights:
    """Return checked weights as arrays of JAX."""
    return ExpertWeights(*(None if w is None else jnp.asarray(w) for w in weights))


def fill_num_experts(options: Experts, weight: Any, name: str = "w_gate_up") -> Experts:
    """Return the options with the number of experts of the weight, if they leave it open."""
    if options.num_local_experts:
        return options
    count = check_array(name, weight, FLOATS, ("experts", "hidden", "width")).shape[0]
    if count == 0:
        raise EpicArgumentError(f"{name} has no experts: must have 1 or more")
    return replace(options, num_local_experts=count)


def refuse_e4m3(options: Experts) -> None:
    """Refuse weight_type "e4m3", which only epic.torch supports."""
    if options.weight_type == "e4m3":
        raise EpicUnsupportedError(
            "weight_type is 'e4m3': epic.jax does not support it; leave it None"
        )


def fill_dtypes(options: Experts, rows: Any, weights: Any) -> Experts:
    """Return the options with the dtypes of the arrays."""
    refuse_e4m3(options)
    return replace(options, row_type=rows.dtype.name, weight_type=weights.dtype.name)


def wide_dtype(x: Any) -> Any:
    """Return the dtype in which rows of the dtype of x are summed."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def gradient_dtype(platform: str | None, x: Any, weight: Any) -> Any:
    """Return the dtype in which the core writes gradients of experts.

    On GPUs it rounds them to the weights' dtype itself.
    """
    return x.dtype if platform == "gpu" and weight.dtype == x.dtype else wide_dtype(x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def run_experts(static: ExpertsStatic, counts: Any, x: Any, slot_weights: Any, weights: Any) -> Any:
    """Run the experts on checked arrays; counts are expert_rows and expert_tokens."""
    return run_experts_forward(static, counts, x, slot_weights, weights)[0]


def run_experts_forward(
    static: ExpertsStatic, counts: Any, x: Any, slot_weights: Any, weights: Any
) -> tuple[Any, Any]:
    """Run the forward call; the core saves the outputs of the first product."""
    saved, workspace, _ = static.memory(x.shape[0])
    operands = [x, *counts, slot_weights, *weights]
    results = [spec_of(x), saved, workspace]
    y, saved, _ = call_handler("experts", results, operands, **static.options.numbers("experts_"))
    return static.finished(y, counts[0]), (counts, x, slot_weights, weights, saved)


def run_experts_backward(static: ExpertsStatic, kept: Any, d_y: Any) -> tuple[Any, ...]:
    """Run the backward call; return each weight's gradient in the dtype of the weight."""
    counts, x, slot_weights, weights, saved = kept
    kind = gradient_dtype(static.platform, x, weights[0])
    results = [spec_of(x), None if slot_weights is None else spec_of(slot_weights)]
    results += [None if w is None else ArraySpec(w.shape, kind) for w in weights]
    results += [static.memory(x.shape[0])[2]]
    operands = [x, *counts, slot_weights, *weights, saved, d_y]
    out = call_handler("experts_backward", results, operands, **static.options.numbers("experts_"))
    d_slots = [static.finished(d, counts[0]) for d in out[:2]]
    pairs = zip(weights, out[2:6], strict=True)
    d_weights = tuple(None if w is None else d.astype(w.dtype) for w, d in pairs)
    return tuple(no_gradient(c) for c in counts), *d_slots, d_weights


run_experts.defvjp(run_experts_forward, run_experts_backward)


def experts(
    options: Experts,
    rows: Any,
    expert_rows: Any,
    expert_tokens: Any,
    weights: ExpertWeights,
    slot_weights: Any = None,
    *,
    group: Group | None = None,
) -> Any:
    """Apply the MLP of each expert to the rows of its slab.

    Local: it waits for no other rank.  Differentiable in rows, weights and slot_weights.  Only
    occupied slots are computed; the other rows of the result are zeros.

    Args:
        options: the experts' options; static.
        rows: [slots, hidden] float32, bfloat16, float16 or float64, as `dispatch` returns them.
        expert_rows: [experts] integers: `Plan.expert_rows`.
        expert_tokens: [experts] integers: `Plan.expert_tokens`.
        weights: the weights of this device's experts.
        slot_weights: [slots] any float dtype: the weights of the choices, with weighting "early" or
            "input" only; with "late" pass them to `combine` instead.
        group: the group, from which the function knows whether the call runs on CPUs or GPUs.
            None: memory is reserved that suffices for both.  On a GPU some group must be open.

    Returns:
        [slots, hidden], dtype of rows.

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.

    """
    check_kind("options", options, Experts)
    check_kind("weights", weights, ExpertWeights)
    if group is not None:
        check_kind("group", group, Group)
    platform = group.platform if group else None
    return apply_to_slabs(
        options, platform, True, rows, (expert_rows, expert_tokens), weights, slot_weights
    )


def apply_to_slabs(
    options: Experts,
    platform: str | None,
    tail: bool,
    rows: Any,
    counts: tuple[Any, Any],
    weights: ExpertWeights,
    slot_weights: Any,
) -> Any:
    """Check the arguments of experts() and run it; tail: as in ExpertsStatic."""
    refuse_e4m3(options)
    rows = as_array("rows", rows, FLOATS, ("slots", ("hidden", options.hidden)))
    options = fill_num_experts(options, weights.w_gate_up)
    check_weights(options, weights, rows)
    weights = as_expert_weights(weights)
    local = [("experts", options.num_local_experts)]
    counts = (
        as_array("expert_rows", counts[0], INTEGERS, local).astype(jnp.int32),
        as_array("expert_tokens", counts[1], INTEGERS, local).astype(jnp.int32),
    )
    if (slot_weights is not None) != (options.weighting != "late"):
        raise EpicArgumentError(
            'slot_weights come with weighting "early" or "input", and only then'
        )
    shape = [("slots", rows.shape[0])]
    slot_weights = as_array_or_none("slot_weights", slot_weights, FLOATS, shape)
    if slot_weights is not None:
        slot_weights = slot_weights.astype(jnp.float32)
    if platform == "gpu":
        weights = ExpertWeights(*(cast_for_gpu(rows.dtype, weight) for weight in weights))
    options = fill_dtypes(options, rows, weights.w_gate_up)
    arrays = cast_all_varying(None, *counts, rows, slot_weights, *weights)
    static = ExpertsStatic(options, platform, tail)
    return run_experts(static, tuple(arrays[:2]), arrays[2], arrays[3], tuple(arrays[4:]))


def cast_for_gpu(dtype: Any, weight: Any) -> Any:
    """Return a weight in the dtype that the tensor cores need: that of 16-bit rows."""
    if weight is None or dtype not in (jnp.bfloat16, jnp.float16):
        return weight
    return weight.astype(dtype)
