# SPDX-License-Identifier: Apache-2.0
"""Tests Placement: experts that move to the members of a group when ranks have left it."""

import copy
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import epic.torch
import reference
from parts import SIZES, numbers, same
from world import World

RANKS, LOST, LOCAL, LOGICAL, HIDDEN, INNER, TOKENS = 4, 2, 3, 8, 16, 12, 7
MEMBERS = (0, 1, 3)
FIRST = [0, 1, 2, 3, 4, -1, 5, 6, 7, 1, 7, 0]  # rank 2 has the only replicas of 5 and 6
AFTER = [6, 1, 2, 3, 4, 5, -1, -1, -1, 1, 7, 0]
SEED = 7


def options_of(ranks: int) -> epic.torch.Moe:
    """Return the options of the layer for a number of ranks."""
    sizes = {"hidden": HIDDEN, "inner": INNER, "num_experts": ranks * LOCAL}
    return epic.torch.Moe.of(
        **sizes, num_logical=LOGICAL, top_k=2, balance_coeff=0.01, sum_order="by_rank"
    )


def layer_of(group: epic.torch.Group, table: list[int]) -> epic.torch.MoE:
    """Return a layer with a placement."""
    options = options_of(group.num_ranks)
    placement = epic.torch.Placement(group, options.layer, table)
    return epic.torch.MoE(group, options, logical_of_expert=placement, seed=SEED)


def run_step(layer: epic.torch.MoE, place: int) -> list[torch.Tensor]:
    """Return results and gradients of member number `place`, whose tokens depend on it."""
    x, ct = numbers(place, TOKENS + place, HIDDEN), numbers(9 + place, TOKENS + place, HIDDEN)
    x.requires_grad_()
    layer.zero_grad()
    out, loss = layer(x)
    ((out * ct).sum() + loss).backward()
    layer.sum_gradients()
    assert x.grad is not None
    gradients = [p.grad for p in (layer.w_gate, layer.w_gate_up, layer.w_down)]
    return [out.detach(), loss.detach(), x.grad, *gradients]


def whole_weights() -> dict[str, torch.Tensor]:
    """Return the initial parameters of all logical experts and of the router."""
    options = epic.torch.Moe.of(num_experts=LOGICAL, top_k=2, hidden=HIDDEN, inner=INNER)
    with epic.torch.Group(num_ranks=1, **SIZES) as group:
        layer = epic.torch.MoE(group, options, seed=SEED)
    return {name: p.detach() for name, p in layer.named_parameters()}


def lose_rank(rank: int, is_compiled: bool) -> Any:
    """Rank LOST closes its group; the others place its experts on themselves and go on.

    is_compiled: whether to check a layer that was compiled before.
    """
    group = epic.torch.Group(**SIZES)
    layer = layer_of(group, FIRST)
    placement = layer.placement
    assert placement is not None and placement.absent == ()
    table = placement.logical_of_expert
    address = table.data_ptr()
    assert layer.logical_of_expert is table
    if is_compiled:
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        compiled(numbers(rank, TOKENS, HIDDEN))
    dist.barrier()  # otherwise a rank that is still in the step could get the error
    if rank == LOST:
        group.close()
        return None
    with pytest.raises(epic.torch.EpicError):
        run_step(layer, rank)
    assert group.shrink().ranks == MEMBERS
    assert placement.absent == (5, 6)
    with pytest.raises(epic.torch.EpicError, match="no replica of logical expert 5"):
        run_step(layer, rank)
    saved, loaded = whole_weights(), []

    def load(logical: int, local: int) -> None:
        loaded.append((logical, local))
        with torch.no_grad():
            layer.w_gate_up[local].copy_(saved["w_gate_up"][logical])
            layer.w_down[local].copy_(saved["w_down"][logical])

    placement.restore(load)
    assert placement.logical_of_expert.tolist() == AFTER and placement.absent == ()
    assert placement.logical_of_expert.data_ptr() == address
    found = run_step(layer, MEMBERS.index(rank))
    if is_compiled:
        x = numbers(rank, TOKENS, HIDDEN)
        with torch.compiler.set_stance("fail_on_recompile"):
            assert torch.equal(compiled(x)[0], layer(x)[0])
        torch._dynamo.reset()
    group.close()
    return loaded, found


def fresh_steps() -> list[list[torch.Tensor]]:
    """Return the results of a new group of three ranks with the same experts on them."""
    bootstraps = epic.torch.threads(len(MEMBERS))
    table = [logical for r in MEMBERS for logical in AFTER[r * LOCAL : (r + 1) * LOCAL]]

    def run(place: int) -> list[torch.Tensor]:
        with epic.torch.Group(bootstrap=bootstraps[place], **SIZES) as group:
            return run_step(layer_of(group, table), place)

    with ThreadPoolExecutor(len(MEMBERS)) as pool:
        return list(pool.map(run, range(len(MEMBERS))))


