# SPDX-License-Identifier: Apache-2.0
"""The layer as a flax.nnx module.  Needs flax; nothing else of EPIC imports it."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.core.spmd import get_logical_axis_rules
from jax.sharding import Mesh

from epic.jax import block
from epic.jax.block import AxisNames, Biases, Initializer, logical_rules
from epic.jax.gemm import GroupedGemm
from epic.jax.groups import Group
from epic.jax.layer_args import MoeOut
from epic.jax.router import bias_update
from epic.jax.sharded import TokenAxes
from epic.options import Moe

__all__ = ["Biases", "ExpertBias", "MoEBlock", "logical_rules"]


class ExpertBias(nnx.Variable):
    """A bias for the choice of experts: no parameter, it follows the load."""


class MoEBlock(nnx.Module):
    """A Mixture-of-Experts layer of global arrays: x [B, ..., hidden] -> (out, loss).

    Parameters have MaxText's logical axes, "exp", "embed_moe" and "mlp_moe", or those that
    axis_names gives for a parameter's name, and lie where logical_rules(group, fsdp_axes) says,
    unless nnx.logical_axis_rules does.  token_axes: as sharded.moe's.  Rows are computed in dtype
    (None: as they come); parameters are param_dtype.  bias_rate above 0: an ExpertBias follows
    the load at every call while update_bias is true and the module trains: model.eval() sets
    deterministic, model.train() clears it.  logical_of_expert: with layer.num_logical, whose
    replica each expert is; replicas begin alike and stay so.
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
        token_axes: TokenAxes = None,
        fsdp_axes: tuple[str, ...] = (),
        tensor_axis: str | None = None,
        loss_axes: tuple[str, ...] = (),
        grouped_gemm: GroupedGemm | None = None,
        kernel_init: Initializer | None = None,
        axis_names: AxisNames | None = None,
        logical_of_expert: tuple[int, ...] | None = None,
    ) -> None:
        block.check_module(mesh, group, options, biases)
        self.mesh, self.group, self.options = mesh, group, options
        self.bias_rate, self.update_bias, self.deterministic = bias_rate, True, False
        self.dtype, self.token_axes = dtype, token_axes
        self.fsdp_axes, self.tensor_axis = fsdp_axes, tensor_axis
        self.loss_axes = loss_axes
        self.grouped_gemm = grouped_gemm
        self.logical_of_expert = logical_of_expert
        more = (axis_names, kernel_init, logical_of_expert)
        wishes = block.make_parameters(group, options, biases, *more)
        self.names = tuple(wishes)
        rules = get_logical_axis_rules() or logical_rules(group, fsdp_axes, tensor_axis)

        def made(kind: Any, value: Any, names: block.Names) -> Any:
            """Where it belongs; nnx itself would refuse rules that name an axis twice."""
            value = block.constrain_sharding(value, block.parameter_sharding(mesh, names, rules))
            with nnx.use_eager_sharding(False):
                return kind(value, out_sharding=names, mesh=mesh)

        for name, wish in wishes.items():
            value = wish.init(rngs.params(), wish.shape, param_dtype)
            setattr(self, name, made(nnx.Param, value, wish.names))
        if bias_rate:
            zeros = jnp.zeros(options.layer.num_ids, jnp.float32)
            self.expert_bias = made(ExpertBias, zeros, (None,))

    def set_view(self, deterministic: bool | None = None) -> None:
        """nnx.view(model, deterministic=True) is a model in which the bias stays."""
        if deterministic is not None:
            self.deterministic = deterministic

    def __call__(
        self, x: Any, token_ids: Any = None, table: Any = None, token_mask: Any = None
    ) -> tuple[Any, Any]:
        """The layer; token_ids [B, ...] and table [rows, top_k]: experts by token id; token_mask
        [B, ...] bool: tokens that count."""
        out = self.moe(x, token_ids, table, token_mask)
        return out.out, out.loss

    def moe(
        self, x: Any, token_ids: Any = None, table: Any = None, token_mask: Any = None
    ) -> MoeOut:
        """The same with load [num_experts] and demand [devices]: as sharded.moe gives them."""
        tokens = {"token_ids": token_ids, "table": table, "token_mask": token_mask}
        weights = {name: getattr(self, name)[...] for name in self.names}
        bias = self.expert_bias[...] if self.bias_rate else None
        out = block.apply_moe(self, x, weights, bias, **tokens)
        if bias is not None and self.update_bias and not self.deterministic:
            self.expert_bias[...] = bias_update(bias, out.load_of_ids, self.bias_rate)
        return out
