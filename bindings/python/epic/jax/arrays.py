# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments while JAX traces a program.

check_array() checks arrays, and check_kind() all other objects. Each error names the argument. When
the program runs, the handlers check the number of elements and the dtype of each array again.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from epic import options
from epic.errors import EpicArgumentError

FLOATS = ("float32", "bfloat16", "float16", "float64")  # dtypes that the core can add
MATRICES = (*FLOATS, "float8_e4m3fn")  # dtypes of the experts' weights
INDICES = ("int32", "int64")
INTEGERS = ("int32", "int64", "int8", "int16", "uint8", "uint16", "uint32", "uint64")
ANY_ROWS = "..."  # the first or last entry of a shape: one or more dimensions of any size

# One dimension of a shape: its size; a name, for any size; or a name and a size.
Dimension = int | str | tuple[str, int]
Shape = Sequence[Dimension]


check_kind = options.check_kind


def show_dimension(dimension: Dimension) -> str:
    """Return a dimension as text for an error."""
    return " ".join(map(str, dimension)) if isinstance(dimension, tuple) else str(dimension)


def show_shape(shape: Shape) -> str:
    """Return a shape as text for an error, such as [num_tokens, top_k 2]."""
    return "[" + ", ".join(map(show_dimension, shape)) + "]"


def has_shape(found: tuple[int, ...], wanted: Shape) -> bool:
    """Return whether the shape `found` of an array fits the shape `wanted`."""
    if wanted and wanted[0] == ANY_ROWS:
        if len(found) < len(wanted):
            return False
        found = found[len(found) - len(wanted) + 1 :]
        wanted = wanted[1:]
    if wanted and wanted[-1] == ANY_ROWS:
        if len(found) < len(wanted):
            return False
        found, wanted = found[: len(wanted) - 1], wanted[:-1]
    if len(found) != len(wanted):
        return False
    sizes = [d[1] if isinstance(d, tuple) else d for d in wanted]
    return all(isinstance(w, str) or f == w for f, w in zip(found, sizes, strict=True))


def show_needed(dtypes: Sequence[str], shape: Shape) -> str:
    """Return dtypes and shape as text for an error, such as float32[8] or int32[8]."""
    if not shape:
        return "one integer" if tuple(dtypes) == INTEGERS else f"one {' or '.join(dtypes)}"
    families = {FLOATS: "a float type ", INTEGERS: "integers "}
    families[MATRICES] = "a float type or float8_e4m3fn "
    return families.get(tuple(dtypes), " or ".join(dtypes)) + show_shape(shape)


def dtype_of(array: Any) -> Any:
    """Return the dtype that an array has in JAX: float32 for a float64 of numpy without x64."""
    return jax.dtypes.canonicalize_dtype(array.dtype, allow_extended_dtype=True)


def saturated(numpy: Any, value: Any, dtype: Any) -> Any:
    """Return integers in another dtype; those that it cannot represent become its nearest number.

    So an id that is too large does not turn into a valid id. numpy: the module numpy or jax.numpy.
    """
    given, kept = np.iinfo(value.dtype), np.iinfo(dtype)
    least, most = max(given.min, kept.min), min(given.max, kept.max)
    return numpy.clip(value, least, most).astype(dtype)


def as_int32(value: Any) -> Any:
    """Return integers as int32 array of JAX, as saturated() does."""
    value = jnp.asarray(value)
    return value if value.dtype == jnp.int32 else saturated(jnp, value, jnp.int32)


def check_array(name: str, value: Any, dtypes: Sequence[str], *shapes: Shape) -> Any:
    """Return the value after checking that it is an array of one of the dtypes and shapes.

    A number or a list of numbers becomes an array.

    Raises:
        EpicArgumentError: the value is no array, or has another dtype or shape.

    """
    needed = " or ".join(show_needed(dtypes, shape) for shape in shapes)
    if value is None:
        raise EpicArgumentError(f"{name} is None: must be {needed}")
    try:
        if not isinstance(value, jax.Array | np.ndarray | np.generic):
            value = jnp.asarray(value)
        dtype = dtype_of(value)
        if dtype != value.dtype and dtype.kind in "iu":  # without x64
            value = saturated(np, value, dtype)
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        if isinstance(error, jax.errors.JAXTypeError):
            raise  # the error of JAX explains that a tracer was used outside of its function
        raise EpicArgumentError(
            f"{name} is a {type(value).__name__}: must be an array, {needed}"
        ) from error
    right = dtype.name in dtypes and any(has_shape(value.shape, shape) for shape in shapes)
    if not right:
        if dtype.name in dtypes and all(shapes):  # only the shape is wrong
            needed = "of shape " + " or ".join(show_shape(shape) for shape in shapes)
        raise EpicArgumentError(f"{name} is {dtype}{list(value.shape)}: must be {needed}")
    return value


def array_of(value: Any) -> Any:
    """Return a number or a list of numbers as an array; None and all other values are unchanged."""
    return jnp.asarray(value) if isinstance(value, list | int | float) else value


def as_array(name: str, value: Any, dtypes: Sequence[str], *shapes: Shape) -> Any:
    """Return the value as an array of JAX, after check_array()."""
    return jnp.asarray(check_array(name, value, dtypes, *shapes))


def as_array_or_none(name: str, value: Any, dtypes: Sequence[str], *shapes: Shape) -> Any:
    """Return the value as as_array() does; None for None."""
    return None if value is None else as_array(name, value, dtypes, *shapes)


def as_axes(name: str, value: Any) -> tuple[str, ...]:
    """Return mesh axes as a tuple, after checking that they are different names.

    A single name is an error.
    """
    if isinstance(value, str):
        raise EpicArgumentError(f"{name} is {value!r}: must be a tuple of axes, ({value!r},)")
    if not isinstance(value, tuple | list) or not all(isinstance(axis, str) for axis in value):
        raise EpicArgumentError(f"{name} is {value!r}: must be a tuple of names of mesh axes")
    for i, axis in enumerate(value):
        if axis in value[:i]:
            raise EpicArgumentError(f"{name} is {tuple(value)}: must not contain {axis!r} twice")
    return tuple(value)
