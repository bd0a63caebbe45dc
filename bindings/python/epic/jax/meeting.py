# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a group find each other: epic.h's meeting, brought by Python.

An exchange is a function (rank, mine: bytes) -> list of every rank's bytes, in rank order.
"""

import ctypes
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from epic import _native
from epic.errors import EpicArgumentError, EpicError
from epic.options import whole

Exchange = Callable[[int, bytes], list[bytes]]
ETIMEOUT, EPEER = 4, 8


@dataclass(frozen=True)
class Tcp:
    """A meeting over TCP; rank 0 listens on `address`.  Several groups take ports in a row."""

    address: str = "127.0.0.1"
    port: int = 29507
    secret: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= whole("port", self.port) <= 65535:
            raise EpicArgumentError(f"port {self.port}: 1 to 65535 is needed")


class Meeting:
    """An epic_meet of one rank, and what must live as long as it."""

    def __init__(self, struct: ctypes.Structure, *kept: Any) -> None:
        self.struct = struct
        self.kept = kept
        self.error: Exception | None = None

    def close(self) -> None:
        """Gives the meeting's resources back."""
        _native.core().epic_meet_close(ctypes.addressof(self.struct))


def by_threads(num_ranks: int, timeout_ms: int) -> list[Meeting]:
    """Of ranks that are all in this process."""
    array = (_native.Meet * num_ranks)()
    _native.check(_native.core().epic_meet_threads(array, num_ranks, timeout_ms))
    return [Meeting(array[rank], array) for rank in range(num_ranks)]


def by_tcp(tcp: Tcp, group: int, rank: int, num_ranks: int, timeout_ms: int) -> Meeting:
    """Over TCP: blocks until the ranks are there."""
    struct = _native.Meet()
    secret = tcp.secret.encode() if tcp.secret else None
    wish = _native.Tcp(tcp.address.encode(), secret, rank, num_ranks, tcp.port + group, timeout_ms)
    _native.check(_native.core().epic_meet_tcp_v1(ctypes.addressof(struct), *_native.sized(wish)))
    return Meeting(struct)


def by_exchange(exchange: Exchange, rank: int, num_ranks: int) -> Meeting:
    """Through a function of the caller; what it raises is raised by open."""
    struct = _native.Meet(rank=rank, num_ranks=num_ranks)
    meeting = Meeting(struct)

    def gather(_: int, mine: int, everyone: int, size: int) -> int:
        try:
            parts = exchange(rank, ctypes.string_at(mine, size))
            check_parts(parts, num_ranks, size)
        except Exception as error:
            meeting.error = error
            return EPEER
        ctypes.memmove(everyone, b"".join(parts), size * num_ranks)
        return 0

    struct.gather = _native.GATHER(gather)
    meeting.kept = (struct.gather,)
    return meeting


def check_parts(parts: list[bytes], num_ranks: int, size: int) -> None:
    """All ranks must have brought as much as this one."""
    lengths = [len(part) for part in parts]
    if lengths != [size] * num_ranks:
        raise EpicError(
            "EPIC_EMISMATCH",
            f"the meeting gave parts of {lengths} bytes: {num_ranks} of {size} are needed",
        )


def store() -> Any:
    """JAX's distributed key-value store; None without jax.distributed.  Its name is private to
    JAX, and used here only: where it is gone, bring an exchange or Tcp."""
    try:
        from jax._src import distributed
    except ImportError:
        return None
    return getattr(getattr(distributed, "global_state", None), "client", None)


class StoreExchange:
    """An exchange over JAX's key-value store."""

    def __init__(self, client: Any, prefix: str, num_ranks: int, timeout_ms: int) -> None:
        self.client, self.prefix = client, prefix
        self.num_ranks, self.timeout_ms = num_ranks, timeout_ms
        self.rounds = [itertools.count() for _ in range(num_ranks)]
        self.mine: list[list[str]] = [[] for _ in range(num_ranks)]

    def __call__(self, rank: int, mine: bytes) -> list[bytes]:
        """One round.  When all have come to it, nobody reads the round before."""
        turn = next(self.rounds[rank])
        key = f"{self.prefix}/{turn}"
        self.client.key_value_set_bytes(f"{key}/{rank}", mine)
        self.mine[rank].append(f"{key}/{rank}")
        parts = [self.get(f"{key}/{peer}", peer) for peer in range(self.num_ranks)]
        self.forget(rank, 1)
        return parts

    def get(self, key: str, peer: int) -> bytes:
        """The peer's part; waits for it."""
        try:
            return self.client.blocking_key_value_get_bytes(key, self.timeout_ms)
        except Exception as error:
            if not str(error).startswith("DEADLINE_EXCEEDED"):
                raise
            raise EpicError(
                "EPIC_ETIMEOUT",
                f"rank {peer} did not come to the meeting {self.prefix} in {self.timeout_ms} ms",
            ) from error

    def forget(self, rank: int, keep: int = 0) -> None:
        """Removes all but the last `keep` keys of a rank."""
        keys = self.mine[rank]
        while len(keys) > keep:
            self.client.key_value_delete(keys.pop(0))
