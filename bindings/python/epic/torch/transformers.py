# SPDX-License-Identifier: Apache-2.0
"""EPIC as an implementation of the expert parallelism of the transformers package.

transformers shards the experts, loads the experts of each rank, and calls the registered
implementation in each layer. It is tested with transformers 5.24.0.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from epic.errors import EpicUnsupportedError
from epic.options import Layer
from epic.torch import combining, steps
from epic.torch.groups import shared_group

WIDEST = 4  # bytes of the widest element of a row, a float32


class EpicEP(EPImplementation):
    """An object that sends the tokens of one layer to the ranks of their experts and back.

    transformers makes one object for each layer. All layers share a group, which the first forward
    opens.

    Args:
        experts: The module with this rank's experts of a layer.
        ep_mesh: DeviceMesh of the ranks that share the experts.
        tp_mesh: DeviceMesh of the ranks that have the same tokens. Its size must be 1.
        max_tokens: Largest number of tokens of a rank.

    Raises:
        EpicUnsupportedError: The size of tp_mesh is above 1.
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
        """Run the experts of all ranks on the tokens of this rank.

        Collective: every rank of ep_mesh calls it.

        Args:
            hidden_states: Tokens of this rank [tokens, hidden].
            top_k_index: Chosen experts [tokens, top_k].
            top_k_weights: Weights of the chosen experts [tokens, top_k].

        Returns:
            The weighted sum of the results of each token's experts [tokens, hidden].
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
        return combining.combine(plan, self.run_experts(rows, plan.expert_rows), weights)

    def run_experts(self, rows: Tensor, expert_rows: Tensor) -> Tensor:
        """Run this rank's experts, without weights.

        Args:
            rows: [slots, hidden], sorted by expert.
            expert_rows: Number of rows of each local expert.

        Returns:
            The results of the experts [slots, hidden].
        """
        # Without rows, run an expert on one row of zeros and drop its result. FSDP needs the
        # experts to take part in forward and backward on every rank.
        if not len(rows):
            rows = rows.sum(0, keepdim=True)
            ids = expert_rows.new_zeros((1, 1), dtype=torch.int64)
            return self.experts_forward(rows, ids, torch.ones_like(rows[:, :1]))[:0]
        local = torch.arange(self.num_local_experts, device=rows.device)
        ids = local.repeat_interleave(expert_rows, output_size=len(rows))[:, None]
        return self.experts_forward(rows, ids, torch.ones_like(rows[:, :1]))


def register(max_tokens: int, name: str = "epic") -> None:
    """Register EPIC as an implementation for DistributedConfig(ep_implementation=...).

    Call it in each process before transformers makes the model.

    Args:
        max_tokens: Largest number of tokens of a rank: batch size * sequence length.
        name: Name of the implementation.

    Example:
        import epic.torch.transformers

        epic.torch.transformers.register(max_tokens=4096)
        config = DistributedConfig(fsdp_size=4, ep_size=4, ep_implementation="epic")
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    """
    EPImplementationInterface.register(name, partial(EpicEP, max_tokens=max_tokens))
