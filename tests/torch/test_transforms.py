# SPDX-License-Identifier: Apache-2.0
"""Tests torch.func, and layers whose parameters are computed by torch.nn.utils."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrizations, parametrize, prune

import epic.torch
from epic.torch.experts import slab_mm
from parts import EXPERTS, HIDDEN, LAYER, RANKS, SIZES, Data, group_of, numbers
from test_autograd import CURVED, curved
from test_moe import EXPERT_WEIGHTS

WISH = epic.torch.Moe.of(
    num_experts=8, top_k=2, hidden=HIDDEN, inner=12, balance_coeff=0.1, z_coeff=0.1,
    shared=epic.torch.Experts(1, HIDDEN, 8),
)  # fmt: skip
MORE: dict[str, Any] = {"gate_bias": True, "expert_biases": True, "shared_gate": True}


def linear(group: epic.torch.Group) -> dict[str, tuple[Callable[..., torch.Tensor], Any]]:
    """Return functions of steps that are linear in their input, and this input."""
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
        "sum of float64": (lambda v: epic.torch.sum(group, v), x.double()),
        "sum_replicas": (lambda v: epic.torch.sum_replicas(replicated, v), tied),
        "sum_replica_grads": (lambda v: epic.torch.sum_replica_grads(replicated, v), tied),
    }


LINEAR = (
    "plan_dispatch", "dispatch", "dispatch_flat", "sum", "sum of float64", "sum_replicas",
    "sum_replica_grads",
)  # fmt: skip


@pytest.mark.parametrize("name", CURVED + LINEAR)
def test_reverse_mode(name: str) -> None:
    """Check that grad, vjp and jacrev give autograd's bits, and that vmap raises an error."""
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
    """Check vmap of a plan, which contains nothing differentiable."""
    with epic.torch.Group(**{**SIZES, "num_ranks": 1}) as group:
        ids = Data().ids[:6]

        def run(v: torch.Tensor) -> torch.Tensor:
            return epic.torch.plan(group, LAYER, v).load

        with pytest.raises(epic.torch.EpicUnsupportedError, match="vmap over EPIC's"):
            torch.func.vmap(run)(ids[None])


def func_step(rank: int, composed: bool) -> None:
    """Compute gradients of a whole layer's parameters and input with torch.func."""
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
    """Check such layers on four ranks with different numbers of tokens."""
    world.run(func_step, composed)


class Doubled(torch.nn.Module):
    """A parametrization that doubles the stored parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return twice the stored value."""
        return 2 * x

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        """Return the value to store."""
        return x / 2


def parametrized(layer: torch.nn.Module, name: str) -> Callable[[], torch.Tensor]:
    """Return a function that computes the parameter's gradient from that of its stored half."""
    parametrize.register_parametrization(layer, name, Doubled())
    return lambda: layer.parametrizations[name].original.grad / 2


def pruned(layer: torch.nn.Module, name: str) -> Callable[[], torch.Tensor]:
    """Return a function that computes the gradient, zero where the parameter is pruned."""
    prune.identity(layer, name)
    return lambda: getattr(layer, f"{name}_orig").grad


def normalized(layer: torch.nn.Module, name: str) -> Callable[[], torch.Tensor]:
    """Return a function that computes the gradient along the parameter, that of its norm's
    logarithm."""
    parametrizations.weight_norm(layer, name)
    return lambda: layer.parametrizations[name].original0.grad


def computed_parameters(rank: int, change: Callable[..., Any], name: str) -> None:
    """Check a layer of which torch.nn.utils computes one parameter.

    Output and gradients are correct. Gradients of the rank's own experts stay as they are, and the
    others are added over the ranks.
    """
    with group_of(RANKS) as group:
        x = numbers(60 + rank, 5 + rank, HIDDEN)

        def made() -> epic.torch.MoE:
            layer = epic.torch.MoE(group, WISH, **MORE)
            layer.reset_parameters(seed=3)
            return layer

        plain, other = made(), made()
        value = getattr(plain, name).detach().clone()
        gradient = change(other, name)
        outs = [layer(x) for layer in (plain, other)]
        torch.testing.assert_close(outs[0], outs[1])
        for out, loss in outs:
            (out.square().sum() + loss).backward()
        wanted = getattr(plain, name).grad.clone()
        torch.testing.assert_close(gradient(), along(change, value, wanted))
        epic.torch.sum_gradients(other, group)
        if name not in EXPERT_WEIGHTS:
            wanted = epic.torch.sum(group, wanted)
        torch.testing.assert_close(gradient(), along(change, value, wanted))


def along(change: Callable[..., Any], value: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the gradient to compare: for weight_norm that of the norms, per first index."""
    if change is not normalized:
        return wanted
    dims = tuple(range(1, value.dim()))
    norm = value.square().sum(dims, keepdim=True).sqrt()
    return (wanted * value).sum(dims, keepdim=True) / norm


# Biases start as zeros, for which weight_norm has no direction.
COMPUTED = [
    (change, name)
    for change in (parametrized, pruned, normalized)
    for name in ("w_gate_up", "w_down", "b_down", "w_gate", "shared_down")
    if change is not normalized or name != "b_down"
]


@pytest.mark.parametrize(("change", "name"), COMPUTED)
def test_computed_parameters(world: Any, change: Callable[..., Any], name: str) -> None:
    """Check parametrize, prune and weight_norm, on experts and on shared parameters."""
    world.run(computed_parameters, change, name)


class ParamWrapper(torch.nn.Module):
    """Adapts a parameter as peft's target_parameters do: it owns the adapters, and the parameter is
    parametrized only while the layer runs."""

    def __init__(self, base_layer: torch.nn.Module, parameter_name: str) -> None:
        super().__init__()
        self.base_layer, self.parameter_name = base_layer, parameter_name
        value = self.get()
        self.lora = torch.nn.Parameter(torch.zeros_like(value))
        value.requires_grad_(False)

    def get(self) -> torch.Tensor:
        """Return the parameter."""
        return getattr(self.base_layer, self.parameter_name)

    def forward(self, x: torch.Tensor) -> Any:
        """Run the layer with the sum of parameter and adapter."""
        added = Added(self.lora)
        parametrize.register_parametrization(self.base_layer, self.parameter_name, added)
        with parametrize.cached():
            found = self.base_layer(x)
        parametrize.remove_parametrizations(
            self.base_layer, self.parameter_name, leave_parametrized=False
        )
        return found


class Added(torch.nn.Module):
    """A parametrization that adds a tensor."""

    def __init__(self, more: torch.Tensor) -> None:
        super().__init__()
        self.more = (more,)  # in a tuple, so that it is no parameter of this module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum."""
        return x + self.more[0]


def adapted(rank: int) -> None:
    """Check gradients of adapters: those of experts belong to this rank, those of the router are
    summed."""
    with group_of(RANKS) as group:
        for name in ("w_gate_up", "w_gate"):
            plain = epic.torch.MoE(group, WISH, seed=0)
            model = ParamWrapper(epic.torch.MoE(group, WISH, seed=0), name)
            x = numbers(60 + rank, 6, HIDDEN)
            for run in (plain, model):
                out, loss = run(x)
                (out.square().sum() + loss).backward()
                epic.torch.sum_gradients(run, group)
            torch.testing.assert_close(model.lora.grad, getattr(plain, name).grad)


def test_adapters_of_parameters(world: Any) -> None:
    """Check adapters in the form that peft uses."""
    world.run(adapted)
