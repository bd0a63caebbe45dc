# SPDX-License-Identifier: Apache-2.0
"""Custom calls of the core, and the number of each call site.

A call site is a place in a program where a collective call is made. Its number is unique in the
program and equal on all ranks, so that the ranks can match their calls. It comes from a primitive
of this module. Its lowering uses interfaces that JAX does not document, like
mesh_checks.check_lowering. If a later JAX does not have them, all numbers are 0, and independent
plans of one program need `channel=`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state

from epic.errors import EpicError, EpicUnsupportedError
from epic.jax import mesh_checks, meshes
from epic.jax.groups import Group
from epic.jax.library import NO_GRAPH, load_handlers

Array = jax.Array
ArraySpec = jax.ShapeDtypeStruct


# ------------------------------------------------------------------------ call sites ----


def make_site() -> Any:
    """Return the primitive, or None if this JAX does not have the interfaces that it needs."""
    try:
        from jax.extend.core import Primitive
        from jax.interpreters import batching, mlir
    except ImportError:
        return None
    site = Primitive("epic_site")
    site.def_impl(lambda *_, **__: np.int32(0))
    site.def_abstract_eval(lambda *_, **__: jax.core.ShapedArray((), np.dtype(np.int32)))

    def lower(context: Any, *_: Any, group: Group) -> Any:
        mesh_checks.check_lowering(group, context.module_context)
        channel = context.module_context.new_channel()
        return [mlir.ir_constant(np.int32(channel))]

    def batch(operands: Any, _: Any, *, group: Group) -> Any:
        """Give the calls for all elements of a vmap, which run one by one, the same number."""
        return site.bind(*operands, group=group), None

    try:
        # Not cached, so that each call site gets its own number.
        mlir.register_lowering(site, lower, cacheable=False)
    except TypeError:
        return None
    batching.primitive_batchers[site] = batch
    return site


@functools.cache
def site_primitive() -> Any:
    """Return the primitive; the first call makes it."""
    return make_site()


def site_and_rank(group: Group, *operands: Any) -> list[Any]:
    """Return the number of this call site and this device's rank, two int32 scalars.

    The primitive gets the operands of the call.  So if jax.checkpoint computes a call again, the
    second call gets another number.
    """
    primitive, rank = site_primitive(), mesh_checks.rank_in_mesh(group)
    if primitive is None:
        return [np.int32(0), rank]
    return [primitive.bind(*map(jax.lax.stop_gradient, operands), group=group), rank]


# -------------------------------------------------------------------- varying values ----


def varying_axes(x: Any) -> frozenset[str]:
    """Return the mesh axes along which x differs, as check_vma=True sees them."""
    return getattr(getattr(jax.typeof(x), "manual_axis_type", None), "varying", frozenset())


def result_axes(group: Group | None, *operands: Any) -> frozenset[str]:
    """Return the axes along which the results of a call differ.

    These are the axes of its operands and those of the group.
    """
    axes: frozenset[str] = frozenset().union(*(varying_axes(x) for x in operands))
    if group is not None:
        manual = getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ())
        axes |= {axis for axis in group.axes if axis in manual}
    return axes


def cast_varying(axes: frozenset[str], x: Any) -> Any:
    """Mark x as a value that differs along the axes, as check_vma=True needs it.

    JAX then sums the gradient of x over the new axes.
    """
    missing = tuple(sorted(axes - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def cast_all_varying(group: Group | None, *values: Any) -> list[Any]:
    """Mark all values as differing along the axes of any of them, or of the group.

    None stays None.
    """
    axes = result_axes(group, *(x for x in values if x is not None))
    return [None if x is None else cast_varying(axes, jnp.asarray(x)) for x in values]


# ----------------------------------------------------------------------------- calls ----

ABSENT = ArraySpec((1,), np.uint8)


def call_handler(
    name: str,
    results: Sequence[ArraySpec | None],
    operands: Sequence[Any],
    group: Group | None = None,
    aliases: dict[int, int] | None = None,
    **attributes: Any,
) -> list[Any]:
    """Call a handler of libepic_jax.so.

    Args:
        name: the target without "epic_".
        results: the specs of the results; None: the handler does not write this result.
        operands: the arrays; None: the operand is absent.
        group: the group of a collective call; None for a local call.
        aliases: for the number of an operand, the number of the result that uses its memory.
        **attributes: the attributes of the call.

    Returns:
        The results.  A collective call has one result more: one byte, which is available when the
        call has finished, even if all other results are empty.

    """
    load_handlers()
    operands = [*operands, *(previous_call(group) if group is not None else [])]
    given = [x for x in operands if x is not None]
    axes = result_axes(group, *given)
    arrays = [np.zeros(1, np.uint8) if x is None else x for x in operands]
    shapes = [ABSENT if r is None else ArraySpec(r.shape, r.dtype) for r in results]
    target, stays = f"epic_{name}", False
    if group is not None:
        stays = must_keep_call(group, shapes)
        attributes |= {
            "max_sms": attributes.get("max_sms", 0),
            "group": group.name,
            "devices": meshes.describe_devices(group.devices, group.num_ranks),
        }
        target += "" if group.command_buffers else NO_GRAPH
        results, shapes = [*results, ABSENT], [*shapes, ABSENT]
    # On a GPU the stream orders the calls. So the call itself may be marked as a side effect.
    on_gpu = group is not None and group.platform == "gpu"
    how: dict[str, Any] = {"has_side_effect": True} if stays and on_gpu else {}
    run = jax.ffi.ffi_call(target, shapes, input_output_aliases=aliases, **how)

    def spread_results(*arrays: Any) -> list[Any]:
        out = [cast_varying(axes, x) for x in run(*arrays, **attributes)]
        if stays and not on_gpu:
            keep_call(out[-1])
        return out

    out = first_order_only(name, map_in_sequence(spread_results))(*arrays)
    if group is not None:
        record_call(group, out[-1])
    return [None if wanted is None else x for wanted, x in zip(results, out, strict=True)]


MOST_TRACES = 8  # largest number of traces per group in last_calls
# For each group name: pairs (trace, result of its last call). The innermost trace is the last.
last_calls: dict[str, list[tuple[Any, Any]]] = {}


def has_own_programs(group: Group) -> bool:
    """Return whether the ranks run separate programs, which may differ: a group without a mesh."""
    return not group.axes and group.num_ranks > 1


def previous_call(group: Group) -> list[Any]:
    """Return a list with a result of the group's previous call, or an empty list.

    The next call gets it as an operand, and so waits for the previous call.  XLA starts calls in
    any order if they do not depend on each other, and on a rank without tokens no call depends on
    the empty arrays.  On a mesh all ranks run one program, so the order is equal.  Without a mesh
    this dependency makes the order of calls the order in which they were traced.

    A result of one trace cannot be used in another trace.  So the first call in an inner jit or in
    the body of a loop does not wait.  The next call after the jit or the loop waits for the last
    call before it.
    """
    if not has_own_programs(group):
        return []
    now = get_opaque_trace_state()
    return [done for state, done in last_calls.get(group.name, []) if state == now][-1:]


def record_call(group: Group, done: Any) -> None:
    """Store `done`, a result of this call, so that the next call in this trace waits for it.

    Outside of a trace no call waits, because calls are made there one after the other.  An error of
    one call must not become an error of the next call.
    """
    if not has_own_programs(group) or not isinstance(done, jax.core.Tracer):
        last_calls.pop(group.name, None)
        return
    now, calls = get_opaque_trace_state(), last_calls.get(group.name, [])
    outer = [state == now for state, _ in calls]
    if True in outer:  # remove later entries, of traces inside of this one that have ended
        calls = calls[: outer.index(True)]
    last_calls[group.name] = [*calls, (now, jax.lax.stop_gradient(done))][-MOST_TRACES:]


def must_keep_call(group: Group, results: Sequence[ArraySpec]) -> bool:
    """Return whether JAX and XLA must not remove a collective call whose results are not used.

    They remove such calls, and calls whose results are all empty.  On a mesh all ranks run one
    program, so a call is removed on all ranks or on none.  Without a mesh a call might be removed
    on one rank only.  The other ranks would then wait for it until their time limit.

    Under jax.checkpoint JAX keeps the results of the calls that must not be removed, and does not
    repeat them.
    """
    is_empty = any(0 in result.shape for result in results)
    stays = has_own_programs(group) or (not group.axes and is_empty)
    if stays:
        allow_side_effects()
    return stays


def keep_call(done: Any) -> None:
    """Prevent XLA from removing the collective call that returns `done`.

    For this a second call, which has a side effect, uses `done`. The collective itself must not
    have a side effect, because XLA on CPUs runs such calls one after the other, in its own order.
    """
    jax.ffi.ffi_call("epic_keep", ABSENT, has_side_effect=True)(done)


@functools.cache
def allow_side_effects() -> None:
    """Let JAX 0.10 and 0.11 trace calls with a side effect under custom gradients and checkpoint.

    These versions allow the effect of jax.ffi in loops, but not in these two transformations.
    Later versions allow it in both.  This function uses private names of JAX.  A JAX that does not
    have them is a later version.
    """
    try:
        from jax._src import effects
        from jax._src.ffi import FfiEffect
    except ImportError:
        return
    for name in ("custom_derivatives_allowed_effects", "remat_allowed_effects"):
        getattr(effects, name).add_type(FfiEffect)


def map_in_sequence(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `run`, under vmap for one element after the other.

    The rule of JAX for ffi_call under vmap fails if only the mapped operands differ along a mesh
    axis (spmd_axis_name).
    """
    call_one = jax.custom_batching.custom_vmap(run)

    @call_one.def_vmap
    def batch(_: int, is_batched: list[bool], *arrays: Any) -> tuple[Any, Any]:
        axes = frozenset().union(*map(varying_axes, arrays))
        same_axes = [cast_varying(axes, jnp.asarray(x)) for x in arrays]

        def one(mapped: list[Any]) -> Any:
            left = iter(mapped)
            every = [next(left) if b else x for b, x in zip(is_batched, same_axes, strict=True)]
            return [cast_varying(axes, out) for out in call_one(*every)]

        out = jax.lax.map(one, [x for b, x in zip(is_batched, same_axes, strict=True) if b])
        return out, [True] * len(out)

    return lambda *arrays: call_one(*arrays)


