# SPDX-License-Identifier: Apache-2.0
"""What is fixed for a layer, its router and its experts: the core's option structs.

Values are hashable and equal by content, so they may be static arguments of jitted functions.
Words stand for the core's enums; epic.h says what each means.
"""

from dataclasses import dataclass, fields
from typing import Any

SCORES = ("softmax", "sigmoid", "sqrtsoftplus", "logits")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "clamped_swiglu")
WEIGHTINGS = ("late", "early", "input")
TYPES = {"float32": 1, "bfloat16": 2, "float16": 3, "float64": 4}
CHOICES: dict[str, tuple[str, ...]] = {
    "layout": ("expert_major", "flat"),
    "overflow": ("error", "drop"),
    "sum_order": ("by_rank", "tree"),
    "score": SCORES,
    "group_score": ("max", "sum"),
    "group_others": ("out", "zero"),
    "weight_rule": ("of_score", "softmax_chosen", "sigmoid_chosen"),
    "normalise": ("none", "sum", "clamped"),
    "activation": ACTIVATIONS,
    "weighting": WEIGHTINGS,
}


def number(field: str, value: Any) -> int | float:
    """The core's number for the value of a field."""
    if field in CHOICES:
        if value not in CHOICES[field]:
            raise ValueError(f"{field} {value!r}: one of {', '.join(CHOICES[field])} is needed")
        return CHOICES[field].index(value)
    if field.endswith("_type"):
        if value is not None and value not in TYPES:
            raise ValueError(f"{field} {value!r}: one of {', '.join(TYPES)} is needed")
        return TYPES[value] if value is not None else 0
    return float(value) if isinstance(value, float) else int(value)


class Options:
    """Fields as numbers, by the names that the core gives them."""

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
    sum_order: str = "by_rank"
    leaves: int = 0
    partial_type: str | None = None
    layout: str = "expert_major"


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
    normalise: str = "none"
    eps: float = 0.0
    norm_min: float = 0.0
    scale: float = 1.0

    def numbers(self, prefix: str = "") -> dict[str, Any]:
        """As Options.numbers; the floats are floats even when written as ints."""
        reals = {prefix + name: float(getattr(self, name)) for name in ("eps", "norm_min", "scale")}
        return {**super().numbers(prefix), **reals}


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

    def numbers(self, prefix: str = "") -> dict[str, Any]:
        """As Options.numbers; the floats are floats even when written as ints."""
        reals = {prefix + name: float(getattr(self, name)) for name in ("limit", "alpha")}
        return {**super().numbers(prefix), **reals}
