# SPDX-License-Identifier: Apache-2.0
"""Tests the exchange of epic.vllm on four ranks, against stubs of vLLM's base classes.

The stubs have the names that epic.vllm uses, and nothing else. tests/vllm tests it in vLLM itself.
"""

import importlib
import logging
import os
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epic.torch
from epic.vllm.options import Options, check_supported, read_options
from epic.vllm.plugin import missing_names
from world import World

EXPERTS, TOP_K, HIDDEN = 8, 3, 16


class NoOp:
    """Stands for vLLM's class of experts that have applied the weights themselves."""

    def apply(self, output: Any, rows: Any, *_: Any) -> Any:
        """Return the rows."""
        assert output is None
        return rows


class TpGroup:
    """Stands for vLLM's group of tensor parallelism, over ranks that follow each other."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.world_size, self.rank_in_group = world_size, rank % world_size
        starts = range(0, dist.get_world_size(), world_size)
        groups = [dist.new_group(list(range(s, s + world_size))) for s in starts]
        self.group = groups[rank // world_size]

    def all_gather(self, own: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the parts of all ranks, one after the other."""
        assert dim == 0
        parts = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(parts, own, group=self.group)
        return torch.cat(parts)


def install_stubs(tp: TpGroup, context: SimpleNamespace) -> None:
    """Put modules with vLLM's names into sys.modules."""
    kernel = "vllm.model_executor.layers.fused_moe.modular_kernel"
    parts = kernel.split(".")
    names = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    for name in [*names, "vllm.distributed", "vllm.forward_context"]:
        sys.modules[name] = ModuleType(name)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, sys.modules[name])
    made: Any = sys.modules[kernel]
    made.FusedMoEPrepareAndFinalizeModular = type("Base", (), {})
    made.FusedMoEActivationFormat = SimpleNamespace(Standard="standard")
    made.ExpertTokensMetadata = lambda counts, _: counts
    where: Any = sys.modules["vllm.distributed"]
    where.get_tp_group = lambda: tp
    where.get_ep_group = lambda: SimpleNamespace(cpu_group=dist.group.WORLD)
    forward: Any = sys.modules["vllm.forward_context"]
    forward.get_forward_context = lambda: context


