# SPDX-License-Identifier: Apache-2.0
"""The layer that vLLM makes in place of its RoutedExperts."""

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

from epic.errors import EpicUnsupportedError
from epic.vllm.exchange import EpicPrepareAndFinalize
from epic.vllm.options import Options, check_supported, read_options
from epic.vllm.workers import open_workers


def routed_experts(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, name: str) -> Tensor:
    """Run the layer of this name; the body of the operator that torch.compile does not trace."""
    layer: Any = get_forward_context().no_compile_layers[name]
    result: Any = RoutedExperts.forward_modular(layer.routed_experts, x, topk_weights, topk_ids)
    return result


def routed_experts_fake(
    x: Tensor,
    topk_weights: Tensor,  # noqa: ARG001
    topk_ids: Tensor,  # noqa: ARG001
    name: str,  # noqa: ARG001
) -> Tensor:
    """Return a tensor with the shape of the operator's result."""
    return torch.empty_like(x)


direct_register_custom_op(
    op_name="epic_routed_experts", op_func=routed_experts, fake_impl=routed_experts_fake
)


def use_epic(method: Any, moe: Any, options: Options) -> None:
    """Replace the exchange of a layer's kernel by EPIC's, when its weights have been loaded.

    vLLM makes the kernel at that time, with the experts that fit the weights.

    Args:
        method: The quantization method of the layer.
        moe: The FusedMoEConfig of the layer.
        options: Options of the plugin.
    """
    load = method.process_weights_after_loading

    def process_weights_after_loading(layer: Any) -> None:
        load(layer)
        kernel = method.moe_kernel
        if kernel is None or kernel.is_monolithic:
            raise EpicUnsupportedError(
                f"the experts of {type(method).__name__} take the logits of the router: must take "
                "the chosen experts; use a model without this quantization"
            )
        if not isinstance(kernel.prepare_finalize, EpicPrepareAndFinalize):
            exchange = EpicPrepareAndFinalize(moe, open_workers(moe, options.timeout_ms))
            method.moe_kernel = mk.FusedMoEKernel(exchange, kernel.fused_experts)

    method.process_weights_after_loading = process_weights_after_loading


class EpicRoutedExperts(RoutedExperts):
    """vLLM's RoutedExperts, whose experts are spread over the ranks by EPIC if it is on."""

    uses_epic = False

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        method = super()._get_quant_method(prefix, quant_config, moe_config)
        config = get_current_vllm_config()
        options = read_options(config.additional_config)
        if options is None or config.parallel_config.world_size_across_dp == 1:
            return method
        is_known = current_platform.is_cpu() or current_platform.is_cuda()
        check_supported(config, moe_config, self.expert_map_manager, is_known)
        use_epic(method, moe_config, options)
        self.uses_epic = True
        return method

    def forward_modular(
        self,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Any:
        """Compute the routed experts of the tokens x.

        With EPIC, vLLM computes the shared experts before this call or on another stream, because
        the exchange does not overlap with them (supports_async() of EpicPrepareAndFinalize).
        """
        if not self.uses_epic:
            return super().forward_modular(
                x, topk_weights, topk_ids, shared_experts, shared_experts_input
            )
        return torch.ops.vllm.epic_routed_experts(x, topk_weights, topk_ids, self.layer_name)
