# SPDX-License-Identifier: Apache-2.0
"""Tests out=: every function writes its usual bits into the caller's tensors.

Tensors that do not fit must raise an error.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import epic.torch
from epic.torch import EpicArgumentError, EpicUnsupportedError, Plan
from parts import (
    EXPERTS,
    HIDDEN,
    LAYER,
    SIZES,
    TOP_K,
    UNEVEN,
    Data,
    choices,
    group_of,
    numbers,
    same,
)

ops = torch.ops.epic
FLAT = epic.torch.Layer(EXPERTS, TOP_K, layout="flat")
REPLICATED = epic.torch.Layer(12, TOP_K, num_logical=EXPERTS)
TWELVE = [0, 3, 1, 2, 3, 4, 5, 3, 6, 7, 0, 4]
ROUTER = epic.torch.Router(EXPERTS, TOP_K, score="sigmoid", normalize="sum")
WISH: dict[str, Any] = {
    "num_experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "inner": 12, "balance_coeff": 0.1,
}  # fmt: skip


def tensors(found: Any) -> list[torch.Tensor]:
    """Return the tensors of a result; none for a plan, because each plan has its own number."""
    if isinstance(found, torch.Tensor):
        return [found]
    if found is None or isinstance(found, Plan):
        return []
    return [x for part in found for x in tensors(part)]


def blank(found: Any) -> Any:
    """Return tensors of the same types and shapes, filled with wrong values."""
    if isinstance(found, torch.Tensor):
        octets = torch.full_like(found.contiguous().view(-1).view(torch.uint8), 255)
        return octets.view(found.dtype).view(found.shape)
    if isinstance(found, Plan):
        return found._replace(bytes=blank(found.bytes))
    if isinstance(found, tuple):
        parts = [blank(part) for part in found]
        return type(found)(*parts) if hasattr(found, "_fields") else tuple(parts)
    return found


def check(name: str, call: Callable[..., Any], rows: int | None = None) -> Any:
    """Check that the given tensors receive the same bits. With `rows`, compare only this many rows,
    because the others are undefined."""
    wanted = call()
    given = blank(wanted)
    found = call(out=given)
    for i, parts in enumerate(zip(tensors(found), tensors(wanted), tensors(given), strict=True)):
        assert parts[0] is parts[2], f"{name}, result {i}: another tensor"
        bits = [[x[:rows] if rows else x] for x in parts[:2]]
        assert same(*bits), f"{name}, result {i}: other bits"
    return found


def functions(group: epic.torch.Group, x: Any, w: Any, ids: Any) -> dict[str, Any]:
    """Return every function that has out=, by name, with all other arguments bound."""
    t, logits = epic.torch, numbers(5, x.shape[0], EXPERTS)
    plan, flat = t.plan(group, LAYER, ids), t.plan(group, FLAT, ids)
    copies = t.plan(group, REPLICATED, ids, logical_of_expert=TWELVE)
    local = copies.spec.num_local
    recv, slots = t.dispatch(plan, x, w)
    counts = (plan.expert_rows, plan.expert_tokens)
    options = t.Moe.of(**WISH)
    layer = t.MoE(group, options)
    mlp = t.ExpertWeights(layer.w_gate_up, layer.w_down)
    loss: dict[str, Any] = {"coeff": 0.1, "total_tokens": 99, "group": group}
    return {
        "plan": lambda **o: t.plan(group, LAYER, ids, **o),
        "plan_dispatch": lambda **o: t.plan_dispatch(group, LAYER, ids, x, w, **o),
        "without weights": lambda **o: t.plan_dispatch(group, LAYER, ids, x, **o),
        "dispatch": lambda **o: t.dispatch(plan, x, w, **o),
        "dispatch_quantized": lambda **o: t.dispatch_quantized(plan, x, w, **o),
        "1x32": lambda **o: t.dispatch_quantized(plan, x, None, "1x32", **o),
        "dispatch_flat": lambda **o: t.dispatch_flat(flat, x, w, **o),
        "combine": lambda **o: t.combine(plan, recv, slots, **o),
        "sum": lambda **o: t.sum(group, numbers(7, 4, HIDDEN), **o),
        "sum_replicas": lambda **o: t.sum_replicas(copies, numbers(6, local, 4), **o),
        "route": lambda **o: t.route(ROUTER, logits, group=group, **o),
        "balance_loss": lambda **o: t.balance_loss(ROUTER, logits, load=plan.load, **loss, **o),
        "z_loss": lambda **o: t.z_loss(ROUTER, logits, **loss, **o),
        "experts": lambda **o: t.experts(options.experts, recv, *counts, mlp, group=group, **o),
        "moe": lambda **o: t.moe(group, options, x, layer.weights(), **o),
    }


def every_function(rank: int) -> None:
    """Check all functions on ranks with different numbers of tokens, one of them with none."""
    with group_of(4) as group, torch.no_grad():
        x, w, ids, _ = Data(UNEVEN).mine(rank)
        filled = int(epic.torch.plan(group, LAYER, ids).expert_rows.sum())
        for name, call in functions(group, x, w, ids).items():
            found = check(name, call, filled if name == "experts" else None)
            if name == "plan":  # a plan is valid only for the layer that it was made for
                recv, slots = epic.torch.dispatch(found, x, w)
                assert same((recv, slots), epic.torch.plan_dispatch(group, LAYER, ids, x, w)[1:])
        y = numbers(8, 3)
        assert epic.torch.sum(group, y, out=y) is y
        exact = epic.torch.plan(group, LAYER, ids, capacity=epic.torch.EXACT)
        again = epic.torch.plan(group, LAYER, ids, capacity=epic.torch.EXACT, out=blank(exact))
        assert again.capacity == exact.capacity


def test_every_function(world: Any) -> None:
    """Run the checks on all ranks, also for the whole layer."""
    world.run(every_function)


def compiled(rank: int) -> None:
    """Check in one compiled graph that the caller's tensor itself is written, not a copy."""
    with group_of(4) as group, torch.no_grad():
        x, w, ids, _ = Data(UNEVEN).mine(rank)
        wanted = epic.torch.plan_dispatch(group, LAYER, ids, x, w)
        home = epic.torch.combine(*wanted)

        def step(x: Any, w: Any, ids: Any, out: Any, last: Any) -> None:
            plan, recv, slots = epic.torch.plan_dispatch(group, LAYER, ids, x, w, out=out)
            epic.torch.combine(plan, recv, slots, out=last)

        given, last = blank(wanted), blank(home)
        torch.compile(step, fullgraph=True, backend="aot_eager")(x, w, ids, given, last)
        assert same(given[1:], wanted[1:]) and torch.equal(last, home)
    torch._dynamo.reset()


