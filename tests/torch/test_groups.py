# SPDX-License-Identifier: Apache-2.0
"""Tests how groups find their ranks, open, close and open again."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import epic.torch
from epic import _native, bootstrapping
from epic.store import Attempts
from forked import finish, start_ranks
from parts import SIZES, UNEVEN, Data, check_round, through
from ports import free_port
from test_errors import expect_error
from world import World, run_torchrun, torch_server

SHORT = {**SIZES, "timeout_ms": 1500}


def right(group: epic.torch.Group, rank: int, tokens: tuple[int, ...] = UNEVEN) -> None:
    """Check that the group computes correct results."""
    check_round(through(group, True), Data(tokens).mine(rank), 2e-6)


def ways(rank: int) -> None:
    """Open groups in all ways: the default group, one of all ranks, a mesh, a dimension of size
    one, a subgroup. Open several at a time, close them in any order, and open another group on each
    rank."""
    device = torch.get_default_device()
    of_gpus = device.type == "cuda"
    # because seven groups share the SMs of a GPU
    sizes = {**SIZES, "max_sms": 8} if of_gpus else SIZES
    more = {**sizes, "device": device}
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "ep"))
    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    groups = [
        epic.torch.Group(**more),
        epic.torch.Group(dist.group.WORLD, **more),
        epic.torch.Group(init_device_mesh(device.type, (4,)), **sizes),
        epic.torch.Group(mesh, "ep", **sizes),
        epic.torch.Group(mesh["dp"], **sizes),
        epic.torch.Group(half, name="half", **more),
        epic.torch.Group(num_ranks=1, **more),
    ]
    assert [g.num_ranks for g in groups] == [4, 4, 4, 2, 2, 2, 1]
    assert [g.rank for g in groups] == [rank, rank, rank, rank % 2, rank // 2, rank % 2, 0]
    assert [g.backend for g in groups] == (["p2p"] * 7 if of_gpus else ["shm"] * 6 + ["self"])
    for group in (*groups, *groups[::-1]):
        right(group, rank)
    for i in (3, 0, 6, 1, 5, 4, 2):
        groups[i].close()
        groups[i].close()
        for other in groups:
            if other.is_open:
                right(other, rank)


def without_store(rank: int) -> None:
    """Open groups over a process group that torch.distributed did not make, twice."""
    store = dist.PrefixStore("without_store", dist.distributed_c10d._get_default_store())
    own = dist.ProcessGroupGloo(store, rank, 4, timedelta(seconds=60))
    for _ in range(2):
        with epic.torch.Group(own, **SIZES) as group:
            assert (group.rank, group.num_ranks, group.device.type) == (rank, 4, "cpu")
            right(group, rank)


class Wrapped(dist.ProcessGroup):
    """A process group in Python, without a store and without the name of a backend.

    Like those of libraries for fault tolerance, its all-gather needs the options.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner, self.calls = inner, 0

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Call the inner group."""
        self.calls += 1
        return self.inner.allgather(outputs, inputs, opts)


def without_names(rank: int) -> None:
    """Open groups over process groups that torch.distributed does not know: a subclass in Python,
    and one that has a store but was not made by new_group."""
    inner = dist.new_group([1, 3, 0, 2], backend="gloo")  # torch sorts the ranks
    store = dist.PrefixStore("without_names", dist.distributed_c10d._get_default_store())
    with_store = dist.ProcessGroup(store, rank, 4)
    gloo = dist.ProcessGroupGloo(store, rank, 4, timedelta(seconds=60))
    kind = dist.ProcessGroup.BackendType.GLOO
    with_store._register_backend(torch.device("cpu"), kind, gloo)
    wrapped = Wrapped(inner)
    for own in (wrapped, with_store, inner):
        for _ in range(2):
            with epic.torch.Group(own, **SIZES) as group:
                assert (group.rank, group.num_ranks, group.device.type) == (rank, 4, "cpu")
                right(group, rank)
    assert wrapped.calls > 0
    wish = {**SIZES, "max_tokens": 64 + rank // 3}
    expect_error(lambda: epic.torch.Group(wrapped, **wish), "EPIC_EMISMATCH", "max_tokens")


def reopened(rank: int) -> None:
    """Open and close a group twenty times over the same process group."""
    for _ in range(20):
        with epic.torch.Group(**SIZES) as group:
            right(group, rank)


def not_one_of_them(rank: int) -> None:
    """Check that a process group without this process is refused at once."""
    group = dist.new_group([0, 1])
    if rank > 1:
        expect_error(lambda: epic.torch.Group(group, **SIZES), "EPIC_EINVAL", "process_group")
    else:
        epic.torch.Group(group, **SIZES).close()


def late(rank: int) -> None:
    """Check that a process that does not join is named, and that the next group opens."""
    if rank != 2:
        expect_error(lambda: epic.torch.Group(**SHORT), "EPIC_ETIMEOUT", "rank 2 did not join")
    dist.barrier()
    with epic.torch.Group(**SIZES) as group:
        right(group, rank)


def opens_after_failures(rank: int) -> None:
    """Check that the next group opens after any rank failed at any time."""
    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    for wrong in (1, 0, 3, 1):
        for over, mine in ((None, rank), (half, rank % 2)):
            bad = mine == wrong % (4 if over is None else 2)
            wish = {**SHORT, "timeout_ms": 500, "max_tokens": -1 if bad else 8}
            code, word = ("EPIC_EINVAL", "max_tokens") if bad else ("EPIC_ETIMEOUT", "did not join")
            expect_error(partial(epic.torch.Group, over, **wish), code, word)
            dist.barrier()
            different = {**SIZES, "max_tokens": 64 + mine}
            expect_error(partial(epic.torch.Group, over, **different), "EPIC_EMISMATCH")
            with epic.torch.Group(over, **SIZES) as group:
                right(group, group.rank)


def different_sizes(rank: int) -> None:
    """Check that all ranks get the error if their options differ."""
    wish = {**SIZES, "max_tokens": 64 + rank // 3}
    expect_error(lambda: epic.torch.Group(**wish), "EPIC_EMISMATCH", "max_tokens")


WHAT = [
    ways, without_store, without_names, reopened, not_one_of_them, late, opens_after_failures,
    different_sizes,
]  # fmt: skip


@pytest.mark.parametrize("what", WHAT)
def test_process_groups(world: Any, what: Callable[[int], None]) -> None:
    """Run the test on processes of torch.distributed."""
    world.run(what)


def pair(rank: int, first: list[int], second: list[int]) -> epic.torch.Group:
    """Open the group that the layers over this rank's process group share."""
    mine = [dist.new_group(first), dist.new_group(second)][rank not in first]
    wish = {name: SIZES[name] for name in ("max_tokens", "max_row_bytes")}
    group = epic.torch.groups.shared_group(mine, **wish)
    assert group is epic.torch.groups.shared_group(mine, **wish)
    other = {**wish, "timeout_ms": 4321}
    expect_error(
        lambda: epic.torch.groups.shared_group(mine, **other), "EPIC_EINVAL", "timeout_ms is 4321"
    )
    assert group.rank == dist.get_rank(mine)
    right(group, group.rank)
    return group


