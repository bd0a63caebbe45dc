# SPDX-License-Identifier: Apache-2.0
"""Tests that each forward is counted once in the loads of a layer, and only for its group."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import epic.torch
from parts import RANKS, SIZES, numbers

EXPERTS, HIDDEN, TOP_K = 8, 16, 2
OPTIONS: dict[str, Any] = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "inner": 12}
WISH = epic.torch.Moe.of(**OPTIONS)


def counted(layer: epic.torch.MoE, x: torch.Tensor) -> torch.Tensor:
    """Count how often each expert is among the largest logits of a token, bias included."""
    assert layer.bias is not None
    scores = (x.double() @ layer.w_gate.detach().double()).softmax(-1) + layer.bias.double()
    return torch.bincount(scores.topk(TOP_K).indices.reshape(-1), minlength=EXPERTS)


def data_parallel(rank: int) -> None:
    """Run two forwards under DistributedDataParallel. The two groups have different loads, and
    their sum changes the bias."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    with epic.torch.Group(mesh, "ep", **SIZES) as group:
        layer = epic.torch.MoE(group, WISH, bias_rate=0.25)
        model = DistributedDataParallel(layer, process_group=mesh.get_group("dp"))
        whole = torch.zeros(EXPERTS, dtype=torch.int64)
        own = torch.zeros(EXPERTS, dtype=torch.int64)
        for step in range(2):
            every = [numbers(10 * r + step, 8 + r, HIDDEN) for r in range(RANKS)]
            out, loss = model(every[rank])
            (out.sum() + loss).backward()
            whole += sum(counted(layer, x) for x in every)
            own += sum(counted(layer, x) for x in every[rank // 2 * 2 : rank // 2 * 2 + 2])
        assert layer.load is not None and layer.load.tolist() == own.tolist()
        layer.update_bias(mesh.get_group("dp"))
        moved = 0.25 * torch.sign(whole.double().mean() - whole)
        assert layer.bias is not None and torch.equal(layer.bias.double(), moved)
        assert not layer.load.any()


def test_data_parallel(world: Any) -> None:
    """Check that DDP does not replace a rank's counts by those of rank 0 before each forward."""
    world.run(data_parallel)


def block_of(layer: epic.torch.MoE) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the layer as a function."""

    def block(x: torch.Tensor) -> torch.Tensor:
        out, loss = layer(x)
        return out + x + loss

    return block


def again(block: Any, reentrant: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the block with activation checkpointing."""
    return lambda x: checkpoint(block, x, use_reentrant=reentrant)


WAYS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda block: block,
    "checkpoint": lambda block: again(block, False),
    "reentrant": lambda block: again(block, True),
    "twice": lambda block: again(again(block, False), False),
    "compiled": lambda block: torch.compile(block, backend="aot_eager", fullgraph=True),
    "checkpoint of compiled": lambda block: again(
        torch.compile(block, backend="aot_eager", fullgraph=True), False
    ),
    "compiled checkpoint": lambda block: torch.compile(again(block, False), backend="aot_eager"),
}


@pytest.mark.parametrize("more", [{}, {"quantize": "1x32"}], ids=["core", "composed"])
@pytest.mark.parametrize("way", WAYS)
def test_checkpointing(way: str, more: dict[str, Any]) -> None:
    """Check that a forward that backward repeats is not counted again, and a new step is."""
    with epic.torch.Group(num_ranks=1, **SIZES) as group:
        layer = epic.torch.MoE(group, epic.torch.Moe.of(**OPTIONS, **more), bias_rate=0.25)
        run, wanted = WAYS[way](block_of(layer)), torch.zeros(EXPERTS, dtype=torch.int64)
        for step in range(2):
            x = numbers(step, 9, HIDDEN).requires_grad_()
            run(x).square().sum().backward()
            assert layer.w_gate.grad is not None
            wanted += counted(layer, x.detach())
            assert layer.load is not None and layer.load.tolist() == wanted.tolist()
        layer.eval()
        layer(x)
        assert layer.load is not None and layer.load.tolist() == wanted.tolist()
    torch._dynamo.reset()


def test_where_the_counts_are() -> None:
    """Check that counts are in no state dict, move with the layer and keep their dtype."""
    with epic.torch.Group(num_ranks=1, **SIZES) as group:
        layer = epic.torch.MoE(group, WISH, bias_rate=0.25)
        layer(numbers(1, 9, HIDDEN))
        assert layer.load is not None
        before = layer.load.clone()
        assert "load" not in dict(layer.named_buffers()) | layer.state_dict()
        for other in (layer.double(), layer.to(torch.bfloat16), layer.cpu()):
            assert other.load is not None and other.load.dtype == torch.int32
            assert torch.equal(other.load, before)
        layer.to("meta")
        assert layer.load.is_meta
        layer.to_empty(device="cpu")
        assert not layer.load.any()


def test_one_graph_runs_at_a_time() -> None:
    """Check the private name by which the layer sees that torch runs a backward."""
    seen = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: seen.append(torch._C._current_graph_task_id()))
    y.backward()
    assert torch._C._current_graph_task_id() == -1 and seen[0] != -1
