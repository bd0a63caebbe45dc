# SPDX-License-Identifier: Apache-2.0
"""EPIC against all_to_all_single in the same run: the exchange of a layer, forward and backward.

python bench/torch_bench.py                         a process for each GPU; else 4 on the CPU
python bench/torch_bench.py --tokens 128 4096 --cuda-graph
python bench/torch_bench.py --profile DIR           Chrome traces and a CSV of the kernels of each
python bench/torch_bench.py --ranks 2               on one GPU: EPIC alone, NCCL takes no two there

plain: rows are sorted by expert and sent once for each choice.  deduplicated: once for each rank
that has an expert for the token; weighted sums travel home.  All give the same sums.  C: the core's
calls with arguments that are filled already, in the same run.  --layers times the whole layer of
some shapes, by the core and by torch: grouped_mm with the deduplicated exchange."""

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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.distributed.nn.functional import all_to_all_single
from torch_core import Core

import epic.torch

Step = Callable[[Tensor, Tensor], Tensor]
BURST = 10  # number of calls that are timed together


class Shape(NamedTuple):
    """The sizes of a layer; inner 0: only its exchange."""

    hidden: int
    experts: int
    top_k: int
    inner: int = 0


def shape(text: str) -> Shape:
    """HIDDEN,EXPERTS,TOP_K,INNER."""
    return Shape(*map(int, text.split(",")))


def arguments() -> argparse.Namespace:
    """Parse the command line; default sizes depend on the machine."""
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=gpus or 4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096 if gpus else 256])
    parser.add_argument("--hidden", type=int, default=7168 if gpus else 512)
    parser.add_argument("--experts", type=int, default=64 if gpus else 16)
    parser.add_argument("--top-k", type=int, default=8 if gpus else 4)
    parser.add_argument(
        "--layers",
        type=shape,
        nargs="+",
        default=[],
        metavar="HIDDEN,EXPERTS,TOP_K,INNER",
        help="whole layers too, with the most tokens",
    )
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
    """Exchange rows between ranks, with a gradient."""
    out = rows.new_empty((sum(recv), rows.shape[1]))
    return all_to_all_single(out, rows, recv, send)


def splits(counts: Tensor) -> tuple[list[int], list[int]]:
    """Return how many rows go to each rank and come from it; the host waits."""
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    return counts.tolist(), theirs.tolist()


def plain(of: Shape, ids: Tensor, ranks: int) -> Step:
    """Return the pipeline that sends a row for each choice."""

    def step(x: Tensor, w: Tensor) -> Tensor:
        flat = ids.reshape(-1)
        order = flat.argsort(stable=True)
        token = order // of.top_k
        load = torch.bincount(flat, minlength=of.experts)
        send, recv = splits(load.reshape(ranks, -1).sum(1))
        landed = exchange(x[token], send, recv)
        local = torch.empty(sum(recv), dtype=flat.dtype, device=flat.device)
        dist.all_to_all_single(local, flat[order], recv, send)
        by_expert = local.argsort(stable=True)
        slabs = landed[by_expert]  # experts would compute here
        home = exchange(torch.empty_like(slabs).index_copy(0, by_expert, slabs), recv, send)
        weighted = home * w.reshape(-1)[order][:, None].to(home.dtype)
        return torch.zeros_like(x).index_add(0, token, weighted)

    return step


def no_experts(slabs: Tensor, _: Tensor) -> Tensor:
    """Return the slabs unchanged, in place of experts."""
    return slabs


def deduplicated(
    of: Shape, ids: Tensor, ranks: int, mlp: Callable[..., Tensor] = no_experts
) -> Step:
    """Return the pipeline that sends a row for each (token, rank), with the weights of its
    experts."""
    each = of.experts // ranks

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
        landed_e = torch.empty((sum(recv), of.top_k), dtype=local.dtype, device=x.device)
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


def gated(z: Tensor) -> Tensor:
    """Return the activation."""
    gate, up = z.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


class TorchLayer:
    """The whole layer in torch: the deduplicated exchange around torch._grouped_mm, on GPUs with a
    compiled activation."""

    def __init__(self, of: Shape, ranks: int, layer: epic.torch.MoE) -> None:
        self.of, self.ranks, self.layer = of, ranks, layer
        on_gpu = layer.w_down.is_cuda
        self.gated = torch.compile(gated, dynamic=True) if on_gpu else gated

    def mlp(self, slabs: Tensor, counts: Tensor) -> Tensor:
        """Compute the experts."""
        ends = counts.cumsum(0, dtype=torch.int32)
        a = self.gated(torch._grouped_mm(slabs, self.layer.w_gate_up, ends))
        return torch._grouped_mm(a, self.layer.w_down, ends)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the layer."""
        scores = (x.float() @ self.layer.w_gate).softmax(-1)
        w, ids = scores.topk(self.of.top_k)
        return deduplicated(self.of, ids, self.ranks, self.mlp)(x, w)


def of_epic(group: epic.torch.Group, of: Shape, ids: Tensor) -> Step:
    """Return the pipeline of EPIC: plan_dispatch and combine."""
    layer = epic.torch.Layer(of.experts, of.top_k)

    def step(x: Tensor, w: Tensor) -> Tensor:
        plan, recv, slot = epic.torch.plan_dispatch(group, layer, ids, x, w, zero_tail=False)
        return epic.torch.combine(plan, recv, slot)

    return step


# ----------------------------------------------------------------------------- measuring ----


def settle(device: torch.device) -> None:
    """Wait until all ranks are here."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def median_ms(run: Callable[[], Any], device: torch.device, repeat: int) -> float:
    """Return the median time of a call on the slowest rank."""
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
    """Return the median over the calls of the slowest rank's value."""
    on = "cpu" if dist.get_backend() == "gloo" else device
    worst = torch.tensor(values, dtype=torch.float64, device=on)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return statistics.median(worst.tolist())


