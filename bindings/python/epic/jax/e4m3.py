# SPDX-License-Identifier: Apache-2.0
"""Weights and rows in e4m3 with float32 scales, for the products of EPIC's experts on GPUs.

A weight has one scale for each block of 128 x 128 numbers.  A row has one scale for each 128
numbers.  The value of a number is the e4m3 number times its scale.
Weights in MXFP8, with one power of two for each 32 numbers, are converted.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from epic.errors import EpicArgumentError, EpicUnsupportedError
from epic.jax.arrays import FLOATS, as_array, check_array, dtype_of
from epic.options import Experts

BLOCK = 128
LARGEST = 448.0  # largest number in e4m3
E4M3 = "float8_e4m3fn"
SCALES = ("w_gate_up_scales", "w_down_scales")
MX_BLOCK = 32  # numbers that share a scale in MXFP8
MX_SCALES = ("uint8", "float8_e8m0fnu")

Weights = TypeVar("Weights", bound=tuple)  # type: ignore[type-arg]  # ExpertWeights or MoeWeights


def num_blocks(length: int) -> int:
    """Return the number of blocks of 128 that `length` numbers have; the last may be shorter."""
    return -(-length // BLOCK)


def expand_scales(scales: Any, *shape: int) -> Any:
    """Return scales of blocks as one scale for each number.

    Args:
        scales: [..., blocks] or [..., blocks, blocks].
        *shape: the length of each dimension that is divided into blocks.

    Returns:
        [..., *shape].

    """
    for i, length in enumerate(shape):
        axis = scales.ndim - len(shape) + i
        scales = jnp.repeat(scales, BLOCK, axis=axis)
        scales = jax.lax.slice_in_dim(scales, 0, length, axis=axis)
    return scales


def scale_for(largest: Any) -> Any:
    """Return the scale of blocks by their largest magnitudes, which it maps to 448.

    It is 1 for zeros, and for blocks that are so small that the processor rounds their scale to 0.
    The last bit may differ from that of a scale that dispatch computes, because XLA replaces the
    division by a multiplication.
    """
    scale = largest / LARGEST
    return jnp.where(scale == 0, 1.0, scale)


def as_e4m3(x: Any) -> Any:
    """Round float32 to e4m3, to nearest even.  Larger numbers become the largest number of e4m3.

    On some platforms XLA converts to another type first, which rounds twice.  So this function
    rounds the numbers to 3 bits of mantissa, and those below 2^-6 to multiples of 2^-9.  XLA then
    converts them exactly.
    """
    x = jnp.clip(x, -LARGEST, LARGEST)
    subnormal = jnp.round(x * 512) / 512
    normal = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=3)
    return jnp.where(jnp.abs(x) < 2**-6, subnormal, normal).astype(jnp.float8_e4m3fn)


def quantize_rows(x: Any) -> tuple[Any, Any]:
    """Round rows [slots, hidden] to e4m3, as dispatch does with quantize="1x128".

    Returns the rows [slots, hidden], and scales [slots, blocks of hidden] float32.
    """
    slots, columns = x.shape
    wide = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, num_blocks(columns) * BLOCK - columns)))
    largest = jnp.abs(wide).reshape(slots, num_blocks(columns), BLOCK).max(axis=-1)
    scales = scale_for(largest)
    return as_e4m3(x.astype(jnp.float32) / expand_scales(scales, columns)), scales


def quantize_weight(w: Any) -> tuple[Any, Any]:
    """Round [experts, n, m] to e4m3 and transpose it.

    Returns the weight [experts, m, n] and scales [experts, blocks of m, blocks of n].
    """
    turned = jnp.swapaxes(w, 1, 2).astype(jnp.float32)
    experts, rows, columns = turned.shape
    high, wide = num_blocks(rows), num_blocks(columns)
    missing = ((0, 0), (0, high * BLOCK - rows), (0, wide * BLOCK - columns))
    tiles = jnp.abs(jnp.pad(turned, missing)).reshape(experts, high, BLOCK, wide, BLOCK)
    scales = scale_for(tiles.max(axis=(2, 4)))
    return as_e4m3(turned / expand_scales(scales, rows, columns)), scales


def transpose_scaled(w: Any, scales: Any) -> tuple[Any, Any]:
    """Transpose the last two dimensions of an e4m3 weight [experts, m, n] and of its scales."""
    return jnp.swapaxes(w, 1, 2), jnp.swapaxes(scales, 1, 2)


def weight_values(name: str, w: Any, scales: Any) -> Any:
    """Return an e4m3 weight [experts, m, n] times its scales, in float32.

    scales: float32 for blocks of 128 x 128, or e8m0 for 1 x 32 (MXFP8), for which the result is
    exact.
    """
    experts, rows, columns = w.shape
    whole = (("experts", experts), num_blocks(rows), num_blocks(columns))
    thin = (("experts", experts), rows, -(-columns // MX_BLOCK))
    if getattr(getattr(scales, "dtype", None), "name", None) not in MX_SCALES:
        scales = as_array(f"{name}_scales", scales, ("float32",), whole)
        return w.astype(jnp.float32) * expand_scales(scales, rows, columns)
    octets = as_array(f"{name}_scales", scales, MX_SCALES, thin)
    return multiply_mx(w, octets)


def multiply_mx(x: Any, scales: Any) -> Any:
    """Return [..., columns] in float32, each 32 columns times the power of two of an e8m0 scale.

    Exact, as multiplication by a power of two is.
    """
    octets = scales
    if octets.dtype != jnp.uint8:
        octets = jax.lax.bitcast_convert_type(octets, jnp.uint8)
    wide = jnp.repeat(octets.astype(jnp.int32), MX_BLOCK, axis=-1)[..., : x.shape[-1]]
    found = jnp.ldexp(x.astype(jnp.float32), wide - 127)
    return jnp.where(wide == 255, jnp.nan, found)


def check_weights_class(weights: Any) -> None:
    """Raise an error if the weights are neither ExpertWeights nor MoeWeights."""
    if not set(SCALES) <= set(getattr(weights, "_fields", ())):
        raise EpicArgumentError(
            f"weights is a {type(weights).__name__}: must be an ExpertWeights or MoeWeights"
        )


def unscaled(weights: Weights, dtype: Any) -> Weights:
    """Return weights in e4m3 as weights of a float type, which every group computes with.

    In float32 and bfloat16 the result is exact for MXFP8 weights (e4m3 values with one power-of-two
    scale for each 32), unless a value is too small for the type.

    Args:
        weights: ExpertWeights or MoeWeights with w_gate_up [experts, width, hidden] and w_down
            [experts, hidden, inner] in float8_e4m3fn, and their scales: float32 as `scaled` makes
            them, or uint8 or float8_e8m0fnu [experts, rows, columns / 32] (MXFP8).
        dtype: the dtype of the result: float32, bfloat16 or float16.

    Returns:
        The same type, with w_gate_up [experts, hidden, width] and w_down [experts, inner, hidden]
        in that dtype, without scales.

    Raises:
        EpicArgumentError: the weights are not e4m3, or the scales do not fit them.

    Example:
        >>> import jax.numpy as jnp
        >>> import epic.jax
        >>> weights = epic.jax.ExpertWeights(jnp.ones((2, 256, 512)), jnp.ones((2, 256, 256)))
        >>> found = epic.jax.unscaled(epic.jax.scaled(weights), jnp.float32)
        >>> bool((found.w_gate_up == weights.w_gate_up).all())
        True

    """
    check_weights_class(weights)
    named = weights._asdict()  # type: ignore[attr-defined]
    if jnp.dtype(dtype).name not in FLOATS[:-1]:
        kinds = " or ".join(FLOATS[:-1])
        raise EpicArgumentError(f"dtype is {jnp.dtype(dtype)}: must be {kinds}")
    change: dict[str, Any] = {}
    for name in ("w_gate_up", "w_down"):
        w = as_array(name, named[name], (E4M3,), ("experts", "rows", "columns"))
        values = weight_values(name, w, named[name + "_scales"])
        change[name] = jnp.swapaxes(values, 1, 2).astype(dtype)
        change[name + "_scales"] = None
    return weights._replace(**change)  # type: ignore[attr-defined,no-any-return]


def has_mx_scales(named: dict[str, Any]) -> bool:
    """Return whether the scales of weights, by name, are those of MXFP8."""
    return any(getattr(getattr(named[n], "dtype", None), "name", None) in MX_SCALES for n in SCALES)


def scaled(weights: Weights) -> Weights:
    """Round the matrices of experts to e4m3 with scales, for experts that are not trained.

    The rounded matrices take half the memory of 16-bit weights, and later calls do not round them
    again.  Their gradients are zeros; rows and biases have gradients.  Only groups of GPUs compute
    with such weights.

    Args:
        weights: ExpertWeights or MoeWeights in float32, bfloat16 or float16; or in MXFP8, as
            `unscaled` describes it.  Products on Hopper take no MXFP8 weights, so these are rounded
            a second time, to blocks of 128 x 128.

    Returns:
        Weights of the type that was passed.  w_gate_up [experts, width, hidden] and w_down
        [experts, hidden, inner] are transposed and in float8_e4m3fn.  Their scales are set.

    Raises:
        EpicArgumentError: a matrix is float8_e4m3fn already, or has another dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> import epic.jax
        >>> weights = epic.jax.ExpertWeights(jnp.ones((2, 256, 512)), jnp.ones((2, 256, 256)))
        >>> found = epic.jax.scaled(weights)
        >>> found.w_gate_up.dtype.name, found.w_gate_up.shape, found.w_gate_up_scales.shape
        ('float8_e4m3fn', (2, 512, 256), (2, 4, 2))

    """
    check_weights_class(weights)
    if has_mx_scales(weights._asdict()):  # type: ignore[attr-defined]
        weights = unscaled(weights, jnp.float32)
    named = weights._asdict()  # type: ignore[attr-defined]
    change = {}
    for name in ("w_gate_up", "w_down"):
        if is_scaled(named[name]):
            raise EpicArgumentError(f"{name} is float8_e4m3fn: must be a float type to be scaled")
        w = as_array(name, named[name], FLOATS[:-1], ("experts", "rows", "columns"))
        change[name], change[name + "_scales"] = quantize_weight(jax.lax.stop_gradient(w))
    return weights._replace(**change)  # type: ignore[attr-defined,no-any-return]


def is_scaled(weight: Any) -> bool:
    """Return whether a weight is stored in e4m3."""
    return getattr(getattr(weight, "dtype", None), "name", None) == E4M3


def uses_e4m3(options: Experts, weight: Any) -> bool:
    """Return whether the experts multiply in e4m3, by `weight_type` or by a scaled weight."""
    return options.weight_type == "e4m3" or is_scaled(weight)


def check_e4m3(options: Experts, platform: str | None, rows: Any, weight: Any) -> None:
    """Raise an error for e4m3 experts on CPUs or with float64 rows.

    platform: "cpu", "gpu", or None if it is not known yet.
    """
    if not uses_e4m3(options, weight):
        return
    cause = "w_gate_up is float8_e4m3fn" if is_scaled(weight) else "weight_type is 'e4m3'"
    if platform == "cpu":
        raise EpicUnsupportedError(
            f"{cause}: groups on CPUs do not support it; use a group of GPUs, or weights of a "
            "float type and weight_type=None"
        )
    if dtype_of(rows) == jnp.float64:
        raise EpicUnsupportedError(
            f"{cause} and the rows are float64: must be float32, bfloat16 or float16"
        )


def check_scales(weights: Any, local: int, sizes: tuple[int, int, int]) -> None:
    """Raise an error unless weights in e4m3 have scales and all others have none.

    local: the number of experts.  sizes: hidden, width and inner of the experts.
    """
    hidden, width, inner = map(num_blocks, sizes)
    shapes = {SCALES[0]: (width, hidden), SCALES[1]: (hidden, inner)}
    for name, shape in shapes.items():
        scales, needed = getattr(weights, name), is_scaled(weights.w_gate_up)
        if (scales is not None) != needed:
            raise EpicArgumentError(
                f"{name} is {'None' if needed else 'given'} and w_gate_up is "
                f"{weights.w_gate_up.dtype}: must be given with float8_e4m3fn, and None with other "
                "types; epic.jax.scaled(weights) makes both"
            )
        if needed and has_mx_scales(weights._asdict()):
            raise EpicUnsupportedError(
                f"{name} is {scales.dtype}: MXFP8 weights are not supported, because the products "
                "of Hopper take one float32 scale for 128 x 128 numbers; convert them by "
                "epic.jax.scaled(weights), or exactly by epic.jax.unscaled(weights, jnp.bfloat16)"
            )
        if needed:
            check_array(name, scales, ("float32",), (("experts", local), *shape))


def round_weights(x: Any, weights: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return weights and scales with matrices rounded to e4m3, and biases in the dtype of x.

    weights: in the order of ExpertWeights.
    """
    up, down, *biases, up_scales, down_scales = weights
    if up_scales is None:
        up, up_scales = quantize_weight(up)
        down, down_scales = quantize_weight(down)
    wide = [None if b is None else b.astype(x.dtype) for b in biases]
    return up, down, *wide, up_scales, down_scales


def weights_for_backward(x: Any, weights: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the weights for the backward call of e4m3 experts.

    Weights that are stored in e4m3 are transposed back.  Otherwise forward used rounded copies, and
    backward uses the weights themselves, in the dtype of x.
    """
    up, down, *biases, up_scales, down_scales = weights
    wide = [None if b is None else b.astype(x.dtype) for b in biases]
    if up_scales is None:
        return up.astype(x.dtype), down.astype(x.dtype), *wide, None, None
    (up, up_scales), (down, down_scales) = (
        transpose_scaled(up, up_scales),
        transpose_scaled(down, down_scales),
    )
    return up, down, *wide, up_scales, down_scales


def refuse_parts(weights: Any, argument: str) -> None:
    """Raise an error for an axis that shards weights stored in e4m3.

    A block of 128 x 128 numbers must not be divided.  argument: the name of the argument with the
    axis.
    """
    if weights.w_gate_up_scales is not None:
        raise EpicUnsupportedError(
            f"{argument} with w_gate_up in float8_e4m3fn: blocks of 128 x 128 must stay whole; "
            f"leave {argument} out, or pass weights of a float type with weight_type='e4m3'"
        )
