# SPDX-License-Identifier: Apache-2.0
"""The operators torch.ops.epic of libepic_torch.so, their shapes for tracing, and their errors.

The operators have no gradients, and check few of their arguments. Call the functions of epic.torch
instead.
"""

import ctypes
import functools
import inspect
import operator
import re
import types
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from epic import _native
from epic.errors import EpicArgumentError, EpicError
from epic.options import check_kind
from epic.torch.arguments import check_tensor, no_vmap
from epic.words import to_python

Function = TypeVar("Function", bound=Callable[..., Any])


def load_library() -> ctypes.CDLL:
    """Load libepic_torch.so, register its operators with torch, and return it.

    Raises:
        ImportError: The library is not found, or this version of torch lacks a function that it
            needs.
    """
    _native.core()
    library = ctypes.CDLL(str(_native.find("libepic_torch.so")))
    library.epic_torch_register.restype = ctypes.c_char_p
    library.epic_torch_group_add.restype = ctypes.c_int64
    library.epic_torch_group_add.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32]
    library.epic_torch_group_drain.restype = ctypes.c_int32
    library.epic_torch_group_drain.argtypes = [ctypes.c_int64, ctypes.c_int32]
    library.epic_torch_group_remove.restype = ctypes.c_void_p
    library.epic_torch_group_remove.argtypes = [ctypes.c_int64]
    library.epic_torch_layer_add.restype = ctypes.c_int64
    library.epic_torch_layer_add.argtypes = [ctypes.c_int64] * 7
    missing = library.epic_torch_register()
    if missing is not None:
        raise ImportError(
            f"torch {torch.__version__} does not have what libepic_torch.so needs: "
            f"{missing.decode()}"
        )
    return library


LIBRARY = load_library()
# The registrations of shape functions. torch removes them if this object is deleted.
FAKES = torch.library.Library("epic", "FRAGMENT")


def return_nothing(*_: Any, **__: Any) -> None:
    """Do nothing: the shape function of operators that write into tensors of the caller."""


