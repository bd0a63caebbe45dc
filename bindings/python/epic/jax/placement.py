# SPDX-License-Identifier: Apache-2.0
"""The default placement of experts: each rank owns a contiguous block of them.

If the number of ranks does not divide the number of experts, some blocks have one expert more than
others.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from epic.jax.e4m3 import SCALES
from epic.jax.groups import Group
from epic.options import Layer

EXPERT_WEIGHTS = ("w_gate_up", "w_down", "b_gate_up", "b_down")
BY_EXPERT = (*EXPERT_WEIGHTS, *SCALES)  # all arrays with a row for each expert


def is_even(group: Group, layer: Layer) -> bool:
    """Return whether every rank has equally many experts, so that the core needs no table."""
    return layer.num_experts % group.num_ranks == 0


def default_owners(group: Group, layer: Layer) -> np.ndarray:
    """Return the rank of each expert, [num_experts] int32."""
    experts = np.arange(layer.num_experts, dtype=np.int64)
    return (experts * group.num_ranks // layer.num_experts).astype(np.int32)


def owner_table(group: Group, layer: Layer, given: Any) -> Any:
    """Return rank_of_expert for the core: the caller's table, or None if it needs none."""
    if given is not None or is_even(group, layer):
        return given
    return jnp.asarray(default_owners(group, layer))


def experts_of_ranks(group: Group, layer: Layer) -> np.ndarray:
    """Return the experts of each rank, [num_ranks, local experts] int32.

    A rank with fewer experts than others has num_experts after them.
    """
    found = np.full((group.num_ranks, group.local_experts(layer)), layer.num_experts, np.int32)
    owner = default_owners(group, layer)
    for rank in range(group.num_ranks):
        mine = np.flatnonzero(owner == rank)
        found[rank, : len(mine)] = mine
    return found


def take_experts(weight: Any, experts: Any) -> Any:
    """Return rows of a weight of all experts; ids that are too large get rows of zeros."""
    return jnp.take(weight, experts, axis=0, mode="fill", fill_value=0)


def pad_weights(group: Group, layer: Layer, weights: Any) -> Any:
    """Return the weights of all experts, padded so that every rank has equally many rows."""
    return replace_expert_weights(weights, experts_of_ranks(group, layer).reshape(-1))


def take_own_weights(group: Group, layer: Layer, weights: Any) -> Any:
    """Return this rank's rows of the weights of all experts.  Call it inside of a shard_map."""
    mine = jnp.asarray(experts_of_ranks(group, layer))[jax.lax.axis_index(group.axes)]
    return replace_expert_weights(weights, mine)


def replace_expert_weights(weights: Any, experts: Any) -> Any:
    """Return MoeWeights with only the rows of these experts."""
    named = {name: getattr(weights, name) for name in BY_EXPERT}
    return weights._replace(
        **{name: None if w is None else take_experts(w, experts) for name, w in named.items()}
    )
