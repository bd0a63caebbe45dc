# SPDX-License-Identifier: Apache-2.0
"""The cases of check.py. Each case runs on all ranks with a group of its own."""

import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import epic
import epic.torch
import parts
from epic.torch.experts import slab_mm
from parts import (
    EXPERTS,
    FORMS,
    HIDDEN,
    LAYER,
    SIZES,
    Data,
    check_round,
    choices,
    numbers,
    run_form,
    same,
    through,
)

Group = epic.torch.Group
LIMIT_MS = 20000
EVEN, UNEVEN = 2 * parts.EVEN, 2 * parts.UNEVEN  # tokens of up to eight ranks
BIG: dict[str, Any] = {"max_tokens": 4096, "max_row_bytes": 2 * 7168, "timeout_ms": LIMIT_MS}

# ------------------------------------------------------------------------------ bootstrap ----

store: Any = None  # the store of all ranks, which check.py sets
rounds: dict[tuple[str, int], int] = {}
counting, capturing = threading.Lock(), threading.Lock()


def bootstraps(case: str, rank: int, ranks: int) -> Any:
    """Return a new bootstrap for each further group of this case."""
    with counting:
        number = rounds[case, rank] = rounds.get((case, rank), 0) + 1
    return epic.torch.groups.StoreExchange(store, f"{case}/{number}", ranks, LIMIT_MS)


def open_another(group: Group, **more: Any) -> Group:
    """Open another group of the same ranks."""
    bootstrap = bootstraps(group.name, group.rank, group.num_ranks)
    return Group(
        bootstrap=bootstrap, rank=group.rank, num_ranks=group.num_ranks, **{**SIZES, **more}
    )


def wait_for_all(group: Group) -> None:
    """Wait until the host threads of all ranks are here."""
    bootstraps(group.name, group.rank, group.num_ranks)(group.rank, b"")


# -------------------------------------------------------------------------------- cases ----


def data_of(group: Group, tokens: tuple[int, ...], **more: Any) -> list[torch.Tensor]:
    """Return this rank's inputs, on its GPU."""
    return Data(tokens, **more).mine(group.rank, str(group.device))


def case_round(group: Group) -> None:
    """Check round trips with gradients on even, uneven and empty ranks; a second run has equal
    bits."""
    for tokens in (EVEN, UNEVEN, (0,) * 8):
        for fused in (False, True):
            step, mine = through(group, fused), data_of(group, tokens)
            first = check_round(step, mine, 2e-6)
            for _ in range(5):
                assert same(first, check_round(step, mine, 2e-6))
    check_round(through(group, True), data_of(group, EVEN, dtype=torch.bfloat16), 2e-2)


def case_host_bits(group: Group) -> None:
    """Compare with the bits of the same ranks on CPUs."""
    with open_another(group) as host:
        for dtype in (torch.float32, torch.bfloat16):
            on_gpu = run_all(group, data_of(group, UNEVEN, dtype=dtype))
            on_host = run_all(host, Data(UNEVEN, dtype=dtype).mine(group.rank))
            assert same([v.cpu() for v in on_gpu], on_host)


def case_forms(group: Group) -> None:
    """Compare flat rows, dropping, tree sums and placed experts with the bits of the same ranks on
    CPUs."""
    with open_another(group) as host:
        for name in FORMS:
            assert same(run_form(group, name), run_form(host, name)), name


