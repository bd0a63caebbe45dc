# SPDX-License-Identifier: Apache-2.0
"""The grouped expert MLP: local to each rank, differentiable in rows and parameters."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import once_differentiable

from epic import _native
from epic.errors import EpicArgumentError, EpicUnsupportedError
from epic.options import Experts, known
from epic.torch.arguments import check_floats, stay
from epic.torch.groups import Group
from epic.torch.ops import mlp_numbers, numbers, raising, write
from epic.torch.router import number_of

ops = torch.ops.epic

GroupedMm = Callable[[Tensor, Tensor, Tensor], Tensor]


class ExpertWeights(NamedTuple):
    """Parameters of the local experts: gate and up in one tensor, as options.interleaved says."""

    w_gate_up: Tensor  # [local experts, hidden, width]
    w_down: Tensor  # [local experts, inner, hidden]
    b_gate_up: Tensor | None = None  # [local experts, width]
    b_down: Tensor | None = None  # [local experts, hidden]


TYPE_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
}


def dtype_name(x: Tensor) -> str:
    """As the options write it."""
    return TYPE_NAMES[x.dtype]


def completed(options: Experts, local: int, row_type: str, weight_type: str) -> Experts:
    """The options with what the tensors tell."""
    if options.num_local_experts not in (0, local):
        raise EpicArgumentError(
            f"num_local_experts {options.num_local_experts}: the weights have {local}"
        )
    return replace(options, num_local_experts=local, row_type=row_type, weight_type=weight_type)


@torch._dynamo.assume_constant_result
@functools.cache
def facts(
    options: str, local: int, row_type: str, weight_type: str, on_gpu: bool
) -> tuple[Any, ...]:
    """What the operators are passed for the options of that key, forward and backward, and bytes
    that forward saves for backward: of none, and of each slot."""
    whole = completed(known[options], local, row_type, weight_type)
    if on_gpu and row_type == "float64":
        raise EpicUnsupportedError(
            "rows are float64: on GPUs the core's experts take float32, bfloat16 and float16; "
            "float64 is for CPUs"
        )
    name = "cuda_saved_bytes" if on_gpu else "saved_bytes"
    none, one = (int(getattr(_native.experts_memory(whole, n), name)) for n in (0, 1 << 20))
    values = whole.numbers()
    narrow = values["row_type"] if on_gpu and row_type == weight_type else 0
    passed = [
        numbers(name, mlp_numbers("experts", values, **types))
        for name, types in (("experts", {}), ("experts_backward", {"grad_type": narrow}))
    ]
    return *passed, none, -(-(one - none) >> 20)


def check_weights(options: Experts, weights: ExpertWeights) -> None:
    """The shapes that the options ask for, and one dtype."""
    local, hidden, inner, width = (
        weights.w_gate_up.shape[0],
        options.hidden,
        options.inner,
        options.width,
    )
    shapes = ((local, hidden, width), (local, inner, hidden), (local, width), (local, hidden))
    for name, x, shape in zip(ExpertWeights._fields, weights, shapes, strict=True):
        if x is None:
            continue
        if tuple(x.shape) != shape:
            raise EpicArgumentError(f"{name}: shape {list(x.shape)}: {list(shape)} is needed")
        if x.dtype != weights.w_gate_up.dtype:
            raise EpicArgumentError(f"{name}: dtype {x.dtype}: all weights have one dtype")


NO_SCALES = (None, None, None)


class RunExperts(torch.autograd.Function):
    """epic::experts with its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        size: int,
        group: int,
        numbers: tuple[tuple[Any, ...], tuple[Any, ...]],
        x: Tensor,
        expert_rows: Tensor,
        expert_tokens: Tensor,
        slots: Tensor | None,
        *weights: Tensor | None,
    ) -> Tensor:
        """The core saves what gate and up gave."""
        inputs = (x, expert_rows, expert_tokens, slots, *weights)
        stay(expert_rows, expert_tokens)
        y, saved = ops.experts.default(*inputs, *NO_SCALES, size, group, *numbers[0])
        ctx.numbers = (group, *numbers[1])
        ctx.save_for_backward(*inputs, saved)
        return y

    @staticmethod
    @once_differentiable
    @raising
    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        """Weight gradients leave in the weights' dtype."""
        *inputs, saved = ctx.saved_tensors
        more = (None, None, saved, d_y.contiguous())
        d_x, *rest = ops.experts_backward.default(*inputs, *more, *ctx.numbers)
        pairs = zip(inputs[3:8], rest, strict=True)
        given = [None if x is None else d.to(x.dtype) for x, d in pairs]
        return None, None, None, d_x, None, None, *given


