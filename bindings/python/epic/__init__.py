# SPDX-License-Identifier: Apache-2.0
"""EPIC: Expert Parallelism In C.

The packages for frameworks are submodules: epic.jax and epic.torch.
"""

from epic.errors import EpicArgumentError, EpicError, EpicUnsupportedError
from epic.members import Members
from epic.options import Experts, Layer, Moe, Router
from epic.traces import Placement, TraceStep, TraceWriter, read_placement, read_trace
from epic.waits import Wait, Waits, format_prometheus

__version__ = "0.1.0"
__all__ = [
    "EpicArgumentError",
    "EpicError",
    "EpicUnsupportedError",
    "Experts",
    "Layer",
    "Members",
    "Moe",
    "Placement",
    "Router",
    "TraceStep",
    "TraceWriter",
    "Wait",
    "Waits",
    "format_prometheus",
    "read_placement",
    "read_trace",
]
