# SPDX-License-Identifier: Apache-2.0
"""Tests gradients, activation checkpointing and autocast, and runs torch's own operator checks."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import epic.torch
from epic.torch.arguments import NO_OFFLOAD
from epic.torch.groups import LayerFacts
from epic.torch.ops import KEPT_LAYERS, KIND, LIBRARY, boxed_call, pack_layer
from epic.torch.ops import LAYER as LAYER_WORDS
from epic.torch.ops import SIZES as SIZES_OF_EXPERTS
from parts import (
    EXPERTS,
    HIDDEN,
    LAYER,
    SIZES,
    TOP_K,
    UNEVEN,
    Data,
    check_round,
    group_of,
    numbers,
    same,
    through,
)

ops = torch.ops.epic


def gradients(rank: int) -> None:
    """Run torch's gradcheck in float64 on all ranks at the same time: each rank perturbs its own
    tokens, as often as the other ranks."""
    with group_of(4) as group:
        data = Data(dtype=torch.float64)
        x, w, ids, _ = data.mine(rank)
        x = x.detach()[:, :3].clone().requires_grad_()

        def step(x: torch.Tensor) -> torch.Tensor:
            plan, recv, slot = epic.torch.plan_dispatch(group, LAYER, ids, x, w.detach())
            return epic.torch.combine(plan, torch.sin(recv) * 2, slot)

        with group_of(1) as alone:
            plan = epic.torch.plan(alone, LAYER, ids)
            rows = numbers(5, plan.capacity, 3, dtype=torch.float64).requires_grad_()
            slot = numbers(6, plan.capacity)
            assert torch.autograd.gradcheck(lambda v: epic.torch.combine(plan, v, slot), rows)
            assert torch.autograd.gradcheck(lambda v: epic.torch.dispatch(plan, v)[0], x)
            again = through(alone, True)
            assert torch.autograd.gradcheck(lambda v: again(v, w.detach(), ids), x)
        out = step(x)
        assert out.dtype == torch.float64


def test_gradcheck(world: Any) -> None:
    """Check gradients in groups of one rank, because gradcheck perturbs one rank at a time."""
    world.run(gradients)


def opcheck(rank: int) -> None:
    """Check schema, fake function and tracing of each operator, with matching tensors."""
    with group_of(4) as group:
        spec = LayerFacts(*group.facts(LAYER.key))
        x, w, ids, ct = (v.detach() for v in Data(UNEVEN).mine(rank))
        place = (spec.number, 0)
        layout = (spec.number, spec.capacity, 0, None, None)
        plan = epic.torch.plan(group, LAYER, ids)
        data, order_token = plan.bytes, group.order_token
        recv, slot = epic.torch.dispatch(plan, x, w)
        flat = epic.torch.plan(group, epic.torch.Layer(EXPERTS, TOP_K, layout="flat"), ids)
        count, octets = x.shape[0], x.view(torch.uint8)
        calls: list[tuple[Any, tuple[Any, ...]]] = [
            (ops.plan, (order_token, ids, *layout, None)),
            (ops.dispatch, (order_token, data, x, w, spec.capacity, *place, 1)),
            (ops.dispatch, (order_token, data, x, None, spec.capacity, *place, 1)),
            (ops.plan_dispatch, (order_token, ids, x, w, *layout, 1, None)),
            (ops.dispatch_quantized, (order_token, data, x, w, spec.capacity, 1, *place, 1)),
            (ops.dispatch_bytes, (order_token, data, octets, octets, w, spec.capacity, *place, 1)),
            (ops.dispatch_bytes, (order_token, data, octets, None, None, spec.capacity, *place, 1)),
            (
                ops.dispatch_flat,
                (order_token, flat.bytes, x, w, spec.capacity, TOP_K, flat.spec.layer, 0, 1),
            ),
            (ops.dispatch_backward, (order_token, data, recv, slot, count, TOP_K, *place)),
            (ops.combine, (order_token, data, recv, slot, count, *place)),
            (ops.combine_backward, (order_token, data, ct, recv, slot, spec.capacity, *place, 1)),
            (
                ops.combine_backward_quantized,
                (order_token, data, ct, recv, slot, spec.capacity, 2, *place, 1),
            ),
            (ops.sum_, (order_token, torch.ones(5), 0, group.number, 0)),
            (
                ops.sum_replicas_,
                (order_token, data, torch.ones(spec.num_local_experts, 5), group.number, 0),
            ),
        ]
        whole = ("test_schema", "test_autograd_registration", "test_faketensor")
        for op, args in (
            (ops.plan, (order_token, ids)),
            (ops.plan_dispatch, (order_token, ids, x, w)),
        ):
            torch.library.opcheck(op.default, (*args, spec.number), test_utils=whole)
        for op, args in calls:
            # Two plans of equal inputs differ, because each contains a number of its own.
            again = op not in (ops.plan, ops.plan_dispatch)
            more = ("test_aot_dispatch_dynamic",) if again else ()
            torch.library.opcheck(op.default, args, test_utils=(*whole, *more))
            if not op.__name__.endswith("_"):
                into, given = into_of(op, args)
                again = op in (ops.dispatch, ops.combine)
                torch.library.opcheck(into, given, test_utils=(*whole, *(more if again else ())))


def into_of(op: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return the call that writes into tensors; opcheck cannot compare e4m3 tensors."""
    found = op.default(*args)
    outs = found if isinstance(found, tuple) else (found,)
    none = [not x.numel() or x.dtype == torch.float8_e4m3fn for x in outs]
    given = (None if gone else torch.empty_like(x) for x, gone in zip(outs, none, strict=True))
    return getattr(ops, f"{op.__name__}_out").default, (*args, *given)


