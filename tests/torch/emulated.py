# SPDX-License-Identifier: Apache-2.0
"""Tests epic.torch on CUDA contexts of the GPU emulator (tests/emulator), against host contexts.

The emulator runs the threads of a GPU on the CPU, and its GPU memory is host memory. The ranks are
two threads, each with an emulated GPU. Tensors are CPU tensors for torch. So torch frees their
memory when an operator returns, without waiting for a stream. Operators must be complete by then,
so CUDA_LAUNCH_BLOCKING must be set. tests/torch/gpu tests streams, captures and torch's own CUDA.
The last line that this program prints is "right".
"""

import ctypes
import itertools
import os
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "gpu"), str(HERE.parent / "jax")]

import torch
import vllm_cases
from torch.utils._python_dispatch import TorchDispatchMode

import epic.torch
from epic.torch import ExpertWeights, groups, windows
from epic.torch.experts import mlp, slab_mm
from epic.torch.ops import argument_names
from epic.torch.scaled import expand_scales, quantize_rows, quantize_weight
from parts import (
    FORMS,
    HIDDEN,
    LAYER,
    SIZES,
    UNEVEN,
    Data,
    choices,
    numbers,
    run_form,
    same,
    through,
)
from reference import relative

RANKS = 2
COMMS = (ctypes.c_void_p * RANKS)()  # communicators of the NCCL of tests/emulator
GPU = ctypes.CDLL("libemulator.so")  # preloaded in place of the CUDA runtime
WIDE = epic.torch.threads(RANKS)  # of the group for windows
open_on_host = groups.open_on


def open_on(device: Any, bootstrap: Any, config: Any) -> int:
    """Open a context for each rank on its emulated GPU, each in a thread of its own.

    Groups of one rank share another GPU.
    """
    is_alone = bootstrap.struct.num_ranks == 1
    assert GPU.cudaSetDevice(RANKS if is_alone else bootstrap.struct.rank) == 0
    return open_on_host(device, bootstrap, config)


# ------------------------------------------------------------------------------- cases ----


def steps_of(group: epic.torch.Group) -> list[torch.Tensor]:
    """Return the results of a dispatch and a combine, and their gradients."""
    found = []
    for fused in (False, True):
        x, w, ids, ct = Data(UNEVEN[:2] + (0, 0)).mine(group.rank)
        out = through(group, fused)(x, w, ids)
        found += [out.detach(), *torch.autograd.grad(out, (x, w), ct)]
    return found


def case_steps(on_gpu: epic.torch.Group, on_host: epic.torch.Group) -> None:
    """Check that single steps return the bits of the host."""
    assert same(steps_of(on_gpu), steps_of(on_host))


def case_max_sms(on_gpu: epic.torch.Group, on_host: epic.torch.Group) -> None:
    """Check that calls limited to one SM return the host's bits, and a layer the same values."""
    results = []
    for group, limit in ((on_gpu, 1), (on_host, 0)):
        found = []
        for fused in (False, True):
            x, w, ids, ct = Data(UNEVEN[:2] + (0, 0)).mine(group.rank)
            out = through(group, fused, max_sms=limit)(x, w, ids)
            found += [out.detach(), *torch.autograd.grad(out, (x, w), ct)]
        results.append([*found, epic.torch.sum(group, numbers(9, 5), max_sms=limit)])
    assert same(*results)
    options = epic.torch.Moe.of(num_experts=8, top_k=2, hidden=16, inner=24)
    layer = epic.torch.MoE(on_gpu, options)
    x = numbers(40 + on_gpu.rank, 6, 16)
    mask = torch.ones(6, dtype=torch.bool)
    outs = []
    for limit, more in ((0, None), (1, None), (0, mask), (1, mask)):
        given = (on_gpu, options, x, layer.weights())
        outs.append(epic.torch.moe(*given, max_sms=limit, token_mask=more).out)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[2], outs[3])


def case_capacity_limit(on_gpu: epic.torch.Group, on_host: epic.torch.Group) -> None:
    """Check that plans with a limit in a tensor return the bits of plans with that capacity."""
    x, w, ids, ct = Data(UNEVEN[:2] + (0, 0)).mine(on_gpu.rank)
    layer = epic.torch.Layer(8, ids.shape[-1], overflow="drop")
    for slots in (1, 5, 9):
        limit = torch.tensor(slots, dtype=torch.int32)
        results = []
        for group, more in ((on_gpu, {"capacity_limit": limit}), (on_host, {"capacity": slots})):
            plan, recv, slot = epic.torch.plan_dispatch(group, layer, ids, x, w, **more)
            out = epic.torch.combine(plan, recv, slot)
            counts = [plan.expert_rows, plan.has_overflow]
            results.append([out.detach(), *torch.autograd.grad(out, (x, w), ct), *counts])
        assert same(*results)


