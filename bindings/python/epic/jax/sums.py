# SPDX-License-Identifier: Apache-2.0
"""The sum of an array over the ranks of a group."""

from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from epic.errors import EpicArgumentError
from epic.jax.arrays import ANY_ROWS, as_array, check_kind
from epic.jax.call import (
    call_handler,
    cast_all_varying,
    previous_call,
    record_call,
    site_and_rank,
    spec_of,
    zero_gradient,
)
from epic.jax.groups import Group
from epic.jax.over_mesh import over_mesh
from epic.jax.steps import as_channel, check_sms, gradient_deps, ordering_deps


class SumStatic(NamedTuple):
    """The static arguments of a sum.

    Attributes:
        order: 0: ranks are added in their order.  1: in a binary tree.
        max_sms: the largest number of SMs of the call; 0: the group's.

    """

    order: int
    max_sms: int


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def sum_array(group: Group, how: SumStatic, x: Any, ints: tuple[Any, ...]) -> tuple[Any, Any]:
    """Run sum on a flat float32 array.

    ints contains the channel and the arrays to wait for.  The last result is the byte that is
    available when the call has finished.
    """
    operands = [x, *site_and_rank(group, x), *ints]
    out, done = call_handler(
        "allreduce_sum", [spec_of(x)], operands, group, aliases={0: 0}, **how._asdict()
    )
    return out, done


def sum_forward(group: Group, how: SumStatic, x: Any, ints: tuple[Any, ...]) -> tuple[Any, Any]:
    """Save the integers, and the arrays for which backward must wait."""
    out = sum_array(group, how, x, ints)
    return out, (ints, gradient_deps(group, out[1]))


def sum_backward(group: Group, how: SumStatic, saved: Any, gradients: Any) -> tuple[Any, ...]:
    """Sum the gradients over the ranks, because each rank's x is part of every rank's sum."""
    ints, after = saved
    d_x = sum_array(group, how, gradients[0], (ints[0], *after))[0]
    return d_x, jax.tree.map(zero_gradient, ints)


sum_array.defvjp(sum_forward, sum_backward)


@over_mesh
def sum(
    group: Group,
    x: Any,
    *,
    tree: bool = False,
    channel: Any = None,
    after: Any = None,
    max_sms: int = 0,
) -> Any:
    """Sum an array over the ranks of the group (all-reduce), with equal bits on all ranks.

    Collective; differentiable in x.

    Args:
        group: the group.
        x: [...] float32, with the same shape on all ranks.  For global arrays, outside of a
            shard_map, the arrays of all devices, stacked along the first dimension.
        tree: whether ranks are added in a binary tree.  The number of ranks must then be a power of
            two.  If False they are added in the order of ranks.
        channel: see `plan`.
        after: see `plan`.
        max_sms: see `plan`.

    Returns:
        [...] float32: the sum.  For global arrays the sums of all groups of the mesh, stacked
        along the first dimension.

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.

    Example:
        >>> import jax.numpy as jnp
        >>> import epic.jax
        >>> with epic.jax.open(max_tokens=1, max_row_bytes=64) as group:  # one rank
        ...     epic.jax.sum(group, jnp.ones(3)).tolist()
        [1.0, 1.0, 1.0]

    """
    check_kind("group", group, Group)
    if not isinstance(tree, bool | np.bool_):
        raise EpicArgumentError(f"tree is {tree!r}: must be True or False")
    x = as_array("x", x, ("float32",), ["any"], (ANY_ROWS, "any"), [])
    order = [as_channel(channel), *ordering_deps(after), *previous_call(group)]
    flat, *ints = cast_all_varying(group, x.reshape(-1), *order)
    out, done = sum_array(group, SumStatic(int(tree), check_sms(max_sms)), flat, tuple(ints))
    record_call(group, done)
    return out.reshape(x.shape)
