# SPDX-License-Identifier: Apache-2.0
"""Checks and conversions of the arguments of plan, dispatch and combine.

They run on every call, and their time is the caller's host time. A correct argument passes in one
comparison; types and strides, which the operators check and copy themselves, are left to them.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling as is_traced  # torch.compile treats it as a constant

from epic.errors import EpicArgumentError, EpicUnsupportedError

ROW_TYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)


def assume_constant_result(function: Any) -> Any:
    """Make torch.compile call a function while it traces, and treat the result as a constant.

    As torch._dynamo.assume_constant_result does, whose import takes seconds.
    """
    function._dynamo_marked_constant = True
    return function


def needs_gradient(x: Tensor, w: Tensor | None = None) -> bool:
    """Return whether a gradient must be computed.

    True also in forward mode, where the operators would lose the gradient: the functions then
    report that there is none.
    """
    if forward_ad._current_level >= 0:
        return True
    return is_grad_enabled() and (x.requires_grad or (w is not None and w.requires_grad))


class EpicFunction(torch.autograd.Function):
    """Base class of EPIC's autograd functions.

    Their forward has no ctx, and setup_context saves: so they work under torch.func.grad and vjp.
    """

    @staticmethod
    def vmap(*_: Any) -> Any:
        """Refuse torch.func.vmap: its batches may differ between ranks."""
        raise no_vmap()


def no_vmap() -> EpicUnsupportedError:
    """Return the error of every EPIC function that torch.func.vmap reaches."""
    return EpicUnsupportedError(
        "torch.func.vmap over EPIC's functions is not supported: pass the batch as more tokens, or "
        "use a loop; torch.func.jacrev needs no vmap with chunk_size=1"
    )


def make_apply(function: Any) -> Callable[..., Any]:
    """Return function.apply of an EpicFunction, or a faster callable that does the same.

    Tracers and functorch's transforms need a forward without ctx and a setup_context.  Torch runs
    such a function through inspect.signature() at each call, which takes 49 us of host time more
    than a forward with ctx (torch 2.9.1 and 2.15, see docs/lab/torch.md).  All other calls
    therefore take a copy of the function with the older signature."""

    class Plain(torch.autograd.Function):
        """The same function with a ctx in forward."""

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            """Run forward and setup_context of the function."""
            found = function.forward(*inputs)
            function.setup_context(ctx, inputs, found)
            return found

        backward = function.backward

    Plain.__name__ = function.__name__
    # The apply of Function's base class, in C++.  Torch 2.9.1 has a Python function around it that
    # takes 5.3 us per call.  Torch 2.15 has no such function, so this line saves no time there.
    short = super(torch.autograd.Function, Plain).apply
    is_transformed = torch._C._are_functorch_transforms_active

    def apply(*inputs: Any) -> Any:
        if not is_traced():
            return function.apply(*inputs) if is_transformed() else short(*inputs)
        wants = any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        # Without a gradient, tracers of torch 2.9 pass a ctx to a forward that has *inputs.
        return function.apply(*inputs) if wants and is_grad_enabled() else function.forward(*inputs)

    return apply


class SavedOnce:
    """A context whose saved tensors are unpacked once, as checkpointing requires."""

    def __init__(self, ctx: Any) -> None:
        self.ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)


class Refusal(EpicFunction):
    """Gradients as they are, and an error when they are differentiated."""

    @staticmethod
    def forward(num_gradients: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """Copy the gradients, which come first; the tensors that they depend on follow."""
        return tuple(None if x is None else x.clone() for x in tensors[:num_gradients])

    @staticmethod
    def setup_context(*_: Any) -> None:
        """Save nothing."""

    @staticmethod
    def backward(*_: Any) -> Any:
        """Raise: only a second derivative reaches this."""
        raise EpicUnsupportedError(
            "a second derivative is not supported: EPIC's functions have only first derivatives"
        )


refusal_apply = make_apply(Refusal)


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a backward that cannot be differentiated.

    torch's once_differentiable looks at the incoming gradients only, and returns zeros if the
    result depends on saved tensors.
    """

    def run(ctx: Any, *gradients: Any) -> Any:
        if is_traced() or not is_grad_enabled():
            return backward(ctx, *gradients)
        seen = SavedOnce(ctx)
        with torch.no_grad():
            found = backward(seen, *gradients)
        return refusal_apply(len(found), *found, *gradients, *seen.saved_tensors)

    return run