def first_order_only(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `run`, and raises an error if JAX differentiates it.

    Only EPIC's own gradients call it, so its derivative is a second derivative.
    """
    once = jax.custom_jvp(run)

    @once.defjvp
    def refuse(*_: Any) -> Any:
        raise EpicUnsupportedError(
            f"epic.jax.{name} has only first derivatives, in reverse mode: grad of grad, hessian "
            "and jvp are not supported; for Hessian-vector products use differences of gradients, "
            "(grad(x + h v) - grad(x - h v)) / 2h, or use jax.lax.stop_gradient on all that needs "
            "no second derivative"
        )

    return once


def no_gradient(x: Any) -> np.ndarray:
    """Return the cotangent of an integer array, which JAX represents as float0."""
    return np.zeros(np.shape(x), jax.dtypes.float0)


def zero_gradient(x: Any) -> Any:
    """Return a zero cotangent for x of any dtype."""
    return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else no_gradient(x)


def memory_specs(
    query: Callable[[bool], Any], platform: str | None
) -> tuple[ArraySpec, ArraySpec, ArraySpec]:
    """Return the specs of the saved memory and of the workspaces of forward and backward.

    Args:
        query: a function that returns the MemoryInfo, for GPUs if its argument is True.
        platform: "cpu" or "gpu".  None: not known yet; the sizes then suffice for each platform
            that supports the call.

    """
    found = []
    for name, on_gpu in (("cpu", False), ("gpu", True)):
        try:
            if platform in (name, None):
                found.append(query(on_gpu))
        except EpicError as error:
            if platform is not None or error.code != "EPIC_ENOTSUP":
                raise
    names = ("saved_bytes", "forward_bytes", "backward_bytes")
    sizes = (max(getattr(info, name) for info in found) for name in names)
    saved, forward, backward = (ArraySpec((size,), np.uint8) for size in sizes)
    return saved, forward, backward


def spec_of(x: Any) -> ArraySpec:
    """Return the shape and dtype of an array."""
    return ArraySpec(x.shape, x.dtype)
