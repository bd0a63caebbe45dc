# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's Mixture-of-Experts layer learns a function, its experts spread over processes.

torchrun --nproc-per-node 4 examples/torch/megatron_moe.py           20 steps on the CPU
torchrun --nproc-per-node 4 examples/torch/megatron_moe.py --check   the losses of Megatron's own
                                                                     dispatcher, else exit 1
"""

import argparse
import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from epic.torch.megatron import use_epic

HIDDEN, LENGTH, BATCH = 32, 16, 4
TOLERANCE = 1e-4  # of a loss


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--check", action="store_true", help="compare with Megatron's dispatcher")
    return parser.parse_args()


def without_gpu() -> None:
    """Megatron-Core 0.16.1 asks where its GPU is before it uses a weight; and without Transformer
    Engine its router looks for a name that is not there."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def make_layer() -> MoELayer:
    """As a model would have it; the same at every call."""
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
    return MoELayer(config, spec.submodules)


def train(layer: MoELayer, steps: int) -> list[float]:
    """The losses of all ranks together, each with tokens of its own."""
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    ranks, losses = dist.get_world_size(), []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step * ranks + dist.get_rank())
        x = torch.randn(LENGTH, BATCH, HIDDEN, generator=generator)
        out, _ = layer(x)
        loss = (out - torch.sin(2 * x)).square().mean() / ranks
        optimizer.zero_grad()
        loss.backward()
        dist.all_reduce(layer.router.weight.grad)  # as Megatron's data parallelism does it
        optimizer.step()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        losses.append(float(whole))
    return losses


def run(args: argparse.Namespace) -> int:
    """One process's part; 0 if all is right."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    layer = make_layer()
    use_epic(layer, max_tokens=LENGTH * BATCH)
    losses = train(layer, args.steps)
    wanted = train(make_layer(), args.steps) if args.check else losses
    worst = max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True))
    right = worst < TOLERANCE and losses[-1] < losses[0]
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {args.steps} steps")
        if args.check:
            verdict = "right" if right else "WRONG"
            print(f"largest relative difference of {len(losses)} losses {worst:.1e}: {verdict}")
    return int(not right)


def main() -> int:
    """One of torchrun's processes."""
    args = arguments()
    without_gpu()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    code = run(args)
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