def test_opcheck(world: Any) -> None:
    """Check the operators on every rank."""
    world.run(opcheck)


def schemas() -> set[str]:
    """Return the names of all registered operators."""
    return {
        s.name.removeprefix("epic::")
        for s in torch._C._jit_get_all_schemas()
        if s.name.startswith("epic::")
    }


def test_every_operator_is_checked_somewhere() -> None:
    """Check that no registered operator is missing in these tests."""
    steps = {
        "plan", "dispatch", "plan_dispatch", "dispatch_quantized", "dispatch_bytes",
        "dispatch_flat", "dispatch_backward", "combine", "combine_backward",
        "combine_backward_quantized", "sum_", "sum_replicas_",
    }  # fmt: skip
    local = {
        "route", "route_backward", "balance_loss", "balance_loss_backward", "z_loss",
        "z_loss_backward", "bias_update_", "experts", "experts_backward", "moe", "moe_backward",
        "count_load_",
    }  # fmt: skip
    outs = {f"{name}_out" for name in steps | local if name[-1] != "_"}
    assert schemas() == steps | local | outs


def test_schemas_follow_the_options() -> None:
    """Check that the option arguments of operators are the fields of the dataclasses, either one by
    one in their order, or packed into numbers."""

    def names(op: Any, prefix: str) -> list[str]:
        found = [argument.name for argument in op.default._schema.arguments]
        return [n.removeprefix(prefix) for n in found if n.startswith(prefix)]

    router = epic.torch.Router(8, 2).numbers()
    assert names(ops.route, "router_") == names(ops.moe, "router_") == list(router)
    experts = set(epic.torch.Experts(1, 4, 4).numbers())
    apart = {"limit", "alpha"}
    assert set(names(ops.experts, "experts_")) == {"sizes", "kind"} | apart
    assert names(ops.moe, "experts_") == names(ops.experts, "experts_")
    assert set(SIZES_OF_EXPERTS) | set(KIND) | apart == experts | {"grad_type"}
    weights = {"gate_up", "down", "b_gate_up", "b_down"}
    assert set(names(ops.moe, "shared_")) - weights == {"kind"} | apart
    assert [f"layer_{name}" for name in names(ops.moe, "layer_")] == list(LAYER_WORDS)
    assert {name for word in LAYER_WORDS.values() for name in word} == set(LAYER.numbers())


