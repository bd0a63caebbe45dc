# SPDX-License-Identifier: Apache-2.0
"""Compares the exchange of epic.vllm with an all-gather exchange, by turns in the same processes.

python -W ignore bench/vllm_exchange.py --ranks 2 --tokens 16

It needs vLLM, for example the environment build/venv-vllm of `make test-vllm`.
Times are microseconds per MoE layer on rank 0. "exchange" is prepare() and finalize() of epic.vllm;
for the all-gather it is vLLM's own scheme: gather tokens, weights and experts of all ranks, and
reduce-scatter the results, over gloo. "layer" adds vLLM's experts. With all-gather they get all
tokens; the choices of experts of other ranks have the weight 0 and the first own expert. The
functions take turns, and all ranks meet before each one.
"""

import argparse
import socket
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from vllm import _custom_ops as ops

import epic.vllm.exchange as exchange
import epic.vllm.workers as workers


class NoOp:
    """Stands for vLLM's object that does nothing, because the experts have applied the weights."""

    def apply(self, _: Any, rows: Tensor, *_more: Any) -> Tensor:
        """Return the rows."""
        return rows


class Layer:
    """One MoE layer of a rank, with both exchanges.

    Args:
        args: The arguments of the program.
        rank: The number of this rank.
    """

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        self.ranks, self.local = args.ranks, args.experts // args.ranks
        self.first = rank * self.local
        draw = torch.Generator().manual_seed(rank)
        self.x = torch.randn(args.tokens, args.hidden, generator=draw).to(torch.bfloat16)
        scores = torch.rand(args.tokens, args.experts, generator=draw)
        self.weights, ids = scores.topk(args.top_k)
        self.ids = ids.to(torch.int32)
        w13 = (
            torch.randn(self.local, 2 * args.inner, args.hidden, generator=draw) * args.hidden**-0.5
        )
        w2 = torch.randn(self.local, args.hidden, args.inner, generator=draw) * args.inner**-0.5
        self.w13 = ops.cpu_prepack_moe_weight(w13.to(torch.bfloat16), args.isa)
        self.w2 = ops.cpu_prepack_moe_weight(w2.to(torch.bfloat16), args.isa)
        self.isa = args.isa
        self.epic = self.make_exchange(args)

    def make_exchange(self, args: argparse.Namespace) -> Any:
        """Return the object of epic.vllm, with the parts of a running vLLM that it looks up."""
        lookups: Any = (exchange, workers)
        across = torch.full((args.ranks,), args.tokens, dtype=torch.int32)
        metadata = SimpleNamespace(num_tokens_across_dp_cpu=across)
        lookups[0].get_tp_group = lambda: SimpleNamespace(world_size=1, rank_in_group=0)
        lookups[0].get_forward_context = lambda: SimpleNamespace(dp_metadata=metadata)
        lookups[1].get_ep_group = lambda: SimpleNamespace(cpu_group=dist.group.WORLD)
        lookups[1].current_platform = SimpleNamespace(is_cpu=lambda: True)
        moe = SimpleNamespace(
            num_experts=args.experts, num_local_experts=self.local, hidden_dim=args.hidden,
            experts_per_token=args.top_k, in_dtype=torch.bfloat16, max_num_tokens=args.tokens,
            moe_parallel_config=SimpleNamespace(sp_size=1),
        )  # fmt: skip
        return exchange.EpicPrepareAndFinalize(moe, workers.open_workers(moe, 60_000))

    def experts(self, rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Run vLLM's experts for CPUs."""
        out = torch.empty_like(rows)
        ops.cpu_fused_moe(
            out, rows, self.w13, self.w2, None, None, weights, ids, "silu", self.isa, False
        )
        return out

    def by_epic(self, with_experts: bool) -> Tensor:
        """Run the layer with the exchange of epic.vllm."""
        rows, _, _, ids, weights = self.epic.prepare(
            self.x, self.weights, self.ids, self.ranks * self.local, None, False, None
        )
        done = self.experts(rows, weights, ids) if with_experts else rows
        output = torch.empty_like(self.x)
        self.epic.finalize(output, done, weights, ids, False, NoOp())
        return output

    def by_gather(self, with_experts: bool) -> Tensor:
        """Run the layer with all-gather and reduce-scatter."""
        x, weights, ids = (self.gathered(t) for t in (self.x, self.weights, self.ids))
        is_own = (ids >= self.first) & (ids < self.first + self.local)
        weights, ids = torch.where(is_own, weights, 0.0), torch.where(is_own, ids - self.first, 0)
        done = self.experts(x, weights, ids) if with_experts else x
        output = torch.empty_like(self.x)
        dist.reduce_scatter_tensor(output, done)
        return output

    def gathered(self, part: Tensor) -> Tensor:
        """Return the parts of all ranks."""
        whole = part.new_empty((self.ranks * part.shape[0], *part.shape[1:]))
        dist.all_gather_into_tensor(whole, part)
        return whole


def measure(rank: int, args: argparse.Namespace, port: int) -> None:
    """Print the times; the body of a rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=args.ranks
    )
    layer = Layer(args, rank)
    one, other = layer.by_epic(True).float(), layer.by_gather(True).float()
    apart = ((one - other).abs().max() / other.abs().max()).item()
    assert apart < 0.05, f"the results of both exchanges differ by {apart}"
    calls: dict[str, Callable[[], Tensor]] = {
        "exchange, epic": lambda: layer.by_epic(False),
        "exchange, all-gather": lambda: layer.by_gather(False),
        "layer, epic": lambda: layer.by_epic(True),
        "layer, all-gather": lambda: layer.by_gather(True),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(args.rounds):
        for name, call in calls.items():
            dist.barrier()
            begin = time.perf_counter()
            call()
            if turn >= args.rounds // 10:  # the first ones warm up
                times[name].append((time.perf_counter() - begin) * 1e6)
    if rank == 0:
        print(f"{args.ranks} ranks, {args.tokens} tokens each; difference of results {apart:.1e}")
        print(f"{'':22}{'median':>9}{'smallest':>10}")
        for name, found in times.items():
            print(f"{name:22}{statistics.median(found):9.0f}{min(found):10.0f}")
        for what in ("exchange", "layer"):
            one_times, other_times = times[f"{what}, epic"], times[f"{what}, all-gather"]
            ratios = [
                choose(one_times) / choose(other_times) for choose in (statistics.median, min)
            ]
            print(f"{what + ', ratio':22}{ratios[0]:9.2f}{ratios[1]:10.2f}")
            if what == "exchange":
                assert ratios[0] <= args.at_most, f"{ratios[0]:.2f} is more than {args.at_most}"
    dist.barrier()


def main(words: list[str] | None = None) -> None:
    """Run the ranks.

    Args:
        words: The arguments of the program; None: those of the process.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("ranks", 2), ("tokens", 16), ("hidden", 1024), ("inner", 512), ("experts", 32),
        ("top-k", 4), ("rounds", 300),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    is_amx = torch.cpu._is_amx_tile_supported()
    parser.add_argument("--isa", default="amx" if is_amx else "vec", help="of vLLM's experts")
    text = "fail if the ratio of the medians of the exchange is larger"
    parser.add_argument("--at-most", type=float, default=float("inf"), help=text)
    args = parser.parse_args(words)
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port = made.getsockname()[1]
    mp.start_processes(measure, (args, port), args.ranks, start_method="fork")


if __name__ == "__main__":
    main()
