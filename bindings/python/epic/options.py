# SPDX-License-Identifier: Apache-2.0
"""What is fixed for a layer, its router and its experts: the core's option structs.

Values are hashable and equal by content, so they may be static arguments of jitted functions.
Words stand for the core's enums; epic.h says what each means.
"""

import contextlib
import difflib
import math
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, SupportsFloat, SupportsIndex

from epic import _native
from epic.choices import CHOICES, TYPES, WEIGHT_TYPES
from epic.errors import EpicArgumentError

REALS = ("eps", "norm_min", "jitter", "scale", "limit", "alpha")
BLOCKS = ("1x128", "1x32")
ON_GPUS = ("gpu", "p2p", "hosts")  # backends; gpu is one of the others
ON_CPUS = ("self", "threads", "shm", "mpi")
UINT32_MAX, INT64_MAX = (1 << 32) - 1, (1 << 63) - 1
FLAGS = ("distinct", "ungated", "interleaved")
SMALLEST = {"max_tokens": 1, "max_row_bytes": 1}


def check_choice(field: str, value: Any, words: Iterable[str]) -> str:
    """The value, if it is one of the words."""
    words = tuple(words)
    if value in words:
        return str(value)
    near = difflib.get_close_matches(str(value), words, 1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise EpicArgumentError(f"{field} {value!r}: one of {', '.join(words)} is needed{hint}")


def backend_for(on_gpus: bool, wish: str | None) -> str | None:
    """That which is asked for, else EPIC_BACKEND's where that reaches such memory; if neither says
    one the core chooses: on GPUs "gpu", on CPUs None."""
    said = wish or os.environ.get("EPIC_BACKEND") or None
    if on_gpus:
        if wish is None and said in ON_CPUS:
            said = None
        if said is not None and said not in ON_GPUS:
            raise EpicArgumentError(
                f"backend {said!r}: arrays on GPUs are for 'gpu', 'p2p' or 'hosts'"
            )
        return said or "gpu"
    if said in ON_GPUS:
        by = "" if wish else " (EPIC_BACKEND)"
        raise EpicArgumentError(f"backend {said!r}{by} joins GPUs: the arrays are on CPUs")
    return wish


def check_int(field: str, value: Any, least: int = 0, most: int = UINT32_MAX) -> int:
    """The value, if it is an integer that the core can have."""
    index = None
    if isinstance(value, SupportsIndex) and (field in FLAGS or not isinstance(value, bool)):
        with contextlib.suppress(TypeError):  # of an array, or of a value that is traced
            index = value.__index__()
    if index is None or not least <= index <= most:
        end = f" to {most}" if index is not None and index > most else ""
        raise EpicArgumentError(f"{field} {value!r}: an integer from {least}{end} is needed")
    return index


def check_float(field: str, value: Any) -> float:
    """The value, if it is a finite number."""
    found = math.nan
    if isinstance(value, SupportsFloat):
        with contextlib.suppress(TypeError):  # of an array, or of a value that is traced
            found = float(value)
    if not math.isfinite(found):
        raise EpicArgumentError(f"{field} {value!r}: a finite number is needed")
    return found


def encode_text(field: str, value: Any) -> bytes:
    """The value as the core has it: a C string in UTF-8."""
    if not isinstance(value, str):
        raise EpicArgumentError(f"{field} {value!r}: a str is needed")
    if "\0" in value:  # C would take what stands before it for the whole
        raise EpicArgumentError(f"{field} {value!r}: must not contain a NUL character")
    try:
        return value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        raise EpicArgumentError(f"{field} {value!r}: must be text that UTF-8 can encode") from None


def to_core_number(field: str, value: Any) -> int | float:
    """The core's number for the value of a field."""
    if field in CHOICES:
        return CHOICES[field].index(check_choice(field, value, CHOICES[field]))
    if field.endswith("_type"):
        types = WEIGHT_TYPES if field == "weight_type" else TYPES
        return 0 if value is None else types[check_choice(field, value, types)]
    return check_float(field, value) if field in REALS else check_int(field, value)


options_by_key: dict[str, Any] = {}


def key_field() -> Any:
    """A field: the name of a value, by which `known` has it.  Tracers take words for constants,
    and not numbers."""
    return field(init=False, repr=False, compare=False, default="")


def intern_options(kind: str, *values: Any) -> str:
    """The key of a value, which is checked and known then.  Its own parts come as their keys.  A
    function by itself, so that tracers may take its result for a constant."""
    twin: Any = object.__new__(KINDS[kind])
    for name, value in zip(field_names(KINDS[kind]), values, strict=True):
        part = options_by_key.get(value) if isinstance(value, str) else None
        object.__setattr__(twin, name, part or value)
    twin.check()
    object.__setattr__(twin, "key", repr(twin))
    options_by_key[twin.key] = twin
    return str(twin.key)


class Keyed:
    """A dataclass with a key."""

    key: str
    NAMES: tuple[str, ...] = ()  # its fields, for tracers

    def __post_init__(self) -> None:
        found = [getattr(self, name) for name in self.NAMES]
        keys = [v.key if isinstance(v, Keyed) else v for v in found]
        object.__setattr__(self, "key", intern_options(type(self).__name__, *keys))

    def check(self) -> None:
        """Of what it is made of."""

    def __reduce__(self) -> Any:
        """Copies are made, and so known, in the process that has them."""
        return type(self), tuple(getattr(self, name) for name in field_names(type(self)))


def field_names(kind: Any) -> list[str]:
    """What a dataclass is made of."""
    return [field.name for field in fields(kind) if field.init]


class Options(Keyed):
    """Fields as numbers, by the names that the core gives them; checked when they are made."""

    def check(self) -> None:
        """By the fields' rules, then by the core's."""
        self.numbers()
        with contextlib.suppress(ImportError):  # without the libraries: when they are used
            self.check_with_core()

    def check_with_core(self) -> None:
        """Raises what the core says about the fields together."""

    def numbers(self, prefix: str = "") -> dict[str, Any]:
        """For example {"num_experts": 8, "overflow": 0, ...}; `prefix` before each name."""
        return {
            prefix + name: to_core_number(name, getattr(self, name))
            for name in field_names(type(self))
        }


DISTINCT = 8  # EPIC_DISTINCT


@dataclass(frozen=True)
class Layer(Options):
    """Where choices may go and how rows are added: epic_layer.  Equal on all ranks.

    num_experts: of the whole group, 1 to 65536; with replicas all of them count.
    top_k: choices of a token, 1 to 64.
    alignment: the length of each expert's slab is a multiple of it, in rows; 128 for the grouped
        products of GPUs.
    overflow: what becomes of choices that find no slot: "error" on every rank, or "drop", by a rule
        that all ranks share.
    expert_capacity: most choices of an expert over the group, the others are dropped (overflow
        "drop"); 0: no limit.  A capacity factor f is ceil(f * tokens * top_k / num_experts).
    priority: with "drop", whose choices stay: "by_token" (rank, token, k) or "by_k" (all first
        choices first: GShard, NLLB).
    sum_order: how the rows of a token are added: "by_rank", ascending, or "tree", a binary tree
        over `leaves`: then the bits are those of any number of ranks that divides leaves.
        "by_hosts": in a tree where that sends fewer rows (the group's GPUs are on several hosts, a
        power of two of ranks, no rank_of_expert), else by rank.
    leaves: a power of two that divides num_experts and that the number of ranks divides; 0: that
        number.
    partial_type: what travels home: None: the rows' type; "float32": sums of 16-bit rows are
        rounded once, at the end.
    layout: of received rows: "expert_major", a row for each choice, slab by slab; or "flat", a row
        for each token and rank.
    num_logical: replicas (EPLB): ids are below it, and logical_of_expert says which logical expert
        each of num_experts is a copy of; 0: no replicas.
    distinct: the caller's promise, which is checked: the ids of a token differ.  Then a token has
        at most min(top_k, local experts) slots on a rank, and less memory does.  epic.jax.moe
        promises it for the router's choices by itself."""

    num_experts: int
    top_k: int
    alignment: int = 1
    overflow: str = "error"
    expert_capacity: int = 0
    priority: str = "by_token"
    sum_order: str = "by_hosts"
    leaves: int = 0
    partial_type: str | None = None
    layout: str = "expert_major"
    num_logical: int = 0
    distinct: bool = False
    key: str = key_field()

    @property
    def num_ids(self) -> int:
        """Experts that ids name: the logical ones, if there are replicas."""
        return self.num_logical or self.num_experts

    def numbers(self, prefix: str = "") -> dict[str, Any]:
        """As Options; `distinct` is one of the core's flags."""
        if self.distinct not in (False, True):
            raise EpicArgumentError(f"distinct {self.distinct!r}: True or False is needed")
        found = super().numbers(prefix)
        found[prefix + "flags"] = DISTINCT * found.pop(prefix + "distinct")
        return found

    def check_with_core(self) -> None:
        """As a group of one rank would be asked."""
        _native.size("epic_plan_bytes_v1", _native.Config(num_ranks=1, **SMALLEST), self)


@dataclass(frozen=True)
class Router(Options):
    """How experts are chosen and weighted: epic_router.  Logits have E = num_experts + zero_experts
    columns; all is computed in float32 (float64 logits: float64), ties go to the lower id.

    num_experts: that may be chosen, 1 to 65536; with replicas the logical ones.
    top_k: choices of a token, 1 to 64, best first.
    score: of the logits z: "softmax", "sigmoid", "sqrtsoftplus" (sqrt(log(1 + e^z))), "logits".
    zero_experts: identity experts, with ids from num_experts up: they give the token back, times
        its weight.
    num_groups: experts in equal blocks of which only some are open to a token (DeepSeek's node
        limit); it divides E; 0: none.
    topk_groups: groups that stay open.
    group_score: a group's value: "max" of its experts', or the "sum" of its group_best largest.
    group_best: for "sum"; 0: top_k / topk_groups (DeepSeek-V3: 2).
    group_others: experts of closed groups: "out", or "zero": their value is 0.
    weight_rule: of the chosen ones: "of_score" (their scores, without the bias),
        "softmax_chosen" or "sigmoid_chosen" (of their logits), "sparsemixer" (Phi-3.5-MoE).
    normalize: the weights of a token by nothing ("none"), their "sum" + eps, or "clamped": the
        larger of their sum and norm_min.
    eps, norm_min: of normalize.
    jitter: of "sparsemixer", 0 to below 1.
    scale: last factor of the weights (DeepSeek-V3: 2.5); 0: 1."""

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
    key: str = key_field()

    def numbers(self, prefix: str = "") -> dict[str, Any]:
        """As Options; the core looks at topk_groups where there are groups."""
        found = super().numbers(prefix)
        if self.topk_groups > 1 and self.num_groups < 2:
            raise EpicArgumentError(
                f"topk_groups {self.topk_groups}: num_groups is {self.num_groups}, so there are no "
                "groups to choose from"
            )
        if self.jitter and self.weight_rule != "sparsemixer":
            raise EpicArgumentError(
                f"jitter is {self.jitter} with weight_rule {self.weight_rule!r}: must be 0, as "
                "only weight_rule 'sparsemixer' uses it"
            )
        return found

    def check(self) -> None:
        """As Options; warn of a router that learns nothing from its weights."""
        super().check()
        normal = self.normalize != "none" or self.weight_rule == "softmax_chosen"
        if self.top_k == 1 and normal:
            word_of = "normalize" if self.normalize != "none" else "weight_rule"
            warnings.warn(
                f"top_k is 1 with {word_of} {getattr(self, word_of)!r}: the only weight of a token "
                "is divided by itself, so the router has no gradient but that of the losses; to "
                "train it use normalize 'none' and weight_rule 'of_score'",
                RuntimeWarning,
                stacklevel=6,
            )

    def check_with_core(self) -> None:
        """By the query of its workspace."""
        _native.size("epic_router_workspace_v1", self)


@dataclass(frozen=True)
class Experts(Options):
    """The experts' MLP: epic_experts.  y = (act(x W_gate) * (x W_up)) W_down, plus biases.

    num_local_experts: experts of one rank, at most; 0: derived where the group or the weights
        tell it.
    hidden: columns of a row, as the model's; 1 or more.
    inner: columns between the two products, of the whole expert; 1 or more.
    activation: act: "silu", "gelu" (with erf), "gelu_tanh", "relu2" (max(x, 0)^2); gated only:
        "clamped_swiglu" (gpt-oss), "clamped_silu" (DeepSeek-V4).
    ungated: y = act(x W) W_down, and W has inner columns.
    interleaved: gate in the even columns of w_gate_up and up in the odd ones; else all of gate come
        first.
    weighting: where a choice's weight is multiplied in: "late", on the way home; "early", on the
        activation and the down bias; "input", on the expert's input.
    row_type, weight_type: "float32", "bfloat16", "float16", "float64"; None: the arrays' own.
        weight_type "e4m3", on GPUs: the products are of e4m3, the weights are rounded for each
        call, and gradients pass straight through; epic.torch alone.
    limit: of "clamped_swiglu" (0: 7) and "clamped_silu" (0: 10).
    alpha: of "clamped_swiglu"; 0: 1.702."""

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
    key: str = key_field()

    @property
    def width(self) -> int:
        """Columns of the first weight: gate and up, or one of them."""
        return self.inner if self.ungated else 2 * self.inner

    def check_with_core(self) -> None:
        """By the query of its memory."""
        for name in ("hidden", "inner"):
            check_int(name, getattr(self, name), 1)
        if self.num_local_experts:
            _native.experts_memory(self, 0, self.weight_type == "e4m3")
        else:
            replace(self, num_local_experts=1)  # which is asked


PARTS: dict[str, Any] = {"layer": Layer, "router": Router, "experts": Experts}


@dataclass(frozen=True)
class Moe(Keyed):
    """What is fixed for a layer: router, plan, dispatch, experts, combine.  Moe.of(...) makes one
    of plain words.

    layer, router, experts: its parts; they agree in top_k, and router.num_experts is
        layer.num_experts, or with replicas layer.num_logical.
    shared: an MLP that every token takes, added to the others; its hidden is experts.hidden.
    balance_coeff: factor of the balance loss num_experts / (top_k T^2) * sum over experts of load
        times the sum over tokens of P (the scores over their sum), T tokens; 0: none.
    z_coeff: factor of the z-loss, the mean over tokens of logsumexp(logits)^2; 0: none.
    sequence_tokens: the balance loss of each sequence of so many tokens, averaged; 0: of all
        tokens together.
    capacity: slots of a device for the rows that it receives; None: as many as can ever be needed.
    quantize: "1x128" (a float32 scale for 128 columns) or "1x32" (e8m0): rows travel to the experts
        in e4m3; None: as they are."""

    layer: Layer
    router: Router
    experts: Experts
    shared: Experts | None = None
    balance_coeff: float = 0.0
    z_coeff: float = 0.0
    sequence_tokens: int = 0
    capacity: int | None = None
    quantize: str | None = None
    key: str = key_field()

    @classmethod
    def of(cls, **wishes: Any) -> "Moe":
        """All of it at once, each number said once: every field of Layer, Router, Experts and Moe
        by its name.  of(num_experts=8, top_k=2, hidden=256, inner=512, score="sigmoid")."""
        for name in wishes:
            check_choice("Moe.of:", name, MOE_ARGUMENTS)

        def chosen(kind: Any) -> dict[str, Any]:
            return {name: value for name, value in wishes.items() if name in kind.NAMES}

        own_words = {part: chosen(kind) for part, kind in PARTS.items()}
        if wishes.get("num_logical"):
            own_words["router"]["num_experts"] = wishes["num_logical"]
        parts = {part: kind(**own_words[part]) for part, kind in PARTS.items()}
        return cls(**parts, **chosen(cls))

    def check(self) -> None:
        """Each field, and the parts with each other."""
        for name, kind in PARTS.items():
            if not isinstance(getattr(self, name), kind):
                raise EpicArgumentError(f"{name}: an epic.{kind.__name__} is needed")
        if self.shared is not None and not isinstance(self.shared, Experts):
            raise EpicArgumentError(
                f"shared is a {type(self.shared).__name__}: an epic.Experts is needed, or None"
            )
        for name in ("balance_coeff", "z_coeff"):
            if check_float(name, getattr(self, name)) < 0:
                raise EpicArgumentError(
                    f"{name} {getattr(self, name)}: 0 (no loss) or more is needed; less would be a "
                    "reward"
                )
        check_int("sequence_tokens", self.sequence_tokens)
        if self.capacity is not None:
            check_int("capacity", self.capacity, 1)
        if self.quantize is not None:
            check_choice("quantize", self.quantize, BLOCKS)
        self.check_parts()

    def check_parts(self) -> None:
        """What layer, router and experts say twice."""
        ids = "num_logical" if self.layer.num_logical else "num_experts"
        for name, other in ((ids, "num_experts"), ("top_k", "top_k")):
            a, b = getattr(self.layer, name), getattr(self.router, other)
            if a != b:
                raise EpicArgumentError(f"layer.{name} {a}, router.{other} {b}: make them equal")
        local, experts = self.experts.num_local_experts, self.layer.num_experts
        if local > experts:
            raise EpicArgumentError(
                f"experts.num_local_experts {local}, layer.num_experts {experts}: a rank has no "
                "more than there are; leave it out, and it is derived"
            )
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


KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Layer, Router, Experts, Moe)}
for kind_ in KINDS.values():
    kind_.NAMES = tuple(field_names(kind_))
MOE_ARGUMENTS = sorted(
    {name for kind in KINDS.values() for name in kind.NAMES} - set(PARTS)
)  # of Moe.of