def test_a_layer_as_three_numbers() -> None:
    """Check that each field of a layer reaches the core: the core rejects a wrong value."""
    good = LAYER.numbers()
    wrong = {
        "num_experts": 70000, "num_logical": 9, "top_k": 65, "overflow": 3, "priority": 3,
        "sum_order": 3, "layout": 3, "partial_type": 7, "flags": 128, "leaves": 3,
        "expert_capacity": 1 << 31, "alignment": 0xFFFFFFFF,
    }  # fmt: skip
    assert set(wrong) == set(good)
    ids = torch.zeros((4, TOP_K), dtype=torch.int32)
    with epic.torch.Group(**{**SIZES, "num_ranks": 1}) as group:
        for name, value in wrong.items():
            layer = {**good, name: value}
            sizes = (99, group.plan_bytes(LAYER))
            number = LIBRARY.epic_torch_layer_add(group.number, *pack_layer(layer), *sizes, 0)
            with pytest.raises(RuntimeError) as caught:
                ops.plan.default(group.order_token, ids, number)
            assert f"{name} is {value}" in str(caught.value) or name == "top_k", caught.value
            assert str(value) in str(caught.value)
    with pytest.raises(epic.torch.EpicArgumentError, match="top_k is 256"):
        pack_layer({**good, "top_k": 256})


def test_a_plan_has_what_its_layer_needs() -> None:
    """Check that default arguments and the same values written out give the same plan."""
    ids, x = torch.zeros((4, 2), dtype=torch.int32), torch.ones((4, 8))
    with epic.torch.Group(**{**SIZES, "num_ranks": 1}) as group:
        for options in ({}, {"alignment": 4}, {"sum_order": "tree", "leaves": 2}):
            layer = epic.torch.Layer(EXPERTS, 2, **options)
            facts = LayerFacts(*group.facts(layer.key))
            inputs = (group.order_token, ids, x, None, facts.number)
            short = ops.plan_dispatch.default(*inputs)
            whole = ops.plan_dispatch.default(*inputs, facts.capacity, 0, None, None, 1)
            assert torch.equal(short[1], whole[1]) and short[0].shape == whole[0].shape
            counts = slice(facts.plan_bytes, None)
            assert torch.equal(short[0][counts], whole[0][counts])
            spec = epic.torch.plan(group, layer, ids, tag=7).spec
            assert spec is epic.torch.plan(group, layer, ids, tag=7).spec
            assert spec.layer == facts.number


class Names(TorchDispatchMode):
    """Record the names of EPIC operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "epic":
            self.found.append(func._opname)
        return func(*args, **(kwargs or {}))


def test_bare_operators_are_the_operators() -> None:
    """Check that operators called without torch's Python wrapper are visible to modes as before,
    and that operators without such a wrapper do not change."""
    operator = ops.dispatch.default
    assert boxed_call(operator) is not operator, (
        "torch has no _dispatch_call_boxed any more: see BOXED"
    )
    assert boxed_call(print) is print
    ids, x = torch.zeros((4, 2), dtype=torch.int32), torch.ones((4, 8))
    with epic.torch.Group(**{**SIZES, "num_ranks": 1}) as group, Names() as names:
        layer = epic.torch.Layer(EXPERTS, 2)
        plan = epic.torch.plan(group, layer, ids)
        epic.torch.combine(plan, epic.torch.dispatch(plan, x)[0])
        epic.torch.plan_dispatch(group, layer, ids, x)
    assert names.found == ["plan", "dispatch", "combine", "plan_dispatch"]


class Twice(torch.autograd.Function):
    """A function that returns 2 x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Multiply x by a factor."""
        ctx.factor = 2
        return ctx.factor * x

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> torch.Tensor:
        """Multiply the gradient by the same factor."""
        return ctx.factor * d_y


def test_the_short_way_into_autograd() -> None:
    """Check that the base class's apply, which make_apply calls, does what Function.apply does.

    This saves time in torch 2.9. Later versions have no wrapper around it, so make_apply can call
    Function.apply when 2.9 is no longer supported.
    """
    short = super(torch.autograd.Function, Twice).apply
    for apply in (short, Twice.apply):
        x = torch.ones(3, requires_grad=True)
        y = apply(x)
        y.sum().backward()
        assert torch.equal(y, torch.full((3,), 2.0)) and torch.equal(x.grad, y)
    is_python = inspect.ismethod(torch.autograd.Function.apply)
    assert is_python == (torch.__version__ < "2.10"), "see make_apply: is its trick of use?"


class Overrides(TorchFunctionMode):
    """Record the names of EPIC operators that __torch_function__ sees."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") == "epic":
            self.found.append(func._opname)
        return func(*args, **(kwargs or {}))


