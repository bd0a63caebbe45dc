# SPDX-License-Identifier: Apache-2.0
"""Weights and results of a layer, and the checks of its arguments while tracing."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from epic import invariance
from epic.errors import EpicArgumentError
from epic.jax import e4m3, placement, steps
from epic.jax import router as routing
from epic.jax.arrays import FLOATS, INTEGERS, MATRICES, check_array, check_kind
from epic.jax.experts import (
    ExpertWeights,
    check_weights,
    fill_dtypes,
    fill_num_experts,
    wide_dtype,
)
from epic.jax.groups import Group
from epic.options import Experts, Moe, Router


class MoeWeights(NamedTuple):
    """Weights of a layer.

    In `epic.jax.moe` the arrays of experts have the experts of this device.  In
    `epic.jax.sharded.moe` they have all experts.

    E is the number of columns of the router, num_experts + zero_experts.  width is 2 * inner: the
    columns of gate, then those of up; with `Experts.interleaved` they alternate.  For ungated
    experts width is inner.  The weights of the router and of the shared expert must be equal on all
    devices of the group.  All weights of experts and of the shared expert have one dtype:
    float32, bfloat16, float16, or float64 with float64 rows.

    Attributes:
        w_gate: [hidden, E] any float dtype: the weight of the router, which converts it to float32
            (float64 with float64 rows) and computes in this dtype.
        w_gate_up: [experts, hidden, width]: gate and up projections.
        w_down: [experts, inner, hidden]: down projections.
        b_gate: [E] any float dtype, or None: added to the logits.
        bias: [E] float32, or None: added to the scores only to choose experts.  It has no gradient;
            `bias_update` changes it.
        b_gate_up: [experts, width] or None.
        b_down: [experts, hidden] or None.
        shared_gate_up: [1, hidden, shared width] or None: the shared expert of `Moe.shared`.
        shared_down: [1, shared inner, hidden] or None.
        shared_b_gate_up: [1, shared width] or None.
        shared_b_down: [1, hidden] or None.
        w_gate_up_scales: scales of weights in e4m3, as `scaled` makes them; else None.
        w_down_scales: scales of weights in e4m3, as `scaled` makes them; else None.

    """

    w_gate: Any
    w_gate_up: Any
    w_down: Any
    b_gate: Any = None
    bias: Any = None
    b_gate_up: Any = None
    b_down: Any = None
    shared_gate_up: Any = None
    shared_down: Any = None
    shared_b_gate_up: Any = None
    shared_b_down: Any = None
    w_gate_up_scales: Any = None
    w_down_scales: Any = None


class Routing(NamedTuple):
    """The experts of each token, as a layer used them, or as it must use them.

    Attributes:
        topk_idx: [..., top_k] integers: ids of experts; negative: no expert.
        weights: [..., top_k] float32 (float64 with float64 rows): the weights of these experts.
            None: the router computes them from its scores.

    """

    topk_idx: Any
    weights: Any = None


class MoeOut(NamedTuple):
    """Results of a layer.

    Attributes:
        out: [..., hidden], shape and dtype of x.
        loss: [] float32: this device's part of the balance loss and z-loss.  Only the sum over the
            group's axis has a meaning: in tree order rank 0 may have all of it.
        load: [num_experts] int32: number of choices of each expert over the whole group, before any
            choice is dropped.
        demand: [1] int32: number of slots that all choices of this rank's experts would need.
        logical_load: [num_logical] int32: load of each logical expert; None without replicas.
        record: the plan of the layer.  Return it from the program and pass it to `read_plan`, which
            shows the fate of each choice.
        routing: with return_routing the `Routing` that the layer used, without a gradient; else
            None.

    """

    out: Any
    loss: Any
    load: Any
    demand: Any
    logical_load: Any = None
    record: Any = None
    routing: Any = None

    @property
    def load_of_ids(self) -> Any:
        """The load of the ids that the router chooses: logical_load with replicas, else load."""
        return self.load if self.logical_load is None else self.logical_load


# The number of arrays token_ids, table, rank_of_expert, logical_of_expert, forced ids and
# capacity_limit.
NUM_TABLES = 6

# The order of the weights in the handlers' arguments.
WEIGHT_ORDER = (
    "w_gate b_gate bias w_gate_up w_down b_gate_up b_down shared_gate_up shared_down "
    "shared_b_gate_up shared_b_down w_gate_up_scales w_down_scales"
).split()

SHARED_WEIGHTS = ("shared_gate_up", "shared_down", "shared_b_gate_up", "shared_b_down")
# Weights that are equal on all ranks and have a gradient.
DENSE_WEIGHTS = ("w_gate", "b_gate", *SHARED_WEIGHTS)
# Weights of the experts and the shared expert.
MLP_WEIGHTS = [n for n in WEIGHT_ORDER[3:] if n not in e4m3.SCALES]


def expert_weights_of(weights: MoeWeights, prefix: str = "") -> ExpertWeights:
    """Return the weights of the experts, or with prefix "shared_" those of the shared expert."""
    if not prefix:
        return ExpertWeights(*(getattr(weights, name) for name in ExpertWeights._fields))
    return ExpertWeights(*(getattr(weights, name) for name in SHARED_WEIGHTS))


def check_forced(router: Router, forced: Any, x: Any) -> Routing | None:
    """Return forced as a Routing [..., top_k], after checking it; None stays None.

    x: the tokens [..., hidden] that the ids belong to.
    """
    if forced is None:
        return None
    parts = forced if isinstance(forced, tuple) else (forced, None)
    if len(parts) != 2:
        raise EpicArgumentError(
            f"forced is a tuple of {len(parts)}: must be ids, a tuple (ids, weights) or a Routing"
        )
    shape = [*x.shape[:-1], ("top_k", router.top_k)]
    ids = check_array("forced ids", parts[0], INTEGERS, shape)
    if parts[1] is None:
        return Routing(ids)
    return Routing(ids, check_array("forced weights", parts[1], FLOATS, shape))


def as_forced(router: Router, forced: Any, x: Any) -> tuple[Any, Any]:
    """Return forced ids [num_tokens, top_k] int32 and their weights or None, after checking them.

    x: the tokens [..., hidden] that the ids belong to.
    """
    given = check_forced(router, forced, x)
    if given is None:
        return None, None
    ids = routing.as_forced_ids(router, given.topk_idx, x.shape[:-1])
    if given.weights is None:
        return ids, None
    return ids, jnp.asarray(given.weights).reshape(ids.shape).astype(wide_dtype(x))


def promise_distinct(options: Moe, *given: Any) -> Moe:
    """Return the options with distinct=True, because a router chooses no expert twice for a token.

    given: the table and the forced ids of the caller, or None.  They may contain an expert twice,
    so with one of them the options stay unchanged.
    """
    if any(ids is not None for ids in given) or options.layer.distinct:
        return options
    return replace(options, layer=replace(options.layer, distinct=True))


def complete_options(group: Group, options: Moe, x: Any, weights: MoeWeights) -> Moe:
    """Fill in the dtypes of the arrays, and the capacity as a number."""
    experts = fill_dtypes(options.experts, x, weights.w_gate_up)
    shared = options.shared and replace(
        options.shared, row_type=x.dtype.name, weight_type=weights.shared_gate_up.dtype.name
    )
    slots = steps.num_slots(group, options.layer, options.capacity)
    return replace(options, experts=experts, shared=shared, capacity=slots)


def check_parts(options: Moe, weights: MoeWeights) -> None:
    """Raise an error for arguments of wrong classes, or if only one of them has a shared expert."""
    check_kind("options", options, Moe)
    check_kind("weights", weights, MoeWeights)
    if weights.w_gate_up is not None and not hasattr(weights.w_gate_up, "dtype"):
        kind = type(weights.w_gate_up).__name__
        raise EpicArgumentError(
            f"w_gate_up is a {kind}: must be an array, because its dtype counts"
        )
    if (options.shared is None) != (weights.shared_gate_up is None):
        raise EpicArgumentError(
            f"shared_gate_up is {'given' if options.shared is None else 'None'} and options.shared "
            f"is {'None' if options.shared is None else 'given'}: pass both or none"
        )
    for name in MLP_WEIGHTS:
        if name.startswith("shared_") and options.shared is None:
            refuse_unused(name, getattr(weights, name), "options.shared is None")


def refuse_unused(name: str, value: Any, why: str) -> None:
    """Raise an error for an argument that would not be used, if it is not None."""
    if value is not None:
        raise EpicArgumentError(f"{name} is given and {why}: must be None")


def check_weights_of_layer(
    router: Router, experts: Experts, shared: Experts | None, x: Any, weights: MoeWeights
) -> None:
    """Raise an error for weights with wrong shapes or dtypes.

    Weights of the router may have any float dtype.  All other weights must have one dtype.
    """
    columns = routing.columns_of(router)
    check_array("w_gate", weights.w_gate, FLOATS, (("hidden", experts.hidden), columns))
    for name in ("b_gate", "bias"):
        vector = getattr(weights, name)
        if vector is not None:
            check_array(name, vector, FLOATS, [columns])
    check_weights(experts, expert_weights_of(weights), x)
    if shared is not None:
        # The shared expert has the dtype of the experts, unless these are e4m3.
        is_free = e4m3.uses_e4m3(experts, weights.w_gate_up)
        like = weights.shared_gate_up if is_free else weights.w_gate_up
        check_weights(shared, expert_weights_of(weights, "shared_"), x, "shared_", like)


def as_weights_of_layer(options: Moe, x: Any, weights: MoeWeights) -> MoeWeights:
    """Return the weights as arrays, after checking them.

    Those of the router get the dtype in which it computes.
    """
    check_weights_of_layer(options.router, options.experts, options.shared, x, weights)
    found = {n: jnp.asarray(w) for n, w in weights._asdict().items() if w is not None}
    for name in {"w_gate", "b_gate"} & set(found):
        found[name] = found[name].astype(wide_dtype(x))
    return MoeWeights(**{**found, "bias": routing.as_bias(options.router, weights.bias)})


def check_replicas(options: Moe, logical_of_expert: Any) -> None:
    """Raise an error if invariant=True does not allow these replicas.

    If logical_of_expert is traced, only the core can check it, on CPUs.
    """
    if logical_of_expert is not None and not isinstance(logical_of_expert, jax.core.Tracer):
        invariance.check_replicas(options, np.asarray(logical_of_expert).tolist())


def check_experts(group: Group, options: Moe, rank_of_expert: Any) -> None:
    """Raise an error for weights of too few or too many experts.

    If rank_of_expert is traced, only the core can check this, when the program runs.
    """
    local, layer = options.experts.num_local_experts, options.layer
    if isinstance(rank_of_expert, jax.core.Tracer):
        return
    owned = steps.max_local_experts(group, layer, rank_of_expert, None)
    if local < owned or (rank_of_expert is None and local != owned):
        raise EpicArgumentError(
            f"w_gate_up has {local} experts: must have {owned}, because a rank of group "
            f"{group.name!r} has {owned} of the {layer.num_experts} experts"
        )


def check_tokens(group: Group, options: Moe, num_tokens: int) -> None:
    """Raise an error for a number of tokens that the group or the options do not allow."""
    if num_tokens > group.max_tokens:
        raise EpicArgumentError(
            f"x has {num_tokens} tokens: must be at most {group.max_tokens}, the max_tokens of "
            f"group {group.name!r}; open a group with more"
        )
    if options.balance_coeff and options.sequence_tokens:
        routing.check_sequences(num_tokens, options.sequence_tokens, "x")


def place_experts(
    group: Group, options: Moe, weights: MoeWeights, given: Any
) -> tuple[Moe, MoeWeights, Any]:
    """Select the experts of this rank.

    Args:
        group: the group.
        options: the options of the layer.
        weights: the weights of this rank's experts; or of all experts, if the number of ranks does
            not divide the number of experts.
        given: rank_of_expert, or None.

    Returns:
        The options with num_local_experts, the weights of this rank's experts, and rank_of_expert
        for the core.

    """
    layer = options.layer
    uneven = given is None and not placement.is_even(group, layer)
    shape = ("experts", "hidden", "width")
    first = check_array("w_gate_up", weights.w_gate_up, MATRICES, shape)
    if uneven and first.shape[0] == layer.num_experts:
        weights = placement.take_own_weights(group, layer, weights)
    mine = fill_num_experts(options.experts, weights.w_gate_up)
    shared = options.shared and fill_num_experts(
        options.shared, weights.shared_gate_up, "shared_gate_up"
    )
    options = replace(options, experts=mine, shared=shared)
    check_experts(group, options, given)
    return options, weights, placement.owner_table(group, layer, given)