def on_one_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a shape function so that it raises an error for tensors on several devices.

    If one argument is on "meta", torch calls only the shape function, not the operator. The results
    would then be uninitialized memory on the device of the other tensors.
    """

    def run(*args: Any, **options: Any) -> Any:
        devices = {x.device for x in args[has_order_token:] if isinstance(x, Tensor)}
        if len(devices) > 1:
            names = " and ".join(sorted(map(str, devices)))
            raise EpicArgumentError(f"tensors are on {names}: must be on one device")
        return function(*args, **options)

    # The order token of a group, if there is one, is the first argument. It is not checked.
    has_order_token = "order_token" in inspect.signature(function).parameters
    return run


def refuse_vmap(*_: Any, **__: Any) -> Any:
    """Raise the error for operators inside of torch.func.vmap."""
    raise no_vmap()


def register_shapes(function: Function) -> Function:
    """Register a shape function NAME_fake for the operators epic::NAME and epic::NAME_out.

    It is used for all overloads of epic::NAME. epic::NAME_out has no results, so it gets
    return_nothing. All these operators raise an error inside of torch.func.vmap.
    """
    name = function.__name__.removesuffix("_fake")
    for overload in getattr(torch.ops.epic, name).overloads():
        operator = getattr(getattr(torch.ops.epic, name), overload)
        torch.library.register_fake(operator, on_one_device(function), lib=FAKES)
        FAKES.impl(operator, refuse_vmap, "FuncTorchBatched")
    if not name.endswith("_"):  # operators that end in "_" work in place
        torch.library.register_fake(f"epic::{name}_out", return_nothing, lib=FAKES)
        FAKES.impl(f"{name}_out", refuse_vmap, "FuncTorchBatched")
    return function


# A private function of torch that calls an operator with a stack of arguments. It saves 1.2 to
# 1.6 us of host time per call of plan, dispatch and combine, because torch.ops.epic.NAME.default
# runs Python code before it calls the operator (torch 2.9.1 and 2.15, see docs/lab/torch.md). BOXED
# ignores __torch_function__. So traced calls, and calls with tensors that override it, use the
# public torch.ops.epic.NAME.default.
BOXED = getattr(torch._C, "_dispatch_call_boxed", None)


def boxed_call(operator: Any) -> Any:
    """Return the fastest callable that this version of torch has for an operator."""
    if BOXED is None or not isinstance(operator, torch._ops.OpOverload):
        return getattr(operator, "_op", operator)
    schema = operator._schema
    return partial(
        BOXED, torch._C._dispatch_find_schema_or_throw(schema.name, schema.overload_name)
    )


# ---------------------------------------------------------------------------- errors ----

# The text of torch's error for an argument of a wrong class, or for an integer above 64 bits.
WRONG_CLASS = re.compile(
    r"epic::\w+\(\) Expected a value of type '(.+?)' for argument '(\w+)' but instead found type "
    r"'(.+?)'"
)


def as_epic_error(error: RuntimeError) -> RuntimeError:
    """Convert a RuntimeError with the text of an EPIC error to an EpicError.

    Functions that torch.compile has compiled raise a RuntimeError for an EPIC error. The functions
    of epic.torch, if they are not compiled, already raise an EpicError.

    Args:
        error: An error that a compiled function raised.

    Returns:
        An EpicError or EpicArgumentError with the names of Python's arguments in its text. If the
        error is no EPIC error, or is an EpicError already, the error itself.

    Example:
        >>> import epic.torch
        >>> error = RuntimeError("no error of EPIC")
        >>> epic.torch.as_epic_error(error) is error
        True
    """
    text = str(error).split("\n")[0]
    if found := WRONG_CLASS.match(text):
        wanted, name, given = found.groups()
        rule = "an integer of 64 bits" if wanted == given else f"of type {wanted}"
        return EpicArgumentError(f"{name} is of type {given}: must be {rule}")
    if text.startswith("Could not run 'epic::") and "'Sparse" in text:
        return EpicArgumentError("a tensor is sparse: must be dense; call to_dense()")
    code, _, sentence = text.partition(": ")
    if isinstance(error, EpicError) or code not in _native.RESULTS:
        return error
    sentence = to_python(sentence)
    if code == "EPIC_EINVAL":
        return EpicArgumentError(sentence)
    return EpicError(code, sentence)


# The classes that check_classes compares, next to tensors and numbers.
CLASSES = ("Experts", "Group", "Layer", "Moe", "Plan", "Router", "dtype", "str")
WEIGHTS = ("ExpertWeights", "MoeWeights")  # classes in whose place the functions take a tuple


def check_classes(function: Any, given: dict[str, Any]) -> None:
    """Raise an error for an argument whose class differs from the annotation of the function.

    Call it only after the function has failed, so that correct calls need no host time for it.

    Args:
        function: The function.
        given: Its arguments by their names.
    """
    for name, x in given.items():
        hint = function.__annotations__.get(name)
        kinds = hint.__args__ if isinstance(hint, types.UnionType) else (hint,)
        if x is None and types.NoneType in kinds:
            continue
        kind = kinds[0]  # the next line leaves out annotations with more classes
        if set(kinds[1:]) - {types.NoneType}:
            continue
        if kind is Tensor:
            check_tensor(name, x)
        elif kind in (int, float):
            try:
                operator.index(x) if kind is int else float(x)
            except (TypeError, ValueError):
                rule = "an integer" if kind is int else "a number"
                raise EpicArgumentError(f"{name} is a {type(x).__name__}: must be {rule}") from None
        elif getattr(kind, "__name__", None) in CLASSES:
            check_kind(name, x, kind)
        elif getattr(kind, "__name__", None) in WEIGHTS:
            check_kind(name, x, kind, tuple)


def to_epic_error(error: Exception, function: Any, *args: Any, **options: Any) -> Exception:
    """Return the error of EPIC for an error that a function raised; else the error itself.

    Inside of torch.compile it returns the error unchanged.

    Args:
        error: The error.
        function: The function.
        *args: Its arguments.
        **options: Its arguments that were passed by name.
    """
    if torch.compiler.is_compiling() or isinstance(error, EpicError):
        return error
    found = as_epic_error(error) if isinstance(error, RuntimeError) else error
    if isinstance(found, EpicError) and "epic::" not in str(error):  # it is not torch's error
        return found
    names = inspect.signature(function).parameters
    try:
        check_classes(function, dict(zip(names, args, strict=False)) | options)
    except EpicArgumentError as clear:
        return clear
    return found


def translate_errors(function: Function) -> Function:
    """Decorate a function so that it raises errors of operators and of wrong classes as EpicError.

    The functions that are called most often catch these errors themselves, because a wrapper takes
    host time.
    """

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except Exception as error:
            raise to_epic_error(error, function, *args, **options) from None

    return run  # type: ignore[return-value]


# ---------------------------------------------------------------------------- shapes ----

# The functions NAME_fake return results of the operator NAME with the correct shape, dtype and
# device, but without values. torch calls them while it traces.


def new_ints(like: Tensor, *shape: Any) -> Tensor:
    """Return an int32 tensor of a shape, on the device of `like`."""
    return like.new_empty(shape, dtype=torch.int32)


def new_floats(like: Tensor, *shape: Any) -> Tensor:
    """Return a float32 tensor of a shape, on the device of `like`."""
    return like.new_empty(shape, dtype=torch.float32)


def new_bytes(like: Tensor, size: Any) -> Tensor:
    """Return a uint8 tensor of `size` elements, on the device of `like`."""
    return like.new_empty((size,), dtype=torch.uint8)


def wide_dtype(like: Tensor) -> torch.dtype:
    """Return the dtype of router and losses: float64 if that of `like` is, else float32."""
    return torch.float64 if like.dtype == torch.float64 else torch.float32


def like_or_none(x: Tensor | None, dtype: torch.dtype, of: Tensor) -> Tensor:
    """Return a gradient for x; an empty tensor on the device of `of` if x is None."""
    return new_floats(of, 0) if x is None else x.new_empty(x.shape, dtype=dtype)


def argument_names(name: str, overload: str = "default") -> list[str]:
    """Return the names of an operator's arguments."""
    schema = getattr(getattr(torch.ops.epic, name), overload)._schema
    return [argument.name for argument in schema.arguments]


