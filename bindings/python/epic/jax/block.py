# SPDX-License-Identifier: Apache-2.0
"""What the Flax modules share: the layer's parameters by name, with shapes, logical axes and
initializers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from epic.jax import placement, sharded
from epic.jax.groups import Group
from epic.jax.moe import GroupedGemm, Moe, MoeOut, MoeWeights

Initialiser = Callable[..., Any]
Names = tuple[str | None, ...]

# Variance 1 / fan-in, for each expert by itself.
KERNEL: Initialiser = jax.nn.initializers.variance_scaling(
    1.0, "fan_in", "truncated_normal", in_axis=-2, out_axis=-1, batch_axis=(0,)
)
GATE: Initialiser = jax.nn.initializers.lecun_normal()
ZEROS: Initialiser = jax.nn.initializers.zeros


@dataclass(frozen=True)
class Parameter:
    """One array of all experts; `names` are its logical axes."""

    shape: tuple[int, ...]
    names: Names
    init: Initialiser


@dataclass(frozen=True)
class Biases:
    """Which biases a block has."""

    gate: bool = False
    experts: bool = False
    shared: bool = False


def logical_rules(
    group: Group, fsdp_axes: tuple[str, ...] = ()
) -> tuple[tuple[str, tuple[str, ...] | None], ...]:
    """Logical axis -> mesh axes, as the layer wants them: "exp" over the group, "embed" (hidden)
    over the FSDP axes, "mlp" (inner) nowhere."""
    return (("exp", group.axes), ("embed", tuple(fsdp_axes) or None), ("mlp", None))


def parameters(group: Group, options: Moe, biases: Biases) -> dict[str, Parameter]:
    """Those that the options ask for, by their names in MoeWeights.  Experts that the ranks do not
    divide are on every rank."""
    exp = "exp" if placement.is_even(group, options.layer) else None
    experts, hidden = options.layer.num_experts, options.experts.hidden
    inner, width = options.experts.inner, options.experts.width
    columns = options.router.num_experts + options.router.zero_experts
    found = {
        "w_gate": Parameter((hidden, columns), ("embed", None), GATE),
        "w_gate_up": Parameter((experts, hidden, width), (exp, "embed", "mlp"), KERNEL),
        "w_down": Parameter((experts, inner, hidden), (exp, "mlp", "embed"), KERNEL),
    }
    if biases.gate:
        found["b_gate"] = Parameter((columns,), (None,), ZEROS)
    if biases.experts:
        found["b_gate_up"] = Parameter((experts, width), (exp, "mlp"), ZEROS)
        found["b_down"] = Parameter((experts, hidden), (exp, None), ZEROS)
    if options.shared:
        inner, width = options.shared.inner, options.shared.width
        found["shared_gate_up"] = Parameter((1, hidden, width), (None, "embed", "mlp"), KERNEL)
        found["shared_down"] = Parameter((1, inner, hidden), (None, "mlp", "embed"), KERNEL)
        if biases.shared:
            found["shared_b_gate_up"] = Parameter((1, width), (None, "mlp"), ZEROS)
            found["shared_b_down"] = Parameter((1, hidden), (None, None), ZEROS)
    return found


class Block(Protocol):
    """What a module of either kind has."""

    mesh: Mesh
    group: Group
    options: Moe
    dtype: Any
    token_axes: tuple[str, ...] | None
    fsdp_axes: tuple[str, ...]
    loss_axes: tuple[str, ...]
    grouped_gemm: GroupedGemm | None


def apply(
    module: Block, x: Any, weights: dict[str, Any], bias: Any, token_ids: Any, table: Any
) -> MoeOut:
    """sharded.moe in the module's dtype; the gate is in float32 (float64 rows: float64).

    bias [num_experts], or None: for the choice of experts; zero-experts have none.
    """
    x = x if module.dtype is None else x.astype(module.dtype)
    wide = "float64" if x.dtype == "float64" else "float32"
    weights = weights | {n: weights[n].astype(wide) for n in ("w_gate", "b_gate") if n in weights}
    if bias is not None:
        weights["bias"] = jnp.pad(bias, (0, module.options.router.zero_experts))
    return sharded.moe(
        module.mesh,
        module.group,
        module.options,
        x,
        MoeWeights(**weights),
        token_axes=module.token_axes,
        token_ids=token_ids,
        table=table,
        fsdp_axes=module.fsdp_axes,
        loss_axes=module.loss_axes,
        grouped_gemm=module.grouped_gemm,
    )
