# SPDX-License-Identifier: Apache-2.0
"""Options of a layer, its router and its experts: the core's option structs.

Options are hashable and equal by content, so that they can be static arguments of jitted functions.
Words stand for the core's enumerators.
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
ON_GPUS = ("gpu", "p2p", "hosts")  # backends for GPUs; "gpu" selects p2p or hosts
ON_CPUS = ("self", "threads", "shm", "mpi")
UINT32_MAX, INT64_MAX = (1 << 32) - 1, (1 << 63) - 1
FLAGS = ("distinct", "ungated", "interleaved")
SMALLEST = {"max_tokens": 1, "max_row_bytes": 1}


def check_choice(field: str, value: Any, words: Iterable[str]) -> str:
    """Return the value after checking that it is one of the words."""
    words = tuple(words)
    if value in words:
        return str(value)
    near = difflib.get_close_matches(str(value), words, 1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise EpicArgumentError(f"{field} is {value!r}: must be one of {', '.join(words)}{hint}")


def backend_for(on_gpus: bool, requested: str | None) -> str | None:
    """Return the requested backend, else that of EPIC_BACKEND if it fits the memory.

    If neither names one, GPUs use "gpu" and the core chooses on CPUs (None).
    """
    backend = requested or os.environ.get("EPIC_BACKEND") or None
    if on_gpus:
        if requested is None and backend in ON_CPUS:
            backend = None
        if backend is not None and backend not in ON_GPUS:
            raise EpicArgumentError(
                f"backend is {backend!r}: must be 'gpu', 'p2p' or 'hosts' for arrays on GPUs"
            )
        return backend or "gpu"
    if backend in ON_GPUS:
        by = "" if requested else " (EPIC_BACKEND)"
        raise EpicArgumentError(
            f"backend is {backend!r}{by}: must be a backend for CPUs, where the arrays are"
        )
    return requested


def check_int(field: str, value: Any, least: int = 0, most: int = UINT32_MAX) -> int:
    """Return the value as an int after checking its range."""
    index = None
    if isinstance(value, SupportsIndex) and (field in FLAGS or not isinstance(value, bool)):
        with contextlib.suppress(TypeError):  # raised by arrays and by traced values
            index = value.__index__()
    if index is None or not least <= index <= most:
        end = f" to {most}" if index is not None and index > most else ""
        raise EpicArgumentError(f"{field} is {value!r}: must be an integer from {least}{end}")
    return index


def check_float(field: str, value: Any) -> float:
    """Return the value as a float after checking that it is finite."""
    found = math.nan
    if isinstance(value, SupportsFloat):
        with contextlib.suppress(TypeError):  # raised by arrays and by traced values
            found = float(value)
    if not math.isfinite(found):
        raise EpicArgumentError(f"{field} is {value!r}: must be a finite number")
    return found


def encode_text(field: str, value: Any) -> bytes:
    """Return the text as the core takes it: a C string in UTF-8."""
    if not isinstance(value, str):
        raise EpicArgumentError(f"{field} is {value!r}: must be a str")
    if "\0" in value:  # C would end the text there
        raise EpicArgumentError(f"{field} is {value!r}: must not contain a NUL character")
    try:
        return value.encode()
    except UnicodeEncodeError:  # the text contains half of a surrogate pair
        raise EpicArgumentError(
            f"{field} is {value!r}: must be text that UTF-8 can encode"
        ) from None


def to_core_number(field: str, value: Any) -> int | float:
    """Return the core's number for the value of a field."""
    if field in CHOICES:
        return CHOICES[field].index(check_choice(field, value, CHOICES[field]))
    if field.endswith("_type"):
        types = WEIGHT_TYPES if field == "weight_type" else TYPES
        return 0 if value is None else types[check_choice(field, value, types)]
    return check_float(field, value) if field in REALS else check_int(field, value)


options_by_key: dict[str, Any] = {}


def key_field() -> Any:
    """Return the field with the name by which options_by_key has a value.

    Tracers treat strings as constants, but not numbers.
    """
    return field(init=False, repr=False, compare=False, default="")


def intern_options(kind: str, *values: Any) -> str:
    """Check options, register them in options_by_key and return their key.

    Their parts are passed as keys. It is a separate function, so that tracers can treat its result
    as a constant.
    """
    made: Any = object.__new__(KINDS[kind])
    for name, value in zip(field_names(KINDS[kind]), values, strict=True):
        part = options_by_key.get(value) if isinstance(value, str) else None
        object.__setattr__(made, name, part or value)
    made.check()
    object.__setattr__(made, "key", repr(made))
    options_by_key[made.key] = made
    return str(made.key)


