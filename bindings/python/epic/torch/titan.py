# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism of torchtitan by EPIC: a token dispatcher, and the override that selects it.

--override.imports 'epic.torch.titan.epic={"hidden_dim": 2048, "num_max_tokens_per_rank": 4096}'
Written against torchtitan 0.3.0.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torchtitan.config import derive, override
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher, LocalTokenDispatcher

from epic.errors import EpicArgumentError
from epic.options import Layer
from epic.torch import steps
from epic.torch.groups import Group, shared_group

WIDEST = 4  # bytes of an element of a row


class Routed(NamedTuple):
    """The results of dispatch that combine needs."""

    plan: steps.Plan
    slot_weights: Tensor


class EpicTokenDispatcher(BaseEPTokenDispatcher):
    """Send rows to the experts of the expert-parallel mesh and back.

    Without such a mesh it works as torchtitan's local dispatcher. Scores multiply the experts'
    output, as in torchtitan.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        """Settings of the dispatcher.

        Attributes:
            hidden_dim: Width of the model.
            num_max_tokens_per_rank: Largest number of tokens of a rank.
            capacity: Slots of a rank. 0: as many as arrive, for which the host waits. None: as many
                as can ever be needed, without a wait.
            pad_multiple: The rows of an expert are padded to a multiple of it.
            quantize: "1x128" or "1x32": rows travel in e4m3.
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
        """Open the group, which the layers of a model share."""
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
        """Return the rows of this rank's experts, rows per slab, and what combine needs."""
        if self.group is None:
            choice = (x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E)
            return LocalTokenDispatcher.dispatch(self, *choice)
        plan = steps.plan(self.group, self.layer, topk_expert_ids_TK, capacity=self.config.capacity)
        rows, weights = steps.dispatch(plan, x_TD, topk_scores_TK, quantize=self.config.quantize)
        assert weights is not None
        return rows, plan.expert_rows, Routed(plan, weights)

    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:  # noqa: N803
        """Return the tokens, each the weighted sum of its experts' output."""
        if self.group is None:
            return LocalTokenDispatcher.combine(self, routed_output_RD, metadata, x_TD)
        return steps.combine(metadata.plan, routed_output_RD, metadata.slot_weights)


@override(target=LocalTokenDispatcher.Config, description="Expert parallelism by EPIC.")
def epic(config: LocalTokenDispatcher.Config, **wishes: Any) -> EpicTokenDispatcher.Config:
    """Replace any token dispatcher of a torchtitan model by EPIC's.

    Args:
        config: The configuration of the replaced dispatcher.
        **wishes: Fields of EpicTokenDispatcher.Config.

    Returns:
        The configuration of EPIC's dispatcher.
    """
    return derive(config, EpicTokenDispatcher.Config, **wishes)
