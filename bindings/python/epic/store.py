# SPDX-License-Identifier: Apache-2.0
"""The exchange of a group's opening over a key-value store that several attempts share.

The store itself numbers the attempts to open, so that the ranks agree on the number even after one
of them failed alone. The first rank that knows the outcome of an attempt writes it, once, under the
attempt's key "verdict": GO when every rank has come, FAILED when a rank gave up. After a GO each
further round of the exchange has keys of its own below the attempt. No rank reads a key of one
attempt in another.
"""

import threading
import time
import uuid
from collections.abc import Callable
from typing import ClassVar, Protocol

from epic.errors import EpicArgumentError, EpicError

GO, FAILED = b"go", b"failed"
LONGEST_PAUSE = 0.05  # seconds between two polls of the store


class Store(Protocol):
    """The five operations that an exchange needs."""

    def put(self, key: str, value: bytes) -> None:
        """Set a key, also one that has a value."""

    def put_first(self, key: str, value: bytes) -> bytes:
        """Set a key unless it has a value; return the value that it has then."""

    def has(self, key: str) -> bool:
        """Return whether the key has a value; do not wait."""

    def get(self, key: str) -> bytes:
        """Return the value of a key that has one."""

    def remove(self, key: str) -> None:
        """Delete a key if the store can."""


