# SPDX-License-Identifier: Apache-2.0
"""The whole layer as one function with gradients: router, plan, dispatch, experts, combine.

Forward is one operator, and backward is another one. Both run the layer of the C core. With
`grouped_mm=`, a token mask, or rows that are sent quantized, the layer is *composed*: it calls the
functions route, plan, dispatch, experts and combine one after the other.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epic import _native
from epic.errors import EpicArgumentError, EpicUnsupportedError
from epic.options import (
    Experts,
    Moe,
    Router,
    check_invariant_call,
    check_kind,
    options_by_key,
)
from epic.torch import combining, replicas, steps, sums
from epic.torch.arguments import (
    ROW_TYPES,
    EpicFunction,
    as_flat,
    as_int32,
    check_floats,
    check_tensor,
    first_order_only,
    flatten_rows,
    make_apply,
    mark_no_offload,
)
from epic.torch.experts import (
    ExpertWeights,
    GroupedMm,
    activate,
    check_scales,
    check_weights,
    dtype_name,
    experts,
    mlp,
    round_weights,
    type_of_weights,
    weights_for_backward,
    with_types,
)
from epic.torch.groups import Group
from epic.torch.ops import (
    FIRST_FLAG,
    FORCED_WEIGHTS,
    LAYER,
    SMS_SHIFT,
    WITH_ROUTING,
    argument_names,
    mlp_numbers,
    operator_numbers,
    pack_fields,
    parts_of,
    translate_errors,
    write_out,
)
from epic.torch.plans import Plan, check_limit, limit_number, tables_of
from epic.torch.router import balance_loss, route
from epic.torch.routing import Given, Routing, as_forced
from epic.torch.scaled import E4M3

ops = torch.ops.epic

NO_EXPERTS = Experts(hidden=1, inner=1)  # used if the layer has no shared expert


class MoeWeights(NamedTuple):
    """Parameters of a layer on one rank: those of this rank's experts, and all shared parameters.

    width is 2 * inner: the columns of gate, then those of up; with options.interleaved they
    alternate. With options.ungated width is inner. E is the number of columns of the router,
    num_experts + zero_experts. A parameter that the layer does not have is None.

    Attributes:
        w_gate: Weight of the router [hidden, E], float32 (float64 with float64 rows).
        w_gate_up: First weight of the experts [local experts, hidden, width], in any dtype that
            rows may have.
        w_down: Second weight of the experts [local experts, inner, hidden], of the same dtype.
        b_gate: Bias of the logits [E], of w_gate's dtype.
        bias: Bias for the choice of experts only, [E] float32; it has no gradient.
        b_gate_up: Bias [local experts, width].
        b_down: Bias [local experts, hidden].
        shared_gate_up: First weight of the shared expert [1, hidden, width of options.shared].
        shared_down: Second weight of the shared expert [1, inner of options.shared, hidden].
        shared_b_gate_up: Bias of the shared expert [1, width of options.shared].
        shared_b_down: Bias of the shared expert [1, hidden].
        w_shared_gate: [hidden]: the shared expert's output is multiplied by sigmoid(x w).
        w_gate_up_scales: Scales of e4m3 weights, as `scaled` makes them.
        w_down_scales: Scales of e4m3 weights, as `scaled` makes them.
    """

    w_gate: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    b_gate: Tensor | None = None
    bias: Tensor | None = None
    b_gate_up: Tensor | None = None
    b_down: Tensor | None = None
    shared_gate_up: Tensor | None = None
    shared_down: Tensor | None = None
    shared_b_gate_up: Tensor | None = None
    shared_b_down: Tensor | None = None
    w_shared_gate: Tensor | None = None
    w_gate_up_scales: Tensor | None = None
    w_down_scales: Tensor | None = None


class MoeOut(NamedTuple):
    """Results of `moe`.

    Attributes:
        out: The tokens, shaped as x.
        loss: Scalar, float32 (float64 with float64 rows): this rank's part of balance loss +
            z-loss.
        load: [num_experts] int32: number of choices of each expert over the whole group, before
            any choice is dropped.
        demand: [1] int32: number of slots that all choices of this rank's experts would need.
        logical_load: With replicas [num_logical] int32: the load by logical expert. Else None.
        routing: With return_routing the `Routing` that the layer used. Its weights have no
            gradient. Else None.
    """

    out: Tensor
    loss: Tensor
    load: Tensor
    demand: Tensor
    logical_load: Tensor | None = None
    routing: Routing | None = None

    @property
    def load_of_ids(self) -> Tensor:
        """The load of the ids that the router chooses: logical_load with replicas, else load."""
        return self.load if self.logical_load is None else self.logical_load


# The weights in the order of the arguments of the operator moe.
ORDER = (
    "w_gate b_gate bias w_gate_up w_down b_gate_up b_down shared_gate_up shared_down "
    "shared_b_gate_up shared_b_down w_shared_gate w_gate_up_scales w_down_scales"
).split()
EXPERT_WEIGHTS = ("w_gate_up", "w_down", "b_gate_up", "b_down")
SHARED_WEIGHTS = ("shared_gate_up", "shared_down", "shared_b_gate_up", "shared_b_down")
SCALES = ("w_gate_up_scales", "w_down_scales")


class MoeFacts(NamedTuple):
    """The sizes and operator arguments of a layer on a group, for certain dtypes of its tensors."""

    saved_bytes: int
    forward_bytes: int
    backward_bytes: int
    plan_bytes: int  # size of the plan, which is the first part of the saved bytes
    replicas: int  # number of experts of a layer with replicas; else 0
    weight_type: str  # dtype of the weights in the products of the experts
    forward: tuple[Any, ...]  # the last arguments of the operator moe, all numbers
    backward: tuple[Any, ...]  # the last arguments of the operator moe_backward
    recorded: tuple[Any, ...]  # used instead of forward if moe returns the routing
    replayed: tuple[Any, ...]  # used instead of backward if the weights were forced
    max_sms: int = 0  # largest number of SMs of each operation; 0: the group's


def numbers_of(options: Moe, **types: int) -> tuple[Any, ...]:
    """Return the last arguments of the operator moe, for options with dtypes and a capacity.

    types: dtypes of the experts, as for mlp_numbers.
    """
    return operator_numbers("moe", values_of(options, **types))


def values_of(options: Moe, **types: int) -> dict[str, Any]:
    """Return the values of numbers_of by the names of the operator's arguments."""
    shared = options.shared.numbers() if options.shared else {**NO_EXPERTS.numbers(), "inner": 0}
    flags = _native.moe_flags(options)
    layer = pack_fields(LAYER, options.layer.numbers())
    return {
        "balance_coeff": float(options.balance_coeff),
        "z_coeff": float(options.z_coeff),
        "sequence_tokens": options.sequence_tokens,
        "capacity": options.capacity,
        "flags": flags,  # an argument of the operator plan.compared only
        **layer,
        "layer_leaves": layer["layer_leaves"] + flags * FIRST_FLAG,
        **options.router.numbers("router_"),
        **mlp_numbers("experts", options.experts.numbers(), **types),
        **mlp_numbers("shared", shared),
    }


