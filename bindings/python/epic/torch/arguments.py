# SPDX-License-Identifier: Apache-2.0
"""Checks and conversions of the arguments of plan, dispatch and combine.

These functions run in every call, so they must need little host time. A correct argument passes
with one comparison. Dtypes and strides are not checked here, because the operators check them, and
copy tensors that are not contiguous.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling as is_traced  # torch.compile treats it as a constant

from epic.errors import EpicArgumentError, EpicUnsupportedError

# The dtypes that the core can add.
ROW_TYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)


def assume_constant_result(function: Any) -> Any:
    """Make torch.compile call a function while it traces, and treat the result as a constant.

    torch._dynamo.assume_constant_result does the same, but importing torch._dynamo takes seconds.
    So this function sets the private attribute that torch._dynamo reads.
    """
    function._dynamo_marked_constant = True
    return function


def needs_gradient(x: Tensor, w: Tensor | None = None) -> bool:
    """Return whether a call must run as an autograd function, for rows x and weights w.

    True also while forward-mode AD is active. EPIC has no forward-mode gradients. The autograd
    functions then raise an error, but the operators would silently drop the gradient.
    """
    if forward_ad._current_level >= 0:
        return True
    return is_grad_enabled() and (x.requires_grad or (w is not None and w.requires_grad))


class EpicFunction(torch.autograd.Function):
    """Base class of EPIC's autograd functions.

    Their forward has no argument ctx, and setup_context saves the tensors for backward. So they
    work under torch.func.grad and torch.func.vjp.
    """

    @staticmethod
    def vmap(*_: Any) -> Any:
        """Raise an error, because the batches of torch.func.vmap may differ between ranks."""
        raise no_vmap()


def no_vmap() -> EpicUnsupportedError:
    """Return the error for an EPIC function inside of torch.func.vmap."""
    return EpicUnsupportedError(
        "torch.func.vmap over EPIC's functions is not supported: pass the batch as more tokens, or "
        "use a loop; torch.func.jacrev needs no vmap with chunk_size=1"
    )


def make_apply(function: Any) -> Callable[..., Any]:
    """Return a callable with the results of function.apply, which takes less host time.

    torch.compile and the transforms of torch.func need a forward without ctx, and a setup_context.
    But torch calls inspect.signature() for each call of such a function. This takes 49 us more host
    time than a forward with ctx (torch 2.9.1 and 2.15, see docs/lab/torch.md). So all other calls
    use a class whose forward has ctx.

    Args:
        function: A subclass of EpicFunction.
    """

    class Plain(torch.autograd.Function):
        """An autograd function like `function`, whose forward has an argument ctx."""

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            """Run forward and setup_context of the function."""
            found = function.forward(*inputs)
            function.setup_context(ctx, inputs, found)
            return found

        backward = function.backward

    Plain.__name__ = function.__name__
    # The C++ method apply of Function's base class. Function.apply of torch 2.9.1 is a Python
    # function around it, which takes 5.3 us per call. In torch 2.15 this line saves no time.
    short = super(torch.autograd.Function, Plain).apply
    is_transformed = torch._C._are_functorch_transforms_active

    def apply(*inputs: Any) -> Any:
        if not is_traced():
            return function.apply(*inputs) if is_transformed() else short(*inputs)
        wants = any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        # If no gradient is needed, torch.compile of torch 2.9 would pass a ctx to a forward that
        # has an argument *inputs. So call forward directly.
        return function.apply(*inputs) if wants and is_grad_enabled() else function.forward(*inputs)

    return apply


class SavedOnce:
    """A ctx that reads saved_tensors of another ctx only once.

    Activation checkpointing raises an error if saved tensors are unpacked twice.
    """

    def __init__(self, ctx: Any) -> None:
        self.ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)


class Refusal(EpicFunction):
    """The identity function of gradients, whose backward raises an error."""

    @staticmethod
    def forward(num_gradients: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return copies of the first num_gradients tensors.

        tensors: the gradients, then all tensors that they were computed from. With the latter as
        inputs, autograd calls backward also if only they require a gradient.
        """
        return tuple(None if x is None else x.clone() for x in tensors[:num_gradients])

    @staticmethod
    def setup_context(*_: Any) -> None:
        """Save nothing."""

    @staticmethod
    def backward(*_: Any) -> Any:
        """Raise an error, because only a second derivative calls this method."""
        raise EpicUnsupportedError(
            "a second derivative is not supported: EPIC's functions have only first derivatives"
        )