def destroyed(rank: int, port: int) -> None:
    """Call destroy_process_group before close, and after it.

    Afterwards process groups of other ranks have the old names. Their store listens on `port`.
    """
    old = pair(rank, [0, 1], [2, 3])
    first = epic.torch.Group(**SIZES)
    dist.destroy_process_group()
    right(first, rank)
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=4)
    second = epic.torch.Group(**SIZES)
    right(second, rank)
    right(first, rank)
    assert pair(rank, [0, 2], [1, 3]) is not old
    first.close()
    right(second, rank)
    second.close()
    dist.destroy_process_group()


def test_no_order_with_destroy_process_group() -> None:
    """Check that a group needs the store only while it opens."""
    with World(4) as four:
        four.run(destroyed, free_port())


def test_threads_of_one_process() -> None:
    """Open a group whose ranks are threads of this process."""
    bootstraps = epic.torch.threads(4)

    def run(rank: int) -> None:
        with epic.torch.Group(bootstrap=bootstraps[rank], **SIZES) as group:
            assert (group.rank, group.num_ranks, group.backend) == (rank, 4, "threads")
            for _ in range(3):
                right(group, rank)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(run, rank) for rank in range(4)]:
            done.result(60)


def test_alone() -> None:
    """Check that without torch.distributed and variables a group has one rank."""
    with epic.torch.Group(**SIZES) as group:
        assert (group.rank, group.num_ranks, group.backend) == (0, 1, "self")
        right(group, 0, (11, 0, 0, 0))
        assert "rank 0 of 1" in repr(group)


SCRIPT = """
import os, sys
sys.path[:0] = {paths!r}
import epic.torch
from epic import _native, bootstrapping
from epic.store import Attempts
from parts import SIZES
from test_groups import right
bootstrap = {{}}
if {tcp}:
    rank, port = int(os.environ["RANK"]), int(os.environ["PORT"])
    bootstrap = dict(bootstrap=epic.torch.Tcp(port=port, secret="s"), rank=rank, num_ranks=2)
for _ in range(2):
    with epic.torch.Group(**bootstrap, **SIZES) as group:
        assert group.num_ranks == 2 and group.backend == "shm"
        right(group, group.rank)
"""
PATHS = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "jax")]


