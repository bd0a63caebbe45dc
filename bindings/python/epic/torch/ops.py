# SPDX-License-Identifier: Apache-2.0
"""torch.ops.epic: the operators of libepic_torch.so, their shapes for tracing, and their errors.

The raw operators have no gradients and check little. Call the functions of epic.torch.
"""

import ctypes
import functools
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from epic import _native
from epic.errors import EpicArgumentError, EpicError
from epic.torch.arguments import no_vmap
from epic.words import to_python

Function = TypeVar("Function", bound=Callable[..., Any])


def load_library() -> ctypes.CDLL:
    """Load the library and register its operators with torch."""
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
    library.epic_torch_layer_add.argtypes = [ctypes.c_int64] * 6
    missing = library.epic_torch_register()
    if missing is not None:
        raise ImportError(
            f"torch {torch.__version__} does not have what libepic_torch.so needs: "
            f"{missing.decode()}"
        )
    return library


LIBRARY = load_library()
# Kept alive, because its registrations end with it.
FAKES = torch.library.Library("epic", "FRAGMENT")


def return_nothing(*_: Any, **__: Any) -> None:
    """Return nothing: the shape function of operators that write into the caller's tensors."""


def on_one_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a shape function so that it refuses tensors on several devices.

    If one tensor is on "meta", torch only asks for shapes, and results would be memory that no
    operator wrote.
    """

    def run(*args: Any, **options: Any) -> Any:
        devices = {x.device for x in args[has_order_token:] if isinstance(x, Tensor)}
        if len(devices) > 1:
            names = " and ".join(sorted(map(str, devices)))
            raise EpicArgumentError(f"tensors are on {names}: must be on one device")
        return function(*args, **options)

    has_order_token = (
        "order_token" in inspect.signature(function).parameters
    )  # the first argument is the group's order token, if there is one
    return run


def refuse_vmap(*_: Any, **__: Any) -> Any:
    """Refuse the tensors of torch.func.vmap."""
    raise no_vmap()


def register_shapes(function: Function) -> Function:
    """Register NAME_fake as the shape function of epic::NAME (all overloads) and epic::NAME_out.

    All of them refuse torch.func.vmap.
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


# A private function of torch that calls an operator with a stack of arguments.  It saves 1.2 to
# 1.6 us of host time per call of plan, dispatch and combine: torch.ops.epic.NAME.default runs
# Python before it does the same (torch 2.9.1 and 2.15, see docs/lab/torch.md).  BOXED ignores
# __torch_function__, so traced calls and arguments with an override take the public way.
BOXED = getattr(torch._C, "_dispatch_call_boxed", None)


def boxed_call(operator: Any) -> Any:
    """Return a faster callable for an operator, or the operator if torch has no BOXED."""
    if BOXED is None or not isinstance(operator, torch._ops.OpOverload):
        return getattr(operator, "_op", operator)
    schema = operator._schema
    return partial(
        BOXED, torch._C._dispatch_find_schema_or_throw(schema.name, schema.overload_name)
    )


# ---------------------------------------------------------------------------- errors ----


def as_epic_error(error: RuntimeError) -> RuntimeError:
    """Return an error that an operator raised as an EpicError, and any other error as it is.

    Compiled functions raise RuntimeError with EPIC's text; the functions of epic.torch call this
    themselves.

    Args:
        error: An error that a compiled function raised.

    Returns:
        An EpicError or EpicArgumentError with the same text, or the error itself.
    """
    text = str(error).split("\n")[0]
    code, _, sentence = text.partition(": ")
    if isinstance(error, EpicError) or code not in _native.RESULTS:
        return error
    sentence = to_python(sentence)
    if code == "EPIC_EINVAL":
        return EpicArgumentError(sentence)
    return EpicError(code, sentence)


def to_epic_error(error: RuntimeError) -> RuntimeError:
    """Return the error as an EpicError, or as it is in a traced function."""
    return error if torch.compiler.is_compiling() else as_epic_error(error)


def translate_errors(function: Function) -> Function:
    """Decorate a function so that errors of operators are raised as EpicError.

    Functions on the hot path catch errors themselves, since a wrapper costs host time.
    """

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except RuntimeError as error:
            raise to_epic_error(error) from None

    return run  # type: ignore[return-value]


# ---------------------------------------------------------------------------- shapes ----


def new_ints(like: Tensor, *shape: Any) -> Tensor:
    """Return an int32 result."""
    return like.new_empty(shape, dtype=torch.int32)


def new_floats(like: Tensor, *shape: Any) -> Tensor:
    """Return a float32 result."""
    return like.new_empty(shape, dtype=torch.float32)


def new_bytes(like: Tensor, size: Any) -> Tensor:
    """Return a result of bytes."""
    return like.new_empty((size,), dtype=torch.uint8)


def wide_dtype(like: Tensor) -> torch.dtype:
    """Return the dtype of router and losses for rows of a dtype."""
    return torch.float64 if like.dtype == torch.float64 else torch.float32


def like_or_none(x: Tensor | None, dtype: torch.dtype, of: Tensor) -> Tensor:
    """Return a gradient, or the empty result that stands for an absent one."""
    return new_floats(of, 0) if x is None else x.new_empty(x.shape, dtype=dtype)


