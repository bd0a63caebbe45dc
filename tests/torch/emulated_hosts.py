# SPDX-License-Identifier: Apache-2.0
"""epic.torch over two hosts of two GPUs of threads each, as emulated.py; the net is chaos.

A layer is trained there and on one host of four: with sums in a tree, which several hosts take by
themselves, the losses have the same bits.  Ranks are threads; the last line is "right"."""

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
    """Are the plan's rows added in a tree?"""
    info = _native.PlanInfo()
    data = plan.bytes
    _native.check(
        _native.core().epic_plan_read_v1(data.data_ptr(), data.numel(), *_native.sized(info))
    )
    return info.num_leaves > 0


def by(order: str) -> epic.torch.Layer:
    """With that order of sums."""
    return epic.torch.Layer(8, 3, sum_order=order)


def orders(group: epic.torch.Group) -> list[bool]:
    """Of plans: in a tree?  Left open, by rank, in a tree, with a table."""
    ids = choices(3 + group.rank, 6)
    left, ranks, tree = epic.torch.Layer(8, 3), by("by_rank"), by("tree")
    plans = [epic.torch.plan(group, layer, ids) for layer in (left, ranks, tree)]
    plans.append(
        epic.torch.plan(group, left, ids, capacity=64, num_local_experts=8, rank_of_expert=TABLE)
    )
    group.check()
    return [in_tree(plan) for plan in plans]


def trained(group: epic.torch.Group, steps: int, rows: int, **wish: Any) -> list[torch.Tensor]:
    """The losses of a layer that learns to give tokens back, and its last results."""
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
    """What a rank finds out."""
    return {
        "hosts": group.num_hosts,
        "backend": group.backend,
        "net": group.net,
        "orders": orders(group),
        "even": trained(group, 2, 6, **({} if group.num_hosts > 1 else {"sum_order": "tree"})),
        "uneven": trained(group, 1, 3 + 2 * group.rank),  # with "tree" that would be refused
    }


def on_ranks() -> list[dict[str, Any]]:
    """On a group of the GPUs, by rank; which backend is left to the core."""
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
    """To their ends."""
    run: Callable[[threading.Thread], None]
    for run in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            run(thread)


def main() -> int:
    """Both, and what must be so."""
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
