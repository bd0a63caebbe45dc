# SPDX-License-Identifier: Apache-2.0
"""The MLP of this device's experts, with gradients of rows and parameters.

No function of this module communicates with other ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from epic import _native
from epic.errors import EpicArgumentError
from epic.jax import e4m3
from epic.jax.arrays import (
    FLOATS,
    INTEGERS,
    MATRICES,
    as_array,
    as_array_or_none,
    as_int32,
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
from epic.jax.over_mesh import over_mesh
from epic.options import Experts, check_int


class ExpertWeights(NamedTuple):
    """Weights of the experts of this device, all of one float dtype.

    width is 2 * inner (gate columns, then up columns; `Experts.interleaved`: alternating), or inner
    for ungated experts.

    Attributes:
        w_gate_up: [experts, hidden, width].
        w_down: [experts, inner, hidden].
        b_gate_up: [experts, width] or None: no bias.
        b_down: [experts, hidden] or None: no bias.
        w_gate_up_scales: [experts, blocks of width, blocks of hidden] float32, as `scaled` makes
            them; w_gate_up and w_down are float8_e4m3fn and transposed then.  Else None.
        w_down_scales: [experts, blocks of hidden, blocks of inner] float32, or None.

    """

    w_gate_up: Any
    w_down: Any
    b_gate_up: Any = None
    b_down: Any = None
    w_gate_up_scales: Any = None
    w_down_scales: Any = None


WEIGHTS = ("w_gate_up", "w_down", "b_gate_up", "b_down")  # all arrays except scales


@dataclass(frozen=True)
class ExpertsStatic:
    """The static arguments of the experts' forward and backward call.

    Attributes:
        options: the options, with dtypes and the number of experts filled in.
        platform: where the call will run, "cpu" or "gpu"; None: not known.
        tail: whether slots past the last slab must be zeros in the results.
        max_sms: the largest number of SMs of each call; 0: all SMs.

    """

    options: Experts
    platform: str | None
    tail: bool
    max_sms: int = 0

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of both calls."""
        return {**self.options.numbers("experts_"), "max_sms": self.max_sms}

    def for_backward(self, x: Any, weight: Any) -> "ExpertsStatic":
        """Return the static arguments of the backward call of e4m3 experts with this weight."""
        kind = "e4m3" if e4m3.is_scaled(weight) else x.dtype.name
        return replace(self, options=replace(self.options, weight_type=kind))

    def memory(self, slots: int) -> tuple[ArraySpec, ArraySpec, ArraySpec]:
        """Return the saved memory and the workspaces of forward and backward, as array specs."""
        return memory_specs(partial(_native.experts_memory, self.options, slots), self.platform)

    def finished(self, slots: Any, expert_rows: Any) -> Any:
        """Return slots with zeros past the last slab, if `tail` is True.

        On CPUs the handler writes these zeros.  On GPUs it does not write there.
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
    """Raise an error for weights whose shapes do not fit the options, or whose dtypes differ.

    Args:
        options: the experts' options.
        weights: the weights.
        rows: the rows.  Weights and rows must both be float64, or neither.
        prefix: "shared_" for the weights of the shared expert.
        like: an array whose dtype the weights must have.  None: all weights must have one dtype.
            With weights in e4m3, biases may have any float dtype.

    """
    local = ("experts", options.num_local_experts)
    hidden, width = ("hidden", options.hidden), ("width", options.width)
    inner = ("inner", options.inner)
    names = [prefix + name for name in ("gate_up", "down", "b_gate_up", "b_down")]
    names = names if prefix else list(ExpertWeights._fields[:4])
    if e4m3.is_scaled(weights[0]) and not prefix:
        check_array(names[0], weights[0], (e4m3.E4M3,), (local, width, hidden))
        check_array(names[1], weights[1], (e4m3.E4M3,), (local, hidden, inner))
        of_biases: Sequence[str] = FLOATS[:-1]
    else:
        dtypes = FLOATS if like is None else (dtype_of(like).name,)
        first = dtype_of(check_array(names[0], weights[0], dtypes, (local, hidden, width)))
        if (first == jnp.float64) != (dtype_of(rows) == jnp.float64):
            raise EpicArgumentError(
                f"{names[0]} is {first} and rows are {dtype_of(rows)}: must both be float64, or "
                "neither; convert one of them"
            )
        check_array(names[1], weights[1], (first.name,), (local, inner, hidden))
        of_biases = (first.name,)
    for name, bias, columns in zip(names[2:], weights[2:4], (width, hidden), strict=True):
        if bias is not None:
            check_array(name, bias, of_biases, (local, columns))
    if not prefix:
        sizes = (options.hidden, options.width, options.inner)
        e4m3.check_scales(weights, options.num_local_experts, sizes)


def as_expert_weights(weights: ExpertWeights) -> ExpertWeights:
    """Return weights as arrays of JAX; they must have been checked."""
    return ExpertWeights(*(None if w is None else jnp.asarray(w) for w in weights))


def fill_num_experts(options: Experts, weight: Any, name: str = "w_gate_up") -> Experts:
    """Return the options; if they have no number of experts, with that of the weight."""
    if options.num_local_experts:
        return options
    count = check_array(name, weight, MATRICES, ("experts", "hidden", "width")).shape[0]
    if count == 0:
        raise EpicArgumentError(f"{name} has no experts: must have 1 or more")
    return replace(options, num_local_experts=count)


def fill_dtypes(options: Experts, rows: Any, weight: Any) -> Experts:
    """Return the options with the dtypes of rows and weight.

    weight_type is "e4m3" if the options or the weight have e4m3.
    """
    is_e4m3 = e4m3.uses_e4m3(options, weight)
    kind = "e4m3" if is_e4m3 else weight.dtype.name
    return replace(options, row_type=rows.dtype.name, weight_type=kind)


def wide_dtype(x: Any) -> Any:
    """Return the dtype in which rows of the dtype of x are summed."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def gradient_dtype(platform: str | None, x: Any, weight: Any) -> Any:
    """Return the dtype in which the core writes gradients of experts.

    On GPUs it rounds them to the weights' dtype itself.
    """
    is_narrow = weight.dtype == x.dtype or e4m3.is_scaled(weight)
    return x.dtype if platform == "gpu" and is_narrow else wide_dtype(x)


