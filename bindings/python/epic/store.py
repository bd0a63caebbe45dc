# SPDX-License-Identifier: Apache-2.0
"""An exchange over a key-value store, with which the ranks of a group find each other.

A program may try several times to open a group, and all attempts share one store. The ranks read
the number of the current attempt from the store. So they agree on it, even if the last attempt
failed on only some of them.

The first rank that knows the outcome of an attempt writes it under the attempt's key "verdict". The
outcome is GO if every rank has joined, and FAILED if a rank gave up. It never changes. After a GO
each further round of the exchange uses new keys of this attempt. So no rank reads keys of another
attempt.
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
    """The five operations of a key-value store that an exchange needs."""

    def put(self, key: str, value: bytes) -> None:
        """Set a key, and replace its value if it has one."""

    def put_first(self, key: str, value: bytes) -> bytes:
        """Set a key unless it has a value; return the value that it has then."""

    def has(self, key: str) -> bool:
        """Return whether the key has a value; do not wait."""

    def get(self, key: str) -> bytes:
        """Return the value of a key that has one."""

    def remove(self, key: str) -> None:
        """Delete a key, if the store can delete keys."""


class StoreExchange:
    """The exchange of one rank of a group: a function (rank, bytes) that returns all ranks' bytes.

    Args:
        store: The store.
        prefix: Prefix of the keys; equal on all ranks of the group, and different between groups.
        num_ranks: Number of ranks.
        timeout_ms: Time limit of each round in ms.
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
        """Run one round: send `mine` to all ranks, and return the bytes of every rank."""
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
        """Join attempts until one has the verdict GO; return the keys of its first round.

        If another rank gives up an attempt, this rank joins the next one, until its own time limit
        is over.

        Args:
            rank: This rank.
            mine: The bytes of this rank for the first round.
            busy: The attempts of this call.
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
        """Raise an error if another process has this rank, and report that to the other ranks."""
        key = f"{self.prefix}/{self.attempt}/place/{rank}"
        if self.store.put_first(key, self.token) != self.token:
            self.store.put(f"{self.prefix}/{self.attempt}/twice", str(rank).encode())
            raise EpicArgumentError(
                f"rank is {rank}: must be different on each process, and another process has "
                f"opened the group as rank {rank}"
            )
        self.own.append(key)

    def await_verdict(self, keys: list[str], end: float) -> bytes:
        """Wait until all ranks have joined, or the attempt has a verdict, or the time is over.

        Args:
            keys: The keys of all ranks in the first round.
            end: Time at which this rank gives up.

        Returns:
            The verdict, which this rank writes if no other rank has.
        """
        verdict = self.verdict(self.attempt)
        if self.await_keys(keys, end, lambda: self.store.has(verdict)):
            return self.store.put_first(verdict, GO)
        # This has no effect if another rank has written a verdict already.
        return self.store.put_first(verdict, FAILED)

    def await_keys(
        self, keys: list[str], end: float, is_void: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait until all keys have values.

        It polls one key at a time, because all ranks share the store. The method wait() of torch's
        stores is not used, because it holds the lock of the store, and logs a warning at each
        timeout.

        Args:
            keys: The keys.
            end: Time at which this rank gives up.
            is_void: Returns True if this rank must not wait any longer.

        Returns:
            True if all keys have values. False if the time is over, if another thread called
            leave(), or if is_void() returned True.
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
        """Give up the current attempt, so that it fails on all ranks. Another thread calls this."""
        self.has_left.set()
        if self.attempt is not None:
            self.store.put_first(self.verdict(self.attempt), FAILED)

    def forget(self, keep: int = 0) -> None:
        """Delete all keys of this rank except the last `keep` ones."""
        while len(self.own) > keep:
            self.store.remove(self.own.pop(0))

    # -------------------------------------------------------------------------- keys ----

    def keys(self, part: str) -> list[str]:
        """Return the keys PREFIX/PART/RANK of all ranks."""
        return [f"{self.prefix}/{part}/{rank}" for rank in range(self.num_ranks)]

    def verdict(self, attempt: int | None) -> str:
        """Return the key of an attempt's outcome."""
        return f"{self.prefix}/{attempt}/verdict"

    def put(self, key: str, value: bytes) -> None:
        """Set a key, and remember it as a key of this rank."""
        self.store.put(key, value)
        self.own.append(key)

    def is_decided(self, attempt: int) -> bool:
        """Return whether an attempt has a verdict."""
        return self.store.has(self.verdict(attempt))

    def first_open(self) -> int:
        """Return the first attempt without a verdict.

        The key "next" of the store contains a number of an attempt at which to begin the search.
        """
        hint = f"{self.prefix}/next"
        begin = attempt = int(self.store.get(hint)) if self.store.has(hint) else 0
        while self.is_decided(attempt):
            attempt += 1
        if attempt > begin:
            self.store.put(hint, str(attempt).encode())
        return attempt

    # ------------------------------------------------------------------------ waiting ----

    def deadline(self) -> float:
        """Return the time at which this rank gives up a round that begins now."""
        return time.monotonic() + self.timeout_ms / 1000

    def is_over(self, end: float) -> bool:
        """Return whether this rank must stop waiting: the time is over, or leave() was called."""
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
    """The attempts that one call of an exchange takes part in.

    If two threads of a process open groups with equal prefix and rank at the same time, they must
    take part in different attempts. So `of_process` contains the attempts of all threads.
    """

    of_process: ClassVar[set[tuple[str, int, int]]] = set()
    lock = threading.Lock()

    def __init__(self, prefix: str, rank: int) -> None:
        self.prefix, self.rank, self.busy = prefix, rank, Attempts.of_process
        self.mine: set[tuple[str, int, int]] = set()

    def choose(self, attempt: int, is_decided: Callable[[int], bool]) -> int:
        """Take part in the first attempt, from `attempt` on, that is free, and return its number.

        An attempt is free if it has no verdict, and no thread of this process takes part in it.
        """
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
