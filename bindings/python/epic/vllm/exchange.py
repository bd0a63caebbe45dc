# SPDX-License-Identifier: Apache-2.0
"""EPIC's dispatch and combine in the form of vLLM's prepare and finalize."""

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.distributed import get_tp_group
from vllm.forward_context import get_forward_context

import epic.torch
from epic.errors import EpicUnsupportedError
from epic.vllm.workers import Workers


def sends_e4m3(config: Any, deferred: bool) -> bool:
    """Return whether a GPU must send the rows in e4m3, because the experts need them so.

    Args:
        config: The FusedMoEQuantConfig of the layer, or None.
        deferred: Whether the experts quantize the rows themselves.

    Raises:
        EpicUnsupportedError: The experts need rows in another form.
    """
    dtype = None if config is None or deferred else config.quant_dtype
    if dtype is None:
        return False
    if dtype != torch.float8_e4m3fn or list(config.block_shape or ()) != [128, 128]:
        raise EpicUnsupportedError(
            f"the rows of the experts have quant_dtype {dtype} and block_shape "
            f"{config.block_shape}: must not be quantized, or be e4m3 with block_shape [128, 128]; "
            "use another quantization"
        )
    return True


class EpicPrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular):
    """Moves the tokens of one layer to their experts, and the results back.

    prepare() returns the received rows sorted by expert, one row for each choice of an expert of
    this rank. vLLM's experts see them as tokens that have chosen one expert, with local numbers of
    the experts.

    On GPUs the host must not wait for the number of received rows, and a CUDA graph needs equal
    shapes in each replay. So there the rows are as many as can ever arrive, and those that have not
    arrived have the number of an expert of another rank, which vLLM's experts skip. All numbers of
    experts are global there.

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
        self.is_static = workers.group.on_gpu  # whether all shapes are static
        self.first_expert = workers.group.rank * moe.num_local_experts
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

    def send(
        self,
        topk_ids: Tensor,
        tokens: Tensor,
        weights: Tensor,
        capacity: int,
        quant_config: Any,
        deferred: bool,
    ) -> tuple[Any, Tensor, Tensor | None, Tensor]:
        """Plan and dispatch; return the plan, the rows, their scales or None, and their weights."""
        group, scales = self.workers.group, None
        if self.is_static and sends_e4m3(quant_config, deferred):
            plan = epic.torch.plan(group, self.layer, topk_ids, capacity=capacity)
            rows, scales, slot_weights = epic.torch.dispatch_quantized(plan, tokens, weights)
        else:
            # Experts that quantize all rows with one scale must not find numbers that are too
            # large after the rows that have arrived.
            zero_tail = self.is_static and deferred
            plan, rows, slot_weights = epic.torch.plan_dispatch(
                group, self.layer, topk_ids, tokens, weights, capacity=capacity, zero_tail=zero_tail
            )
        assert slot_weights is not None  # because weights have been passed
        return plan, rows, scales, slot_weights

    def static_experts(self, counts: Tensor, capacity: int) -> Tensor:
        """Return the global expert of each slot; of another rank if the slot has no row.

        Args:
            counts: Numbers of rows by local expert.
            capacity: Number of slots.
        """
        ends = counts.cumsum(0, dtype=torch.int32)
        slots = torch.arange(capacity, dtype=torch.int32, device=counts.device)
        # Slots after the last row get the number after the last local expert.
        local = torch.searchsorted(ends, slots, right=True, out_int32=True)
        return (local + self.first_expert) % self.layer.num_experts

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
    ) -> tuple[Tensor, Tensor | None, Any, Tensor, Tensor]:
        """Send the tokens to the ranks of their experts.

        Args:
            a1: [T, H] tokens.
            topk_weights: [T, K] weights of the choices.
            topk_ids: [T, K] int32 global numbers of experts.
            num_experts: Number of experts of all ranks.
            expert_map: Not used: the plan finds the rank of an expert.
            apply_router_weight_on_input: Whether to multiply the tokens by their weights.
            quant_config: On GPUs, the form of the rows that the experts need. On CPUs the experts
                quantize the rows.
            defer_input_quant: Whether the experts quantize the rows on GPUs, too.

        Returns:
            [R, H] received rows, [R, H / 128] scales of e4m3 rows or None, the numbers of rows by
            expert, [R, 1] numbers of experts, and [R, 1] weights. The experts have local numbers on
            CPUs and global numbers on GPUs.
        """
        self.num_tokens = a1.shape[0]
        if self.num_parts > 1:
            own = self.own_part()
            a1, topk_weights, topk_ids = a1[own], topk_weights[own], topk_ids[own]
        if apply_router_weight_on_input:
            a1 = a1 * topk_weights.to(a1.dtype)
        capacity = max(1, self.slots_per_token * self.count_tokens())  # 0 means EXACT
        with self.workers.named_in_errors():
            plan, rows, scales, weights = self.send(
                topk_ids, a1.contiguous(), topk_weights.float(), capacity, quant_config,
                defer_input_quant,
            )  # fmt: skip
        counts = plan.expert_rows
        if self.is_static:
            self.plan = plan
            experts = self.static_experts(counts, capacity)
            metadata = mk.ExpertTokensMetadata(counts, None)
            return rows, scales, metadata, experts[:, None], weights[:, None]
        landed = int(plan.demand)
        # The experts see only the slots that hold rows, and combine() takes no other.
        self.plan = plan._replace(capacity=landed)
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
            if not self.is_static:  # on GPUs a thread does so, because graphs run no Python code
                self.workers.report_slow_rank()

    def gather_parts(self, own: Tensor) -> Tensor:
        """Gather the [T, H] results of all ranks of the TP group from their parts."""
        size = -(-self.num_tokens // self.num_parts)
        padded = own.new_zeros((size, own.shape[1]))
        padded[: own.shape[0]] = own
        return get_tp_group().all_gather(padded, dim=0)[: self.num_tokens]