def case_int64_counts(on_gpu: epic.torch.Group, on_host: epic.torch.Group) -> None:
    """Check counts in int64, with and without an alignment, in plan and in plan_dispatch."""
    x, w, ids, _ = Data(UNEVEN[:2] + (0, 0)).mine(on_gpu.rank)
    for layer in (LAYER, epic.torch.Layer(8, ids.shape[-1], alignment=3)):
        results = []
        for group, dtype in ((on_gpu, torch.int64), (on_host, torch.int32)):
            more: dict[str, Any] = {"counts_dtype": dtype}
            plans = [
                epic.torch.plan(group, layer, ids, **more),
                epic.torch.plan_dispatch(group, layer, ids, x, w, **more)[0],
            ]
            assert all(plan.expert_rows.dtype == dtype for plan in plans)
            counts = [v for p in plans for v in (p.expert_rows, p.expert_tokens, p.load, p.demand)]
            results.append([v.to(torch.int32) for v in counts])
        assert same(*results)


def case_layer_limit(on_gpu: epic.torch.Group, on_host: epic.torch.Group) -> None:
    """Check that layers with a limit in a tensor agree with layers with that capacity."""
    wish = {**WISH, "alignment": 1, "overflow": "drop"}
    for slots in (1, 5, 9):
        for mask in (None, torch.arange(6) % 3 != 1):
            results = []
            limit = torch.tensor(slots, dtype=torch.int32)
            for group, size, more in (
                (on_gpu, 12, {"capacity_limit": limit}),
                (on_host, slots, {}),
            ):
                layer = epic.torch.MoE(group, epic.torch.Moe.of(**wish, capacity=size))
                x = numbers(30 + group.rank, 6, 16).requires_grad_()
                out, loss = layer(x, token_mask=mask, **more)
                (out.square().sum() + loss).backward()
                assert x.grad is not None
                results.append([out, loss, x.grad, *(p.grad for p in layer.parameters())])
            agree(results[0], results[1], 2e-5)


def case_windows(on_gpu: epic.torch.Group, on_host: epic.torch.Group) -> None:
    """Check steps of top-1 whose outputs are windows: new ones, registered ones, and a mixture."""
    rank, layer = on_gpu.rank, epic.torch.Layer(8, 1)
    on_gpu.close()  # it has all SMs
    many = 1100  # with fewer tokens all rows go through staging
    x, w, ids, ct = Data((many, many - 70, 0, 0)).mine(rank)
    mine = (x, w[:, :1].detach().requires_grad_(), ids[:, :1].contiguous(), ct)
    sizes: dict[str, Any] = {**SIZES, "max_tokens": many, "device": "cpu", "staging_bytes": -1}
    with epic.torch.Group(bootstrap=WIDE[rank], backend="p2p", **sizes) as group:
        slots = group.capacity_bound(layer)
        recv = epic.torch.window((slots, HIDDEN), torch.float32, group)
        out = epic.torch.window((many, HIDDEN), torch.float32, group)
        assert not recv.any() and not out.any()
        other = device_memory(4 * slots * HIDDEN).view(torch.float32).view(slots, HIDDEN)
        epic.torch.register_window(other if rank else other[:0], group)
        wanted = through_windows(group, layer, mine, None, None)
        for rows in (recv, other):
            for result in (None, out[: x.shape[0]]):
                assert same(wanted, through_windows(group, layer, mine, rows.fill_(9), result))
        # The address of memory of the host, which torch.ones() allocates, is not of a GPU.
        word = "rank 1: the tensor's memory is 0x" if rank else "rank 1: "
        bad = torch.ones(5) if rank else other
        expect_error(lambda: epic.torch.register_window(bad, group), word)
    del on_host


