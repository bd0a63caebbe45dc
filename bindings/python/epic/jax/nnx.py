# SPDX-License-Identifier: Apache-2.0
"""The layer as a flax.nnx module.  Needs flax; nothing else of EPIC imports it."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.core.spmd import get_logical_axis_rules
from jax.sharding import Mesh

from epic.jax import block, places
from epic.jax.block import Biases, Initialiser, logical_rules
from epic.jax.groups import Group
from epic.jax.moe import GroupedGemm, Moe
from epic.jax.router import bias_update

__all__ = ["Biases", "ExpertBias", "MoEBlock", "logical_rules"]


class ExpertBias(nnx.Variable):
    """A bias for the choice of experts: no parameter, it follows the load."""


class MoEBlock(nnx.Module):
    """A Mixture-of-Experts layer of global arrays: x [B, ..., hidden] -> (out, loss).

    Parameters have the logical axes "exp", "embed" and "mlp" and lie where logical_rules(group,
    fsdp_axes) says, unless nnx.logical_axis_rules does.  Rows are computed in dtype (None: as
    they come); parameters are param_dtype.  bias_rate above 0: an ExpertBias follows the load
    at every call while update_bias is true.
    """

    def __init__(
        self,
        mesh: Mesh,
        group: Group,
        options: Moe,
        *,
        rngs: nnx.Rngs,
        biases: Biases = Biases(),  # noqa: B008 (frozen)
        bias_rate: float = 0.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        token_axes: tuple[str, ...] | None = None,
        fsdp_axes: tuple[str, ...] = (),
        loss_axes: tuple[str, ...] = (),
        grouped_gemm: GroupedGemm | None = None,
        kernel_init: Initialiser | None = None,
    ) -> None:
        places.check_mesh(group, mesh)
        self.mesh, self.group, self.options = mesh, group, options
        self.bias_rate, self.update_bias = bias_rate, True
        self.dtype, self.token_axes = dtype, token_axes
        self.fsdp_axes, self.loss_axes = fsdp_axes, loss_axes
        self.grouped_gemm = grouped_gemm
        wishes = block.parameters(group, options, biases)
        self.names = tuple(wishes)
        place: dict[str, Any] = {"mesh": mesh}
        if not get_logical_axis_rules():
            place["sharding_rules"] = logical_rules(group, fsdp_axes)
        for name, wish in wishes.items():
            init = (kernel_init if wish.init is block.KERNEL else None) or wish.init
            value = init(rngs.params(), wish.shape, param_dtype)
            setattr(self, name, nnx.Param(value, out_sharding=wish.names, **place))
        if bias_rate:
            zeros = jnp.zeros(options.layer.num_experts, jnp.float32)
            self.expert_bias = ExpertBias(zeros, out_sharding=(None,), **place)

    def __call__(self, x: Any, token_ids: Any = None, table: Any = None) -> tuple[Any, Any]:
        """The layer; token_ids [B, ...] and table [rows, top_k]: experts by token id."""
        weights = {name: getattr(self, name)[...] for name in self.names}
        bias = self.expert_bias[...] if self.bias_rate else None
        out = block.apply(self, x, weights, bias, token_ids, table)
        if bias is not None and self.update_bias:
            self.expert_bias[...] = bias_update(bias, out.load, self.bias_rate)
        return out.out, out.loss
