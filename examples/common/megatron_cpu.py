# SPDX-License-Identifier: Apache-2.0
"""Runs Megatron-Core 0.19.2 on CPUs, for tests: it is made for GPUs and has no option for CPUs."""

import contextlib
import os
from collections.abc import Callable
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Megatron compiles small functions, which takes time

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import random
from torch.overrides import TorchFunctionMode


def use_cpu() -> None:
    """Replace the number of the GPU, its streams and its random numbers."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.current_stream = lambda *_: None  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None
    same = contextlib.nullcontext
    random.CudaRNGStatesTracker.fork = lambda *_, **__: same()  # type: ignore[method-assign]


def fix_optimizer() -> None:
    """Let the distributed optimizer load a checkpoint with torch's Adam.

    Its own code only works with the Adam of Transformer Engine, which has one step for all
    parameters.  torch's Adam has a tensor with the step for each parameter.
    """
    kind: Any = DistributedOptimizer
    sharded, load, write = (
        kind.sharded_state_dict,
        kind.load_state_dict,
        kind._set_main_param_and_optimizer_states,
    )

    def sharded_state_dict(self: Any, *args: Any, **more: Any) -> Any:
        if not self.optimizer.state:  # "assert len(steps) == 1"
            self._init_optimizer_states_with_dummy_values()
        return sharded(self, *args, **more)

    def load_state_dict(self: Any, state: Any) -> None:
        load(self, state)
        for each in self.optimizer.state.values():  # all have the same tensor, so each adds to it
            each["step"] = each["step"].clone()

    def set_states(self: Any, parameter: Any, tensors: Any) -> None:
        write(self, parameter, {"step": None, **tensors})  # "KeyError: 'step'"

    kind.sharded_state_dict, kind.load_state_dict = sharded_state_dict, load_state_dict
    kind._set_main_param_and_optimizer_states = set_states


class OnCpu(TorchFunctionMode):
    """A context in which tensors are on the CPU that Megatron wants on a GPU."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1:
            # The optimizers accept only parameters of this type, and of two types of 16 bits.
            return "torch.cuda.FloatTensor"
        if "cuda" in str(kwargs.get("device")):
            kwargs = {**kwargs, "device": "cpu"}
        return function(*args, **kwargs)
