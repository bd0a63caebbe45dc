# SPDX-License-Identifier: Apache-2.0
"""EPIC as a token dispatcher of Megatron-Core.

use_epic(model, max_tokens=...) replaces the token dispatchers of a model after it was built. The
new dispatcher is a MoEFlexTokenDispatcher whose dispatch manager calls EPIC. It is tested with
megatron-core 0.19.2.
"""

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization
from megatron.core.transformer.moe.token_dispatcher import (
    MoEFlexTokenDispatcher,
    MoETokenDispatcher,
    _DispatchManager,
)
from torch import Tensor, nn

from epic.errors import EpicUnsupportedError
from epic.options import Layer
from epic.torch import combining, steps
from epic.torch.groups import Group, shared_group


def chosen_experts(routing_map: Tensor, probs: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Convert the routing of Megatron-Core to ids and weights of top_k experts.

    Args:
        routing_map: bool [tokens, experts]: whether a token uses an expert.
        probs: Weights [tokens, experts], in any dtype of floating point.
        top_k: Largest number of experts of a token.

    Returns:
        Ids and weights [tokens, top_k]; the largest weight comes first. A token with fewer experts
        has id -1 and weight 0 in the remaining columns.
    """
    live = torch.where(routing_map, probs.detach(), -1)
    best, experts = live.topk(top_k, dim=-1)
    none = best < 0
    weights = probs.gather(1, experts).masked_fill(none, 0)
    return experts.masked_fill(none, -1), weights


class EpicManager(_DispatchManager):
    """The dispatch manager of one layer, which sends and returns the rows with EPIC.

    Experts are numbered as in the flexible dispatcher. The group contains the ranks of tensor and
    of expert parallelism. Each of its ranks owns a contiguous block of numbers. So with tensor
    parallelism one expert of the model has several numbers, one for each rank with a part of it.

    Args:
        group: The group.
        layer: EPIC's options, in these numbers of experts.
        config: The TransformerConfig of Megatron-Core.
    """

    def __init__(self, group: Group, layer: Layer, config: Any) -> None:
        self.group, self.layer = group, layer
        self.wide_probs = config.moe_router_dtype == "fp64"
        self.token_indices: Tensor | None = None
        self.token_probs: Tensor | None = None
        self.dispatched_probs: Tensor | None = None
        self.plan: steps.Plan | None = None

    def setup_metadata(self, routing_map: Tensor, probs: Tensor) -> None:
        """Store the choices of the tokens for dispatch.

        Args:
            routing_map: bool [tokens, ranks, experts of a rank].
            probs: Weights [tokens, ranks, experts of a rank].
        """
        shape = (routing_map.shape[0], self.layer.num_experts)
        self.token_indices, self.token_probs = chosen_experts(
            routing_map.reshape(shape), probs.reshape(shape), self.layer.top_k
        )

    def dispatch(self, hidden_states: Tensor, *_: bool, **__: bool) -> Tensor:
        """Send the tokens [tokens, hidden] and return the rows of this rank's experts.

        The rows are sorted by expert. The flags of Megatron-Core about streams have no effect,
        because EPIC does all work on the current stream.
        """
        assert self.token_indices is not None and self.token_probs is not None
        self.plan = steps.plan(self.group, self.layer, self.token_indices, capacity=steps.EXACT)
        rows, probs = steps.dispatch(self.plan, hidden_states, self.token_probs)
        assert probs is not None
        self.dispatched_probs = probs.double() if self.wide_probs else probs
        return rows

    def combine(self, hidden_states: Tensor, *_: bool, **__: bool) -> Tensor:
        """Return the rows to their tokens and sum them.

        The experts of Megatron-Core have already multiplied the rows by the weights.
        """
        assert self.plan is not None
        plan, self.plan = self.plan, None
        return combining.combine(plan, hidden_states)

    def get_permuted_hidden_states_by_experts(self, hidden_states: Tensor) -> Any:
        """Return the rows unchanged, because dispatch has sorted them, and their weights."""
        return hidden_states, self.dispatched_probs

    def get_restored_hidden_states_by_experts(self, hidden_states: Tensor) -> Tensor:
        """Return the rows unchanged, because combine takes them in this order."""
        return hidden_states

    def get_number_of_tokens_per_expert(self) -> Tensor:
        """Return the number of rows of each local expert, with padding, as int64 on the CPU."""
        assert self.plan is not None
        return self.plan.expert_rows.to("cpu", torch.int64)


class EpicTokenDispatcher(MoEFlexTokenDispatcher):
    """The flexible dispatcher of Megatron-Core, with EpicManager as its dispatch manager.

    Args:
        num_local_experts: As for MoEFlexTokenDispatcher.
        local_expert_indices: As for MoEFlexTokenDispatcher.
        config: The TransformerConfig.
        pg_collection: As for MoEFlexTokenDispatcher.
        group: The EPIC group over the ranks of tensor and expert parallelism.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: Any,
        pg_collection: Any,
        group: Group,
    ) -> None:
        # Skip the constructor of the flexible dispatcher, because it requires DeepEP.
        MoETokenDispatcher.__init__(self, config=config, pg_collection=pg_collection)
        self.num_local_experts = num_local_experts
        self.local_expert_indices = local_expert_indices
        layer = Layer(
            self.tp_size * config.num_moe_experts,
            self.tp_size * config.moe_router_topk,
            alignment=get_align_size_for_quantization(config) if config.fp8 or config.fp4 else 1,
        )
        self._comm_manager = EpicManager(group, layer, config)
        self.cudagraph_attrs = ["_comm_manager.token_probs", "_comm_manager.token_indices"]