def gradient_spec(weight: Any, kind: Any) -> ArraySpec | None:
    """Return the spec of a weight's gradient; None for a weight that is absent or in e4m3."""
    has_none = weight is None or e4m3.is_scaled(weight)
    return None if has_none else ArraySpec(weight.shape, kind)


def gradient_of_weight(weight: Any, gradient: Any) -> Any:
    """Return the gradient in the dtype of the weight; weights in e4m3 have zeros."""
    if weight is None:
        return None
    return jnp.zeros_like(weight) if e4m3.is_scaled(weight) else gradient.astype(weight.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def run_experts(static: ExpertsStatic, counts: Any, x: Any, slot_weights: Any, weights: Any) -> Any:
    """Run the experts on checked arrays.

    Args:
        static: the static arguments.
        counts: expert_rows and expert_tokens.
        x: [slots, hidden].
        slot_weights: [slots] float32, or None.
        weights: the fields of ExpertWeights.

    """
    return run_experts_forward(static, counts, x, slot_weights, weights)[0]


def run_experts_forward(
    static: ExpertsStatic, counts: Any, x: Any, slot_weights: Any, weights: Any
) -> tuple[Any, Any]:
    """Run the forward call; save its inputs, and the memory that the core saves for backward."""
    saved, workspace, _ = static.memory(x.shape[0])
    rows, row_scales, given = x, None, weights
    if static.options.weight_type == "e4m3":
        rows, row_scales = e4m3.quantize_rows(x)
        given = e4m3.round_weights(x, weights)
    operands = [rows, *counts, slot_weights, *given, row_scales]
    results = [spec_of(x), saved, workspace]
    y, saved, _ = call_handler("experts", results, operands, **static.attributes())
    return static.finished(y, counts[0]), (counts, x, slot_weights, weights, saved)


def run_experts_backward(static: ExpertsStatic, residuals: Any, d_y: Any) -> tuple[Any, ...]:
    """Run the backward call; return each weight's gradient in the dtype of the weight."""
    counts, x, slot_weights, weights, saved = residuals
    given = weights
    if static.options.weight_type == "e4m3":
        given = e4m3.weights_for_backward(x, weights)
        static = static.for_backward(x, given[0])
    kind = gradient_dtype(static.platform, x, weights[0])
    results = [spec_of(x), None if slot_weights is None else spec_of(slot_weights)]
    results += [gradient_spec(w, kind) for w in given[:4]]
    results += [static.memory(x.shape[0])[2]]
    operands = [x, *counts, slot_weights, *given, saved, d_y]
    out = call_handler("experts_backward", results, operands, **static.attributes())
    d_slots = [static.finished(d, counts[0]) for d in out[:2]]
    pairs = zip(weights[:4], out[2:6], strict=True)
    d_weights = [gradient_of_weight(w, d) for w, d in pairs]
    d_weights += [None if s is None else jnp.zeros_like(s) for s in weights[4:]]
    return tuple(no_gradient(c) for c in counts), *d_slots, tuple(d_weights)


run_experts.defvjp(run_experts_forward, run_experts_backward)


@over_mesh
def experts(
    options: Experts,
    rows: Any,
    expert_rows: Any,
    expert_tokens: Any,
    weights: ExpertWeights,
    slot_weights: Any = None,
    *,
    group: Group | None = None,
    max_sms: int = 0,
) -> Any:
    """Apply the MLP of each expert to the rows of its slab.

    No other rank takes part in this call.  It is differentiable in rows, weights and slot_weights.
    Only slots with a token are computed; all other rows of the result are zeros.

    Args:
        options: the experts' options; static.
        rows: [slots, hidden] float32, bfloat16, float16 or float64, as `dispatch` returns them.
        expert_rows: [experts] integers: `Plan.expert_rows`.
        expert_tokens: [experts] integers: `Plan.expert_tokens`.
        weights: the weights of this device's experts.
        slot_weights: [slots] any float dtype: the weights of the choices, with weighting "early" or
            "input" only; with "late" pass them to `combine` instead.
        group: the group, which shows whether the call runs on CPUs or GPUs.  None: the call
            reserves memory that suffices for both.  On a GPU any group of that GPU must be open.
        max_sms: on GPUs the largest number of SMs of this call and its gradient; 0: all SMs, even
            if the group has a limit.

    Returns:
        [slots, hidden], dtype of rows.

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.

    Example:
        >>> import jax.numpy as jnp
        >>> import epic.jax
        >>> options = epic.jax.Experts(hidden=8, inner=16)
        >>> weights = epic.jax.ExpertWeights(jnp.ones((2, 8, 32)), jnp.ones((2, 16, 8)))
        >>> counts = jnp.array([3, 1])  # rows of each expert
        >>> epic.jax.experts(options, jnp.ones((4, 8)), counts, counts, weights).shape
        (4, 8)

    """
    check_kind("options", options, Experts)
    check_kind("weights", weights, ExpertWeights)
    if group is not None:
        check_kind("group", group, Group)
    platform = group.platform if group else None
    how = ExpertsStatic(options, platform, True, check_int("max_sms", max_sms, 0))
    return apply_to_slabs(how, rows, (expert_rows, expert_tokens), weights, slot_weights)


def apply_to_slabs(
    how: ExpertsStatic,
    rows: Any,
    counts: tuple[Any, Any],
    weights: ExpertWeights,
    slot_weights: Any,
) -> Any:
    """Check the arguments of experts() and run it.

    how: the static arguments, with the options of the caller.  counts: expert_rows and
    expert_tokens.
    """
    options, platform = how.options, how.platform
    rows = as_array("rows", rows, FLOATS, ("slots", ("hidden", options.hidden)))
    options = fill_num_experts(options, weights.w_gate_up)
    e4m3.check_e4m3(options, platform, rows, weights.w_gate_up)
    check_weights(options, weights, rows)
    weights = as_expert_weights(weights)
    local = [("experts", options.num_local_experts)]
    counts = (
        as_int32(as_array("expert_rows", counts[0], INTEGERS, local)),
        as_int32(as_array("expert_tokens", counts[1], INTEGERS, local)),
    )
    if (slot_weights is not None) != (options.weighting != "late"):
        raise EpicArgumentError(
            f"slot_weights is {'None' if slot_weights is None else 'given'} and weighting is "
            f"{options.weighting!r}: must be given with weighting 'early' or 'input', and None "
            "with 'late'"
        )
    shape = [("slots", rows.shape[0])]
    slot_weights = as_array_or_none("slot_weights", slot_weights, FLOATS, shape)
    if slot_weights is not None:
        slot_weights = slot_weights.astype(jnp.float32)
    if platform == "gpu" and not e4m3.uses_e4m3(options, weights.w_gate_up):
        cast = {n: cast_for_gpu(rows.dtype, getattr(weights, n)) for n in WEIGHTS}
        weights = weights._replace(**cast)
    options = fill_dtypes(options, rows, weights.w_gate_up)
    arrays = cast_all_varying(None, *counts, rows, slot_weights, *weights)
    static = replace(how, options=options)
    return run_experts(static, tuple(arrays[:2]), arrays[2], arrays[3], tuple(arrays[4:]))


def cast_for_gpu(dtype: Any, weight: Any) -> Any:
    """Return a weight in the dtype that the tensor cores need, which is that of 16-bit rows.

    Weights in e4m3, and weights for other rows, stay unchanged.
    """
    if weight is None or e4m3.is_scaled(weight) or dtype not in (jnp.bfloat16, jnp.float16):
        return weight
    return weight.astype(dtype)