def check_with_float64(found: list[list[torch.Tensor]]) -> None:
    """Compare the results with the formulas in float64, which know nothing of ranks."""
    sizes = [TOKENS + place for place in range(len(MEMBERS))]
    x, ct = (
        np.concatenate(
            [numbers(s + i, n, HIDDEN, dtype=torch.float64) for i, n in enumerate(sizes)]
        )
        for s in (0, 9)
    )
    w = {name: p.double().numpy() for name, p in whole_weights().items()}
    out, loss, d_x, d_w = reference.moe(reference.Options(2, balance_coeff=0.01), x, w, ct, 1.0)
    got = [torch.cat([r[i] for r in found]).numpy() for i in (0, 2)]
    assert reference.relative(got[0], out) < 1e-5 and reference.relative(got[1], d_x) < 1e-5
    assert abs(sum(float(r[1]) for r in found) - loss) < 1e-5 * abs(loss)
    for r, place in zip(MEMBERS, found, strict=True):
        mine = AFTER[r * LOCAL : (r + 1) * LOCAL]
        for gradient, name in zip(place[3:], ("w_gate", "w_gate_up", "w_down"), strict=True):
            wanted = d_w[name] if name == "w_gate" else d_w[name][mine]
            assert reference.relative(gradient.numpy(), wanted) < 1e-5


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.night)])
def test_lost_rank(world: World, is_compiled: bool) -> None:
    """Lost experts are loaded, all others stay; the bits are those of a new smaller group."""
    answers = world.run(lose_rank, is_compiled)
    found = [answers[rank] for rank in MEMBERS]
    assert [loaded for loaded, _ in found] == [[(6, 0)], [(5, 2)], []]
    results = [results for _, results in found]
    check_with_float64(results)
    for got, wanted in zip(results, fresh_steps(), strict=True):
        assert same(got, wanted)


def stub(ranks: int, members: Any) -> Any:
    """Return an object with what a placement uses of a group."""
    return SimpleNamespace(
        num_ranks=ranks, members=SimpleNamespace(ranks=members), device="cpu", rank=members[0]
    )


