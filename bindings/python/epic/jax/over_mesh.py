# SPDX-License-Identifier: Apache-2.0
"""Lets the functions of epic.jax take global arrays outside of a shard_map."""

import functools
import importlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

from epic.jax import mesh_checks
from epic.jax.groups import Group

Function = TypeVar("Function", bound=Callable[..., Any])


def group_of_call(arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return the group of a call: its first argument, the group of its plan, or group=."""
    first = arguments[0] if arguments else options.get("group", options.get("plan"))
    if isinstance(first, Group):
        return first
    return options.get("group", getattr(getattr(first, "spec", None), "group", None))


def over_mesh(local: Function) -> Function:
    """Decorate a function on the arrays of one device so that it also takes global arrays.

    Outside of a shard_map, for a group with a mesh, the decorated function calls the function with
    its name in epic.jax.sharded.  This function inserts a shard_map over the mesh.
    """

    @functools.wraps(local)
    def run(*arguments: Any, **options: Any) -> Any:
        group = group_of_call(arguments, options)
        if not isinstance(group, Group) or not mesh_checks.takes_global_arrays(group):
            return local(*arguments, **options)
        sharded = importlib.import_module("epic.jax.sharded")
        return getattr(sharded, local.__name__)(group.mesh, *arguments, **options)

    return cast("Function", run)
