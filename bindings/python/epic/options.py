# SPDX-License-Identifier: Apache-2.0
"""The options of a layer, its router and its experts, which become option structs of the core.

Options are hashable, and equal if their fields are equal. So they can be static arguments of jitted
functions. Enumerators of the core are words here, for example "softmax" for EPIC_SCORE_SOFTMAX.
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
FLAGS = ("distinct", "drop_absent", "ungated", "interleaved")
# Fields that must be 0 unless another field has one of these values.
USED_WITH = {
    "norm_min": ("normalize", ("clamped",)),
    "jitter": ("weight_rule", ("sparsemixer",)),
    "limit": ("activation", ("clamped_swiglu", "clamped_silu")),
    "alpha": ("activation", ("clamped_swiglu",)),
}
SMALLEST = {"max_tokens": 1, "max_row_bytes": 1}


def check_choice(field: str, value: Any, words: Iterable[str]) -> str:
    """Return the value after checking that it is one of the words."""
    words = tuple(words)
    if value in words:
        return str(value)
    folded = {word.lower(): word for word in words}
    near = difflib.get_close_matches(str(value).lower(), folded, 1)
    hint = f" (did you mean {folded[near[0]]!r}?)" if near else ""
    raise EpicArgumentError(f"{field} is {value!r}: must be one of {', '.join(words)}{hint}")


def backend_for(on_gpus: bool, requested: str | None) -> str | None:
    """Return the name of the backend for a group; None: the core chooses.

    EPIC_BACKEND counts only if no backend is requested, and if it fits the device. Without both, a
    group on GPUs uses "gpu".

    Args:
        on_gpus: Whether the group is on GPUs.
        requested: The backend that the caller requested, or None.

    Raises:
        EpicArgumentError: The backend does not fit the device.
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


