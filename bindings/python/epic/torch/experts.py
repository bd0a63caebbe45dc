# SPDX-License-Identifier: Apache-2.0
"""The MLP of this rank's experts, with gradients of rows and parameters.

No function of this module communicates with other ranks.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from epic import _native
from epic.errors import EpicArgumentError, EpicUnsupportedError
from epic.options import Experts, options_by_key
from epic.torch.arguments import (
    EpicFunction,
    assume_constant_result,
    check_floats,
    check_tensor,
    first_order_only,
    make_apply,
    mark_no_offload,
)
from epic.torch.groups import Group
from epic.torch.ops import (
    mlp_numbers,
    operator_numbers,
    refuse_gradient,
    translate_errors,
    write_out,
)
from epic.torch.plans import limit_number
from epic.torch.router import number_of
from epic.torch.scaled import (
    E4M3,
    has_mx_scales,
    quantize_rows,
    quantize_weight,
    transpose_scaled,
)

ops = torch.ops.epic

GroupedMm = Callable[[Tensor, Tensor, Tensor], Tensor]


class ExpertWeights(NamedTuple):
    """Parameters of this rank's experts.

    width is 2 * inner: the columns of gate, then those of up; with options.interleaved they
    alternate. With options.ungated width is inner.

    Attributes:
        w_gate_up: [local experts, hidden, width].
        w_down: [local experts, inner, hidden].
        b_gate_up: [local experts, width], or None.
        b_down: [local experts, hidden], or None.
        w_gate_up_scales: float32 [local experts, blocks of width, blocks of hidden], as `scaled`
            makes them. With scales both weights are float8_e4m3fn and transposed. Else None.
        w_down_scales: float32 [local experts, blocks of hidden, blocks of inner], or None.
    """

    w_gate_up: Tensor
    w_down: Tensor
    b_gate_up: Tensor | None = None
    b_down: Tensor | None = None
    w_gate_up_scales: Tensor | None = None
    w_down_scales: Tensor | None = None


TYPE_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
    E4M3: "e4m3",
}


def dtype_name(x: Tensor) -> str:
    """Return the name of a tensor's dtype in the options."""
    return TYPE_NAMES[x.dtype]


def type_of_weights(options: Experts, w: Tensor) -> str:
    """Return the name of the dtype that the weights w have in the products."""
    return "e4m3" if options.weight_type == "e4m3" else dtype_name(w)


def with_types(options: Experts, local: int, row_type: str, weight_type: str) -> Experts:
    """Fill in the number of experts and the dtypes of the tensors in the options.

    Raises:
        EpicArgumentError: The options contain another number or dtype.
    """
    if options.num_local_experts not in (0, local):
        raise EpicArgumentError(
            f"num_local_experts is {options.num_local_experts}: must be {local}, the number of "
            "experts of the weights"
        )
    for name, found in (("row_type", row_type), ("weight_type", weight_type)):
        if getattr(options, name) not in (None, found):
            raise EpicArgumentError(
                f"{name} is {getattr(options, name)!r}: must be {found!r}, as the tensors are, or "
                "None"
            )
    if "float64" in (row_type, weight_type) and row_type != weight_type:
        raise EpicArgumentError(
            f"the rows are {row_type} and the weights of the experts {weight_type}: both or "
            "neither must be float64; convert the rows or the layer"
        )
    return replace(options, num_local_experts=local, row_type=row_type, weight_type=weight_type)


@functools.cache
def compute_facts(
    options: str, local: int, row_type: str, weight_type: str, kept_type: str, on_gpu: bool
) -> tuple[Any, ...]:
    """Compute what experts() needs to call the operators.

    Args:
        options: Key of the options in options_by_key.
        local: Number of local experts.
        row_type: Dtype of the rows.
        weight_type: Dtype of the weights in the products.
        kept_type: Dtype of the weights in memory.
        on_gpu: Whether the core computes on a GPU.

    Returns:
        The last arguments of the operators experts and experts_backward, and the bytes that forward
        saves for backward: a fixed part, and a part for each slot.
    """
    whole = with_types(options_by_key[options], local, row_type, weight_type)
    if on_gpu and row_type == "float64":
        raise EpicUnsupportedError(
            "rows are float64: must be float32, bfloat16 or float16 on GPUs; float64 is supported "
            "on CPUs"
        )
    none, one = (
        int(_native.experts_memory(whole, slots, on_gpu).saved_bytes) for slots in (0, 1 << 20)
    )
    values = whole.numbers()
    narrow = values["row_type"] if on_gpu and kept_type in (row_type, "e4m3") else 0
    of_rows = {"row_type": values["row_type"]} if weight_type == "e4m3" else {}  # x is also e4m3
    passed = [
        operator_numbers(name, mlp_numbers("experts", values, **types))
        for name, types in (("experts", of_rows), ("experts_backward", {"grad_type": narrow}))
    ]
    return *passed, none, -(-(one - none) >> 20)