def argument_names(name: str, overload: str = "default") -> list[str]:
    """Return the names of an operator's arguments."""
    schema = getattr(getattr(torch.ops.epic, name), overload)._schema
    return [argument.name for argument in schema.arguments]


# Fields that share one number, with their bits from the lowest (see bindings/torch/options.h).
Words = dict[str, dict[str, int]]
LAYER: Words = {
    "layer_rules": {
        "num_experts": 17, "num_logical": 17, "top_k": 8, "flags": 8, "sum_order": 3,
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
DTYPES = (None, torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn)


def pack_fields(words: Words, values: dict[str, int]) -> dict[str, int]:
    """Return values as the operators take them: several in one number."""
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
    """Return a layer's fields as the three numbers of the operators."""
    return tuple(pack_fields(LAYER, layer).values())


def mlp_numbers(prefix: str, values: dict[str, Any], **types: int) -> dict[str, Any]:
    """Return the arguments of an MLP; types: dtypes that the tensors do not determine."""
    values = values | {"row_type": 0, "weight_type": 0, "grad_type": 0} | types
    found = pack_fields({f"{prefix}_sizes": SIZES, f"{prefix}_kind": KIND}, values)
    return found | {f"{prefix}_{name}": values[name] for name in ("limit", "alpha")}


def type_in(kind: int, name: str) -> torch.dtype | None:
    """Return one of the dtypes that a kind contains; None if it contains none."""
    first = 0
    for field, bits in KIND.items():
        if field == name:
            return DTYPES[kind >> first & (1 << bits) - 1]
        first += bits
    raise KeyError(name)


# The layers of all open groups, by number: capacity, bytes of a plan, and the numbers of local
# experts, experts and logical experts.
# A closed group has no layers here. So a compiled function is traced again, and its call fails.
NO_LAYER = (0, 0, 0, 0, 0)
KEPT_LAYERS: dict[int, tuple[int, int, int, int, int]] = {}


def size_of_plan(layer: int, rank_of_expert: Tensor | None) -> int:
    """Return the bytes of a plan of that layer, with the counts that follow it."""
    _, plan_bytes, local, experts, logical = KEPT_LAYERS.get(layer, NO_LAYER)
    room = local if rank_of_expert is None else experts
    return plan_bytes + 4 * (2 * room + experts + 1 + logical)


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
    """Return the plan, followed by expert_rows, expert_tokens, load, demand, logical_load."""
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
    """The received rows and their weights."""
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
    """Return the results of plan, then those of dispatch."""
    planned = new_bytes(topk_idx, size_of_plan(layer, rank_of_expert))
    slots = KEPT_LAYERS.get(layer, NO_LAYER)[0] if capacity < 0 else capacity
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
    """Rows, their weights and their experts."""
    slots = new_floats(tokens, 0) if weights is None else new_floats(tokens, capacity, top_k)
    return tokens.new_empty((capacity, tokens.shape[1])), slots, new_ints(tokens, capacity, top_k)


def quantized(like: Tensor, slots: Any, quantize: int) -> tuple[Tensor, Tensor]:
    """Rows and scales."""
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
    """Rows, scales and weights."""
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
    """Rows and second rows of bytes, and weights."""
    recv = tokens.new_empty((capacity, tokens.shape[1]))
    beside = (
        new_floats(tokens, 0) if scales is None else scales.new_empty((capacity, scales.shape[1]))
    )
    return recv, beside, new_floats(tokens, 0 if weights is None else capacity)


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
    """Gradients of tokens and weights."""
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
    """The tokens."""
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
    """Gradients of rows and of their weights."""
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
    """Gradients of rows, with their scales, and of their weights."""
    slots = new_floats(d_out, 0 if rows is None else capacity)
    return *quantized(d_out, capacity, quantize), slots


@register_shapes
def sum__fake(order_token: Tensor, *_: Any) -> None:
    """Nothing."""


@register_shapes
def sum_replicas__fake(order_token: Tensor, *_: Any) -> None:
    """Nothing."""


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
    """The choice and its weights."""
    shape = (logits.shape[0], top_k)
    return new_ints(logits, *shape), logits.new_empty(shape, dtype=wide_dtype(logits))


@register_shapes
def route_backward_fake(logits: Tensor, *_: Any) -> Tensor:
    """The logits' gradient."""
    return torch.empty_like(logits)


@register_shapes
def balance_loss_fake(logits: Tensor, *_: Any) -> Tensor:
    """A number."""
    return logits.new_empty((1,), dtype=wide_dtype(logits))


@register_shapes
def balance_loss_backward_fake(logits: Tensor, *_: Any) -> Tensor:
    """The logits' gradient."""
    return torch.empty_like(logits)


@register_shapes
def z_loss_fake(logits: Tensor, *_: Any) -> Tensor:
    """A number."""
    return logits.new_empty((1,), dtype=wide_dtype(logits))


@register_shapes
def z_loss_backward_fake(logits: Tensor, *_: Any) -> Tensor:
    """The logits' gradient."""
    return torch.empty_like(logits)


@register_shapes
def bias_update__fake(bias: Tensor, *_: Any) -> None:
    """Nothing."""


def count_load(load: Tensor, counts: Tensor) -> None:
    """Add a forward's counts to those of a layer, once.

    Checkpointing runs the forward again inside of a backward. The number of the running graph shows
    that; torch has no public name for it. This is an operator, so that compiled functions look when
    they run.
    """
    if torch._C._current_graph_task_id() == -1:
        load.add_(counts)


FAKES.define("count_load_(Tensor(a!) load, Tensor counts) -> ()")
FAKES.impl("count_load_", count_load, "CompositeExplicitAutograd")


@register_shapes
def count_load__fake(load: Tensor, counts: Tensor) -> None:
    """Nothing."""


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
    """The rows, and what is saved for backward."""
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
    """Gradients of x, slot_weights and the weights."""
    weights = (w_gate_up, w_down, b_gate_up, b_down)
    slots = like_or_none(slot_weights, torch.float32, x)
    dtype = type_in(kind, "grad_type") or wide_dtype(x)
    return torch.empty_like(x), slots, *(like_or_none(w, dtype, x) for w in weights)


def operator_numbers(name: str, values: dict[str, Any]) -> tuple[Any, ...]:
    """Return those values that an operator has arguments for, in their order."""
    return tuple(values[argument] for argument in argument_names(name) if argument in values)


# Positions among the arguments of the operator moe after order_token and x.
NUM_EXPERTS, TOP_K, LEAVES, LOGICAL, SAVED_BYTES = (
    argument_names("moe").index(name) - 2
    for name in (
        "router_num_experts", "router_top_k", "layer_leaves", "logical_of_expert", "saved_bytes",
    )
)  # fmt: skip
# Bits of layer_leaves in the operators of the whole layer: epic_moe.flags begin at the first, and
# the others are those of bindings/torch/moe.c.
FIRST_FLAG, FORCED_WEIGHTS, WITH_ROUTING = 1 << 32, 1 << 61, 1 << 62
# Weights of the operator moe: w_gate to w_shared_gate; the third, the bias, has no gradient.
MOE_WEIGHTS = 12
OF_EXPERTS = range(3, 7)  # the positions of w_gate_up to b_down among these weights
KIND_OF_EXPERTS = argument_names("moe_backward").index("experts_kind") - 2
TOP_K_IN_BACKWARD = argument_names("moe_backward").index("router_top_k") - 2
LEAVES_IN_BACKWARD = argument_names("moe_backward").index("layer_leaves") - 2


@register_shapes
def moe_fake(order_token: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """The tokens, the loss, load, demand, logical_load, the routing, and what is saved."""
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
    """Gradients of x, of the weights but the bias, and of forced weights."""
    of_experts = type_in(rest[KIND_OF_EXPERTS], "grad_type") or wide_dtype(x)
    kinds = [of_experts if i in OF_EXPERTS else wide_dtype(x) for i in range(MOE_WEIGHTS)]
    found = [like_or_none(rest[i], kinds[i], x) for i in range(MOE_WEIGHTS) if i != 2]
    forced = new_floats(x, 0)
    if rest[LEAVES_IN_BACKWARD] & FORCED_WEIGHTS:
        forced = x.new_empty((x.shape[0], rest[TOP_K_IN_BACKWARD]), dtype=wide_dtype(x))
    return torch.empty_like(x), *found, forced


# -------------------------------------------------------------------- into tensors given ----


def refuse_gradient(*tensors: Any) -> None:
    """Refuse gradients for calls that write into tensors of the caller."""
    if torch.is_grad_enabled():
        for x in tensors:
            if isinstance(x, Tensor) and x.requires_grad:
                raise EpicArgumentError(
                    "out= is given, and a tensor requires a gradient: must be called under "
                    "torch.no_grad(); or do not pass out="
                )


def note_write(*tensors: Tensor | None) -> None:
    """Mark tensors as written, so that autograd finds saved tensors that changed.

    Operators of libraries must do it themselves.
    """
    if not torch.compiler.is_compiling():
        for x in tensors:
            if x is not None:
                torch.autograd.graph.increment_version(x)


def write_out(operator: Any, args: tuple[Any, ...], *outs: Tensor | None) -> None:
    """Call an operator that writes into tensors of the caller; None: not wanted."""
    refuse_gradient(*outs, *args)
    for x in outs:  # with tensors on "meta" torch would only compute shapes
        if x is not None and x.device != args[0].device:
            raise EpicArgumentError(f"out is on {x.device}: must be on {args[0].device}")
    operator(*args, *outs)
    note_write(*outs)


def parts_of(out: Any, names: str) -> Any:
    """Return out= after checking that it has as many parts as the function returns."""
    count = len(names.split(", "))
    if not isinstance(out, tuple) or len(out) != count:
        is_ = f"{type(out).__name__}"
        raise EpicArgumentError(f"out is a {is_}: must be ({names}), as the function returns it")
    return out


def copy_into(out: Tensor, x: Tensor) -> None:
    """Copy x into out for operators that work in place; out may be x."""
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