def moe_with_types(given: Moe, local: int, row_type: str, weight_type: str, kept_type: str) -> Moe:
    """Fill in the number of local experts and the dtypes of the tensors in the options.

    kept_type: dtype of the weights in memory; weight_type: their dtype in the products.
    """
    shared_type = row_type if kept_type == "e4m3" else kept_type
    return replace(
        given,
        experts=with_types(given.experts, local, row_type, weight_type),
        shared=given.shared and with_types(given.shared, 1, row_type, shared_type),
    )


def compared_of(
    _: Group, options: str, local: int, row_type: str, weight_type: str, kept_type: str
) -> tuple[Any, ...]:
    """Return the options of a composed layer as arguments of the operator plan.compared.

    The ranks compare these options when they make the plan. The arguments are those of facts_of.
    Group.remember passes the group, which is not used here.
    """
    whole = moe_with_types(options_by_key[options], local, row_type, weight_type, kept_type)
    experts, shared = whole.experts.numbers(), whole.shared.numbers() if whole.shared else {}
    values = values_of(whole, row_type=experts["row_type"], weight_type=experts["weight_type"])
    if shared:
        types = {name: shared[name] for name in ("row_type", "weight_type")}
        values |= mlp_numbers("shared", shared, **types)
    names = argument_names("plan", "compared")
    return tuple(values[name] for name in names[names.index("balance_coeff") :])


def facts_of(
    group: Group,
    options: str,
    local: int,
    row_type: str,
    weight_type: str,
    kept_type: str,
    distinct: bool,
) -> tuple[Any, ...]:
    """Return the MoeFacts of a layer as a tuple.

    Args:
        group: The group.
        options: Key of an epic.Moe in options_by_key.
        local: Number of local experts.
        row_type: Dtype of the rows.
        weight_type: Dtype of the weights in the products.
        kept_type: Dtype of the weights in memory.
        distinct: Whether the ids of each token are known to be different. That is true for the
            choices of a router, but not for a table or forced ids of the caller.
    """
    given = options_by_key[options]
    if distinct:
        given = replace(given, layer=replace(given.layer, distinct=True))
    bound = group.capacity_bound(given.layer)
    whole = moe_with_types(given, local, row_type, weight_type, kept_type)
    whole = replace(whole, capacity=bound if given.capacity is None else given.capacity)
    sizes = _native.moe_memory(group.config(), whole, group.on_gpu)
    bytes_ = [int(sizes.saved_bytes), int(sizes.forward_bytes), int(sizes.backward_bytes)]
    replicas = given.layer.num_experts if given.layer.num_logical else 0
    bytes_ += [group.plan_bytes(given.layer), replicas]
    # On GPUs the operator returns gradients of experts in the dtype of the rows. But gradients of
    # replicas are summed first, so the operator returns them in float32.
    narrow = group.on_gpu and kept_type in (row_type, "e4m3") and not replicas
    types = whole.experts.numbers()
    back = {"grad_type": types["row_type"] if narrow else 0}
    if weight_type == "e4m3":  # backward may use the weights in the dtype in which they are stored
        back["weight_type"] = types["weight_type"]
    forward, backward = numbers_of(whole), numbers_of(whole, **back)
    more = (set_bit(forward, WITH_ROUTING), set_bit(backward, FORCED_WEIGHTS))
    return (*bytes_, weight_type, forward, backward, *more)