def run_all(group: Group, mine: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the results of all steps; the expert doubles its rows, so that only EPIC rounds."""
    x, w, ids, ct = mine
    plan, recv, slot = epic.torch.plan_dispatch(group, LAYER, ids, x, w)
    assert slot is not None
    out = epic.torch.combine(plan, recv * 2, slot)
    gradients = torch.autograd.grad(out, (x, w), ct)
    total = epic.torch.sum(group, torch.full((5,), 0.1 + group.rank, device=group.device))
    wide = epic.torch.plan(group, LAYER, ids, counts_dtype=torch.int64)
    counts = [v for p in (plan, wide) for v in (p.expert_rows, p.expert_tokens, p.load, p.demand)]
    return [v.detach() for v in (recv, slot, out, *gradients, total, *counts)]


def case_exact(group: Group) -> None:
    """Check EXACT capacity, also with ranks that receive nothing."""
    for experts in (2, EXPERTS):
        x, w, ids, ct = data_of(group, UNEVEN, experts=experts)
        plan = epic.torch.plan(group, LAYER, ids, capacity=epic.torch.EXACT)
        recv, slot = epic.torch.dispatch(plan, x, w)
        assert recv.shape == (int(plan.expert_rows.sum()), HIDDEN)
        out = epic.torch.combine(plan, torch.sin(recv), slot)
        got = [out, *torch.autograd.grad(out, (x, w), ct)]
        assert same(got, check_round(through(group, False), [x, w, ids, ct], 2e-6))


def capture(group: Group, run: Callable[[], Any]) -> tuple[Any, Any]:
    """Capture run in a graph; return the graph and its results.

    The start of a capture waits for the device and frees memory, which waits for all devices of the
    process. So no rank may wait for another rank at this time.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    wait_for_all(group)
    graph = torch.cuda.CUDAGraph()
    with capturing, torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        results = run()
    wait_for_all(group)
    return graph, results


def case_graph(group: Group) -> None:
    """Check captured forward and backward, replayed with new data and equal bits, and three
    plans."""
    step, mine = through(group, False), data_of(group, UNEVEN)
    x, w, ids, ct = mine

    def forward_backward() -> list[torch.Tensor]:
        outs = [step(x * (i + 1), w, ids) for i in range(3)]
        gradients = [g for out in outs for g in torch.autograd.grad(out, (x, w), ct)]
        return [*outs, *gradients]

    graph, captured = capture(group, forward_backward)
    for scale in (1.0, 0.5, 3.0):
        with torch.no_grad():
            x.mul_(scale)
        graph.replay()
        torch.cuda.synchronize()
        assert same([v.clone() for v in captured], forward_backward())
    del graph


WIDE = 3072  # number of elements of a row in case_windows
MOST = 4096  # number of tokens; with 1,024 or fewer, all rows go through staging


def window_memory(kind: str, shape: tuple[int, ...], group: Group) -> torch.Tensor:
    """Return a window of bfloat16: of epic.torch.window, of torch's allocator, or symmetric memory.

    The tensors of the last two kinds begin in the middle of their memory.
    """
    if kind == "window":
        return epic.torch.window(shape, torch.bfloat16, group)
    count = 128 + shape[0] * shape[1]
    if kind == "tensor":
        memory = torch.empty(count, dtype=torch.bfloat16, device=group.device)
    else:
        memory = symmetric_memory.empty(count, dtype=torch.bfloat16, device=group.device)
    rows = memory[128:].view(shape)
    epic.torch.register_window(rows, group)
    return rows


def window_step(group: Group, mine: Any, rows: Any = None, result: Any = None) -> list[Any]:
    """Return the results of a top-1 step and its gradients, with outputs in `rows` and `result`.

    The results keep no graph of autograd. It would keep the nodes of x and weights, which remember
    the stream on which they were made, and backward within a capture would wait for that stream.
    """
    x, w, ids, ct = mine
    layer = epic.torch.Layer(EXPERTS, 1)
    plan = epic.torch.plan(group, layer, ids)
    into = None if rows is None else (rows, torch.empty(len(rows), device=group.device))
    recv, slot = epic.torch.dispatch(plan, x, w, out=into)
    # The slots that the plan does not use keep their old bits.
    is_unused = (torch.arange(len(recv), device=group.device) >= plan.expert_rows.sum())[:, None]
    used = recv.masked_fill(is_unused, 0)
    out = epic.torch.combine(plan, used * 2, slot, out=result)
    gradients = torch.autograd.grad(out, (x, w), ct)
    return [used.detach(), out.detach(), *gradients]


def window_data(group: Group) -> list[torch.Tensor]:
    """Return this rank's inputs. The number of tokens differs between the ranks."""
    seed, tokens = 70 + group.rank, MOST - 900 * (group.rank % 3)
    x = numbers(seed, tokens, WIDE, dtype=torch.bfloat16)
    weights = numbers(seed + 50, tokens, 1).abs()
    ids = choices(seed, tokens)[:, :1].contiguous()
    ct = numbers(seed + 100, tokens, WIDE, dtype=torch.bfloat16)
    x, weights, ids, ct = (v.to(group.device) for v in (x, weights, ids, ct))
    return [x.requires_grad_(), weights.requires_grad_(), ids, ct]


def little_staging(group: Group) -> int:
    """Return staging_bytes with which not all rows of case_windows fit into the staging.

    The least staging has room for two rows of each rank, so a call without windows needs 2,048
    rounds. In each round a rank waits for all ranks. If processes share a GPU, the driver runs one
    process at a time, for some milliseconds. So these calls would take minutes together, and they
    get a quarter of the usual staging instead.
    """
    if group.num_ranks <= torch.cuda.device_count():
        return -1
    return 2 * (group.num_ranks - 1) * MOST * 2 * WIDE // 4


def case_windows(group: Group) -> None:
    """Check steps into windows of all kinds of memory, also captured, against ordinary outputs.

    With little staging, combine and the backward calls store rows directly, too.
    """
    kinds = ["window", "tensor", "symmetric"]
    has_pool = torch.cuda.get_allocator_backend() == "cudaMallocAsync"
    if has_pool:  # torch then has no symmetric memory, and other GPUs cannot access torch's memory
        kinds = ["window", "tensor"] if group.num_ranks == 1 else []
    mine = window_data(group)
    for staging_bytes in (0, little_staging(group)):
        wish = {"max_tokens": MOST, "max_row_bytes": 2 * WIDE, "staging_bytes": staging_bytes}
        with open_another(group, device=group.device, **wish) as wide:
            wanted = window_step(wide, mine)
            slots = wide.capacity_bound(epic.torch.Layer(EXPERTS, 1))
            for kind in kinds:
                rows = window_memory(kind, (slots, WIDE), wide)
                result = window_memory(kind, (MOST, WIDE), wide)[: len(mine[0])]
                for into in ((rows, None), (rows, result), (None, result)):
                    for memory in into:
                        if memory is not None:
                            memory.fill_(9)
                    assert same(wanted, window_step(wide, mine, *into)), (kind, staging_bytes)
                run = partial(window_step, wide, mine, rows, result)
                graph, captured = capture(wide, run)
                rows.fill_(9)
                graph.replay()
                torch.cuda.synchronize()
                assert same(wanted, [v.clone() for v in captured]), (kind, "captured")
                del graph
            if not kinds:
                check_pool_refused(wide)


def check_pool_refused(group: Group) -> None:
    """Check that memory of cudaMallocAsync is refused, with an error that contains the reason."""
    try:
        epic.torch.window(8, torch.float32, group)
    except epic.torch.EpicError as error:
        assert error.code == "EPIC_ENOTSUP" and "cudaMallocAsync" in str(error), error
        return
    raise AssertionError("memory of a pool became a window")


def case_capacity_limit(group: Group) -> None:
    """Check a captured step whose capacity_limit changes between the replays."""
    x, w, ids, ct = data_of(group, UNEVEN)
    layer = epic.torch.Layer(EXPERTS, ids.shape[-1], overflow="drop")
    limit = torch.zeros((), dtype=torch.int32, device=group.device)

    def step(**more: Any) -> list[torch.Tensor]:
        plan, recv, slot = epic.torch.plan_dispatch(group, layer, ids, x, w, **more)
        out = epic.torch.combine(plan, recv, slot)
        rows = (plan.expert_rows, plan.has_overflow.clone())
        return [out, *torch.autograd.grad(out, (x, w), ct), *rows]

    graph, captured = capture(group, lambda: step(capacity_limit=limit))
    for slots in (1, 5, 17, 3):
        limit.fill_(slots)
        graph.replay()
        torch.cuda.synchronize()
        assert same([v.clone() for v in captured], step(capacity=slots))
    del graph


def case_layer_limit(group: Group) -> None:
    """Check a captured layer whose capacity_limit changes between the replays."""
    wish = {"num_experts": EXPERTS, "top_k": 2, "hidden": 16, "inner": 16, "overflow": "drop"}
    limit = torch.zeros((), dtype=torch.int32, device=group.device)
    layer = epic.torch.MoE(group, epic.torch.Moe.of(**wish, capacity=40), seed=0)
    x = numbers(30 + group.rank, UNEVEN[group.rank], 16).to(group.device).requires_grad_()

    def step(slots: int, **more: Any) -> list[torch.Tensor]:
        options = epic.torch.Moe.of(**wish, capacity=slots)
        out = epic.torch.moe(group, options, x, layer.weights(), **more).out
        return [out, *torch.autograd.grad(out.square().sum(), (x, *layer.parameters()))]

    graph, captured = capture(group, lambda: step(40, capacity_limit=limit))
    for slots in (1, 5, 17, 3):
        limit.fill_(slots)
        graph.replay()
        torch.cuda.synchronize()
        assert same([v.clone() for v in captured], step(slots))
    del graph


def case_pipeline(group: Group) -> None:
    """Run three micro-batches in the order of a pipeline (1F1B), eager and captured, and compare
    with the bits of separate runs."""
    step, batches = through(group, False), []
    for i in range(3):
        x, w, ids, ct = data_of(group, UNEVEN)
        batches.append([(x.detach() * (i + 1)).requires_grad_(), w, ids, ct])

    def interleaved() -> list[torch.Tensor]:
        outs: dict[int, torch.Tensor] = {}
        found: dict[int, list[torch.Tensor]] = {}
        for forward, i in ((1, 0), (1, 1), (0, 0), (1, 2), (0, 1), (0, 2)):
            x, w, ids, ct = batches[i]
            if forward:
                outs[i] = step(x, w, ids)
            else:
                out = outs.pop(i)
                found[i] = [out, *torch.autograd.grad(out, (x, w), ct)]
        return [v for i in range(3) for v in found[i]]

    def in_turn() -> list[torch.Tensor]:
        return [v for batch in batches for v in check_round(step, batch, 2e-6)]

    assert same(interleaved(), in_turn())
    graph, captured = capture(group, interleaved)
    for scale in (0.5, 3.0):
        with torch.no_grad():
            for batch in batches:
                batch[0].mul_(scale)
        graph.replay()
        torch.cuda.synchronize()
        assert same([v.clone() for v in captured], in_turn())
    del graph


def case_reuse(group: Group) -> None:
    """Check that a plan or rows changed before their backward raise an error."""
    x, w, ids, _ = data_of(group, EVEN)
    plan, recv, slot = epic.torch.plan_dispatch(group, LAYER, ids, x, w)
    rows = torch.sin(recv)
    out = epic.torch.combine(plan, rows, slot)
    with torch.no_grad():
        epic.torch.dispatch(plan, x, out=(rows, None))
    for spoiled in (out, recv):
        try:
            torch.autograd.grad(spoiled, x, torch.ones_like(spoiled), retain_graph=True)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error), error
        else:
            raise AssertionError("what was written since was computed with")
        plan.bytes.zero_()


