# SPDX-License-Identifier: Apache-2.0
"""The layer as a flax.linen module.  It needs flax; only users of this module import it."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax.sharding import Mesh

from epic.jax import block
from epic.jax.block import AxisNames, Biases, Initializer, logical_rules
from epic.jax.gemm import GroupedGemm
from epic.jax.groups import Group
from epic.jax.router import bias_update
from epic.jax.token_specs import TokenAxes
from epic.options import Moe

__all__ = ["Biases", "MoEBlock", "logical_rules"]


class MoEBlock(nn.Module):
    """A Mixture-of-Experts layer of global arrays: x [B, ..., hidden] returns (out, loss).

    Parameters have the names of MoeWeights and MaxText's logical axes "exp", "embed_moe" and
    "mlp_moe"; logical_rules(group, fsdp_axes) maps these to mesh axes.  The loss is sown as
    "moe_loss" in "losses", the load as "load" in "intermediates".

    The collection "routing" records and replays which experts the tokens use.  If it is mutable,
    the block stores "topk_idx" and "weights" in it.  If it is not mutable but present, the block
    uses the recorded experts, with weights of its own router:

        _, record = model.apply(variables, x, mutable=["routing"])
        out, loss = model.apply({**variables, **record}, x)

    Attributes:
        mesh: the mesh that the group was opened with.
        group: the group.
        options: the options of the layer.
        biases: which biases the block has.
        bias_rate: the size of a step of the bias for the choice of experts, "expert_bias" in the
            collection "moe".  Each call moves the bias towards an even load, if the collection is
            mutable.  0: there is no such bias.
        dtype: the dtype in which rows are computed; None: that of x.
        param_dtype: the dtype of the parameters.
        gate_dtype: the dtype to which the router's weights are rounded in each call, for example
            that of the rows.  Products are added in float32.  None: float32.
        token_axes: see `epic.jax.sharded.moe`.
        fsdp_axes: see `epic.jax.moe`.
        tensor_axis: see `epic.jax.moe`.
        loss_axes: see `epic.jax.moe`.
        grouped_gemm: see `epic.jax.moe`.
        kernel_init: the initializer of the experts' weights; None: variance 1 / fan-in.
        axis_names: logical axes of some parameters, which replace those of MaxText.
        logical_of_expert: see `epic.jax.moe`.  Replicas have equal values at the beginning, and
            their values stay equal.

    """

    mesh: Mesh
    group: Group
    options: Moe
    biases: Biases = Biases()
    bias_rate: float = 0.0
    dtype: Any = None
    param_dtype: Any = jnp.float32
    gate_dtype: Any = None
    token_axes: TokenAxes = None
    fsdp_axes: tuple[str, ...] = ()
    tensor_axis: str | None = None
    loss_axes: tuple[str, ...] = ()
    grouped_gemm: GroupedGemm | None = None
    kernel_init: Initializer | None = None
    axis_names: AxisNames | None = None
    logical_of_expert: tuple[int, ...] | None = None

    def weights(self) -> dict[str, Any]:
        """Return the parameters, which initialization creates."""
        found = {}
        more = (self.axis_names, self.kernel_init, self.logical_of_expert)
        wanted = block.make_parameters(self.group, self.options, self.biases, *more)
        for name, spec in wanted.items():
            init = nn.with_logical_partitioning(spec.init, spec.names)
            found[name] = self.param(name, init, spec.shape, self.param_dtype)
        return found

    @nn.compact
    def __call__(
        self,
        x: Any,
        token_ids: Any = None,
        table: Any = None,
        token_mask: Any = None,
        *,
        forced: Any = None,
        capacity_limit: Any = None,
    ) -> tuple[Any, Any]:
        """Run the layer.

        Args:
            x: [B, ..., hidden].
            token_ids: [B, ...], with `table`; see `epic.jax.moe`.
            table: [rows, top_k].
            token_mask: [B, ...] bool: False for padding tokens.
            forced: a `Routing` of [B, ..., top_k], or ids alone; see `epic.jax.moe`.
            capacity_limit: int32 without dimensions; see `epic.jax.moe`.

        Returns:
            out [B, ..., hidden] and the loss [].

        """
        tokens: dict[str, Any] = {"token_ids": token_ids, "table": table}
        tokens |= {"token_mask": token_mask, "capacity_limit": capacity_limit}
        block.check_module(self.mesh, self.group, self.options, self.biases, self.bias_rate)
        weights, bias = self.weights(), None
        if self.bias_rate:
            shape = (self.options.layer.num_ids,)
            bias = self.variable("moe", "expert_bias", jnp.zeros, shape, jnp.float32)
        # init() does not call EPIC, so its batch may have any size.
        if self.is_initializing():
            return x if self.dtype is None else x.astype(self.dtype), jnp.zeros((), jnp.float32)
        records = self.is_mutable_collection("routing")
        if forced is None and not records and self.has_variable("routing", "topk_idx"):
            forced = self.get_variable("routing", "topk_idx")
        tokens |= {"forced": forced, "return_routing": records}
        value = None if bias is None else bias.value
        out = block.apply_moe(self, x, weights, value, **tokens)
        if bias is not None and self.is_mutable_collection("moe"):
            bias.value = bias_update(bias.value, out.load_of_ids, self.bias_rate)
        if records:
            for name, found in out.routing._asdict().items():
                self.put_variable("routing", name, found)
        self.sow("losses", "moe_loss", out.loss)
        self.sow("intermediates", "load", out.load)
        return out.out, out.loss
