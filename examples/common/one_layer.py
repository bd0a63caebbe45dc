# SPDX-License-Identifier: Apache-2.0
"""What the examples of another framework's layer have in common: a layer learns a function, its
experts spread over processes; with --check the losses are compared with the framework's own."""

import argparse
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def start(about: str | None, other: str) -> argparse.Namespace:
    """One of torchrun's processes begins: `steps` and `check` of its command line."""
    parser = argparse.ArgumentParser(description=about.split("\n")[0] if about else None)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--check", action="store_true", help=f"compare with {other} dispatcher")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return args


def train(
    layer: Callable[[Tensor], Tensor],
    parameters: Iterable[Tensor],
    gate: Tensor,
    shape: tuple[int, ...],
    steps: int,
) -> list[float]:
    """The losses of all ranks together, each with tokens of its own.  The gate is the same on all
    ranks: its gradients are added, as the framework's data parallelism does it."""
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    ranks, losses = dist.get_world_size(), []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step * ranks + dist.get_rank())
        x = torch.randn(shape, generator=generator)
        loss = (layer(x) - torch.sin(2 * x)).square().mean() / ranks
        optimizer.zero_grad()
        loss.backward()
        dist.all_reduce(gate.grad)
        optimizer.step()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        losses.append(float(whole))
    return losses


def end(losses: list[float], wanted: list[float] | None, tolerance: float) -> int:
    """The process ends: 0 if the loss fell, and the losses are those that were wanted (None: any),
    to within a relative tolerance."""
    worst = max(abs(a - b) / b for a, b in zip(losses, wanted or losses, strict=True))
    right = worst < tolerance and losses[-1] < losses[0]
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {len(losses)} steps")
        if wanted:
            verdict = "right" if right else "WRONG"
            print(f"largest relative difference of {len(losses)} losses {worst:.1e}: {verdict}")
    dist.destroy_process_group()
    return int(not right)
