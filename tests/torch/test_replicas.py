# SPDX-License-Identifier: Apache-2.0
"""Tests that replicas of experts have the results and gradients of their logical experts.

Also tests layers with distinct=True.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import cases
import epic.torch
from epic.torch.experts import slab_mm
from parts import RANKS, SIZES, choices, group_of, numbers, same
from test_errors import expect_error
from test_moe import EXPERT_WEIGHTS, WISH, mine, whole

# The logical expert of each of twelve experts.
TWELVE = [0, 3, 1, 2, 3, 4, 5, 3, 6, 7, 0, 4]
LAYER = epic.torch.Layer(12, 3, num_logical=8)


def replicated(rank: int, name: str, ep: int) -> tuple[Any, ...]:
    """Return the options and one rank's inputs of a case with replicas."""
    case = cases.CASES[name]
    wish = cases.options(case, ep)
    layer = replace(wish.layer, num_experts=len(TWELVE), num_logical=cases.EXPERTS)
    wish = replace(wish, layer=layer, experts=replace(wish.experts, num_local_experts=0))
    x, w, ct, more = mine(case, rank, 1)
    local = len(TWELVE) // ep
    own = TWELVE[rank % ep * local :][:local]
    for key in EXPERT_WEIGHTS:
        if key in w:
            w[key] = w[key].detach()[own].clone().requires_grad_()
    return wish, x, w, ct, {**more, "logical_of_expert": TWELVE}


def layer_step(rank: int, name: str, ep: int, how: str) -> Any:
    """Run one step, as in test_moe."""
    with group_of(ep) as group:
        wish, x, w, ct, more = replicated(rank, name, ep)
        if how == "composed":
            more["grouped_mm"] = slab_mm
        run: Any = epic.torch.moe
        if how == "compiled":
            run = torch.compile(run, fullgraph=True, backend="aot_eager")
        got = run(group, wish, x, epic.torch.MoeWeights(**w), **more)
        ((got.out * ct).sum() + got.loss * (ep / RANKS)).backward()
    torch._dynamo.reset()
    of_logical = np.zeros(cases.EXPERTS, int)
    np.add.at(of_logical, TWELVE, got.load.numpy())
    assert got.load_of_ids.tolist() == of_logical.tolist()
    gradients = {n: v.grad.numpy() for n, v in w.items() if v.grad is not None}
    return got.out.detach().numpy(), float(got.loss), x.grad.numpy(), gradients


