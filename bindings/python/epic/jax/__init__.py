# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism as JAX functions, on EPIC's C core.  docs/guide/jax.md is the guide."""

import contextlib
import importlib
from types import ModuleType

from epic import _native
from epic.bootstrapping import Tcp
from epic.errors import (
    EpicArgumentError,
    EpicError,
    EpicNonFiniteError,
    EpicUnsupportedError,
    error_code,
)
from epic.invariance import Difference, InvarianceReport
from epic.jax import export_types, sharded
from epic.jax.dispatching import (
    dequantize,
    dispatch,
    dispatch_flat,
    dispatch_flat_quantized,
    dispatch_quantized,
    plan_dispatch,
)
from epic.jax.e4m3 import scaled, unscaled
from epic.jax.experts import ExpertWeights, experts
from epic.jax.finite import check_finite, find_non_finite
from epic.jax.gate_up import from_maxtext, merge_gate_up, split_gate_up, to_maxtext
from epic.jax.groups import Group, check, close, open
from epic.jax.invariance import check_invariance
from epic.jax.layer_args import MoeOut, MoeWeights, Routing
from epic.jax.library import TARGETS
from epic.jax.moe import moe
from epic.jax.replicas import sum_replica_grads, sum_replicas
from epic.jax.router import balance_loss, bias_update, route, z_loss
from epic.jax.routing_stats import RoutingStats, read_plan
from epic.jax.steps import Plan, combine, plan
from epic.jax.sums import sum
from epic.options import Experts, Layer, Moe, Router

__all__ = [
    "TARGETS",
    "Difference",
    "EpicArgumentError",
    "EpicError",
    "EpicNonFiniteError",
    "EpicUnsupportedError",
    "ExpertWeights",
    "Experts",
    "Group",
    "InvarianceReport",
    "Layer",
    "Moe",
    "MoeOut",
    "MoeWeights",
    "Plan",
    "Router",
    "Routing",
    "RoutingStats",
    "Tcp",
    "balance_loss",
    "bias_update",
    "check",
    "check_finite",
    "check_invariance",
    "close",
    "combine",
    "dequantize",
    "dispatch",
    "dispatch_flat",
    "dispatch_flat_quantized",
    "dispatch_quantized",
    "error_code",
    "experts",
    "find_non_finite",
    "from_maxtext",
    "merge_gate_up",
    "moe",
    "open",
    "plan",
    "plan_dispatch",
    "read_plan",
    "route",
    "scaled",
    "sharded",
    "split_gate_up",
    "sum",
    "sum_replica_grads",
    "sum_replicas",
    "to_maxtext",
    "unscaled",
    "z_loss",
]


export_types.register_types()

# If the libraries are missing, the first call raises the error.
with contextlib.suppress(ImportError):
    _native.warn_without_blas()


def __getattr__(name: str) -> ModuleType:
    """Import epic.jax.linen or epic.jax.nnx at the first use, because they need flax."""
    if name in ("linen", "nnx"):
        return importlib.import_module(f"epic.jax.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
