# SPDX-License-Identifier: Apache-2.0
"""Tests the whole layer against results in float64, and against the bits of the core.

The tests run it as a function and as a module, composed and compiled.
"""

import copy
import io
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import cases
import core_layer
import epic.torch
from epic import _native
from epic.torch.experts import mlp, slab_mm
from parts import RANKS, SIZES, group_of, numbers, poisoned_mm, same
from reference import relative

EXPERT_WEIGHTS = ("w_gate_up", "w_down", "b_gate_up", "b_down")
ROWS = cases.BATCH * cases.LENGTH // RANKS


def mine(case: dict[str, Any], rank: int, ep: int) -> tuple[Any, ...]:
    """Return x, weights, output gradient and tables of one rank."""
    x, ct = (torch.from_numpy(v.reshape(RANKS, ROWS, -1)[rank].copy()) for v in cases.arrays())
    local = cases.EXPERTS // ep
    w = {}
    for name, value in cases.weights(case).items():
        part = (
            value.reshape(ep, local, *value.shape[1:])[rank % ep]
            if name in EXPERT_WEIGHTS
            else value
        )
        w[name] = torch.from_numpy(part.copy()).requires_grad_(name != "bias")
    more = {n: torch.from_numpy(v) for n, v in cases.tables(case).items()}
    if "token_ids" in more:
        more["token_ids"] = more["token_ids"].reshape(RANKS, ROWS)[rank]
    return x.requires_grad_(), w, ct, more


def layer_step(rank: int, name: str, ep: int, options: dict[str, Any]) -> Any:
    """Return out, loss, d_x and d_weights of one rank."""
    case = cases.CASES[name]
    with group_of(ep) as group:
        x, w, ct, more = mine(case, rank, ep)
        wish = cases.options(case, ep)
        if options.pop("compiled", False):
            run = torch.compile(epic.torch.moe, fullgraph=True, backend="aot_eager")
        else:
            run = epic.torch.moe
        if product := options.pop("composed", None):
            more["grouped_mm"] = {"plain": slab_mm, "poisoned": poisoned_mm}[product]
        got = run(group, wish, x, epic.torch.MoeWeights(**w), **more)
        ((got.out * ct).sum() + got.loss * (ep / RANKS)).backward()
    torch._dynamo.reset()
    gradients = {n: v.grad.numpy() for n, v in w.items() if v.grad is not None}
    return got.out.detach().numpy(), float(got.loss), x.grad.numpy(), gradients


def whole(answers: list[Any], ep: int) -> tuple[Any, ...]:
    """Join the results of all ranks into the form of cases.true_step."""
    shape = (cases.BATCH, cases.LENGTH, cases.HIDDEN)
    out, d_x = (np.stack([a[i] for a in answers]).reshape(shape) for i in (0, 2))
    loss = sum(a[1] for a in answers) * ep / RANKS
    d_w = {}
    for name in answers[0][3]:
        parts = [a[3][name] for a in answers]
        if name in EXPERT_WEIGHTS:
            d_w[name] = np.concatenate([sum(parts[r::ep]) for r in range(ep)])
        else:
            d_w[name] = sum(parts)
    return out, loss, d_x, d_w