class Named(torch.Tensor):
    """A tensor of a class that a caller defined."""


def test_torch_functions_see_the_operators() -> None:
    """Check that __torch_function__ sees all operators: calls avoid the boxed entry, which does not
    call it."""
    ids, x = torch.zeros((4, 2), dtype=torch.int32), torch.ones((4, 8))
    with epic.torch.Group(**{**SIZES, "num_ranks": 1}) as group:
        layer = epic.torch.Layer(EXPERTS, 2)
        with Overrides() as seen:
            plan = epic.torch.plan(group, layer, ids)
            epic.torch.combine(plan, epic.torch.dispatch(plan, x)[0])
            epic.torch.plan_dispatch(group, layer, ids, x)
        assert seen.found == ["plan", "dispatch", "combine", "plan_dispatch"]
        named = x.as_subclass(Named)
        plan, recv, _ = epic.torch.plan_dispatch(group, layer, ids, named)
        found = (recv, epic.torch.dispatch(plan, named)[0], epic.torch.combine(plan, recv))
        assert [type(v) for v in found] == [Named] * 3


def test_a_layer_that_the_group_keeps() -> None:
    """Check that the number of a layer is valid until its group closes."""
    ids = torch.zeros((4, 2), dtype=torch.int32)
    with epic.torch.Group(**{**SIZES, "num_ranks": 1}) as group:
        number = LayerFacts(*group.facts(epic.torch.Layer(EXPERTS, 2).key)).number
        ops.plan.default(group.order_token, ids, number)
        for wrong in (number + 1, 0):
            with pytest.raises(RuntimeError, match="group was closed"):
                ops.plan.default(group.order_token, ids, wrong)
        assert number in KEPT_LAYERS
    assert number not in KEPT_LAYERS
    with pytest.raises(RuntimeError, match="group was closed"):
        ops.plan.default(group.order_token, ids, number)


# ---------------------------------------------------------------------- checkpointing ----


class Counting(torch.utils._python_dispatch.TorchDispatchMode):
    """Count how many plans are made."""

    def __init__(self) -> None:
        super().__init__()
        self.plans = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.plans += func.namespace == "epic" and func._opname in ("plan", "plan_dispatch")
        return func(*args, **(kwargs or {}))


def checkpointed(rank: int, selective: bool, fused: bool) -> None:
    """Check that the bits are equal, and that a plan is made only once with the policy."""

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(epic.torch.save_plans)

    more: dict[str, Any] = {"context_fn": contexts} if selective else {}
    with group_of(4) as group:
        step, mine = through(group, fused), Data(UNEVEN).mine(rank)
        wanted = check_round(step, mine, 2e-6)
        with Counting() as count:
            got = check_round(
                lambda *args: checkpoint(step, *args, use_reentrant=False, **more), mine, 2e-6
            )
        assert same(got, wanted)
        assert count.plans == (1 if selective else 2)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("selective", [False, True])
def test_checkpoint(world: Any, selective: bool, fused: bool) -> None:
    """Check activation checkpointing."""
    world.run(checkpointed, selective, fused)