@raising
def experts(
    options: Experts,
    rows: Tensor,
    expert_rows: Tensor,
    expert_tokens: Tensor,
    weights: ExpertWeights,
    slot_weights: Tensor | None = None,
    group: Group | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The MLP of each slab by the core: rows [slots, hidden] -> [slots, hidden].

    expert_rows and expert_tokens: as a plan gives them.  slot_weights [slots] with weighting
    "early" and "input".  group: on GPUs, one there.  Only occupied slots are computed.  Those
    behind the last slab come out as zeros; on GPUs they hold anything, as do their gradients,
    which dispatch and combine do not read.  out: as rows; written and returned, without a gradient.
    """
    weights = ExpertWeights(*weights)
    check_floats("rows", rows)
    check_weights(options, weights)
    if rows.dim() != 2 or rows.shape[1] != options.hidden:
        raise EpicArgumentError(
            f"rows: shape {list(rows.shape)}: [slots, {options.hidden}] is needed"
        )
    if (slot_weights is not None) != (options.weighting != "late"):
        raise EpicArgumentError(
            'slot_weights come with weighting "early" or "input", and only then'
        )
    up = weights.w_gate_up
    number, kinds = number_of(group, rows, "rows"), (dtype_name(rows), dtype_name(up))
    on_gpu = group is not None and group.on_gpu
    forward, backward, base, each = facts(options.key, up.shape[0], *kinds, on_gpu)
    arrays = [None if w is None else w.contiguous() for w in weights]
    size = base + each * rows.shape[0]
    inputs = (rows.contiguous(), expert_rows, expert_tokens, slot_weights, *arrays)
    if out is not None:
        args = (*inputs, *NO_SCALES, size, number, *forward)
        write(ops.experts_out.default, args, out, None)
        return out
    return RunExperts.apply(size, number, (forward, backward), *inputs)


# --------------------------------------------------------------- with any product ----


def activate(options: Experts, z: Tensor) -> Tensor:
    """The experts' nonlinearity over [rows, width]."""
    plain: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
        "relu2": lambda v: F.relu(v).square(),
    }
    if options.ungated:
        return plain[options.activation](z)
    gate, up = (z[:, 0::2], z[:, 1::2]) if options.interleaved else z.chunk(2, dim=1)
    if options.activation in plain:
        return plain[options.activation](gate) * up
    of_deepseek = options.activation == "clamped_silu"
    limit = options.limit or (10.0 if of_deepseek else 7.0)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if of_deepseek:
        return F.silu(gate) * up
    return gate * torch.sigmoid((options.alpha or 1.702) * gate) * (up + 1)


def mlp(
    options: Experts,
    grouped_mm: GroupedMm,
    x: Tensor,
    expert_rows: Tensor,
    w: ExpertWeights,
    slot_weights: Tensor | None = None,
) -> Tensor:
    """The experts over slabs of expert_rows rows, with the caller's product:
    grouped_mm(x [slots, n], w [local experts, n, m], ends of the slabs [local experts] int32).
    Rows behind the last slab may hold anything afterwards: combine does not read them."""
    ends = expert_rows.cumsum(0, dtype=torch.int32)
    expert = None
    if w.b_gate_up is not None or w.b_down is not None:
        slots = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
        expert = torch.searchsorted(ends, slots, right=True).clamp(max=ends.shape[0] - 1)
    column = None if slot_weights is None else slot_weights[:, None].to(x.dtype)
    if options.weighting == "input" and column is not None:
        x = x * column
    z = grouped_mm(x, w.w_gate_up.to(x.dtype), ends)
    if w.b_gate_up is not None:
        z = z + w.b_gate_up.to(z.dtype)[expert]
    a = activate(options, z)
    early = column if options.weighting == "early" else None
    a = a if early is None else a * early
    y = grouped_mm(a.to(x.dtype), w.w_down.to(x.dtype), ends)
    if w.b_down is not None:
        b = w.b_down.to(y.dtype)[expert]
        y = y + (b if early is None else b * early)
    return y.to(x.dtype)


def slab_mm(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """A grouped product by one matmul for each expert: plain, anywhere; the host waits for ends."""
    out = x.new_zeros((x.shape[0], w.shape[2]))
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        out[begin:end] = x[begin:end] @ w[expert]
        begin = end
    return out
