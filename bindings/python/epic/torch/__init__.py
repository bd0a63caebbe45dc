# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism as PyTorch functions, on EPIC's C core.  docs/guide/torch.md is the guide."""

from epic.bootstrapping import Nccl, Tcp
from epic.errors import EpicArgumentError, EpicError, EpicNonFiniteError, EpicUnsupportedError
from epic.invariance import Difference, InvarianceReport
from epic.options import Experts, Layer, Moe, Router
from epic.routing_stats import EXPERT_ABSENT, EXPERT_FULL, NO_EXPERT, RANK_FULL, RoutingStats
from epic.torch.combining import combine
from epic.torch.experts import ExpertWeights, experts, slab_mm
from epic.torch.finite import check_finite
from epic.torch.flat import dispatch_flat
from epic.torch.gradients import GradScaler, clip_grad_norm_, count_labels
from epic.torch.grouped import GroupedRows, dispatch_grouped
from epic.torch.groups import Group, threads
from epic.torch.invariance import check_invariance
from epic.torch.loading import from_pretrained
from epic.torch.module import MoE, sharded_state
from epic.torch.moe import MoeOut, MoeWeights, moe
from epic.torch.narrow import dequantize, swizzle_scales
from epic.torch.ops import as_epic_error
from epic.torch.placement import Placement
from epic.torch.pretrained import from_block, replace_moe, sum_gradients
from epic.torch.replay import record_routing, replay_routing
from epic.torch.replicas import sum_replica_grads, sum_replicas
from epic.torch.restore import restore_moe, save_pretrained
from epic.torch.router import balance_loss, bias_update, route, z_loss
from epic.torch.routing import Routing
from epic.torch.routing_stats import read_plan
from epic.torch.scaled import scaled, unscaled
from epic.torch.steps import (
    EXACT,
    Plan,
    dispatch,
    dispatch_quantized,
    plan,
    plan_dispatch,
    save_exchange,
    save_plans,
)
from epic.torch.sums import sum
from epic.torch.training_state import TrainingState
from epic.torch.windows import register_window, window

__all__ = [
    "EXACT",
    "EXPERT_ABSENT",
    "EXPERT_FULL",
    "NO_EXPERT",
    "RANK_FULL",
    "Difference",
    "EpicArgumentError",
    "EpicError",
    "EpicNonFiniteError",
    "EpicUnsupportedError",
    "ExpertWeights",
    "Experts",
    "GradScaler",
    "Group",
    "GroupedRows",
    "InvarianceReport",
    "Layer",
    "MoE",
    "Moe",
    "MoeOut",
    "MoeWeights",
    "Nccl",
    "Placement",
    "Plan",
    "Router",
    "Routing",
    "RoutingStats",
    "Tcp",
    "TrainingState",
    "as_epic_error",
    "balance_loss",
    "bias_update",
    "check_finite",
    "check_invariance",
    "clip_grad_norm_",
    "combine",
    "count_labels",
    "dequantize",
    "dispatch",
    "dispatch_flat",
    "dispatch_grouped",
    "dispatch_quantized",
    "experts",
    "from_block",
    "from_pretrained",
    "moe",
    "plan",
    "plan_dispatch",
    "read_plan",
    "record_routing",
    "register_window",
    "replace_moe",
    "replay_routing",
    "restore_moe",
    "route",
    "save_exchange",
    "save_plans",
    "save_pretrained",
    "scaled",
    "sharded_state",
    "slab_mm",
    "sum",
    "sum_gradients",
    "sum_replica_grads",
    "sum_replicas",
    "swizzle_scales",
    "threads",
    "unscaled",
    "window",
    "z_loss",
]