def test_random_tables() -> None:
    """Check the rules of new tables for random tables and random losses."""
    draw = random.Random(3)
    for _ in range(300):
        ranks, local = draw.randint(2, 6), draw.randint(1, 5)
        logical = draw.randint(1, ranks * local)
        table = [*range(logical), *draw.choices(range(-1, logical), k=ranks * local - logical)]
        draw.shuffle(table)
        layer = epic.torch.Layer(ranks * local, 1, num_logical=logical, drop_absent=True)
        group = stub(ranks, tuple(range(ranks)))
        placement = epic.torch.Placement(group, layer, table)
        members = sorted(draw.sample(range(ranks), draw.randint(1, ranks)))
        group.members.ranks, group.rank = tuple(members), draw.choice(members)
        mine = [e for e in range(ranks * local) if e // local in members]
        before = Counter(table[e] for e in mine)
        lost = set(range(logical)) - set(before)
        assert placement.absent == tuple(sorted(lost))
        loaded: list[tuple[int, int]] = []
        placement.restore(lambda *what, to=loaded: to.append(what))  # type: ignore[misc]
        after = placement.logical_of_expert.tolist()
        changed = [e for e in mine if after[e] != table[e]]
        assert [e for e in range(ranks * local) if after[e] == -1 and e not in mine] == [
            e for e in range(ranks * local) if e not in mine
        ]
        assert set(before) - {-1} <= {after[e] for e in mine}
        assert len(placement.absent) == max(0, logical - len(mine))
        assert {after[e] for e in changed} | set(placement.absent) == lost
        assert len(changed) == len(lost) - len(placement.absent)
        if sum(table[e] == -1 for e in mine) >= len(lost):
            assert all(table[e] == -1 for e in changed)
        first = group.rank * local
        assert loaded == [(after[e], e - first) for e in changed if e // local == group.rank]


def test_spreads_loads() -> None:
    """Ranks with equally many replicas load equally many experts."""
    group = stub(4, (0, 1, 2, 3))
    placement = epic.torch.Placement(group, epic.torch.Layer(24, 1, num_logical=12))
    group.members.ranks, group.rank = (0, 2, 3), 0
    table = [0, 1, 2, 3, 4, 5, *[-1] * 6, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert placement.find_table(placement.logical_of_expert.tolist()) == table  # nothing is lost
    group.members.ranks = (0, 2)
    rows = placement.find_table(placement.logical_of_expert.tolist())
    assert [sum(logical > 5 for logical in rows[r * 6 : r * 6 + 6]) for r in (0, 2)] == [3, 3]


def test_arguments() -> None:
    """Errors name the argument; after an error in load the table is unchanged."""
    make, layer = epic.torch.Placement, epic.torch.Layer
    with epic.torch.Group(num_ranks=1, **SIZES) as group:
        four = layer(4, 1, num_logical=2)
        cases: tuple[tuple[Any, Any, str], ...] = (
            (layer(4, 1), None, "num_logical is 0: must be above 0"),
            (four, [0, 1, 0], "has 3 elements: must have 4"),
            (four, [0, 1, 2, 0], r"expert\[2\] is 2: must be an integer from -1 to 1"),
            (four, [0, 1, 0.5, 1], r"expert\[2\] is 0.5: must be an integer from -1"),
            (four, [0, 0, -1, 0], "no replica of logical expert 1"),
        )
        for wrong, table, sentence in cases:
            with pytest.raises(epic.torch.EpicArgumentError, match=sentence):
                make(group, wrong, table)
        with pytest.raises(epic.torch.EpicArgumentError, match="layer is a Moe: must be a Layer"):
            make(group, options_of(4))  # type: ignore[arg-type]
        with pytest.raises(epic.torch.EpicUnsupportedError, match='sum_order is "tree"'):
            make(group, layer(4, 1, num_logical=2, sum_order="tree"))
        with pytest.raises(epic.torch.EpicArgumentError, match="num_experts is 4: must be a mult"):
            make(stub(3, (0, 1, 2)), four)
        with pytest.raises(epic.torch.EpicArgumentError, match="is a Placement of"):
            epic.torch.MoE(group, options_of(4), logical_of_expert=make(group, four))
    two = stub(2, (0, 1))
    placement = make(two, four, [0, 0, 1, 1])
    two.members.ranks = (0,)

    def fail(*_: int) -> None:
        raise OSError("no file")

    with pytest.raises(OSError, match="no file"):
        placement.restore(fail)
    assert placement.logical_of_expert.tolist() == [0, 0, 1, 1]
    two.members.ranks = (0, 1)
    full = make(two, layer(4, 1, num_logical=3), [0, 1, 2, 2])
    two.members.ranks = (0,)
    with pytest.raises(epic.torch.EpicArgumentError, match="2 experts of the members must be at"):
        full.restore(lambda *_: None)


def test_copies() -> None:
    """A copy of a module shares the placement; its state does not contain the table."""
    with epic.torch.Group(num_ranks=1, **SIZES) as group:
        options = epic.torch.Moe.of(
            num_experts=4, num_logical=2, top_k=1, hidden=HIDDEN, inner=INNER
        )
        placement = epic.torch.Placement(group, options.layer)
        layer = epic.torch.MoE(group, options, logical_of_expert=placement)
        other = copy.deepcopy(layer)
        assert other.placement is placement
        assert other.logical_of_expert is placement.logical_of_expert
        assert "logical_of_expert" not in layer.state_dict()
        assert torch.equal(layer.w_down[0], layer.w_down[2])
        x = torch.ones(3, HIDDEN)
        found = [
            epic.torch.moe(group, options, x, layer.weights(), logical_of_expert=table).out
            for table in (placement, placement.logical_of_expert)
        ]
        assert torch.equal(*found)


def test_inference_mode() -> None:
    """A placement that was made in inference mode can be restored outside of it."""
    group = stub(2, (0, 1))
    with torch.inference_mode():
        placement = epic.torch.Placement(group, epic.torch.Layer(4, 1, num_logical=2))
    group.members.ranks = (0,)
    placement.restore(lambda *_: None)
    assert placement.logical_of_expert.tolist() == [0, 1, -1, -1]


def test_state_of_another_table() -> None:
    """A state from before experts moved is refused, because its rows are other experts."""
    bootstraps = epic.torch.threads(2)

    def run(rank: int) -> None:
        with epic.torch.Group(bootstrap=bootstraps[rank], **SIZES) as group:
            options = epic.torch.Moe.of(
                num_experts=6, num_logical=3, top_k=1, hidden=HIDDEN, inner=INNER
            )
            placement = epic.torch.Placement(group, options.layer, [0, 0, 1, 2, 2, 1])
            layer = epic.torch.MoE(group, options, logical_of_expert=placement)
            state = {name: value.clone() for name, value in layer.state_dict().items()}
            layer.load_state_dict(state)
            if rank == 1:
                group.leave()
                return
            group.shrink()
            placement.restore(lambda *_: None)
            before = layer.w_down.clone()
            with pytest.raises(epic.torch.EpicArgumentError, match=r"replicas of 0, 0, 1.*2, 0, 1"):
                layer.load_state_dict(state)
            assert torch.equal(layer.w_down, before)
            layer.load_state_dict(layer.state_dict())
            router = {name: value for name, value in state.items() if name == "w_gate"}
            layer.load_state_dict(router, strict=False)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
