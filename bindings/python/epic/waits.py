# SPDX-License-Identifier: Apache-2.0
"""How long the ranks of a group have waited for each other, to find a slow rank."""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from epic import _native
from epic.errors import EpicArgumentError
from epic.options import check_kind

# The operations of epic_operation that ranks make together, from the number 2 on.
OPERATIONS = (
    "plan", "dispatch", "combine", "dispatch_backward", "combine_backward", "sum", "window",
)  # fmt: skip
FIRST = 2  # number of the first of them


class Wait(NamedTuple):
    """How long one rank has waited for one peer, in the operations of one kind.

    Attributes:
        operation: Name of the operation, for example "dispatch".
        peer: Rank for which it waited.
        num_operations: Number of these operations that it has begun; equal for all peers.
        seconds: Time in which it waited for the peer, alone or together with other peers.
        alone_seconds: Part of that time in which it waited for no other peer.
    """

    operation: str
    peer: int
    num_operations: int
    seconds: float
    alone_seconds: float


@dataclass(frozen=True)
class Waits:
    """How long one rank has waited for its peers, since its group was opened.

    If one rank is slow, all other ranks wait for it, and for most of that time they wait for no
    other rank. So the slow rank has the largest `alone_seconds` in the tables of the others. The
    slow rank itself waits little.

    Attributes:
        group: Name of the group.
        rank: The rank that waited.
        num_ranks: Number of ranks of the group.
        table: A Wait for each kind of operation and each rank, also for those without waits.

    Example:
        >>> import epic.torch
        >>> with epic.torch.Group(num_ranks=1, max_tokens=2, max_row_bytes=64) as group:
        ...     group.waits().alone_seconds()
        [0.0]
    """

    group: str
    rank: int
    num_ranks: int
    table: tuple[Wait, ...]

    def alone_seconds(self) -> list[float]:
        """Return for each peer how long this rank waited for it alone, over all operations."""
        totals = [0.0] * self.num_ranks
        for wait in self.table:
            totals[wait.peer] += wait.alone_seconds
        return totals

    def slowest(self) -> tuple[int, float]:
        """Return the peer for which this rank waited longest, and alone_seconds of that peer."""
        totals = self.alone_seconds()
        peer = max(range(self.num_ranks), key=totals.__getitem__)
        return peer, totals[peer]

    def since(self, earlier: "Waits") -> "Waits":
        """Return the waits between an earlier call of waits() and the call that returned this.

        Args:
            earlier: The earlier result, of the same rank.

        Returns:
            The differences of all counts and times.

        Raises:
            EpicArgumentError: The earlier result is of another rank or group, or was read later,
                or before the group was closed and opened again.
        """
        check_kind("earlier", earlier, Waits)
        own, other = ((w.group, w.rank, w.num_ranks) for w in (self, earlier))
        if own != other:
            raise EpicArgumentError(
                f"earlier is of group {earlier.group!r}, rank {earlier.rank} of "
                f"{earlier.num_ranks}: must be of group {self.group!r}, rank {self.rank} of "
                f"{self.num_ranks}"
            )
        pairs = list(zip(self.table, earlier.table, strict=True))
        if any(now.num_operations < then.num_operations for now, then in pairs):
            raise EpicArgumentError(
                f"earlier counts more operations of group {self.group!r} than this: must be an "
                "earlier result of the same open group; read it again after the group is opened"
            )
        return replace(
            self,
            table=tuple(
                Wait(
                    now.operation,
                    now.peer,
                    now.num_operations - then.num_operations,
                    now.seconds - then.seconds,
                    now.alone_seconds - then.alone_seconds,
                )
                for now, then in pairs
            ),
        )

    def prometheus(self) -> str:
        """Return the table as text in the format of Prometheus, for a page of metrics."""
        return format_prometheus([self])


def read_waits(context: int, group: str, rank: int, num_ranks: int) -> Waits:
    """Read the waits of an open context.

    Args:
        context: The context of the core.
        group: Name of the group.
        rank: Rank of the context.
        num_ranks: Number of ranks of the group.

    Returns:
        The waits.

    Raises:
        EpicError: The times could not be copied from the GPU, or their memory is missing.
    """
    table = []
    infos = (_native.WaitInfo * num_ranks)()
    size = ctypes.sizeof(_native.WaitInfo)
    for number, operation in enumerate(OPERATIONS, FIRST):
        code = _native.core().epic_waits_v1(context, number, infos, num_ranks, size)
        _native.check(code, context)
        table += [
            Wait(operation, peer, i.num_operations, i.wait_ns / 1e9, i.alone_ns / 1e9)
            for peer, i in enumerate(infos)
        ]
    return Waits(group, rank, num_ranks, tuple(table))


def label(text: str) -> str:
    """Return a text as the value of a label of Prometheus."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def format_prometheus(all_waits: Iterable[Waits]) -> str:
    """Return the waits of several ranks as one text in the format of Prometheus.

    Prometheus allows each metric only once on a page, so pass all ranks of the process in one call.

    Args:
        all_waits: The waits of each rank.

    Returns:
        The lines, with a line end after the last one. Peers without waits are left out.
    """
    tables = list(all_waits)
    metrics = (
        ("epic_wait_seconds_total", "Time in which a rank waited for a peer.", "seconds"),
        (
            "epic_wait_alone_seconds_total",
            "Time in which a rank waited for this peer and for no other.",
            "alone_seconds",
        ),
        ("epic_wait_operations_total", "Operations that a rank has begun.", "num_operations"),
    )
    lines = []
    for name, help_text, field in metrics:
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} counter"]
        for waits in tables:
            where = f'group={label(waits.group)},rank="{waits.rank}"'
            of_operations = field == "num_operations"
            for wait in waits.table:
                value = getattr(wait, field)
                if value == 0 or (of_operations and wait.peer > 0):
                    continue  # num_operations is equal for all peers
                peer = "" if of_operations else f',peer="{wait.peer}"'
                lines.append(f'{name}{{{where}{peer},operation="{wait.operation}"}} {value}')
    return "\n".join(lines) + "\n"
