# SPDX-License-Identifier: Apache-2.0
"""torchtitan's Mixture-of-Experts layer learns a function, its experts spread over processes.

torchrun --nproc-per-node 4 examples/torch/titan_moe.py           20 steps on the CPU
torchrun --nproc-per-node 4 examples/torch/titan_moe.py --check   compare the losses with those of
                                                                  torchtitan's own all-to-all
With --check the exit status is 1 if the losses differ.
"""

import sys
from pathlib import Path
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
import one_layer

HIDDEN, INNER, LENGTH, BATCH, EXPERTS, TOP_K = 32, 48, 16, 4, 8, 2
# Largest relative difference of a loss. It is large, because torchtitan multiplies in bfloat16.
TOLERANCE = 0.02
OVERRIDE = (
    "epic.torch.titan.epic",
    {"hidden_dim": HIDDEN, "num_max_tokens_per_rank": LENGTH * BATCH},
)


def make_layer(mesh: DeviceMesh, overrides: list[Any]) -> MoE:
    """Return a layer, made as in torchtitan's trainer, with equal parameters in every call.

    The trainer makes a configuration, applies the overrides, builds the layer, and sets the mesh.
    """
    local = EXPERTS // mesh.size()  # on GPUs torchtitan's parallelize() would divide the experts
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
            is_expert_weight = "inner_experts" in name
            shape[0] *= mesh.size() if is_expert_weight else 1
            drawn = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            first = mesh.get_local_rank() * local if is_expert_weight else 0
            parameter.copy_(drawn[first : first + parameter.shape[0]])
    layer.routed_experts.token_dispatcher.wire_meshes(ep_mesh=mesh)
    return layer


def train(mesh: DeviceMesh, steps: int, overrides: list[Any]) -> list[float]:
    """Return the losses of a training with overrides; without any, with torchtitan's all-to-all."""
    layer = make_layer(mesh, overrides)
    return one_layer.train(
        layer, layer.parameters(), layer.router.gate.weight, (BATCH, LENGTH, HIDDEN), steps
    )


def main() -> int:
    """Run one of torchrun's processes."""
    args = one_layer.start(__doc__, "torchtitan's own")
    set_spmd_backend("default")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    losses = train(mesh, args.steps, [OVERRIDE])
    wanted = train(mesh, args.steps, []) if args.check else None
    return one_layer.end(losses, wanted, TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