def case_compile(group: Group) -> None:
    """Compile with Inductor, forward and backward."""
    eager = through(group, True)
    run = torch.compile(eager, fullgraph=True)
    for tokens in (UNEVEN, (9, 2, 0, 30) * 2):
        x, w, ids, ct = data_of(group, tokens)
        wanted = eager(x, w, ids)
        out = run(x, w, ids)
        torch.testing.assert_close(out, wanted)
        got = torch.autograd.grad(out, (x, w), ct)
        torch.testing.assert_close(got, torch.autograd.grad(wanted, (x, w), ct))
    torch._dynamo.reset()


def case_streams(group: Group) -> None:
    """Check that calls run on the caller's current stream, also if another device is current."""
    step, mine = through(group, True), data_of(group, UNEVEN)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        first = check_round(step, mine, 2e-6)
        torch.cuda.current_stream().synchronize()
    if torch.cuda.device_count() > 1:
        with torch.cuda.device((group.device.index + 1) % torch.cuda.device_count()):
            assert same(first, check_round(step, mine, 2e-6))


def case_errors(group: Group) -> None:
    """Check that every rank's check() reports an invalid expert id of one rank exactly once."""
    _, _, ids, _ = data_of(group, EVEN)
    if group.rank == group.num_ranks - 1:
        ids[1, 2] = EXPERTS + 5
    epic.torch.plan(group, LAYER, ids)
    torch.cuda.synchronize()
    try:
        group.check()
    except epic.torch.EpicError as error:
        assert error.code == "EPIC_EINVAL" and "13" in str(error), error
    else:
        raise AssertionError("no error")
    group.check()
    try:
        epic.torch.dispatch(epic.torch.plan(group, LAYER, ids.clamp(max=7)), torch.ones(6, HIDDEN))
    except epic.torch.EpicArgumentError as error:
        assert "cpu" in str(error), error
    else:
        raise AssertionError("tokens on the CPU were taken")
    case_round(group)


