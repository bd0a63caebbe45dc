# SPDX-License-Identifier: Apache-2.0
"""EPIC against all_to_all_single in the same run: the exchange of a layer, forward and backward.

python bench/torch_bench.py                         a process for each GPU; else 4 on the CPU
python bench/torch_bench.py --tokens 128 4096 --cuda-graph
python bench/torch_bench.py --profile DIR           a Chrome trace and a CSV of the kernels
python bench/torch_bench.py --ranks 2               on one GPU: EPIC alone, NCCL takes no two there

plain: rows are sorted by expert and sent once for each choice.  deduplicated: once for each rank
that has an expert for the token; weighted sums travel home.  All give the same sums."""

import argparse
import csv
import os
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.distributed.nn.functional import all_to_all_single

import epic.torch

Step = Callable[[Tensor, Tensor], Tensor]
BURST = 10  # calls that are timed together


def arguments() -> argparse.Namespace:
    """The command line; sizes fit what is there."""
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=gpus or 4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096 if gpus else 256])
    parser.add_argument("--hidden", type=int, default=7168 if gpus else 512)
    parser.add_argument("--experts", type=int, default=64 if gpus else 16)
    parser.add_argument("--top-k", type=int, default=8 if gpus else 4)
    parser.add_argument("--inner", type=int, default=0, help="the whole layer too, so wide")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--cuda-graph", action="store_true", help="EPIC captured and replayed")
    parser.add_argument("--profile", type=Path, help="write a trace and a CSV there")
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        args.port = probe.getsockname()[1]
    args.shared = 0 < gpus < args.ranks
    return args


# ---------------------------------------------------------------------------- pipelines ----


def exchange(rows: Tensor, send: list[int], recv: list[int]) -> Tensor:
    """Rows to ranks, with a gradient."""
    out = rows.new_empty((sum(recv), rows.shape[1]))
    return all_to_all_single(out, rows, recv, send)


def splits(counts: Tensor) -> tuple[list[int], list[int]]:
    """What goes to each rank, and what comes: the host waits."""
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    return counts.tolist(), theirs.tolist()


def plain(args: argparse.Namespace, ids: Tensor, ranks: int) -> Step:
    """A row for each choice."""

    def step(x: Tensor, w: Tensor) -> Tensor:
        flat = ids.reshape(-1)
        order = flat.argsort(stable=True)
        token = order // args.top_k
        load = torch.bincount(flat, minlength=args.experts)
        send, recv = splits(load.reshape(ranks, -1).sum(1))
        landed = exchange(x[token], send, recv)
        local = torch.empty(sum(recv), dtype=flat.dtype, device=flat.device)
        dist.all_to_all_single(local, flat[order], recv, send)
        by_expert = local.argsort(stable=True)
        slabs = landed[by_expert]  # here the experts would be
        home = exchange(torch.empty_like(slabs).index_copy(0, by_expert, slabs), recv, send)
        weighted = home * w.reshape(-1)[order][:, None].to(home.dtype)
        return torch.zeros_like(x).index_add(0, token, weighted)

    return step


def no_experts(slabs: Tensor, _: Tensor) -> Tensor:
    """Where they would be."""
    return slabs