@assume_constant_result
def experts_facts(*key: Any) -> tuple[Any, ...]:
    """Return compute_facts(*key), which torch.compile treats as a constant.

    It is a separate function, because torch.compile would trace into one with functools.cache.
    """
    return compute_facts(*key)


def check_weights(
    options: Experts,
    weights: ExpertWeights,
    names: tuple[str, ...] = ExpertWeights._fields,
    local: int | None = None,
) -> None:
    """Raise an error if the weights have wrong shapes, or different dtypes.

    Args:
        options: The options.
        weights: The weights.
        names: Names of the first four weights in errors.
        local: Number of experts that the weights must have. None: the weights determine it.
    """
    for i, (name, x) in enumerate(zip(names[:4], weights[:4], strict=True)):
        if i < 2 or x is not None:
            check_tensor(name, x)
    hidden, inner, width = options.hidden, options.inner, options.width
    if weights.w_gate_up.dim() != 3:
        found = list(weights.w_gate_up.shape)
        raise EpicArgumentError(
            f"{names[0]} has the shape {found}: must be [experts, hidden, width]"
        )
    local = weights.w_gate_up.shape[0] if local is None else local
    dtype = weights.w_gate_up.dtype
    if dtype != E4M3:
        check_floats(names[0], weights.w_gate_up)
    shapes: list[tuple[int, ...]] = [(local, hidden, width), (local, inner, hidden)]
    if dtype == E4M3:
        shapes = [(local, width, hidden), (local, hidden, inner)]
    shapes += [(local, width), (local, hidden)]
    for name, x, shape in zip(names[:4], weights[:4], shapes, strict=True):
        if x is None:
            continue
        if tuple(x.shape) != shape:
            raise EpicArgumentError(f"{name} has the shape {list(x.shape)}: must be {list(shape)}")
        if x.dtype != dtype and (dtype != E4M3 or x is weights.w_down):
            raise EpicArgumentError(f"{name} is {x.dtype}: must be {dtype}, as w_gate_up")
    check_scales(dtype, weights)


def check_scales(dtype: torch.dtype, weights: Any) -> None:
    """Raise an error unless weights in e4m3 have scales and all others have none."""
    for name in ("w_gate_up_scales", "w_down_scales"):
        if (getattr(weights, name) is not None) != (dtype == E4M3):
            raise EpicArgumentError(
                f"{name} is {'None' if getattr(weights, name) is None else 'given'} and the "
                f"weights are {dtype}: must be given with float8_e4m3fn, and None with other "
                "types; epic.torch.scaled(weights) makes both"
            )
    if dtype == E4M3 and has_mx_scales(weights):
        raise EpicUnsupportedError(
            f"w_gate_up_scales is {weights.w_gate_up_scales.dtype}: MXFP8 weights are not "
            "supported, because the products of Hopper take one float32 scale for 128 x 128 "
            "numbers; convert them by epic.torch.scaled(weights), or exactly by "
            "epic.torch.unscaled(weights, torch.bfloat16)"
        )


def operator_inputs(
    x: Tensor, weight_type: str, weights: tuple[Tensor | None, ...]
) -> tuple[Tensor, tuple[Any, ...]]:
    """Return the rows and the other tensors of the operator experts: weights and scales.

    With weight_type "e4m3" it rounds rows and weights.
    """
    if weight_type != "e4m3":
        return x, (*weights, None)
    rows, scales = quantize_rows(x)
    return rows, (*round_weights(x, weights), scales)