def check_config(config: Any) -> None:
    """Raise an error for settings of Megatron-Core that EPIC's dispatcher does not support."""
    for name in ("moe_pad_expert_input_to_capacity", "moe_shared_expert_overlap"):
        if getattr(config, name):
            raise EpicUnsupportedError(
                f"{name} is {getattr(config, name)}: must be False with EPIC"
            )


def layers_of(model: nn.Module | Iterable[nn.Module]) -> list[Any]:
    """Return the Mixture-of-Experts layers of a model, or of a list of its chunks."""
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    found = [module for chunk in chunks for module in chunk.modules()]
    return [module for module in found if isinstance(module, BaseMoELayer)]


def use_epic(
    model: nn.Module | Iterable[nn.Module], *, max_tokens: int, **options: Any
) -> Group | None:
    """Replace the token dispatcher of each Mixture-of-Experts layer of a Megatron-Core model.

    Collective: all ranks of tensor and expert parallelism call it. Build the model with the
    dispatcher "alltoall" or "allgather", because "flex" needs DeepEP.

    Args:
        model: The model, or a list of its chunks.
        max_tokens: Largest number of tokens that a rank passes to one dispatch: sequence length /
            (tensor parallel size * context parallel size) * micro-batch size.
        **options: Other arguments of `Group`.

    Returns:
        The group that the layers share; None if the model has no Mixture-of-Experts layer.

    Raises:
        EpicUnsupportedError: The configuration has a setting that EPIC does not support.
        EpicArgumentError: The layers share a group that was opened with other options.
        EpicError: A rank did not open the group in time, or with other sizes.

    Example:
        from epic.torch.megatron import use_epic

        use_epic(model, max_tokens=seq_length // (tp * cp) * micro_batch_size)
    """
    group = None
    for layer in layers_of(model):
        config, old = layer.config, layer.token_dispatcher
        check_config(config)
        width = config.moe_latent_size or config.hidden_size
        sizes = {"max_tokens": max_tokens, "max_row_bytes": width * config.params_dtype.itemsize}
        group = shared_group(old.tp_ep_group, **{**sizes, **options})
        groups = ProcessGroupCollection()
        groups.ep, groups.expt_tp, groups.tp_ep = old.ep_group, old.tp_group, old.tp_ep_group
        layer.token_dispatcher = EpicTokenDispatcher(
            layer.num_local_experts, layer.local_expert_indices, config, groups, group
        )
        if hasattr(layer, "_training_token_dispatcher"):
            # With transformer_impl "inference_optimized", forward uses this dispatcher.
            layer._training_token_dispatcher = layer.token_dispatcher
    return group
