# SPDX-License-Identifier: Apache-2.0
"""The groups of vLLM's expert-parallel ranks, and the names of the workers."""

import atexit
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed import get_ep_group
from vllm.platforms import current_platform

import epic.torch

logger = logging.getLogger("vllm.epic")

REPORT_SECONDS = 10.0  # shortest time between two looks for a slow rank
WATCH_SECONDS = 0.5  # time between two looks for a failure on GPUs
SLOW_SHARE = 0.2  # a rank is slow if another one waits for it this part of the time


class Workers:
    """An open group, and where its ranks run.

    Args:
        group: The open group.
        places: Host and process number of each rank, for example "node1, process 4711".
    """

    def __init__(self, group: epic.torch.Group, places: list[str]) -> None:
        self.group = group
        self.places = places
        self.looked_at = time.monotonic()  # time of the last look for a slow rank
        self.waits = group.waits()  # the waits at that time
        self.stops = threading.Event()  # set by stop_watching()

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

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Log where all ranks run if EPIC raises an error in the `with` block.

        The error names the rank that has ended, stopped or come late. The error ends this worker,
        and vLLM then ends the server.
        """
        try:
            yield
        except epic.torch.EpicError as error:
            where = "; ".join(f"rank {rank}: {place}" for rank, place in enumerate(self.places))
            logger.error(
                "EPIC: expert-parallel rank %d of %d (%s) cannot go on: %s. The ranks are: %s.",
                self.group.rank,
                self.group.num_ranks,
                self.places[self.group.rank],
                str(error).rstrip("."),
                where,
            )
            raise

    def watch(self) -> None:
        """Look for failures and slow ranks until stop_watching() is called; the body of a thread.

        It is for GPUs. There an operation fails after its call has returned, and the replay of a
        CUDA graph calls no function of EPIC. After a failure the thread ends the worker by SIGTERM.
        vLLM then ends the server.
        """
        if self.group.device.type == "cuda":
            torch.cuda.set_device(self.group.device)  # else the calls would use GPU 0, too
        while not self.stops.wait(WATCH_SECONDS):
            try:
                with self.named_in_errors():
                    self.group.check()
                    self.report_slow_rank()
            except epic.torch.EpicError:
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def start_watching(self) -> None:
        """Start the thread of watch(). It ends before the process closes the group."""
        self.thread = threading.Thread(target=self.watch, name="epic-watch", daemon=True)
        self.thread.start()
        atexit.register(self.stop_watching)  # runs before the function that closes all groups

    def stop_watching(self) -> None:
        """End the thread of watch(), and wait for its end."""
        self.stops.set()
        self.thread.join()


OPEN: dict[Any, Workers] = {}  # by hidden size, type of the rows, top-k, and process group


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
        group = epic.torch.Group(
            process_group,
            max_tokens=moe.max_num_tokens,
            max_row_bytes=moe.hidden_dim * moe.in_dtype.itemsize,
            max_top_k=moe.experts_per_token,
            timeout_ms=timeout_ms,
            name="vllm",
            device="cpu" if current_platform.is_cpu() else f"cuda:{torch.cuda.current_device()}",
        )
        places: list[str] = [""] * group.num_ranks
        own = f"{socket.gethostname()}, process {os.getpid()}"
        dist.all_gather_object(places, own, group=process_group)
        OPEN[key] = Workers(group, places)
        if group.on_gpu:
            OPEN[key].start_watching()
        logger.info(
            "EPIC: expert-parallel rank %d of %d is %s; backend %s, %d host(s)",
            group.rank,
            group.num_ranks,
            own,
            group.backend,
            group.num_hosts,
        )
    return OPEN[key]