def through_windows(
    group: epic.torch.Group, layer: Any, mine: Any, rows: Any, result: Any
) -> list[torch.Tensor]:
    """Return the results of a step and its gradients, with outputs in `rows` and `result`."""
    x, w, ids, ct = mine
    plan = epic.torch.plan(group, layer, ids)
    into = None if rows is None else (rows, torch.empty(len(rows)))
    recv, slot = epic.torch.dispatch(plan, x, w, out=into)
    used = int(plan.expert_rows.sum())
    out = epic.torch.combine(plan, torch.sin(recv), slot, out=result)
    found = [recv[:used], out, *torch.autograd.grad(out, (x, w), ct)]
    return [v.detach().clone() for v in found]


def device_memory(count: int) -> torch.Tensor:
    """Return memory of an emulated GPU as a CPU tensor. It is not freed."""
    at = ctypes.c_void_p()
    assert GPU.cudaMalloc(ctypes.byref(at), ctypes.c_size_t(count)) == 0 and at.value
    octets = (ctypes.c_uint8 * count).from_address(at.value)
    return torch.frombuffer(octets, dtype=torch.uint8)


def case_nccl(on_gpu: epic.torch.Group, on_host: epic.torch.Group) -> None:
    """Check groups over an NCCL communicator: on GPUs, and on CPUs with a pointer of ctypes."""
    rank = on_gpu.rank
    on_gpu.close()  # it has all SMs
    wish: dict[str, Any] = {**SIZES, "device": "cpu"}  # torch has no CUDA here
    for backend, comm in (("p2p", COMMS[rank]), ("threads", ctypes.c_void_p(COMMS[rank]))):
        over = epic.torch.Nccl(comm)
        assert over.comm == COMMS[rank]
        with epic.torch.Group(bootstrap=over, backend=backend, **wish) as group:
            assert (group.rank, group.num_ranks, group.backend) == (rank, RANKS, backend)
            assert same(steps_of(group), steps_of(on_host))
    other = epic.torch.Nccl(COMMS[1 - rank])
    device = f"the current device is {rank}: must be {1 - rank}"
    expect_error(lambda: epic.torch.Group(bootstrap=other, **wish), device)


def case_forms(on_gpu: epic.torch.Group, on_host: epic.torch.Group) -> None:
    """Check that flat rows, dropping, tree sums and placed experts return the host's bits."""
    for name in FORMS:
        assert same(run_form(on_gpu, name), run_form(on_host, name)), name


def case_experts(on_gpu: epic.torch.Group, on_host: epic.torch.Group) -> None:
    """Check the experts of the core on the GPU, with arbitrary values after the last slab."""
    for weighting in ("late", "early", "input"):
        options = epic.torch.Experts(hidden=16, inner=24, weighting=weighting, activation="gelu")
        results = []
        for group in (on_gpu, on_host):
            shapes = [(4, 16, 48), (4, 24, 16), (4, 48), (4, 16)]
            w = [numbers(i, *s).requires_grad_() for i, s in enumerate(shapes)]
            plan = epic.torch.plan(group, LAYER, choices(7 + group.rank, 6))
            used = int(plan.expert_rows.sum())
            x = numbers(5, plan.capacity, 16)
            x[used:] = torch.nan
            x.requires_grad_()
            slots = None if weighting == "late" else numbers(6, plan.capacity).requires_grad_()
            counts = (plan.expert_rows, plan.expert_tokens)
            weights = epic.torch.ExpertWeights(*w)
            y = epic.torch.experts(options, x, *counts, weights, slots, group)
            y[:used].square().sum().backward()
            assert x.grad is not None
            of_slots = [] if slots is None else [slots.grad[:used]]
            results.append([y[:used], x.grad[:used], *of_slots, *(v.grad for v in w)])
        agree(results[0], results[1])


def agree(a: list[Any], b: list[Any], most: float = 1e-5) -> None:
    """Compare with a tolerance, because GPU products sum in another order than the host's."""
    worst = [relative(x.detach().double(), y.detach().double()) for x, y in zip(a, b, strict=True)]
    assert max(worst) < most, worst