WISH: dict[str, Any] = {
    "num_experts": 8, "top_k": 2, "hidden": 64, "inner": 32, "alignment": 16, "balance_coeff": 0.01,
}  # fmt: skip
SIXTEEN = [0, 3, 1, 2, 3, 4, 5, 3, 6, 7, 0, 4, 1, 2, 5, 6]
SHARED = epic.torch.Experts(1, 64, 32)
LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "shared": ({"shared": SHARED, "z_coeff": 0.1}, {"gate_bias": True}),
    "biases": ({"weighting": "early"}, {"expert_biases": True}),
    "gated": ({"shared": SHARED}, {"shared_gate": True}),
    "zero experts": ({"zero_experts": 3}, {}),
    "tree": ({"sum_order": "tree"}, {}),
    "replicas": ({"num_experts": 16, "num_logical": 8}, {"logical_of_expert": SIXTEEN}),
    "grouped_mm": ({}, {"grouped_mm": torch._grouped_mm}),
    "quantized": ({"quantize": "1x128"}, {}),
}


def case_module(group: Group) -> None:
    """Check layers of the core in bfloat16, and composed layers with quantized rows, against
    float32 products of single experts."""
    for name in LAYERS:
        try:
            one_module(group, *LAYERS[name])
        except Exception as error:
            error.args = (f"{name}: {error}",)
            raise


