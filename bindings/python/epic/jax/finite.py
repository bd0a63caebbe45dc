# SPDX-License-Identifier: Apache-2.0
"""Finds the first NaN or infinity in the forward of a layer.

The layer is computed again with one choice of each token at a time.  Each row that a token gets
back then comes from one expert.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from epic.errors import EpicArgumentError, EpicNonFiniteError, EpicUnsupportedError
from epic.jax.arrays import check_kind
from epic.jax.composed import router_logits
from epic.jax.groups import Group, find_open
from epic.jax.layer_args import MoeWeights
from epic.jax.mesh_checks import takes_global_arrays
from epic.jax.moe import as_token_mask, fsdp_axes_of, gather_weights, moe
from epic.jax.sums import sum as sum_over_ranks
from epic.non_finite import EXPERT, INPUT, LOGITS, OUTPUT, SHARED, STAGES
from epic.options import Moe

NOTHING = len(STAGES)  # the stage of a finding if all rows are finite


def find_non_finite(group: Group, options: Moe, x: Any, weights: MoeWeights, **more: Any) -> Any:
    """Find the first row in the forward of a layer that contains a NaN or an infinity.

    Call it with the arguments of `moe`, inside of a `jax.shard_map` if the group has a mesh.  Pass
    its result to `check_finite`, which raises the error.  Use it only for debugging, for example
    after a step whose loss is not finite: it computes the layer 2 + top_k times.

    Collective: all ranks call it.

    Args:
        group: the group.
        options: the options of the layer.
        x: [..., hidden]: the tokens of this device.
        weights: the weights of this device.
        **more: further arguments of `moe`, such as token_mask or fsdp_axes.  scatter_tokens is
            not supported.

    Returns:
        [1, 4] int32, equal on all ranks of the group: the value that the row belongs to, its rank,
        its token on this rank, and its expert (-1: none).  If the layer has several such rows,
        it is one of the value that is computed first.  Of this value it is the row of the lowest
        rank, and of its first token.

    Raises:
        EpicArgumentError: an argument is wrong; raised while tracing.
        EpicUnsupportedError: the arrays are global, scatter_tokens is given, or a group
            without a mesh has several ranks in this process; raised while tracing.

    Example:
        >>> import jax
        >>> import numpy as np
        >>> import epic.jax
        >>> options = epic.jax.Moe.of(num_experts=4, top_k=1, hidden=8, inner=16)
        >>> weights = epic.jax.MoeWeights(
        ...     np.ones((8, 4), np.float32),
        ...     np.ones((4, 8, 32), np.float32),
        ...     np.ones((4, 16, 8), np.float32),
        ... )
        >>> x = np.ones((3, 8), np.float32)
        >>> x[1, 5] = np.nan
        >>> with epic.jax.open(max_tokens=16, max_row_bytes=32) as group:  # one rank
        ...     found = jax.jit(epic.jax.find_non_finite, static_argnums=(0, 1))(
        ...         group, options, x, weights
        ...     )
        >>> try:
        ...     epic.jax.check_finite({"layers.3": found})
        ... except epic.jax.EpicNonFiniteError as error:
        ...     print(error.layer, error.rank, error.token)
        layers.3 0 1

    """
    check_kind("group", group, Group)
    if takes_global_arrays(group):
        raise EpicUnsupportedError(
            "find_non_finite with global arrays is not supported: call it inside of a "
            "jax.shard_map over the mesh of the group"
        )
    if more.get("scatter_tokens"):
        raise EpicUnsupportedError(
            "scatter_tokens is not supported by find_non_finite: leave it out, and gather the "
            "tokens of tensor_axis before the call"
        )
    rank = rank_of(group)
    out = moe(group, options, x, weights, **{**more, "return_routing": True})
    mask = as_token_mask(options, more.get("token_mask"), x)
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if mask is None else jnp.where(mask[:, None], rows, 0)
    whole = gather_weights(group, x, weights, fsdp_axes_of(group, more.get("fsdp_axes", ())))
    logits = router_logits(rows, whole)
    found = [first_row(INPUT, rows), first_row(LOGITS, logits), first_row(OUTPUT, out.out)]
    found += search_experts(group, options, x, weights, out.routing, more)
    mine = first_finding(jnp.stack(found))
    # Ranks that have left the group add zeros, which must mean that they have found nothing.
    mine = mine.at[0].add(-NOTHING)
    table = jnp.zeros((group.num_ranks, 3), jnp.float32).at[rank].set(mine.astype(jnp.float32))
    every = sum_over_ranks(group, table, channel=more.get("channel")).astype(jnp.int32)
    every = every.at[:, 0].add(NOTHING)
    worst = jnp.argmin(every[:, 0])
    stage, token, expert = every[worst]
    return jnp.stack([stage, worst.astype(jnp.int32), token, expert])[None]


def rank_of(group: Group) -> Any:
    """Return the rank of this device, traced if the group has a mesh."""
    if group.num_ranks == 1:
        return 0
    if group.axes:
        return jax.lax.axis_index(group.axes)
    ranks = [member.rank for member in find_open(group).contexts]
    if len(ranks) != 1:
        raise EpicUnsupportedError(
            f"group {group.name!r} has ranks {ranks} in this process: find_non_finite supports one "
            "rank in a process, or a group with a mesh"
        )
    return ranks[0]


def first_row(stage: int, rows: Any, expert: Any = None) -> Any:
    """Return the first row that is not finite as an int32 array (stage, token, expert).

    Args:
        stage: the value that the rows belong to.
        rows: [..., n].
        expert: [rows]: the expert that computed each row.  None: no expert did.

    """
    bad = ~jnp.isfinite(rows).all(axis=-1).reshape(-1)
    token = jnp.argmax(jnp.pad(bad, (0, 1)))  # padded, because there may be no row
    which = -1 if expert is None else jnp.pad(expert, (0, 1))[token]
    parts = (jnp.where(bad.any(), stage, NOTHING), token, which)
    return jnp.stack([jnp.asarray(part, jnp.int32) for part in parts])


def first_finding(found: Any) -> Any:
    """Return the finding [3] of the smallest stage, and of its first token: found is [n, 3]."""
    return found[jnp.lexsort((found[:, 1], found[:, 0]))[0]]


def search_experts(
    group: Group, options: Moe, x: Any, weights: MoeWeights, routing: Any, more: dict[str, Any]
) -> list[Any]:
    """Return the findings of the shared expert and of each choice k."""
    rest = {k: v for k, v in more.items() if k not in ("token_ids", "table", "forced")}
    ids, shares = routing
    found = []
    if options.shared is not None:
        none = jnp.full_like(ids, -1)
        alone = moe(group, options, x, weights, **rest, forced=(none, jnp.zeros_like(shares)))
        found.append(first_row(SHARED, alone.out))
        options = replace(options, shared=None)
        shared = {name: None for name in weights._fields if name.startswith("shared_")}
        weights = weights._replace(**shared)
    # Zero-experts compute nothing, so leave out their ids, which follow those of the experts.
    ids = jnp.where(ids < options.router.num_experts, ids, -1)
    for k in range(options.router.top_k):
        one = jnp.where(jnp.arange(options.router.top_k) == k, ids, -1)
        alone = moe(group, options, x, weights, **rest, forced=(one, shares))
        found.append(first_row(EXPERT, alone.out, ids[..., k].reshape(-1)))
    return found


def check_finite(found: Mapping[str, Any]) -> None:
    """Raise an error if `find_non_finite` has found a row.

    Call it outside of `jax.jit`.

    Args:
        found: the result of `find_non_finite` of each layer, [..., 4], by the name of the layer, in
            the order of the layers.  If an array is sharded over the devices of several processes,
            each process reads the part of its own devices.

    Raises:
        EpicNonFiniteError: a layer has a row that is not finite.  The error names the first such
            layer, its rank and token, and the expert that computed the row.

    Example:
        >>> import numpy as np
        >>> import epic.jax
        >>> epic.jax.check_finite({"layers.0": np.array([[8, 0, 0, -1]])})  # 8: nothing was found

    """
    for name, array in found.items():
        shards = getattr(array, "addressable_shards", None)
        parts = [array] if shards is None else [shard.data for shard in shards]
        rows = np.concatenate([np.asarray(part).reshape(-1, 4) for part in parts])
        if not len(rows):
            raise EpicArgumentError(
                f"found[{name!r}] has the shape {array.shape}: must be [..., 4], as "
                "find_non_finite returns it"
            )
        stage, rank, token, expert = min(map(tuple, rows.tolist()))
        if stage < NOTHING:
            what, remedy = STAGES[stage]
            number = None if expert < 0 else expert
            raise EpicNonFiniteError(what, remedy, name, rank, token, number)
