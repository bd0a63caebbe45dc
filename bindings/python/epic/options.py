# SPDX-License-Identifier: Apache-2.0
"""What is fixed for a layer, its router and its experts: the core's option structs.

Values are hashable and equal by content, so they may be static arguments of jitted functions.
Words stand for the core's enums; epic.h says what each means.
"""

import contextlib
import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, SupportsFloat, SupportsIndex

from epic.errors import EpicArgumentError

SCORES = ("softmax", "sigmoid", "sqrtsoftplus", "logits")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "clamped_swiglu", "clamped_silu")
WEIGHTINGS = ("late", "early", "input")
TYPES = {"float32": 1, "bfloat16": 2, "float16": 3, "float64": 4}
REALS = ("eps", "norm_min", "jitter", "scale", "limit", "alpha")
SMALLEST = {"max_tokens": 1, "max_row_bytes": 1}
CHOICES: dict[str, tuple[str, ...]] = {
    "layout": ("expert_major", "flat"),
    "overflow": ("error", "drop"),
    "priority": ("by_token", "by_k"),
    "sum_order": ("by_rank", "tree"),
    "score": SCORES,
    "group_score": ("max", "sum"),
    "group_others": ("out", "zero"),
    "weight_rule": ("of_score", "softmax_chosen", "sigmoid_chosen", "sparsemixer"),
    "normalize": ("none", "sum", "clamped"),
    "activation": ACTIVATIONS,
    "weighting": WEIGHTINGS,
}


def word(field: str, value: Any, words: Iterable[str]) -> str:
    """The value, if it is one of the words."""
    words = tuple(words)
    if value in words:
        return str(value)
    near = difflib.get_close_matches(str(value), words, 1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise EpicArgumentError(f"{field} {value!r}: one of {', '.join(words)} is needed{hint}")


def whole(field: str, value: Any, least: int = 0) -> int:
    """The value, if it is an integer that the core can have."""
    if not isinstance(value, SupportsIndex) or not least <= value.__index__() < 1 << 32:
        raise EpicArgumentError(f"{field} {value!r}: an integer from {least} is needed")
    return value.__index__()


def real(field: str, value: Any) -> float:
    """The value, if it is a finite number."""
    if not isinstance(value, SupportsFloat) or not math.isfinite(value):
        raise EpicArgumentError(f"{field} {value!r}: a finite number is needed")
    return float(value)


def number(field: str, value: Any) -> int | float:
    """The core's number for the value of a field."""
    if field in CHOICES:
        return CHOICES[field].index(word(field, value, CHOICES[field]))
    if field.endswith("_type"):
        return 0 if value is None else TYPES[word(field, value, TYPES)]
    return real(field, value) if field in REALS else whole(field, value)


class Options:
    """Fields as numbers, by the names that the core gives them; checked when they are made."""

    def __post_init__(self) -> None:
        self.numbers()
        with contextlib.suppress(ImportError):  # without the libraries: when they are used
            self.ask_core()

    def ask_core(self) -> None:
        """Raises what the core says about the fields together."""

    def numbers(self, prefix: str = "") -> dict[str, Any]:
        """For example {"num_experts": 8, "overflow": 0, ...}; `prefix` before each name."""
        return {
            prefix + field.name: number(field.name, getattr(self, field.name))
            for field in fields(self)  # type: ignore[arg-type]
        }


@dataclass(frozen=True)
class Layer(Options):
    """Where choices may go and how rows are added: epic_layer."""

    num_experts: int
    top_k: int
    alignment: int = 1
    overflow: str = "error"
    expert_capacity: int = 0
    priority: str = "by_token"
    sum_order: str = "by_rank"
    leaves: int = 0
    partial_type: str | None = None
    layout: str = "expert_major"

    def ask_core(self) -> None:
        """As a group of one rank would be asked."""
        from epic import _native  # it needs this module

        _native.size("epic_plan_bytes_v1", _native.Config(num_ranks=1, **SMALLEST), self)


@dataclass(frozen=True)
class Router(Options):
    """How experts are chosen and weighted: epic_router."""

    num_experts: int
    top_k: int
    score: str = "softmax"
    zero_experts: int = 0
    num_groups: int = 0
    topk_groups: int = 0
    group_score: str = "max"
    group_best: int = 0
    group_others: str = "out"
    weight_rule: str = "of_score"
    normalize: str = "none"
    eps: float = 0.0
    norm_min: float = 0.0
    jitter: float = 0.0
    scale: float = 1.0

    def ask_core(self) -> None:
        """By the query of its workspace."""
        from epic import _native

        _native.size("epic_router_workspace_v1", self)


@dataclass(frozen=True)
class Experts(Options):
    """The experts' MLP: epic_experts.

    num_local_experts: experts of one rank, at most; 0: derived where the group or the weights
    tell it."""

    num_local_experts: int = 0
    hidden: int = 0
    inner: int = 0
    activation: str = "silu"
    ungated: bool = False
    interleaved: bool = False
    weighting: str = "late"
    row_type: str | None = None
    weight_type: str | None = None
    limit: float = 0.0
    alpha: float = 0.0

    @property
    def width(self) -> int:
        """Columns of the first weight: gate and up, or one of them."""
        return self.inner if self.ungated else 2 * self.inner

    def ask_core(self) -> None:
        """By the query of its memory."""
        from epic import _native

        for name in ("hidden", "inner"):
            whole(name, getattr(self, name), 1)
        if self.num_local_experts:
            _native.experts_memory(self, 0)
