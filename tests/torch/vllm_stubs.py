# SPDX-License-Identifier: Apache-2.0
"""Stubs of the parts of vLLM 0.32 that epic.vllm uses, so that tests need no vLLM.

The base class has the abstract methods of vLLM's class, with the same arguments. tests/vllm tests
epic.vllm in vLLM itself.
"""

import importlib
import sys
from abc import ABC, abstractmethod
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

MOE = "vllm.model_executor.layers.fused_moe"


class PrepareAndFinalize(ABC):
    """Stands for FusedMoEPrepareAndFinalizeModular: a subclass must define these methods."""

    @property
    @abstractmethod
    def activation_format(self) -> Any:
        """Return the format of the rows."""

    @abstractmethod
    def topk_indices_dtype(self) -> Any:
        """Return the type of the numbers of experts."""

    @abstractmethod
    def max_num_tokens_per_rank(self) -> int | None:
        """Return the largest number of tokens of a call."""

    @abstractmethod
    def num_dispatchers(self) -> int:
        """Return the number of ranks that send tokens."""

    @abstractmethod
    def output_is_reduced(self) -> bool:
        """Return whether the output is the sum over all ranks."""

    @abstractmethod
    def prepare(
        self, a1: Any, topk_weights: Any, topk_ids: Any, num_experts: int, expert_map: Any,
        apply_router_weight_on_input: bool, quant_config: Any, defer_input_quant: bool,
    ) -> Any:  # fmt: skip
        """Send the tokens to their experts."""

    @abstractmethod
    def finalize(
        self, output: Any, fused_expert_output: Any, topk_weights: Any, topk_ids: Any,
        apply_router_weight_on_input: bool, weight_and_reduce_impl: Any,
    ) -> Any:  # fmt: skip
        """Send the results back."""

    def supports_async(self) -> bool:
        """Return False: vLLM then calls prepare and finalize."""
        return False


class Kernel:
    """Stands for FusedMoEKernel: holds the exchange and the experts of a layer."""

    is_monolithic = False

    def __init__(self, prepare_finalize: Any, fused_experts: Any) -> None:
        self.prepare_finalize, self.fused_experts = prepare_finalize, fused_experts


class RoutedExperts:
    """Stands for vLLM's RoutedExperts, whose quantization method the test chooses."""

    method: Any = None
    expert_map_manager = SimpleNamespace(num_fused_shared_experts=0)
    layer_name = "layers.0"

    def _get_quant_method(self, *_: Any) -> Any:
        """Return the method that the test has set."""
        return self.method

    def forward_modular(self, x: Any, *_: Any) -> Any:
        """Return a value that shows that vLLM's own code has run."""
        return "vllm", x


class NoOp:
    """Stands for vLLM's class of experts that have applied the weights themselves."""

    def apply(self, output: Any, rows: Any, *_: Any) -> Any:
        """Return the rows."""
        assert output is None
        return rows


class TpGroup:
    """Stands for vLLM's group of tensor parallelism, over ranks that follow each other."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.world_size, self.rank_in_group = world_size, rank % world_size
        starts = range(0, dist.get_world_size(), world_size)
        groups = [dist.new_group(list(range(s, s + world_size))) for s in starts]
        self.group = groups[rank // world_size]

    def all_gather(self, own: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the parts of all ranks, one after the other."""
        assert dim == 0
        parts = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(parts, own, group=self.group)
        return torch.cat(parts)


def add_module(name: str) -> Any:
    """Put an empty module and its parents into sys.modules, unless they are there."""
    if name not in sys.modules:
        sys.modules[name] = ModuleType(name)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(add_module(parent), last, sys.modules[name])
    return sys.modules[name]


def install_stubs(tp: TpGroup, context: SimpleNamespace, config: Any = None) -> None:
    """Put modules with vLLM's names into sys.modules.

    Args:
        tp: The group of tensor parallelism.
        context: The forward context.
        config: The VllmConfig.
    """
    made = add_module(f"{MOE}.modular_kernel")
    made.FusedMoEPrepareAndFinalizeModular = PrepareAndFinalize
    made.FusedMoEKernel = Kernel
    made.FusedMoEActivationFormat = SimpleNamespace(Standard="standard")
    made.ExpertTokensMetadata = lambda counts, _: counts
    where = add_module("vllm.distributed")
    where.get_tp_group = lambda: tp
    where.get_ep_group = lambda: SimpleNamespace(cpu_group=dist.group.WORLD)
    add_module("vllm.forward_context").get_forward_context = lambda: context
    add_module("vllm.config").get_current_vllm_config = lambda: config
    add_module(f"{MOE}.routed_experts").RoutedExperts = RoutedExperts
    add_module("vllm.platforms").current_platform = SimpleNamespace(is_cpu=lambda: True)
    add_module("vllm.utils.torch_utils").direct_register_custom_op = lambda **_: None


def remove_stubs() -> None:
    """Remove the stubs, because the tests of other files run in the same processes."""
    for name in [n for n in sys.modules if n.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def import_fresh() -> tuple[Any, Any]:
    """Import epic.vllm's exchange and workers, again for each set of stubs."""
    for name in ("epic.vllm.exchange", "epic.vllm.layer", "epic.vllm.workers"):
        sys.modules.pop(name, None)
    workers = importlib.import_module("epic.vllm.workers")
    return importlib.import_module("epic.vllm.exchange"), workers


def moe_config(
    num_experts: int, top_k: int, hidden: int, dtype: torch.dtype = torch.float32,
    sp_size: int = 1, max_tokens: int = 16,
) -> SimpleNamespace:  # fmt: skip
    """Return a FusedMoEConfig of a layer on all ranks."""
    ranks = dist.get_world_size()
    parallel = SimpleNamespace(sp_size=sp_size, pcp_size=1, enable_eplb=False, ep_size=ranks)
    return SimpleNamespace(
        num_experts=num_experts,
        experts_per_token=top_k,
        hidden_dim=hidden,
        in_dtype=dtype,
        num_local_experts=num_experts // ranks,
        max_num_tokens=max_tokens,
        moe_parallel_config=parallel,
    )