def set_bit(numbers: tuple[Any, ...], bit: int) -> tuple[Any, ...]:
    """Return a result of numbers_of in which a bit of the argument layer_leaves is set."""
    names = argument_names("moe")
    at = len(numbers) + names.index("layer_leaves") - len(names)
    return (*numbers[:at], numbers[at] | bit, *numbers[at + 1 :])


REQUIRED = ("w_gate", "w_gate_up", "w_down")  # weights that every layer has


def check_weight(name: str, w: Any, device: torch.device) -> None:
    """Raise an error if a weight is no tensor, has a wrong dtype, or is on another device."""
    check_tensor(name, w)
    if w.dtype != E4M3 or name not in REQUIRED[1:]:
        check_floats(name, w)
    if w.device != device:
        raise EpicArgumentError(
            f"{name} is on {w.device} and x is on {device}: must be on one device"
        )


def check_moe(options: Moe, x: Tensor, weights: MoeWeights) -> None:
    """Raise an error for arguments of moe that the operators cannot check.

    The operators check the shapes of the weights of experts.
    """
    check_kind("options", options, Moe)
    check_floats("x", x)
    hidden = options.experts.hidden
    if x.dim() < 2 or x.shape[-1] != hidden:
        raise EpicArgumentError(f"x has the shape {list(x.shape)}: must be [..., {hidden}]")
    if (options.shared is None) != (weights.shared_gate_up is None):
        raise EpicArgumentError(
            f"shared_gate_up is {'given' if options.shared is None else 'None'} and options.shared "
            f"is {'None' if options.shared is None else 'given'}: pass both or none"
        )
    required = REQUIRED if options.shared is None else (*REQUIRED, "shared_down")
    device = x.device
    for name, w in zip(MoeWeights._fields, weights, strict=True):
        if w is None and name not in required:
            continue
        # Without a call, a correct weight needs less host time.
        is_dense = isinstance(w, Tensor) and w.layout is torch.strided
        if not is_dense or w.dtype not in ROW_TYPES or w.device != device:
            check_weight(name, w, device)
    if weights.w_gate_up.dim() != 3:
        found = list(weights.w_gate_up.shape)
        raise EpicArgumentError(
            f"w_gate_up has the shape {found}: must be [experts, hidden, width]"
        )
    columns = options.router.num_experts + options.router.zero_experts
    shapes = {"w_gate": (hidden, columns), "b_gate": (columns,), "bias": (columns,)}
    for name, shape in {**shapes, "w_shared_gate": (hidden,)}.items():
        w = getattr(weights, name)
        if w is not None and w.shape != shape:
            raise EpicArgumentError(f"{name} has the shape {list(w.shape)}: must be {list(shape)}")


# ------------------------------------------------------------- the core's own layer ----


# Ids that replace the choices of the router: token_ids, table, and forced ids [num_tokens, top_k].
# If all are None, the router chooses.
Chosen = tuple[Tensor | None, Tensor | None, Tensor | None]
# rank_of_expert, logical_of_expert and capacity_limit
Tables = tuple[Tensor | None, Tensor | None, Tensor | None]


def forward_args(
    group: Group,
    tag: int,
    facts: MoeFacts,
    chosen: Chosen,
    tables: Tables,
    forced_weights: Tensor | None,
    x: Tensor,
    *weights: Tensor | None,
) -> tuple[Any, ...]:
    """Return the arguments of the operator moe.

    tables: rank_of_expert, logical_of_expert and capacity_limit. weights: the weights in ORDER.
    """
    number = limit_number(group.number, facts.max_sms)
    numbers = (facts.saved_bytes, facts.forward_bytes, number, tag, *facts.forward)
    if facts.weight_type == "e4m3":
        weights = with_experts(weights, round_weights(x, experts_in(weights)))
    given = (*chosen[:2], *tables[:2], chosen[2], forced_weights, tables[2])
    return (group.order_token, x, *weights, *given, *numbers)


# The tensors of experts are ORDER[FIRST:PAST], and their scales the last two.
FIRST, PAST = ORDER.index("w_gate_up"), ORDER.index("b_down") + 1