def test_torchrun(tmp_path: Path) -> None:
    """Check torchrun's variables without a process group, over the store of torchrun's agent."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(paths=PATHS, tcp=False))
    run_torchrun("--nproc-per-node", "2", str(script))


def test_tcp(tmp_path: Path) -> None:
    """Open a group with the core's own TCP bootstrap."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(paths=PATHS, tcp=True))
    port = str(free_port())
    finish(start_ranks(torch_server(), str(script), ranks=2, port=0, PORT=port), 200)


def test_contexts_are_closed_where_no_thread_starts(monkeypatch: Any) -> None:
    """Check that contexts are closed where no thread can start, as in Python 3.12 at exit."""

    def start(_: Any) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    closed: list[int] = []
    monkeypatch.setattr(_native, "core", lambda: SimpleNamespace(epic_close=closed.append))
    bootstrapping.end([3, 4])
    assert sorted(closed) == [3, 4]
    monkeypatch.setattr(threading.Thread, "start", start)
    bootstrapping.end([5, 6])
    assert closed[2:] == [5, 6]


ENDS = """
import os, sys, threading, time
sys.path[:0] = {paths!r}
import torch, epic.torch
from parts import SIZES
rank, port = int(os.environ["RANK"]), int(os.environ["PORT"])
bootstrap = epic.torch.Tcp(port=port, secret="s")
sizes = {{**SIZES, "timeout_ms": 120000}}
group = epic.torch.Group(bootstrap=bootstrap, rank=rank, num_ranks=2, **sizes)
def call():
    try:
        epic.torch.sum(group, torch.ones(3), tag=1 + rank)
    except epic.torch.EpicError:
        pass
threading.Thread(target=call, daemon=True).start()
time.sleep(1)
print("ends", flush=True)
"""


def test_the_end_of_processes_whose_threads_wait_for_each_other(tmp_path: Path) -> None:
    """Check that processes end whose main thread returns while another thread waits in a call that
    the other rank never makes."""
    script = tmp_path / "script.py"
    script.write_text(ENDS.format(paths=PATHS))
    port = str(free_port())
    running = start_ranks(torch_server(), str(script), ranks=2, port=0, PORT=port)
    for process in running:
        process.wait_for_line("ends", 200)
    finish(running, 40)  # much less than the deadline of 120 s


def test_an_exchange_of_the_callers() -> None:
    """Check that any function can be the bootstrap, and that its exceptions are raised."""
    store = dist.HashStore()
    exchange = epic.torch.groups.StoreExchange

    def run(rank: int) -> None:
        bootstrap = exchange(store, "mine", 2, 60000)
        with epic.torch.Group(bootstrap=bootstrap, rank=rank, num_ranks=2, **SIZES) as group:
            right(group, rank)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(run, rank) for rank in range(2)]:
            done.result(60)

    def broken(rank: int, mine: bytes) -> list[bytes]:
        raise OSError("no network")

    with pytest.raises(OSError, match="no network"):
        epic.torch.Group(bootstrap=broken, rank=0, num_ranks=2, **SIZES)


def exchanges(num_ranks: int, *timeouts: int) -> list[Any]:
    """Return bootstrap functions over one store, for each rank and each timeout."""
    store = dist.HashStore()
    return [epic.torch.groups.StoreExchange(store, "x", num_ranks, ms) for ms in timeouts]


def test_a_rank_that_waits_meets_a_rank_that_failed_before() -> None:
    """Let rank 0 give up and return with other bytes, while rank 1 waits in its first attempt."""
    late, other, last = exchanges(3, 150, 20000, 20000)
    back = epic.torch.groups.StoreExchange(late.store.store, "x", 3, 20000)
    with ThreadPoolExecutor(3) as pool:
        waits = pool.submit(other, 1, b"one")
        expect_error(lambda: late(0, b"old"), "EPIC_ETIMEOUT", "rank 2 did not join")
        found = [pool.submit(back, 0, b"new"), waits, pool.submit(last, 2, b"two")]
        assert [f.result(20) for f in found] == [[b"new", b"one", b"two"]] * 3
        found = [pool.submit(e, r, bytes([r])) for r, e in enumerate((back, other, last))]
        # the bytes of the second attempt
        assert [f.result(20) for f in found] == [[b"\0", b"\1", b"\2"]] * 3