class Keyed:
    """The base of frozen dataclasses with a key: a string that stands for their values.

    Tracers treat strings as constants.
    """

    key: str
    NAMES: tuple[str, ...] = ()  # names of its fields; tracers need them as a constant

    def __post_init__(self) -> None:
        found = [getattr(self, name) for name in self.NAMES]
        keys = [v.key if isinstance(v, Keyed) else v for v in found]
        object.__setattr__(self, "key", intern_options(type(self).__name__, *keys))

    def check(self) -> None:
        """Check the fields."""

    def __reduce__(self) -> Any:
        """Pickle the fields, so that the constructor registers the copy in its own process."""
        return type(self), tuple(getattr(self, name) for name in field_names(type(self)))


def field_names(kind: Any) -> list[str]:
    """Return the names of the fields that the constructor takes."""
    return [field.name for field in fields(kind) if field.init]


class Options(Keyed):
    """Options whose fields are numbers of the core; they are checked when they are made."""

    def check(self) -> None:
        """Check the fields by themselves, then by the core's rules."""
        self.numbers()
        # Without the core's library, the first call checks them.
        with contextlib.suppress(ImportError):
            self.check_with_core()

    def check_with_core(self) -> None:
        """Raise the core's error about the fields together."""

    def numbers(self, prefix: str = "") -> dict[str, Any]:
        """Return the fields as the core's numbers, with a prefix before each name."""
        return {
            prefix + name: to_core_number(name, getattr(self, name))
            for name in field_names(type(self))
        }


MOST_LEAVES = 8  # leaves that invariant=True chooses, at most
DISTINCT = 8  # the value of the flag EPIC_DISTINCT


@dataclass(frozen=True)
class Layer(Options):
    """Where choices may go and how rows are summed. Equal on all ranks.

    Attributes:
        num_experts: Number of experts of the whole group, 1 to 65536; each replica counts.
        top_k: Choices of a token, 1 to 64.
        alignment: The length of each expert's slab is a multiple of it, in rows. Use 128 for
            grouped products of GPUs that need it.
        overflow: "error": choices without a slot are an error on every rank. "drop": they are
            dropped by a rule that all ranks share.
        expert_capacity: With overflow "drop": largest number of choices of an expert over the
            group; 0: no limit. A capacity factor f is ceil(f * tokens * top_k / num_experts).
        priority: Which choices stay with overflow "drop". "by_token": in the order of rank, token
            and k. "by_k": all first choices first (GShard, NLLB).
        sum_order: Order in which the rows of a token are summed. "by_rank": ascending ranks.
            "tree": a binary tree over `leaves`; the bits are then equal for every number of ranks
            that divides leaves. "by_hosts": a tree if that sends fewer rows between hosts (GPUs of
            several hosts, a power of two of ranks, no rank_of_expert), else by rank.
        leaves: A power of two that divides num_experts and that num_ranks divides; 0: num_ranks.
        partial_type: Dtype in which partial sums travel. None: the rows' dtype. "float32": sums of
            16-bit rows are rounded once, at the end.
        layout: Layout of received rows. "expert_major": one row for each choice, slab by slab.
            "flat": one row for each token and rank, for `dispatch_flat`.
        num_logical: Number of logical experts if experts are replicas (EPLB): ids are below it, and
            logical_of_expert names the logical expert of each replica; 0: no replicas.
        distinct: Promise that the ids of a token differ, which is checked. A token then has at most
            min(top_k, local experts) slots on a rank, which saves memory. `moe` sets it for the
            router's choices.

    Raises:
        EpicArgumentError: A field is invalid, or fields do not fit together.
    """

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
        """Number of experts that ids name: the logical ones if there are replicas."""
        return self.num_logical or self.num_experts

    def numbers(self, prefix: str = "") -> dict[str, Any]:
        """Return the fields as numbers; `distinct` is one of the core's flags."""
        if self.distinct not in (False, True):
            raise EpicArgumentError(f"distinct is {self.distinct!r}: must be True or False")
        found = super().numbers(prefix)
        found[prefix + "flags"] = DISTINCT * found.pop(prefix + "distinct")
        return found

    def check_with_core(self) -> None:
        """Check the fields as the core does for a group of one rank."""
        _native.size("epic_plan_bytes_v1", _native.Config(num_ranks=1, **SMALLEST), self)


