# SPDX-License-Identifier: Apache-2.0
"""What is fixed for a layer, its router and its experts: the core's option structs.

Values are hashable and equal by content, so they may be static arguments of jitted functions.
Words stand for the core's enums; epic.h says what each means.
"""

import contextlib
import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, SupportsFloat, SupportsIndex

from epic.errors import EpicArgumentError

SCORES = ("softmax", "sigmoid", "sqrtsoftplus", "logits")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "clamped_swiglu", "clamped_silu")
WEIGHTINGS = ("late", "early", "input")
TYPES = {"float32": 1, "bfloat16": 2, "float16": 3, "float64": 4}
REALS = ("eps", "norm_min", "jitter", "scale", "limit", "alpha")
BLOCKS = ("1x128", "1x32")
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


known: dict[str, Any] = {}


def key() -> Any:
    """A field: the name of a value, by which `known` has it.  Tracers take words for constants,
    and not numbers."""
    return field(init=False, repr=False, compare=False, default="")


class Named:
    """A dataclass with a key."""

    key: str

    def get_known(self) -> None:
        """When it is made, complete."""
        object.__setattr__(self, "key", repr(self))
        known[self.key] = self

    def __reduce__(self) -> Any:
        """Copies are made, and so known, in the process that has them."""
        return type(self), tuple(getattr(self, name) for name in names(type(self)))


def names(kind: Any) -> list[str]:
    """What a dataclass is made of."""
    return [field.name for field in fields(kind) if field.init]


class Options(Named):
    """Fields as numbers, by the names that the core gives them; checked when they are made."""

    def __post_init__(self) -> None:
        self.numbers()
        self.get_known()
        with contextlib.suppress(ImportError):  # without the libraries: when they are used
            self.ask_core()

    def ask_core(self) -> None:
        """Raises what the core says about the fields together."""

    def numbers(self, prefix: str = "") -> dict[str, Any]:
        """For example {"num_experts": 8, "overflow": 0, ...}; `prefix` before each name."""
        return {prefix + name: number(name, getattr(self, name)) for name in names(type(self))}


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
    key: str = key()

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
    key: str = key()

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
    key: str = key()

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


PARTS: dict[str, Any] = {"layer": Layer, "router": Router, "experts": Experts}


@dataclass(frozen=True)
class Moe(Named):
    """What is fixed for a layer."""

    layer: Layer
    router: Router
    experts: Experts
    shared: Experts | None = None
    balance_coeff: float = 0.0
    z_coeff: float = 0.0
    sequence_tokens: int = 0
    capacity: int | None = None
    quantize: str | None = None  # "1x128" or "1x32": rows travel to the experts in e4m3
    key: str = key()

    @classmethod
    def of(cls, **wishes: Any) -> "Moe":
        """All of it at once, each number said once: every field of Layer, Router, Experts and Moe
        by its name.  of(num_experts=8, top_k=2, hidden=256, inner=512, score="sigmoid")."""
        fields_of = {part: set(names(kind)) for part, kind in PARTS.items()}
        own = set(names(cls)) - set(PARTS)
        for name in wishes:
            word("Moe.of:", name, sorted(own.union(*fields_of.values())))

        def chosen(known: set[str]) -> dict[str, Any]:
            return {name: value for name, value in wishes.items() if name in known}

        parts = {part: kind(**chosen(fields_of[part])) for part, kind in PARTS.items()}
        return cls(**parts, **chosen(own))

    def __post_init__(self) -> None:
        for name, kind in PARTS.items():
            if not isinstance(getattr(self, name), kind):
                raise EpicArgumentError(f"{name}: an epic.{kind.__name__} is needed")
        for name in ("balance_coeff", "z_coeff"):
            real(name, getattr(self, name))
        whole("sequence_tokens", self.sequence_tokens)
        if self.capacity is not None:
            whole("capacity", self.capacity, 1)
        if self.quantize is not None:
            word("quantize", self.quantize, BLOCKS)
        self.check_parts()
        self.get_known()

    def check_parts(self) -> None:
        """What layer, router and experts say twice."""
        for name in ("num_experts", "top_k"):
            a, b = getattr(self.layer, name), getattr(self.router, name)
            if a != b:
                raise EpicArgumentError(f"layer.{name} {a}, router.{name} {b}: make them equal")
        if self.layer.layout != "expert_major":
            raise EpicArgumentError(f"layer.layout {self.layer.layout!r}: 'expert_major' is needed")
        if self.shared and self.shared.hidden != self.experts.hidden:
            raise EpicArgumentError(
                f"shared.hidden {self.shared.hidden}, experts.hidden {self.experts.hidden}: make "
                "them equal"
            )
        if self.shared and self.shared.num_local_experts > 1:
            raise EpicArgumentError(
                f"shared.num_local_experts {self.shared.num_local_experts}: the shared expert is "
                "one; give it a larger inner"
            )