def experts_in(weights: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Return the tensors of experts among weights in ORDER, with their scales."""
    return (*weights[FIRST:PAST], *weights[-2:])


def with_experts(
    weights: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """Return weights in ORDER, with `given` in place of the tensors of experts and their scales."""
    return (*weights[:FIRST], *given[:-2], *weights[PAST:-2], *given[-2:])


class Layer(EpicFunction):
    """The operator epic::moe with its gradient."""

    @staticmethod
    def forward(
        group: Group,
        tag: int,
        facts: MoeFacts,
        _sum_order: int | None,
        chosen: Chosen,
        tables: Tables,
        forced_weights: Tensor | None,
        x: Tensor,
        *weights: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Call the operator.

        _sum_order: the order in which backward adds the gradients of shared parameters over the
        ranks: 0 by rank, 1 in a tree. None: backward does not add them.
        """
        args = forward_args(group, tag, facts, chosen, tables, forced_weights, x, *weights)
        return ops.moe.default(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], out: tuple[Tensor, ...]) -> None:
        """Save x, the weights, and the last result: the bytes that the core needs in backward."""
        ctx.group, ctx.tag, ctx.facts, ctx.sum_order, _, _, forced_weights, x, *weights = inputs
        if (bias := weights[ORDER.index("bias")]) is not None:
            mark_no_offload(bias)
        if forced_weights is not None:
            ctx.facts = ctx.facts._replace(backward=ctx.facts.replayed)
        ctx.has_forced_weights = forced_weights is not None
        ctx.save_for_backward(x, *weights, out[-1])
        ctx.mark_non_differentiable(*out[2:])

    @staticmethod
    @first_order_only
    @translate_errors
    def backward(ctx: Any, d_out: Tensor, d_loss: Tensor, *_: Any) -> tuple[Any, ...]:
        """Return the gradients; those of weights have the dtypes of the weights."""
        x, *weights, saved = ctx.saved_tensors
        group, facts = ctx.group, ctx.facts
        number = limit_number(group.number, facts.max_sms)
        numbers = (facts.backward_bytes, number, ctx.tag, *facts.backward)
        own = weights_for_backward(x, facts.weight_type, experts_in(tuple(weights)))
        given = with_experts(tuple(weights), own)
        inputs = (x, *given, saved, d_out.contiguous(), d_loss.contiguous())
        results = ops.moe_backward.default(group.order_token_backward, *inputs, *numbers)
        d_x, *rest, d_forced = results
        if facts.replicas:
            rest = sum_over_replicas(ctx, saved, rest)
        if ctx.sum_order is not None:
            rest = sum_over_ranks(ctx, rest)
        # The operator returns no gradient for the bias, so put None in its place.
        pairs = zip(weights[:-2], (*rest[:2], None, *rest[2:]), strict=True)
        none = [w is None or d is None or w.dtype == E4M3 for w, d in pairs]
        pairs = zip(weights[:-2], (*rest[:2], None, *rest[2:]), strict=True)
        found = [None if no else d.to(w.dtype) for no, (w, d) in zip(none, pairs, strict=True)]
        d_forced = d_forced if ctx.has_forced_weights else None
        return *[None] * 6, d_forced, d_x, *found, None, None


layer_apply = make_apply(Layer)


def sum_over_replicas(ctx: Any, saved: Tensor, gradients: list[Tensor]) -> list[Tensor]:
    """Add the gradients of experts over the replicas of each logical expert. Collective.

    Args:
        ctx: The ctx of Layer.
        saved: The bytes that the core saved; they begin with the plan.
        gradients: The gradients of all weights except bias. That of an absent weight has the shape
            [0].

    Returns:
        The gradients; only those of experts are changed.
    """
    group, plan = ctx.group, saved[: ctx.facts.plan_bytes]
    first, end = 2, 2 + len(EXPERT_WEIGHTS)
    whole = partial(
        replicas.add_replicas, group.order_token_backward, plan, group=group, tag=ctx.tag
    )
    mine = [whole(d) if d.dim() > 1 else d for d in gradients[first:end]]
    return [*gradients[:first], *mine, *gradients[end:]]


def sum_over_ranks(ctx: Any, gradients: list[Tensor]) -> list[Tensor]:
    """Add the gradients of shared parameters over the ranks. Collective.

    Call it before the gradients are rounded to the dtype of the weights.

    Args:
        ctx: The ctx of Layer.
        gradients: The gradients of all weights except bias.

    Returns:
        The gradients; those of experts are unchanged.
    """
    first, end = 2, 2 + len(EXPERT_WEIGHTS)
    shared = [*gradients[:first], *gradients[end:]]
    whole = sums.sum_gradients_now(ctx.group, ctx.sum_order, ctx.tag, shared)
    return [*whole[:first], *gradients[first:end], *whole[first:]]


# ------------------------------------------------------------------------- composed ----


def with_summed_gradients(weights: MoeWeights, group: Group, order: int, tag: int) -> MoeWeights:
    """Return weights for which backward adds the gradients of shared parameters over the ranks."""
    change = {
        name: sums.sum_gradient_apply(group, order, tag, w)
        for name, w in weights._asdict().items()
        if w is not None and name not in (*EXPERT_WEIGHTS, *SCALES, "bias")
    }
    return weights._replace(**change)