class StoreExchange:
    """The exchange of one rank for one group: a function (rank, bytes) -> every rank's bytes.

    prefix: equal on the ranks of the group, and used by no others. timeout_ms: of every round.
    """

    def __init__(self, store: Store, prefix: str, num_ranks: int, timeout_ms: int) -> None:
        self.store, self.prefix = store, prefix
        self.num_ranks, self.timeout_ms = num_ranks, timeout_ms
        self.attempt: int | None = None
        self.round = 0
        self.own: list[str] = []  # keys of this rank that are in the store
        self.has_left = threading.Event()
        self.token = uuid.uuid4().hex.encode()

    def __call__(self, rank: int, mine: bytes) -> list[bytes]:
        """Run one round."""
        if self.round == 0:
            with Attempts(self.prefix, rank) as busy:
                keys = self.join(rank, mine, busy)
        else:
            keys = self.keys(f"{self.attempt}/{self.round}")
            self.put(keys[rank], mine)
            if not self.await_keys(keys, self.deadline()):
                raise self.late(self.missing(keys))
        parts = [self.store.get(key) for key in keys]
        self.round += 1
        self.forget(1)  # all ranks are in this round, so no rank still reads the previous one
        return parts

    def join(self, rank: int, mine: bytes, busy: "Attempts") -> list[str]:
        """Join attempts until one has a GO; return the keys of its first round.

        If another rank gives an attempt up, this rank joins the next one, until its own time limit.
        """
        end = self.deadline()
        late = set(range(self.num_ranks))  # ranks that have joined none of the attempts so far
        while True:
            self.attempt = busy.choose(self.first_open(), self.is_decided)
            keys = self.keys(f"{self.attempt}/0")
            self.take_place(rank)
            self.put(keys[rank], mine)
            if self.await_verdict(keys, end) == GO:
                return keys
            missing = self.missing(keys)
            late = late & missing or missing
            if self.is_over(end):
                raise self.late(late)

    def take_place(self, rank: int) -> None:
        """Refuse a second process of one rank, and report it to the others."""
        key = f"{self.prefix}/{self.attempt}/place/{rank}"
        if self.store.put_first(key, self.token) != self.token:
            self.store.put(f"{self.prefix}/{self.attempt}/twice", str(rank).encode())
            raise EpicArgumentError(
                f"rank is {rank}: must be different on each process, and another process has "
                f"opened the group as rank {rank}"
            )
        self.own.append(key)

    def await_verdict(self, keys: list[str], end: float) -> bytes:
        """Wait for all ranks, another rank's verdict, or the end; return the verdict."""
        verdict = self.verdict(self.attempt)
        if self.await_keys(keys, end, lambda: self.store.has(verdict)):
            return self.store.put_first(verdict, GO)
        # Has no effect if another rank has already decided.
        return self.store.put_first(verdict, FAILED)

    def await_keys(
        self, keys: list[str], end: float, is_void: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait until all keys have values; False: the time limit passed, leave(), or is_void().

        It polls one key at a time, because the store serves all ranks. torch's own wait() holds the
        store's lock and logs a warning at each timeout.
        """
        begin, next_key = time.monotonic(), 0
        while True:
            while next_key < len(keys) and self.store.has(keys[next_key]):
                next_key += 1
            if next_key == len(keys):
                return True
            if self.is_over(end) or is_void():
                return False
            waited = time.monotonic() - begin
            time.sleep(min(LONGEST_PAUSE, max(0.001, waited / 10)))

    def leave(self) -> None:
        """Give up, from another thread: the attempt fails on all ranks."""
        self.has_left.set()
        if self.attempt is not None:
            self.store.put_first(self.verdict(self.attempt), FAILED)

    def forget(self, keep: int = 0) -> None:
        """Delete all but the last `keep` keys of this rank."""
        while len(self.own) > keep:
            self.store.remove(self.own.pop(0))

    # -------------------------------------------------------------------------- keys ----

    def keys(self, part: str) -> list[str]:
        """Return the keys of all ranks below a part of the prefix."""
        return [f"{self.prefix}/{part}/{rank}" for rank in range(self.num_ranks)]

    def verdict(self, attempt: int | None) -> str:
        """Return the key of an attempt's outcome."""
        return f"{self.prefix}/{attempt}/verdict"

    def put(self, key: str, value: bytes) -> None:
        """Set a key of this rank."""
        self.store.put(key, value)
        self.own.append(key)

    def is_decided(self, attempt: int) -> bool:
        """Return whether an attempt has ended, in success or failure."""
        return self.store.has(self.verdict(attempt))

    def first_open(self) -> int:
        """Return the first attempt without a verdict; the store keeps where to look next."""
        hint = f"{self.prefix}/next"
        begin = attempt = int(self.store.get(hint)) if self.store.has(hint) else 0
        while self.is_decided(attempt):
            attempt += 1
        if attempt > begin:
            self.store.put(hint, str(attempt).encode())
        return attempt

    # ------------------------------------------------------------------------ waiting ----

    def deadline(self) -> float:
        """Return the end of a round that begins now."""
        return time.monotonic() + self.timeout_ms / 1000

    def is_over(self, end: float) -> bool:
        """Return whether this rank waits no longer."""
        return self.has_left.is_set() or time.monotonic() >= end

    def missing(self, keys: list[str]) -> set[int]:
        """Return the ranks whose keys have no value."""
        return {rank for rank, key in enumerate(keys) if not self.store.has(key)}

    def late(self, ranks: set[int]) -> EpicError:
        """Return the error that names the ranks that did not join."""
        names = ", ".join(map(str, sorted(ranks))) or "another"
        twice = f"{self.prefix}/{self.attempt}/twice"
        note = ""
        if self.store.has(twice):
            note = f", and two processes opened it as rank {self.store.get(twice).decode()}"
        return EpicError(
            "EPIC_ETIMEOUT",
            f"rank {names} did not join the bootstrap within {self.timeout_ms} ms{note}: every "
            "rank must open the group; correct the cause, then open it again on all ranks",
        )


class Attempts:
    """The attempts that this process takes part in.

    Two threads that open groups of the same ranks at the same time take different ones.
    """

    of_process: ClassVar[set[tuple[str, int, int]]] = set()
    lock = threading.Lock()

    def __init__(self, prefix: str, rank: int) -> None:
        self.prefix, self.rank, self.busy = prefix, rank, Attempts.of_process
        self.mine: set[tuple[str, int, int]] = set()

    def choose(self, attempt: int, is_decided: Callable[[int], bool]) -> int:
        """Return the first attempt from `attempt` on that is open and that no thread is in."""
        with self.lock:
            while (self.prefix, self.rank, attempt) in self.busy or is_decided(attempt):
                attempt += 1
            entry = (self.prefix, self.rank, attempt)
            self.busy.add(entry)
            self.mine.add(entry)
        return attempt

    def __enter__(self) -> "Attempts":
        return self

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.busy.difference_update(self.mine)