# Arguments of operators that contain several fields: for each argument its fields, from the lowest
# bits on, with their numbers of bits. bindings/torch/options.h has the same table.
Words = dict[str, dict[str, int]]
LAYER: Words = {
    "layer_rules": {
        "num_experts": 17, "num_logical": 17, "top_k": 7, "flags": 12, "sum_order": 2,
        "partial_type": 3, "overflow": 2, "priority": 2, "layout": 2,
    },
    "layer_slabs": {"alignment": 32, "expert_capacity": 32},
    "layer_leaves": {"leaves": 32},
}  # fmt: skip
SIZES = {"num_local_experts": 32, "hidden": 32}
KIND = {
    "inner": 32, "activation": 8, "ungated": 4, "interleaved": 4, "weighting": 4, "weight_type": 4,
    "grad_type": 4, "row_type": 4,
}  # fmt: skip
# The dtypes by their numbers in C (epic_type).
DTYPES = (None, torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn)


def pack_fields(words: Words, values: dict[str, int]) -> dict[str, int]:
    """Pack fields into the numbers that operators take.

    Args:
        words: The arguments, with their fields and bits.
        values: The value of each field.

    Returns:
        The value of each argument, a signed integer of 64 bits.

    Raises:
        EpicArgumentError: A value needs more bits than its field has.
    """
    found = {}
    for argument, parts in words.items():
        word, first = 0, 0
        for name, bits in parts.items():
            if values[name] >> bits:
                raise EpicArgumentError(f"{name} is {values[name]}: must be below {1 << bits}")
            word |= values[name] << first
            first += bits
        found[argument] = word - (1 << 64) if word >> 63 else word
    return found


def pack_layer(layer: dict[str, int]) -> tuple[int, ...]:
    """Return the fields of a layer as the three arguments layer_rules, _slabs and _leaves."""
    return tuple(pack_fields(LAYER, layer).values())


def mlp_numbers(prefix: str, values: dict[str, Any], **types: int) -> dict[str, Any]:
    """Return the arguments of operators for an MLP, by their names.

    Args:
        prefix: "experts" or "shared", with which the names begin.
        values: The numbers of epic.Experts.
        **types: Numbers of dtypes that the tensors of the call do not determine; all others are 0.
    """
    values = values | {"row_type": 0, "weight_type": 0, "grad_type": 0} | types
    found = pack_fields({f"{prefix}_sizes": SIZES, f"{prefix}_kind": KIND}, values)
    return found | {f"{prefix}_{name}": values[name] for name in ("limit", "alpha")}


