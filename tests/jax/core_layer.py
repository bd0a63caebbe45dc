# SPDX-License-Identifier: Apache-2.0
"""Calls the core's layer from threads of Python, without JAX, as the reference for epic.jax.moe."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

import numpy as np

from epic import _native, bootstrapping
from epic._native import check, core, sized, struct
from epic.options import Moe

WEIGHTS = (
    "w_gate b_gate bias scale_of_expert w_gate_up w_down b_gate_up b_down shared_gate_up "
    "shared_down shared_b_gate_up shared_b_down w_shared_gate"
).split()
Call = struct(
    "Call", ("stream", c_void_p), ("tag", c_uint64), ("timeout_ms", c_uint32), ("sms", c_uint32)
)
Rows = struct("Rows", ("data", c_void_p), ("num_rows", c_int64), ("row_bytes", c_int64))
SCALES = ("w_gate_up_scales", "w_down_scales")
Weights = struct("Weights", *((name, c_void_p) for name in (*WEIGHTS, *SCALES)))
Gradients = struct("Gradients", *((name, c_void_p) for name in WEIGHTS if name != "bias"))
HEAD = (
    ("call", Call),
    ("moe", c_void_p),
    ("weights", c_void_p),
)
MEMORY = (
    ("saved", c_void_p),
    ("saved_bytes", c_int64),
    ("workspace", c_void_p),
    ("workspace_bytes", c_int64),
)
Forward = struct(
    "Forward",
    *HEAD,
    ("x", Rows),
    ("out", Rows),
    ("token_ids", c_void_p),
    ("table", c_void_p),
    ("table_rows", c_int64),
    ("rank_of_expert", c_void_p),
    ("logical_of_expert", c_void_p),
    *MEMORY,
    ("loss", c_void_p),
    ("balance_loss", c_void_p),
    ("z_loss", c_void_p),
    ("load", c_void_p),
    ("logical_load", c_void_p),
    ("demand", c_void_p),
    ("token_id_type", c_uint32),
    ("loss_type", c_uint32),
    ("flags", c_uint32),
    ("reserved", c_uint32),
)
Backward = struct(
    "Backward",
    *HEAD,
    ("x", Rows),
    ("d_out", Rows),
    ("d_x", Rows),
    ("gradients", c_void_p),
    *MEMORY,
    ("d_loss", c_void_p),
    ("d_balance_loss", c_void_p),
    ("d_z_loss", c_void_p),
    ("flags", c_uint32),
    ("loss_type", c_uint32),
    ("grad_type", c_uint32),
    ("reserved", c_uint32),
)


def address(array: np.ndarray | None) -> int | None:
    """Return the address of an array's elements."""
    return None if array is None else array.ctypes.data


def rows(array: np.ndarray) -> Any:
    """Return an array as epic_rows."""
    return Rows(array.ctypes.data, array.shape[0], array.shape[1] * array.itemsize)


def aligned(size: int) -> np.ndarray:
    """Return bytes at an address that is a multiple of 64."""
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size]


def one_rank(
    config: Any,
    bootstrap: Any,
    options: Moe,
    d_loss: np.ndarray,
    x: np.ndarray,
    weights: dict,
    d_out: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Open a context, run forward and backward, and close it."""
    context = ctypes.c_void_p()
    bootstrap_at = ctypes.addressof(bootstrap.struct)
    check(core().epic_open_v1(ctypes.byref(context), bootstrap_at, *sized(config)))
    moe, kept = _native.moe_struct(options)
    sizes = _native.MemoryInfo()
    check(core().epic_moe_memory_v1(context, None, 0, *sized(moe), *sized(sizes)))
    saved, work = aligned(sizes.saved_bytes), aligned(sizes.backward_bytes + sizes.forward_bytes)
    w = Weights(**{name: address(weights.get(name)) for name in WEIGHTS})
    d = {n: np.zeros(v.shape, np.float32) for n, v in weights.items() if n != "bias"}
    g = Gradients(**{name: address(v) for name, v in d.items()})
    out, d_x = np.zeros_like(x), np.zeros_like(x)
    head = {"call": Call(tag=5), "moe": ctypes.addressof(moe)}
    head |= {"weights": ctypes.addressof(w), "x": rows(x)}
    head |= {"saved": address(saved), "saved_bytes": saved.size}
    head |= {"workspace": address(work), "workspace_bytes": work.size}
    forward = Forward(out=rows(out), **head)
    check(core().epic_moe_forward_v1(context, *sized(forward)))
    backward = Backward(
        d_out=rows(d_out),
        d_x=rows(d_x),
        gradients=ctypes.addressof(g),
        d_loss=address(d_loss),
        **head,
    )
    check(core().epic_moe_backward_v1(context, *sized(backward)))
    core().epic_close(context)
    del kept
    return out, d_x, d


def run(
    config: Any, options: Moe, per_rank: list[tuple[Any, Any, Any]], d_loss: float = 1.0
) -> list[Any]:
    """Return out, d_x and gradients of every rank, for its (x, weights, d_out)."""
    for name in ("epic_moe_forward_v1", "epic_moe_backward_v1"):
        getattr(core(), name).argtypes = [c_void_p, c_void_p, c_size_t]
    bootstraps = bootstrapping.by_threads(len(per_rank), 60000)
    with ThreadPoolExecutor(len(per_rank)) as pool:
        tasks = [
            pool.submit(one_rank, config, bootstrap, options, np.array([d_loss], np.float32), *mine)
            for bootstrap, mine in zip(bootstraps, per_rank, strict=True)
        ]
    return [task.result() for task in tasks]
