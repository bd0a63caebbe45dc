# SPDX-License-Identifier: Apache-2.0
"""Tests the exchange of epic.vllm on four ranks, against stubs of vLLM's base classes.

The stubs have the names that epic.vllm uses, and nothing else. tests/vllm tests it in vLLM itself.
"""

import importlib
import inspect
import logging
import os
import re
import signal
import socket
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import epic.torch
from epic.vllm.options import Options, check_supported, read_options
from epic.vllm.plugin import missing_names
from vllm_stubs import (
    Kernel,
    NoOp,
    PrepareAndFinalize,
    TpGroup,
    import_fresh,
    install_stubs,
    moe_config,
    remove_stubs,
)
from world import World

EXPERTS, TOP_K, HIDDEN = 8, 3, 16


def scale_of(expert: torch.Tensor) -> torch.Tensor:
    """Return what the experts of these tests multiply a token by."""
    return 1.0 + expert.to(torch.float64)


# The tokens of each step and of each data-parallel rank, as vLLM pads them. vLLM runs a dummy batch
# of one token on a rank without requests.
PLAIN = [(7, 5, 6, 7)] * 3
IDLE = [(7, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 16)]
PADDED = [(n,) * 4 for n in (1, 2, 4, 8, 16, 2)]
EMPTY = [(0, 0, 0, 5), (0, 0, 0, 0), (3, 0, 0, 0)]
STEPS = {"plain": PLAIN, "idle": IDLE, "padded": PADDED, "empty": EMPTY, "skewed": PLAIN}