def one_module(group: Group, wish: dict[str, Any], more: dict[str, Any]) -> None:
    """Run one module forward and backward."""
    options = epic.torch.Moe.of(**{**WISH, **wish})
    layer = epic.torch.MoE(group, options, dtype=torch.bfloat16, **more, seed=0)
    exact = epic.torch.MoE(group, options, dtype=torch.float32, **{**more, "grouped_mm": slab_mm})
    with torch.no_grad():
        for a, b in zip(exact.parameters(), layer.parameters(), strict=True):
            a.copy_(b)
    x = numbers(70 + group.rank, 24, 64).bfloat16().to(group.device)
    results = []
    for module, rows in ((layer, x), (exact, x.float())):
        rows = rows.clone().requires_grad_()
        out, loss = module(rows)
        (out.float().square().sum() + loss).backward()
        assert rows.grad is not None
        module.sum_gradients()
        results.append([out, loss, rows.grad, *(p.grad for p in module.parameters())])
    for a, b in zip(*results, strict=True):
        a, b = a.detach().float(), b.detach()
        worst = float((a - b).abs().max() / b.abs().max().clamp(min=1e-6))
        assert worst < 6e-2, worst


def case_layer_graph(group: Group) -> None:
    """Capture the core's layer, forward and backward. Replays with other tokens, and so other
    counts of experts, have the bits of eager calls."""
    layer = epic.torch.MoE(group, epic.torch.Moe.of(**WISH), dtype=torch.bfloat16, seed=0)
    x = numbers(75 + group.rank, 24, 64).bfloat16().to(group.device).requires_grad_()
    inputs = (x, *layer.parameters())

    def forward_backward() -> list[torch.Tensor]:
        out, loss = layer(x)
        return [out, *torch.autograd.grad(out.float().square().sum() + loss, inputs)]

    graph, captured = capture(group, forward_backward)
    for seed in (1, 2, 3):
        with torch.no_grad():
            x.copy_(numbers(75 + 4 * seed + group.rank, 24, 64))
        graph.replay()
        torch.cuda.synchronize()
        assert same([v.clone() for v in captured], forward_backward())
    del graph


