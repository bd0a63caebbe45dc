# SPDX-License-Identifier: Apache-2.0
"""Tests training runs that are saved with one number of ranks and resumed with another."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.fsdp import fully_shard

import epic.torch
from epic.torch import EpicArgumentError, MoE
from parts import SIZES, group_of, meshes, numbers
from world import World

OPTIONS = epic.torch.Moe.of(num_experts=8, top_k=2, hidden=20, inner=12, score="sigmoid")
ROWS, STEPS = 24, 3


class Model(nn.Module):
    """A linear layer and a MoE layer with a router bias."""

    def __init__(self, group: epic.torch.Group) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(20, 20, dtype=torch.float64)
        self.moe = MoE(group, OPTIONS, dtype=torch.float64, bias_rate=1e-2, expert_biases=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a loss."""
        x = self.first(x)
        return (x + self.moe(x)[0]).square().sum() / ROWS


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer with two groups of parameters."""
    groups = [
        {"params": [p for n, p in model.named_parameters() if "first" in n], "lr": 0.02},
        {"params": [p for n, p in model.named_parameters() if "first" not in n], "lr": 0.01},
    ]
    if kind == "sgd":
        return torch.optim.SGD(groups, momentum=0.9)
    if kind == "plain":
        return torch.optim.SGD(groups)
    return torch.optim.AdamW(groups, weight_decay=0.1, fused=kind == "fused")


def make_run(ep: int, fsdp: bool, kind: str, group: epic.torch.Group) -> tuple[Any, ...]:
    """Make a model, its optimizer and their state. All replicas of the group get the same rows."""
    model: Any = Model(group)
    if fsdp:
        fully_shard(model.moe, mesh=meshes[ep]["dp"])
        fully_shard(model, mesh=meshes[ep]["dp"])
    optimizer = make_optimizer(kind, model)
    mesh = meshes[ep]["dp", "ep"] if fsdp else meshes[ep]["ep"]
    return model, optimizer, epic.torch.TrainingState(model, mesh, optimizer)


def run_steps(model: Any, optimizer: Any, group: epic.torch.Group, first: int) -> list[float]:
    """Run some steps; return the losses of all rows."""
    losses = []
    for step in range(first, first + STEPS):
        x = numbers(step, ROWS, 20, dtype=torch.float64).tensor_split(group.num_ranks)
        loss = model(x[group.rank])
        optimizer.zero_grad()
        loss.backward()
        epic.torch.sum_gradients(model, group)
        optimizer.step()
        model.moe.update_bias()
        losses.append(epic.torch.sum(group, loss.detach().reshape(1)).item())
    return losses


def save_run(rank: int, ep: int, fsdp: bool, kind: str, folder: str, how: str) -> Any:
    """Train, save, and continue training."""
    with group_of(ep) as group:
        model, optimizer, state = make_run(ep, fsdp, kind, group)
        run_steps(model, optimizer, group, 0)
        if how == "async":
            dcp.async_save({"train": state}, checkpoint_id=folder).result()
        else:
            dcp.save({"train": state}, checkpoint_id=folder)
        return run_steps(model, optimizer, group, 20), group.rank


def resume_run(rank: int, ep: int, fsdp: bool, kind: str, folder: str) -> Any:
    """Create everything again, load, and continue training."""
    with group_of(ep) as group:
        model, optimizer, state = make_run(ep, fsdp, kind, group)
        model.moe.reset_parameters(seed=5)
        for parameters in optimizer.param_groups:
            parameters["lr"] = 0.5
        dcp.load({"train": state}, checkpoint_id=folder)
        assert [g["lr"] for g in optimizer.param_groups] == [0.02, 0.01]
        return run_steps(model, optimizer, group, 20), group.rank


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("adamw", "async"),
        ("fused", "sync"),
        *(
            pytest.param(kind, "sync", marks=pytest.mark.night)
            for kind in ("adamw", "sgd", "plain")
        ),
    ],
)
def test_resume(world: World, kind: str, how: str, tmp_path: Path) -> None:
    """Check that a run of 4 ranks continues on 4, 2 and 1 ranks, and on 2 under fully_shard."""
    folder = os.fspath(tmp_path / "saved")
    losses, _ = world.run(save_run, 4, False, kind, folder, how)[0]
    for ep, fsdp in ((4, False), (2, False), (1, False), (2, True)):
        for again, _ in world.run(resume_run, ep, fsdp, kind, folder):
            assert again == pytest.approx(losses, rel=1e-10), (ep, fsdp)


@pytest.mark.parametrize(
    ("ep", "fsdp"), [pytest.param(1, True, marks=pytest.mark.night), (2, True), (2, False)]
)
def test_saved_in_another_form(world: World, ep: int, fsdp: bool, tmp_path: Path) -> None:
    """Check that 4 ranks load what fully_shard or fewer ranks saved."""
    folder = os.fspath(tmp_path / "saved")
    losses, _ = world.run(save_run, ep, fsdp, "adamw", folder, "sync")[0]
    for again, _ in world.run(resume_run, 4, False, "adamw", folder):
        assert again == pytest.approx(losses, rel=1e-10)


def load_model(_: int, folder: str) -> tuple[torch.Tensor, int]:
    """Load the parameters of the model alone; return those of this rank's experts."""
    with group_of(2) as group:
        model: Any = Model(group)
        model.moe.reset_parameters(seed=5)
        state = epic.torch.TrainingState(model, meshes[2]["ep"])
        planner = DefaultLoadPlanner(allow_partial_load=True)  # the file has no counts of choices
        dcp.load({"train": state}, checkpoint_id=folder, planner=planner)
        return model.moe.w_down.detach(), group.rank


