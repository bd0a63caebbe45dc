# SPDX-License-Identifier: Apache-2.0
"""Tests gradient clipping, loss scaling and label counts over ranks with different experts."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import epic.torch
from epic.torch import EpicArgumentError, EpicError, MoE
from epic.torch.state import is_of_experts
from parts import RANKS, SIZES, group_of, meshes, numbers
from world import World

NORMS = [2.0, 1.0, 3.0, math.inf]
OPTIONS = epic.torch.Moe.of(
    num_experts=8, top_k=2, hidden=20, inner=12, shared=epic.torch.Experts(1, 20, 6)
)
ROWS = 24


class Model(nn.Module):
    """A layer of shared parameters, then two MoE layers."""

    def __init__(self, group: epic.torch.Group, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(20, 20, dtype=dtype)
        self.moe = nn.ModuleList([MoE(group, OPTIONS, dtype=dtype) for _ in range(2)])
        for i, layer in enumerate(self.moe):
            layer.reset_parameters(seed=i)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's part of a loss."""
        x = self.first(x)
        for layer in self.moe:
            x = x + layer(x)[0]
        return x.square().sum()


def whole_model(dtype: torch.dtype) -> Model:
    """Return the model of one rank after backward of all rows."""
    group = epic.torch.Group(num_ranks=1, **SIZES)
    model = Model(group, dtype)
    model(numbers(3, ROWS, 20, dtype=dtype)).backward()
    for layer in model.moe:
        layer.sum_gradients()
    group.close()
    return model