def test_compiled(world: Any) -> None:
    """Check that out= works under torch.compile with fullgraph=True."""
    world.run(compiled)


def compiled_gradients(rank: int) -> None:
    """Check that a compiled step with out= and gradients has usual bits, and fills the tensors."""
    with group_of(4) as group:
        x, w, ids, ct = Data(UNEVEN).mine(rank)

        def step(x: Any, w: Any, ids: Any, *out: Any) -> Any:
            if len(out) == 4:
                plan, recv, slots = epic.torch.plan_dispatch(group, LAYER, ids, x, w, out=out[:3])
            elif out:
                plan = epic.torch.plan(group, LAYER, ids)
                recv, slots = epic.torch.dispatch(plan, x, w, out=out[:2])
            else:
                plan, recv, slots = epic.torch.plan_dispatch(group, LAYER, ids, x, w)
            last = out[-1] if out else None
            return recv, slots, epic.torch.combine(plan, recv.sin(), slots, out=last)

        recv, slots, home = step(x, w, ids)
        wanted = [recv, slots, home, *torch.autograd.grad(home, (x, w), ct)]
        with torch.no_grad():
            plan = epic.torch.plan(group, LAYER, ids)
        run = torch.compile(step, fullgraph=True, backend="aot_eager")
        for out in ((plan, recv, slots, home), (recv, slots, home)):
            given = tuple(blank(v if isinstance(v, Plan) else v.detach()) for v in out)
            *found, last = run(x, w, ids, *given)
            found = [*found, last, *torch.autograd.grad(last, (x, w), ct)]
            assert same(found, wanted) and same(given[-3:], wanted[:3])
            assert not any(v.requires_grad for v in given[-3:])
        with pytest.raises(Exception, match="grad_out is given in a compiled function"):
            torch.compile(
                lambda y: epic.torch.combine(plan, y, grad_out=y.detach()),
                fullgraph=True,
                backend="aot_eager",
            )(recv.detach().requires_grad_())
    torch._dynamo.reset()


