# SPDX-License-Identifier: Apache-2.0
"""torchtitan's Mixture-of-Experts layer learns a function, its experts spread over processes.

torchrun --nproc-per-node 4 examples/torch/titan_moe.py           20 steps on the CPU
torchrun --nproc-per-node 4 examples/torch/titan_moe.py --check   the losses of torchtitan's own
                                                                  all-to-all, else exit 1
"""

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.config_utils import (
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.moe import MoE

HIDDEN, INNER, LENGTH, BATCH, EXPERTS, TOP_K = 32, 48, 16, 4, 8, 2
TOLERANCE = 0.02  # of a loss: torchtitan's products are in bfloat16
OVERRIDE = (
    "epic.torch.titan.epic",
    {"hidden_dim": HIDDEN, "num_max_tokens_per_rank": LENGTH * BATCH},
)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--check", action="store_true", help="compare with torchtitan's dispatcher")
    return parser.parse_args()


def make_layer(mesh: DeviceMesh, overrides: list[Any]) -> MoE:
    """As torchtitan's trainer makes one: a configuration, overrides, build, the mesh.  The same
    parameters at every call."""
    local = EXPERTS // mesh.size()  # parallelize() would cut the experts, on GPUs
    config = make_moe_config(
        num_experts=EXPERTS,
        router=make_router_config(
            dim=HIDDEN,
            num_experts=EXPERTS,
            gate_param_init={"weight": nn.init.normal_},
            top_k=TOP_K,
            score_func="softmax",
            route_norm=True,
        ),
        routed_experts=make_routed_experts_config(
            dim=HIDDEN,
            hidden_dim=INNER,
            num_experts=EXPERTS,
            top_k=TOP_K,
            param_init={},
            comm_backend="standard",
        ),
    )
    config.routed_experts.inner_experts.num_experts = local
    apply_overrides(OverrideConfig(imports=overrides), config)
    layer = config.build()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            shape = list(parameter.shape)
            of_experts = "inner_experts" in name
            shape[0] *= mesh.size() if of_experts else 1
            drawn = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            first = mesh.get_local_rank() * local if of_experts else 0
            parameter.copy_(drawn[first : first + parameter.shape[0]])
    layer.routed_experts.token_dispatcher.wire_meshes(ep_mesh=mesh)
    return layer


def train(layer: MoE, steps: int) -> list[float]:
    """The losses of all ranks together, each with tokens of its own."""
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    ranks, losses = dist.get_world_size(), []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step * ranks + dist.get_rank())
        x = torch.randn(BATCH, LENGTH, HIDDEN, generator=generator)
        loss = (layer(x) - torch.sin(2 * x)).square().mean() / ranks
        optimizer.zero_grad()
        loss.backward()
        dist.all_reduce(layer.router.gate.weight.grad)  # as FSDP does it
        optimizer.step()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        losses.append(float(whole))
    return losses


def run(args: argparse.Namespace) -> int:
    """One process's part; 0 if all is right."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    losses = train(make_layer(mesh, [OVERRIDE]), args.steps)
    wanted = train(make_layer(mesh, []), args.steps) if args.check else losses
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
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    set_spmd_backend("default")
    code = run(args)
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
