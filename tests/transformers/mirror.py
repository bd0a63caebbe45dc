# SPDX-License-Identifier: Apache-2.0
"""Structs of epic.h and comparison functions that both programs use."""

import ctypes
from ctypes import c_double, c_uint32, c_uint64, c_void_p

F32 = 1
SOFTMAX, SIGMOID, SQRTSOFTPLUS, LOGITS = 0, 1, 2, 3
GROUP_SUM, NORMALIZE_SUM, SPARSEMIXER = 1, 1, 3


def struct(*parts):
    """Return a ctypes copy of a struct of epic.h; the library refuses a wrong one by its size."""
    return type("Struct", (ctypes.Structure,), {"_fields_": list(parts)})


def fields(kind, names):
    return [(name, kind) for name in names.split()]


CALL = [("stream", c_void_p), ("tag", c_uint64), *fields(c_uint32, "timeout_ms max_sms")]
Router = struct(
    *fields(c_uint32, "num_experts zero_experts top_k score num_groups topk_groups group_score"),
    *fields(c_uint32, "group_best group_others weight_rule normalize flags"),
    *fields(c_double, "eps norm_min jitter scale"),
)


def at(x):
    return None if x is None else x.data_ptr()


def same(what, ours, theirs, tolerance=1e-5):
    size = theirs.abs().max().item() if theirs.is_floating_point() else 1
    off = (ours - theirs.detach()).abs().max().item() / max(size, 1e-30)
    print(f"{what}: off by {off:.1e}")
    if not off <= tolerance or size == 0:
        raise SystemExit(f"{what}: not the same, of {size}")