@pytest.mark.parametrize("how", ["core", "composed", "compiled"])
@pytest.mark.parametrize(("name", "ep"), [("sigmoid", 4), ("biases", 2), ("shared", 1)])
def test_float64(world: Any, name: str, ep: int, how: str) -> None:
    """Check that each copy gets the gradient of its logical expert."""
    answers = world.run(layer_step, name, ep, how)
    out, loss, d_x, d_w = cases.true_step(cases.CASES[name], RANKS // ep)
    d_w = {n: v[TWELVE] if n in EXPERT_WEIGHTS else v for n, v in d_w.items()}
    got = whole(answers, ep)
    cases.compare(got, (out, loss, d_x, d_w))
    for logical in range(cases.EXPERTS):
        copies = [
            d for d, number in zip(got[3]["w_down"], TWELVE, strict=True) if number == logical
        ]
        assert all(np.array_equal(copy, copies[0]) for copy in copies)


def steps_of(rank: int) -> None:
    """Check experts of the caller: `sum_replica_grads` adds gradients in backward, and sum_replicas
    adds accumulated gradients, and can be differentiated."""
    x, ids = numbers(80 + rank, 6, 4), choices(90 + rank, 6)
    with group_of(4) as group:
        plan, recv, _ = epic.torch.plan_dispatch(group, LAYER, ids, x, logical_of_expert=TWELVE)
        assert plan.logical_load is not None and plan.load_of_ids.shape == (8,)
        assert int(plan.load.sum()) == int(plan.load_of_ids.sum())
        expert = torch.repeat_interleave(torch.arange(3), plan.expert_rows)
        found: list[torch.Tensor] = []
        for kept in (False, True):
            scale = torch.ones(3, 4, requires_grad=True)
            w = scale if kept else epic.torch.sum_replica_grads(plan, scale)
            assert w is not None
            y = torch.zeros_like(recv).index_copy(
                0, torch.arange(len(expert)), recv[: len(expert)] * w[expert]
            )
            epic.torch.combine(plan, y).sum().backward()
            grad = scale.grad
            assert grad is not None
            found.append(epic.torch.sum_replicas(plan, grad) if kept else grad)
        assert same(found[:1], found[1:]) and found[0].any()
        v = numbers(70 + rank, 3, 2, 5).requires_grad_()
        total = epic.torch.sum_replicas(plan, v)
        (d_v,) = torch.autograd.grad(total, v, numbers(60, 3, 2, 5))
        again = epic.torch.sum_replicas(plan, numbers(60, 3, 2, 5))
        assert same([d_v], [again]) and total.shape == v.shape


def test_tied_and_summed(world: Any) -> None:
    """Run the checks on four ranks."""
    world.run(steps_of)


def trained(rank: int) -> Any:
    """Train a layer whose copies start with equal values, and return its parameters."""
    wish = replace(WISH, layer=replace(WISH.layer, num_experts=12, num_logical=8))
    with group_of(4) as group:
        plain = epic.torch.MoE(group, WISH, bias_rate=0.1, seed=0)
        layer = epic.torch.MoE(group, wish, bias_rate=0.1, logical_of_expert=TWELVE, seed=0)
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
        for step in range(3):
            x = numbers(30 + rank + 4 * step, 6, 16)
            out, loss = layer(x)
            if step == 0:
                torch.testing.assert_close(out, plain(x)[0])
            optimizer.zero_grad()
            (out.square().sum() + loss).backward()
            layer.sum_gradients()
            optimizer.step()
        layer.update_bias()
        assert layer.bias is not None and layer.bias.shape == (8,) and layer.bias.any()
        state = layer.state_dict()
        assert state["logical_of_expert"].tolist() == TWELVE
        return layer.w_down.detach().numpy()


@pytest.mark.parametrize("kind", [tuple, list, torch.tensor, np.array])
def test_forms_of_the_table(kind: Any) -> None:
    """Check that a module takes the table also as a tensor or an array."""
    wish = replace(WISH, layer=replace(WISH.layer, num_experts=12, num_logical=8))
    with epic.torch.Group(num_ranks=1, max_tokens=4, max_row_bytes=4096) as group:
        table = kind(TWELVE)
        layer = epic.torch.MoE(group, wish, logical_of_expert=table)
        if kind is not tuple:
            table[0] = 7  # the layer keeps its own copy
        assert list(layer.local_ids()) == TWELVE and layer.logical_of_expert is not None
        assert layer.logical_of_expert.tolist() == TWELVE
        assert all(
            torch.equal(layer.w_down[e], layer.w_down[TWELVE.index(TWELVE[e])]) for e in range(12)
        )


def test_module(world: Any) -> None:
    """Check that copies stay equal, bit by bit."""
    experts = np.concatenate(world.run(trained))
    for logical in range(8):
        copies = experts[np.array(TWELVE) == logical]
        assert np.array_equal(copies, np.broadcast_to(copies[:1], copies.shape))


def test_wrong_tables() -> None:
    """Check that num_logical needs its table, and that float64 is refused."""
    ids = choices(1, 4)
    with epic.torch.Group(num_ranks=1, **SIZES) as group:
        for layer, table in ((LAYER, None), (epic.torch.Layer(8, 3), TWELVE)):
            with pytest.raises(
                epic.torch.EpicArgumentError, match="given if num_logical is above 0"
            ):
                epic.torch.plan(group, layer, ids, logical_of_expert=table)
        with pytest.raises(epic.torch.EpicArgumentError, match=r"shape \[3\]: must be \[12\]"):
            epic.torch.plan(group, LAYER, ids, logical_of_expert=[0, 1, 2])
        plan = epic.torch.plan(group, LAYER, ids, logical_of_expert=TWELVE)
        with pytest.raises(epic.torch.EpicUnsupportedError, match="float64"):
            epic.torch.sum_replicas(plan, torch.ones(12, 2, dtype=torch.float64))
        with pytest.raises(epic.torch.EpicArgumentError, match=r"must be \[12, ...\]"):
            epic.torch.sum_replica_grads(plan, torch.ones(3, 2))


def twice(rank: int) -> None:
    """Let one rank name an expert twice for a token; every rank gets the error."""
    layer = epic.torch.Layer(8, 3, distinct=True)
    ids = choices(5 + rank, 6, none=0)
    with group_of(4) as group:
        good = epic.torch.plan(group, layer, ids)
        assert good.capacity <= epic.torch.plan(group, epic.torch.Layer(8, 3), ids).capacity
        if rank == 2:
            ids[4] = torch.tensor([6, 1, 6])
        expect_error(
            lambda: epic.torch.plan(group, layer, ids), "EPIC_EINVAL", "rank 2", "token 4", "6"
        )


def test_distinct(world: Any) -> None:
    """Check that duplicate ids are refused with distinct=True, and that it needs less memory."""
    world.run(twice)