def remove_stubs() -> None:
    """Remove the stubs, because the tests of other files run in the same processes."""
    for name in [n for n in sys.modules if n.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def import_fresh() -> tuple[Any, Any]:
    """Import the modules of epic.vllm that use vLLM, again for each set of stubs."""
    for name in ("epic.vllm.exchange", "epic.vllm.workers"):
        sys.modules.pop(name, None)
    workers = importlib.import_module("epic.vllm.workers")
    return importlib.import_module("epic.vllm.exchange"), workers


def scale_of(expert: torch.Tensor) -> torch.Tensor:
    """Return what the experts of these tests multiply a token by."""
    return 1.0 + expert.to(torch.float64)


def check_exchange(rank: int, tp_size: int, dtype: torch.dtype, case: str) -> None:
    """Run prepare, experts and finalize, and compare the result with float64.

    case: "idle" gives all ranks except the first TP group a single token; "input" applies the
    weights to the tokens.
    """
    tp, context = TpGroup(rank, tp_size), SimpleNamespace(dp_metadata=None)
    install_stubs(tp, context)
    exchange, workers = import_fresh()

    on_input = case == "input"
    top_k = 1 if on_input else TOP_K
    num_groups = dist.get_world_size() // tp_size
    sizes = [7, *(1 if case == "idle" else 5 + n for n in range(num_groups - 1))]
    if num_groups > 1:
        across = torch.tensor(sizes, dtype=torch.int32)
        context.dp_metadata = SimpleNamespace(num_tokens_across_dp_cpu=across)
    moe = SimpleNamespace(
        num_experts=EXPERTS,
        experts_per_token=top_k,
        hidden_dim=HIDDEN,
        in_dtype=dtype,
        num_local_experts=EXPERTS // dist.get_world_size(),
        max_num_tokens=16,
        moe_parallel_config=SimpleNamespace(sp_size=1),
    )
    opened = workers.open_workers(moe, 60000)
    assert workers.open_workers(moe, 60000) is opened  # layers of one size share a group
    assert len(set(opened.places)) == dist.get_world_size()  # each rank is another process
    layer = exchange.EpicPrepareAndFinalize(moe, opened)
    assert layer.output_is_reduced() and layer.num_dispatchers() == dist.get_world_size()
    draw = torch.Generator().manual_seed(rank // tp_size)  # equal tokens in a TP group
    for _ in range(3):
        tokens = sizes[rank // tp_size]
        x = torch.randn(tokens, HIDDEN, generator=draw).to(dtype)
        scores = torch.rand(tokens, EXPERTS, generator=draw)
        weights, ids = scores.topk(top_k)
        ids = ids.to(torch.int32)
        rows, _, counts, local, slot_weights = layer.prepare(
            x, weights, ids, EXPERTS, None, on_input, None
        )
        assert int(counts.sum()) == rows.shape[0] == local.shape[0] == slot_weights.shape[0]
        output = torch.empty_like(x)
        factor = scale_of(local + moe.num_local_experts * rank)
        if not on_input:
            factor = factor * slot_weights.double()
        done = (rows.double() * factor).to(dtype)
        layer.finalize(output, done, slot_weights, local, on_input, NoOp())
        factors = (scale_of(ids) * weights.double()).sum(1, keepdim=True)
        wanted = x.double() * factors
        limit = 1e-6 if dtype == torch.float32 else 0.03
        assert (output.double() - wanted).abs().max() <= limit * wanted.abs().max()
    opened.group.close()
    workers.OPEN.clear()
    remove_stubs()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("tp_size", "case"), [(1, "plain"), (1, "idle"), (1, "input"), (2, "plain"), (4, "plain")]
)
def test_exchange(world: World, tp_size: int, case: str, dtype: torch.dtype) -> None:
    """Check DP, TP and DP x TP, different numbers of tokens, idle ranks, weights on the input."""
    world.run(check_exchange, tp_size, dtype, case)


def check_alias(rank: int) -> None:
    """Check the result if the experts write into the output, whose shape is that of the rows."""
    ranks = dist.get_world_size()
    across = torch.full((ranks,), ranks, dtype=torch.int32)
    metadata = SimpleNamespace(num_tokens_across_dp_cpu=across)
    install_stubs(TpGroup(rank, 1), SimpleNamespace(dp_metadata=metadata))
    exchange, workers = import_fresh()
    moe = SimpleNamespace(
        num_experts=ranks, experts_per_token=1, hidden_dim=HIDDEN, in_dtype=torch.float32,
        num_local_experts=1, max_num_tokens=4 * ranks,
        moe_parallel_config=SimpleNamespace(sp_size=1),
    )  # fmt: skip
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
    opened.group.close()
    workers.OPEN.clear()
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


def test_refuses_gpus() -> None:
    """Check that other platforms than the CPU are refused."""
    with pytest.raises(epic.torch.EpicUnsupportedError, match="must run on CPUs"):
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
    moe = SimpleNamespace(
        num_experts=ranks, experts_per_token=1, hidden_dim=HIDDEN, in_dtype=torch.float32,
        max_num_tokens=4,
    )  # fmt: skip
    opened = workers.open_workers(moe, 60000)
    processes = [place.rpartition(" ")[2] for place in opened.places]
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
        assert str(os.getpid()) in processes
    opened.group.close()
    workers.OPEN.clear()
    remove_stubs()


def check_slow(rank: int, slow: int) -> None:
    """Run steps in which one rank sleeps, and check which rank logs a line; -1: none sleeps."""
    ranks = dist.get_world_size()
    across = torch.full((ranks,), 2, dtype=torch.int32)
    metadata = SimpleNamespace(num_tokens_across_dp_cpu=across)
    install_stubs(TpGroup(rank, 1), SimpleNamespace(dp_metadata=metadata))
    exchange, workers = import_fresh()
    moe = SimpleNamespace(
        num_experts=ranks, experts_per_token=1, hidden_dim=HIDDEN, in_dtype=torch.float32,
        num_local_experts=1, max_num_tokens=4, moe_parallel_config=SimpleNamespace(sp_size=1),
    )  # fmt: skip
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
    opened.group.close()
    workers.OPEN.clear()
    remove_stubs()


@pytest.mark.parametrize("slow", [-1, 0, 2])
def test_slow(world: World, slow: int) -> None:
    """Check that one rank logs one line about a slow rank, and no line without a slow rank."""
    world.run(check_slow, slow)


def test_names(world: World) -> None:
    """Check that an error names the rank, and the log the host and process of every rank."""
    world.run(check_names)