def logits_of(x: Tensor, weights: MoeWeights) -> Tensor:
    """Compute the router's logits [num_tokens, E] in float32 (float64 for float64 rows).

    autocast does not change this dtype.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    with torch.autocast(x.device.type, enabled=False):
        logits = x.to(wide) @ weights.w_gate.to(wide)
        return logits if weights.b_gate is None else logits + weights.b_gate.to(wide)


def run_experts(
    options: Any,
    grouped_mm: GroupedMm | None,
    x: Tensor,
    plan: Plan,
    weights: ExpertWeights,
    slots: Tensor | None,
) -> Tensor:
    """Run the experts on the rows of a plan.

    Args:
        options: An epic.Experts.
        grouped_mm: A grouped product of the caller. None: EPIC's product.
        x: Rows [slots, hidden].
        plan: The plan.
        weights: The weights of the experts.
        slots: slot_weights, as for `experts`.
    """
    if grouped_mm is not None:
        check_weights(options, weights)
        with torch.autocast(x.device.type, enabled=False):
            return mlp(options, grouped_mm, x, plan.counted("expert_rows"), weights, slots)
    counts = (plan.counted("expert_rows"), plan.counted("expert_tokens"))
    limit = plan.spec.layer >> SMS_SHIFT
    return experts(options, x, *counts, weights, slots, plan.spec.group, max_sms=limit)


def run_shared_expert(options: Moe, x: Tensor, weights: MoeWeights) -> Tensor:
    """Run the shared expert on x [num_tokens, hidden], and multiply the result by its gate."""
    assert options.shared is not None and weights.shared_gate_up is not None
    assert weights.shared_down is not None
    own = ExpertWeights(*(getattr(weights, name) for name in SHARED_WEIGHTS))
    check_weights(options.shared, own, SHARED_WEIGHTS, local=1)
    z = x @ weights.shared_gate_up[0].to(x.dtype)
    if weights.shared_b_gate_up is not None:
        z = z + weights.shared_b_gate_up[0].to(z.dtype)
    y = activate(options.shared, z).to(x.dtype) @ weights.shared_down[0].to(x.dtype)
    if weights.shared_b_down is not None:
        y = y + weights.shared_b_down[0].to(y.dtype)
    if weights.w_shared_gate is not None:
        gate = x.to(weights.w_shared_gate.dtype) @ weights.w_shared_gate
        y = y * torch.sigmoid(gate)[:, None].to(y.dtype)
    return y


def probabilities(router: Router, logits: Tensor) -> Tensor:
    """Return P of the balance loss: the scores of all E columns, divided by their sum."""
    if router.score in ("softmax", "logits"):
        return logits.softmax(-1)
    scores = torch.sigmoid(logits)
    if router.score == "sqrtsoftplus":
        scores = torch.sqrt(torch.nn.functional.softplus(logits))
    return scores / scores.sum(-1, keepdim=True)


def compute_losses(
    group: Group,
    options: Moe,
    logits: Tensor,
    load: Tensor,
    chosen: Tensor,
    mask: Any,
    tag: int,
) -> Tensor:
    """Return this rank's part of balance loss and z-loss in a composed layer. Collective.

    Args:
        group: The group.
        options: The options.
        logits: [num_tokens, E].
        load: Choices of each expert over the group, by the ids of the router.
        chosen: Ids [num_tokens, top_k].
        mask: bool [num_tokens]: only tokens with True count. None: all count.
        tag: Tag of the sum over the ranks.
    """
    loss = logits.new_zeros(())
    if not options.balance_coeff and not options.z_coeff:
        return loss
    router = options.router
    live = logits.new_ones(logits.shape[0]) if mask is None else mask.to(logits.dtype)
    total = sums.sum(group, live.sum().reshape(1).float(), tag=tag)[0].to(logits.dtype)
    total = total.clamp(min=1)
    if options.balance_coeff and options.sequence_tokens:
        even = max(logits.shape[0], 1) * group.num_ranks  # the host does not wait for this number
        of_sequences = balance_loss(
            router,
            logits,
            coeff=options.balance_coeff,
            total_tokens=even,
            topk_idx=chosen,
            sequence_tokens=options.sequence_tokens,
            group=group,
        )
        loss = loss + of_sequences * (even / total)
    elif options.balance_coeff:
        p = probabilities(router, logits)[:, : router.num_experts] * live[:, None]
        factor = router.num_experts * options.balance_coeff / (router.top_k * total * total)
        loss = loss + factor * (p * load).sum()
    if options.z_coeff:
        z = logits.logsumexp(-1).square() * live
        loss = loss + options.z_coeff / total * z.sum()
    return loss


def choose(
    group: Group,
    options: Moe,
    logits: Tensor,
    bias: Tensor | None,
    given: Chosen,
    forced_weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return ids and weights [num_tokens, top_k]: those of the router, or those of the caller.

    A forced id that is too large is returned unchanged, so that the plan reports it on every rank.

    Args:
        group: The group.
        options: The options.
        logits: [num_tokens, E].
        bias: The bias for the choice, or None.
        given: Ids that replace the choices of the router.
        forced_weights: Weights of the forced ids. None: the router computes them.
    """
    token_ids, table, forced = given
    if forced is not None and forced_weights is not None:
        return forced, forced_weights
    valid_ids = None if forced is None else torch.where(forced < logits.shape[1], forced, -1)
    chosen, w = route(
        options.router,
        logits,
        bias=bias,
        token_ids=token_ids,
        table=table,
        forced=valid_ids,
        group=group,
    )
    return (chosen if forced is None else forced), w