def check_kind(name: str, value: Any, *kinds: type) -> None:
    """Raise an error if the value has none of the classes, such as a dict in place of options."""
    if not isinstance(value, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise EpicArgumentError(f"{name} is a {type(value).__name__}: must be a {wanted}")


def check_int(field: str, value: Any, least: int = 0, most: int = UINT32_MAX) -> int:
    """Return the value as an int after checking that it is an integer from `least` to `most`."""
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
    if isinstance(value, SupportsFloat) and not isinstance(value, bool):
        with contextlib.suppress(TypeError):  # raised by arrays and by traced values
            found = float(value)
    if not math.isfinite(found):
        raise EpicArgumentError(f"{field} is {value!r}: must be a finite number")
    return found


def check_rate(field: str, value: Any) -> float:
    """Return the step of a bias as a float after checking that it is finite and at least 0."""
    rate = check_float(field, value)
    if rate < 0:
        raise EpicArgumentError(f"{field} is {value!r}: must be at least 0")
    return rate


def encode_text(field: str, value: Any) -> bytes:
    """Return a text in UTF-8, after checking that it can be a C string."""
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


options_by_key: dict[str, Any] = {}  # all options that were made, by their keys


def key_field() -> Any:
    """Return the dataclass field `key`, a string that identifies options in options_by_key.

    torch.compile treats strings as constants, but not numbers.
    """
    return field(init=False, repr=False, compare=False, default="")


def intern_options(kind: str, *values: Any) -> str:
    """Check options, store them in options_by_key and return their key.

    It is a separate function, so that torch.compile can treat its result as a constant.

    Args:
        kind: Name of the class of the options.
        *values: The fields. A field that is an options object is passed as its key.
    """
    options: Any = object.__new__(KINDS[kind])
    for name, value in zip(field_names(KINDS[kind]), values, strict=True):
        part = options_by_key.get(value) if isinstance(value, str) else None
        object.__setattr__(options, name, part or value)
    options.check()
    object.__setattr__(options, "key", repr(options))
    options_by_key[options.key] = options
    return str(options.key)


class Keyed:
    """The base class of options: frozen dataclasses with a key (see key_field)."""

    key: str
    NAMES: tuple[str, ...] = ()  # names of the fields; torch.compile needs them as a constant

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
    """Options whose fields are numbers in the core. The constructor checks them."""

    def check(self) -> None:
        """Check each field, then the rules of the core for all fields together."""
        self.numbers()
        for name, (other, words) in USED_WITH.items():
            if getattr(self, name, 0) and getattr(self, other) not in words:
                uses = " or ".join(map(repr, words))
                raise EpicArgumentError(
                    f"{name} is {getattr(self, name)} and {other} is {getattr(self, other)!r}: "
                    f"must be 0, because only {other} {uses} uses it"
                )
        # If the library of the core is not found, the first call that uses the options checks them.
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
DISTINCT, DROP_ABSENT = 8, 2048  # the values of the flags EPIC_DISTINCT and EPIC_DROP_ABSENT


@dataclass(frozen=True)
class Layer(Options):
    """Options of experts, capacity and sums of a layer; equal on all ranks.

    Attributes:
        num_experts: Number of experts of the whole group, 1 to 65536; each replica counts.
        top_k: Number of choices of a token, 1 to 64.
        alignment: The number of rows of each expert's slab is a multiple of this number. Use 128
            for grouped products on GPUs that need it.
        overflow: "error": choices without a slot are an error on every rank. "drop": they are
            dropped by a rule that all ranks share.
        expert_capacity: With overflow "drop": largest number of choices of an expert over the
            group; 0: no limit. A capacity factor f is ceil(f * tokens * top_k / num_experts).
        priority: Which choices stay with overflow "drop". "by_token": in the order of rank, token
            and k. "by_k": all first choices first (GShard, NLLB).
        sum_order: Order in which the rows of a token are summed. "by_rank": ascending ranks.
            "tree": a binary tree over `leaves`; the bits are then equal for every number of ranks
            that divides leaves. "by_hosts": "tree" if that sends fewer rows between hosts (GPUs on
            several hosts, num_ranks a power of two, no rank_of_expert), else "by_rank".
        leaves: Number of leaves of the tree: a power of two that divides num_experts and that
            num_ranks divides. 0: num_ranks.
        partial_type: Dtype in which partial sums are sent. None: the dtype of the rows. "float32":
            sums of 16-bit rows are rounded only once, at the end.
        layout: Layout of received rows. "expert_major": one row for each choice, slab by slab.
            "flat": one row for each token and rank, for `dispatch_flat`.
        num_logical: Number of logical experts if experts are replicas (EPLB). Ids of choices are
            then below this number, and logical_of_expert contains the logical expert of each
            replica. 0: no replicas.
        distinct: Whether you promise that the ids of each token are different. EPIC checks this. A
            token then has at most min(top_k, local experts) slots on a rank, which saves memory.
            `moe` sets it if the router chooses.
        drop_absent: Whether the choices of a logical expert without a replica are dropped. An
            entry -1 of logical_of_expert makes an expert the replica of no logical expert, for
            example until its weights are loaded. False: each logical expert must have a replica.

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
    drop_absent: bool = False
    key: str = key_field()

    @property
    def num_ids(self) -> int:
        """Number of experts that can be chosen: num_logical with replicas, else num_experts."""
        return self.num_logical or self.num_experts

    def numbers(self, prefix: str = "") -> dict[str, Any]:
        """Return the fields as the core's numbers, with the two booleans as "flags"."""
        booleans = {"distinct": DISTINCT, "drop_absent": DROP_ABSENT}
        for name in booleans:
            if getattr(self, name) not in (False, True):
                raise EpicArgumentError(f"{name} is {getattr(self, name)!r}: must be True or False")
        found = super().numbers(prefix)
        flags = sum(flag * found.pop(prefix + name) for name, flag in booleans.items())
        found[prefix + "flags"] = flags
        return found

    def check_with_core(self) -> None:
        """Check the fields as the core does for a group of one rank."""
        _native.size("epic_plan_bytes_v1", _native.Config(num_ranks=1, **SMALLEST), self)


@dataclass(frozen=True)
class Router(Options):
    """Options of the router, which chooses experts and computes their weights.

    Logits have E = num_experts + zero_experts columns. The router computes in float32 (float64 for
    float64 logits). Of equal scores it prefers that of the lower id.

    Attributes:
        num_experts: Number of experts that can be chosen, 1 to 65536. With replicas these are
            logical experts.
        top_k: Number of choices of a token, 1 to 64.
        score: Score of a logit: "softmax", "sigmoid", "sqrtsoftplus" (sqrt(log(1 + e^z))), or
            "logits" (the logit itself).
        zero_experts: Number of identity experts, with ids from num_experts up. They return the
            token, multiplied by its weight.
        num_groups: Number of equal blocks of experts, of which a token may use only topk_groups
            (DeepSeek's node limit). It must divide E. 0: no groups.
        topk_groups: Number of groups that a token may use.
        group_score: Score of a group: "max" of its experts' scores, or "sum" of the group_best
            largest.
        group_best: Number of scores that "sum" adds; 0: top_k / topk_groups (DeepSeek-V3: 2).
        group_others: What happens to experts of all other groups: "out": they are never chosen.
            "zero": their score becomes 0.
        weight_rule: Weights of the chosen experts: "of_score" (their scores without the bias),
            "softmax_chosen", "sigmoid_chosen" (of their logits) or "sparsemixer" (Phi-3.5-MoE).
        normalize: By what the weights of a token are divided. "none": they are not divided. "sum":
            their sum + eps. "clamped": the larger of their sum and norm_min.
        eps: Used only with normalize "sum".
        norm_min: For normalize "clamped"; with other values of normalize it must be 0.
        jitter: For weight_rule "sparsemixer", at least 0 and below 1; otherwise it must be 0.
        scale: Factor of the weights (DeepSeek-V3: 2.5); 0 stands for 1.

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
        """Return the fields as the core's numbers, after checking rules that the core lacks."""
        found = super().numbers(prefix)
        if self.topk_groups > 1 and self.num_groups < 2:
            raise EpicArgumentError(
                f"topk_groups is {self.topk_groups} and num_groups is {self.num_groups}: "
                "num_groups must be at least 2, so that there are groups to choose"
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
    """Options of the experts' MLP: y = (act(x W_gate) * (x W_up)) W_down, plus biases.

    Attributes:
        num_local_experts: Largest number of experts of a rank. 0: EPIC derives it from the group or
            the weights.
        hidden: Number of columns of a row, 1 or more.
        inner: Number of columns between the two products, 1 or more.
        activation: act: "silu", "gelu" (with erf), "gelu_tanh", "relu2" (max(x, 0)^2); with a gate
            also "clamped_swiglu" (gpt-oss) and "clamped_silu" (DeepSeek-V4).
        ungated: Whether there is no gate: y = act(x W) W_down, where W has inner columns.
        interleaved: Whether gate has the even columns of w_gate_up and up the odd ones. If False
            all columns of gate come first.
        weighting: Where the weight of a choice is multiplied in. "late": when rows are summed.
            "early": on the activation and the down bias. "input": on the expert's input.
        row_type: Dtype of the rows: "float32", "bfloat16", "float16" or "float64". None: that of
            the arrays of a call.
        weight_type: Dtype of the weights, like row_type. Or "e4m3", only on GPUs: each call rounds
            the weights to e4m3, and gradients are computed as if they were not rounded.
        limit: Limit of "clamped_swiglu" (0 stands for 7) and of "clamped_silu" (0 stands for 10);
            with other activations it must be 0.
        alpha: Factor of "clamped_swiglu", 0 stands for 1.702; with other activations it must be 0.

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
        """Number of columns of w_gate_up: 2 * inner, or inner without a gate."""
        return self.inner if self.ungated else 2 * self.inner

    def check_with_core(self) -> None:
        """Check the fields by the core's query of its memory."""
        for name in ("hidden", "inner"):
            check_int(name, getattr(self, name), 1)
        if self.num_local_experts:
            _native.experts_memory(self, 0, self.weight_type == "e4m3")
        else:
            replace(self, num_local_experts=1)  # its constructor checks the options for one expert


PARTS: dict[str, Any] = {"layer": Layer, "router": Router, "experts": Experts}


@dataclass(frozen=True)
class Moe(Keyed):
    """Options of a whole layer: router, experts, losses and capacity.

    `Moe.of` makes one from the fields of all parts.

    Attributes:
        layer: Options of experts, capacity and sums. Its top_k and num_experts (with replicas
            num_logical) must equal those of the router.
        router: Options of the router.
        experts: Options of the experts' MLP.
        shared: Options of a shared expert, an MLP for every token, whose result is added to that of
            the experts. None: no shared expert.
        balance_coeff: Factor of the balance loss: num_experts / (top_k * T^2) * sum over experts of
            load * sum over tokens of P. T is the number of tokens. P is the score of the expert,
            divided by the sum of the token's scores. 0: no loss.
        z_coeff: Factor of the z-loss, the mean over tokens of logsumexp(logits)^2; 0: no loss.
        sequence_tokens: Length of a sequence, which must not be divided between ranks. The balance
            loss is then the mean of the losses of all sequences. 0: one loss for all tokens.
        capacity: Number of slots of a rank for received rows; None: as many as can ever be needed.
        invariant: Whether the bits of a token depend only on its own row, its choices and the
            parameters. They do not depend on other tokens or their number, on the number of ranks,
            on the capacity or on the alignment (see the guide "Reproducibility"). Only gradients of
            losses depend on all tokens. It needs overflow "error", and sum_order "tree" with
            `leaves`, which is then the largest number of ranks. `Moe.of` sets sum_order to "tree",
            and leaves to the largest power of two up to 8 that divides num_experts. All replicas of
            an expert must be in one leaf: num_experts / leaves consecutive experts.
        quantize: "1x128" or "1x32": rows are sent to the experts in e4m3, with a float32 scale for
            128 columns or an e8m0 scale for 32 columns. None: rows are sent unchanged.

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
        """Make the options of a layer from the fields of all its parts.

        Args:
            **fields: Fields of `Layer`, `Router`, `Experts` and `Moe`, by name. A field that
                several parts have, such as num_experts, is passed once.

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
        """Return the options with invariant=True, and with the sum_order and leaves that it needs.

        Returns:
            The options. If sum_order is "tree" and leaves is above 0, both stay unchanged.
            Otherwise sum_order becomes "tree", and leaves the largest power of two up to 8 that
            divides num_experts.

        Raises:
            EpicArgumentError: Another option cannot be combined with invariant=True.
        """
        layer = self.layer
        if layer.sum_order != "tree" or not layer.leaves:
            leaves = math.gcd(layer.num_experts, MOST_LEAVES)
            layer = replace(layer, sum_order="tree", leaves=leaves)
        return replace(self, layer=layer, invariant=True)

    def check_invariant(self) -> None:
        """Raise an error for options that are not possible with invariant=True."""
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
        """Check the fields that several parts contain, and rules between the parts."""
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


def check_invariant_call(name: str, product: Any, mask: Any) -> None:
    """Raise an error if a call of a layer with invariant=True has a product or a token mask.

    With them the layer would be composed of functions that do not promise its bits.

    Args:
        name: name of the argument that contains the product.
        product: grouped product of the caller, or None.
        mask: token mask, or None.
    """
    if product is not None:
        raise EpicArgumentError(
            f"{name} is given: must be None for a layer with invariant=True, because only EPIC's "
            "own products keep the bits"
        )
    if mask is not None:
        raise EpicArgumentError(
            "token_mask is given: must be None for a layer with invariant=True; leave it out, "
            "because padding does not change the bits of other tokens"
        )


KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Layer, Router, Experts, Moe)}
for kind_ in KINDS.values():
    kind_.NAMES = tuple(field_names(kind_))
MOE_ARGUMENTS = sorted(
    {name for kind in KINDS.values() for name in kind.NAMES} - set(PARTS)
)  # names of the arguments of Moe.of