def test_compiled_gradients(world: Any) -> None:
    """Run it on all ranks."""
    world.run(compiled_gradients)


# ------------------------------------------------------------------ memory of gradients ----


def given_gradients(rank: int) -> None:
    """Check that backward of combine writes into grad_out, with usual bits."""
    with group_of(4) as group:
        x, w, ids, ct = Data(UNEVEN).mine(rank)
        seen: list[torch.Tensor] = []
        for block in (None, "1x128", "1x32"):
            for weighted in (True, False):
                results = []
                for into in (False, True, True):
                    plan, recv, slots = epic.torch.plan_dispatch(group, LAYER, ids, x, w)
                    y = recv.sin()
                    y.register_hook(seen.append)
                    mine = torch.full_like(y, 99).detach() if into else None
                    more: dict[str, Any] = {"quantize_gradient": block, "grad_out": mine}
                    home = epic.torch.combine(plan, y, slots if weighted else None, **more)
                    found = torch.autograd.grad(home, (x, w), ct, allow_unused=not weighted)
                    results.append([home.detach(), seen[-1], *found[: 1 + weighted]])
                    assert mine is None or seen[-1].data_ptr() == mine.data_ptr()
                assert same(results[0], results[1]) and same(results[0], results[2])


def test_given_gradients(world: Any) -> None:
    """Run it on all ranks."""
    world.run(given_gradients)


def test_grad_out_refused() -> None:
    """Check the errors of a grad_out that does not fit."""
    with epic.torch.Group(**{**SIZES, "num_ranks": 1}) as group:
        plan, recv, _ = epic.torch.plan_dispatch(group, LAYER, IDS, X, W)
        rows = recv.requires_grad_()
        for wrong, text in (
            (torch.empty(3, HIDDEN), r"grad_out is torch.float32 of shape \[3, 20\] on cpu: must"),
            (torch.empty_like(rows, dtype=torch.float64), "must be torch.float32 of shape"),
            (torch.empty_like(rows).requires_grad_(), "grad_out requires a gradient"),
        ):
            with pytest.raises(EpicArgumentError, match=text):
                epic.torch.combine(plan, rows, grad_out=wrong)


# --------------------------------------------------------------------------- refused ----

X, IDS = numbers(1, 4, HIDDEN), choices(2, 4)
W = numbers(3, 4, TOP_K)
NONE = (None, None)
Wrong = tuple[str, Callable[[Any], Any], str]
WRONG: list[Wrong] = [
    ("plan", lambda o: o.bytes, "out is a Tensor: must be a Plan"),
    ("plan", lambda o: o._replace(bytes=o.bytes[:-4]), "out plan has the shape ["),
    ("plan", lambda o: o._replace(bytes=o.bytes.char()), "another dtype: must be uint8"),
    ("plan_dispatch", lambda o: o[:2], "out is a tuple: must be (plan, recv, slot_weights)"),
    ("plan_dispatch", lambda o: (o[0], o[1][:-1], o[2]), "[215, 20]: must be [216, 20]"),
    ("plan_dispatch", lambda o: (o[0], o[1], None), "slot_weights of out= is None: pass both"),
    ("dispatch", lambda o: o[0], "out is a Tensor: must be (recv, slot_weights)"),
    ("dispatch", lambda o: (o[0].half(), o[1]), "out recv is float16: must be float32"),
    ("dispatch", lambda o: (o[0].mT.contiguous().mT, o[1]), "out recv is not contiguous"),
    ("dispatch", lambda o: (o[0], o[1][:, None]), "out slot_weights has 2 dimensions: must have 1"),
    ("dispatch", lambda o: (o[0], o[0].view(-1)[:216]), "out slot_weights shares memory with recv"),
    ("dispatch", lambda o: (o[0].to("meta"), o[1]), "out is on meta: must be on cpu"),
    ("dispatch_quantized", lambda o: (o[0].view(torch.uint8), *o[1:]), "recv is uint8: must be"),
    ("1x32", lambda o: (o[0], o[1].float(), None), "out scales is float32: must be uint8"),
    ("dispatch_flat", lambda o: (*o[:2], o[2].long()), "out recv_expert is int64: must be int32"),
    ("combine", lambda o: o[:3], "out out has the shape [3, 20]: must be [4, 20]"),
    ("combine", lambda o: o.clone().requires_grad_(), "a tensor requires a gradient"),
    ("sum", lambda o: o[:3], "out is torch.float32 of shape [3, 20]: must"),
    ("sum", lambda o: o.double(), "torch.float32 of shape [4, 20] and contiguous"),
    ("sum_replicas", lambda o: o.mT.contiguous().mT, "and contiguous"),
    ("route", lambda o: (o[0].long(), o[1]), "out topk_idx is int64: must be int32"),
    ("balance_loss", lambda o: o[None], "out has the shape [1]: must be []"),
    ("z_loss", lambda o: o.double(), "out loss is float64: must be float32"),
    ("experts", lambda o: o[1:], "out y has the shape"),
    ("moe", lambda o: tuple(o)[:3], "out is a tuple: must be (out, loss, load,"),
    ("moe", lambda o: o._replace(out=o.out[1:]), "out.out has the shape [3, 20]: must be [4, 20]"),
    ("moe", lambda o: o._replace(load=o.load.long()), "out load is int64: must be int32"),
    ("moe", lambda o: o._replace(logical_load=o.load), "out.logical_load is given: must be None"),
]  # fmt: skip