class Offload:
    """Copy saved tensors away, as packages do, except parameters and tensors marked to stay."""

    def __init__(self) -> None:
        self.moved: list[torch.Tensor] = []
        self.stayed: list[torch.Tensor] = []

    def pack(self, x: torch.Tensor) -> Any:
        """Copy the tensor away."""
        asks = [getattr(x, name, not value) == value for name, value in NO_OFFLOAD.items()]
        assert all(asks) == any(asks)
        if all(asks) or isinstance(x, torch.nn.Parameter):
            self.stayed.append(x)
            return x
        self.moved.append(x)
        return (x.clone(),)

    def unpack(self, x: Any) -> torch.Tensor:
        """Copy the tensor back."""
        return x[0].clone() if isinstance(x, tuple) else x

    def hooks(self) -> Any:
        """Return a context manager that installs both."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)


def offloaded(rank: int) -> None:
    """Check that the expected number of saved tensors was copied away and back."""
    with group_of(4) as group:
        mine, on_cpu = Data(UNEVEN).mine(rank), torch.autograd.graph.save_on_cpu
        every = torch.autograd.graph.saved_tensors_hooks
        for fused in (False, True):
            step, some = through(group, fused), Offload()
            wanted = check_round(step, mine, 2e-6)
            for hooks in (every(torch.clone, torch.clone), on_cpu(), some.hooks()):
                with hooks:
                    assert same(wanted, check_round(step, mine, 2e-6))
            # the plans that dispatch and combine saved
            assert [x.dtype for x in some.stayed] == 2 * [torch.uint8]
            assert torch.uint8 not in {x.dtype for x in some.moved} and some.moved


def test_offloading(world: Any) -> None:
    """Check that a plan is an ordinary saved tensor that is marked to stay."""
    world.run(offloaded)


TWELVE = [0, 3, 1, 2, 3, 4, 5, 3, 6, 7, 0, 4]
OFFLOADED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the core's": ({}, {"bias_rate": 0.1}),
    "composed": ({"quantize": "1x32"}, {}),
    "replicas": (
        {"quantize": "1x32", "num_experts": 12, "num_logical": EXPERTS},
        {"logical_of_expert": TWELVE},
    ),
}


@pytest.mark.parametrize("name", OFFLOADED)
def test_offloading_a_layer(name: str) -> None:
    """Check that activations are offloaded, but not the plan, its counts, weights and bias."""
    wish, more = OFFLOADED[name]
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "inner": 8}
    with epic.torch.Group(**{**SIZES, "num_ranks": 1}) as group:
        layer = epic.torch.MoE(group, epic.torch.Moe.of(**{**sizes, **wish}), **more)

        def step() -> list[torch.Tensor]:
            x = numbers(1, 9, HIDDEN).requires_grad_()
            out, loss = layer(x)
            return [out.detach(), *torch.autograd.grad(out.sum() + loss, (x, *layer.parameters()))]

        wanted, some = step(), Offload()
        for hooks in (torch.autograd.graph.save_on_cpu(), some.hooks()):
            with hooks:
                assert same(wanted, step())
        places = {p.data_ptr() for p in (*layer.parameters(), *layer.buffers()) if p.numel()}
        assert some.moved and not places & {x.data_ptr() for x in some.moved}
        assert torch.int32 not in {x.dtype for x in some.moved if x.dim() == 1}
        plans = group.plan_bytes(layer.options.layer)
        octets = [x.numel() for x in some.moved if x.dtype == torch.uint8]
        assert not any(plans <= size < plans + 400 for size in octets), (plans, octets)


# ------------------------------------------------------------------- reuse, and the rest ----


def reused(rank: int) -> None:
    """Check that a plan or rows changed before their backward raise an error."""
    with group_of(4) as group:
        x, w, ids, ct = Data().mine(rank)
        plan, recv, slot = epic.torch.plan_dispatch(group, LAYER, ids, x, w)
        rows = torch.sin(recv)
        out = epic.torch.combine(plan, rows, slot)
        with torch.no_grad():
            epic.torch.dispatch(plan, x, out=(rows, None))
        fails(lambda: out.backward(ct), "modified by an inplace operation")
        plan, recv, slot = epic.torch.plan_dispatch(group, LAYER, ids, x, w)
        plan.bytes.zero_()
        fails(lambda: recv.sum().backward(), "modified by an inplace operation")
        plan, recv, slot = epic.torch.plan_dispatch(group, LAYER, ids, x, w)
        out = torch.empty_like(ct)
        loss = torch.sin(epic.torch.combine(plan, recv, slot, out=out)).sum()
        with torch.no_grad():
            epic.torch.combine(plan, recv, slot, out=out)
        fails(loss.backward, "modified by an inplace operation")


def fails(call: Callable[[], Any], text: str) -> None:
    """Check that the call raises an error with this text."""
    try:
        call()
    except RuntimeError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no error contains {text!r}")


def test_reuse_is_detected(world: Any) -> None:
    """Check that torch's version counters detect such changes."""
    world.run(reused)


