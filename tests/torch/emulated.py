# SPDX-License-Identifier: Apache-2.0
"""epic.torch over CUDA contexts on a GPU of threads (tests/emulator), whose memory is the host's:
what the core does on GPUs, called through the operators, against host contexts.

Two threads are ranks with a GPU each.  Torch knows no stream to wait for, and gives memory back
when an operator returns: CUDA_LAUNCH_BLOCKING is needed.  Streams, captures and torch's own CUDA
are left to tests/torch/gpu.  The last line is "right"."""

import ctypes
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "jax")]

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import epic.torch
from epic.torch import groups
from epic.torch.ops import argument_names
from parts import (
    FORMS,
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
GPU = ctypes.CDLL("libemulator.so")  # preloaded, in the place of CUDA's
open_on_host = groups.open_on


def open_on(device: Any, meet: Any, config: Any) -> int:
    """Each rank on its GPU: contexts are opened in threads of their own."""
    assert GPU.cudaSetDevice(meet.struct.rank) == 0
    return open_on_host(device, meet, config)


# ------------------------------------------------------------------------------- cases ----


def steps_of(group: epic.torch.Group) -> list[torch.Tensor]:
    """There and back, with gradients."""
    found = []
    for fused in (False, True):
        x, w, ids, ct = Data(UNEVEN[:2] + (0, 0)).mine(group.rank)
        out = through(group, fused)(x, w, ids)
        found += [out.detach(), *torch.autograd.grad(out, (x, w), ct)]
    return found


def case_steps(on_gpu: epic.torch.Group, on_host: epic.torch.Group) -> None:
    """The host's bits."""
    assert same(steps_of(on_gpu), steps_of(on_host))


def case_forms(on_gpu: epic.torch.Group, on_host: epic.torch.Group) -> None:
    """Flat rows, dropped choices, sums in a tree, experts anywhere: the host's bits."""
    for name in FORMS:
        assert same(run_form(on_gpu, name), run_form(on_host, name)), name


def case_experts(on_gpu: epic.torch.Group, on_host: epic.torch.Group) -> None:
    """By the core on the GPU, whatever lies behind the last slab."""
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
    """The GPU's products sum in another order than the host's."""
    worst = [relative(x.detach().double(), y.detach().double()) for x, y in zip(a, b, strict=True)]
    assert max(worst) < most, worst


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
    """A layer's results and gradients."""
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
    """The core's own layer on the GPU; composed around the core's experts with a mask and with rows
    quantized on the way: no product of the caller's is needed."""
    for name in LAYERS:
        for masked in (False, True):
            with Counted() as seen:
                got = layer_of(on_gpu, name, masked)
            whole = name != "quantized" and not masked
            assert seen.calls == (2 if whole else 0), name
            assert seen.of_experts == (set() if whole else {on_gpu.number}), name
            agree(got, layer_of(on_host, name, masked), 2e-5)


def case_narrow(on_gpu: epic.torch.Group, on_host: epic.torch.Group) -> None:
    """Gradients of bfloat16 weights come so from the GPU, in the layer and in the experts alone."""
    for masked in (False, True):
        with Counted() as seen:
            got = layer_of(on_gpu, "shared", masked, torch.bfloat16)
        assert seen.of_weights == {torch.bfloat16}, seen.of_weights
        agree(got, layer_of(on_host, "shared", masked, torch.bfloat16), 3e-2)


class Counted(TorchDispatchMode):
    """Calls of the whole layer, the groups that the experts were computed in, and the dtypes of
    w_gate_up's gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.of_experts: set[int] = set()
        self.of_weights: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func in (torch.ops.epic.moe.default, torch.ops.epic.moe_backward.default)
        if func == torch.ops.epic.experts.default:
            self.of_experts.add(args[argument_names("experts").index("group")])
        found = func(*args, **(kwargs or {}))
        if func in (torch.ops.epic.moe_backward.default, torch.ops.epic.experts_backward.default):
            names = [r.name for r in func._schema.returns]
            self.of_weights.add(found[names.index("d_w_gate_up")].dtype)
        return found


def case_placed(on_gpu: epic.torch.Group, on_host: epic.torch.Group) -> None:
    """Experts where a table says."""
    options = epic.torch.Moe.of(**WISH, capacity=64)
    results = []
    for group in (on_gpu, on_host):
        layer = epic.torch.MoE(group, options)
        x = numbers(40 + group.rank, 6, 16).requires_grad_()
        out = epic.torch.moe(group, options, x, layer.weights(), rank_of_expert=TABLE).out
        results.append([out, *torch.autograd.grad(out.square().sum(), (x, layer.w_down))])
    agree(results[0], results[1])


def case_replicas(on_gpu: epic.torch.Group, on_host: epic.torch.Group) -> None:
    """Sums with the host's bits."""
    layer = epic.torch.Layer(12, 3, num_logical=8)
    results = []
    for group in (on_gpu, on_host):
        plan = epic.torch.plan(group, layer, choices(8, 6), logical_of_expert=TWELVE)
        sums = epic.torch.sum_replicas(plan, numbers(50 + group.rank, 6, 3, 7))
        assert plan.logical_load is not None
        results.append([sums, plan.load, plan.logical_load])
    assert same(*results)


def case_distinct(on_gpu: epic.torch.Group, _: epic.torch.Group) -> None:
    """An expert that is named twice: every rank's check tells."""
    layer = epic.torch.Layer(8, 3, distinct=True)
    ids = choices(9 + on_gpu.rank, 6, none=0)
    if on_gpu.rank == 1:
        ids[4] = torch.tensor([6, 1, 6])
    epic.torch.plan(on_gpu, layer, ids)
    told(on_gpu.check, "token 4")


def case_refused(on_gpu: epic.torch.Group, _: epic.torch.Group) -> None:
    """Rows in float64, by name."""
    layer = epic.torch.MoE(on_gpu, epic.torch.Moe.of(**WISH), dtype=torch.float64)
    x = torch.ones(2, 16, dtype=torch.float64)
    told(lambda: layer(x), "row_type F64")
    told(lambda: layer(x, torch.tensor([True, False])), "F64")
    counts = torch.zeros(4, dtype=torch.int32)
    w = epic.torch.ExpertWeights(layer.w_gate_up, layer.w_down)
    mlp = layer.options.experts
    told(lambda: epic.torch.experts(mlp, x, counts, counts, w, group=on_gpu), "rows are float64")


def told(call: Callable[[], Any], word: str) -> None:
    """It raises, with the word."""
    try:
        call()
    except epic.torch.EpicError as error:
        assert word in str(error), error
        return
    raise AssertionError("nothing was told")


CASES = {n.removeprefix("case_"): f for n, f in list(globals().items()) if n[:5] == "case_"}


# ------------------------------------------------------------------------------- ranks ----


def run(rank: int, meets: dict[Any, Any], names: list[str]) -> None:
    """All of one rank."""
    assert GPU.cudaSetDevice(rank) == 0
    for name in names:
        on_gpu, on_host = (
            epic.torch.Group(meet=meets[name, backend][rank], backend=backend, **SIZES)
            for backend in ("p2p", "threads")
        )
        with on_gpu, on_host:
            CASES[name](on_gpu, on_host)
        if rank == 0:
            print(name, flush=True)


def main() -> int:
    """The named cases, or all."""
    torch.set_num_threads(1)
    groups.open_on = open_on
    groups.choose_backend = lambda device, wish: wish
    names = sys.argv[1:] or list(CASES)
    meets = {(n, b): epic.torch.threads(RANKS) for n in names for b in ("p2p", "threads")}
    failures = []

    def rank_of(rank: int) -> None:
        try:
            run(rank, meets, names)
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