@dataclass(frozen=True)
class Router(Options):
    """How experts are chosen and weighted.

    Logits have E = num_experts + zero_experts columns. All is computed in float32 (float64 for
    float64 logits). Between equal values the lower id wins.

    Attributes:
        num_experts: Number of experts that can be chosen, 1 to 65536; with replicas logical ones.
        top_k: Choices of a token, 1 to 64, best first.
        score: Score of a logit: "softmax", "sigmoid", "sqrtsoftplus" (sqrt(log(1 + e^z))), or
            "logits" (the logit itself).
        zero_experts: Number of identity experts, with ids from num_experts up. They return the
            token, multiplied by its weight.
        num_groups: Number of equal blocks of experts, of which a token may use only some
            (DeepSeek's node limit). It divides E; 0: no groups.
        topk_groups: Number of groups that a token may use.
        group_score: Score of a group: "max" of its experts' scores, or "sum" of the group_best
            largest.
        group_best: Scores that "sum" adds; 0: top_k / topk_groups (DeepSeek-V3: 2).
        group_others: Experts of the other groups: "out" (never chosen) or "zero" (score 0).
        weight_rule: Weights of the chosen experts: "of_score" (their scores without the bias),
            "softmax_chosen", "sigmoid_chosen" (of their logits) or "sparsemixer" (Phi-3.5-MoE).
        normalize: What the weights of a token are divided by: "none", their "sum" + eps, or
            "clamped": the larger of their sum and norm_min.
        eps: For normalize "sum".
        norm_min: For normalize "clamped".
        jitter: For weight_rule "sparsemixer", 0 to below 1.
        scale: Factor of the weights (DeepSeek-V3: 2.5); 0: 1.

    Raises:
        EpicArgumentError: A field is invalid, or fields do not fit together.
    """

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
        """Return the fields as numbers; check rules that the core does not have."""
        found = super().numbers(prefix)
        if self.topk_groups > 1 and self.num_groups < 2:
            raise EpicArgumentError(
                f"topk_groups is {self.topk_groups} and num_groups is {self.num_groups}: "
                "num_groups must be at least 2, so that there are groups to choose"
            )
        if self.jitter and self.weight_rule != "sparsemixer":
            raise EpicArgumentError(
                f"jitter is {self.jitter} and weight_rule is {self.weight_rule!r}: must be 0, "
                "because only weight_rule 'sparsemixer' uses it"
            )
        return found

    def check(self) -> None:
        """Check the fields; warn if the router gets no gradient through its weights."""
        super().check()
        normal = self.normalize != "none" or self.weight_rule == "softmax_chosen"
        if self.top_k == 1 and normal:
            word_of = "normalize" if self.normalize != "none" else "weight_rule"
            warnings.warn(
                f"top_k is 1 and {word_of} is {getattr(self, word_of)!r}: the only weight of a "
                "token is divided by itself, so the router gets gradients only from its losses; to "
                "train it with the output use normalize 'none' and weight_rule 'of_score'",
                RuntimeWarning,
                stacklevel=6,
            )

    def check_with_core(self) -> None:
        """Check the fields by the core's query of its workspace."""
        _native.size("epic_router_workspace_v1", self)


@dataclass(frozen=True)
class Experts(Options):
    """The experts' MLP: y = (act(x W_gate) * (x W_up)) W_down, plus biases.

    Attributes:
        num_local_experts: Largest number of experts of a rank; 0: derived from group or weights.
        hidden: Columns of a row, 1 or more.
        inner: Columns between the two products, 1 or more.
        activation: act: "silu", "gelu" (with erf), "gelu_tanh", "relu2" (max(x, 0)^2); with a gate
            also "clamped_swiglu" (gpt-oss) and "clamped_silu" (DeepSeek-V4).
        ungated: Whether there is no gate: y = act(x W) W_down, where W has inner columns.
        interleaved: Whether gate has the even columns of w_gate_up and up the odd ones. If False
            all columns of gate come first.
        weighting: Where the weight of a choice is multiplied in. "late": when rows are summed.
            "early": on the activation and the down bias. "input": on the expert's input.
        row_type: "float32", "bfloat16", "float16", "float64", or None: the arrays' own dtype.
        weight_type: Like row_type. "e4m3" (GPUs): weights are rounded to e4m3 in each call, and
            gradients pass straight through.
        limit: For "clamped_swiglu" (0: 7) and "clamped_silu" (0: 10).
        alpha: For "clamped_swiglu"; 0: 1.702.

    Raises:
        EpicArgumentError: A field is invalid, or fields do not fit together.
    """

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
        """Check the fields by the core's query of its memory."""
        for name in ("hidden", "inner"):
            check_int(name, getattr(self, name), 1)
        if self.num_local_experts:
            _native.experts_memory(self, 0, self.weight_type == "e4m3")
        else:
            replace(self, num_local_experts=1)  # the core checks the options as those of one expert


