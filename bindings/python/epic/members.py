# SPDX-License-Identifier: Apache-2.0
"""The members of a group: the ranks that take part in its operations."""

import ctypes
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from epic import _native
from epic.errors import EpicArgumentError
from epic.options import check_int, check_kind

WORD = 64  # ranks in one element of a set of the core


class Members(NamedTuple):
    """The members of a group in one generation.

    A group is in generation 0 when it opens, and then all ranks are members. Each call of `shrink`
    makes the next generation. Ranks keep their numbers.

    Attributes:
        generation: Number of the generation.
        ranks: The members, in ascending order.
        gone: The members of the generation before that are not in this one.
        least_step: Smallest `step` that a member of this generation passed to `shrink`; 0 in
            generation 0.
        greatest_step: Largest `step` that a member of this generation passed.
    """

    generation: int
    ranks: tuple[int, ...]
    gone: tuple[int, ...]
    least_step: int
    greatest_step: int


def ranks_of(words: Iterable[int]) -> tuple[int, ...]:
    """Return the ranks of a set of the core."""
    return tuple(
        WORD * i + bit for i, word in enumerate(words) for bit in range(WORD) if word >> bit & 1
    )


def words_of(ranks: Iterable[int], num_ranks: int) -> ctypes.Array[ctypes.c_uint64]:
    """Return the set of the core that contains the ranks."""
    words = [0] * (-(-num_ranks // WORD))
    if not isinstance(ranks, Iterable):
        raise EpicArgumentError(f"only is {ranks!r}: must be a list of ranks")
    for rank in ranks:
        try:
            number = check_int("only", rank, most=num_ranks - 1)
        except EpicArgumentError:
            raise EpicArgumentError(
                f"only contains {rank!r}: must contain ranks from 0 to {num_ranks - 1}"
            ) from None
        words[number // WORD] |= 1 << number % WORD
    return (ctypes.c_uint64 * len(words))(*words)


def members_of(info: ctypes.Structure) -> Members:
    """Return the struct of the core as Members."""
    return Members(
        info.generation,
        ranks_of(info.members),
        ranks_of(info.gone),
        info.least_step,
        info.greatest_step,
    )


def group_flags(can_shrink: bool) -> int:
    """Return the flags of the core for the argument can_shrink of a group."""
    check_kind("can_shrink", can_shrink, bool)
    return _native.CAN_REGROUP if can_shrink else 0


def read_members(context: int) -> Members:
    """Return the members of an open context."""
    info = _native.MembersInfo()
    _native.check(_native.core().epic_members_v1(context, *_native.sized(info)), context)
    return members_of(info)


@contextmanager
def only_call(regrouping: threading.Lock) -> Iterator[None]:
    """Hold the lock of a group during shrink or leave.

    close() takes the same lock, so it does not free a context that another thread uses.

    Raises:
        EpicArgumentError: Another thread holds it.
    """
    if not regrouping.acquire(blocking=False):
        raise EpicArgumentError(
            "shrink, leave or close is running in another thread: must have ended; wait for it"
        )
    try:
        yield
    finally:
        regrouping.release()


def regroup(
    context: int,
    num_ranks: int,
    *,
    step: int,
    patience_ms: int,
    min_members: int = 0,
    only: Iterable[int] | None = None,
    authority: int = 0,
    leaving: bool = False,
) -> Members:
    """Make the next generation of an open context, and return its members.

    Args:
        context: The context of the core.
        num_ranks: Number of ranks of the group.
        step: As for Group.shrink.
        patience_ms: As for Group.shrink.
        min_members: As for Group.shrink.
        only: As for Group.shrink.
        authority: As for Group.shrink.
        leaving: Whether this rank leaves the group.
    """
    if (only is None) != (authority == 0):
        raise EpicArgumentError(
            f"only is {only!r} and authority is {authority}: must both be passed, or none of them"
        )
    words = None if only is None else words_of(only, num_ranks)
    args = _native.RegroupArgs(
        step=step,
        patience_ms=patience_ms,
        min_members=min_members,
        leaving=leaving,
        authority=authority,
        only=None if words is None else ctypes.addressof(words),
    )
    info = _native.MembersInfo()
    code = _native.core().epic_regroup_v1(context, *_native.sized(args, info))
    _native.check(code, context)
    return members_of(info)