def run_composed(
    group: Group,
    options: Moe,
    grouped_mm: GroupedMm | None,
    x: Tensor,
    weights: MoeWeights,
    given: Chosen,
    tables: Tables,
    forced_weights: Tensor | None,
    mask: Tensor | None,
    tag: int,
    max_sms: int = 0,
) -> MoeOut:
    """Run a composed layer: call its functions one after the other. Collective.

    The arguments are those of `moe`, after their checks. given: ids that replace the choices of the
    router. tables: rank_of_expert, logical_of_expert and capacity_limit.
    """
    # Padding may contain any values, also NaN.
    x = x if mask is None else torch.where(mask[:, None], x, 0)
    logits = logits_of(x, weights)
    chosen, w = choose(group, options, logits, weights.bias, given, forced_weights)
    if mask is not None:
        chosen = torch.where(mask[:, None], chosen, -1)
    # Rows of identity experts are not sent, so their ids become -1 here. Ids that are too large
    # stay unchanged, so that the plan reports them.
    zero = (chosen >= options.layer.num_ids) & (chosen < logits.shape[1])
    sent = torch.where(zero, -1, chosen) if options.router.zero_experts else chosen
    local = weights.w_gate_up.shape[0]
    late = options.experts.weighting == "late"
    more: dict[str, Any] = {"capacity": options.capacity, "tag": tag, "max_sms": max_sms or None}
    more |= {"rank_of_expert": tables[0], "logical_of_expert": tables[1]}
    more["capacity_limit"] = tables[2]
    more["num_local_experts"] = local if tables[0] is not None else None
    up = weights.w_gate_up
    kinds = (dtype_name(x), type_of_weights(options.experts, up), dtype_name(up))
    more["compared"] = group.remember(compared_of, options.key, local, *kinds)
    if options.quantize is None:
        plan, recv, slots = steps.plan_dispatch(group, options.layer, sent, x, w, **more)
    else:
        plan = steps.plan(group, options.layer, sent, **more)
        recv, slots = steps.dispatch(plan, x, w, quantize=options.quantize)
    own = ExpertWeights(
        *(replicas.sum_replica_grads(plan, getattr(weights, name)) for name in EXPERT_WEIGHTS),
        *(getattr(weights, name) for name in SCALES),
    )
    y = run_experts(options.experts, grouped_mm, recv, plan, own, None if late else slots)
    out = combining.combine(plan, y, slots if late else None)
    if options.router.zero_experts:
        zero_weight = torch.where(zero, w, 0).sum(dim=1, keepdim=True)
        out = (out + x * zero_weight).to(x.dtype)
    if options.shared is not None:
        with torch.autocast(x.device.type, enabled=False):
            out = out + run_shared_expert(options, x, weights)
        if mask is not None:  # with biases the shared expert does not return zeros for zeros
            out = torch.where(mask[:, None], out, 0)
    load, logical = plan.counted("load"), None
    if options.layer.num_logical:
        logical = plan.counted("logical_load")
    of_ids = load if logical is None else logical
    loss = compute_losses(group, options, logits, of_ids, chosen, mask, tag)
    routing = Routing(chosen, w.detach())
    return MoeOut(out, loss, load, plan.counted("demand"), logical, routing)


# ------------------------------------------------------------------------ the layer ----


def as_mask(options: Moe, token_mask: Tensor, x: Tensor) -> Tensor:
    """Return the token mask as [num_tokens], after checking it."""
    if options.sequence_tokens:
        raise EpicUnsupportedError(
            "token_mask is given with sequence_tokens: not supported, because the loss of a "
            "sequence counts all its tokens; leave one of them out"
        )
    check_tensor("token_mask", token_mask)
    if token_mask.dtype != torch.bool or token_mask.shape != x.shape[:-1]:
        raise EpicArgumentError(
            f"token_mask is {token_mask.dtype} of shape {list(token_mask.shape)}: must be "
            f"torch.bool of shape {list(x.shape[:-1])}, with one value for each token of x"
        )
    if token_mask.device != x.device:
        raise EpicArgumentError(
            f"token_mask is on {token_mask.device} and x is on {x.device}: must be on one device"
        )
    return token_mask.reshape(-1)


