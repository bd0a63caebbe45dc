# SPDX-License-Identifier: Apache-2.0
"""EPIC: Expert Parallelism In C.  Frameworks are submodules: epic.jax."""

from epic._native import EpicError
from epic.options import Experts, Layer, Router

__version__ = "0.1.0"
__all__ = ["EpicError", "Experts", "Layer", "Router"]
