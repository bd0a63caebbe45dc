# SPDX-License-Identifier: Apache-2.0
"""The layer as a flax.linen module.  Needs flax; nothing else of EPIC imports it."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax.sharding import Mesh

from epic.jax import block
from epic.jax.block import AxisNames, Biases, Initializer, logical_rules
from epic.jax.gemm import GroupedGemm
from epic.jax.groups import Group
from epic.jax.router import bias_update
from epic.jax.sharded import TokenAxes
from epic.options import Moe

__all__ = ["Biases", "MoEBlock", "logical_rules"]


class MoEBlock(nn.Module):
    """A Mixture-of-Experts layer of global arrays: x [B, ..., hidden] -> (out, loss).

    Parameters have MaxText's logical axes, "exp", "embed_moe" and "mlp_moe", or those that
    axis_names gives for a parameter's name; logical_rules(group, fsdp_axes) says where the layer
    wants them.  token_axes: as sharded.moe's.  Rows are computed in dtype (None: as they come);
    parameters are param_dtype.  bias_rate above 0: a bias for the choice of experts, "expert_bias"
    in the collection "moe", follows the load whenever that is mutable.  The loss is sown as
    "moe_loss" in "losses", the load as "load" in "intermediates".  logical_of_expert: with
    layer.num_logical, whose replica each expert is; replicas begin alike and stay so.
    """

    mesh: Mesh
    group: Group
    options: Moe
    biases: Biases = Biases()
    bias_rate: float = 0.0
    dtype: Any = None
    param_dtype: Any = jnp.float32
    token_axes: TokenAxes = None
    fsdp_axes: tuple[str, ...] = ()
    tensor_axis: str | None = None
    loss_axes: tuple[str, ...] = ()
    grouped_gemm: GroupedGemm | None = None
    kernel_init: Initializer | None = None
    axis_names: AxisNames | None = None
    logical_of_expert: tuple[int, ...] | None = None

    def weights(self) -> dict[str, Any]:
        """Parameters, made at initialization."""
        found = {}
        more = (self.axis_names, self.kernel_init, self.logical_of_expert)
        wishes = block.make_parameters(self.group, self.options, self.biases, *more)
        for name, wish in wishes.items():
            init = nn.with_logical_partitioning(wish.init, wish.names)
            found[name] = self.param(name, init, wish.shape, self.param_dtype)
        return found

    @nn.compact
    def __call__(
        self, x: Any, token_ids: Any = None, table: Any = None, token_mask: Any = None
    ) -> tuple[Any, Any]:
        """The layer; token_ids [B, ...] and table [rows, top_k]: experts by token id; token_mask
        [B, ...] bool: tokens that count."""
        tokens = {"token_ids": token_ids, "table": table, "token_mask": token_mask}
        block.check_module(self.mesh, self.group, self.options, self.biases)
        weights, bias = self.weights(), None
        if self.bias_rate:
            shape = (self.options.layer.num_ids,)
            bias = self.variable("moe", "expert_bias", jnp.zeros, shape, jnp.float32)
        if self.is_initializing():  # shapes are known: no call, and any batch will do
            return x if self.dtype is None else x.astype(self.dtype), jnp.zeros((), jnp.float32)
        value = None if bias is None else bias.value
        out = block.apply_moe(self, x, weights, value, **tokens)
        if bias is not None and self.is_mutable_collection("moe"):
            bias.value = bias_update(bias.value, out.load_of_ids, self.bias_rate)
        self.sow("losses", "moe_loss", out.loss)
        self.sow("intermediates", "load", out.load)
        return out.out, out.loss