def tokens_of_step(
    step: int, rank: int, tp_size: int, sp_size: int, sizes: tuple[int, ...], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens and scores of this rank, equal in a group of tensor parallelism.

    With sequence parallelism the model has split them over the ranks of that group.
    """
    draw = torch.Generator().manual_seed(100 * step + rank // tp_size)
    tokens = sizes[rank // tp_size]
    padded = -(-tokens // sp_size) * sp_size
    x = torch.randn(padded, HIDDEN, generator=draw).to(dtype)
    scores = torch.rand(padded, EXPERTS, generator=draw)
    own = slice(rank % sp_size * (padded // sp_size), (rank % sp_size + 1) * (padded // sp_size))
    return (x[own], scores[own]) if sp_size > 1 else (x, scores)


def check_exchange(rank: int, tp_size: int, dtype: torch.dtype, case: str) -> None:
    """Run prepare, experts and finalize, and compare the result with float64.

    case: a key of STEPS; "input" applies the weights to the tokens; "sequence" splits the tokens
    over the ranks of tensor parallelism before the layer; "skewed" sends all to the last rank.
    """
    tp, context = TpGroup(rank, tp_size), SimpleNamespace(dp_metadata=None)
    install_stubs(tp, context)
    exchange, workers = import_fresh()

    on_input, sp_size = case == "input", tp_size if case == "sequence" else 1
    ranks = dist.get_world_size()
    top_k = 1 if on_input else 2 if case == "skewed" else TOP_K
    moe = moe_config(EXPERTS, top_k, HIDDEN, dtype, sp_size)
    opened = workers.open_workers(moe, 60000)
    assert workers.open_workers(moe, 60000) is opened  # layers of one size share a group
    assert len(set(opened.places)) == ranks  # each rank is another process
    layer = exchange.EpicPrepareAndFinalize(moe, opened)
    assert layer.output_is_reduced() and layer.num_dispatchers() == ranks
    for step, all_sizes in enumerate(STEPS.get(case, PLAIN)):
        sizes = all_sizes[: ranks // tp_size]
        if len(sizes) > 1:
            across = torch.tensor(sizes, dtype=torch.int32)
            context.dp_metadata = SimpleNamespace(num_tokens_across_dp_cpu=across)
        x, scores = tokens_of_step(step, rank, tp_size, sp_size, sizes, dtype)
        if case == "skewed":
            scores[:, -2:] += 1.0  # the two experts of the last rank
        weights, ids = scores.topk(top_k)
        ids = ids.to(torch.int32)
        with patch.object(epic.torch, "plan_dispatch", wraps=epic.torch.plan_dispatch) as called:
            rows, _, counts, local, slot_weights = layer.prepare(
                x, weights, ids, EXPERTS, None, on_input, None
            )
        # The capacity follows from the numbers of tokens, not from their experts.
        total = sum(-(-n // sp_size) * sp_size for n in sizes)
        capacity = min(top_k, EXPERTS // ranks) * total
        assert called.call_args.kwargs["capacity"] == max(1, capacity)
        assert int(counts.sum()) == rows.shape[0] == local.shape[0] == slot_weights.shape[0]
        if case == "skewed":
            assert rows.shape[0] == (2 * total if rank == ranks - 1 else 0)
        output = torch.empty_like(x)
        factor = scale_of(local + moe.num_local_experts * rank)
        if not on_input:
            factor = factor * slot_weights.double()
        done = (rows.double() * factor).to(dtype)
        layer.finalize(output, done, slot_weights, local, on_input, NoOp())
        factors = (scale_of(ids) * weights.double()).sum(1, keepdim=True)
        wanted = x.double() * factors
        limit = 1e-6 if dtype == torch.float32 else 0.03
        if x.shape[0]:
            assert (output.double() - wanted).abs().max() <= limit * wanted.abs().max()
    workers.close_workers()
    remove_stubs()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("tp_size", "case"),
    [
        *((1, case) for case in ("plain", "idle", "padded", "empty", "skewed", "input")),
        *((2, case) for case in ("plain", "idle", "padded", "sequence")),
        *((4, case) for case in ("plain", "idle", "sequence")),
    ],
)
def test_exchange(world: World, tp_size: int, case: str, dtype: torch.dtype) -> None:
    """Check DP, TP and DP x TP, several sizes, idle ranks, skewed routing, weights on the input."""
    world.run(check_exchange, tp_size, dtype, case)


def check_capacity(rank: int) -> None:
    """Check what the exchange refuses: more rows or tokens than vLLM has announced."""
    ranks = dist.get_world_size()
    context = SimpleNamespace(dp_metadata=None)
    install_stubs(TpGroup(rank, 1), context)
    exchange, workers = import_fresh()
    moe = moe_config(ranks, 1, HIDDEN, max_tokens=4)
    opened = workers.open_workers(moe, 60000)
    layer = exchange.EpicPrepareAndFinalize(moe, opened)

    def prepare(tokens: int, announced: int) -> Any:
        across = torch.full((ranks,), announced, dtype=torch.int32)
        context.dp_metadata = SimpleNamespace(num_tokens_across_dp_cpu=across)
        ids, ones = torch.zeros(tokens, 1, dtype=torch.int32), torch.ones(tokens, 1)
        return layer.prepare(torch.ones(tokens, HIDDEN), ones, ids, ranks, None, False, None)

    with pytest.raises(epic.torch.EpicError, match=r"EPIC_EOVERFLOW: .*rank 0"):
        prepare(tokens=4, announced=3)
    with pytest.raises(epic.torch.EpicArgumentError, match=r"5.*max_tokens"):
        prepare(tokens=5, announced=5)
    rows = prepare(tokens=4, announced=4)[0]  # the group is still usable
    assert rows.shape[0] == (4 * ranks if rank == 0 else 0)
    workers.close_workers()
    remove_stubs()


def test_capacity(world: World) -> None:
    """Check that too many rows or tokens are an error that names them, on every rank."""
    world.run(check_capacity)


def check_static(rank: int, case: str) -> None:
    """Run the exchange as on GPUs: all shapes follow from the numbers of tokens alone.

    case: "plain", "idle" or "e4m3" (rows and scales of 1x128 blocks).
    """
    hidden = 256 if case == "e4m3" else HIDDEN
    context = SimpleNamespace(dp_metadata=None)
    install_stubs(TpGroup(rank, 1), context)
    exchange, workers = import_fresh()
    moe = moe_config(EXPERTS, TOP_K, hidden)
    opened = workers.open_workers(moe, 60000)
    layer = exchange.EpicPrepareAndFinalize(moe, opened)
    layer.is_static = True
    quant = SimpleNamespace(quant_dtype=torch.float8_e4m3fn, block_shape=[128, 128])
    own = range(rank * moe.num_local_experts, (rank + 1) * moe.num_local_experts)
    for step, sizes in enumerate(IDLE if case == "idle" else PADDED):
        across = torch.tensor(sizes, dtype=torch.int32)
        context.dp_metadata = SimpleNamespace(num_tokens_across_dp_cpu=across)
        draw = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(sizes[rank], hidden, generator=draw)
        weights, ids = torch.rand(sizes[rank], EXPERTS, generator=draw).topk(TOP_K)
        form = quant if case == "e4m3" else None
        rows, scales, counts, chosen, slot_weights = layer.prepare(
            x, weights, ids.to(torch.int32), EXPERTS, None, False, form
        )
        capacity = min(TOP_K, moe.num_local_experts) * sum(sizes)
        assert rows.shape == (capacity, hidden) and chosen.shape == slot_weights.shape
        # The slots of the own experts come first, in their order; all others are of another rank.
        landed = int(counts.sum())
        wanted = torch.repeat_interleave(torch.tensor(own, dtype=torch.int32), counts)
        assert chosen.shape == (capacity, 1) and chosen.dtype == torch.int32
        assert torch.equal(chosen[:landed, 0], wanted)
        assert all(0 <= e < EXPERTS and e not in own for e in chosen[landed:, 0].tolist())
        values = rows.double()
        if case == "e4m3":
            assert rows.dtype == torch.float8_e4m3fn and scales.shape == (capacity, 2)
            values = rows.double() * scales.double().repeat_interleave(128, dim=1)
        done = (values * scale_of(chosen) * slot_weights.double()).to(x.dtype)
        done[landed:] = torch.nan  # no result of these rows may reach a token
        output = torch.empty_like(x)
        layer.finalize(output, done, slot_weights, chosen, False, NoOp())
        wanted = x.double() * (scale_of(ids) * weights.double()).sum(1, keepdim=True)
        limit = 0.07 if case == "e4m3" else 1e-6
        assert (output.double() - wanted).abs().max() <= limit * wanted.abs().max()
    if case == "e4m3":
        for dtype, blocks in ((torch.float8_e4m3fn, None), (torch.int8, [128, 128])):
            form = SimpleNamespace(quant_dtype=dtype, block_shape=blocks)
            with pytest.raises(epic.torch.EpicUnsupportedError, match="must not be quantized"):
                layer.prepare(x, weights, ids.to(torch.int32), EXPERTS, None, False, form)
        # Experts that quantize the rows themselves get them as they are, with zeros at the end.
        rows, scales, counts, _, _ = layer.prepare(
            x, weights, ids.to(torch.int32), EXPERTS, None, False, form, True
        )
        assert scales is None and rows.dtype == x.dtype
        assert not rows[int(counts.sum()) :].any()
    workers.close_workers()
    remove_stubs()


@pytest.mark.parametrize("case", ["plain", "idle", "e4m3"])
def test_static(world: World, case: str) -> None:
    """Check the form of the exchange for GPUs, on CPUs: shapes, experts, numbers, e4m3 rows."""
    world.run(check_static, case)


def check_watch(rank: int, case: str) -> None:
    """Let the last rank fail while no operation runs, and check which processes get SIGTERM.

    case: "stopped" (its process), "aborted" (its group), "cut" (its connections with other hosts)
    or "closed", which is no failure.
    """
    install_stubs(TpGroup(rank, 1), SimpleNamespace(dp_metadata=None))
    workers: Any = import_fresh()[1]
    workers.WATCH_SECONDS = 0.05
    ranks = dist.get_world_size()
    ended: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    workers.logger.addHandler(handler)
    timeout_ms = 1000 if case in ("stopped", "cut") else 60000
    host = f"node{rank // 2}" if case == "cut" else "node"  # in "cut" two ranks are on each host
    with patch.object(workers.socket, "gethostname", lambda: host):
        opened = workers.open_workers(moe_config(ranks, 1, HIDDEN, max_tokens=4), timeout_ms)
    assert len(opened.connections) == (2 if case == "cut" else 0)
    dist.barrier()
    time.sleep(0.2)
    assert not ended and opened.thread.is_alive()
    dist.barrier()
    if case == "stopped" and rank == 0:
        os.kill(opened.places[-1].process, signal.SIGSTOP)
    elif case == "aborted" and rank == ranks - 1:
        opened.group.abort("the test ends this rank")
    elif case == "cut" and rank == ranks - 1:
        for connection in opened.connections.values():
            connection.shutdown(socket.SHUT_RDWR)
    elif case == "closed" and rank == ranks - 1:
        opened.stop_watching()
    end = time.monotonic() + 30
    while opened.thread and opened.thread.is_alive() and not ended and time.monotonic() < end:
        time.sleep(0.01)  # the handler of SIGTERM runs in this thread
    if case == "stopped" and rank == 0:
        os.kill(opened.places[-1].process, signal.SIGCONT)
    opened.stop_watching()
    # "cut" concerns both ends of the connections. The other rank of the host, ranks - 2, has none.
    is_concerned = case != "closed" and not (case == "cut" and rank == ranks - 2)
    assert len(ended) == is_concerned, lines
    if case == "stopped" and rank < ranks - 1:
        assert re.search(f"EPIC_ETIMEOUT.*waited 1000 ms for rank {ranks - 1}", lines[0]), lines
    if case == "cut" and rank < ranks // 2:
        assert f"EPIC_EPEER: the process of rank {ranks - 1} has ended" in lines[0], lines
    workers.logger.removeHandler(handler)
    signal.signal(signal.SIGTERM, before)
    workers.close_workers()
    remove_stubs()


@pytest.mark.parametrize("case", ["stopped", "aborted", "cut", "closed"])
def test_watch(world: World, case: str) -> None:
    """Check that a failure ends a worker that is in no operation of EPIC."""
    world.run(check_watch, case)


def check_form(rank: int) -> None:
    """Compare the class with vLLM's abstract class: methods, arguments and defaults."""
    install_stubs(TpGroup(rank, 1), SimpleNamespace(dp_metadata=None))
    ours = import_fresh()[0].EpicPrepareAndFinalize
    assert not ours.__abstractmethods__
    for name in ("prepare", "finalize"):
        own, theirs = (
            list(inspect.signature(getattr(kind, name)).parameters)
            for kind in (ours, PrepareAndFinalize)
        )
        assert own == theirs, name
    assert not ours.supports_async(ours.__new__(ours))
    remove_stubs()


def test_form(world: World) -> None:
    """Check that vLLM can call the class."""
    world.run(check_form)


def check_layer(rank: int) -> None:
    """Replace the exchange of a layer after its weights are loaded, or refuse to."""
    moe = moe_config(EXPERTS, TOP_K, HIDDEN)
    config = configurations()[0]
    config.parallel_config.world_size_across_dp = dist.get_world_size()
    config.additional_config = {"epic": {"timeout_ms": 60000}}
    install_stubs(TpGroup(rank, 1), SimpleNamespace(dp_metadata=None), config)
    exchange, workers = import_fresh()
    made = importlib.import_module("epic.vllm.layer").EpicRoutedExperts()

    def load(_: Any) -> None:
        made.method.moe_kernel = Kernel("vllm's exchange", "experts")

    made.method = SimpleNamespace(process_weights_after_loading=load, moe_kernel=None)
    method = made._get_quant_method("", None, moe)
    method.process_weights_after_loading(made)
    kernel = method.moe_kernel
    assert isinstance(kernel.prepare_finalize, exchange.EpicPrepareAndFinalize)
    assert kernel.fused_experts == "experts" and made.uses_epic
    # vLLM itself computes the shared experts, so the operator gets only the routed ones.
    operators = SimpleNamespace(epic_routed_experts=lambda *passed: passed)
    with patch.object(torch.ops, "vllm", operators):
        assert made.forward_modular("x", "w", "ids", object(), "x") == ("x", "w", "ids", "layers.0")

    made.method = SimpleNamespace(process_weights_after_loading=lambda _: None, moe_kernel=None)
    method = made._get_quant_method("", None, moe)
    for kernel in (None, SimpleNamespace(is_monolithic=True)):
        method.moe_kernel = kernel
        with pytest.raises(epic.torch.EpicUnsupportedError, match="take the logits of the router"):
            method.process_weights_after_loading(made)

    config.additional_config = {}
    off = type(made)()
    off.method = SimpleNamespace()
    assert off._get_quant_method("", None, moe) is off.method and not off.uses_epic
    assert off.forward_modular("x", None, None) == ("vllm", "x")
    assert len(workers.OPEN) == 1
    workers.close_workers()
    remove_stubs()


def test_layer(world: World) -> None:
    """Check the layer that vLLM makes in place of RoutedExperts, with EPIC on and off."""
    world.run(check_layer)


def check_alias(rank: int) -> None:
    """Check the result if the experts write into the output, whose shape is that of the rows."""
    ranks = dist.get_world_size()
    across = torch.full((ranks,), ranks, dtype=torch.int32)
    metadata = SimpleNamespace(num_tokens_across_dp_cpu=across)
    install_stubs(TpGroup(rank, 1), SimpleNamespace(dp_metadata=metadata))
    exchange, workers = import_fresh()
    moe = moe_config(ranks, 1, HIDDEN)
    opened = workers.open_workers(moe, 60000)
    layer = exchange.EpicPrepareAndFinalize(moe, opened)
    x = torch.randn(ranks, HIDDEN, generator=torch.Generator().manual_seed(rank))
    ids = torch.arange(ranks, dtype=torch.int32)[:, None]  # one token for each rank
    ones = torch.ones(ranks, 1)
    rows, _, _, local, weights = layer.prepare(x, ones, ids, ranks, None, False, None)
    output = torch.empty_like(x)
    assert rows.shape == output.shape
    output.copy_(rows * (rank + 1))
    layer.finalize(output, output, weights, local, False, NoOp())
    torch.testing.assert_close(output, x * (ids + 1))
    workers.close_workers()
    remove_stubs()


def test_alias(world: World) -> None:
    """Check that experts may write into the output."""
    world.run(check_alias)


def test_options() -> None:
    """Check that the plugin is off without the key, and that invalid options are named."""
    assert read_options({}) is None and read_options(object()) is None
    assert read_options({"epic": {}}) == Options()
    assert read_options({"epic": {"timeout_ms": 5}}) == Options(timeout_ms=5)
    for passed, text in (
        (True, "is True: must be a dict"),
        ({"time": 1}, "has the key 'time': must be one of timeout_ms"),
        ({"timeout_ms": 0}, "is 0: must be a positive integer"),
        ({"timeout_ms": True}, "is True: must be a positive integer"),
    ):
        with pytest.raises(epic.torch.EpicArgumentError, match=text.replace("[", r"\[")):
            read_options({"epic": passed})


def configurations() -> tuple[SimpleNamespace, SimpleNamespace, SimpleNamespace]:
    """Return stubs of the configurations, which are supported."""
    parallel = SimpleNamespace(
        enable_expert_parallel=True, use_ubatching=False, pipeline_parallel_size=1,
        expert_placement_strategy="linear", enable_elastic_ep=False,
    )  # fmt: skip
    ranks = SimpleNamespace(pcp_size=1, enable_eplb=False, ep_size=2)
    moe = SimpleNamespace(num_experts=8, moe_parallel_config=ranks)
    config = SimpleNamespace(parallel_config=parallel, lora_config=None)
    return config, moe, SimpleNamespace(num_fused_shared_experts=0)


@pytest.mark.parametrize(
    ("where", "value", "text"),
    [
        ("config.parallel_config.enable_expert_parallel", False, "pass --enable-expert-parallel"),
        ("config.parallel_config.use_ubatching", True, "micro-batches"),
        ("config.parallel_config.pipeline_parallel_size", 2, "pipeline_parallel_size is 2"),
        ("config.parallel_config.expert_placement_strategy", "round_robin", "'round_robin'"),
        ("config.parallel_config.enable_elastic_ep", True, "enable_elastic_ep is True"),
        ("config.lora_config", object(), "enable_lora is True"),
        ("moe.moe_parallel_config.pcp_size", 2, "prefill_context_parallel_size is 2"),
        ("moe.moe_parallel_config.enable_eplb", True, "enable_eplb is True"),
        ("moe.num_experts", 7, "num_experts is 7: must be a multiple of the 2"),
        ("experts.num_fused_shared_experts", 1, "shared experts are fused"),
    ],
)
def test_refusals(where: str, value: Any, text: str) -> None:
    """Check that each unsupported setting is refused with its name."""
    config, moe, experts = configurations()
    check_supported(config, moe, experts, True)
    thing: Any = SimpleNamespace(config=config, moe=moe, experts=experts)
    *path, last = where.split(".")
    for name in path:
        thing = getattr(thing, name)
    setattr(thing, last, value)
    with pytest.raises(epic.torch.EpicUnsupportedError, match=text):
        check_supported(config, moe, experts, True)


def test_refuses_platforms() -> None:
    """Check that platforms other than the CPU and CUDA are refused."""
    with pytest.raises(epic.torch.EpicUnsupportedError, match="neither the CPU nor CUDA"):
        check_supported(*configurations(), False)


def test_missing_names() -> None:
    """Check that names that a newer vLLM has renamed are found, and modules that it has moved."""
    needed = {"json": ("loads", "decoder.JSONDecoder", "decoder.Old"), "no_such_module": ("x",)}
    assert missing_names(needed) == ["json.decoder.Old", "no_such_module"]


def check_names(rank: int) -> None:
    """Let the last rank leave a group with an error, and check what the others log."""
    install_stubs(TpGroup(rank, 1), SimpleNamespace(dp_metadata=None))
    workers: Any = import_fresh()[1]
    ranks = dist.get_world_size()
    moe = moe_config(ranks, 1, HIDDEN, max_tokens=4)
    opened = workers.open_workers(moe, 60000)
    opened.stop_watching()  # its thread would log the error, too
    processes = [place.process for place in opened.places]
    if rank == ranks - 1:
        opened.group.abort("the test ends this rank")
    else:
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        workers.logger.addHandler(handler)
        layer = epic.torch.Layer(num_experts=ranks, top_k=1)
        with pytest.raises(epic.torch.EpicError, match=f"rank {ranks - 1}"):  # noqa: SIM117
            with opened.named_in_errors():
                epic.torch.plan(opened.group, layer, torch.zeros(1, 1, dtype=torch.int32))
        workers.logger.removeHandler(handler)
        assert len(lines) == 1 and "the test ends this rank" in lines[0], lines
        assert all(f"process {process}" in lines[0] for process in processes), lines
        assert os.getpid() in processes
    workers.close_workers()
    remove_stubs()


def check_slow(rank: int, slow: int) -> None:
    """Run steps in which one rank sleeps, and check which rank logs a line; -1: none sleeps."""
    ranks = dist.get_world_size()
    across = torch.full((ranks,), 2, dtype=torch.int32)
    metadata = SimpleNamespace(num_tokens_across_dp_cpu=across)
    install_stubs(TpGroup(rank, 1), SimpleNamespace(dp_metadata=metadata))
    exchange, workers = import_fresh()
    moe = moe_config(ranks, 1, HIDDEN, max_tokens=4)
    opened = workers.open_workers(moe, 60000)
    layer = exchange.EpicPrepareAndFinalize(moe, opened)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    workers.logger.addHandler(handler)
    # A time limit that only the sleeps reach. Without a sleep, the last step reaches it.
    workers.REPORT_SECONDS = 0.4
    workers.SLOW_SHARE = 0.5
    ids, ones = torch.full((2, 1), rank, dtype=torch.int32), torch.ones(2, 1)
    x = torch.ones(2, HIDDEN)
    for step in range(5):
        if slow >= 0:
            time.sleep(0.1 if rank == slow else 0.0)
        elif step == 4:
            time.sleep(0.5)
        rows, _, _, local, weights = layer.prepare(x, ones, ids, ranks, None, False, None)
        output = torch.empty_like(x)
        layer.finalize(output, rows.clone(), weights, local, False, NoOp())
    workers.logger.removeHandler(handler)
    speaks = slow >= 0 and rank == (1 if slow == 0 else 0)
    assert len(lines) == (1 if speaks else 0), lines
    if speaks:
        assert f"rank {slow} of {ranks} ({opened.places[slow]}) holds the others up" in lines[0]
    workers.close_workers()
    remove_stubs()


@pytest.mark.parametrize("slow", [-1, 0, 2])
def test_slow(world: World, slow: int) -> None:
    """Check that one rank logs one line about a slow rank, and no line without a slow rank."""
    world.run(check_slow, slow)


def test_names(world: World) -> None:
    """Check that an error names the rank, and the log the host and process of every rank."""
    world.run(check_names)
