# SPDX-License-Identifier: Apache-2.0
"""Cases for the exchange of epic.vllm on GPUs, against stubs of vLLM's base classes.

They capture CUDA graphs at several padded sizes, and replay them with other tokens and choices.
vLLM itself does not run here.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gpu_cases
import torch
import torch.distributed as dist
from torch import Tensor

import epic.torch
from vllm_stubs import NoOp, import_fresh, install_stubs

Group = epic.torch.Group
TOP_K, LOCAL_EXPERTS, MAX_TOKENS = 3, 4, 64
PADDED = (1, 4, 16, 64)  # numbers of tokens of each rank, for which graphs are captured
E4M3 = SimpleNamespace(quant_dtype=torch.float8_e4m3fn, block_shape=[128, 128])

importing = threading.Lock()
context = threading.local()  # stands for vLLM's forward context; ranks may be threads


def make_exchange(group: Group, hidden: int, dtype: torch.dtype) -> Any:
    """Return the exchange of a layer with LOCAL_EXPERTS experts on each rank."""
    ranks = group.num_ranks
    with importing:
        install_stubs(SimpleNamespace(world_size=1, rank_in_group=0), context)  # type: ignore[arg-type]
        exchange, workers = import_fresh()
    parallel = SimpleNamespace(sp_size=1)
    moe = SimpleNamespace(
        num_experts=LOCAL_EXPERTS * ranks,
        num_local_experts=LOCAL_EXPERTS,
        experts_per_token=TOP_K,
        hidden_dim=hidden,
        in_dtype=dtype,
        moe_parallel_config=parallel,
    )
    places = [workers.Place("", os.getpid())] * ranks
    return exchange.EpicPrepareAndFinalize(moe, workers.Workers(group, places))


class Step:
    """The tokens of one call at one size, in tensors that a graph reads, and its result."""

    def __init__(self, layer: Any, sizes: tuple[int, ...], hidden: int, dtype: torch.dtype) -> None:
        group = layer.workers.group
        self.layer, self.sizes, self.rank = layer, sizes, group.rank
        tokens = sizes[group.rank]
        self.num_experts = LOCAL_EXPERTS * group.num_ranks
        self.x = torch.zeros(tokens, hidden, dtype=dtype, device=group.device)
        self.weights = torch.zeros(tokens, TOP_K, device=group.device)
        self.ids = torch.zeros(tokens, TOP_K, dtype=torch.int32, device=group.device)
        self.output = torch.empty_like(self.x)

    def draw(self, seed: int) -> None:
        """Write other tokens, choices and weights; with odd seeds, choose few experts."""
        draw = torch.Generator().manual_seed(1000 * seed + self.rank)
        self.x.copy_(torch.randn(self.x.shape, generator=draw))
        scores = torch.rand(self.x.shape[0], self.num_experts, generator=draw)
        if seed % 2:
            scores[:, : TOP_K + 1] += 1.0
        weights, ids = scores.topk(TOP_K)
        self.weights.copy_(weights)
        self.ids.copy_(ids)

    def run(self, quant: Any = None) -> Tensor:
        """Run prepare, experts and finalize; expert e multiplies by 1 + e."""
        context.dp_metadata = SimpleNamespace(
            num_tokens_across_dp_cpu=torch.tensor(self.sizes, dtype=torch.int32)
        )
        rows, scales, _, chosen, slot_weights = self.layer.prepare(
            self.x, self.weights, self.ids, self.num_experts, None, False, quant
        )
        assert rows.shape[0] == min(TOP_K, LOCAL_EXPERTS) * sum(self.sizes)
        values = rows.float()
        if scales is not None:
            values = values * scales.repeat_interleave(128, dim=1)
        done = (values * (1 + chosen) * slot_weights).to(self.x.dtype)
        first = self.rank * LOCAL_EXPERTS
        is_own = (chosen >= first) & (chosen < first + LOCAL_EXPERTS)
        # no result of a slot without a row may reach a token
        done = torch.where(is_own, done, torch.nan)
        self.layer.finalize(self.output, done, slot_weights, chosen, False, NoOp())
        return self.output

    def check(self, limit: float) -> None:
        """Compare the result with a computation in float64."""
        factors = (self.weights.double() * (1 + self.ids)).sum(1, keepdim=True)
        wanted = self.x.double() * factors
        error = (self.output.double() - wanted).abs().max() / wanted.abs().max()
        assert error <= limit, f"sizes {self.sizes}: error {error}"


def replay(layer: Any, hidden: int, dtype: torch.dtype, limit: float, quant: Any = None) -> None:
    """Capture a graph for each padded size, then replay them in turn with other numbers."""
    group = layer.workers.group
    steps = []
    for size in PADDED:
        step = Step(layer, (size,) * group.num_ranks, hidden, dtype)
        step.draw(0)
        graph, _ = gpu_cases.capture(group, lambda step=step: step.run(quant))  # type: ignore[misc]
        steps.append((step, graph))
    for seed in range(1, 6):
        for step, graph in steps:
            step.draw(seed)
            step.output.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            step.check(limit)
    group.check()


def case_vllm(group: Group) -> None:
    """Check graphs at several sizes with other routings, and steps with idle ranks, in bfloat16."""
    hidden, dtype = 256, torch.bfloat16
    with gpu_cases.open_another(group, device=group.device, max_tokens=MAX_TOKENS,
                                max_row_bytes=2 * hidden) as wide:  # fmt: skip
        layer = make_exchange(wide, hidden, dtype)
        replay(layer, hidden, dtype, 0.03)
        for seed, sizes in enumerate([(7, 1, 1, 1), (1, 1, 1, 1), (1, 64, 1, 1)]):
            step = Step(layer, (2 * sizes)[: group.num_ranks], hidden, dtype)
            step.draw(seed)
            step.run()
            step.check(0.03)


def case_vllm_e4m3(group: Group) -> None:
    """Check graphs with rows in e4m3."""
    hidden, dtype = 256, torch.bfloat16
    with gpu_cases.open_another(group, device=group.device, max_tokens=MAX_TOKENS,
                                max_row_bytes=2 * hidden) as wide:  # fmt: skip
        replay(make_exchange(wide, hidden, dtype), hidden, dtype, 0.08, E4M3)


CASES: dict[str, Callable[[Group], None]] = {"vllm": case_vllm, "vllm_e4m3": case_vllm_e4m3}


# ------------------------------------------------------------------------------ a death ----


def killed(rank: int, size: int) -> tuple[float, int]:
    """Kill the last rank between two replays; the thread of the others ends their workers.

    Returns:
        The seconds from the death until SIGTERM, and how often this process got it.
    """
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.set_num_threads(1)
    gpu_cases.store = dist.PrefixStore("killed", dist.group.WORLD.get_group_store())  # type: ignore[union-attr]
    ended: list[float] = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(time.monotonic()))
    with Group(max_tokens=MAX_TOKENS, max_row_bytes=512, device=device, timeout_ms=60000) as group:
        layer = make_exchange(group, 256, torch.bfloat16)
        step = Step(layer, (16,) * size, 256, torch.bfloat16)
        step.draw(0)
        graph, _ = gpu_cases.capture(group, step.run)
        graph.replay()
        torch.cuda.synchronize()
        step.check(0.03)
        layer.workers.start_watching()
        dist.barrier()
        if rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        graph.replay()
        torch.cuda.synchronize()
        while not ended and time.monotonic() < begin + 30:
            time.sleep(0.01)
        layer.workers.stop_watching()
        return (ended or [time.monotonic()])[0] - begin, len(ended)


def deaths(size: int) -> str:
    """Run the killed-rank case; return what failed."""
    from world import World

    with World(size, uses_cuda=True) as world:
        world.start(killed, size)
        answers = [world.answer(rank, 90) for rank in range(size)]
    for rank, (good, said) in enumerate(answers[:-1]):
        if not good or said[1] != 1:
            return f"vLLM's exchange, rank {rank}: {said}"
        print(f"  vLLM's exchange, rank {rank}: SIGTERM {said[0]:.2f} s after the death")
    return ""
