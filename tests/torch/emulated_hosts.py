# SPDX-License-Identifier: Apache-2.0
"""Tests epic.torch on two hosts of two emulated GPUs each (see emulated.py), with the net "chaos".

The program trains a layer on these two hosts, and on one host of four GPUs. The sums of the layer
use a tree, which is the default on several hosts. So the losses of both runs must have the same
bits. Ranks are threads. The last line that this program prints is "right".
"""

import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "jax")]

import torch

import emulated
import epic.torch
from emulated import GPU, WISH, agree, open_on
from epic import _native
from epic.torch import groups
from epic.torch.plans import Plan
from parts import choices, numbers

RANKS = 4
SIZES: dict[str, Any] = {
    "max_tokens": 32,
    "max_row_bytes": 256,
    "max_top_k": 3,
    "timeout_ms": 120000,
}
TABLE = [0, 1, 2, 3, 3, 2, 1, 0]


def in_tree(plan: Plan) -> bool:
    """Return whether the rows of the plan are added in a tree."""
    info = _native.PlanInfo()
    data = plan.bytes
    _native.check(
        _native.core().epic_plan_read_v1(data.data_ptr(), data.numel(), *_native.sized(info))
    )
    return info.num_leaves > 0


def by(order: str) -> epic.torch.Layer:
    """Return a layer with this order of sums."""
    return epic.torch.Layer(8, 3, sum_order=order)


def orders(group: epic.torch.Group) -> list[bool]:
    """Return whether plans use a tree: by default, by rank, in a tree, and with a table."""
    ids = choices(3 + group.rank, 6)
    left, ranks, tree = epic.torch.Layer(8, 3), by("by_rank"), by("tree")
    plans = [epic.torch.plan(group, layer, ids) for layer in (left, ranks, tree)]
    plans.append(
        epic.torch.plan(group, left, ids, capacity=64, num_local_experts=8, rank_of_expert=TABLE)
    )
    group.check()
    return [in_tree(plan) for plan in plans]


def trained(group: epic.torch.Group, steps: int, rows: int, **wish: Any) -> list[torch.Tensor]:
    """Train a layer to return its tokens; return the losses and the last results."""
    layer = epic.torch.MoE(group, epic.torch.Moe.of(**{**WISH, **wish}))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    x = numbers(60 + group.rank, rows, 16)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        out, loss = layer(x)
        loss = loss + (out - x).square().mean()
        loss.backward()
        layer.sum_gradients()
        optimizer.step()
        found.append(loss.detach())
    group.check()
    return [torch.stack(found), out.detach()]


def work(group: epic.torch.Group) -> dict[str, Any]:
    """Return the results of one rank."""
    return {
        "hosts": group.num_hosts,
        "backend": group.backend,
        "net": group.net,
        "orders": orders(group),
        "even": trained(group, 2, 6, **({} if group.num_hosts > 1 else {"sum_order": "tree"})),
        "uneven": trained(group, 1, 3 + 2 * group.rank),  # the order "tree" would be refused here
    }


def on_ranks() -> list[dict[str, Any]]:
    """Run work() on each rank of a GPU group, whose backend the core chooses."""
    bootstraps = epic.torch.threads(RANKS)
    found: list[dict[str, Any]] = [{} for _ in range(RANKS)]

    def rank_of(rank: int) -> None:
        try:
            assert GPU.cudaSetDevice(rank) == 0
            with epic.torch.Group(bootstrap=bootstraps[rank], backend="gpu", **SIZES) as group:
                found[rank] = work(group)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(RANKS)]
    run_all(threads)
    return found


def run_all(threads: list[threading.Thread]) -> None:
    """Start the threads and wait until they end."""
    run: Callable[[threading.Thread], None]
    for run in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            run(thread)


def main() -> int:
    """Run both groups and compare their results."""
    torch.set_num_threads(1)
    groups.open_on = open_on
    groups.choose_backend = lambda device, requested: requested
    os.environ["EPIC_HOST"] = "%r/2"
    hosts = on_ranks()
    del os.environ["EPIC_HOST"]
    one = on_ranks()
    for there, here in zip(hosts, one, strict=True):
        assert (there["hosts"], here["hosts"]) == (2, 1)
        assert (there["backend"], here["backend"]) == ("hosts", "p2p")
        assert there["net"].startswith("chaos") and here["net"] == ""
        assert there["orders"] == [True, False, True, False], there["orders"]
        assert here["orders"] == [False, False, True, False], here["orders"]
        assert emulated.same(there["even"], here["even"])
        agree(there["uneven"], here["uneven"])
        losses = there["even"][0]
        assert losses[-1] < losses[0], losses
    print("right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