def type_in(kind: int, name: str) -> torch.dtype | None:
    """Return a dtype in an argument experts_kind or shared_kind; None if the field is 0.

    name: "weight_type", "grad_type" or "row_type".
    """
    first = 0
    for field, bits in KIND.items():
        if field == name:
            return DTYPES[kind >> first & (1 << bits) - 1]
        first += bits
    raise KeyError(name)


# The layers of all open groups, by their numbers. A value is the capacity, the bytes of a plan, how
# many local experts, experts and logical experts the layer has, and the bytes of an element of
# expert_rows and expert_tokens. close() of a group removes its layers. A shape function then finds
# NO_LAYER, and the operator raises the error.
KeptLayer = tuple[int, int, int, int, int, int]
NO_LAYER: KeptLayer = (0, 0, 0, 0, 0, 4)
KEPT_LAYERS: dict[int, KeptLayer] = {}
# Numbers of groups and layers are below 2^SMS_SHIFT. The bits above hold the limit of SMs of a call
# (CALL_SMS_SHIFT in bindings/torch/call.h).
SMS_SHIFT = 48


def find_layer(layer: int) -> KeptLayer:
    """Return the layer with this number, which may contain a limit of SMs, or NO_LAYER."""
    return KEPT_LAYERS.get(layer & ((1 << SMS_SHIFT) - 1), NO_LAYER)


def size_of_plan(layer: int, rank_of_expert: Tensor | None) -> int:
    """Return the bytes of a plan of the layer with this number, with the counts that follow it."""
    _, plan_bytes, local, experts, logical, count_bytes = find_layer(layer)
    room = local if rank_of_expert is None else experts
    return plan_bytes + 2 * count_bytes * room + 4 * (experts + 1 + logical)