def test_an_interrupted_rank_is_not_taken_for_the_one_that_comes_back() -> None:
    """Check that bytes of an interrupted attempt are never read, although its thread may
    still run."""
    gone, other = exchanges(2, 20000, 20000)
    with ThreadPoolExecutor(3) as pool:
        waits = pool.submit(gone, 0, b"old")
        while gone.attempt is None:
            time.sleep(0.01)
        gone.leave()
        back = epic.torch.groups.StoreExchange(gone.store.store, "x", 2, 20000)
        found = [pool.submit(back, 0, b"new"), pool.submit(other, 1, b"one")]
        assert [f.result(20) for f in found] == [[b"new", b"one"]] * 2
        expect_error(lambda: waits.result(20), "EPIC_ETIMEOUT", "rank 1")


def test_two_processes_of_one_rank(monkeypatch: Any) -> None:
    """Check that a second process with the same rank is refused, and that a rank that waits for the
    missing rank gets an error that explains this."""
    first, second, zero = exchanges(3, 20000, 20000, 700)
    with ThreadPoolExecutor(3) as pool:
        waits = pool.submit(first, 1, b"one")
        while first.attempt is None or not first.own:
            time.sleep(0.01)
        monkeypatch.setattr(Attempts, "of_process", set())  # as if it were another process
        wrong = partial(second, 1, b"other")
        expect_error(wrong, "EPIC_EINVAL", "rank is 1", "another process has opened")
        words = ("rank 2 did not join", "two processes opened it as rank 1")
        expect_error(lambda: zero(0, b"zero"), "EPIC_ETIMEOUT", *words)
        first.leave()
        expect_error(lambda: waits.result(20), "EPIC_ETIMEOUT")


def test_a_bootstrap_is_of_one_rank() -> None:
    """Check that a bootstrap opens one group at a time, and only for its own rank."""
    bootstraps = epic.torch.threads(2, 1500)
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(epic.torch.Group, bootstrap=bootstraps[0], **SHORT) for _ in range(2)]
        errors = sorted(str(f.exception(20)) for f in found)
    assert errors[0].startswith("EPIC_ETIMEOUT") and "rank 1 did not join" in errors[0]
    assert errors[1].startswith("bootstrap of rank 0 is already used")
    expect_error(
        lambda: epic.torch.Group(bootstrap=bootstraps[0], **SHORT), "EPIC_EINVAL", "is already used"
    )


def test_two_threads_open_at_a_time() -> None:
    """Check that two groups of the same ranks that open at the same time do not mix their bytes."""
    store = dist.HashStore()

    def run(rank: int, count: int) -> list[list[bytes]]:
        made = [epic.torch.groups.StoreExchange(store, "x", 2, 20000) for _ in range(count)]
        with ThreadPoolExecutor(count) as pool:
            calls = []
            for i, exchange in enumerate(made):
                calls.append(pool.submit(exchange, rank, bytes([rank, i])))
                while exchange.attempt is None:
                    time.sleep(0.01)
            return [c.result(20) for c in calls]

    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(run, rank, 3) for rank in range(2)]
        for f in found:
            assert f.result(30) == [[bytes([0, i]), bytes([1, i])] for i in range(3)]


def test_no_torch_state_is_left() -> None:
    """Check that a closed group and its tensors are freed."""
    import gc
    import weakref

    group = epic.torch.Group(**SIZES)
    right(group, 0, (3, 0, 0, 0))
    seen = weakref.ref(group)
    group.close()
    del group
    gc.collect()
    assert seen() is None
    assert torch.is_grad_enabled()


SAID = {  # The expected backends on GPUs and on CPUs, or the expected error, for each EPIC_BACKEND.
    "": ("gpu", None),
    "shm": ("gpu", None),
    "gpu": ("gpu", "EPIC_BACKEND.: must be a backend for CPUs"),
    "hosts": ("hosts", "EPIC_BACKEND.: must be a backend for CPUs"),
    "host": ("must be 'gpu', 'p2p' or 'hosts'", None),
}


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("on_gpus", [True, False])
def test_backend_of_the_environment(monkeypatch: Any, said: str, on_gpus: bool) -> None:
    """Check that EPIC_BACKEND applies only to devices it supports, and that backend=
    overrides it."""
    from epic.options import backend_for

    monkeypatch.setenv("EPIC_BACKEND", said)
    wanted = SAID[said][0 if on_gpus else 1]
    if wanted and " " in wanted:
        with pytest.raises(epic.torch.EpicArgumentError, match=wanted):
            backend_for(on_gpus, None)
    else:
        assert backend_for(on_gpus, None) == wanted
    right, wrong = ("p2p", "shm") if on_gpus else ("self", "p2p")
    assert backend_for(on_gpus, right) == right
    with pytest.raises(epic.torch.EpicArgumentError, match=wrong):
        backend_for(on_gpus, wrong)