@pytest.mark.night
def test_single_file(world: World, tmp_path: Path) -> None:
    """Check that one file holds the experts of all ranks, and that 2 ranks can load it."""
    files = pytest.importorskip("safetensors.torch", reason="there is no safetensors package")
    saved, file, again = (tmp_path / name for name in ("saved", "whole.pt", "again"))
    losses, _ = world.run(save_run, 4, False, "adamw", os.fspath(saved), "sync")[0]
    dcp_to_torch_save(saved, file)
    whole = torch.load(file)["train"]
    assert whole["optimizer"]["moe.w_down/exp_avg"].shape == (8, 12, 20)
    torch_save_to_dcp(file, again)
    for found, _ in world.run(resume_run, 2, False, "adamw", os.fspath(again)):
        assert found == pytest.approx(losses, rel=1e-10)

    files.save_file(whole["model"], tmp_path / "model.safetensors")
    model = files.load_file(tmp_path / "model.safetensors")
    dcp.save({"train": {"model": model}}, checkpoint_id=tmp_path / "model", no_dist=True)
    for experts, rank in world.run(load_model, os.fspath(tmp_path / "model")):
        assert torch.equal(experts, whole["model"]["moe.w_down"][4 * rank : 4 * rank + 4])


def save_counts(rank: int, folder: str) -> None:
    """Save a layer whose data-parallel replicas have counted different tokens."""
    with group_of(2) as group:
        model: Any = Model(group)
        mesh = meshes[2]["dp", "ep"]
        model.moe.load.copy_(torch.arange(8) + 10 * mesh.get_local_rank(0))
        dcp.save({"t": epic.torch.TrainingState(model, mesh)}, checkpoint_id=folder)


def load_counts(rank: int, ep: int, folder: str) -> list[int]:
    """Load the layer; return the counts of all replicas, added as update_bias does."""
    with group_of(ep) as group:
        model: Any = Model(group)
        mesh = meshes[ep]["dp", "ep"]
        model.moe.load.fill_(99)
        dcp.load({"t": epic.torch.TrainingState(model, mesh)}, checkpoint_id=folder)
        dist.all_reduce(model.moe.load, group=mesh.get_group(0))
        return model.moe.load.tolist()


def test_counts(world: World, tmp_path: Path) -> None:
    """Check that the sum of the counts since the last update_bias is kept for any number of
    replicas."""
    folder = os.fspath(tmp_path / "saved")
    world.run(save_counts, folder)
    for ep in (1, 2, 4):
        for counts in world.run(load_counts, ep, folder):
            assert counts == [2 * e + 10 for e in range(8)]


def test_state_changes_nothing() -> None:
    """Check that reading a new optimizer's state changes neither parameters nor gradients."""
    with epic.torch.Group(num_ranks=1, **SIZES) as group:
        model = Model(group)
        optimizer = make_optimizer("adamw", model)
        before = [p.detach().clone() for p in model.parameters()]
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        state = epic.torch.TrainingState(model, mesh, optimizer).state_dict()
        dist.destroy_process_group()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
        assert all(p.grad is None for p in model.parameters())
        assert [g["lr"] for g in optimizer.param_groups] == [0.02, 0.01]
        assert float(state["optimizer"]["moe.w_down/step"]) == 0
        assert not any(key.endswith("_extra_state") for key in state["model"])


@pytest.mark.parametrize("kind", ["NAdam", "Rprop", "ASGD", "Adagrad"])
def test_saving_before_the_first_step(kind: str) -> None:
    """Check that training is the same if a new optimizer's state has been read, also if fields do
    not begin at zero."""

    def train(reads: bool) -> torch.Tensor:
        weight = nn.Parameter(torch.arange(4.0))
        optimizer = getattr(torch.optim, kind)([weight], lr=0.01)
        if reads:
            epic.torch.training_state.fill_missing_state(optimizer)
        for step in range(3):
            weight.grad = weight.detach() - step
            optimizer.step()
        return weight.detach()

    assert torch.equal(train(True), train(False))


def test_what_is_refused() -> None:
    """Check that a model without a layer, and parameters of another model, are refused."""
    with epic.torch.Group(num_ranks=1, **SIZES) as group:
        with pytest.raises(EpicArgumentError, match="must contain an epic"):
            epic.torch.TrainingState(nn.Linear(2, 2), None)
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3, 5))])
        with pytest.raises(EpicArgumentError, match=r"a parameter of shape \[3, 5\]"):
            epic.torch.TrainingState(Model(group), None, optimizer)