def with_wide_router(x: Tensor, weights: MoeWeights) -> MoeWeights:
    """Return weights whose tensors of the router are float32, or float64 for float64 rows.

    model.to(dtype) or mixed precision may have given them another dtype.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    change = {}
    for name in ("w_gate", "b_gate", "w_shared_gate"):
        w = getattr(weights, name)
        if w is not None and w.dtype != wide:
            change[name] = w.to(wide)
    if weights.bias is not None and weights.bias.dtype != torch.float32:
        change["bias"] = weights.bias.float()
    return weights._replace(**change) if change else weights


@translate_errors
def moe(
    group: Group,
    options: Moe,
    x: Tensor,
    weights: MoeWeights,
    *,
    grouped_mm: GroupedMm | None = None,
    token_ids: Tensor | None = None,
    table: Tensor | None = None,
    rank_of_expert: Any = None,
    logical_of_expert: Any = None,
    capacity_limit: Tensor | None = None,
    token_mask: Tensor | None = None,
    forced: Given | None = None,
    return_routing: bool = False,
    sum_gradients: bool = False,
    tag: int = 0,
    max_sms: int = 0,
    out: MoeOut | None = None,
) -> MoeOut:
    """Run a whole Mixture-of-Experts layer on x [..., hidden].

    Collective: every rank of the group calls it, in the same order. `MoE` is the module form.

    Args:
        group: The open group.
        options: Router, experts and losses of the layer.
        x: Tokens [..., hidden] in float32, bfloat16, float16 or float64.
        weights: Parameters of this rank.
        grouped_mm: A grouped product of your own:
            grouped_mm(x [slots, n], w [local experts, n, m], ends [local experts] int32) ->
            [slots, m]. The layer is then composed of the single functions, and calls grouped_mm
            with autocast switched off.
        token_ids: Integers [...], with table: the id of each token, for routing by a table.
        table: Integers [rows, top_k]: experts by token id, which replace the router's choice.
        rank_of_expert: Integers [num_experts]: the rank that owns each expert. None: contiguous
            blocks. Needs options.capacity.
        logical_of_expert: With options.layer.num_logical, integers [num_experts] or a `Placement`:
            the logical expert that each expert is a replica of.
        capacity_limit: A 0-d int32 tensor on the device of x. The rank then has min(capacity,
            capacity_limit) slots, at least one. Forward reads it on the device, so each replay of a
            CUDA graph uses its value at that time.
        token_mask: bool [...]. A token whose element is False (padding) has no expert, a result of
            zeros and no part in the losses. None: all tokens count.
        forced: A `Routing`, (ids, weights) or ids alone: the experts of each token, which replace
            the router's choice, for example as another run recorded them. ids are integers [...,
            top_k], negative for no expert. If weights is None, the router computes the weights from
            its scores, and gets its usual gradients. Otherwise the layer uses weights [..., top_k]
            unchanged. They get a gradient, and the router gets only that of the losses. The losses
            use the router's scores and the load of the forced ids. All ranks pass it, or none.
        return_routing: Whether the result has a `Routing`: the ids and weights that the layer used.
        sum_gradients: Whether backward adds the gradients of the shared parameters over the ranks,
            in the layer's sum_order, before it rounds them to the dtype of the weights. If False
            each rank gets only its own part of these gradients.
        tag: Calls with equal tags run in the same order on every rank.
        max_sms: On GPUs the largest number of SMs of each operation of the layer, forward and
            backward; 0: the group's.
        out: A MoeOut into whose tensors the function writes. It returns them, without a gradient.
            If an entry is None, the caller does not receive this result.

    Returns:
        A MoeOut with out shaped as x, loss, load, demand, logical_load and routing.

    Raises:
        EpicArgumentError: A shape, dtype or device is wrong, or options do not fit together.
        EpicUnsupportedError: The arguments are correct, but not supported together. The text names
            an alternative.
        EpicError: A rank failed, was late, or made a different call.

    Example:
        >>> import torch, epic.torch
        >>> options = epic.torch.Moe.of(num_experts=4, top_k=2, hidden=8, inner=16)
        >>> weights = epic.torch.MoeWeights(
        ...     w_gate=torch.randn(8, 4),
        ...     w_gate_up=torch.randn(4, 8, 32),
        ...     w_down=torch.randn(4, 16, 8),
        ... )
        >>> with epic.torch.Group(num_ranks=1, max_tokens=16, max_row_bytes=32) as group:
        ...     result = epic.torch.moe(group, options, torch.randn(16, 8), weights)
        >>> result.out.shape, int(result.load.sum())
        (torch.Size([16, 8]), 32)
    """
    weights = MoeWeights(*weights)
    check_moe(options, x, weights)
    rows = flatten_rows("x", x).contiguous()
    if capacity_limit is not None:
        check_limit(capacity_limit, "x", x)
    placed = tables_of(options.layer, rank_of_expert, logical_of_expert, rows)
    tables = (*placed, capacity_limit)
    if token_ids is not None:
        token_ids = as_flat("token_ids", token_ids, x.shape[:-1])
    if table is not None:
        table = as_int32("table", table)
    if forced is not None and (token_ids is not None or table is not None):
        raise EpicArgumentError(
            f"forced is given and {'token_ids' if token_ids is not None else 'table'} is given: "
            "pass one of them"
        )
    forced_ids, forced_weights = (None, None) if forced is None else as_forced(options, forced, x)
    chosen = (token_ids, table, forced_ids)
    mask = None if token_mask is None else as_mask(options, token_mask, x)
    if grouped_mm is not None and not callable(grouped_mm):
        kind = type(grouped_mm).__name__
        raise EpicArgumentError(f"grouped_mm is a {kind}: must be a function, or None")
    if grouped_mm is not None and type_of_weights(options.experts, weights.w_gate_up) == "e4m3":
        raise EpicUnsupportedError(
            "grouped_mm with weights of e4m3 is not supported: leave grouped_mm out, or pass "
            "weights of another type"
        )
    if options.invariant:
        check_invariant_call("grouped_mm", grouped_mm, mask)
    order = int(options.layer.sum_order == "tree") if sum_gradients else None
    if grouped_mm is not None or mask is not None or options.quantize is not None:
        if out is not None:
            raise EpicUnsupportedError(
                "out= with grouped_mm, token_mask or quantize is not supported: call "
                "plan_dispatch, experts and combine, which have out="
            )
        if order is not None:
            weights = with_summed_gradients(weights, group, order, tag)
        given = (chosen, tables, forced_weights, mask, tag, max_sms)
        found = run_composed(group, options, grouped_mm, rows, weights, *given)
        assert found.routing is not None
        routing = as_routing(found.routing, x) if return_routing else None
        return found._replace(out=reshape_owned(found.out, x.shape), routing=routing)
    up = weights.w_gate_up
    check_scales(up.dtype, weights)
    weights = with_wide_router(rows, weights)
    local, kind = up.shape[0], type_of_weights(options.experts, up)
    kinds = (dtype_name(rows), kind, dtype_name(up))
    distinct = table is None and forced is None
    values = group.remember(facts_of, options.key, local, *kinds, distinct)
    facts = MoeFacts(*values)._replace(max_sms=max_sms)
    if return_routing or getattr(out, "routing", None) is not None:
        facts = facts._replace(forward=facts.recorded)
    arrays = [getattr(weights, name) for name in ORDER]
    arrays = [None if w is None else w.contiguous() for w in arrays]
    inputs = (chosen, tables, forced_weights, rows, *arrays)
    if out is not None:
        return moe_into(forward_args(group, tag, facts, *inputs), x, facts, out)
    y, loss, load, demand, logical, *used, _ = layer_apply(group, tag, facts, order, *inputs)
    logical = logical if facts.replicas else None
    routing = as_routing(Routing(*used), x) if return_routing else None
    sums = (reshape_owned(y, x.shape), reshape_owned(loss, ()))
    return MoeOut(*sums, load, demand, logical, routing)


def as_routing(found: Routing, x: Tensor) -> Routing:
    """Return a routing [num_tokens, top_k] as [..., top_k], with the leading dimensions of x."""
    ids, weights = found
    shape = (*x.shape[:-1], ids.shape[1])
    assert weights is not None
    return Routing(reshape_owned(ids, shape), reshape_owned(weights, shape))


def reshape_owned(x: Tensor, shape: Any) -> Tensor:
    """Return x in another shape. For autograd the result is not a view.

    If a module returned a view and a caller wrote into it in place, autograd would drop the hooks
    of fully_shard, and gradients would be wrong. Pass only a tensor to which no other code has a
    reference.
    """
    return x if x.shape == shape else torch.ops.aten._unsafe_view.default(x, shape)


def moe_into(args: tuple[Any, ...], x: Tensor, facts: MoeFacts, out: MoeOut) -> MoeOut:
    """Run moe with out=, which saves nothing for backward."""
    given = MoeOut(*parts_of(out, ", ".join(MoeOut._fields)))
    for name, part in zip(MoeOut._fields[:5], given, strict=False):
        if part is not None:
            check_tensor(f"out.{name}", part)
    if given.out is not None and given.out.shape != x.shape:
        raise EpicArgumentError(
            f"out.out has the shape {list(given.out.shape)}: must be {list(x.shape)}, as x"
        )
    if given.loss is not None and given.loss.shape != ():
        raise EpicArgumentError(f"out.loss has the shape {list(given.loss.shape)}: must be []")
    if given.logical_load is not None and not facts.replicas:
        raise EpicArgumentError("out.logical_load is given: must be None without replicas")
    rows = None if given.out is None else given.out.view(args[1].shape)
    loss = None if given.loss is None else given.loss.view(1)
    routing = (None, None) if given.routing is None else given.routing
    used = [None if part is None else part.view(-1, part.shape[-1]) for part in routing]
    write_out(ops.moe_out.default, args, rows, loss, *given[2:5], *used, None)
    return given
