# SPDX-License-Identifier: Apache-2.0
"""EPIC's dispatch and combine in the form of vLLM's prepare and finalize."""

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.distributed import get_tp_group
from vllm.forward_context import get_forward_context

import epic.torch
from epic.vllm.workers import Workers


class EpicPrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular):
    """Moves the tokens of one layer to their experts, and the results back.

    prepare() returns the received rows sorted by expert, one row for each choice of an expert of
    this rank. vLLM's experts see them as tokens that have chosen one expert, with local numbers of
    the experts.

    If tensor parallelism has given all its ranks the same tokens, each rank sends an equal part of
    them, and finalize() gathers the results.

    Args:
        moe: The FusedMoEConfig of the layer.
        workers: The open group of the expert-parallel ranks.
    """

    def __init__(self, moe: Any, workers: Workers) -> None:
        super().__init__()
        self.workers = workers
        self.layer = epic.torch.Layer(num_experts=moe.num_experts, top_k=moe.experts_per_token)
        self.sp_size = moe.moe_parallel_config.sp_size
        # The model itself has split the tokens over the ranks if sequence parallelism is on.
        self.num_parts = get_tp_group().world_size if self.sp_size == 1 else 1
        self.part = get_tp_group().rank_in_group if self.num_parts > 1 else 0
        self.slots_per_token = min(moe.experts_per_token, moe.num_local_experts)
        self.local_experts = torch.arange(moe.num_local_experts, dtype=torch.int32)
        self.plan: Any = None
        self.num_tokens = 0  # tokens of the last prepare(), before this rank took its part

    @property
    def activation_format(self) -> Any:
        """Return the format of the rows: a matrix, without padding between experts."""
        return mk.FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype:
        """Return the type in which the router computes the numbers of experts."""
        return torch.int32

    def max_num_tokens_per_rank(self) -> None:
        """Return None: the number of tokens of a call has no limit of its own."""
        return

    def num_dispatchers(self) -> int:
        """Return the number of expert-parallel ranks."""
        return self.workers.group.num_ranks

    def output_is_reduced(self) -> bool:
        """Return True: the output is the sum over all ranks, so vLLM must not sum it again."""
        return True

    def count_tokens(self) -> int:
        """Return an upper bound of the tokens of all ranks in this call, equal on all ranks.

        vLLM exchanges the numbers of tokens once per step, so no layer waits for them.
        """
        metadata = get_forward_context().dp_metadata
        if metadata is None:
            return self.num_tokens * self.sp_size
        tokens = metadata.num_tokens_across_dp_cpu
        return int((-(-tokens // self.sp_size) * self.sp_size).sum())

    def own_part(self) -> slice:
        """Return the tokens that this rank sends, of those that all ranks of its TP group have."""
        size = -(-self.num_tokens // self.num_parts)
        begin = min(self.num_tokens, self.part * size)
        return slice(begin, min(self.num_tokens, begin + size))

    def prepare(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> tuple[Tensor, None, Any, Tensor, Tensor]:
        """Send the tokens to the ranks of their experts.

        Args:
            a1: [T, H] tokens.
            topk_weights: [T, K] weights of the choices.
            topk_ids: [T, K] int32 global numbers of experts.
            num_experts: Number of experts of all ranks.
            expert_map: Not used: the plan finds the rank of an expert.
            apply_router_weight_on_input: Whether to multiply the tokens by their weights.
            quant_config: Not used: the experts quantize the rows.
            defer_input_quant: Not used.

        Returns:
            [R, H] received rows, None, the numbers of rows by expert, [R, 1] local numbers of
            experts, and [R, 1] weights.
        """
        self.num_tokens = a1.shape[0]
        if self.num_parts > 1:
            own = self.own_part()
            a1, topk_weights, topk_ids = a1[own], topk_weights[own], topk_ids[own]
        if apply_router_weight_on_input:
            a1 = a1 * topk_weights.to(a1.dtype)
        capacity = max(1, self.slots_per_token * self.count_tokens())  # 0 means EXACT
        with self.workers.named_in_errors():
            plan, rows, weights = epic.torch.plan_dispatch(
                self.workers.group,
                self.layer,
                topk_ids,
                a1.contiguous(),
                topk_weights.float(),
                capacity=capacity,
                zero_tail=False,
            )
        assert weights is not None  # because it has been passed
        landed = int(plan.demand)
        # The experts see only the slots that hold rows, and combine() takes no other.
        self.plan = plan._replace(capacity=landed)
        counts = plan.expert_rows
        experts = torch.repeat_interleave(self.local_experts, counts, output_size=landed)
        metadata = mk.ExpertTokensMetadata(counts, counts)
        return rows[:landed], None, metadata, experts[:, None], weights[:landed, None]

    def finalize(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """Send the results of the experts back and add those of each token.

        Args:
            output: [T, H] result, written in place.
            fused_expert_output: The results of the experts for the rows of prepare().
            topk_weights: [R, 1] weights of the rows.
            topk_ids: [R, 1] local numbers of the experts of the rows.
            apply_router_weight_on_input: Whether prepare() has applied the weights.
            weight_and_reduce_impl: Applies the weights, if the experts have not.
        """
        rows = weight_and_reduce_impl.apply(
            None, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input
        )
        plan, self.plan = self.plan, None
        with self.workers.named_in_errors():
            if self.num_parts > 1:
                output.copy_(self.gather_parts(epic.torch.combine(plan, rows)))
            elif rows.data_ptr() == output.data_ptr():
                # vLLM lets the experts write into `output` if its shape is right, but combine()
                # must not write into the rows that it reads.
                output.copy_(epic.torch.combine(plan, rows))
            else:
                epic.torch.combine(plan, rows, out=output)
            self.workers.report_slow_rank()

    def gather_parts(self, own: Tensor) -> Tensor:
        """Gather the [T, H] results of all ranks of the TP group from their parts."""
        size = -(-self.num_tokens // self.num_parts)
        padded = own.new_zeros((size, own.shape[1]))
        padded[: own.shape[0]] = own
        return get_tp_group().all_gather(padded, dim=0)[: self.num_tokens]