# Attributes of a saved tensor that activation offloading reads: that of TransformerEngine (also in
# Megatron-Core), Megatron-Core's own, and that of its release 0.16.
NO_OFFLOAD: dict[str, bool] = {
    "_TE_do_not_offload": True, "_do_not_offload": True, "offloading_activation": False,
}  # fmt: skip


def mark_no_offload(x: Tensor) -> None:
    """Mark a tensor that activation offloading must leave in place: it is small or stays."""
    if not is_traced():
        x.__dict__.update(NO_OFFLOAD)


def check_floats(name: str, x: Tensor) -> None:
    """Check that the core can add the dtype of a tensor."""
    if x.dtype not in ROW_TYPES:
        raise EpicArgumentError(
            f"{name} is {x.dtype}: must be float32, bfloat16, float16 or float64"
        )


def flatten_rows(name: str, x: Tensor) -> Tensor:
    """Return [..., n] as [rows, n]."""
    if x.dim() < 2:
        raise EpicArgumentError(f"{name} has the shape {list(x.shape)}: must be [..., hidden]")
    return x.reshape(-1, x.shape[-1]) if x.dim() > 2 else x


def as_rows(name: str, x: Tensor, count: int) -> Tensor:
    """Return [..., hidden] as [count, hidden]."""
    shape = x.shape
    if len(shape) == 2 and shape[0] == count:
        return x
    rows = flatten_rows(name, x)
    if rows.shape[0] != count:
        raise EpicArgumentError(
            f"{name} has the shape {list(shape)}: must have {count} rows, as the plan, not "
            f"{rows.shape[0]}"
        )
    return rows


def as_weights(
    name: str, x: Tensor | None, shape: tuple[int, ...], tokens: Tensor | None = None
) -> Tensor | None:
    """Return x as float32 of that shape; None for None.

    tokens: the rows that x belongs to, as the caller passed them. If both have several leading
    dimensions, these must be equal.
    """
    if x is None or (x.shape == shape and x.dtype == torch.float32):
        return x
    if x.numel() != math.prod(shape) or x.shape[-1:] != shape[-1:]:
        raise EpicArgumentError(f"{name} has the shape {list(x.shape)}: must be {list(shape)}")
    check_floats(name, x)
    if tokens is not None and min(x.dim(), tokens.dim()) > 2 and x.shape[:-1] != tokens.shape[:-1]:
        raise EpicArgumentError(
            f"{name} has the shape {list(x.shape)}: must have the leading dimensions of tokens, "
            f"whose shape is {list(tokens.shape)}"
        )
    return x.reshape(shape).to(torch.float32)


def as_flat(name: str, x: Tensor, leading: Any) -> Tensor:
    """Return x as [num_tokens]; it has the leading dimensions of the rows, or one."""
    if x.shape != leading and x.shape != (math.prod(leading),):
        raise EpicArgumentError(
            f"{name} has the shape {list(x.shape)}: must be {list(leading)}, with one value for "
            "each token"
        )
    return x.reshape(-1).contiguous()


def count_of(shape: Any, top_k: int) -> int:
    """Return the number of tokens of topk_idx [..., top_k]."""
    if len(shape) < 2 or shape[-1] != top_k:
        raise EpicArgumentError(
            f"topk_idx has the shape {list(shape)}: must be [..., {top_k}], as top_k is {top_k}"
        )
    return math.prod(shape[:-1])


def as_int32(name: str, x: Tensor) -> Tensor:
    """Return integers as int32; those that do not fit stay invalid."""
    if x.dtype == torch.int32:
        return x.contiguous()
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise EpicArgumentError(f"{name} is {x.dtype}: must be an integer type")
    return x.long().clamp(-(1 << 31), (1 << 31) - 1).to(torch.int32).contiguous()