NO_SECOND = "a second derivative is not supported"


def twice(rank: int) -> None:
    """Try to compute second derivatives, also with respect to the output gradient."""
    with group_of(1) as group:
        x, w, ids, ct = Data().mine(rank)
        out = through(group, True)(x, w, ids)
        (d_x,) = torch.autograd.grad(out, x, ct.requires_grad_(), create_graph=True)
        fails(lambda: d_x.sum().backward(), NO_SECOND)


def test_no_second_derivative(world: Any) -> None:
    """Check that a second derivative raises an error instead of returning wrong numbers."""
    world.run(twice)


def curved(group: epic.torch.Group) -> dict[str, tuple[Callable[..., torch.Tensor], Any]]:
    """Return functions whose first derivative depends on their input, and this input."""
    ids, router = Data().ids[:6], epic.torch.Router(EXPERTS, TOP_K)
    plan = epic.torch.plan(group, LAYER, ids)
    known: dict[str, Any] = {"coeff": 0.7, "total_tokens": 6}
    rows, slots = numbers(5, plan.capacity, HIDDEN), numbers(6, plan.capacity)
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "inner": 8}
    layer = epic.torch.MoE(group, epic.torch.Moe.of(**sizes)).requires_grad_(False)
    parts = epic.torch.ExpertWeights(layer.w_gate_up, layer.w_down)
    counts = (plan.expert_rows, plan.expert_tokens)
    load = plan.load
    experts = layer.options.experts
    return {
        "squares": (lambda x: epic.torch.dispatch(plan, x)[0].square(), numbers(1, 6, HIDDEN)),
        "combine": (lambda v: epic.torch.combine(plan, v * rows, v[:, 0] * slots), rows),
        "moe": (lambda x: layer(x)[0], numbers(1, 6, HIDDEN)),
        "experts": (lambda x: epic.torch.experts(experts, x, *counts, parts), rows),
        "route": (lambda z: epic.torch.route(router, z)[1], numbers(2, 6, EXPERTS)),
        "balance_loss": (
            lambda z: epic.torch.balance_loss(router, z, load=load, **known),
            numbers(2, 6, EXPERTS),
        ),
        "z_loss": (lambda z: epic.torch.z_loss(router, z, **known), numbers(2, 6, EXPERTS)),
    }


CURVED = ("squares", "combine", "moe", "experts", "route", "balance_loss", "z_loss")


