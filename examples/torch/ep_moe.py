# SPDX-License-Identifier: Apache-2.0
"""Stacked Mixture-of-Experts layers on a dp x ep mesh of processes, with gradients.

python examples/torch/ep_moe.py                           4 processes, 2 x 2, on the CPU
python examples/torch/ep_moe.py --check --ep 4            compare with plain torch, exit 1 on a miss
python examples/torch/ep_moe.py --compile                 the model under torch.compile
python examples/torch/ep_moe.py --device cuda --processes 2 --ep 2      a GPU for each process
torchrun --nproc-per-node 4 examples/torch/ep_moe.py      started by torchrun
"""

import argparse
import os
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import epic.torch


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model."""

    batch: int = 8
    length: int = 16
    hidden: int = 32
    inner: int = 48
    experts: int = 8
    top_k: int = 2
    layers: int = 3


def arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--ep", type=int, default=2, help="ranks that share the experts")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--check", action="store_true", help="compare with plain torch in float64")
    return parser.parse_args()


# ------------------------------------------------------------------------------ model ----


class Model(nn.Module):
    """Mixture-of-Experts layers with residual connections."""

    def __init__(self, sizes: Sizes, group: epic.torch.Group) -> None:
        super().__init__()
        options = epic.torch.Moe.of(
            num_experts=sizes.experts, top_k=sizes.top_k, hidden=sizes.hidden, inner=sizes.inner
        )
        layers = [epic.torch.MoE(group, options) for _ in range(sizes.layers)]
        for seed, layer in enumerate(layers):
            layer.reset_parameters(seed)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for x [..., hidden]."""
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


def plain(layers: list[dict[str, Tensor]], top_k: int, x: Tensor) -> Tensor:
    """Compute the output of the model with plain torch: all experts on one device, one by one."""
    for w in layers:
        scores, chosen = (x @ w["w_gate"]).softmax(-1).topk(top_k, dim=-1)
        out = torch.zeros_like(x)
        for expert, (gate_up, down) in enumerate(zip(w["w_gate_up"], w["w_down"], strict=True)):
            gate, up = (x @ gate_up).chunk(2, dim=-1)
            weight = torch.where(chosen == expert, scores, 0).sum(-1, keepdim=True)
            out = out + weight * ((nn.functional.silu(gate) * up) @ down)
        x = x + out
    return x


# ------------------------------------------------------------------------------ check ----


def miss(a: Tensor, b: Tensor) -> float:
    """Return the relative error of a against b."""
    return float((a.double() - b).abs().max() / b.abs().max())


def error_of(
    sizes: Sizes, group: epic.torch.Group, model: Model, part: slice, got: list[Tensor]
) -> float:
    """Return the largest relative error of this process, against the whole model in float64.

    It compares the output, the gradient of x, and the gradients of this rank's parameters.

    Args:
        sizes: The sizes.
        group: The group.
        model: The model of this process, after backward.
        part: The samples of this process.
        got: The output and the gradient of x.
    """
    x, ct = batch(sizes)
    with epic.torch.Group(num_ranks=1, max_tokens=1, max_row_bytes=1) as alone:
        names = ("w_gate", "w_gate_up", "w_down")
        whole = Model(sizes, alone).layers
        layers = [
            {n: getattr(layer, n).detach().double().requires_grad_() for n in names}
            for layer in whole
        ]
    x = x.double().requires_grad_()
    out = plain(layers, sizes.top_k, x)
    out.backward(ct.double())
    assert x.grad is not None
    errors = [miss(got[0], out.detach()[part]), miss(got[1], x.grad[part])]
    local = sizes.experts // group.num_ranks
    mine = slice(group.rank * local, (group.rank + 1) * local)
    for layer, truth in zip(model.layers, layers, strict=True):
        for name in names:
            wanted = truth[name].grad
            assert wanted is not None
            gradient = getattr(layer, name).grad.cpu()
            errors.append(miss(gradient, wanted[mine] if name != "w_gate" else wanted))
    return max(errors)


def batch(sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Return x and the gradient of the output, for the samples of all processes."""
    generator = torch.Generator().manual_seed(1)
    x, ct = torch.randn(2, sizes.batch, sizes.length, sizes.hidden, generator=generator)
    return x, ct


def run(args: argparse.Namespace) -> int:
    """Run one process; return 0 if its results are correct."""
    rank, count = dist.get_rank(), dist.get_world_size()
    if args.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    sizes = Sizes()
    mesh = init_device_mesh(args.device, (count // args.ep, args.ep), mesh_dim_names=("dp", "ep"))
    x, ct = batch(sizes)
    each = sizes.batch // count
    part = slice(rank * each, (rank + 1) * each)
    tokens = each * sizes.length
    with epic.torch.Group(mesh, "ep", max_tokens=tokens, max_row_bytes=4 * sizes.hidden) as group:
        model = Model(sizes, group)
        forward = torch.compile(model, fullgraph=True) if args.compile else model
        rows = x[part].to(group.device).requires_grad_()
        d_out = ct[part].to(group.device)
        forward(rows).backward(d_out)  # warm up; with --compile this compiles the model
        seconds = []
        for _ in range(args.steps):
            model.zero_grad()
            rows.grad = None
            start = time.perf_counter()
            out = forward(rows)
            out.backward(d_out)
            if args.device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        for layer in model.layers:
            layer.sum_gradients()
        for name, parameter in model.named_parameters():
            if mesh["dp"].size() > 1:
                dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
            assert parameter.grad is not None, name
        assert rows.grad is not None
        got = [out.detach().cpu(), rows.grad.cpu()]
        error = error_of(sizes, group, model, part, got) if args.check else 0.0
    worst = torch.tensor([error], device=group.device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if rank == 0:
        ms = min(seconds, default=0.0) * 1e3
        shape = f"{count // args.ep} x {args.ep} processes on {args.device}"
        print(f"{shape}: forward and backward of {sizes.layers} layers in {ms:.1f} ms")
        if args.check:
            print(f"largest relative error {worst.item():.1e}: {verdict(worst.item())}")
    return int(worst.item() >= 1e-5)


def verdict(error: float) -> str:
    """Return "right" or "WRONG" for the largest relative error."""
    return "right" if error < 1e-5 else "WRONG"


def start(rank: int, args: argparse.Namespace, port: int) -> None:
    """Run one of the processes that this program starts itself."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=args.processes)
    code = run(args)
    dist.destroy_process_group()
    sys.exit(code)


def main() -> Any:
    """Run as the launcher, or as one of torchrun's processes."""
    args = arguments()
    if "LOCAL_RANK" in os.environ:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
        return run(args)
    with socket.socket() as holder:  # keeps the system from using the port for a connection
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # lets a process listen too
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        torch.multiprocessing.spawn(start, (args, port), nprocs=args.processes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