def case_invariant(group: Group) -> None:
    """Check that tokens have equal bits in every batch, on one rank and on all ranks, and that
    training on all ranks replays a rollout of a rank that decodes alone."""
    options = epic.torch.Moe.of(
        num_experts=8, top_k=2, hidden=64, inner=32, normalize="sum", invariant=True,
        shared=epic.torch.Experts(1, 64, 32),
    )  # fmt: skip
    layer = epic.torch.MoE(group, options, dtype=torch.bfloat16, seed=0)
    report = epic.torch.check_invariance(layer, group)
    assert report.is_invariant, report
    wait_for_all(group)
    x = numbers(5, 24, 64).bfloat16().to(group.device)
    with Group(num_ranks=1, device=group.device, max_sms=8, **SIZES) as alone:
        server = epic.torch.MoE(alone, options, dtype=torch.bfloat16, seed=0)
        assert epic.torch.check_invariance(server).fingerprint == report.fingerprint
        with torch.no_grad(), epic.torch.record_routing(server) as record:
            decoded = torch.cat([server(token)[0] for token in x.split(1)])
        torch.cuda.synchronize()
    wait_for_all(group)
    mine = slice(24 * group.rank // group.num_ranks, 24 * (group.rank + 1) // group.num_ranks)
    calls = record[""][mine]
    ids, weights = (torch.cat(parts) for parts in zip(*calls, strict=True))
    layer.w_gate.data.copy_(layer.w_gate.data.flip(1))  # this router would choose others
    with epic.torch.replay_routing(layer, {"": epic.torch.Routing(ids, weights)}, weights=True):
        out, loss = layer(x[mine])
        (out.float().square().sum() + loss).backward()
    assert torch.equal(out, decoded[mine])
    assert layer.w_down.grad is not None and layer.w_down.grad.any()


def case_replicas(group: Group) -> None:
    """Check that sums over replicas have the bits of CPUs."""
    results = []
    with open_another(group) as host:
        for on in (group, host):
            layer, ids = epic.torch.Layer(16, 3, num_logical=8), choices(8, 6).to(on.device)
            plan = epic.torch.plan(on, layer, ids, logical_of_expert=SIXTEEN)
            x = numbers(50 + group.rank, 16 // group.num_ranks, 3, 7).to(on.device)
            assert plan.logical_load is not None
            found = (epic.torch.sum_replicas(plan, x), plan.load, plan.logical_load)
            results.append([v.cpu() for v in found])
    assert same(*results)


def case_checkpoint(group: Group) -> None:
    """Check activation checkpointing of everything, and of everything except plans: equal bits."""
    step, mine = through(group, True), data_of(group, UNEVEN)
    wanted = check_round(step, mine, 2e-6)
    policy = partial(create_selective_checkpoint_contexts, epic.torch.save_plans)
    for more in ({}, {"context_fn": policy}):
        again = partial(checkpoint, step, use_reentrant=False, **more)
        assert same(wanted, check_round(again, mine, 2e-6))


def case_profiler(group: Group) -> None:
    """Check that the profiler and NVTX show operators by name, forward and backward."""
    step, mine = through(group, True), data_of(group, UNEVEN)
    with torch.profiler.profile() as profile:
        check_round(step, mine, 2e-6)
    names = {event.key for event in profile.key_averages()}
    wanted = {f"epic::{n}" for n in ("plan_dispatch", "combine", "combine_backward")}
    assert wanted <= names, wanted - names
    with torch.autograd.profiler.emit_nvtx():
        check_round(step, mine, 2e-6)


def case_quantized(group: Group) -> None:
    """Check rows sent in e4m3 with both block sizes: they are rounded as on CPUs, and the gradient
    ignores the rounding."""
    results = []
    with open_another(group) as host:
        for on in (group, host):
            wide = [numbers(90 + group.rank, 6, 256), numbers(91, 6, 256)]
            x, ct = (v.to(on.device) for v in wide)
            x.requires_grad_()
            plan = epic.torch.plan(on, LAYER, choices(95 + group.rank, 6).to(on.device))
            for block in ("1x128", "1x32"):
                recv, _ = epic.torch.dispatch(plan, x, quantize=block)
                out = epic.torch.combine(plan, recv, quantize_gradient=block)
                results.append([out.detach().cpu(), torch.autograd.grad(out, x, ct)[0].cpu()])
    for a, b in zip(results[:2], results[2:], strict=True):
        assert same(a, b)


def case_waits(group: Group) -> None:
    """Find a rank that begins each operation late, and read the times while a graph is captured."""
    x, w, ids, _ = data_of(group, EVEN)
    before = group.waits()
    for _ in range(5):
        wait_for_all(group)
        time.sleep(0.05 if group.rank == 1 else 0)
        epic.torch.plan_dispatch(group, LAYER, ids, x, w)
        torch.cuda.synchronize()
    found = group.waits().since(before)
    assert sum(t.num_operations for t in found.table if t.peer == 0) == 5, found
    if group.num_ranks > 1 and group.rank != 1:
        slow, seconds = found.slowest()
        assert slow == 1 and seconds > 0.1, found
    capture(group, lambda: (group.waits(), epic.torch.plan(group, LAYER, ids)))[0].replay()
    torch.cuda.synchronize()


def case_writer(group: Group) -> None:
    """Check the trace of the ids that replays of a graph have written."""
    scores = torch.zeros(6, EXPERTS, device=group.device)
    graph, (chosen, _) = capture(
        group, lambda: ((ids := scores.topk(3).indices), epic.torch.plan(group, LAYER, ids))
    )
    draw, wanted = torch.Generator().manual_seed(group.rank), []
    with tempfile.TemporaryDirectory() as folder:
        with epic.TraceWriter(folder, rank=0, num_ranks=1) as writer:
            for _ in range(3):
                wanted.append(torch.rand(6, EXPERTS, generator=draw))
                scores.copy_(wanted[-1])
                graph.replay()
                writer.write(chosen, num_experts=EXPERTS)
        (steps,) = epic.read_trace(folder)
    assert [s.topk_idx.tolist() for s in steps] == [s.topk(3).indices.tolist() for s in wanted]


def case_host_time(group: Group) -> None:
    """Print the host microseconds of a call, without and with autograd, without a limit."""
    layer = epic.torch.Layer(64, 8, alignment=16)
    with open_another(group, device=group.device, **BIG) as wide:
        x = torch.randn(4096, 7168, dtype=torch.bfloat16, device=group.device)
        ids = torch.rand(4096, 64, device=group.device).topk(8).indices.int()
        w = torch.rand(4096, 8, device=group.device)
        plan, recv, slot = epic.torch.plan_dispatch(wide, layer, ids, x, w)
        calls: dict[str, Callable[[], Any]] = {
            "plan": lambda: epic.torch.plan(wide, layer, ids),
            "dispatch": lambda: epic.torch.dispatch(plan, x, w),
            "combine": lambda: epic.torch.combine(plan, recv, slot),
        }
        for name, call in calls.items():
            for grad in (False, True):
                x.requires_grad_(grad)
                recv.requires_grad_(grad)
                for _ in range(10):
                    call()
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(20):
                    call()
                us = (time.perf_counter() - start) / 20 * 1e6
                torch.cuda.synchronize()
                if group.rank == 0:
                    print(f"    {name}, {'autograd' if grad else 'no grad'}: {us:.1f} us")


CASES = {
    name.removeprefix("case_"): f for name, f in list(globals().items()) if name[:5] == "case_"
}
CASES["compile"] = CASES.pop("compile")  # last, because it takes longest
