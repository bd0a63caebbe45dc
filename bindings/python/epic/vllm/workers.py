# SPDX-License-Identifier: Apache-2.0
"""The groups of vLLM's expert-parallel ranks, and the names of the workers."""

import atexit
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from vllm.distributed import get_ep_group
from vllm.platforms import current_platform

import epic.torch
from epic.vllm.connections import connect_hosts, has_left, leave

logger = logging.getLogger("vllm.epic")

REPORT_SECONDS = 10.0  # shortest time between two looks for a slow rank
WATCH_SECONDS = 0.5  # longest time between two looks for a failure
GRACE_SECONDS = 2.0  # time from SIGTERM until a worker that has failed is ended by force
SLOW_SHARE = 0.2  # a rank is slow if another one waits for it this part of the time


class Place(NamedTuple):
    """Where a rank runs."""

    host: str
    process: int

    def __str__(self) -> str:
        return f"{self.host}, process {self.process}"


class Workers:
    """An open group, and where its ranks run.

    Args:
        group: The open group.
        places: The place of each rank.
        barriers: A group of the same ranks, in which watch() runs its barriers. None: watch() runs
            no barriers.
    """

    def __init__(
        self, group: epic.torch.Group, places: list[Place], barriers: epic.torch.Group | None = None
    ) -> None:
        self.group = group
        self.places = places
        self.barriers = barriers
        self.looked_at = time.monotonic()  # time of the last look for a slow rank
        self.waits = group.waits()  # the waits at that time
        self.thread: threading.Thread | None = None  # runs watch()
        self.hosts_thread: threading.Thread | None = None  # runs watch_hosts()
        self.closes = threading.Event()  # set by stop_watching()
        self.connections: dict[int, socket.socket] = {}  # by rank, of other hosts
        self.alarms: list[int] = []  # eventfd of stop_watching(), then pidfds of ranks of this host

    def report_slow_rank(self) -> None:
        """Log one line if one rank has held the others up since the last look.

        Call it after each operation. It looks once in REPORT_SECONDS and else returns at once. Only
        rank 0 logs, because all ranks wait for a slow one. If rank 0 is the slow one, rank 1 logs.
        """
        passed = time.monotonic() - self.looked_at
        if passed < REPORT_SECONDS:
            return
        waits = self.group.waits()
        slow, seconds = waits.since(self.waits).slowest()
        self.looked_at += passed
        self.waits = waits
        if seconds >= SLOW_SHARE * passed and self.group.rank == (1 if slow == 0 else 0):
            logger.warning(
                "EPIC: expert-parallel rank %d of %d (%s) holds the others up: rank %d waited "
                "%.1f s only for it in the last %.1f s.",
                slow,
                self.group.num_ranks,
                self.places[slow],
                self.group.rank,
                seconds,
                passed,
            )

    def log_failure(self, error: epic.torch.EpicError) -> None:
        """Log an error of EPIC, and the places of all ranks."""
        where = "; ".join(f"rank {rank}: {place}" for rank, place in enumerate(self.places))
        logger.error(
            "EPIC: expert-parallel rank %d of %d (%s) cannot go on: %s. The ranks are: %s.",
            self.group.rank,
            self.group.num_ranks,
            self.places[self.group.rank],
            str(error).rstrip("."),
            where,
        )

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Log where all ranks run if EPIC raises an error in the `with` block.

        The error names the rank that has ended, stopped or come late. The error ends this worker,
        and vLLM then ends the server.
        """
        try:
            yield
        except epic.torch.EpicError as error:
            self.log_failure(error)
            raise

    def watch(self) -> None:
        """Look for failures until this rank calls stop_watching(); the body of a thread.

        On CPUs it ends when any rank has called stop_watching().

        On CPUs a call of EPIC raises an error if an operation fails. But a rank may also wait in a
        collective of vLLM, or for requests, when another rank fails. On GPUs an operation may fail
        after its call has returned. In these cases only this thread notices the failure.

        After a failure the thread logs the error and ends the process.
        """
        if self.group.device.type == "cuda":
            torch.cuda.set_device(self.group.device)  # else the calls would use GPU 0, too
        poll = select.poll()
        for descriptor in self.alarms:
            poll.register(descriptor, select.POLLIN)
        has_closed = False  # whether a rank has closed; then there are no more barriers
        try:
            while True:
                closes = self.closes.is_set()
                has_closed = has_closed or self.run_barrier(closes)
                if closes or (has_closed and not self.group.on_gpu):
                    return
                self.group.check()
                if self.group.on_gpu:
                    self.report_slow_rank()
                self.nap(poll)
        except epic.torch.EpicError as error:
            if not self.closes.is_set():
                self.log_failure(error)
                self.end_process()

    def run_barrier(self, closes: bool) -> bool:
        """Run a barrier with the threads of all ranks. Return whether a rank has stopped watching.

        Args:
            closes: Whether this rank stops watching.

        Raises:
            EpicError: The process of a rank has ended, or its thread has not run for timeout_ms.
        """
        if self.barriers is None:
            return closes
        own = torch.tensor([float(closes)], dtype=torch.float32, device="cpu")
        return epic.torch.sum(self.barriers, own).item() > 0

    def nap(self, poll: select.poll) -> None:
        """Sleep for WATCH_SECONDS, or until `poll` finds an alarm that it has not found before."""
        for descriptor, _ in poll.poll(1000 * WATCH_SECONDS):
            poll.unregister(descriptor)

    def watch_hosts(self) -> None:
        """Look for ranks of other hosts that have ended; the body of a thread.

        The thread of watch() may wait in a barrier for such a rank until timeout_ms.
        """
        poll = select.poll()
        ranks = {connection.fileno(): rank for rank, connection in self.connections.items()}
        for descriptor in (self.alarms[0], *ranks):
            poll.register(descriptor, select.POLLIN)
        while not self.closes.is_set():
            for descriptor, _ in poll.poll():
                poll.unregister(descriptor)
                if descriptor in ranks and not has_left(self.connections[ranks[descriptor]]):
                    what = f"the process of rank {ranks[descriptor]} has ended"
                    self.log_failure(epic.torch.EpicError("EPIC_EPEER", what))
                    self.end_process()
                    return

    def end_process(self) -> None:
        """End this process, even if its main thread waits in a collective. vLLM ends the server."""
        os.kill(os.getpid(), signal.SIGTERM)
        if not self.closes.wait(GRACE_SECONDS):
            os._exit(1)

    def start_watching(self) -> None:
        """Start the thread of watch(). The thread ends before the process closes the group."""
        own = self.places[self.group.rank]
        self.alarms = [os.eventfd(0, os.EFD_CLOEXEC)]
        for place in self.places:
            if place.host == own.host and place != own:
                with suppress(OSError):  # the process is in another PID namespace
                    self.alarms.append(os.pidfd_open(place.process))
        self.thread = threading.Thread(target=self.watch, name="epic-watch", daemon=True)
        self.thread.start()
        if self.connections:
            self.hosts_thread = threading.Thread(
                target=self.watch_hosts, name="epic-watch-hosts", daemon=True
            )
            self.hosts_thread.start()
        atexit.register(self.stop_watching)  # runs before the function that closes all groups

    def stop_watching(self) -> None:
        """End the threads of watch() and watch_hosts(), and wait for their ends."""
        atexit.unregister(self.stop_watching)
        self.closes.set()
        for connection in self.connections.values():
            leave(connection)
        if self.thread is not None:
            os.eventfd_write(self.alarms[0], 1)
            self.thread.join()
            self.thread = None
        if self.hosts_thread is not None:
            self.hosts_thread.join()
            self.hosts_thread = None
        while self.alarms:
            os.close(self.alarms.pop())
        while self.connections:
            self.connections.popitem()[1].close()


OPEN: dict[Any, Workers] = {}  # by hidden size, type of the rows, top-k, and process group


def open_group(moe: Any, timeout_ms: int, process_group: Any) -> epic.torch.Group:
    """Open the group for the layers of one size."""
    return epic.torch.Group(
        process_group,
        max_tokens=moe.max_num_tokens,
        max_row_bytes=moe.hidden_dim * moe.in_dtype.itemsize,
        max_top_k=moe.experts_per_token,
        timeout_ms=timeout_ms,
        name="vllm",
        device="cpu" if current_platform.is_cpu() else f"cuda:{torch.cuda.current_device()}",
    )


def open_barriers(group: epic.torch.Group, timeout_ms: int, process_group: Any) -> Any:
    """Open the group for the barriers of watch(), or return None if no such group is needed.

    It is a group on CPUs. The process needs only one, so only the first call opens it. With GPUs of
    several hosts the result is None, because the backend for GPUs itself notices that a rank has
    ended, and a group on CPUs would need MPI.
    """
    if OPEN or (group.on_gpu and group.num_hosts > 1):
        return None
    return epic.torch.Group(
        process_group, max_tokens=1, max_row_bytes=16, max_top_k=1, timeout_ms=timeout_ms,
        name="vllm-watch", device="cpu",
    )  # fmt: skip


def find_places(group: epic.torch.Group, process_group: Any) -> list[Place]:
    """Return the place of each rank."""
    places = [Place("", 0)] * group.num_ranks
    dist.all_gather_object(places, Place(socket.gethostname(), os.getpid()), group=process_group)
    return places


def open_workers(moe: Any, timeout_ms: int) -> Workers:
    """Return the group for the layers of one size, and open it on the first call.

    All expert-parallel ranks must make the calls in the same order. vLLM does so, because all
    ranks load the same layers.

    Args:
        moe: The FusedMoEConfig of a layer.
        timeout_ms: How long a rank waits for another one, in ms.

    Returns:
        The open group.
    """
    process_group = get_ep_group().cpu_group
    key = (moe.hidden_dim, moe.in_dtype, moe.experts_per_token, process_group)
    if key not in OPEN:
        group = open_group(moe, timeout_ms, process_group)
        barriers = open_barriers(group, timeout_ms, process_group)
        opened = Workers(group, find_places(group, process_group), barriers)
        OPEN[key] = opened
        if barriers is not None:
            hosts = [place.host for place in opened.places]
            opened.connections = connect_hosts(group.rank, hosts, process_group)
        if barriers is not None or group.on_gpu:
            opened.start_watching()
        logger.info(
            "EPIC: expert-parallel rank %d of %d is %s; backend %s, %d host(s)",
            group.rank,
            group.num_ranks,
            opened.places[group.rank],
            group.backend,
            group.num_hosts,
        )
    return OPEN[key]


def close_workers() -> None:
    """Close all groups. Only tests need this function: when a process exits, its groups close."""
    for opened in OPEN.values():
        opened.stop_watching()
        opened.group.close()
        if opened.barriers is not None:
            opened.barriers.close()
    OPEN.clear()
