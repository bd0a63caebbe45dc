# SPDX-License-Identifier: Apache-2.0
"""The members of the groups of a name: the ranks that take part in their operations."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from epic.members import Members, read_members, regroup


def members_by_index(indices: list[int], found: list[Members]) -> list[Members]:
    """Return the members of each group, in the order of the groups' numbers.

    Args:
        indices: the number of the group of each rank of this process.
        found: the members of that group.

    """
    return [members for _, members in sorted(dict(zip(indices, found, strict=True)).items())]


def read_all(contexts: Mapping[Any, int]) -> list[Members]:
    """Return the members of each group that has ranks in this process.

    Args:
        contexts: the contexts of an open group, by groups.Member.

    """
    return members_by_index(
        [m.index for m in contexts], [read_members(c) for c in contexts.values()]
    )


def regroup_all(contexts: Mapping[Any, int], num_ranks: int, **args: Any) -> list[Members]:
    """Make the next generation on all ranks of this process at the same time.

    Args:
        contexts: the contexts of an open group, by groups.Member.
        num_ranks: the number of ranks of a group.
        **args: further arguments of epic.members.regroup.

    Returns:
        The members of each group that has ranks in this process.

    Raises:
        EpicError: the first error, after all calls have ended.

    """
    with ThreadPoolExecutor(len(contexts)) as pool:
        calls = [pool.submit(regroup, context, num_ranks, **args) for context in contexts.values()]
    found = [call.result() for call in calls]
    return members_by_index([member.index for member in contexts], found)
