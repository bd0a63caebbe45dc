# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism of Megatron-Core by EPIC: a manager under MoEFlexTokenDispatcher.

use_epic(model, max_tokens=...) replaces the dispatchers of a model that is built. Written against
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
from epic.torch import steps
from epic.torch.groups import Group, shared_group


def chosen_experts(routing_map: Tensor, probs: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return experts and weights [tokens, top_k] of a map and probabilities [tokens, experts].

    The largest comes first. A token with fewer experts has -1 and weight 0 in the remaining places.
    """
    live = torch.where(routing_map, probs.detach(), -1)
    best, experts = live.topk(top_k, dim=-1)
    none = best < 0
    weights = probs.gather(1, experts).masked_fill(none, 0)
    return experts.masked_fill(none, -1), weights


class EpicManager(_DispatchManager):
    """The dispatch manager of one layer.

    Experts have the flexible dispatcher's numbers: those of each rank of the group in turn, also
    over the ranks of tensor parallelism.
    """

    def __init__(self, group: Group, layer: Layer, config: Any) -> None:
        self.group, self.layer = group, layer
        self.wide_probs = config.moe_router_dtype == "fp64"
        self.token_indices: Tensor | None = None
        self.token_probs: Tensor | None = None
        self.dispatched_probs: Tensor | None = None
        self.plan: steps.Plan | None = None

    def setup_metadata(self, routing_map: Tensor, probs: Tensor) -> None:
        """Keep the choice; both arguments are [tokens, ranks, experts of a rank]."""
        shape = (routing_map.shape[0], self.layer.num_experts)
        self.token_indices, self.token_probs = chosen_experts(
            routing_map.reshape(shape), probs.reshape(shape), self.layer.top_k
        )

    def dispatch(self, hidden_states: Tensor, *_: bool, **__: bool) -> Tensor:
        """Return the rows of this rank's experts, slab by slab.

        The flags about streams have no effect: all work is ordered on the current stream.
        """
        assert self.token_indices is not None and self.token_probs is not None
        self.plan = steps.plan(self.group, self.layer, self.token_indices, capacity=steps.EXACT)
        rows, probs = steps.dispatch(self.plan, hidden_states, self.token_probs)
        assert probs is not None
        self.dispatched_probs = probs.double() if self.wide_probs else probs
        return rows

    def combine(self, hidden_states: Tensor, *_: bool, **__: bool) -> Tensor:
        """Return the tokens; the experts have multiplied their rows by the weights."""
        assert self.plan is not None
        plan, self.plan = self.plan, None
        return steps.combine(plan, hidden_states)

    def get_permuted_hidden_states_by_experts(self, hidden_states: Tensor) -> Any:
        """Return the rows as dispatch ordered them."""
        return hidden_states, self.dispatched_probs

    def get_restored_hidden_states_by_experts(self, hidden_states: Tensor) -> Tensor:
        """Return the rows as combine takes them."""
        return hidden_states

    def get_number_of_tokens_per_expert(self) -> Tensor:
        """Return the rows of each slab with padding, int64 on the CPU."""
        assert self.plan is not None
        return self.plan.expert_rows.to("cpu", torch.int64)


class EpicTokenDispatcher(MoEFlexTokenDispatcher):
    """The flexible dispatcher of Megatron-Core with EPIC under it."""

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
    """Refuse settings of Megatron-Core that EPIC's dispatcher does not support."""
    for name in ("moe_pad_expert_input_to_capacity", "moe_shared_expert_overlap"):
        if getattr(config, name):
            raise EpicUnsupportedError(
                f"{name} is {getattr(config, name)}: must be False with EPIC"
            )


def layers_of(model: nn.Module | Iterable[nn.Module]) -> list[Any]:
    """Return the Mixture-of-Experts layers of a model, or of its chunks."""
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    found = [module for chunk in chunks for module in chunk.modules()]
    return [module for module in found if isinstance(module, BaseMoELayer)]


def use_epic(
    model: nn.Module | Iterable[nn.Module], *, max_tokens: int, **options: Any
) -> Group | None:
    """Give every Mixture-of-Experts layer of a Megatron-Core model EPIC's dispatcher.

    Collective over the ranks of tensor and expert parallelism. Build the model with the dispatcher
    "alltoall" or "allgather", because "flex" needs DeepEP.

    Args:
        model: The model, or its chunks.
        max_tokens: Largest number of tokens that a rank sends at once: sequence length / (tensor *
            context parallel size) * micro-batch size.
        **options: Other arguments of `Group`.

    Returns:
        The group that the layers share, or None if the model has no such layer.

    Raises:
        EpicUnsupportedError: The configuration has a setting that EPIC does not support.
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
    return group