def run_backward(model: nn.Module, group: epic.torch.Group, rank: int, dtype: torch.dtype) -> None:
    """Run backward of this rank's rows. Ranks have different numbers of rows, and every
    data-parallel replica has all of them."""
    bounds = [0, *(ROWS * (q + 1) ** 2 // group.num_ranks**2 for q in range(group.num_ranks))]
    ep_rank = group.rank
    model(numbers(3, ROWS, 20, dtype=dtype)[bounds[ep_rank] : bounds[ep_rank + 1]]).backward()
    epic.torch.sum_gradients(getattr(model, "module", model), group)


def whole_gradient(parameter: Any) -> Tensor:
    """Return the full gradient of a parameter as an ordinary tensor."""
    gradient = parameter.grad
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def clip(rank: int, ep: int, form: str, norm_type: float, dtype: torch.dtype) -> Any:
    """Clip the gradients; return the norm and the clipped gradients by name."""
    with group_of(ep) as group:
        model: Any = Model(group, dtype)
        if form == "ddp":
            model = DistributedDataParallel(model, process_group=meshes[ep].get_group("dp"))
        elif form == "fsdp":
            for layer in model.moe:
                fully_shard(layer, mesh=meshes[ep]["dp"])
            fully_shard(model, mesh=meshes[ep]["dp"])
        run_backward(model, group, rank, dtype)
        given = model.parameters() if form == "list" else model
        norm = epic.torch.clip_grad_norm_(given, 0.5, group, norm_type)
        plain = getattr(model, "module", model)
        return norm, {n: whole_gradient(p).clone() for n, p in plain.named_parameters()}


def test_norm_type_as_text() -> None:
    """Check that "inf" is a norm_type, as for torch."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, -4.0])
    with epic.torch.Group(num_ranks=1, max_tokens=1, max_row_bytes=32) as group:
        assert epic.torch.clip_grad_norm_([parameter], 2.0, group, "inf").item() == 4.0
    assert torch.allclose(parameter.grad, torch.tensor([1.5, -2.0]))


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize(
    ("ep", "form"),
    [(1, "plain"), (2, "plain"), (4, "plain"), (4, "list"), (2, "ddp"), (2, "fsdp"), (1, "fsdp")],
)
def test_clipping(world: World, ep: int, form: str, norm_type: float) -> None:
    """Check that every rank gets the norm and gradients that torch computes on one rank."""
    dtype = torch.float64
    model = whole_model(dtype)
    true = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type)
    wanted = {name: p.grad for name, p in model.named_parameters()}
    answers = world.run(clip, ep, form, norm_type, dtype)
    for rank, (norm, gradients) in enumerate(answers):
        assert norm.dtype == torch.float32
        assert norm.item() == answers[0][0].item()  # all ranks return the same bits
        assert abs(norm.item() - true.item()) < 1e-6 * true.item()
        assert gradients.keys() == wanted.keys()
        for name, gradient in gradients.items():
            whole = wanted[name]
            assert whole is not None
            if is_of_experts(name.rsplit(".", 1)[-1]):
                whole = whole.chunk(ep)[rank % ep]
            torch.testing.assert_close(gradient, whole, rtol=1e-6, atol=1e-9)


def clip_16_bits(rank: int) -> Any:
    """Clip bfloat16 gradients, with and without foreach."""
    with group_of(4) as group:
        found = []
        for foreach in (True, False):
            model = Model(group, torch.bfloat16)
            run_backward(model, group, rank, torch.bfloat16)
            norm = epic.torch.clip_grad_norm_(model, 0.5, group, foreach=foreach)
            found.append((norm, [p.grad for p in model.parameters()]))
        return found


def test_clipping_of_16_bits(world: World) -> None:
    """Check that shared parameters keep equal bits on all ranks, with and without foreach."""
    answers = world.run(clip_16_bits)
    for (norm, one), (other_norm, other) in answers:
        assert norm.item() == other_norm.item() == answers[0][0][0].item()
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    first = answers[0][0][1]
    for (_, one), _ in answers:
        assert torch.equal(one[0], first[0]) and one[0].dtype == torch.bfloat16


def clip_some(rank: int) -> Any:
    """Clip when one rank has no gradient for its experts and one parameter is frozen."""
    with group_of(4) as group:
        model = Model(group, torch.float32)
        run_backward(model, group, rank, torch.float32)
        model.moe[1].w_gate.requires_grad_(False)
        if rank == 0:
            model.moe[0].w_down.grad = None
        counted = [
            parameter.grad.square().sum().item()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None and parameter.requires_grad
            if rank == 0 or is_of_experts(name.rsplit(".", 1)[-1])
        ]
        return epic.torch.clip_grad_norm_(model, 1e9, group).item(), sum(counted)


def test_missing_gradients(world: World) -> None:
    """Check that missing gradients and frozen parameters do not count."""
    answers = world.run(clip_some)
    true = math.sqrt(sum(own for _, own in answers))
    assert all(abs(norm - true) < 1e-5 * true for norm, _ in answers)


def clip_tensor_parallel(rank: int, norm_type: float) -> float:
    """Clip plain parameters that are sharded over dimension "dp" of the mesh, as in tensor
    parallelism."""
    with group_of(2) as group:
        mesh = meshes[2]["dp"]
        divided, equal = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(3))
        divided.grad = torch.arange(8.0)[mesh.get_local_rank() * 4 :][:4].clone()
        divided.tensor_model_parallel = True  # type: ignore[attr-defined]
        equal.grad = torch.full((3,), 2.0)
        expert = nn.Parameter(torch.zeros(2))
        expert.allreduce = False  # type: ignore[attr-defined]
        expert.grad = torch.full((2,), 1.0 + group.rank)
        given = [divided, equal, expert]
        return epic.torch.clip_grad_norm_(given, 1.0, group, norm_type, mesh=mesh).item()


@pytest.mark.parametrize("norm_type", NORMS)
def test_tensor_parallel(world: World, norm_type: float) -> None:
    """Check that shards of a tensor-parallel axis are added, and that copies count once."""
    everything = torch.tensor([*range(8), 2, 2, 2, 1, 1, 2, 2], dtype=torch.float64)
    true = torch.linalg.vector_norm(everything, norm_type).item()
    for norm in world.run(clip_tensor_parallel, norm_type):
        assert abs(norm - true) < 1e-6 * true


def clip_tensor_parallel_fsdp(rank: int, norm_type: float) -> tuple[float, float]:
    """Clip parameters of both tensor parallelism and fully_shard; return the norms of both."""
    with group_of(2) as group:
        mesh = meshes[2]
        model = nn.Sequential(nn.Linear(20, 24, bias=False), nn.Linear(24, 20, bias=False))
        parallelize_module(model, mesh["ep"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        x = numbers(5, 4, 20, dtype=torch.float32) * (1 + mesh["dp"].get_local_rank())
        model(x).square().sum().backward()
        gradients = [whole_gradient(p) for p in model.parameters()]
        true = torch.nn.utils.get_total_norm([g for g in gradients if g is not None], norm_type)
        return epic.torch.clip_grad_norm_(model, 1e9, group, norm_type).item(), true.item()


@pytest.mark.parametrize("norm_type", NORMS)
def test_tensor_parallel_with_fsdp(world: World, norm_type: float) -> None:
    """Check parameters that are sharded over two dimensions of the mesh (_StridedShard)."""
    answers = world.run(clip_tensor_parallel_fsdp, norm_type)
    for norm, true in answers:
        assert norm == answers[0][0]
        assert abs(norm - true) < 1e-5 * true


def clip_nan(rank: int) -> Any:
    """Clip when one rank has a NaN in an expert."""
    with group_of(4) as group:
        model = Model(group, torch.float32)
        run_backward(model, group, rank, torch.float32)
        if rank == 2:
            model.moe[1].w_down.grad[0, 0, 0] = math.nan
        before = model.first.weight.grad.clone()
        with pytest.raises(EpicError, match="total norm of the gradients is nan"):
            epic.torch.clip_grad_norm_(model, 1.0, group, error_if_nonfinite=True)
        assert torch.equal(model.first.weight.grad, before)
        return epic.torch.clip_grad_norm_(model, 1.0, group).item()


def test_a_norm_that_is_not_finite(world: World) -> None:
    """Check that error_if_nonfinite raises on all ranks before any gradient changes."""
    assert all(math.isnan(norm) for norm in world.run(clip_nan))


def test_arguments() -> None:
    """Check that wrong arguments are refused."""
    with epic.torch.Group(num_ranks=1, **SIZES) as group:
        weight = nn.Parameter(torch.ones(2))
        with pytest.raises(EpicArgumentError, match="max_norm is -1"):
            epic.torch.clip_grad_norm_(weight, -1.0, group)
        no_group: Any = None
        for wrong in (None, "x", [1.0]):
            wrong_number: Any = wrong
            with pytest.raises(EpicArgumentError, match=r"max_norm is .*: must be a number"):
                epic.torch.clip_grad_norm_([], wrong_number, group)
            with pytest.raises(EpicArgumentError, match=r"norm_type is .*: must be a number"):
                epic.torch.clip_grad_norm_([], 1.0, group, wrong_number)
            with pytest.raises(EpicArgumentError, match=r"parameters is a .*: must be a Tensor"):
                epic.torch.clip_grad_norm_(wrong_number, 1.0, group)
        for call in (
            lambda: epic.torch.clip_grad_norm_(weight, 1.0, no_group),
            lambda: epic.torch.GradScaler(no_group),
            lambda: epic.torch.count_labels(torch.ones(3), no_group),
            lambda: epic.torch.restore_moe(nn.Linear(2, 2), no_group),
            lambda: epic.torch.save_pretrained(nn.Linear(2, 2), "none", no_group),
        ):
            with pytest.raises(EpicArgumentError, match="group is a NoneType: must be a Group"):
                call()
        with pytest.raises(EpicArgumentError, match="labels is a list: must be a tensor"):
            epic.torch.count_labels(wrong_number, group)
        with pytest.raises(EpicArgumentError, match="norm_type is 0"):
            epic.torch.clip_grad_norm_(weight, 1.0, group, 0.0)
        assert epic.torch.clip_grad_norm_(weight, 1.0, group).item() == 0
        weight.grad = torch.full((2,), 3.0)
        assert epic.torch.clip_grad_norm_([weight, weight], 1.0, group).item() == pytest.approx(
            math.sqrt(18)
        )


def scale_steps(rank: int, fused: bool) -> Any:
    """Make two steps with a GradScaler; in the first one the experts of three ranks overflow."""
    with group_of(4) as group:
        model = Model(group, torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        scaler = epic.torch.GradScaler(group, init_scale=64.0, growth_interval=1)
        found = []
        for step in range(2):
            before = [p.detach().clone() for p in model.parameters()]
            x = numbers(rank, 6, 20)
            scaler.scale(model(x)).backward()
            epic.torch.sum_gradients(model, group)
            if step == 0 and rank > 0:
                model.moe[0].w_gate_up.grad[0] = math.inf
            if not fused:
                scaler.unscale_(optimizer)
                epic.torch.clip_grad_norm_(model, 1.0, group)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            same = all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
            found.append((same, scaler.get_scale()))
        return found, model.first.weight.detach()


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(world: World, fused: bool) -> None:
    """Check that all ranks skip the step of an overflow and halve the scale, then make the step."""
    answers = world.run(scale_steps, fused)
    for found, weight in answers:
        assert found == [(True, 32.0), (False, 64.0)]
        assert torch.equal(weight, answers[0][1])


def count(rank: int, ep: int) -> float:
    """Count the labels of a group, and of all groups."""
    with group_of(ep) as group:
        labels = torch.full((2, 5), -100)
        labels.view(-1)[: rank + 1] = 7
        alone = epic.torch.count_labels(labels, group)
        everywhere = epic.torch.count_labels(
            labels, group, process_group=meshes[ep].get_group("dp")
        )
        first = rank // ep * ep
        assert alone.item() == sum(q + 1 for q in range(first, first + ep))
        assert dist.get_world_size() == RANKS
        return everywhere.item()


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_count_labels(world: World, ep: int) -> None:
    """Check that the labels of all ranks are counted, without ignored ones."""
    assert world.run(count, ep) == [10.0] * RANKS
