# SPDX-License-Identifier: Apache-2.0
"""torch.func's transforms."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import epic.torch
from epic.torch.experts import slab_mm
from parts import EXPERTS, HIDDEN, LAYER, SIZES, Data, group_of, numbers
from test_autograd import CURVED, curved

WISH = epic.torch.Moe.of(
    num_experts=8, top_k=2, hidden=HIDDEN, inner=12, balance_coeff=0.1, z_coeff=0.1,
    shared=epic.torch.Experts(1, HIDDEN, 8),
)  # fmt: skip
MORE: dict[str, Any] = {"gate_bias": True, "expert_biases": True, "shared_gate": True}


def linear(group: epic.torch.Group) -> dict[str, tuple[Callable[..., torch.Tensor], Any]]:
    """Functions of steps that are linear in their input, with that input."""
    ids, w, x = Data().ids[:6], Data().w[:6], numbers(1, 6, HIDDEN)
    flat = epic.torch.Layer(EXPERTS, 3, layout="flat")
    copies = epic.torch.Layer(EXPERTS, 3, num_logical=4)
    plan = epic.torch.plan(group, LAYER, ids)
    replicated = epic.torch.plan(group, copies, ids % 4, logical_of_expert=[0, 1, 2, 3] * 2)
    tied = numbers(3, EXPERTS, HIDDEN)
    flat_plan = epic.torch.plan(group, flat, ids)

    def fused(v: torch.Tensor) -> torch.Tensor:
        plan, recv, slots = epic.torch.plan_dispatch(group, LAYER, ids, v, w)
        return epic.torch.combine(plan, recv, slots)

    return {
        "plan_dispatch": (fused, x),
        "dispatch": (lambda v: epic.torch.dispatch(plan, v, quantize="1x32")[0], x),
        "dispatch_flat": (lambda v: epic.torch.dispatch_flat(flat_plan, v)[0], x),
        "sum": (lambda v: epic.torch.sum(group, v), x),
        "sum_replicas": (lambda v: epic.torch.sum_replicas(replicated, v), tied),
        "tied": (lambda v: epic.torch.tied(replicated, v), tied),
    }


LINEAR = (
    "plan_dispatch", "dispatch", "dispatch_flat", "sum", "sum_replicas", "tied",
)  # fmt: skip


@pytest.mark.parametrize("name", CURVED + LINEAR)
def test_reverse_mode(name: str) -> None:
    """grad, vjp and jacrev without vmap give autograd's bits; what there is not says so."""
    with epic.torch.Group(**{**SIZES, "num_ranks": 1}) as group:
        run, x = {**curved(group), **linear(group)}[name]

        def total(v: torch.Tensor) -> torch.Tensor:
            return run(v).sum()

        leaf = x.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(total(leaf), leaf)
        assert torch.equal(torch.func.grad(total)(x), wanted)
        value, back = torch.func.vjp(total, x)
        assert torch.equal(back(torch.ones_like(value))[0], wanted)

        def some(v: torch.Tensor) -> torch.Tensor:
            return run(v).reshape(-1)[:3]

        rows = torch.func.jacrev(some, chunk_size=1)(x)
        leaf = x.clone().requires_grad_()
        assert torch.equal(rows[-1], torch.autograd.grad(some(leaf)[-1], leaf)[0])
        for refused in (
            lambda: torch.func.vmap(run)(x[None]),
            lambda: torch.func.vmap(torch.func.grad(total))(x[None]),
            lambda: torch.func.jacrev(run)(x),
        ):
            with pytest.raises(epic.torch.EpicUnsupportedError, match="vmap over EPIC's"):
                refused()
        if name in CURVED:
            with pytest.raises(epic.torch.EpicUnsupportedError, match="second derivative"):
                torch.func.grad(lambda v: torch.func.grad(total)(v).square().sum())(x)


def test_vmap_of_a_plan() -> None:
    """Nothing that a transform differentiates is in it."""
    with epic.torch.Group(**{**SIZES, "num_ranks": 1}) as group:
        ids = Data().ids[:6]

        def run(v: torch.Tensor) -> torch.Tensor:
            return epic.torch.plan(group, LAYER, v).load

        with pytest.raises(epic.torch.EpicUnsupportedError, match="vmap over EPIC's"):
            torch.func.vmap(run)(ids[None])


def func_step(rank: int, composed: bool) -> None:
    """A whole layer by torch.func: gradients of its parameters and its input."""
    with group_of(4) as group:
        layer = epic.torch.MoE(group, WISH, grouped_mm=slab_mm if composed else None, **MORE)
        layer.reset_parameters(seed=3)
        x = numbers(60 + rank, 5 + rank, HIDDEN)

        def total(own: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            out, loss = torch.func.functional_call(layer, own, (x,))
            return out.square().sum() + loss

        own = {name: p.detach() for name, p in layer.named_parameters()}
        got = torch.func.grad(total, argnums=(0, 1))(own, x)
        leaf = x.clone().requires_grad_()
        total(dict(layer.named_parameters()), leaf).backward()
        torch.testing.assert_close(got[1], leaf.grad)
        for name, p in layer.named_parameters():
            torch.testing.assert_close(got[0][name], p.grad)


@pytest.mark.parametrize("composed", [False, True])
def test_functional_layers(world: Any, composed: bool) -> None:
    """On four ranks with other numbers of tokens."""
    world.run(func_step, composed)
