# SPDX-License-Identifier: Apache-2.0
"""The groups of vLLM's expert-parallel ranks, and the names of the workers."""

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from vllm.distributed import get_ep_group

import epic.torch

logger = logging.getLogger("vllm.epic")

REPORT_SECONDS = 10.0  # shortest time between two looks for a slow rank
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
        )
        places: list[str] = [""] * group.num_ranks
        own = f"{socket.gethostname()}, process {os.getpid()}"
        dist.all_gather_object(places, own, group=process_group)
        OPEN[key] = Workers(group, places)
        logger.info(
            "EPIC: expert-parallel rank %d of %d is %s; backend %s, %d host(s)",
            group.rank,
            group.num_ranks,
            own,
            group.backend,
            group.num_hosts,
        )
    return OPEN[key]