def deduplicated(
    args: argparse.Namespace, ids: Tensor, ranks: int, mlp: Callable[..., Tensor] = no_experts
) -> Step:
    """A row for each (token, rank), and the weights of its experts there beside it."""
    each = args.experts // ranks

    def step(x: Tensor, w: Tensor) -> Tensor:
        rank_of = ids // each
        wanted = torch.zeros((ranks, x.shape[0]), dtype=torch.bool, device=x.device)
        wanted[rank_of.T, torch.arange(x.shape[0], device=x.device)] = True
        rank, token = wanted.nonzero(as_tuple=True)
        send, recv = splits(wanted.sum(1))
        here = rank_of[token] == rank[:, None]
        weights = torch.where(here, w[token], 0)
        local = torch.where(here, ids[token] - rank[:, None] * each, -1)
        landed = exchange(x[token], send, recv)
        landed_w = exchange(weights, send, recv)
        landed_e = torch.empty((sum(recv), args.top_k), dtype=local.dtype, device=x.device)
        dist.all_to_all_single(landed_e, local, recv, send)
        row, k = (landed_e >= 0).nonzero(as_tuple=True)
        by_expert = landed_e[row, k].argsort(stable=True)
        row, k = row[by_expert], k[by_expert]
        slabs = mlp(landed[row], torch.bincount(landed_e[row, k], minlength=each))
        weighted = slabs * landed_w[row, k][:, None].to(slabs.dtype)
        partial = torch.zeros_like(landed).index_add(0, row, weighted)
        home = exchange(partial, recv, send)
        return torch.zeros_like(x).index_add(0, token, home)

    return step


class TorchLayer:
    """The whole layer of torch: the deduplicated exchange around torch._grouped_mm."""

    def __init__(self, args: argparse.Namespace, layer: epic.torch.MoE) -> None:
        self.args, self.layer = args, layer

    def mlp(self, slabs: Tensor, counts: Tensor) -> Tensor:
        """The experts."""
        ends = counts.cumsum(0, dtype=torch.int32)
        z = torch._grouped_mm(slabs, self.layer.w_gate_up, ends)
        gate, up = z.chunk(2, dim=1)
        a = torch.nn.functional.silu(gate) * up
        return torch._grouped_mm(a, self.layer.w_down, ends)

    def __call__(self, x: Tensor) -> Tensor:
        """The tokens."""
        scores = (x.float() @ self.layer.w_gate).softmax(-1)
        w, ids = scores.topk(self.args.top_k)
        return deduplicated(self.args, ids, self.args.ranks, self.mlp)(x, w)


def of_epic(group: epic.torch.Group, args: argparse.Namespace, ids: Tensor) -> Step:
    """plan_dispatch and combine."""
    layer = epic.torch.Layer(args.experts, args.top_k)

    def step(x: Tensor, w: Tensor) -> Tensor:
        plan, recv, slot = epic.torch.plan_dispatch(group, layer, ids, x, w, zero_tail=False)
        return epic.torch.combine(plan, recv, slot)

    return step


# ----------------------------------------------------------------------------- measuring ----


def settle(device: torch.device) -> None:
    """Everyone begins at once."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def median_ms(run: Callable[[], Any], device: torch.device, repeat: int) -> float:
    """Of one call, the slowest rank's."""
    for _ in range(5):
        run()
    seconds = []
    for _ in range(repeat):
        settle(device)
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return slowest(seconds, device) * 1e3


def slowest(values: list[float], device: torch.device) -> float:
    """The median of what the slowest rank had each time."""
    on = "cpu" if dist.get_backend() == "gloo" else device
    worst = torch.tensor(values, dtype=torch.float64, device=on)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return statistics.median(worst.tolist())


