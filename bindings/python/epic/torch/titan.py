# SPDX-License-Identifier: Apache-2.0
"""EPIC as a token dispatcher of torchtitan, and the override that selects it.

The option of torchtitan is

    --override.imports 'epic.torch.titan.epic={"hidden_dim": 2048, "num_max_tokens_per_rank": 4096}'

It is tested with torchtitan 0.3.0.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torchtitan.config import derive, override
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher, LocalTokenDispatcher

from epic.errors import EpicArgumentError
from epic.options import Layer
from epic.torch import combining, steps
from epic.torch.groups import Group, shared_group

WIDEST = 4  # bytes of the widest element of a row, a float32


class Routed(NamedTuple):
    """The results of dispatch that combine needs.

    Attributes:
        plan: The plan.
        slot_weights: Weight of each slot [capacity].
    """

    plan: steps.Plan
    slot_weights: Tensor


class EpicTokenDispatcher(BaseEPTokenDispatcher):
    """A dispatcher that sends the rows of tokens to their experts and back with EPIC.

    Without a mesh of expert parallelism it works like torchtitan's local dispatcher. As in
    torchtitan, the scores multiply the output of the experts.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        """Settings of the dispatcher.

        Attributes:
            hidden_dim: Hidden size of the model.
            num_max_tokens_per_rank: Largest number of tokens of a rank.
            capacity: Number of slots of a rank. 0: as many as arrive; the host waits for this
                number. None: as many as can ever be needed; the host does not wait.
            pad_multiple: The rows of each expert are padded to a multiple of this number. None: no
                padding.
            quantize: "1x128" or "1x32": rows are sent in e4m3, with one scale for each 128 or 32
                columns. None: rows are sent unchanged.
        """

        hidden_dim: int | None = None
        num_max_tokens_per_rank: int | None = None
        capacity: int | None = steps.EXACT
        pad_multiple: int | None = None
        quantize: str | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.config = config
        self.layer = Layer(config.num_experts, config.top_k, alignment=config.pad_multiple or 1)
        self.group: Group | None = None

    def init_buffer(self) -> None:
        """Open the group that the layers of a model share, or get it if it is open.

        Collective over the expert-parallel mesh. Without such a mesh it does nothing.
        """
        if self.ep_mesh is None:
            return
        config = self.config
        for name in ("hidden_dim", "num_max_tokens_per_rank"):
            if getattr(config, name) is None:
                raise EpicArgumentError(
                    f"{name} is None: pass --override.imports "
                    f"'epic.torch.titan.epic={{\"{name}\": ...}}', or choose the communication "
                    'backend "hybridep", whose configuration contains it'
                )
        assert config.hidden_dim is not None and config.num_max_tokens_per_rank is not None
        self.group = shared_group(
            self.ep_mesh.get_group(),
            max_tokens=config.num_max_tokens_per_rank,
            max_row_bytes=config.hidden_dim * WIDEST,
            device=self.ep_mesh.device_type,
        )

    def dispatch(
        self,
        x_TD: Tensor,  # noqa: N803
        topk_scores_TK: Tensor,  # noqa: N803
        topk_expert_ids_TK: Tensor,  # noqa: N803
        num_local_tokens_per_expert_E: Tensor,  # noqa: N803
    ) -> tuple[Tensor, Tensor, Any]:
        """Send the tokens to the ranks of their experts.

        Args:
            x_TD: Tokens [tokens, hidden].
            topk_scores_TK: Weights [tokens, top_k].
            topk_expert_ids_TK: Chosen experts [tokens, top_k].
            num_local_tokens_per_expert_E: Choices of each expert on this rank [experts]; used only
                without a mesh of expert parallelism.

        Returns:
            The rows of this rank's experts [slots, hidden], the number of rows of each local
            expert, and a Routed for combine.
        """
        if self.group is None:
            choice = (x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E)
            return LocalTokenDispatcher.dispatch(self, *choice)
        plan = steps.plan(self.group, self.layer, topk_expert_ids_TK, capacity=self.config.capacity)
        rows, weights = steps.dispatch(plan, x_TD, topk_scores_TK, quantize=self.config.quantize)
        assert weights is not None
        return rows, plan.expert_rows, Routed(plan, weights)

    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:  # noqa: N803
        """Return the rows to their tokens, and sum them with the scores as weights.

        Args:
            routed_output_RD: Output of the experts [slots, hidden].
            metadata: The third result of dispatch.
            x_TD: Tokens [tokens, hidden]; used only without a mesh of expert parallelism.

        Returns:
            The tokens [tokens, hidden].
        """
        if self.group is None:
            return LocalTokenDispatcher.combine(self, routed_output_RD, metadata, x_TD)
        return combining.combine(metadata.plan, routed_output_RD, metadata.slot_weights)


@override(target=LocalTokenDispatcher.Config, description="Expert parallelism by EPIC.")
def epic(config: LocalTokenDispatcher.Config, **wishes: Any) -> EpicTokenDispatcher.Config:
    """Replace the configuration of a token dispatcher of torchtitan by one of EPIC's dispatcher.

    torchtitan calls this function for each dispatcher if --override.imports names it.

    Args:
        config: The configuration that is replaced.
        **wishes: Fields of EpicTokenDispatcher.Config.

    Returns:
        The configuration of EPIC's dispatcher.
    """
    return derive(config, EpicTokenDispatcher.Config, **wishes)