PARTS: dict[str, Any] = {"layer": Layer, "router": Router, "experts": Experts}


@dataclass(frozen=True)
class Moe(Keyed):
    """Options of a whole layer: router, experts, losses and capacity.

    `Moe.of` makes one from the fields of all parts.

    Attributes:
        layer: Where choices go. Its top_k and num_experts (with replicas num_logical) equal those
            of the router.
        router: How experts are chosen.
        experts: The experts' MLP.
        shared: An MLP that every token passes, added to the others; None: none.
        balance_coeff: Factor of the balance loss: num_experts / (top_k * T^2) * sum over experts of
            load * sum over tokens of P, where P are the scores divided by their sum and T is the
            number of tokens; 0: no loss.
        z_coeff: Factor of the z-loss, the mean over tokens of logsumexp(logits)^2; 0: no loss.
        sequence_tokens: Length of a sequence: the balance loss of each sequence is averaged; 0: all
            tokens together.
        capacity: Slots of a rank for received rows; None: as many as can ever be needed.
        invariant: Whether the bits of a token depend only on its own row, its choices and the
            parameters: not on other tokens, their number, the ranks, the capacity or the alignment
            (guide "Reproducibility"). Gradients of losses depend on all tokens. Needs sum_order
            "tree" with `leaves`, which is then the largest number of ranks, and overflow "error".
            `Moe.of` sets sum_order and leaves: the largest power of two up to 8 that divides
            num_experts.
        quantize: "1x128" (a float32 scale for 128 columns) or "1x32" (an e8m0 scale for 32): rows
            travel to the experts in e4m3. None: as they are.

    Raises:
        EpicArgumentError: A field is invalid, or the parts do not fit together.
    """

    layer: Layer
    router: Router
    experts: Experts
    shared: Experts | None = None
    balance_coeff: float = 0.0
    z_coeff: float = 0.0
    sequence_tokens: int = 0
    capacity: int | None = None
    quantize: str | None = None
    invariant: bool = False
    key: str = key_field()

    @classmethod
    def of(cls, **fields: Any) -> "Moe":
        """Make the options of a layer from the fields of all parts, each named once.

        Args:
            **fields: Fields of Layer, Router, Experts and Moe, by name.

        Returns:
            The options.

        Raises:
            EpicArgumentError: A name is unknown, or a field is invalid.

        Example:
            >>> import epic
            >>> options = epic.Moe.of(
            ...     num_experts=8, top_k=2, hidden=256, inner=512, score="sigmoid"
            ... )
            >>> options.router.score, options.layer.top_k
            ('sigmoid', 2)
        """
        for name in fields:
            check_choice("an argument of Moe.of", name, MOE_ARGUMENTS)

        if fields.get("invariant"):
            leaves = math.gcd(check_int("num_experts", fields.get("num_experts")), MOST_LEAVES)
            fields = {"sum_order": "tree", "leaves": leaves, **fields}

        def chosen(kind: Any) -> dict[str, Any]:
            return {name: value for name, value in fields.items() if name in kind.NAMES}

        by_part = {part: chosen(kind) for part, kind in PARTS.items()}
        if fields.get("num_logical"):
            by_part["router"]["num_experts"] = fields["num_logical"]
        parts = {part: kind(**by_part[part]) for part, kind in PARTS.items()}
        return cls(**parts, **chosen(cls))

    def check(self) -> None:
        """Check each field, then the parts with each other."""
        for name, kind in PARTS.items():
            if not isinstance(getattr(self, name), kind):
                raise EpicArgumentError(
                    f"{name} is a {type(getattr(self, name)).__name__}: must be an "
                    f"epic.{kind.__name__}"
                )
        if self.shared is not None and not isinstance(self.shared, Experts):
            raise EpicArgumentError(
                f"shared is a {type(self.shared).__name__}: must be an epic.Experts or None"
            )
        for name in ("balance_coeff", "z_coeff"):
            if check_float(name, getattr(self, name)) < 0:
                raise EpicArgumentError(
                    f"{name} is {getattr(self, name)}: must be 0 (no loss) or more"
                )
        check_int("sequence_tokens", self.sequence_tokens)
        if self.capacity is not None:
            check_int("capacity", self.capacity, 1)
        if self.quantize is not None:
            check_choice("quantize", self.quantize, BLOCKS)
        if self.invariant not in (False, True):
            raise EpicArgumentError(f"invariant is {self.invariant!r}: must be True or False")
        if self.invariant:
            self.check_invariant()
        self.check_parts()

    def as_invariant(self) -> "Moe":
        """Return the options with invariant=True, and the sum_order and leaves that it needs.

        Returns:
            The options. A layer that has sum_order "tree" and leaves keeps them. Otherwise leaves
            is the largest power of two up to 8 that divides num_experts.

        Raises:
            EpicArgumentError: Another option cannot be combined with invariant=True.
        """
        layer = self.layer
        if layer.sum_order != "tree" or not layer.leaves:
            leaves = math.gcd(layer.num_experts, MOST_LEAVES)
            layer = replace(layer, sum_order="tree", leaves=leaves)
        return replace(self, layer=layer, invariant=True)

    def check_invariant(self) -> None:
        """Refuse options with which the bits of a token can depend on other tokens or on ranks."""
        layer = self.layer
        if layer.sum_order != "tree" or not layer.leaves:
            raise EpicArgumentError(
                f"sum_order is {layer.sum_order!r} and leaves is {layer.leaves}: with "
                "invariant=True they must be 'tree' and above 0; Moe.of(invariant=True) sets both"
            )
        if layer.overflow != "error":
            raise EpicArgumentError(
                f"overflow is {layer.overflow!r}: must be 'error' with invariant=True, because the "
                "choices that are dropped depend on other tokens"
            )
        if self.quantize is not None:
            raise EpicArgumentError(
                f"quantize is {self.quantize!r}: must be None with invariant=True, because the "
                "layer is then composed of functions that do not promise these bits"
            )

    def check_parts(self) -> None:
        """Check the numbers that several parts contain."""
        ids = "num_logical" if self.layer.num_logical else "num_experts"
        for name, other in ((ids, "num_experts"), ("top_k", "top_k")):
            a, b = getattr(self.layer, name), getattr(self.router, other)
            if a != b:
                raise EpicArgumentError(
                    f"layer.{name} is {a} and router.{other} is {b}: must be equal"
                )
        local, experts = self.experts.num_local_experts, self.layer.num_experts
        if local > experts:
            raise EpicArgumentError(
                f"experts.num_local_experts is {local}: must be at most {experts}, the "
                "layer.num_experts; leave it out, and it is derived"
            )
        if self.layer.layout != "expert_major":
            raise EpicArgumentError(
                f"layer.layout is {self.layer.layout!r}: must be 'expert_major'"
            )
        if self.shared and self.shared.hidden != self.experts.hidden:
            raise EpicArgumentError(
                f"shared.hidden is {self.shared.hidden} and experts.hidden is "
                f"{self.experts.hidden}: must be equal"
            )
        if self.shared and self.shared.num_local_experts > 1:
            raise EpicArgumentError(
                f"shared.num_local_experts is {self.shared.num_local_experts}: must be 1; for a "
                "larger shared expert raise its inner"
            )


def check_invariant_call(given: dict[str, Any]) -> None:
    """Refuse arguments with which a layer with invariant=True would be composed of functions that
    do not promise its bits. given: their values by name."""
    for name, value in given.items():
        if value is not None:
            raise EpicArgumentError(
                f"{name} is given: must be None for a layer with invariant=True; EPIC's own "
                "products compute it"
            )


KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Layer, Router, Experts, Moe)}
for kind_ in KINDS.values():
    kind_.NAMES = tuple(field_names(kind_))
MOE_ARGUMENTS = sorted(
    {name for kind in KINDS.values() for name in kind.NAMES} - set(PARTS)
)  # names of the arguments of Moe.of
