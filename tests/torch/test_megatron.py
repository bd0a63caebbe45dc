# SPDX-License-Identifier: Apache-2.0
"""Compares Megatron-Core's layer with EPIC's dispatcher and with its own, forward and backward."""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parts import numbers
from reference import relative

pytest.importorskip("megatron.core", reason="there is no megatron.core: make test-torch-adapters")
sys.path.append(str(Path(__file__).parents[2] / "examples/common"))
# Megatron compiles small functions, which takes time. This also affects all later tests of the run.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

HIDDEN, LENGTH, BATCH, EXPERTS = 24, 6, 3, 8
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "drop": {"moe_expert_capacity_factor": 0.75},
    "sigmoid": {"moe_router_score_function": "sigmoid", "moe_router_topk": 3},
    "aux": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
    "shared": {"moe_shared_expert_intermediate_size": 16},
    "fp64": {"moe_router_dtype": "fp64"},
    "bfloat16": {"bf16": True, "params_dtype": torch.bfloat16},
}
WORLDS = {"ep4": (1, 4), "ep2": (1, 2), "tp2_ep2": (2, 2), "ep1": (1, 1)}


def parallel(tp: int, ep: int) -> None:
    """Create Megatron's process groups."""
    from megatron.core import parallel_state

    importlib.import_module("megatron_cpu").use_cpu()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=tp,
    )


def layer_of(tp: int, ep: int, case: dict[str, Any]) -> Any:
    """Return a layer with the dispatcher of Megatron that runs on CPUs."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    options: dict[str, Any] = {
        "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 4,
        "num_moe_experts": EXPERTS, "moe_router_topk": 2, "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none", "moe_ffn_hidden_size": 16,
        "moe_token_dispatcher_type": "allgather", "tensor_model_parallel_size": tp,
        "expert_model_parallel_size": ep, "expert_tensor_parallel_size": tp,
        "sequence_parallel": tp > 1, "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu, "add_bias_linear": False,
        "bias_activation_fusion": False, "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False, **case,
    }  # fmt: skip
    torch.manual_seed(1 + dist.get_rank() % (tp * ep))
    spec = get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False)
    layer = spec(TransformerConfig(**options))
    with torch.no_grad():
        dist.broadcast(layer.router.weight, 0)
    return layer.train()


def gradients_of(layer: Any, x: torch.Tensor, ct: torch.Tensor) -> list[torch.Tensor]:
    """Return output, gradient of x, and gradients of all parameters."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out, _ = layer(x)
    out.backward(ct)
    return [out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]


def the_same(rank: int, world: str, name: str, most: float) -> None:
    """Check that EPIC's dispatcher gives the numbers of Megatron's, and equal bits in two runs."""
    megatron = importlib.import_module("epic.torch.megatron")
    tp, ep = WORLDS[world]
    parallel(tp, ep)
    layer = layer_of(tp, ep, CASES[name])
    dtype = layer.config.params_dtype
    x, ct = (numbers(10 * seed + rank, LENGTH, BATCH, HIDDEN).to(dtype) for seed in (1, 2))
    wanted = gradients_of(layer, x, ct)
    with megatron.use_epic(layer, max_tokens=LENGTH * BATCH) as group:
        assert group.num_ranks == tp * ep
        got = gradients_of(layer, x, ct)
        again = gradients_of(layer, x, ct)
    for a, b, c in zip(got, wanted, again, strict=True):
        assert relative(a.float(), b.float()) < most
        assert torch.equal(a, c)


@pytest.mark.parametrize("name", CASES)
def test_the_same(world: Any, name: str) -> None:
    """Check every case on 4 ranks."""
    world.run(the_same, "ep4", name, 0.03 if name == "bfloat16" else 1e-5)


@pytest.mark.parametrize("ranks", ["ep2", "tp2_ep2", "ep1"])
def test_other_groups(world: Any, ranks: str) -> None:
    """Check several groups, experts sharded by tensor parallelism, and one rank."""
    world.run(the_same, ranks, "plain", 1e-5)