def round_weights(x: Tensor, weights: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Return weights and scales with matrices rounded to e4m3, and biases in the dtype of x."""
    up, down, *biases, up_scales, down_scales = weights
    assert up is not None and down is not None
    if up_scales is None:
        up, up_scales = quantize_weight(up)
        down, down_scales = quantize_weight(down)
    wide = [None if b is None else b.to(x.dtype) for b in biases]
    return up, down, *wide, up_scales, down_scales


def weights_for_backward(
    x: Tensor, weight_type: str, weights: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """Return the weights for backward.

    Weights that are stored in e4m3 are transposed back. If the products of forward used rounded
    copies, backward uses the weights themselves, in the dtype of x.
    """
    up, down, *biases, up_scales, down_scales = weights
    if weight_type != "e4m3":
        return weights
    wide = [None if b is None else b.to(x.dtype) for b in biases]
    assert up is not None and down is not None
    if up_scales is None or down_scales is None:
        return up.to(x.dtype), down.to(x.dtype), *wide, None, None
    (up, up_scales), (down, down_scales) = (
        transpose_scaled(up, up_scales),
        transpose_scaled(down, down_scales),
    )
    return up, down, *wide, up_scales, down_scales


class RunExperts(EpicFunction):
    """The operator epic::experts with its gradient."""

    @staticmethod
    def forward(
        size: int,
        group: int,
        weight_type: str,
        numbers: tuple[tuple[Any, ...], tuple[Any, ...]],
        x: Tensor,
        expert_rows: Tensor,
        expert_tokens: Tensor,
        slots: Tensor | None,
        *weights: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Call the operator, which returns the rows, and the bytes that the core saves.

        Args:
            size: Number of bytes to save for backward.
            group: Number of the group, or 0.
            weight_type: Dtype of the weights in the products.
            numbers: The last arguments of the operators experts and experts_backward.
            x: Rows [slots, hidden].
            expert_rows: As for `experts`.
            expert_tokens: As for `experts`.
            slots: slot_weights, as for `experts`.
            *weights: The fields of ExpertWeights.
        """
        rows, given = operator_inputs(x, weight_type, weights)
        counts = (expert_rows, expert_tokens, slots)
        return ops.experts.default(rows, *counts, *given, size, group, *numbers[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], out: tuple[Tensor, Tensor]) -> None:
        """Save the input tensors and the second result, the saved bytes of the core."""
        _, group, ctx.weight_type, numbers, *tensors = inputs
        ctx.numbers = (group, *numbers[1])
        mark_no_offload(tensors[1])  # expert_rows, expert_tokens
        mark_no_offload(tensors[2])
        ctx.save_for_backward(*tensors, out[1])
        ctx.mark_non_differentiable(out[1])

    @staticmethod
    @first_order_only
    @translate_errors
    def backward(ctx: Any, d_y: Tensor, *_: Any) -> tuple[Any, ...]:
        """Return the gradients, in the dtypes of the inputs. Weights in e4m3 have none."""
        *inputs, saved = ctx.saved_tensors
        weights = weights_for_backward(inputs[0], ctx.weight_type, tuple(inputs[4:]))
        more = (saved, d_y.contiguous(), *ctx.numbers)
        d_x, *rest = ops.experts_backward.default(*inputs[:4], *weights, *more)
        pairs = zip(inputs[3:8], rest, strict=True)
        given = [None if x is None or x.dtype == E4M3 else d.to(x.dtype) for x, d in pairs]
        return None, None, None, None, d_x, None, None, *given, None, None


run_experts_apply = make_apply(RunExperts)


@translate_errors
def experts(
    options: Experts,
    rows: Tensor,
    expert_rows: Tensor,
    expert_tokens: Tensor,
    weights: ExpertWeights,
    slot_weights: Tensor | None = None,
    group: Group | None = None,
    *,
    max_sms: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Run the expert MLP on the slabs of a plan: rows [slots, hidden] -> [slots, hidden].

    No other rank takes part in this call. Only slots with a token are computed. In the result, the
    slots after the last slab are zero on CPUs. On GPUs these slots, and their gradients, may have
    any values; dispatch and combine do not read them.

    Args:
        options: Sizes, activation and weighting.
        rows: [slots, hidden], as dispatch returned them.
        expert_rows: [local experts] int32, from the plan: rows of each expert with padding.
        expert_tokens: [local experts] int32, from the plan: rows of each expert without padding.
        weights: Parameters of the local experts.
        slot_weights: [slots] float32 with weighting "early" or "input"; None with "late".
        group: For rows on a GPU, a group on that GPU. For rows on the CPU None is enough.
        max_sms: On GPUs the largest number of SMs of this call and its gradient; 0: all SMs, even
            if the group has a limit.
        out: Tensor with the shape of rows, into which the function writes. It returns this tensor,
            without a gradient.

    Returns:
        The results of the experts [slots, hidden], in the dtype of rows.

    Raises:
        EpicArgumentError: A shape, dtype or device is wrong.
        EpicUnsupportedError: The arguments are correct, but not supported on this device.

    Example:
        >>> import torch, epic.torch
        >>> options = epic.torch.Experts(hidden=8, inner=16)
        >>> weights = epic.torch.ExpertWeights(torch.randn(2, 8, 32), torch.randn(2, 16, 8))
        >>> counts = torch.tensor([3, 1], dtype=torch.int32)  # rows of each expert
        >>> epic.torch.experts(options, torch.randn(4, 8), counts, counts, weights).shape
        torch.Size([4, 8])
    """
    weights = ExpertWeights(*weights)
    check_floats("rows", rows)
    check_weights(options, weights)
    if rows.dim() != 2 or rows.shape[1] != options.hidden:
        raise EpicArgumentError(
            f"rows has the shape {list(rows.shape)}: must be [slots, {options.hidden}]"
        )
    if (slot_weights is not None) != (options.weighting != "late"):
        raise EpicArgumentError(
            f"slot_weights is {'None' if slot_weights is None else 'given'} and weighting is "
            f"{options.weighting!r}: must be given with weighting 'early' or 'input', and None "
            "with 'late'"
        )
    up = weights.w_gate_up
    number = limit_number(number_of(group, rows, "rows"), max_sms)
    on_gpu = group is not None and group.on_gpu
    kind = type_of_weights(options, up)
    kinds = (dtype_name(rows), kind, dtype_name(up))
    forward, backward, base, each = experts_facts(options.key, up.shape[0], *kinds, on_gpu)
    arrays = [None if w is None else w.contiguous() for w in weights]
    size = base + each * rows.shape[0]
    rows, counts = rows.contiguous(), (expert_rows, expert_tokens, slot_weights)
    if out is not None:
        refuse_gradient(rows, *counts, *arrays)
        x, given = operator_inputs(rows, kind, tuple(arrays))
        write_out(ops.experts_out.default, (x, *counts, *given, size, number, *forward), out, None)
        return out
    return run_experts_apply(size, number, kind, (forward, backward), rows, *counts, *arrays)[0]


# --------------------------------------------------- with a grouped product of the caller ----


def activate(options: Experts, z: Tensor) -> Tensor:
    """Apply the activation of the experts: z [rows, width] -> [rows, inner]."""
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


def bias_of_rows(bias: Tensor, slab: Any) -> Tensor:
    """Return the bias of each row's expert, [slots, n].

    Rows after the last slab get zeros that belong to no expert. So a NaN in these rows does not
    reach the gradient of a bias.

    Args:
        bias: [local experts, n].
        slab: [slots]: the local expert of each row. Rows after the last slab have the number of
            local experts.
    """
    return torch.cat([bias, torch.zeros_like(bias[:1])])[slab]


def mlp(
    options: Experts,
    grouped_mm: GroupedMm,
    x: Tensor,
    expert_rows: Tensor,
    w: ExpertWeights,
    slot_weights: Tensor | None = None,
) -> Tensor:
    """Run the experts with a grouped product of the caller.

    In the result, rows after the last slab may have any values. combine does not read them.

    Args:
        options: Sizes, activation and weighting.
        grouped_mm: The product, as for `MoE`.
        x: Rows [slots, hidden].
        expert_rows: [local experts] int32, from the plan.
        w: The weights.
        slot_weights: [slots] float32 with weighting "early" or "input"; None with "late".

    Returns:
        The results of the experts [slots, hidden], in the dtype of x.
    """
    ends = expert_rows.cumsum(0, dtype=torch.int32)
    slab = None
    if w.b_gate_up is not None or w.b_down is not None:
        slots = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
        # Slots after the last slab get the number of local experts.
        slab = torch.searchsorted(ends, slots, right=True)
    column = None if slot_weights is None else slot_weights[:, None].to(x.dtype)
    if options.weighting == "input" and column is not None:
        x = x * column
    z = grouped_mm(x, w.w_gate_up.to(x.dtype), ends)
    if w.b_gate_up is not None:
        z = z + bias_of_rows(w.b_gate_up.to(z.dtype), slab)
    a = activate(options, z)
    early = column if options.weighting == "early" else None
    a = a if early is None else a * early
    y = grouped_mm(a.to(x.dtype), w.w_down.to(x.dtype), ends)
    if w.b_down is not None:
        b = bias_of_rows(w.b_down.to(y.dtype), slab)
        y = y + (b if early is None else b * early)
    return y.to(x.dtype)


def slab_mm(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows of each expert by its weight, with one matmul for each expert.

    It is a simple grouped_mm for `MoE` and `moe`, which runs on every device. On GPUs the host
    waits for `ends`.

    Args:
        x: Rows [slots, n].
        w: Weights [local experts, n, m], of the dtype of x.
        ends: [local experts] int32: expert e has the rows ends[e - 1] to ends[e].

    Returns:
        The products [slots, m]; rows after the last slab are zero.

    Example:
        >>> import torch, epic.torch
        >>> x, w = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[[1.0]], [[10.0]]])
        >>> epic.torch.slab_mm(x, w, torch.tensor([1, 3], dtype=torch.int32)).tolist()
        [[1.0], [20.0], [30.0]]
    """
    out = x.new_zeros((x.shape[0], w.shape[2]))
    begin = 0
    for expert, end in enumerate(map(int, ends.cpu())):  # torch.func does not support tolist()
        out[begin:end] = x[begin:end] @ w[expert]
        begin = end
    return out
