# SPDX-License-Identifier: Apache-2.0
"""Tests torchao's MXFP8 grouped product as grouped_mm= of the layer, and its AdamW of 8 bits.

torchao's kernels for the product need sm_100; here it runs its emulation in PyTorch."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F  # noqa: N812
from torch.distributed.fsdp import fully_shard

import epic.torch
from parts import group_of, meshes, numbers
from reference import relative

pytest.importorskip("torchao", reason="there is no torchao: make test-torch-adapters")

HIDDEN, INNER, TOKENS = 64, 96, 24


def mxfp8_mm(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply by torchao, as docs/guide/torch.md does."""
    from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
    from torchao.quantization.quantize_.common import KernelPreference

    emulated = KernelPreference.EMULATED
    columns = w.mT.contiguous().mT  # torchao takes the weight of each expert by columns
    return _to_mxfp8_then_scaled_grouped_mm(x, columns, offs=ends, kernel_preference=emulated)


def torch_mm(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply by torch's own grouped product."""
    return F.grouped_mm(x, w, offs=ends)


def layers(rank: int, ranks: int) -> None:
    """Compare a layer with each product with the layer of EPIC's core, forward and backward."""
    options = epic.torch.Moe.of(
        num_experts=8, top_k=2, hidden=HIDDEN, inner=INNER, alignment=32, normalize="sum"
    )
    with group_of(ranks) as group:
        found: list[Any] = []
        for product in (None, torch_mm, mxfp8_mm):
            layer = epic.torch.MoE(group, options, grouped_mm=product, dtype=torch.bfloat16)
            layer.reset_parameters(3)
            x = numbers(rank, TOKENS, HIDDEN, dtype=torch.bfloat16).requires_grad_()
            out = layer(x)[0]
            out.backward(numbers(9 + rank, TOKENS, HIDDEN, dtype=torch.bfloat16))
            grads = [x.grad, *(p.grad for p in layer.parameters())]
            found.append([v.float().numpy() for v in (out.detach(), *grads) if v is not None])
        for most, got in zip((0.02, 0.12), found[1:], strict=True):
            for a, b in zip(got, found[0], strict=True):
                assert relative(a, b) < most, (most, a.shape)


@pytest.mark.parametrize("ranks", [1, 4])
def test_layers(world: Any, ranks: int) -> None:
    """Run it on all ranks."""
    world.run(layers, ranks)


# ------------------------------------------------------------------------ AdamW of 8 bits ----


def make_run(group: epic.torch.Group, ep: int, fsdp: bool, seed: int) -> tuple[Any, ...]:
    """Return a layer, its optimizer and their state. Each expert has whole blocks of 256."""
    from torchao.optim import AdamW8bit

    options = epic.torch.Moe.of(num_experts=8, top_k=2, hidden=HIDDEN, inner=64, normalize="sum")
    layer: Any = epic.torch.MoE(group, options)
    layer.reset_parameters(seed)
    if fsdp:
        fully_shard(layer, mesh=meshes[ep]["dp"])
    optimizer = AdamW8bit(layer.parameters(), lr=0.01)
    mesh = meshes[ep]["dp", "ep"] if fsdp else meshes[ep]["ep"]
    return layer, optimizer, epic.torch.TrainingState(layer, mesh, optimizer)


def run_steps(layer: Any, optimizer: Any, group: epic.torch.Group, first: int) -> list[float]:
    """Train two steps; return the losses of all rows. All replicas have the same rows."""
    losses = []
    for step in (first, first + 1):
        x = numbers(step, TOKENS, HIDDEN).tensor_split(group.num_ranks)[group.rank]
        loss = (x + layer(x)[0]).square().sum() / TOKENS
        optimizer.zero_grad()
        loss.backward()
        epic.torch.sum_gradients(layer, group)
        optimizer.step()
        losses.append(epic.torch.sum(group, loss.detach().reshape(1)).item())
    return losses


def save_run(_: int, folder: str) -> tuple[list[float], list[str]]:
    """Train on 4 ranks, save, and continue; return the losses and the parameters in 8 bits."""
    with group_of(4) as group, torch.compiler.set_stance("force_eager"):
        layer, optimizer, state = make_run(group, 4, False, 3)
        run_steps(layer, optimizer, group, 0)
        dcp.save({"train": state}, checkpoint_id=folder)
        narrow = [
            name
            for name, p in layer.named_parameters()
            if type(optimizer.state[p]["exp_avg"]).__name__ == "OptimState8bit"
        ]
        return run_steps(layer, optimizer, group, 2), narrow


def resume_run(_: int, folder: str, ep: int, fsdp: bool) -> list[float]:
    """Load what 4 ranks have saved, and continue."""
    with group_of(ep) as group, torch.compiler.set_stance("force_eager"):
        layer, optimizer, state = make_run(group, ep, fsdp, 5)
        dcp.load({"train": state}, checkpoint_id=folder)
        return run_steps(layer, optimizer, group, 2)


def test_adamw_of_8_bits(world: Any, tmp_path: Path) -> None:
    """Check that a run of 4 ranks continues on 4, 2 and 1 ranks, and on 2 under fully_shard."""
    folder = os.fspath(tmp_path / "saved")
    losses, narrow = world.run(save_run, folder)[0]
    assert narrow == ["w_gate_up", "w_down"]
    for ep, fsdp in ((4, False), (2, False), (1, False), (2, True)):
        for again in world.run(resume_run, folder, ep, fsdp):
            assert again == pytest.approx(losses, rel=1e-5), (ep, fsdp)
