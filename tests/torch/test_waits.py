# SPDX-License-Identifier: Apache-2.0
"""Tests Group.waits: the table blames a rank that sleeps before each operation."""

import time

import pytest
import torch

import epic
import epic.torch
from epic.waits import OPERATIONS
from parts import LAYER, SIZES, Data, numbers
from world import World

SLOW, NAP, ROUNDS = 2, 0.05, 3


def run_step(group: epic.torch.Group, rank: int) -> None:
    """Run a plan, a dispatch, a combine and a sum; the slow rank sleeps before each of them."""
    x, _, ids, _ = Data().mine(rank)
    nap = NAP if rank == SLOW else 0.0
    time.sleep(nap)
    plan = epic.torch.plan(group, LAYER, ids)
    time.sleep(nap)
    rows, _ = epic.torch.dispatch(plan, x)
    time.sleep(nap)
    epic.torch.combine(plan, rows)
    time.sleep(nap)
    epic.torch.sum(group, numbers(rank, 4))


def check_blame(rank: int) -> list[float]:
    """Check the table of this rank; return how long it waited alone for each rank."""
    with epic.torch.Group(name='a "b"', **SIZES) as group:
        empty = group.waits()
        assert empty.slowest()[1] == 0.0 and (empty.rank, empty.num_ranks) == (rank, 4)
        for _ in range(ROUNDS):
            run_step(group, rank)
        waits = group.waits()
        assert len(waits.table) == 4 * len(OPERATIONS)
        used = ("plan", "dispatch", "combine", "sum")
        for wait in waits.table:
            assert wait.num_operations == (ROUNDS if wait.operation in used else 0)
            assert wait.seconds >= wait.alone_seconds >= 0.0
            if wait.peer == rank or wait.operation not in used:
                assert wait.seconds == 0.0
            elif wait.peer == SLOW:
                assert wait.alone_seconds > ROUNDS * NAP / 2, wait
        if rank != SLOW:
            assert waits.slowest()[0] == SLOW
        run_step(group, rank)
        later = group.waits().since(waits)
        assert all(w.num_operations == (1 if w.operation in used else 0) for w in later.table)
        assert rank == SLOW or later.slowest()[0] == SLOW
        check_prometheus(waits)
        alone = waits.alone_seconds()
    with pytest.raises(epic.torch.EpicError, match="was closed"):
        group.waits()
    return alone


def check_prometheus(waits: epic.Waits) -> None:
    """Check the form of each line, and the numbers of some."""
    text = waits.prometheus()
    assert text.endswith("\n")
    samples = {}
    for line in text.splitlines():
        if line.startswith("#"):
            assert line.split()[1] in ("HELP", "TYPE")
            continue
        name, _, value = line.rpartition(" ")
        assert name not in samples
        samples[name] = float(value)
    where = f'group="a \\"b\\"",rank="{waits.rank}"'
    assert samples[f'epic_wait_operations_total{{{where},operation="sum"}}'] == ROUNDS
    for wait in waits.table:
        name = f'epic_wait_seconds_total{{{where},peer="{wait.peer}",operation="{wait.operation}"}}'
        assert samples.get(name, 0.0) == wait.seconds


def test_blame(world: World) -> None:
    """Every other rank waited longest for the slow rank."""
    for rank, alone in enumerate(world.run(check_blame)):
        if rank != SLOW:
            assert max(alone) == alone[SLOW]


def test_several_ranks() -> None:
    """Each metric has one description, however many ranks the text contains."""
    table = (epic.Wait("plan", 1, 3, 0.5, 0.25),)
    all_waits = [epic.Waits("a\n\\", rank, 2, table) for rank in range(2)]
    text = epic.format_prometheus(all_waits)
    assert text.count("# HELP epic_wait_seconds_total ") == 1
    assert 'group="a\\n\\\\",rank="1",peer="1",operation="plan"} 0.5' in text


def test_since_refuses_other_ranks() -> None:
    """Differences between two ranks mean nothing, so they are refused with both names."""
    first, second = (epic.Waits("a", rank, 2, ()) for rank in range(2))
    with pytest.raises(epic.EpicArgumentError, match=r"rank 0 of 2: must be of group 'a', rank 1"):
        second.since(first)


def test_since_refuses_later_results() -> None:
    """A result from before the group was opened again would give negative counts."""
    before, now = (
        epic.Waits("a", 0, 1, (epic.Wait("plan", 0, count, 0.0, 0.0),)) for count in (2, 1)
    )
    assert before.since(now).table[0].num_operations == 1
    with pytest.raises(epic.EpicArgumentError, match="earlier counts more operations of group 'a'"):
        now.since(before)
    with pytest.raises(epic.EpicArgumentError, match="earlier is a str: must be a Waits"):
        now.since("a")  # type: ignore[arg-type]


def test_one_rank() -> None:
    """A group of one rank waits for no rank."""
    with epic.torch.Group(num_ranks=1, **SIZES) as group:
        epic.torch.plan(group, LAYER, torch.zeros(2, 3, dtype=torch.int32))
        assert group.waits().slowest() == (0, 0.0)