@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("name", cases.CASES)
def test_float64(world: Any, name: str, ep: int) -> None:
    """Compare every case with float64, on every number of ranks, with random output gradients."""
    answers = world.run(layer_step, name, ep, {})
    cases.compare(whole(answers, ep), cases.true_step(cases.CASES[name], RANKS // ep))


@pytest.mark.parametrize("name", [n for n in cases.CASES if n != "table"])
def test_the_cores_bits(world: Any, name: str) -> None:
    """Compare with the bits of the C layer, which threads of this process call without torch."""
    case = cases.CASES[name]
    answers = world.run(layer_step, name, 4, {})
    config = _native.Config(num_ranks=4, **{n: SIZES[n] for n in ("max_tokens", "max_row_bytes")})
    per_rank = []
    for rank in range(4):
        x, w, ct, _ = mine(case, rank, 4)
        arrays = {n: v.detach().numpy() for n, v in w.items()}
        per_rank.append((x.detach().numpy(), arrays, ct.numpy()))
    options = cases.options(case, 4)
    layer = options.layer
    bound = _native.size("epic_capacity_bound_v1", config, layer)
    filled = epic.Moe(
        layer,
        options.router,
        options.experts,
        options.shared,
        options.balance_coeff,
        options.z_coeff,
        capacity=bound,
    )
    for got, wanted in zip(answers, core_layer.run(config, filled, per_rank), strict=True):
        assert np.array_equal(got[0], wanted[0]) and np.array_equal(got[2], wanted[1])
        for key, value in got[3].items():
            assert np.array_equal(value, wanted[2][key]), key


@pytest.mark.parametrize("product", ["plain", "poisoned"])
@pytest.mark.parametrize("name", [n for n in cases.CASES if n != "table"])
def test_composed(world: Any, name: str, product: str) -> None:
    """Check layers around the caller's product, also one that leaves NaN after the last slab."""
    answers = world.run(layer_step, name, 4, {"composed": product})
    cases.compare(whole(answers, 4), cases.true_step(cases.CASES[name], 1))


@pytest.mark.parametrize("name", ["sigmoid", "shared"])
def test_compiled(world: Any, name: str) -> None:
    """Check that forward and backward compile to one graph each and give the same bits."""
    eager = world.run(layer_step, name, 4, {})
    for a, b in zip(world.run(layer_step, name, 4, {"compiled": True}), eager, strict=True):
        assert np.array_equal(a[0], b[0]) and np.array_equal(a[2], b[2]) and a[1] == b[1]
        assert all(np.array_equal(a[3][key], b[3][key]) for key in b[3])


def test_gradcheck() -> None:
    """Run gradcheck on all parameters and both outputs, in float64."""
    options = epic.torch.Moe.of(
        num_experts=3, top_k=2, hidden=4, inner=3, score="sigmoid", normalize="sum",
        balance_coeff=0.3, z_coeff=0.2, shared=epic.Experts(1, 4, 2),
    )  # fmt: skip
    shapes = [(4, 3), (3, 4, 6), (3, 3, 4), (3,), (3, 6), (3, 4), (1, 4, 4), (1, 2, 4), (4,)]
    names = (
        "w_gate w_gate_up w_down b_gate b_gate_up b_down shared_gate_up shared_down w_shared_gate"
    ).split()
    leaves = [numbers(i, *s, dtype=torch.float64).requires_grad_() for i, s in enumerate(shapes)]
    x = numbers(20, 5, 4, dtype=torch.float64).requires_grad_()
    with epic.torch.Group(max_tokens=8, max_row_bytes=64) as group:

        def run(x: torch.Tensor, *w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            weights = epic.torch.MoeWeights(**dict(zip(names, w, strict=True)))
            return epic.torch.moe(group, options, x, weights)[:2]

        assert torch.autograd.gradcheck(run, (x, *leaves))


# --------------------------------------------------------------------- router, experts ----


def test_router_and_losses() -> None:
    """Run gradcheck and opcheck on router and losses, and compare the choices with the
    reference."""
    router = epic.torch.Router(8, 3, score="sigmoid", normalize="sum", scale=2.5)
    z = numbers(1, 6, 8, dtype=torch.float64).requires_grad_()
    bias = numbers(2, 8)
    chosen, weights = epic.torch.route(router, z, bias=bias)
    best = (torch.sigmoid(z) + bias).argsort(dim=1, descending=True)[:, :3]
    assert torch.equal(chosen.long(), best) and weights.dtype == torch.float64
    assert not chosen.requires_grad
    check = torch.autograd.gradcheck
    assert check(lambda v: epic.torch.route(router, v, bias=bias)[1], z)
    load = torch.bincount(chosen.reshape(-1).long(), minlength=8).int()
    known: dict[str, Any] = {"coeff": 0.7, "total_tokens": 6}
    assert check(lambda v: epic.torch.balance_loss(router, v, load=load, **known), z)
    by_sequence = {"topk_idx": chosen, "sequence_tokens": 3}
    assert check(lambda v: epic.torch.balance_loss(router, v, **by_sequence, **known), z)
    assert check(lambda v: epic.torch.z_loss(router, v, **known), z)
    numbers_of = tuple(router.numbers().values())
    ops, opcheck, f = torch.ops.epic, torch.library.opcheck, z.detach().float()
    one = torch.ones(1)
    opcheck(ops.route.default, (f, bias, None, None, None, 0, *numbers_of))
    opcheck(ops.route.default, (f, bias, None, None, chosen, 0, *numbers_of))
    opcheck(ops.route_backward.default, (f, chosen, weights.detach().float(), 0, *numbers_of))
    opcheck(ops.balance_loss.default, (f, load, None, 6, 0, 0.5, 0, *numbers_of))
    opcheck(ops.balance_loss_backward.default, (f, load, None, one, 6, 0, 0.5, 0, *numbers_of))
    opcheck(ops.z_loss.default, (f, 6, 0.5, 0, *numbers_of))
    opcheck(ops.z_loss_backward.default, (f, one, 6, 0.5, 0, *numbers_of))
    nothing = torch.empty_like
    into = (nothing(chosen), None)
    opcheck(ops.route_out.default, (f, bias, None, None, None, 0, *numbers_of, *into))
    opcheck(ops.z_loss_out.default, (f, 6, 0.5, 0, *numbers_of, nothing(one)))
    for call in (ops.balance_loss_out.default, ops.balance_loss_backward_out.default):
        more, out = ((), one) if "backward" not in str(call) else ((one,), f)
        opcheck(call, (f, load, None, *more, 6, 0, 0.5, 0, *numbers_of, nothing(out)))
    d_weights = weights.detach().float()
    opcheck(ops.route_backward_out.default, (f, chosen, d_weights, 0, *numbers_of, nothing(f)))
    opcheck(ops.z_loss_backward_out.default, (f, one, 6, 0.5, 0, *numbers_of, nothing(f)))
    opcheck(ops.bias_update_.default, (bias.clone(), load, 0.1, 0))
    opcheck(ops.count_load_.default, (load.clone(), load))
    moved = bias.clone()
    epic.torch.bias_update(moved, load, 0.25)
    step = torch.sign(load.float().mean() - load) * 0.25
    assert torch.equal(moved, bias + step)


@pytest.mark.parametrize("weighting", ["late", "early", "input"])
def test_experts(weighting: str) -> None:
    """Run gradcheck on the experts, and compare with the caller's product."""
    options = epic.torch.Experts(hidden=4, inner=3, weighting=weighting, activation="gelu")
    rows, tokens = (torch.tensor(v, dtype=torch.int32) for v in ([2, 0, 3], [2, 0, 3]))
    x = numbers(1, 5, 4, dtype=torch.float64).requires_grad_()
    shapes = [(3, 4, 6), (3, 3, 4), (3, 6), (3, 4)]
    w = [numbers(i, *s, dtype=torch.float64).requires_grad_() for i, s in enumerate(shapes)]
    scale = None if weighting == "late" else numbers(9, 5)

    def run(x: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
        return epic.torch.experts(options, x, rows, tokens, epic.torch.ExpertWeights(*w), scale)

    assert torch.autograd.gradcheck(run, (x, *w))
    other = mlp(options, slab_mm, x, rows, epic.torch.ExpertWeights(*w), scale)
    assert relative(run(x, *w).detach(), other.detach()) < 1e-14


class Recorded(TorchDispatchMode):
    """Record the arguments of each EPIC operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "epic":
            self.calls[func] = args
        return func(*args, **(kwargs or {}))


def test_opcheck() -> None:
    """Run opcheck on layer and experts, forward and backward, with arguments of real calls."""
    ops, seen = torch.ops.epic, Recorded()
    with epic.torch.Group(num_ranks=1, **SIZES) as group:
        layer = epic.torch.MoE(group, WISH, gate_bias=True, expert_biases=True, bias_rate=0.1)
        x = numbers(1, 3, 16).requires_grad_()
        calls = []
        for mask in (None, torch.tensor([True, False, True])):
            with seen:
                out, loss = layer(x, token_mask=mask)
                (out.sum() + loss).backward()
        calls += list(seen.calls.items())
        seen.calls.clear()
        with seen:
            out, loss, routing = layer(x, return_routing=True)
            weights = routing.weights.requires_grad_()
            out, loss, _ = layer(x, forced=(routing.topk_idx, weights), return_routing=True)
            (out.sum() + loss).backward()
        calls += list(seen.calls.items())
        wanted = (ops.moe, ops.moe_backward, ops.experts, ops.experts_backward)
        assert {op for op, _ in calls} >= {packet.default for packet in wanted}
        for op, given in calls:
            if op not in {packet.default for packet in wanted}:
                continue
            args = [v.detach() if isinstance(v, torch.Tensor) else v for v in given]
            tests = ("test_schema", "test_autograd_registration", "test_faketensor")
            torch.library.opcheck(op, tuple(args), test_utils=tests)
            outs = [torch.empty_like(v) if v.numel() else None for v in op(*args)]
            into = getattr(ops, f"{op.__name__.split('.')[0]}_out").default
            torch.library.opcheck(into, (*args, *outs), test_utils=tests)


# --------------------------------------------------------------------------- module ----

WISH = epic.torch.Moe.of(
    num_experts=8, top_k=2, hidden=16, inner=12, normalize="sum", balance_coeff=0.01,
    shared=epic.Experts(1, 16, 8),
)  # fmt: skip


def module_step(rank: int, ep: int) -> Any:
    """Return out and gradients of a module; the layer is the same on any number of ranks."""
    with group_of(ep) as group:
        layer = epic.torch.MoE(
            group, WISH, gate_bias=True, expert_biases=True, shared_gate=True, bias_rate=0.1
        )
        x = numbers(30 + rank, 2, 3, 16).requires_grad_()
        out, loss = layer(x)
        assert out.shape == x.shape and loss.shape == ()
        (out.square().sum() + loss * (ep / RANKS)).backward()
        layer.sum_gradients()
        for name, p in layer.named_parameters():  # add the gradients over the groups
            if name not in EXPERT_WEIGHTS and ep < RANKS:
                dist.all_reduce(p.grad)
                p.grad /= ep
        dist.all_reduce(layer.load)
        layer.load //= ep
        layer.update_bias()
        named = {n: v.grad.numpy() for n, v in layer.named_parameters()}
        return out.detach().numpy(), 0.0, x.grad.numpy(), named, layer.bias.numpy().copy()


def other_gradients(rank: int) -> Any:
    """Return gradients of parameters that only some ranks have used."""
    with group_of(RANKS) as group:
        model = torch.nn.ParameterList([torch.ones(3) for _ in range(RANKS)] + [torch.ones(2)])
        model[RANKS].requires_grad_(False)
        (model[rank] * (rank + 1)).sum().backward()
        epic.torch.sum_gradients(model, group)
        assert model[RANKS].grad is None
        return [p.grad.tolist() for p in model if p.requires_grad]


def test_gradients_that_one_rank_has(world: Any) -> None:
    """Check that ranks without a gradient add zeros to the right parameter."""
    wanted = [[float(rank + 1)] * 3 for rank in range(RANKS)]
    assert world.run(other_gradients) == [wanted] * RANKS


def test_module(world: Any) -> None:
    """Check that 1, 2 and 4 ranks have the same layer: each expert's parameters have their own
    seed."""
    answers = {ep: world.run(module_step, ep) for ep in (1, 2, 4)}
    for ep in (2, 4):
        for a, b in zip(answers[ep], answers[1], strict=True):
            assert relative(a[0], b[0]) < 1e-6
            assert np.array_equal(a[4], b[4]) and a[4].any()
        one, other = (whole([a[:4] for a in answers[n]], n)[3] for n in (1, ep))
        for name in EXPERT_WEIGHTS:
            assert relative(other[name], one[name]) < 1e-5, name


def alone(**more: Any) -> epic.torch.MoE:
    """Return a layer of one process."""
    group = epic.torch.Group(num_ranks=1, **SIZES)
    return epic.torch.MoE(group, WISH, gate_bias=True, bias_rate=1e-3, **more)


def reference_of(layer: epic.torch.MoE, x: torch.Tensor) -> torch.Tensor:
    """Compute the layer in float64 from its parameters."""
    wide = {n: None if v is None else v.double() for n, v in layer.weights()._asdict().items()}
    wide["bias"] = None if layer.bias is None else layer.bias.float()
    with torch.no_grad():
        return epic.torch.moe(
            layer.group, WISH, x.double(), epic.torch.MoeWeights(**wide), grouped_mm=slab_mm
        ).out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_module_of_another_dtype(dtype: torch.dtype) -> None:
    """Check model.to(dtype).

    The router's parameters change their dtype, but it computes in float32. The bias stays float32,
    because its updates are small. Gradients have the dtype of their parameters.
    """
    layer = alone().to(dtype)
    assert layer.bias is not None and layer.bias.dtype == torch.float32
    x = numbers(70, 2, 5, 16, dtype=dtype).requires_grad_()
    out, loss = layer(x)
    assert out.dtype == dtype
    assert relative(out.detach().double(), reference_of(layer, x.detach())) < 2e-2
    (out.sum() + loss).backward()
    assert all(p.grad is not None and p.grad.dtype == dtype for p in layer.parameters())
    before = layer.bias.clone()
    layer.update_bias()
    assert torch.equal((layer.bias - before).abs().max(), torch.tensor(1e-3))
    layer.group.close()


def test_a_module_is_copied_and_not_pickled() -> None:
    """Check that a copied module shares the group, which closes once, and cannot be pickled."""
    layer = alone()
    other, x = copy.deepcopy(layer), numbers(71, 3, 16)
    assert other.group is layer.group and torch.equal(other(x)[0], layer(x)[0])
    with pytest.raises(epic.torch.EpicArgumentError, match="cannot be pickled: save"):
        torch.save(layer, io.BytesIO())
    file = io.BytesIO()
    torch.save(other.state_dict(), file)
    file.seek(0)
    other.reset_parameters(seed=9)
    assert not torch.equal(other(x)[0], layer(x)[0])
    other.load_state_dict(torch.load(file), strict=True)
    assert torch.equal(other(x)[0], layer(x)[0])
    other.group.close()
    layer.group.close()


def test_a_module_made_on_meta() -> None:
    """Check that a module made on "meta" can be allocated, and then has the same values."""
    with torch.device("meta"):
        layer = alone()
    assert all(v.is_meta for v in layer.state_dict().values())
    x = numbers(72, 3, 16)
    assert layer(x.to("meta"))[0].is_meta
    layer.to_empty(device="cpu").reset_parameters()
    assert torch.equal(layer(x)[0], alone()(x)[0])


def test_layers_begin_with_different_values() -> None:
    """Check that the layers of a group begin with different values, or with those of a seed."""

    def values(layer: epic.torch.MoE) -> list[torch.Tensor]:
        return [p.detach() for p in (layer.w_gate, layer.w_gate_up, layer.w_down)]

    with (
        epic.torch.Group(num_ranks=1, **SIZES) as group,
        epic.torch.Group(num_ranks=1, **SIZES) as other,
    ):
        torch.manual_seed(3)
        first, second = epic.torch.MoE(group, WISH), epic.torch.MoE(group, WISH)
        torch.manual_seed(4)
        again, given = epic.torch.MoE(other, WISH), epic.torch.MoE(group, WISH, seed=1)
        assert not any(map(torch.equal, values(first), values(second)))
        assert all(map(torch.equal, values(first), values(again)))
        assert all(map(torch.equal, values(second), values(given)))
        with torch.device("meta"):
            meta = epic.torch.MoE(other, WISH)
        meta.to_empty(device="cpu").reset_parameters()
        assert all(map(torch.equal, values(second), values(meta)))
        epic.torch.MoE(group, WISH, seed=(1 << 32) - 1)
        wrong: Any
        for wrong in (-1, 1 << 32, 0.5, "1"):
            with pytest.raises(
                epic.torch.EpicArgumentError, match=r"seed is .*: must be an integer"
            ):
                epic.torch.MoE(group, WISH, seed=wrong)


def test_rows_in_float64() -> None:
    """Check the errors of float64 rows with float32 weights, and of a word in another case."""
    layer = alone()
    with pytest.raises(epic.torch.EpicArgumentError, match="the rows are float64 and the weights"):
        layer(numbers(1, 3, 16, dtype=torch.float64))
    with pytest.raises(epic.torch.EpicArgumentError, match="did you mean 'silu'"):
        epic.torch.Moe.of(num_experts=8, top_k=2, hidden=16, inner=8, activation="SiLU")
    layer.group.close()


def test_compiled_where_it_is_composed() -> None:
    """Check that a composed layer compiles to one graph for any number of tokens."""
    with epic.torch.Group(num_ranks=1, **SIZES) as group:
        layer = epic.torch.MoE(group, replace(WISH, quantize="1x32"))
        run = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
        for tokens in (4, 7):
            x, mask = numbers(73, tokens, 16).requires_grad_(), torch.arange(tokens) % 3 != 1
            found, wanted = (
                [step(x, mask)[0], *torch.autograd.grad(step(x, mask)[0].sum(), x)]
                for step in (run, layer)
            )
            torch.testing.assert_close(found, wanted)
    torch._dynamo.reset()


def test_wrong_masks() -> None:
    """Check that masks of a wrong shape or dtype raise an error of EPIC, not of torch."""
    layer, x = alone(), torch.ones(2, 3, 16)
    shapes = ((2, 2), (3, 2), (6,), (1, 6))
    for mask in (*(torch.ones(s, dtype=torch.bool) for s in shapes), torch.ones(2, 3)):
        with pytest.raises(
            epic.torch.EpicArgumentError, match=r"must be torch\.bool of shape \[2, 3\]"
        ):
            layer(x, mask)


def checkpoint_roundtrip(rank: int, folder: str) -> None:
    """Save on all ranks; load in groups of half the size, whose layers were made on "meta"."""
    device, ranks = torch.get_default_device(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("ep",))
    x = numbers(40 + rank, 6, 16)
    with epic.torch.Group(mesh, **SIZES) as group:
        layer = epic.torch.MoE(group, WISH, bias_rate=0.1)
        layer.reset_parameters(seed=5)
        layer.bias.fill_(0.25)
        dcp.save(epic.torch.sharded_state(layer, mesh), checkpoint_id=folder)
        wanted = layer(x)[0]
    pairs = init_device_mesh(device.type, (2, ranks // 2), mesh_dim_names=("dp", "ep"))
    with epic.torch.Group(pairs, "ep", **SIZES) as group:
        other = epic.torch.MoE(group, WISH, bias_rate=0.1, device="meta")
        assert other.w_gate.is_meta
        other.to_empty(device=device)
        other.reset_parameters()
        dcp.load(epic.torch.sharded_state(other, pairs["ep"]), checkpoint_id=folder)
        assert other.bias.eq(0.25).all()
        assert relative(other(x)[0].detach().cpu(), wanted.detach().cpu()) < 1e-6


def test_checkpoint_with_another_number_of_ranks(world: Any, tmp_path: Path) -> None:
    """Save and load a layer with torch.distributed.checkpoint."""
    world.run(checkpoint_roundtrip, str(tmp_path))


def checkpoint_of_sharded(rank: int, folder: str) -> None:
    """Save a layer under fully_shard over the other axis, sharded by experts' rows or columns. Load
    it in layers with another sharding, or none."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    kind, half = torch.get_default_device().type, dist.get_world_size() // 2
    mesh = init_device_mesh(kind, (2, half), mesh_dim_names=("dp", "ep"))
    single = init_device_mesh(kind, (2 * half,), mesh_dim_names=("ep",))

    def columns(parameter: torch.nn.Parameter) -> Any:
        return Shard(1 if parameter.dim() > 1 else 0)

    def by_rows(layer: Any) -> Any:
        return fully_shard(layer, mesh=mesh["dp"])

    def by_columns(layer: Any) -> Any:
        return fully_shard(layer, mesh=mesh["dp"], shard_placement_fn=columns)

    with epic.torch.Group(mesh, "ep", **SIZES) as pair, epic.torch.Group(single, **SIZES) as all_:
        ways: dict[str, Any] = {
            "rows": (pair, mesh["dp", "ep"], by_rows),
            "columns": (pair, mesh["dp", "ep"], by_columns),
            "whole": (all_, single, lambda layer: layer),
        }

        def made(way: str, seed: int) -> Any:
            group, where, wrap = ways[way]
            layer = epic.torch.MoE(group, WISH, bias_rate=0.1)
            layer.reset_parameters(seed)
            layer.bias.fill_(seed)
            return wrap(layer), where

        x = numbers(40 + rank, 6, 16)
        wanted = made("whole", 5)[0](x)[0].detach()
        for way in ways:
            layer, where = made(way, 5)
            dcp.save(epic.torch.sharded_state(layer, where), checkpoint_id=f"{folder}/{way}")
        for saved, loaded in (("rows", "whole"), ("columns", "rows"), ("whole", "columns")):
            layer, where = made(loaded, 9)
            dcp.load(epic.torch.sharded_state(layer, where), checkpoint_id=f"{folder}/{saved}")
            assert relative(layer(x)[0].detach(), wanted) < 1e-6 and layer.bias.eq(5).all()
        with pytest.raises(epic.torch.EpicArgumentError, match="over which w_gate is sharded"):
            epic.torch.sharded_state(made("rows", 5)[0], mesh["ep"])


def test_checkpoint_of_sharded_layers(world: Any, tmp_path: Path) -> None:
    """Check checkpoints of FSDP2 together with expert parallelism."""
    world.run(checkpoint_of_sharded, str(tmp_path))


def data_parallel(rank: int) -> None:
    """Check that FSDP2 and DDP over the other mesh axis give the same gradients."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    shape = (2, dist.get_world_size() // 2)
    kind = torch.get_default_device().type
    mesh = init_device_mesh(kind, shape, mesh_dim_names=("dp", "ep"))
    x = numbers(50 + rank, 6, 16)

    def gradients(wrap: Any) -> dict[str, torch.Tensor]:
        with epic.torch.Group(mesh, "ep", **SIZES) as group:
            layer = wrap(epic.torch.MoE(group, WISH))
            out, loss = layer(x)
            (out.square().sum() + loss).backward()
            getattr(layer, "module", layer).sum_gradients()
        found = {n.removeprefix("module."): p.grad for n, p in layer.named_parameters()}
        return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items()}

    plain = gradients(lambda layer: layer)
    for value in plain.values():
        dist.all_reduce(value, group=mesh.get_group("dp"))
        value /= 2

    def ddp(layer: Any) -> Any:
        return DistributedDataParallel(layer, process_group=mesh.get_group("dp"))

    for wrap in (lambda layer: fully_shard(layer, mesh=mesh["dp"]), ddp):
        got = gradients(wrap)
        assert got.keys() == plain.keys()
        for name, value in plain.items():
            torch.testing.assert_close(got[name], value)


def test_data_parallel(world: Any) -> None:
    """Check data parallelism with two groups of two ranks."""
    world.run(data_parallel)


class Residual(torch.nn.Module):
    """Two layers with residual connections, added in place or not."""

    def __init__(self, group: epic.torch.Group, in_place: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(epic.torch.MoE(group, WISH, seed=i) for i in range(2))
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output and the losses."""
        for layer in self.layers:
            out, loss = layer(x)
            if self.in_place:
                out += x
                loss *= 2
            else:
                out, loss = out + x, loss * 2
            x = out + loss
        return x


def added_in_place(rank: int) -> None:
    """Add in place to the output of a layer under fully_shard; gradients must not change."""
    from torch.distributed.fsdp import fully_shard

    shape = (2, dist.get_world_size() // 2)
    mesh = init_device_mesh(torch.get_default_device().type, shape, mesh_dim_names=("dp", "ep"))

    def gradients(group: epic.torch.Group, x: torch.Tensor, in_place: bool) -> list[torch.Tensor]:
        model = Residual(group, in_place)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=True)
        fully_shard(model, mesh=mesh["dp"])(x).square().sum().backward()
        return [p.grad.full_tensor() for p in model.parameters()]

    with epic.torch.Group(mesh, "ep", **SIZES) as group:
        for dims in ((6, 16), (2, 3, 16)):
            x = numbers(80 + rank, *dims)
            got, wanted = (gradients(group, x, in_place) for in_place in (True, False))
            for a, b in zip(got, wanted, strict=True):
                torch.testing.assert_close(a, b)


def test_outputs_that_are_written_in_place(world: Any) -> None:
    """Check that outputs are no views, because FSDP2 warns when views are changed in place."""
    world.run(added_in_place)


def sharded_on_meta(rank: int) -> None:
    """Call fully_shard on a layer on "meta", by rows or columns, then allocate and
    initialize it."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    kind, shape = torch.get_default_device().type, (2, dist.get_world_size() // 2)
    mesh, x = init_device_mesh(kind, shape, mesh_dim_names=("dp", "ep")), numbers(90 + rank, 6, 16)
    more: dict[str, Any] = {"gate_bias": True, "bias_rate": 0.1}
    with epic.torch.Group(mesh, "ep", **SIZES) as group:
        whole = epic.torch.MoE(group, WISH, **more, seed=0)
        whole.reset_parameters(seed=3)
        for dim in (0, 1):
            with torch.device("meta"):
                layer = epic.torch.MoE(group, WISH, **more, seed=0)
            where = partial(lambda d, p: Shard(min(d, p.dim() - 1)), dim)
            fully_shard(layer, mesh=mesh["dp"], shard_placement_fn=where)
            layer.to_empty(device=kind)
            layer.reset_parameters(seed=3)
            assert torch.equal(layer(x)[0], whole(x)[0])


def test_a_sharded_module_made_on_meta(world: Any) -> None:
    """Check the way in which FSDP2 recommends to create modules."""
    world.run(sharded_on_meta)


def masked(rank: int) -> None:
    """Run a layer with a mask; masked tokens reach no routed expert and no loss."""
    options = epic.torch.Moe.of(num_experts=8, top_k=2, hidden=16, inner=12, balance_coeff=0.1)
    with group_of(4) as group:
        layer = epic.torch.MoE(group, options)
        x = numbers(60 + rank, 6, 16)
        mask = torch.tensor([True, False, True, True, False, True])
        out, loss = layer(x, token_mask=mask)
        assert not out[~mask].any()
        kept, alone = layer(x[mask])
        assert relative(out[mask].detach(), kept.detach()) < 1e-6
        assert relative(loss.detach(), alone.detach()) < 1e-5


def test_token_mask(world: Any) -> None:
    """Check that results are those of a layer without the masked tokens."""
    world.run(masked)


def test_wrong_weights() -> None:
    """Check that wrong shapes and dtypes are refused before anything is read."""
    good = {n: torch.from_numpy(v) for n, v in cases.weights({}).items()}
    x = torch.ones(3, cases.HIDDEN)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"w_gate": torch.ones(2, 2)}, "w_gate has the shape [2, 2]"),
        ({"w_gate": good["w_gate"].to("meta")}, "w_gate is on meta and x is on cpu"),
        ({"w_down": good["w_down"][:, :3]}, "w_down has"),
        ({"w_down": good["w_down"].half()}, "w_down is float16: must be float32"),
        ({"b_down": torch.ones(8, cases.HIDDEN).half()}, "b_down is float16: must be float32"),
        ({"w_gate_up": good["w_gate_up"][:4]}, "num_local_experts is 8"),
        ({"shared_gate_up": good["w_down"]}, "shared_gate_up is given and options.shared is None"),
    ]
    with epic.torch.Group(**SIZES) as group:
        for change, text in wrong:
            weights = epic.torch.MoeWeights(**{**good, **change})
            with pytest.raises(epic.torch.EpicArgumentError) as caught:
                epic.torch.moe(group, cases.options({}, 1), x, weights)
            assert text in str(caught.value), caught.value
        first = epic.torch.moe(group, cases.options({}, 1), x, epic.torch.MoeWeights(**good))
        again = epic.torch.moe(group, cases.options({}, 1), x, epic.torch.MoeWeights(**good))
        assert same(first[:4], again[:4])
