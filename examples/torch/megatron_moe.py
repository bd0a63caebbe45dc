# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's Mixture-of-Experts layer learns a function, its experts spread over processes.

torchrun --nproc-per-node 4 examples/torch/megatron_moe.py           20 steps on the CPU
torchrun --nproc-per-node 4 examples/torch/megatron_moe.py --check   compare the losses with those
                                                                     of Megatron's own dispatcher
With --check the exit status is 1 if the losses differ.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from epic.torch.megatron import use_epic

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
import megatron_cpu
import one_layer

HIDDEN, LENGTH, BATCH = 32, 16, 4
TOLERANCE = 1e-4  # largest relative difference of a loss


def make_layer() -> Any:
    """Return a layer as a model of Megatron-Core has it, with equal parameters in every call."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_ffn_hidden_size=48,
        moe_token_dispatcher_type="allgather",
        expert_model_parallel_size=dist.get_world_size(),
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        use_cpu_initialization=True,
    )
    torch.manual_seed(1)
    spec = get_moe_module_spec(use_te=False, num_experts=8, moe_grouped_gemm=False)
    return spec(config)


def train(steps: int, with_epic: bool) -> list[float]:
    """Return the losses of a training with EPIC, or with Megatron's own dispatcher."""
    layer = make_layer()
    if with_epic:
        use_epic(layer, max_tokens=LENGTH * BATCH)
    return one_layer.train(
        lambda x: layer(x)[0],
        layer.parameters(),
        layer.router.weight,
        (LENGTH, BATCH, HIDDEN),
        steps,
    )


def main() -> int:
    """Run one of torchrun's processes."""
    args = one_layer.start(__doc__, "Megatron's own")
    megatron_cpu.use_cpu()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    losses = train(args.steps, with_epic=True)
    wanted = train(args.steps, with_epic=False) if args.check else None
    return one_layer.end(losses, wanted, TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
