# SPDX-License-Identifier: Apache-2.0
"""Meetings over JAX's key-value store."""

import itertools
from typing import Any

from epic.errors import EpicError


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