@register_shapes
def plan_fake(
    order_token: Tensor,
    topk_idx: Tensor,
    layer: int,
    capacity: Any = -1,
    tag: int = 0,
    rank_of_expert: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> Tensor:
    """Return the bytes of plan, expert_rows, expert_tokens, load, demand and logical_load."""
    return new_bytes(topk_idx, size_of_plan(layer, rank_of_expert))


@register_shapes
def dispatch_fake(
    order_token: Tensor,
    plan: Tensor,
    tokens: Tensor,
    weights: Tensor | None,
    capacity: Any,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, Tensor]:
    """Return the received rows and their weights."""
    slots = 0 if weights is None else capacity
    return tokens.new_empty((capacity, tokens.shape[-1])), new_floats(tokens, slots)


@register_shapes
def plan_dispatch_fake(
    order_token: Tensor,
    topk_idx: Tensor,
    tokens: Tensor,
    weights: Tensor | None,
    layer: int,
    capacity: Any = -1,
    tag: int = 0,
    rank_of_expert: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, ...]:
    """Return the result of plan_fake, then those of dispatch_fake."""
    planned = new_bytes(topk_idx, size_of_plan(layer, rank_of_expert))
    slots = find_layer(layer)[0] if capacity < 0 else capacity
    return planned, *dispatch_fake(order_token, planned, tokens, weights, slots)


@register_shapes
def dispatch_flat_fake(
    order_token: Tensor,
    plan: Tensor,
    tokens: Tensor,
    weights: Tensor | None,
    capacity: Any,
    top_k: Any,
    *_: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the received rows, the weights of their choices, and their experts."""
    slots = new_floats(tokens, 0) if weights is None else new_floats(tokens, capacity, top_k)
    return tokens.new_empty((capacity, tokens.shape[1])), slots, new_ints(tokens, capacity, top_k)


def quantized(like: Tensor, slots: Any, quantize: int) -> tuple[Tensor, Tensor]:
    """Return e4m3 rows and their scales; quantize is 1 for "1x128", 2 for "1x32"."""
    block, kind = (128, torch.float32) if quantize == 1 else (32, torch.uint8)
    hidden = like.shape[1]
    rows = like.new_empty((slots, hidden), dtype=torch.float8_e4m3fn)
    return rows, like.new_empty((slots, (hidden + block - 1) // block), dtype=kind)


@register_shapes
def dispatch_quantized_fake(
    order_token: Tensor,
    plan: Tensor,
    tokens: Tensor,
    weights: Tensor | None,
    capacity: Any,
    quantize: int,
    *_: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the received rows, their scales and their weights."""
    slots = new_floats(tokens, 0 if weights is None else capacity)
    return *quantized(tokens, capacity, quantize), slots


@register_shapes
def dispatch_bytes_fake(
    order_token: Tensor,
    plan: Tensor,
    tokens: Tensor,
    scales: Tensor | None,
    weights: Tensor | None,
    capacity: Any,
    *_: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the received rows and scales as bytes, and the weights."""
    recv = tokens.new_empty((capacity, tokens.shape[1]))
    recv_scales = (
        new_floats(tokens, 0) if scales is None else scales.new_empty((capacity, scales.shape[1]))
    )
    return recv, recv_scales, new_floats(tokens, 0 if weights is None else capacity)


@register_shapes
def dispatch_backward_fake(
    order_token: Tensor,
    plan: Tensor,
    d_recv: Tensor,
    d_slot_weights: Tensor | None,
    num_tokens: Any,
    top_k: Any,
    *_: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of tokens and weights."""
    d_tokens = d_recv.new_empty((num_tokens, d_recv.shape[1]))
    none = d_slot_weights is None
    return d_tokens, new_floats(d_recv, 0) if none else new_floats(d_recv, num_tokens, top_k)


@register_shapes
def combine_fake(
    order_token: Tensor,
    plan: Tensor,
    rows: Tensor,
    slot_weights: Tensor | None,
    num_tokens: Any,
    *_: int,
) -> Tensor:
    """Return the sums for the tokens."""
    return rows.new_empty((num_tokens, rows.shape[1]))


@register_shapes
def combine_backward_fake(
    order_token: Tensor,
    plan: Tensor,
    d_out: Tensor,
    rows: Tensor | None,
    slot_weights: Tensor | None,
    capacity: Any,
    *_: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and of their weights."""
    d_rows = d_out.new_empty((capacity, d_out.shape[1]))
    return d_rows, new_floats(d_out, 0 if rows is None else capacity)


@register_shapes
def combine_backward_quantized_fake(
    order_token: Tensor,
    plan: Tensor,
    d_out: Tensor,
    rows: Tensor | None,
    slot_weights: Tensor | None,
    capacity: Any,
    quantize: int,
    *_: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the rows, their scales, and the gradients of the weights."""
    slots = new_floats(d_out, 0 if rows is None else capacity)
    return *quantized(d_out, capacity, quantize), slots


@register_shapes
def sum__fake(order_token: Tensor, *_: Any) -> None:
    """Return nothing, because the operator works in place."""


@register_shapes
def sum_replicas__fake(order_token: Tensor, *_: Any) -> None:
    """Return nothing, because the operator works in place."""


# ------------------------------------------------------------------- router and losses ----


@register_shapes
def route_fake(
    logits: Tensor,
    bias: Tensor | None,
    token_ids: Tensor | None,
    table: Tensor | None,
    topk_idx_in: Tensor | None,
    group: int,
    num_experts: int,
    top_k: int,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    """Return the ids of the chosen experts, and their weights."""
    shape = (logits.shape[0], top_k)
    return new_ints(logits, *shape), logits.new_empty(shape, dtype=wide_dtype(logits))


@register_shapes
def route_backward_fake(logits: Tensor, *_: Any) -> Tensor:
    """Return the gradient of the logits."""
    return torch.empty_like(logits)


@register_shapes
def balance_loss_fake(logits: Tensor, *_: Any) -> Tensor:
    """Return the loss, [1]."""
    return logits.new_empty((1,), dtype=wide_dtype(logits))


@register_shapes
def balance_loss_backward_fake(logits: Tensor, *_: Any) -> Tensor:
    """Return the gradient of the logits."""
    return torch.empty_like(logits)


@register_shapes
def z_loss_fake(logits: Tensor, *_: Any) -> Tensor:
    """Return the loss, [1]."""
    return logits.new_empty((1,), dtype=wide_dtype(logits))


@register_shapes
def z_loss_backward_fake(logits: Tensor, *_: Any) -> Tensor:
    """Return the gradient of the logits."""
    return torch.empty_like(logits)


@register_shapes
def bias_update__fake(bias: Tensor, *_: Any) -> None:
    """Return nothing, because the operator works in place."""


def count_load(load: Tensor, counts: Tensor) -> None:
    """Add the counts of one forward to the load of a layer, unless the forward is recomputed.

    Activation checkpointing runs a forward again inside of backward, and its counts must not be
    added twice. A private function of torch shows whether a backward is running; torch has no
    public one. count_load is an operator, so that a compiled function checks this when it runs, not
    when it is traced.
    """
    if torch._C._current_graph_task_id() == -1:
        load.add_(counts)


FAKES.define("count_load_(Tensor(a!) load, Tensor counts) -> ()")
FAKES.impl("count_load_", count_load, "CompositeExplicitAutograd")


@register_shapes
def count_load__fake(load: Tensor, counts: Tensor) -> None:
    """Return nothing, because the operator works in place."""


# ------------------------------------------------------------------- experts and layer ----


@register_shapes
def experts_fake(
    x: Tensor,
    expert_rows: Tensor,
    expert_tokens: Tensor,
    slot_weights: Tensor | None,
    w_gate_up: Tensor,
    w_down: Tensor,
    b_gate_up: Tensor | None,
    b_down: Tensor | None,
    w_gate_up_scales: Tensor | None,
    w_down_scales: Tensor | None,
    x_scales: Tensor | None,
    saved_bytes: Any,
    group: int,
    sizes: int,
    kind: int,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    """Return the rows after the MLP, and the bytes that the core saves for backward."""
    return torch.empty_like(x, dtype=type_in(kind, "row_type")), new_bytes(x, saved_bytes)


@register_shapes
def experts_backward_fake(
    x: Tensor,
    expert_rows: Tensor,
    expert_tokens: Tensor,
    slot_weights: Tensor | None,
    w_gate_up: Tensor,
    w_down: Tensor,
    b_gate_up: Tensor | None,
    b_down: Tensor | None,
    w_gate_up_scales: Tensor | None,
    w_down_scales: Tensor | None,
    saved: Tensor,
    d_y: Tensor,
    group: int,
    sizes: int,
    kind: int,
    *_: Any,
) -> tuple[Tensor, ...]:
    """Return the gradients of x, of slot_weights and of the four weights."""
    weights = (w_gate_up, w_down, b_gate_up, b_down)
    slots = like_or_none(slot_weights, torch.float32, x)
    dtype = type_in(kind, "grad_type") or wide_dtype(x)
    return torch.empty_like(x), slots, *(like_or_none(w, dtype, x) for w in weights)


def operator_numbers(name: str, values: dict[str, Any]) -> tuple[Any, ...]:
    """Return the values of an operator's arguments in their order; ignore all other values."""
    return tuple(values[argument] for argument in argument_names(name) if argument in values)


# Positions of arguments of the operator moe. order_token and x, which come first, do not count.
NUM_EXPERTS, TOP_K, LEAVES, LOGICAL, SAVED_BYTES = (
    argument_names("moe").index(name) - 2
    for name in (
        "router_num_experts", "router_top_k", "layer_leaves", "logical_of_expert", "saved_bytes",
    )
)  # fmt: skip
# Bits of the argument layer_leaves of the operators moe and moe_backward: the lowest bit of
# epic_moe.flags, and two bits that bindings/torch/moe.c defines.
FIRST_FLAG, FORCED_WEIGHTS, WITH_ROUTING = 1 << 32, 1 << 61, 1 << 62
# The number of weights of the operator moe, from w_gate to w_shared_gate. The third one, bias, has
# no gradient.
MOE_WEIGHTS = 12
EXPERT_WEIGHT_POSITIONS = range(3, 7)  # positions of w_gate_up to b_down among these weights
# Positions of arguments of the operator moe_backward, without order_token and x.
EXPERTS_KIND_IN_BACKWARD = argument_names("moe_backward").index("experts_kind") - 2
TOP_K_IN_BACKWARD = argument_names("moe_backward").index("router_top_k") - 2
LEAVES_IN_BACKWARD = argument_names("moe_backward").index("layer_leaves") - 2


@register_shapes
def moe_fake(order_token: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Return out, loss, load, demand, logical_load, ids, weights, and the bytes for backward."""
    logical, num_ids = rest[LOGICAL], rest[NUM_EXPERTS]
    loads = (num_ids, 0) if logical is None else (logical.shape[0], num_ids)
    loss = x.new_empty((1,), dtype=wide_dtype(x))
    counts = (new_ints(x, loads[0]), new_ints(x, 1), new_ints(x, loads[1]))
    routing = (new_floats(x, 0), new_floats(x, 0))
    if rest[LEAVES] & WITH_ROUTING:
        shape = (x.shape[0], rest[TOP_K])
        routing = (new_ints(x, *shape), x.new_empty(shape, dtype=wide_dtype(x)))
    return torch.empty_like(x), loss, *counts, *routing, new_bytes(x, rest[SAVED_BYTES])


@register_shapes
def moe_backward_fake(order_token: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Return the gradients of x, of all weights except bias, and of forced weights."""
    expert_dtype = type_in(rest[EXPERTS_KIND_IN_BACKWARD], "grad_type") or wide_dtype(x)
    kinds = [
        expert_dtype if i in EXPERT_WEIGHT_POSITIONS else wide_dtype(x) for i in range(MOE_WEIGHTS)
    ]
    found = [like_or_none(rest[i], kinds[i], x) for i in range(MOE_WEIGHTS) if i != 2]
    forced = new_floats(x, 0)
    if rest[LEAVES_IN_BACKWARD] & FORCED_WEIGHTS:
        forced = x.new_empty((x.shape[0], rest[TOP_K_IN_BACKWARD]), dtype=wide_dtype(x))
    return torch.empty_like(x), *found, forced


# -------------------------------------------------------------------------------- out= ----


def refuse_gradient(*tensors: Any) -> None:
    """Raise an error for a call with out= if one of its tensors requires a gradient."""
    if torch.is_grad_enabled():
        for x in tensors:
            if isinstance(x, Tensor) and x.requires_grad:
                raise EpicArgumentError(
                    "out= is given, and a tensor requires a gradient: must be called under "
                    "torch.no_grad(); or do not pass out="
                )


def note_write(*tensors: Tensor | None) -> None:
    """Mark tensors as written, so that autograd notices if a saved tensor has changed.

    torch does not do this for the operators of other libraries.
    """
    if not torch.compiler.is_compiling():
        for x in tensors:
            if x is not None:
                torch.autograd.graph.increment_version(x)


def write_out(operator: Any, args: tuple[Any, ...], *outs: Tensor | None) -> None:
    """Call an operator NAME_out, without a gradient.

    Args:
        operator: The operator.
        args: Its arguments before the outputs.
        *outs: Tensors of the caller that it writes. None: the caller does not need this result.

    Raises:
        EpicArgumentError: A tensor requires a gradient, or an output is on another device.
    """
    refuse_gradient(*outs, *args)
    for x in outs:
        if x is None:
            continue
        if not isinstance(x, Tensor):
            check_tensor("out", x)
        if x.device != args[0].device:  # on "meta", torch would only call the shape function
            raise EpicArgumentError(f"out is on {x.device}: must be on {args[0].device}")
    operator(*args, *outs)
    note_write(*outs)


def parts_of(out: Any, names: str) -> Any:
    """Return out= after checking that it is a tuple with one part for each result.

    names: the names of the results, separated by ", ".
    """
    count = len(names.split(", "))
    if not isinstance(out, tuple) or len(out) != count:
        is_ = f"{type(out).__name__}"
        raise EpicArgumentError(f"out is a {is_}: must be ({names}), as the function returns it")
    return out


def copy_into(out: Tensor, x: Tensor) -> None:
    """Copy x into out, on which an operator then works in place; out may be x.

    Raises:
        EpicArgumentError: A tensor requires a gradient, or out does not fit x.
    """
    check_tensor("out", out)
    refuse_gradient(x, out)
    if out.shape != x.shape or out.dtype != x.dtype or not out.is_contiguous():
        raise EpicArgumentError(
            f"out is {out.dtype} of shape {list(out.shape)}: must be {x.dtype} of shape "
            f"{list(x.shape)} and contiguous"
        )
    if out.device != x.device:
        raise EpicArgumentError(
            f"out is on {out.device} and x is on {x.device}: must be on one device"
        )
    if out is not x:
        out.copy_(x)