def test_refused() -> None:
    """Check that the error has argument, value and rule, and that the group stays usable."""
    with epic.torch.Group(**{**SIZES, "num_ranks": 1}) as group:
        with torch.no_grad():
            calls = functions(group, X, W, IDS)
            results = {name: call() for name, call in calls.items()}
        for name, change, text in WRONG:
            with pytest.raises(EpicArgumentError) as caught, torch.set_grad_enabled("grad" in text):
                calls[name](out=change(blank(results[name])))
            assert text in str(caught.value), (name, caught.value)
        with torch.no_grad():
            plan = epic.torch.plan(group, LAYER, IDS)
            rows = torch.ones(plan.capacity, HIDDEN)
            with pytest.raises(EpicArgumentError, match="out out shares memory with rows"):
                epic.torch.combine(plan, rows, out=rows[:4])
            with pytest.raises(EpicArgumentError, match="dispatch_quantized with out="):
                epic.torch.dispatch(plan, X, quantize="1x32", out=(rows, None))
            layer = epic.torch.MoE(group, epic.torch.Moe.of(**WISH))
            with pytest.raises(EpicUnsupportedError, match="token_mask"):
                mask = torch.ones(4, dtype=torch.bool)
                wish = (layer.options, X, layer.weights())
                epic.torch.moe(group, *wish, token_mask=mask, out=results["moe"])
        for call in calls.values():
            call()  # the group is still usable


def test_not_wanted() -> None:
    """Check that results for which out= has None are not computed or kept."""
    with epic.torch.Group(**{**SIZES, "num_ranks": 1}) as group, torch.no_grad():
        layer = epic.torch.MoE(group, epic.torch.Moe.of(**WISH))
        wish = (group, layer.options, X, layer.weights())
        wanted = epic.torch.moe(*wish)
        given = epic.torch.MoeOut(blank(wanted.out), *4 * (None,))
        assert epic.torch.moe(*wish, out=given) is not wanted
        assert torch.equal(given.out, wanted.out)
        plan, recv, slots = epic.torch.plan_dispatch(group, LAYER, IDS, X, W)
        ct, place = numbers(9, 4, HIDDEN), (plan.capacity, plan.spec.layer, 0, 1)
        args = (group.order_token, plan.bytes, ct, recv, slots, *place)
        rows, weights = ops.combine_backward.default(*args)
        found = torch.empty_like(weights)
        ops.combine_backward_out.default(*args, None, found)
        assert torch.equal(found, weights)
        with pytest.raises(RuntimeError, match="out d_slot_weights is a tensor: must be None"):
            args = (group.order_token, plan.bytes, ct, None, slots, *place)
            ops.combine_backward_out.default(*args, rows, found)
