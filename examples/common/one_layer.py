# SPDX-License-Identifier: Apache-2.0
"""Shared code of the examples that train one layer of another framework.

The layer learns a function, with its experts spread over processes. With --check, an example
compares the losses with those of the framework's own dispatcher.
"""

import argparse
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def start(about: str | None, other: str) -> argparse.Namespace:
    """Start one of torchrun's processes, and return its arguments `steps` and `check`.

    about: the docstring of the example. other: the framework's dispatcher, for the help text.
    """
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
    """Train a layer and return the loss of each step, added over the ranks.

    Args:
        layer: The layer.
        parameters: Its parameters on this rank.
        gate: The weight of the router, which is equal on all ranks. Its gradients are added over
            the ranks, as data parallelism of the framework would do it.
        shape: Shape of the tokens of a rank. Each rank has different tokens.
        steps: Number of steps.
    """
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
    """Print the result, end the process, and return its exit status.

    Args:
        losses: The loss of each step.
        wanted: The expected losses. None: they are not compared.
        tolerance: Largest relative difference between losses and expected losses.

    Returns:
        0 if the loss fell and is within the tolerance, else 1.
    """
    worst = max(abs(a - b) / b for a, b in zip(losses, wanted or losses, strict=True))
    right = worst < tolerance and losses[-1] < losses[0]
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {len(losses)} steps")
        if wanted:
            verdict = "right" if right else "WRONG"
            print(f"largest relative difference of {len(losses)} losses {worst:.1e}: {verdict}")
    dist.destroy_process_group()
    return int(not right)