QUICK = "quick" in sys.argv  # checks fewer combinations of options
WISH: dict[str, Any] = {
    "num_experts": 8, "top_k": 2, "hidden": 16, "inner": 24, "normalize": "sum",
    "balance_coeff": 0.1, "z_coeff": 0.1, "alignment": 4,
}  # fmt: skip
TABLE = [1, 1, 0, 1, 0, 0, 0, 1]
TWELVE = [0, 3, 1, 2, 3, 4, 5, 3, 6, 7, 0, 4]
LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "shared": ({"shared": epic.torch.Experts(1, 16, 12)}, {}),
    "biases": ({"weighting": "early"}, {"expert_biases": True, "gate_bias": True}),
    "bias": ({"score": "sigmoid"}, {"bias_rate": 0.1}),
    "gated": ({"shared": epic.torch.Experts(1, 16, 12)}, {"shared_gate": True}),
    "zero experts": ({"zero_experts": 3}, {}),
    "tree": ({"sum_order": "tree"}, {}),
    "replicas": ({"num_experts": 12, "num_logical": 8}, {"logical_of_expert": TWELVE}),
    "quantized": ({"quantize": "1x128"}, {}),
}


def layer_of(
    group: epic.torch.Group, name: str, masked: bool, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Return the results and gradients of a layer."""
    wish, more = LAYERS[name]
    layer = epic.torch.MoE(group, epic.torch.Moe.of(**{**WISH, **wish}), dtype=dtype, **more)
    x = numbers(30 + group.rank, 6, 16, dtype=dtype).requires_grad_()
    mask = torch.arange(6) % 3 != 1 if masked else None
    out, loss = layer(x, token_mask=mask)
    (out.square().sum() + loss).backward()
    layer.sum_gradients()
    assert x.grad is not None
    return [out, loss, x.grad, *(p.grad for p in layer.parameters())]


def case_layers(on_gpu: epic.torch.Group, on_host: epic.torch.Group) -> None:
    """Check the layer of the core on the GPU, and layers that Python composes of several calls:
    with a token mask, and with rows that EPIC quantizes. None of them needs a product of the
    caller."""
    for name in LAYERS:
        for masked in (False, True) if name == "plain" or not QUICK else (False,):
            with Counted() as seen:
                got = layer_of(on_gpu, name, masked)
            whole = name != "quantized" and not masked
            assert seen.calls == (2 if whole else 0), name
            assert seen.expert_groups == (set() if whole else {on_gpu.number}), name
            agree(got, layer_of(on_host, name, masked), 2e-5)


def case_narrow(on_gpu: epic.torch.Group, on_host: epic.torch.Group) -> None:
    """Check that bfloat16 weights get bfloat16 gradients from the GPU, in layer and experts."""
    for masked in (False, True):
        with Counted() as seen:
            got = layer_of(on_gpu, "shared", masked, torch.bfloat16)
        assert seen.weight_dtypes == {torch.bfloat16}, seen.weight_dtypes
        agree(got, layer_of(on_host, "shared", masked, torch.bfloat16), 3e-2)


class Counted(TorchDispatchMode):
    """Record the calls of the whole layer, the groups that computed experts, and the dtypes of the
    gradients of w_gate_up."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.expert_groups: set[int] = set()
        self.weight_dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func in (torch.ops.epic.moe.default, torch.ops.epic.moe_backward.default)
        if func == torch.ops.epic.experts.default:
            self.expert_groups.add(args[argument_names("experts").index("group")])
        found = func(*args, **(kwargs or {}))
        if func in (torch.ops.epic.moe_backward.default, torch.ops.epic.experts_backward.default):
            names = [r.name for r in func._schema.returns]
            self.weight_dtypes.add(found[names.index("d_w_gate_up")].dtype)
        return found


def case_placed(on_gpu: epic.torch.Group, on_host: epic.torch.Group) -> None:
    """Check a layer whose experts are placed by a table."""
    options = epic.torch.Moe.of(**WISH, capacity=64)
    results = []
    for group in (on_gpu, on_host):
        layer = epic.torch.MoE(group, options)
        x = numbers(40 + group.rank, 6, 16).requires_grad_()
        out = epic.torch.moe(group, options, x, layer.weights(), rank_of_expert=TABLE).out
        results.append([out, *torch.autograd.grad(out.square().sum(), (x, layer.w_down))])
    agree(results[0], results[1])


def case_replicas(on_gpu: epic.torch.Group, on_host: epic.torch.Group) -> None:
    """Check that sums over replicas have the host's bits."""
    layer = epic.torch.Layer(12, 3, num_logical=8)
    results = []
    for group in (on_gpu, on_host):
        plan = epic.torch.plan(group, layer, choices(8, 6), logical_of_expert=TWELVE)
        sums = epic.torch.sum_replicas(plan, numbers(50 + group.rank, 6, 3, 7))
        assert plan.logical_load is not None
        results.append([sums, plan.load, plan.logical_load])
    assert same(*results)


def run_placed(layer: epic.torch.MoE) -> list[torch.Tensor]:
    """Return the output and gradients of a layer that has a placement."""
    x = numbers(60 + layer.group.rank, 6, 16).requires_grad_()
    layer.zero_grad()
    out, loss = layer(x)
    (out.square().sum() + loss).backward()
    assert x.grad is not None and layer.w_down.grad is not None
    return [out, loss, x.grad, layer.w_down.grad]


def case_members(on_gpu: epic.torch.Group, on_host: epic.torch.Group) -> None:
    """Check that rank 0 goes on alone after rank 1 has left, first without absent experts."""
    options = epic.torch.Moe.of(**{**WISH, "num_experts": 12}, num_logical=5, drop_absent=True)
    table = [0, 1, 2, -1, 1, -1, 3, 0, 3, 4, 2, -1]  # 3 and 4 are on rank 1 only
    results: list[list[torch.Tensor]] = []
    for group in (on_gpu, on_host):
        placement = epic.torch.Placement(group, options.layer, table)
        layer = epic.torch.MoE(group, options, logical_of_expert=placement)
        found = run_placed(layer)
        if group.rank == 1:
            group.leave()
            continue
        assert group.shrink(step=4).gone == (1,) and placement.absent == (3, 4)
        found += run_placed(layer)
        loaded: list[tuple[int, int]] = []
        placement.restore(lambda *moved, to=loaded: to.append(moved))
        assert sorted(logical for logical, _ in loaded) == [3, 4] and placement.absent == ()
        results.append(found + run_placed(layer))
    if results:
        agree(results[0], results[1], 2e-5)


def case_no_shrink(on_gpu: epic.torch.Group, on_host: epic.torch.Group) -> None:
    """Check that without can_shrink a GPU group cannot shrink, and a CPU group can."""
    wanted = 'can_shrink is False, and the backend is "p2p": only groups with can_shrink=True'
    expect_error(on_gpu.shrink, wanted)
    assert on_host.shrink().generation == 1


def case_distinct(on_gpu: epic.torch.Group, _: epic.torch.Group) -> None:
    """Check that a token that names an expert twice is reported by check() of every rank."""
    layer = epic.torch.Layer(8, 3, distinct=True)
    ids = choices(9 + on_gpu.rank, 6, none=0)
    if on_gpu.rank == 1:
        ids[4] = torch.tensor([6, 1, 6])
    epic.torch.plan(on_gpu, layer, ids)
    expect_error(on_gpu.check, "token 4")


def case_refused(on_gpu: epic.torch.Group, _: epic.torch.Group) -> None:
    """Check that float64 rows are refused, with an error that names the dtype."""
    layer = epic.torch.MoE(on_gpu, epic.torch.Moe.of(**WISH), dtype=torch.float64)
    x = torch.ones(2, 16, dtype=torch.float64)
    expect_error(lambda: layer(x), "row_type is float64")
    expect_error(lambda: layer(x, torch.tensor([True, False])), "float64")
    counts = torch.zeros(4, dtype=torch.int32)
    w = epic.torch.ExpertWeights(layer.w_gate_up, layer.w_down)
    mlp = layer.options.experts
    expect_error(
        lambda: epic.torch.experts(mlp, x, counts, counts, w, group=on_gpu), "rows are float64"
    )


def expect_error(call: Callable[[], Any], word: str) -> None:
    """Check that the call raises an error that contains the word."""
    try:
        call()
    except epic.torch.EpicError as error:
        assert word in str(error), error
        return
    raise AssertionError("the call raised no error")


class RoundedMm(torch.autograd.Function):
    """Compute products of e4m3 experts in float64, as expected results.

    Rows and weights are rounded to e4m3 and gradients ignore the rounding. If the weights are kept
    in e4m3, the gradients of rows are rounded, too.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, ends: Any, frozen: bool) -> torch.Tensor:
        """Multiply the rows of each slab by the weights of its expert."""
        ctx.ends, ctx.frozen = [0, *ends.tolist()], frozen
        ctx.save_for_backward(x, w)
        return by_slabs(ctx.ends, rounded_rows(x), rounded_weight(w))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Return the gradients of rows and weights."""
        (x, w), (d,) = ctx.saved_tensors, gradients
        d_w = [x[a:b].mT @ d[a:b] for a, b in itertools.pairwise(ctx.ends)]
        way = (rounded_rows(d), rounded_weight(w)) if ctx.frozen else (d, w)
        return by_slabs(ctx.ends, way[0], way[1].mT), torch.stack(d_w), None, None


def by_slabs(ends: list[int], x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of each expert by its matrix, with zeros after the last slab."""
    out = x.new_zeros(x.shape[0], w.shape[2])
    for e, (a, b) in enumerate(itertools.pairwise(ends)):
        out[a:b] = x[a:b] @ w[e]
    return out


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """Return the values of the rows after quantizing them as for sending."""
    rows, scales = quantize_rows(x)
    return rows.double() * expand_scales(scales.double(), x.shape[1])


def rounded_weight(w: torch.Tensor) -> torch.Tensor:
    """Return the values of the weights after rounding them to e4m3."""
    found, scales = quantize_weight(w)
    return (found.double() * expand_scales(scales.double(), *found.shape[1:])).mT


def rounded_mm(frozen: bool) -> Any:
    """Return the product in the form that grouped_mm= accepts."""
    return lambda x, w, ends: RoundedMm.apply(x, w, ends, frozen)


# not multiples of 128, so that the last blocks are incomplete
SCALED: dict[str, Any] = {"hidden": 144, "inner": 136}
KINDS = ((torch.float32, 1e-5), (torch.bfloat16, 1e-2))


def case_e4m3(on_gpu: epic.torch.Group, _: epic.torch.Group) -> None:
    """Check e4m3 experts against dequantized weights in float64, rounded in each call or once."""
    for (dtype, most), weighting, frozen in (
        (KINDS[0], "late", False), (KINDS[0], "input", False), (KINDS[1], "early", True),
    ):  # fmt: skip
        options = epic.torch.Experts(**SCALED, weighting=weighting, weight_type="e4m3")
        shapes = [(4, 144, 272), (4, 136, 144), (4, 272), (4, 144)]
        w = [numbers(i, *s, dtype=dtype) / s[-2] ** 0.5 for i, s in enumerate(shapes)]
        weights = epic.torch.ExpertWeights(*(v.requires_grad_() for v in w))
        plan = epic.torch.plan(on_gpu, LAYER, choices(7 + on_gpu.rank, 6))
        used = int(plan.expert_rows.sum())
        x = numbers(5, plan.capacity, 144, dtype=dtype).requires_grad_()
        slots = None if weighting == "late" else numbers(6, plan.capacity)
        # With weighting "input", the gradient that arrives here is that of the rounded product.
        if slots is not None:
            slots.requires_grad_(weighting == "early")
        counts, ct = (plan.expert_rows, plan.expert_tokens), numbers(8, used, 144, dtype=dtype)
        kept = with_tokens(plan)
        given = epic.torch.scaled(weights) if frozen else weights
        leaves = [x, *(w[2:] if frozen else w), *([slots] if weighting == "early" else [])]
        y = epic.torch.experts(options, x * kept[:, None], *counts, given, slots, on_gpu)
        got = torch.autograd.grad(y[:used], leaves, ct * kept[:used, None])
        wide = epic.torch.Experts(**SCALED, weighting=weighting)
        true = [v.detach().double().requires_grad_() for v in leaves]
        rest = true[1:3] if frozen else true[1:5]
        every = [*(v.detach().double() for v in w[:2]), *rest] if frozen else rest
        scale = true[-1] if weighting == "early" else slots
        rows = true[0] * kept[:, None]
        mine = epic.torch.ExpertWeights(*every)
        wanted = mlp(wide, rounded_mm(frozen), rows, counts[0], mine, scale)
        d = torch.autograd.grad(wanted[:used], true, ct.double() * kept[:used, None])
        kept = kept[:used]
        if weighting == "early":  # values after the last slab are undefined
            got, d = ([*v[:-1], v[-1][:used]] for v in (got, d))
        agree([y[:used] * kept[:, None], *got], [wanted[:used] * kept[:, None], *d], most)
        plain = mlp(wide, slab_mm, rows, counts[0], mine, scale)[:used] * kept[:, None]
        assert relative(plain.detach(), wanted[:used].detach() * kept[:, None]) > 1e-3


def with_tokens(plan: epic.torch.Plan) -> torch.Tensor:
    """Return 1 for each slot that contains a token, else 0."""
    found, begin = torch.zeros(plan.capacity), 0
    for size, count in zip(plan.expert_rows.tolist(), plan.expert_tokens.tolist(), strict=True):
        found[begin : begin + count] = 1
        begin += size
    return found


def case_e4m3_layer(on_gpu: epic.torch.Group, on_host: epic.torch.Group) -> None:
    """Check an e4m3 layer of the core, a composed one, and one with weights kept in e4m3."""
    wish = {**WISH, **SCALED, "weight_type": "e4m3"}
    mask = torch.arange(6) % 3 != 1
    shared = {"shared": epic.torch.Experts(1, 144, 12)}
    cases: list[tuple[bool, Any, Any]] = [(False, mask, {}), (True, None, {})]
    if not QUICK:
        cases += [(False, None, {}), (False, None, shared)]
    for frozen, masked, more in cases:
        options = epic.torch.Moe.of(**wish, **more)
        layer = epic.torch.MoE(on_gpu, options, expert_biases=True, seed=0)
        x, ct = numbers(30 + on_gpu.rank, 6, 144).requires_grad_(), numbers(31, 6, 144)
        leaves = [v for n, v in layer.named_parameters() if not (frozen and n in FROZEN)]
        given = epic.torch.scaled(layer.weights()) if frozen else layer.weights()
        found = epic.torch.moe(on_gpu, options, x, given, token_mask=masked)
        got = torch.autograd.grad((found.out * ct).sum() + found.loss, (x, *leaves))
        # The core's layer computes the gradient of a choice's weight at the activation.
        place = {"weighting": "early" if masked is None else "late"}
        wide = epic.torch.Moe.of(**{**WISH, **SCALED, **more, **place})
        named = {n: v.detach().double().requires_grad_() for n, v in layer.named_parameters()}
        mine, rows = epic.torch.MoeWeights(**named), x.detach().double().requires_grad_()
        true = [v for n, v in named.items() if not (frozen and n in FROZEN)]
        by: dict[str, Any] = {"grouped_mm": rounded_mm(frozen), "token_mask": masked}
        wanted = epic.torch.moe(on_host, wide, rows, mine, **by)
        d = torch.autograd.grad((wanted.out * ct).sum() + wanted.loss, (rows, *true))
        agree([found.out, *got], [wanted.out, *d], 3e-4)


FROZEN = ("w_gate_up", "w_down")


def case_e4m3_refused(on_gpu: epic.torch.Group, on_host: epic.torch.Group) -> None:
    """Check that e4m3 experts are refused on host contexts and with a product of the caller."""
    options = epic.torch.Moe.of(**WISH, weight_type="e4m3")
    x, counts = torch.ones(2, 16), torch.zeros(4, dtype=torch.int32)
    layer = epic.torch.MoE(on_host, options)
    for weights in (layer.weights(), epic.torch.scaled(layer.weights())):
        expect_error(partial(epic.torch.moe, on_host, options, x, weights), "weight_type is e4m3")
        w = epic.torch.ExpertWeights(*(getattr(weights, n) for n in ExpertWeights._fields))
        run = partial(epic.torch.experts, options.experts, x, counts, counts, w)
        expect_error(run, "weight_type is e4m3: it is supported on CUDA contexts")
    wish = (on_gpu, options, x, layer.weights())
    expect_error(lambda: epic.torch.moe(*wish, grouped_mm=slab_mm), "grouped_mm with")
    half = layer.weights()._replace(w_gate_up_scales=torch.ones(4, 1, 1))
    expect_error(
        lambda: epic.torch.moe(on_gpu, options, x, half),
        "w_gate_up_scales is given and the weights are",
    )


def case_invariant(on_gpu: epic.torch.Group, _: epic.torch.Group) -> None:
    """Check that no bit of a token depends on its batch or rank, with experts in e4m3.

    test_invariance.py checks that check_invariance finds bits that differ.
    """
    options = epic.torch.Moe.of(
        num_experts=4, top_k=2, **SCALED, weight_type="e4m3", invariant=True
    )
    report = epic.torch.check_invariance(epic.torch.MoE(on_gpu, options, dtype=torch.bfloat16))
    assert report.is_invariant and report.batches == (32, 7, 2, 1), report


def invariant_e4m3_step(group: epic.torch.Group, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the results and all gradients of a layer with e4m3 experts, for this rank of a group.

    The group has 10 tokens, in blocks of 2 or 3.
    """
    options = epic.torch.Moe.of(
        num_experts=4, top_k=3, **SCALED, weight_type="e4m3", invariant=True, z_coeff=0.1,
        shared=epic.torch.Experts(1, 144, 16),
    )  # fmt: skip
    layer = epic.torch.MoE(group, options, seed=0, dtype=dtype)
    count = 10 // group.num_ranks
    mine = slice(group.rank * count, (group.rank + 1) * count)
    x, ct = (numbers(i, 10, 144, dtype=dtype)[mine] for i in (40, 41))
    named = dict(layer.named_parameters())
    found = epic.torch.moe(group, options, x.requires_grad_(), layer.weights(), sum_gradients=True)
    got = torch.autograd.grad((found.out * ct).sum() + found.loss, (x, *named.values()))
    results = {"out": found.out.detach(), "x": got[0]}
    return results | dict(zip(named, got[1:], strict=True))


def case_e4m3_ranks(on_gpu: epic.torch.Group, _: epic.torch.Group) -> None:
    """Check that no bit of a layer with e4m3 experts differs between one rank and two ranks."""
    rank = on_gpu.rank
    for dtype in (torch.float32, torch.bfloat16):
        found = invariant_e4m3_step(on_gpu, dtype)
        where: dict[str, Any] = {"backend": "p2p", "max_sms": 2}
        assert GPU.cudaSetDevice(RANKS) == 0
        with epic.torch.Group(bootstrap=epic.torch.threads(1)[0], **where, **SIZES) as alone:
            wanted = invariant_e4m3_step(alone, dtype)
        assert GPU.cudaSetDevice(rank) == 0
        for name, value in found.items():
            whole = wanted[name]
            if value.shape != whole.shape:  # tokens or experts, of which each rank has its part
                whole = whole[rank * len(value) : (rank + 1) * len(value)]
            assert torch.equal(value, whole) and value.any(), (name, dtype)


def case_vllm(on_gpu: epic.torch.Group, _: epic.torch.Group) -> None:
    """Check the exchange of epic.vllm, with idle ranks and in e4m3; without graphs."""
    for hidden, quant, limit in ((HIDDEN, None, 1e-5), (128, vllm_cases.E4M3, 0.08)):
        layer = vllm_cases.make_exchange(on_gpu, hidden, torch.float32)
        assert layer.is_static
        for seed, sizes in enumerate([(4, 4), (6, 1), (1, 1), (4, 4)]):
            step = vllm_cases.Step(layer, sizes, hidden, torch.float32)
            step.draw(seed)
            step.run(quant)
            step.check(limit)


CASES = {n.removeprefix("case_"): f for n, f in list(globals().items()) if n[:5] == "case_"}
# "invariant" uses as many tokens as its group allows.
OTHER_OPTIONS: dict[str, dict[str, Any]] = {
    "invariant": {"max_tokens": 32},
    "members": {"can_shrink": True},
}


# ------------------------------------------------------------------------------- ranks ----


def run(rank: int, bootstraps: dict[Any, Any], names: list[str]) -> None:
    """Run all cases of one rank."""
    assert GPU.cudaSetDevice(rank) == 0
    for name in names:
        on_gpu, on_host = (
            epic.torch.Group(
                bootstrap=bootstraps[name, backend][rank],
                backend=backend,
                **SIZES | OTHER_OPTIONS.get(name, {}),
            )
            for backend in ("p2p", "threads")
        )
        with on_gpu, on_host:
            CASES[name](on_gpu, on_host)
        if rank == 0:
            print(name, flush=True)


def main() -> int:
    """Run the named cases, or all. The argument "quick" selects fewer combinations."""
    torch.set_num_threads(1)
    groups.open_on = open_on
    groups.choose_backend = lambda device, requested: requested
    windows.new_memory = lambda group, count: (device_memory(count).zero_(), None)
    names = [name for name in sys.argv[1:] if name != "quick"] or list(CASES)
    if "nccl" in names:
        assert ctypes.CDLL(os.environ["EPIC_NCCL"]).ncclCommInitAll(COMMS, RANKS, None) == 0
    bootstraps = {(n, b): epic.torch.threads(RANKS) for n in names for b in ("p2p", "threads")}
    failures = []

    def rank_of(rank: int) -> None:
        try:
            run(rank, bootstraps, names)
        except BaseException:
            failures.append(f"rank {rank}: {traceback.format_exc()}")

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("\n".join(failures) or "right")
    return len(failures)


if __name__ == "__main__":
    sys.exit(main())
