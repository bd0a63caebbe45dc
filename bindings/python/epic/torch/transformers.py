# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism of transformers by EPIC: an implementation for its registry of them.

transformers shards the experts, loads each rank's own, and calls the implementation in each layer.
Written against transformers 5.23.0.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from epic.errors import EpicUnsupportedError
from epic.options import Layer
from epic.torch import steps
from epic.torch.groups import shared_group

WIDEST = 4  # bytes of an element of a row


class EpicEP(EPImplementation):
    """Send the tokens of a layer to the ranks of their experts and back.

    transformers makes one for each layer. The layers share a group, which the first forward opens.

    Args:
        experts: The experts of a layer.
        ep_mesh: The mesh of the ranks that share the experts.
        tp_mesh: The mesh of the ranks that have the same tokens: must be of size 1.
        max_tokens: Largest number of tokens of a rank.

    Raises:
        EpicUnsupportedError: Several ranks have the same tokens.
    """

    def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any, *, max_tokens: int) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        if tp_mesh.size() > 1:
            raise EpicUnsupportedError(
                f"tp_size is {tp_mesh.size()}: must be 1 with EPIC, because each rank sends its "
                "own tokens; pass DistributedConfig(fsdp_size=..., ep_size=...)"
            )
        self.max_tokens = max_tokens

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts.

        Args:
            hidden_states: The tokens of this rank [tokens, hidden].
            top_k_index: The chosen experts [tokens, top_k].
            top_k_weights: Their weights [tokens, top_k].
        """
        group = shared_group(
            self.ep_mesh.get_group(),
            max_tokens=self.max_tokens,
            max_row_bytes=hidden_states.shape[-1] * WIDEST,
            device=self.ep_mesh.device_type,
        )
        layer = Layer(self.num_local_experts * group.num_ranks, top_k_index.shape[-1])
        plan = steps.plan(group, layer, top_k_index, capacity=steps.EXACT)
        rows, weights = steps.dispatch(plan, hidden_states, top_k_weights.float())
        assert weights is not None
        return steps.combine(plan, self.run_experts(rows, plan.expert_rows), weights)

    def run_experts(self, rows: Tensor, expert_rows: Tensor) -> Tensor:
        """Return the output of this rank's experts, not weighted; expert_rows: rows of each."""
        if not len(rows):  # the experts take part in forward and backward, for FSDP
            rows = rows.sum(0, keepdim=True)
            ids = expert_rows.new_zeros((1, 1), dtype=torch.int64)
            return self.experts_forward(rows, ids, torch.ones_like(rows[:, :1]))[:0]
        local = torch.arange(self.num_local_experts, device=rows.device)
        ids = local.repeat_interleave(expert_rows, output_size=len(rows))[:, None]
        return self.experts_forward(rows, ids, torch.ones_like(rows[:, :1]))


def register(max_tokens: int, name: str = "epic") -> None:
    """Add EPIC to the implementations that DistributedConfig(ep_implementation=...) can name.

    Args:
        max_tokens: Largest number of tokens of a rank: batch size times sequence length.
        name: The name of the implementation.

    Example:
        epic.torch.transformers.register(max_tokens=4096)
        config = DistributedConfig(fsdp_size=4, ep_size=4, ep_implementation="epic")
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    """
    EPImplementationInterface.register(name, partial(EpicEP, max_tokens=max_tokens))
