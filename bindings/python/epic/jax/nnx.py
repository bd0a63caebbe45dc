# SPDX-License-Identifier: Apache-2.0
"""The layer as a flax.nnx module.  It needs flax; only users of this module import it."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.core.spmd import get_logical_axis_rules
from jax.sharding import Mesh

from epic.errors import EpicArgumentError
from epic.jax import block
from epic.jax.block import AxisNames, Biases, Initializer, logical_rules
from epic.jax.gemm import GroupedGemm
from epic.jax.groups import Group
from epic.jax.layer_args import MoeOut
from epic.jax.router import bias_update
from epic.jax.token_specs import TokenAxes
from epic.options import Moe

__all__ = ["Biases", "ExpertBias", "MoEBlock", "Routed", "logical_rules"]


class ExpertBias(nnx.Variable):
    """A bias for the choice of experts.  It is no parameter; the load of the experts changes it."""


class Routed(nnx.Variable):
    """The ids and weights that a block used while `record_routing` was True."""


class MoEBlock(nnx.Module):
    """A Mixture-of-Experts layer of global arrays: x [B, ..., hidden] returns (out, loss).

    Parameters have the names of MoeWeights and MaxText's logical axes "exp", "embed_moe" and
    "mlp_moe". They are sharded by nnx.logical_axis_rules if such rules are active, else by
    logical_rules(group, fsdp_axes, tensor_axis).

    A block records and replays which experts the tokens use.  While the attribute `record_routing`
    is True, each call stores its ids and weights in the variables `topk_idx` and `topk_weights`,
    which are `Routed`.  While `replay_routing` is True, the block uses the ids in `topk_idx`, with
    weights of its own router:

        model.set_attributes(record_routing=True)  # then call the model
        model.set_attributes(record_routing=False, replay_routing=True)

    Args:
        mesh: the mesh that the group was opened with.
        group: the group.
        options: the options of the layer.
        rngs: the random numbers of the initializers.
        biases: which biases the block has.
        bias_rate: the size of a step of the bias for the choice of experts, an ExpertBias.  Each
            call moves the bias towards an even load, while `update_bias` is True and
            `deterministic` is False.  model.eval() sets `deterministic`, and model.train() clears
            it.  0: there is no such bias.
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
        gate_dtype: Any = None,
        token_axes: TokenAxes = None,
        fsdp_axes: tuple[str, ...] = (),
        tensor_axis: str | None = None,
        loss_axes: tuple[str, ...] = (),
        grouped_gemm: GroupedGemm | None = None,
        kernel_init: Initializer | None = None,
        axis_names: AxisNames | None = None,
        logical_of_expert: tuple[int, ...] | None = None,
    ) -> None:
        block.check_module(mesh, group, options, biases, bias_rate)
        self.mesh, self.group, self.options = mesh, group, options
        self.bias_rate, self.update_bias, self.deterministic = bias_rate, True, False
        self.record_routing, self.replay_routing = False, False
        self.dtype, self.gate_dtype, self.token_axes = dtype, gate_dtype, token_axes
        self.fsdp_axes, self.tensor_axis = fsdp_axes, tensor_axis
        self.loss_axes = loss_axes
        self.grouped_gemm = grouped_gemm
        self.logical_of_expert = logical_of_expert
        more = (axis_names, kernel_init, logical_of_expert)
        wanted = block.make_parameters(group, options, biases, *more)
        self.names = tuple(wanted)
        rules = get_logical_axis_rules() or logical_rules(group, fsdp_axes, tensor_axis)

        def make_variable(kind: Any, value: Any, names: block.Names) -> Any:
            """Return a variable in its sharding.

            nnx itself raises an error for rules that contain a mesh axis twice.
            """
            value = block.constrain_sharding(value, block.parameter_sharding(mesh, names, rules))
            with nnx.use_eager_sharding(False):
                return kind(value, out_sharding=names, mesh=mesh)

        for name, spec in wanted.items():
            value = spec.init(rngs.params(), spec.shape, param_dtype)
            setattr(self, name, make_variable(nnx.Param, value, spec.names))
        if bias_rate:
            zeros = jnp.zeros(options.layer.num_ids, jnp.float32)
            self.expert_bias = make_variable(ExpertBias, zeros, (None,))

    def set_view(self, deterministic: bool | None = None) -> None:
        """Set `deterministic`: whether the router's bias stays unchanged.

        nnx.view(model, deterministic=True) calls this method.
        """
        if deterministic is not None:
            self.deterministic = deterministic

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
        more = {"forced": forced, "capacity_limit": capacity_limit}
        out = self.moe(x, token_ids, table, token_mask, **more)
        return out.out, out.loss

    def moe(
        self,
        x: Any,
        token_ids: Any = None,
        table: Any = None,
        token_mask: Any = None,
        *,
        forced: Any = None,
        capacity_limit: Any = None,
        return_routing: bool = False,
    ) -> MoeOut:
        """Run the layer; return its MoeOut, which also has the load and the demand."""
        if forced is None and self.replay_routing:
            if not hasattr(self, "topk_idx"):
                raise EpicArgumentError(
                    "replay_routing is True and the block has no recorded ids: must be False until "
                    "a call with record_routing=True has stored them"
                )
            forced = self.topk_idx[...]
        tokens: dict[str, Any] = {"token_ids": token_ids, "table": table}
        tokens |= {"token_mask": token_mask, "forced": forced, "capacity_limit": capacity_limit}
        tokens["return_routing"] = return_routing or self.record_routing
        weights = {name: getattr(self, name)[...] for name in self.names}
        bias = self.expert_bias[...] if self.bias_rate else None
        out = block.apply_moe(self, x, weights, bias, **tokens)
        if self.record_routing:
            self.topk_idx: Any = Routed(out.routing.topk_idx)
            self.topk_weights = Routed(out.routing.weights)
        if bias is not None and self.update_bias and not self.deterministic:
            self.expert_bias[...] = bias_update(bias, out.load_of_ids, self.bias_rate)
        return out
