# SPDX-License-Identifier: Apache-2.0
"""Runs Megatron-Core 0.19.2 on CPUs, for tests: it is made for GPUs and has no option for CPUs."""

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Megatron compiles small functions, which takes time

import megatron.core
import torch
from megatron.core.tensor_parallel import random
from torch.overrides import TorchFunctionMode

FOLDERS = tuple(megatron.core.__path__)


def use_cpu() -> None:
    """Replace the number of the GPU, its streams and its random numbers."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.current_stream = lambda *_: None  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None
    same = contextlib.nullcontext
    random.CudaRNGStatesTracker.fork = lambda *_, **__: same()  # type: ignore[method-assign]


def widen(value: Any) -> Any:
    """Return float64 in place of float32, and other values unchanged."""
    return torch.float64 if value is torch.float32 else value


class OnCpu(TorchFunctionMode):
    """A context in which tensors are on the CPU that Megatron wants on a GPU.

    Args:
        is_wide: Whether Megatron's own code gets float64 where it asks for float32, as for the
            probabilities of the router and for the loss.  It has no option for that.
    """

    def __init__(self, is_wide: bool = False) -> None:
        super().__init__()
        self.is_wide = is_wide

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
        if self.is_wide and sys._getframe(1).f_code.co_filename.startswith(FOLDERS):
            function = torch.Tensor.double if function is torch.Tensor.float else function
            args = tuple(map(widen, args))
            kwargs = {name: widen(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)
