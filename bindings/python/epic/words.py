# SPDX-License-Identifier: Apache-2.0
"""Translates error texts of the core: names in C become Python arguments and values."""

import re

from epic.choices import CHOICES, TYPES

# The prefix of each field's enumerators in C. The word in Python, in capitals, follows the prefix.
PREFIXES = {
    "layout": "EPIC_",
    "overflow": "EPIC_OVERFLOW_",
    "priority": "EPIC_",
    "sum_order": "EPIC_",
    "score": "EPIC_SCORE_",
    "group_score": "EPIC_GROUP_",
    "group_others": "EPIC_OTHERS_",
    "weight_rule": "EPIC_WEIGHT_",
    "normalize": "EPIC_NORMALIZE_",
    "activation": "EPIC_",
    "weighting": "EPIC_WEIGHT_",
}
# The name in Python of each dtype EPIC_NAME.
OF_TYPES = dict(zip(("F32", "BF16", "F16", "F64"), TYPES, strict=True)) | {
    "E4M3": "float8_e4m3fn",
    "E8M0": "float8_e8m0fnu",
    "I32": "int32",
    "I64": "int64",
    "BYTES": "an 8-bit type",
}
# Other names and phrases, and their translation.
PHRASES = {
    "epic_capacity_bound always suffices": "capacity=None always suffices",
    "(epic_capacity_bound)": "(capacity=None)",
    "epic_capacity_bound": "capacity=None",
    "0 (the rows' type)": "None",
    "EPIC_DISTINCT": "distinct=True",
    "EPIC_DROP_ABSENT": "drop_absent=True",
    "EPIC_ABSENT": "-1",
    "config.flags is 0": "can_shrink is False",
    "config.flags is EPIC_CAN_REGROUP: must be 0": "can_shrink is True: must be False",
    "EPIC_CAN_REGROUP": "can_shrink=True",
    "flag EPIC_LOSS_BY_CALLER": "loss_axes (1: given)",
    "EPIC_CAPACITY_EXACT": "EXACT",
    "EPIC_QUANTIZE_NONE": "None",
    "EPIC_QUANTIZE_1X128": "'1x128'",
    "EPIC_QUANTIZE_1X32": "'1x32'",
    "NULL": "None",
    "tcp.": "Tcp's ",
    "bootstrap.gather": "bootstrap",
    "args.": "",
    "bootstrap.": "",
    "layer.flags": "distinct",
    "x.num_rows": "the number of tokens",
    "tokens.num_rows": "the number of tokens",
    "epic_moe_forward": "moe",
    "epic_regroup": "shrink",
    "data is": "the tensor's memory is",
    "memory of cudaMalloc or cuMemCreate": "memory of torch's allocator without cudaMallocAsync, "
    "or symmetric memory",
    "topk_idx_in": "forced ids",
    "topk_weights_in": "forced weights",
    "moe.layer.": "layer.",
    "moe.experts.": "experts.",
    "moe.shared.": "shared.",
    "moe.": "",
    "config.": "",
    "epic_": "",
}


def make_words() -> dict[str, str]:
    """Return the translation of each name. A name that ends with "." or "_" is a prefix."""
    enumerators = {
        PREFIXES[field] + word.upper(): repr(word)
        for field, words in CHOICES.items()
        for word in words
    }
    types = {f"EPIC_{name}": word for name, word in OF_TYPES.items()}
    types |= {name: OF_TYPES[name] for name in ("F32", "BF16", "F16", "F64")} | {"E4M3": "e4m3"}
    return {**enumerators, **types, **PHRASES}


WORDS = make_words()
# Matches each name in WORDS as a whole word, and each prefix before a word.
PATTERN = re.compile(
    r"(?<![\w./\"'])(?:"
    + "|".join(re.escape(name) + (r"(?=\w)" if name[-1] in "._" else r"(?!\w)") for name in WORDS)
    + ")"
)


# Explains an argument that a user of a layer of epic.torch has not passed. translate.c has that of
# epic.jax.
WHY_DISTINCT = (
    "(a layer passes distinct=True unless it has forced, table, token_mask, grouped_mm or "
    "quantize: pass these on every rank or on none)"
)
FLAGS = re.compile(r"\b(layer|config)\.flags (\d+), rank (\d+) (\w+) (\d+)")
BYTES = re.compile(r"\b(\w+)\.row_bytes is (\d+)")
ROWS = re.compile(r"\b(\w+)\.num_rows is (\d+)")


def name_flag(found: re.Match[str]) -> str:
    """Translate a mismatch of flags between two ranks to the argument that differs."""
    where, first, rank, verb, second = found.groups()
    one, other = int(first), int(second)
    name, flag = ("distinct", 8) if (one ^ other) & 8 else ("drop_absent", 2048)
    if where == "config":
        name, flag = "can_shrink", 4096
    why = f" {WHY_DISTINCT}" if name == "distinct" else ""
    return f"{name}={bool(one & flag)}, rank {rank} {verb} {name}={bool(other & flag)}{why}"


def to_python(sentence: str) -> str:
    """Return an error text of the core with the names of arguments and values in Python."""
    sentence = FLAGS.sub(name_flag, sentence)
    sentence = BYTES.sub(r"rows of \1 have \2 bytes", sentence)
    sentence = PATTERN.sub(lambda found: WORDS[found[0]], sentence)
    return ROWS.sub(r"\1 has \2 rows", sentence)