@pytest.mark.parametrize("name", CURVED)
def test_no_second_derivative_of_a_constant_cotangent(name: str) -> None:
    """Check that second derivatives raise an error also if they depend only on saved tensors, such
    as a gradient penalty or a Hessian. A graph that is never differentiated gives the bits of the
    gradients."""
    with epic.torch.Group(**{**SIZES, "num_ranks": 1}) as group:
        run, x = curved(group)[name]
        x.requires_grad_()
        (plain,) = torch.autograd.grad(run(x).sum(), x)
        (d_x,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        assert torch.equal(plain, d_x)
        fails(lambda: (d_x.square().sum() + x.sum()).backward(), NO_SECOND)
        fails(lambda: torch.autograd.functional.hessian(lambda v: run(v).sum(), x), NO_SECOND)
        again = checkpoint(run, x, use_reentrant=False)  # it unpacks each saved tensor only once
        assert torch.equal(plain, torch.autograd.grad(again.sum(), x, create_graph=True)[0])


def unused(rank: int) -> None:
    """Run steps with unused outputs, and with inputs that need no gradient."""
    with group_of(4) as group:
        x, w, ids, ct = Data(UNEVEN).mine(rank)
        plan, recv, slot = epic.torch.plan_dispatch(group, LAYER, ids, x, w)
        d_x, d_w = torch.autograd.grad(slot.sum(), (x, w))
        assert not d_x.any() and torch.equal(d_w, (ids >= 0).float())
        out = epic.torch.combine(plan, recv.detach(), slot.detach().requires_grad_())
        out.backward(ct)
        assert not needs(epic.torch.combine(plan, recv.detach(), slot.detach()))
        rows = recv.detach().requires_grad_()
        (d_rows,) = torch.autograd.grad(epic.torch.combine(plan, rows, slot.detach()), rows, ct)
        used = int(plan.expert_rows.sum())
        assert d_rows[:used].any() or not used
        assert not d_rows[used:].any()


def needs(x: torch.Tensor) -> bool:
    """Return whether the tensor has a gradient function or needs a gradient."""
    return x.requires_grad


def test_parts_of_gradients(world: Any) -> None:
    """Check backward calls in which some output gradients are None."""
    world.run(unused)


def autocast(rank: int) -> None:
    """Check that autocast changes the dtype of neither rows nor weights."""
    with group_of(4) as group:
        mine = Data(UNEVEN).mine(rank)
        wanted = check_round(through(group, True), mine, 2e-6)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert same(wanted, check_round(through(group, True), mine, 2e-6))


def test_autocast(world: Any) -> None:
    """Check autocast, which applies to matrix products and not to steps that move or add rows."""
    world.run(autocast)


def test_autocast_of_grouped_mm() -> None:
    """Check that autocast changes neither a product of the caller nor its gradients."""
    options = epic.torch.Moe.of(num_experts=4, top_k=2, hidden=64, inner=64)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with epic.torch.Group(num_ranks=1, max_tokens=8, max_row_bytes=256) as group:
        layer = epic.torch.MoE(group, options, grouped_mm=epic.torch.slab_mm)
        out = layer(x)[0]
        wanted = torch.autograd.grad(out.square().sum(), x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = layer(x)[0]
        assert same([out], [found])
        assert same(wanted, torch.autograd.grad(found.square().sum(), x))


def test_autocast_of_a_shared_expert() -> None:
    """Check that autocast does not change the shared expert of a layer with a token mask."""
    options = epic.torch.Moe.of(
        num_experts=4, top_k=2, hidden=64, inner=64, shared=epic.torch.Experts(1, 64, 64)
    )
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(8, dtype=torch.bool)
    with epic.torch.Group(num_ranks=1, max_tokens=8, max_row_bytes=256) as group:
        layer = epic.torch.MoE(group, options)
        out = layer(x, mask)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(layer(x, mask)[0], out)


def test_profiler_shows_names() -> None:
    """Check that the profiler shows each operator by name; one process needs no process group."""
    sizes = {**SIZES, "num_ranks": 1}
    with epic.torch.Group(**sizes) as group:
        ids = torch.zeros((4, TOP_K), dtype=torch.int32)
        x = torch.ones((4, 2), requires_grad=True)
        layer = epic.torch.Layer(EXPERTS, TOP_K)
        with torch.profiler.profile() as profile:
            plan, recv, _ = epic.torch.plan_dispatch(group, layer, ids, x)
            epic.torch.combine(plan, recv).sum().backward()
    names = {event.key for event in profile.key_averages()}
    wanted = {"plan_dispatch", "combine", "combine_backward", "dispatch_backward"}
    assert {f"epic::{name}" for name in wanted} <= names