def burst_us(run: Callable[[], Any], device: torch.device, repeat: int) -> tuple[float, float]:
    """Of one call among BURST, the slowest rank's: on the device, and of the host that makes it."""
    for _ in range(5):
        run()
    on_device, on_host = [], []
    for _ in range(repeat):
        settle(device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        run()  # ranks begin at once
        begin.record()
        start = time.perf_counter()
        for _ in range(BURST):
            run()
        on_host.append((time.perf_counter() - start) / BURST * 1e6)
        end.record()
        torch.cuda.synchronize()
        on_device.append(begin.elapsed_time(end) / BURST * 1e3)
    return slowest(on_device, device), slowest(on_host, device)


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """As a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        kept = run()

    def replay() -> Any:
        graph.replay()
        return kept

    return replay


def profiled(run: Callable[[], Any], folder: Path, rank: int) -> None:
    """trace-RANK.json and kernels-RANK.csv."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.profiler.profile() as profile:
        for _ in range(5):
            run()
    profile.export_chrome_trace(str(folder / f"trace-{rank}.json"))
    with (folder / f"kernels-{rank}.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["name", "calls", "host_us", "device_us"])
        for event in profile.key_averages():
            device_us = getattr(event, "self_device_time_total", 0)
            table.writerow([event.key, event.count, event.self_cpu_time_total, device_us])


def worst(a: Tensor, b: Tensor) -> float:
    """Relative difference."""
    return float((a.float() - b.float()).abs().max() / b.float().abs().max())


def measure(rank: int, args: argparse.Namespace) -> None:
    """One process."""
    on_gpu = torch.cuda.is_available()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(args.port)}
    torch.set_num_threads(1)
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else "cpu"
    device = torch.device(device)
    more: dict[str, Any] = {}
    if on_gpu:
        torch.cuda.set_device(device)
        more = {} if args.shared else {"device_id": device}
    backend = "nccl" if on_gpu and not args.shared else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=args.ranks, **more)
    wide = args.hidden * (2 if on_gpu else 4)
    sizes = {"max_tokens": max(args.tokens), "max_row_bytes": wide, "device": device}
    with epic.torch.Group(**sizes) as group:
        for tokens in args.tokens:
            compare(rank, args, group, tokens)
        settle(device)
    dist.destroy_process_group()


def compare(rank: int, args: argparse.Namespace, group: epic.torch.Group, tokens: int) -> None:
    """All that is timed for one number of tokens."""
    device = group.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(rank)
    x = torch.randn(tokens, args.hidden, dtype=dtype, device=device).requires_grad_()
    ct = torch.randn(tokens, args.hidden, dtype=dtype, device=device)
    chosen = torch.rand(tokens, args.experts, device=device).topk(args.top_k)
    w = chosen.values.softmax(-1).requires_grad_()
    ids = chosen.indices.to(torch.int32)
    if rank == 0:
        where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        shape = f"{tokens} tokens of {args.hidden} {str(dtype)[6:]}, {args.experts} experts"
        print(f"\n{args.ranks} ranks ({where}), {shape}, top {args.top_k}")
    steps = {"EPIC": of_epic(group, args, ids)}
    if not args.shared:
        steps["plain"] = plain(args, ids.long(), args.ranks)
        steps["deduplicated"] = deduplicated(args, ids.long(), args.ranks)
    attempt(rank, lambda: agree(steps, x, w, ct))
    if device.type == "cuda":
        attempt(rank, lambda: raw(rank, args, group, ids, x, w))
    report(rank, args, steps, x, w, ct, device)
    if args.inner:
        attempt(rank, lambda: layers(rank, args, group, x, ct))


def layers(
    rank: int, args: argparse.Namespace, group: epic.torch.Group, x: Tensor, ct: Tensor
) -> None:
    """The whole layer with its experts: by the core, and by torch."""
    options = epic.torch.Moe.of(
        num_experts=args.experts, top_k=args.top_k, hidden=args.hidden, inner=args.inner
    )
    module = epic.torch.MoE(group, options, dtype=x.dtype, device="meta")
    module.to_empty(device=x.device)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=args.hidden**-0.5)
    leaves = (x, module.w_gate, module.w_gate_up, module.w_down)
    runs: dict[str, Callable[[Tensor], Tensor]] = {"EPIC, layer": lambda v: module(v)[0]}
    if not args.shared:
        runs["torch, layer"] = TorchLayer(args, module)
    results = {}
    for name, run in runs.items():

        def one(run: Any = run) -> Tensor:
            with torch.no_grad():
                return run(x)

        def two(run: Any = run) -> Any:
            return torch.autograd.grad(run(x), leaves, ct)

        results[name] = one()
        attempt(rank, partial(time_pair, rank, args, name, [one, two], x.device))
    if len(results) == 2:
        difference = worst(*results.values())
        if rank == 0:
            print(f"layers differ by {difference:.1e}", flush=True)


