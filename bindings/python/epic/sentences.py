# SPDX-License-Identifier: Apache-2.0
"""The core's error sentences in the words of Python: names of C become arguments and values."""

import re
from collections.abc import Callable

WORDS = {  # enumerators of epic.h, by the word that the options have
    "EPIC_OVERFLOW_ERROR": '"error"',
    "EPIC_OVERFLOW_DROP": '"drop"',
    "EPIC_EXPERT_MAJOR": '"expert_major"',
    "EPIC_FLAT": '"flat"',
    "EPIC_BY_TOKEN": '"by_token"',
    "EPIC_BY_K": '"by_k"',
    "EPIC_BY_RANK": '"by_rank"',
    "EPIC_TREE": '"tree"',
    "EPIC_BY_HOSTS": '"by_hosts"',
    "EPIC_WEIGHT_LATE": '"late"',
    "EPIC_WEIGHT_EARLY": '"early"',
    "_INPUT": '"input"',  # as in "EPIC_WEIGHT_EARLY or _INPUT"
    "EPIC_WEIGHT_INPUT": '"input"',
    "EPIC_WEIGHT_SPARSEMIXER": '"sparsemixer"',
    "EPIC_NORMALIZE_CLAMPED": '"clamped"',
    "EPIC_CLAMPED_SWIGLU": '"clamped_swiglu"',
    "EPIC_CLAMPED_SILU": '"clamped_silu"',
    "EPIC_QUANTIZE_NONE": "None",
    "EPIC_QUANTIZE_1X128": '"1x128"',
    "EPIC_QUANTIZE_1X32": '"1x32"',
    "EPIC_CAPACITY_EXACT": "EXACT",
    "EPIC_DISTINCT": "distinct=True",
    "EPIC_BYTES": "uint8",
}
TYPES = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F64": "float64",
    "E4M3": "e4m3",
    "E8M0": "e8m0",
    "I32": "int32",
    "I64": "int64",
}
OPTIONS = "overflow|layout|sum_order|priority|weighting|weight_rule|normalize|activation"
SUFFICES = "capacity=None always suffices"


def distinct(found: re.Match[str]) -> str:
    """The one flag of a layer, by its argument."""
    first, rank, second = (int(number) for number in found.groups())
    return f"distinct={bool(first)}, rank {rank} brought distinct={bool(second)}"


RULES: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"\blayer\.flags (\d+), rank (\d+) brought (\d+)"), distinct),
    (re.compile(r"\bepic_capacity_bound( never overflows)?"), SUFFICES),
    (re.compile(rf"\b({OPTIONS}) (EPIC_\w+)"), lambda m: f"{m[1]}={WORDS.get(m[2], m[2])}"),
    (re.compile(r"(?<![A-Z])_?[A-Z][A-Z_0-9]+\b"), lambda m: WORDS.get(m[0], m[0])),
    (re.compile(rf"\b(?:EPIC_)?({'|'.join(TYPES)})\b"), lambda m: TYPES[m[1]]),
    (re.compile(r"\b(\w+)\.row_bytes is (\d+)"), r"rows of \1 have \2 bytes"),
    (re.compile(r"\b(\w+)\.num_rows is (\d+)"), r"\1 has \2 rows"),
    (re.compile(r"\btcp\.(?=secret)"), "Tcp's "),
    (re.compile(r"\bmeet\.gather\b"), "meet"),
    (re.compile(r"\b(?:config|args|meet|moe)\.(?=[a-z])"), ""),
    (re.compile(r"\bepic_moe_(?:forward|backward|plan)\b"), "moe"),
    (re.compile(r"(?<![\w/.])epic_(?=[a-z])"), ""),
]


def in_python(sentence: str) -> str:
    """Returns a sentence of the core with the names that epic.torch and epic.jax have."""
    for pattern, words in RULES:
        sentence = pattern.sub(words, sentence)
    return sentence