def uneven(rank: int) -> None:
    """Compare ranks with different numbers of tokens with loops over all experts."""
    megatron = importlib.import_module("epic.torch.megatron")
    parallel(1, 4)
    layer = layer_of(1, 4, {})
    rows = (5, 2, 11, 1)
    x = numbers(rank, rows[rank], 1, HIDDEN)
    with megatron.use_epic(layer, max_tokens=16):
        out, _ = layer(x)
    experts: list[Any] = [None] * 4
    own = [[p.detach() for p in e.parameters()] for e in layer.experts.local_experts]
    dist.all_gather_object(experts, own)
    probs, routing_map = layer.router(x)
    wanted = torch.zeros(rows[rank], HIDDEN)
    for expert, (up, down) in enumerate(e for each in experts for e in each):
        gate, value = (x[:, 0] @ up.T).chunk(2, dim=-1)
        y = (torch.nn.functional.silu(gate) * value) @ down.T
        wanted += torch.where(routing_map, probs, 0)[:, expert, None] * y
    assert relative(out[:, 0].detach(), wanted.detach()) < 1e-5


def in_flight(rank: int) -> None:
    """Check two layers that share a group, chunks of a model, a second micro-batch before the
    backward of the first, and recomputation in backward."""
    from torch.utils.checkpoint import checkpoint

    megatron = importlib.import_module("epic.torch.megatron")
    parallel(1, 4)
    layers = [layer_of(1, 4, {}) for _ in range(2)]
    with megatron.use_epic(layers, max_tokens=LENGTH * BATCH) as group:
        managers = [layer.token_dispatcher._comm_manager for layer in layers]
        assert all(manager.group is group for manager in managers)
        xs = [numbers(seed + rank, LENGTH, BATCH, HIDDEN).requires_grad_() for seed in (1, 11)]

        def run(x: torch.Tensor, again: bool) -> torch.Tensor:
            for layer in layers:
                x = x + (checkpoint(layer, x, use_reentrant=False) if again else layer(x))[0]
            return x

        alone = [torch.autograd.grad(run(x, False).square().sum(), x)[0] for x in xs]
        for again in (False, True):
            outs = [run(x, again) for x in xs]
            for x, out, wanted in zip(xs, outs, alone, strict=True):
                assert torch.equal(torch.autograd.grad(out.square().sum(), x)[0], wanted)


def inference_optimized(rank: int) -> None:
    """Check that a layer which has a second dispatcher for inference keeps EPIC's dispatcher."""
    megatron = importlib.import_module("epic.torch.megatron")
    parallel(1, 4)
    layer = layer_of(1, 4, {})
    # As the layer does if transformer_impl is "inference_optimized", which needs a GPU.
    layer._training_token_dispatcher = layer._inference_token_dispatcher = layer.token_dispatcher
    with megatron.use_epic(layer, max_tokens=16):
        mine = layer.token_dispatcher
        layer(numbers(rank, 2, 1, HIDDEN))
        assert isinstance(mine, megatron.EpicTokenDispatcher) and layer.token_dispatcher is mine


def refused(rank: int) -> None:
    """Check that unsupported options are refused, and that a model without layers is unchanged."""
    megatron = importlib.import_module("epic.torch.megatron")
    from epic.errors import EpicUnsupportedError

    parallel(1, 4)
    padded = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    with pytest.raises(EpicUnsupportedError, match="moe_pad_expert_input_to_capacity"):
        megatron.use_epic(layer_of(1, 4, padded), max_tokens=16)
    assert megatron.use_epic(torch.nn.Linear(2, 2), max_tokens=16) is None


@pytest.mark.parametrize("what", [uneven, in_flight, inference_optimized, refused])
def test_among_processes(world: Any, what: Callable[[int], None]) -> None:
    """Run the test on every rank."""
    world.run(what)


def test_chosen_experts() -> None:
    """Check maps with fewer choices than top_k; a chosen expert of probability 0 stays chosen."""
    megatron = importlib.import_module("epic.torch.megatron")
    routing_map = torch.tensor(
        [[True, False, True, False], [False] * 4, [False, True, False, True]]
    )
    probs = torch.tensor([[0.2, 0.9, 0.7, 0.0], [0.3] * 4, [0.0, 0.0, 0.0, 0.4]])
    experts, weights = megatron.chosen_experts(routing_map, probs.requires_grad_(), 2)
    assert experts.tolist() == [[2, 0], [-1, -1], [3, 1]]
    assert weights.tolist() == probs.gather(1, experts.clamp(min=0)).mul(experts >= 0).tolist()
    weights.sum().backward()
    assert probs.grad is not None and torch.equal(probs.grad, routing_map.float())