def burst_us(run: Callable[[], Any], device: torch.device, repeat: int) -> tuple[float, float]:
    """Return the time of one of BURST calls on the slowest rank: on the device, and on the host
    that makes it."""
    on_gpu = device.type == "cuda"
    for _ in range(5):
        run()
    on_device, on_host = [], []
    for _ in range(repeat):
        settle(device)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_gpu else []
        run()  # all ranks begin at the same time
        for mark in marks[:1]:
            mark.record()
        start = time.perf_counter()
        for _ in range(BURST):
            run()
        on_host.append((time.perf_counter() - start) / BURST * 1e6)
        for mark in marks[1:]:
            mark.record()
        if on_gpu:
            torch.cuda.synchronize()
            on_device.append(marks[0].elapsed_time(marks[1]) / BURST * 1e3)
    host = slowest(on_host, device)
    return slowest(on_device, device) if on_gpu else host, host


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """Return the call captured in a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        result = run()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def profiled(run: Callable[[], Any], folder: Path, rank: int) -> None:
    """Write trace-RANK.json and kernels-RANK.csv."""
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
    """Return the relative difference."""
    return float((a.float() - b.float()).abs().max() / b.float().abs().max())


def measure(rank: int, args: argparse.Namespace) -> None:
    """Run all measurements in one process."""
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
    widest = max(of.hidden for of in (Shape(args.hidden, 0, 0), *args.layers))
    wide = widest * (2 if on_gpu else 4)
    sizes = {"max_tokens": max(args.tokens), "max_row_bytes": wide, "device": device}
    with epic.torch.Group(**sizes) as group:
        for tokens in args.tokens:
            compare(rank, args, group, tokens)
        for of in args.layers:
            attempt(rank, partial(layers, rank, args, group, of))
        settle(device)
    dist.destroy_process_group()


def data(group: epic.torch.Group, tokens: int, hidden: int) -> tuple[Tensor, Tensor]:
    """Return tokens and an output gradient."""
    on = group.device
    dtype = torch.bfloat16 if on.type == "cuda" else torch.float32
    torch.manual_seed(group.rank)
    x, ct = (torch.randn(tokens, hidden, dtype=dtype, device=on) for _ in range(2))
    return x.requires_grad_(), ct


def title(rank: int, args: argparse.Namespace, of: Shape, x: Tensor) -> None:
    """Print what is timed below."""
    where = torch.cuda.get_device_name() if x.is_cuda else "CPU"
    what = f"{len(x)} tokens of {of.hidden} {str(x.dtype)[6:]}, top {of.top_k} of {of.experts}"
    inner = f", inner {of.inner}" if of.inner else ""
    if rank == 0:
        print(f"\n{args.ranks} ranks ({where}), {what}{inner}", flush=True)


def compare(rank: int, args: argparse.Namespace, group: epic.torch.Group, tokens: int) -> None:
    """Time the exchange with one number of tokens."""
    of = Shape(args.hidden, args.experts, args.top_k)
    x, ct = data(group, tokens, of.hidden)
    chosen = torch.rand(tokens, of.experts, device=x.device).topk(of.top_k)
    w = chosen.values.softmax(-1).requires_grad_()
    ids = chosen.indices.to(torch.int32)
    title(rank, args, of, x)
    steps = {"EPIC": of_epic(group, of, ids)}
    if not args.shared:
        steps["plain"] = plain(of, ids.long(), args.ranks)
        steps["deduplicated"] = deduplicated(of, ids.long(), args.ranks)
    attempt(rank, lambda: agree(steps, x, w, ct))
    attempt(rank, lambda: raw(rank, args, group, of, ids, x, w))
    report(rank, args, steps, x, w, ct)


def layers(rank: int, args: argparse.Namespace, group: epic.torch.Group, of: Shape) -> None:
    """Time a whole layer with its experts, of the core and of torch."""
    x, ct = data(group, max(args.tokens), of.hidden)
    title(rank, args, of, x)
    options = epic.torch.Moe.of(
        num_experts=of.experts, top_k=of.top_k, hidden=of.hidden, inner=of.inner
    )
    module = epic.torch.MoE(group, options, dtype=x.dtype, device="meta")
    module.to_empty(device=x.device)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=of.hidden**-0.5)
    dist.broadcast(module.w_gate.data, 0)
    leaves = (x, module.w_gate, module.w_gate_up, module.w_down)
    runs: dict[str, Callable[[Tensor], Tensor]] = {"EPIC, layer": lambda v: module(v)[0]}
    if not args.shared:
        runs["torch, layer"] = TorchLayer(of, args.ranks, module)
    results: list[list[Tensor]] = []
    table = Table(rank, args, x.device)
    for name, run in runs.items():

        def one(run: Any = run) -> Tensor:
            with torch.no_grad():
                return run(x)

        def two(run: Any = run) -> Any:
            return torch.autograd.grad(run(x), leaves, ct)

        results.append([one(), *two()])
        attempt(rank, partial(table.line, name, [one, two]))
        if args.profile and name.startswith("EPIC"):
            profiled(two, args.profile / "-".join(map(str, of)), rank)
    if len(results) == 2:
        differences = [worst(a, b) for a, b in zip(*results, strict=True)]
        if rank == 0:
            said = " ".join(f"{v:.0e}" for v in differences)
            print(f"they differ in out, d_x, d_w_gate, d_w_gate_up, d_w_down by {said}", flush=True)


def attempt(rank: int, run: Callable[[], Any]) -> Any:
    """Return the result of a measurement. If it fails, print the error and continue with the next
    one."""
    try:
        return run()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())[:600]
        print(f"rank {rank}: FAILED: {type(error).__name__}: {text} [{where.line}]", flush=True)
        return None


def forward(step: Step, x: Tensor, w: Tensor) -> Callable[[], Any]:
    """Return the call without gradients."""

    def run() -> Tensor:
        with torch.no_grad():
            return step(x, w)

    return run


def both(step: Step, x: Tensor, w: Tensor, ct: Tensor) -> Callable[[], Any]:
    """Return the call forward and backward."""
    return lambda: torch.autograd.grad(step(x, w), (x, w), ct)


def agree(steps: dict[str, Step], x: Tensor, w: Tensor, ct: Tensor) -> None:
    """Check that all pipelines give the same results."""
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
    of: Shape,
    ids: Tensor,
    x: Tensor,
    w: Tensor,
) -> None:
    """Time the single calls without gradients, and those of C."""
    layer = epic.torch.Layer(of.experts, of.top_k)
    x, w = x.detach(), w.detach()
    plan, recv, slot = epic.torch.plan_dispatch(group, layer, ids, x, w, zero_tail=False)
    calls: dict[str, Callable[[], Any]] = {
        "plan_dispatch": lambda: epic.torch.plan_dispatch(group, layer, ids, x, w, zero_tail=False),
        "dispatch": lambda: epic.torch.dispatch(plan, x, w, zero_tail=False),
        "combine": lambda: epic.torch.combine(plan, recv, slot),
    }
    core = Core(group, layer, ids, x, w, zero_tail=False).calls()
    if rank == 0:
        print(f"{'us a call, of ' + str(BURST):24}{'C':>8}{'torch':>8}{'host':>8}{'captured':>10}")
    for name, call in calls.items():
        in_c, _ = burst_us(core[name], group.device, args.repeat)
        us, host = burst_us(call, group.device, args.repeat)
        graph = burst_us(captured(call), group.device, args.repeat)[0] if args.cuda_graph else 0.0
        if rank == 0:
            print(f"{name:24}{in_c:8.1f}{us:8.1f}{host:8.1f}{graph:10.1f}", flush=True)


def report(
    rank: int,
    args: argparse.Namespace,
    steps: dict[str, Step],
    x: Tensor,
    w: Tensor,
    ct: Tensor,
) -> None:
    """Time every pipeline."""
    table = Table(rank, args, x.device)
    for name, step in steps.items():
        runs = {name: [forward(step, x, w), both(step, x, w, ct)]}
        if name == "EPIC" and args.cuda_graph:
            graphs = attempt(rank, partial(list, map(captured, runs[name])))
            runs |= {"EPIC, CUDA graph": graphs} if graphs else {}
        for what, pair in runs.items():
            attempt(rank, partial(table.line, what, pair))
    if args.profile:
        profiled(both(steps["EPIC"], x, w, ct), args.profile, rank)


class Table:
    """Prints times of pipelines. The first is EPIC's; for the others it also prints the ratio."""

    def __init__(self, rank: int, args: argparse.Namespace, device: torch.device) -> None:
        self.rank, self.repeat, self.device = rank, args.repeat, device
        self.first: list[float] = []
        if rank == 0:
            print(f"{'ms, slowest rank, median':24}{'forward':>16}{'and backward':>16}")

    def line(self, what: str, pair: list[Callable[[], Any]]) -> None:
        """Print the times of one operation."""
        times = [median_ms(run, self.device, self.repeat) for run in pair]
        self.first = self.first or times
        if self.rank == 0:
            cells = (f"{a:8.3f} ({a / b:.2f})" for a, b in zip(times, self.first, strict=True))
            print(f"{what:24}" + "".join(f"{cell:>16}" for cell in cells), flush=True)


def main() -> int:
    """Start the processes."""
    args = arguments()
    torch.multiprocessing.spawn(measure, (args,), nprocs=args.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