def attempt(rank: int, run: Callable[[], Any]) -> Any:
    """What it gives; where it fails its text, and the next goes on."""
    try:
        return run()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())[:600]
        print(f"rank {rank}: FAILED: {type(error).__name__}: {text} [{where.line}]", flush=True)
        return None


def forward(step: Step, x: Tensor, w: Tensor) -> Callable[[], Any]:
    """Without gradients."""

    def run() -> Tensor:
        with torch.no_grad():
            return step(x, w)

    return run


def both(step: Step, x: Tensor, w: Tensor, ct: Tensor) -> Callable[[], Any]:
    """Forward and backward."""
    return lambda: torch.autograd.grad(step(x, w), (x, w), ct)


def agree(steps: dict[str, Step], x: Tensor, w: Tensor, ct: Tensor) -> None:
    """The pipelines give the same."""
    results = {n: [forward(s, x, w)(), *both(s, x, w, ct)()] for n, s in steps.items()}
    most = 3e-2 if x.dtype == torch.bfloat16 else 1e-5
    for name, got in results.items():
        differences = [worst(a, b) for a, b in zip(got, results["EPIC"], strict=True)]
        if not max(differences) < most:
            raise AssertionError(f"{name} differs from EPIC: out, d_x, d_w by {differences}")


def raw(
    rank: int,
    args: argparse.Namespace,
    group: epic.torch.Group,
    ids: Tensor,
    x: Tensor,
    w: Tensor,
) -> None:
    """The single calls, without gradients."""
    layer = epic.torch.Layer(args.experts, args.top_k)
    x, w = x.detach(), w.detach()
    plan, recv, slot = epic.torch.plan_dispatch(group, layer, ids, x, w, zero_tail=False)

    def combine() -> Tensor:
        return epic.torch.combine(plan, recv, slot)

    def plan_dispatch() -> Any:
        return epic.torch.plan_dispatch(group, layer, ids, x, w, zero_tail=False)

    if rank == 0:
        print(f"{'us a call, of ' + str(BURST):24}{'device':>10}{'host':>8}{'captured':>10}")
    for name, call in {"plan + dispatch": plan_dispatch, "combine": combine}.items():
        us, host = burst_us(call, group.device, args.repeat)
        graph = burst_us(captured(call), group.device, args.repeat)[0] if args.cuda_graph else 0.0
        if rank == 0:
            print(f"{name:24}{us:10.1f}{host:8.1f}{graph:10.1f}", flush=True)


def report(
    rank: int,
    args: argparse.Namespace,
    steps: dict[str, Step],
    x: Tensor,
    w: Tensor,
    ct: Tensor,
    device: torch.device,
) -> None:
    """Times every pipeline."""
    if rank == 0:
        print(f"{'ms, slowest rank, median':24}{'forward':>10}{'and backward':>14}")
    for name, step in steps.items():
        runs = {name: [forward(step, x, w), both(step, x, w, ct)]}
        if name == "EPIC" and args.cuda_graph:
            made = attempt(rank, partial(list, map(captured, runs[name])))
            runs |= {"EPIC, CUDA graph": made} if made else {}
        for what, pair in runs.items():
            attempt(rank, partial(time_pair, rank, args, what, pair, device))
    if args.profile:
        profiled(both(steps["EPIC"], x, w, ct), args.profile, rank)


def time_pair(
    rank: int, args: argparse.Namespace, what: str, pair: list[Any], device: torch.device
) -> None:
    """A line of the table."""
    times = [median_ms(run, device, args.repeat) for run in pair]
    if rank == 0:
        print(f"{what:24}{times[0]:10.3f}{times[1]:14.3f}", flush=True)


def main() -> int:
    """Starts the processes."""
    args = arguments()
    torch.multiprocessing.spawn(measure, (args,), nprocs=args.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
