# SPDX-License-Identifier: Apache-2.0
"""Checks that max_sms= reaches every operator, forward and backward, and changes no bit on CPUs."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import epic.torch
from epic.torch.ops import SMS_SHIFT
from epic.torch.plans import MOST_SMS
from parts import EXPERTS, HIDDEN, LAYER, SIZES, UNEVEN, Data, check_round, group_of, same, through


class Limits(TorchDispatchMode):
    """Record the limit that each EPIC operator gets, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, set[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Read the limit from `group` or `layer` among the arguments."""
        name, _, overload = str(func).removeprefix("epic.").partition(".")
        if func.namespace == "epic" and "out" not in overload:
            names = [a.name for a in func._schema.arguments]
            place = names.index("layer" if "layer" in names else "group")
            self.found.setdefault(name, set()).add(args[place] >> SMS_SHIFT)
        return func(*args, **(kwargs or {}))


def test_operators() -> None:
    """Check that a plan's limit applies to the calls on it, unless a call has a limit of
    its own."""
    with epic.torch.Group(**{**SIZES, "num_ranks": 1}) as group:
        x, w, ids, _ = Data().mine(0)
        with Limits() as limits:
            plan = epic.torch.plan(group, LAYER, ids, max_sms=8)
            recv, slot = epic.torch.dispatch(plan, x, w)
            out = epic.torch.combine(plan, recv, slot, max_sms=4)
            other, again, _ = epic.torch.plan_dispatch(group, LAYER, ids, x, w, max_sms=16)
            out = out + epic.torch.combine(other, again)
            (out.sum() + epic.torch.sum(group, x, max_sms=2).sum()).backward()
        assert limits.found == {
            "plan": {8},
            "dispatch": {8},
            "combine": {4, 16},
            "plan_dispatch": {16},
            "dispatch_backward": {8, 16},
            "combine_backward": {4, 16},
            "sum_": {2},
        }


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    """Check that compiled calls with a limit return the results of calls without one."""
    with epic.torch.Group(**{**SIZES, "num_ranks": 1}) as group:
        x, w, ids, _ = Data().mine(0)

        def step(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor, **more: Any) -> Any:
            plan, recv, slot = epic.torch.plan_dispatch(group, LAYER, ids, x, w, **more)
            other = epic.torch.plan(group, LAYER, ids, **more)
            out = epic.torch.combine(other, recv, slot)
            return out, plan.counted("expert_rows"), other.counted("load")

        run = torch.compile(lambda *args: step(*args, max_sms=5), fullgraph=True, backend=backend)
        found, wanted = run(x, w, ids), step(x, w, ids)
        assert same([v.detach() for v in found], [v.detach() for v in wanted])
    torch._dynamo.reset()


@pytest.mark.parametrize("masked", [False, True], ids=["core", "composed"])
def test_layer(masked: bool) -> None:
    """Check that the limit of a layer reaches all its operations and changes no result."""
    options = epic.torch.Moe.of(num_experts=8, top_k=2, hidden=16, inner=12)
    with epic.torch.Group(**{**SIZES, "num_ranks": 1}) as group:
        layer = epic.torch.MoE(group, options)
        x = torch.randn(6, 16, requires_grad=True)
        more: dict[str, Any] = {"token_mask": torch.ones(6, dtype=torch.bool)} if masked else {}
        results = []
        for limit in (0, 12):
            with Limits() as limits:
                found = epic.torch.moe(group, options, x, layer.weights(), max_sms=limit, **more)
                d = torch.autograd.grad(found.out.square().sum(), (x, layer.w_down))
            results.append([found.out.detach(), *d])
            # these have no group on CPUs
            local = {"route", "route_backward", "experts", "experts_backward"}
            every = {name: seen for name, seen in limits.found.items() if name not in local}
            assert every and all(seen == {limit} for seen in every.values()), every
        assert same(*results)


def limited(rank: int, ep: int) -> None:
    """Run the round trip of test_steps.py with a limit and compare with float64."""
    with group_of(ep) as group:
        check_round(through(group, False, max_sms=2), Data(UNEVEN).mine(rank), 2e-6)
        check_round(through(group, True, max_sms=2), Data(UNEVEN).mine(rank), 2e-6)


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_round_trip(world: Any, ep: int) -> None:
    """Check uneven tokens on every number of ranks."""
    world.run(limited, ep)


def test_wrong_limits() -> None:
    """Check that a limit that is not an integer of at least 0 is refused."""
    with epic.torch.Group(**{**SIZES, "num_ranks": 1}) as group:
        x, w, ids, _ = Data().mine(0)
        plan = epic.torch.plan(group, LAYER, ids)
        options = epic.torch.Experts(hidden=HIDDEN, inner=4)
        weights = epic.torch.ExpertWeights(
            torch.ones(EXPERTS, HIDDEN, 8), torch.ones(EXPERTS, 4, HIDDEN)
        )
        rows = torch.ones(plan.capacity, HIDDEN)
        counts = (plan.expert_rows, plan.expert_tokens)
        calls: list[Any] = [
            lambda n: epic.torch.plan(group, LAYER, ids, max_sms=n),
            lambda n: epic.torch.plan_dispatch(group, LAYER, ids, x, w, max_sms=n),
            lambda n: epic.torch.dispatch(plan, x, w, max_sms=n),
            lambda n: epic.torch.combine(plan, rows, max_sms=n),
            lambda n: epic.torch.sum(group, x, max_sms=n),
            lambda n: epic.torch.experts(options, rows, *counts, weights, None, group, max_sms=n),
        ]
        for call in calls:
            for wrong in (-1, 1.5, MOST_SMS + 1):
                with pytest.raises(
                    epic.torch.EpicArgumentError, match=r"max_sms .*from 0 to 32767"
                ):
                    call(wrong)
