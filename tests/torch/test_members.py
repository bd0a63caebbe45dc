# SPDX-License-Identifier: Apache-2.0
"""Tests Group.members, shrink and leave: groups that go on without some of their ranks."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epic
import epic.torch
from parts import EXPERTS, HIDDEN, LAYER, SIZES, TOKENS, TOP_K, choices, numbers
from world import World

LOST = 2


def check_works(group: epic.torch.Group, ranks: tuple[int, ...]) -> None:
    """Check a sum and a step of a layer whose experts are on the members."""
    total = epic.torch.sum(group, torch.tensor([2.0**group.rank]))
    assert total.item() == sum(2.0**r for r in ranks)
    x, ids = numbers(group.rank, TOKENS, HIDDEN), choices(group.rank, TOKENS)
    place: dict[str, Any] = {
        "rank_of_expert": [ranks[e % len(ranks)] for e in range(EXPERTS)],
        "num_local_experts": EXPERTS,
        "capacity": len(ranks) * TOKENS * TOP_K + 4 * EXPERTS,
    }
    plan = epic.torch.plan(group, LAYER, ids, **place)
    rows, _ = epic.torch.dispatch(plan, x)
    counts = (ids >= 0).sum(dim=1, keepdim=True)
    torch.testing.assert_close(epic.torch.combine(plan, rows), x * counts)


def lose_rank(rank: int) -> epic.Members | None:
    """One rank closes its group; the others get an error and go on."""
    group = epic.torch.Group(**SIZES)
    assert group.members == epic.Members(0, (0, 1, 2, 3), (), 0, 0)
    plan = epic.torch.plan(group, LAYER, choices(rank, TOKENS))
    epic.torch.sum(group, torch.ones(1))
    dist.barrier()  # otherwise a rank that is still in the sum could get the error
    if rank == LOST:
        group.close()
        with pytest.raises(epic.torch.EpicError, match="was closed"):
            group.shrink()
        return None
    with pytest.raises(epic.torch.EpicError, match=rf"rank {LOST}.*shrink") as lost:
        epic.torch.sum(group, torch.ones(1))
    assert lost.value.code == "EPIC_EPEER"
    members = group.shrink(step=10 + rank)
    assert members == group.members
    with pytest.raises(epic.torch.EpicError, match="another group"):
        epic.torch.dispatch(plan, numbers(rank, TOKENS, HIDDEN))
    check_works(group, members.ranks)
    with pytest.raises(epic.EpicArgumentError, match="absent"):
        epic.torch.plan(group, LAYER, choices(rank, TOKENS))  # experts are on the lost rank, too
    check_works(group, members.ranks)
    group.close()
    return members


def test_lost_rank(world: World) -> None:
    """The others agree on the members and on the steps."""
    expected = epic.Members(1, (0, 1, 3), (LOST,), 10, 13)
    assert world.run(lose_rank) == [expected, expected, None, expected]


def leave_and_evict(rank: int) -> str:
    """Rank 1 leaves; then rank 3 does not come, and the others go on without it."""
    group = epic.torch.Group(**SIZES)
    if rank == 1:
        group.leave(step=5)
        assert not group.is_open
        dist.barrier()
        return "left"
    assert group.shrink(step=5, min_members=3).gone == (1,)
    check_works(group, (0, 2, 3))
    if rank == 3:
        dist.barrier()
        with pytest.raises(epic.torch.EpicError, match="without rank 3") as evicted:
            group.shrink()
        assert evicted.value.code == "EPIC_EEVICTED"
        group.close()
        return "evicted"
    assert group.shrink(patience_ms=2000).ranks == (0, 2)
    dist.barrier()
    check_works(group, (0, 2))
    only = (0,)
    if rank == 0:
        assert group.shrink(only=only, authority=1).ranks == only
        check_works(group, only)
        group.close()
        return "stayed"
    with pytest.raises(epic.torch.EpicError, match="without rank 2"):
        group.shrink(only=only, authority=1)
    group.close()
    return "not named"


def test_leave_and_evict(world: World) -> None:
    """Each rank learns what has happened to it."""
    assert world.run(leave_and_evict) == ["stayed", "left", "not named", "evicted"]


def open_different(rank: int) -> str:
    """Return the error of a group that only rank 0 opens with can_shrink."""
    with pytest.raises(epic.torch.EpicError) as found:
        epic.torch.Group(**SIZES, can_shrink=rank == 0)
    return str(found.value)


def test_different_arguments(world: World) -> None:
    """The error of a mismatch names the argument and both values."""
    wanted = "rank 0 has can_shrink=True, rank 1 has can_shrink=False"
    assert all(wanted in said for said in world.run(open_different))


def test_arguments() -> None:
    """Errors name the argument in Python."""
    with pytest.raises(epic.EpicArgumentError, match="can_shrink is a int: must be a bool"):
        epic.torch.Group(num_ranks=1, **SIZES, can_shrink=1)  # type: ignore[arg-type]
    wanted = 'can_shrink is True: must be False with backend "self"'
    with pytest.raises(epic.torch.EpicError, match=wanted):
        epic.torch.Group(num_ranks=1, **SIZES, can_shrink=True, backend="self")
    with epic.torch.Group(num_ranks=1, **SIZES, can_shrink=True) as group:
        assert group.backend == "threads" and group.shrink().ranks == (0,)
        only: Any = torch.tensor([0])
        assert group.shrink(only=only, authority=1).ranks == (0,)
    with epic.torch.Group(num_ranks=1, **SIZES) as group:
        assert group.members.ranks == (0,)
        with pytest.raises(epic.torch.EpicError, match=r'can_shrink is False, .*"self": only'):
            group.shrink()
        with pytest.raises(epic.EpicArgumentError, match="only contains 1: must"):
            group.shrink(only=[1], authority=1)
        for only in (0, [True], ["0"], [0.0], [[0]]):
            with pytest.raises(epic.EpicArgumentError, match=r"only (is|contains) .*: must"):
                group.shrink(only=only, authority=1)  # type: ignore[arg-type]
        for wrong in ({"only": [0]}, {"authority": 1}):
            with pytest.raises(epic.EpicArgumentError, match="must both be passed, or none"):
                group.shrink(**wrong)
        with pytest.raises(epic.EpicArgumentError, match="patience_ms is -1"):
            group.shrink(patience_ms=-1)


def test_threads_of_a_rank() -> None:
    """A second shrink of a rank is refused while one runs, and close waits for it."""
    bootstraps = epic.torch.threads(2)
    has_tried = [threading.Event() for _ in range(2)]

    def first(group: epic.torch.Group) -> None:
        with ThreadPoolExecutor(2) as pool:
            for turn, tried in enumerate(has_tried):
                shrinking = pool.submit(group.shrink, step=turn)
                while not group.regrouping.locked():
                    time.sleep(0.001)
                for call in (group.shrink, group.leave):
                    with pytest.raises(epic.EpicArgumentError, match="in another thread"):
                        call()
                closing = pool.submit(group.close) if turn else None
                time.sleep(0.1)
                assert closing is None or not closing.done()
                tried.set()
                assert shrinking.result().generation == turn + 1
            assert closing is not None
            closing.result()
        assert not group.is_open

    def second(group: epic.torch.Group) -> None:
        for tried in has_tried:
            tried.wait()
            group.shrink()

    def run(rank: int) -> None:
        with epic.torch.Group(bootstrap=bootstraps[rank], **SIZES) as group:
            (first, second)[rank](group)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
