# SPDX-License-Identifier: Apache-2.0
"""The words that options accept, in the order of the core's enumerators.

The position of a word is its number in C. options.py and words.py both import this module, so it
imports nothing.
"""

SCORES = ("softmax", "sigmoid", "sqrtsoftplus", "logits")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "clamped_swiglu", "clamped_silu")
WEIGHTINGS = ("late", "early", "input")
# Dtypes by their numbers in C (epic_type).
TYPES = {"float32": 1, "bfloat16": 2, "float16": 3, "float64": 4}
WEIGHT_TYPES = {**TYPES, "e4m3": 5}
CHOICES: dict[str, tuple[str, ...]] = {
    "layout": ("expert_major", "flat"),
    "overflow": ("error", "drop"),
    "priority": ("by_token", "by_k"),
    "sum_order": ("by_rank", "tree", "by_hosts"),
    "score": SCORES,
    "group_score": ("max", "sum"),
    "group_others": ("out", "zero"),
    "weight_rule": ("of_score", "softmax_chosen", "sigmoid_chosen", "sparsemixer"),
    "normalize": ("none", "sum", "clamped"),
    "activation": ACTIVATIONS,
    "weighting": WEIGHTINGS,
}