refusal_apply = make_apply(Refusal)


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a backward so that differentiating its results raises an error.

    torch.autograd.function.once_differentiable is not enough. It considers only the incoming
    gradients. If the results depend on saved tensors, a second derivative would be zero without an
    error.
    """

    def run(ctx: Any, *gradients: Any) -> Any:
        if is_traced() or not is_grad_enabled():
            return backward(ctx, *gradients)
        seen = SavedOnce(ctx)
        with torch.no_grad():
            found = backward(seen, *gradients)
        return refusal_apply(len(found), *found, *gradients, *seen.saved_tensors)

    return run


# Attributes of a saved tensor with which activation offloading leaves it on the GPU. In this order:
# of TransformerEngine (Megatron-Core reads it too), of Megatron-Core, and of Megatron-Core 0.16.
NO_OFFLOAD: dict[str, bool] = {
    "_TE_do_not_offload": True, "_do_not_offload": True, "offloading_activation": False,
}  # fmt: skip


def mark_no_offload(x: Tensor) -> None:
    """Mark a tensor that activation offloading must leave on the GPU.

    Use it for tensors that are small, or that stay in memory anyway.
    """
    if not is_traced():
        x.__dict__.update(NO_OFFLOAD)


def check_tensor(name: str, x: Any) -> None:
    """Raise an error for an argument that is not a dense tensor. name: its name in the error."""
    if not isinstance(x, Tensor):
        found = "None" if x is None else f"a {type(x).__name__}"
        raise EpicArgumentError(f"{name} is {found}: must be a tensor")
    if x.layout is not torch.strided:
        raise EpicArgumentError(f"{name} is {x.layout}: must be dense; call to_dense()")


def check_floats(name: str, x: Tensor) -> None:
    """Raise an error if the core cannot add the dtype of a tensor. name: its name in the error."""
    check_tensor(name, x)
    if x.dtype not in ROW_TYPES:
        raise EpicArgumentError(
            f"{name} is {x.dtype}: must be float32, bfloat16, float16 or float64"
        )


def flatten_rows(name: str, x: Tensor) -> Tensor:
    """Return x [..., n] as [rows, n]. name: the name of x in the error."""
    if x.dim() < 2:
        raise EpicArgumentError(f"{name} has the shape {list(x.shape)}: must be [..., hidden]")
    return x.reshape(-1, x.shape[-1]) if x.dim() > 2 else x


def as_rows(name: str, x: Tensor, count: int) -> Tensor:
    """Return x [..., hidden] as [count, hidden]; raise an error if it has another number of rows.

    name: the name of x in the error.
    """
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
    """Return weights as float32 in a given shape; None for None.

    Args:
        name: The name of x in errors.
        x: The weights, with as many elements as `shape` and its last dimension.
        shape: Shape of the result.
        tokens: The tokens [..., hidden] of the weights, as the caller passed them. If both tensors
            have several leading dimensions, these must be equal.
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
    """Return x as [num_tokens].

    Args:
        name: The name of x in the error.
        x: One value for each token, of the shape `leading` or [num_tokens].
        leading: The leading dimensions of the tokens, as the caller passed them.
    """
    check_tensor(name, x)
    if x.shape != leading and x.shape != (math.prod(leading),):
        raise EpicArgumentError(
            f"{name} has the shape {list(x.shape)}: must be {list(leading)}, with one value for "
            "each token"
        )
    return x.reshape(-1).contiguous()


def count_of(shape: Any, top_k: int) -> int:
    """Return the number of tokens in a topk_idx of the given shape [..., top_k]."""
    if len(shape) < 2 or shape[-1] != top_k:
        raise EpicArgumentError(
            f"topk_idx has the shape {list(shape)}: must be [..., {top_k}], as top_k is {top_k}"
        )
    return math.prod(shape[:-1])


def as_int32(name: str, x: Tensor) -> Tensor:
    """Return integers as contiguous int32. name: the name of x in the error.

    Ids that int32 cannot represent become its largest or smallest number, so that they do not turn
    into valid ids.
    """
    check_tensor(name, x)
    if x.dtype == torch.int32:
        return x.contiguous()
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise EpicArgumentError(f"{name} is {x.dtype}: must be an integer type")
    wide = x.long()
    if x.dtype == torch.uint64:  # numbers from 2^63 on have become negative
        wide = torch.where(wide < 0, 1 << 31, wide)
    return wide.clamp(-(1 << 31), (1 << 31) - 1).to(torch.int32).contiguous()
