# SPDX-License-Identifier: Apache-2.0
"""The C core through ctypes: mirrors of its structs, and calls that raise EpicError."""

import ctypes
import functools
import os
import warnings
from ctypes import (
    POINTER,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any, Protocol

import epic
from epic.errors import EpicArgumentError, EpicError
from epic.words import to_python

GATHER = ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_int64)
CLOSE = ctypes.CFUNCTYPE(None, c_void_p)

# The names of epic_result, in the order of their numbers in C.
RESULTS = (
    "EPIC_OK EPIC_EINVAL EPIC_ENOMEM EPIC_ENOTSUP EPIC_ETIMEOUT EPIC_EDEVICE EPIC_EOVERFLOW "
    "EPIC_EMISMATCH EPIC_EPEER EPIC_ECLOSED EPIC_EEVICTED"
).split()
EINVAL = RESULTS.index("EPIC_EINVAL")
EPIC_F32 = 1  # a value of epic_type
# The flag EPIC_DISPATCH_AGAIN: backward dispatches the rows again, so forward does not save them.
DISPATCH_AGAIN = 128
INVARIANT = 1024  # the flag EPIC_INVARIANT
CAN_REGROUP = 4096  # the flag EPIC_CAN_REGROUP


def struct(name: str, *parts: tuple[str, Any]) -> type[ctypes.Structure]:
    """Return a ctypes mirror of one of the core's structs."""
    return type(name, (ctypes.Structure,), {"_fields_": list(parts)})


def uints(names: str) -> list[tuple[str, Any]]:
    """Return fields that are all uint32."""
    return [(name, c_uint32) for name in names.split()]


Bootstrap = struct(
    "Bootstrap",
    ("rank", c_int32),
    ("num_ranks", c_int32),
    ("gather", GATHER),
    ("close", CLOSE),
    ("self", c_void_p),
)
Tcp = struct(
    "Tcp",
    ("address", c_char_p),
    ("secret", c_char_p),
    ("rank", c_int32),
    ("num_ranks", c_int32),
    ("port", c_uint32),
    ("timeout_ms", c_uint32),
)
Config = struct(
    "Config",
    ("max_tokens", c_int64),
    ("max_row_bytes", c_int64),
    ("staging_bytes", c_int64),
    *uints("num_ranks timeout_ms max_in_flight max_sms"),
    ("backend", c_char_p),
    ("name", c_char_p),
    ("native", c_void_p),
    *uints("max_top_k flags"),
)
Layer = struct(
    "Layer",
    *uints("num_experts num_logical top_k alignment layout overflow expert_capacity priority"),
    *uints("sum_order leaves partial_type flags"),
)
Router = struct(
    "Router",
    *uints("num_experts zero_experts top_k score num_groups topk_groups group_score group_best"),
    *uints("group_others weight_rule normalize flags"),
    *((name, c_double) for name in ("eps", "norm_min", "jitter", "scale")),
)
Experts = struct(
    "Experts",
    *uints("num_local_experts hidden inner activation ungated interleaved weighting row_type"),
    *uints("weight_type flags"),
    ("limit", c_float),
    ("alpha", c_float),
    ("gemm", c_void_p),
)
Call = struct(
    "Call",
    ("stream", c_void_p),
    ("tag", c_uint64),
    *uints("timeout_ms max_sms"),
)
WindowArgs = struct(
    "WindowArgs",
    ("call", Call),
    ("bytes", c_int64),
    ("data", c_void_p),
    ("fd_offset", c_int64),
    ("fd", c_int32),
    *uints("reserved"),
)
WindowInfo = struct(
    "WindowInfo",
    ("data", c_void_p),
    ("bytes", c_int64),
    *uints("is_direct reserved"),
)
PLACES = (b"self", b"p2p")  # a backend for CPUs and one for GPUs, for size queries
MemoryInfo = struct(
    "MemoryInfo",
    *((name, c_int64) for name in "saved_bytes forward_bytes backward_bytes".split()),
)
PlanInfo = struct(
    "PlanInfo",
    ("id", c_uint64),
    *((name, c_int64) for name in "num_tokens num_slots capacity num_kept num_none".split()),
    *((name, c_int64) for name in "num_expert_full num_rank_full".split()),
    *uints("result num_local_experts first_leaf num_leaves"),
    *((name, c_int64) for name in "total_tokens fate_offset rank_offset num_absent".split()),
)
WaitInfo = struct(
    "WaitInfo", *((name, c_uint64) for name in "num_operations wait_ns alone_ns".split())
)
RegroupArgs = struct(
    "RegroupArgs",
    ("step", c_int64),
    *uints("patience_ms min_members leaving flags"),
    ("authority", c_uint64),
    ("only", c_void_p),
)
RANK_WORDS = 16  # EPIC_RANK_WORDS
MembersInfo = struct(
    "MembersInfo",
    ("generation", c_uint64),
    ("group_id", c_uint64),
    ("least_step", c_int64),
    ("greatest_step", c_int64),
    ("num_ranks", c_int32),
    ("num_members", c_int32),
    ("members", c_uint64 * RANK_WORDS),
    ("gone", c_uint64 * RANK_WORDS),
)
MoeStruct = struct(
    "MoeStruct",
    ("layer", c_void_p),
    ("router", c_void_p),
    ("experts", c_void_p),
    ("shared", c_void_p),
    ("balance_coeff", c_double),
    ("z_coeff", c_double),
    ("sequence_tokens", c_int64),
    ("capacity", c_int64),
    *uints("flags reserved"),
)

KINDS = {"Layer": Layer, "Router": Router, "Experts": Experts}

# The type of the result and of the arguments of each function of the core.
PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "epic_bootstrap_tcp_v1": (c_int32, [c_void_p, c_void_p, c_size_t]),
    "epic_bootstrap_env": (c_int32, [c_void_p]),
    "epic_bootstrap_mpi": (c_int32, [c_void_p, c_void_p, c_uint32]),
    "epic_bootstrap_nccl": (c_int32, [c_void_p, c_void_p, c_uint32]),
    "epic_bootstrap_threads": (c_int32, [c_void_p, c_int32, c_uint32]),
    "epic_bootstrap_close": (None, [c_void_p]),
    "epic_open_v1": (c_int32, [POINTER(c_void_p), c_void_p, c_void_p, c_size_t]),
    "epic_close": (None, [c_void_p]),
    "epic_check": (c_int32, [c_void_p]),
    "epic_abort": (None, [c_void_p, c_uint64, c_char_p]),
    "epic_error": (c_char_p, [c_void_p]),
    "epic_backend_name": (c_char_p, [c_void_p]),
    "epic_num_hosts": (c_int32, [c_void_p]),
    "epic_net_name": (c_char_p, [c_void_p]),
    "epic_blas_name": (c_char_p, []),
    "epic_plan_bytes_v1": (c_int32, [c_void_p, c_size_t, c_void_p, c_size_t, c_void_p]),
    "epic_plan_read_v1": (c_int32, [c_void_p, c_size_t, c_void_p, c_size_t]),
    "epic_waits_v1": (c_int32, [c_void_p, c_uint32, c_void_p, c_int32, c_size_t]),
    "epic_regroup_v1": (c_int32, [c_void_p, c_void_p, c_size_t, c_void_p, c_size_t]),
    "epic_members_v1": (c_int32, [c_void_p, c_void_p, c_size_t]),
    "epic_capacity_bound_v1": (c_int32, [c_void_p, c_size_t, c_void_p, c_size_t, c_void_p]),
    "epic_router_workspace_v1": (c_int32, [c_void_p, c_size_t, c_void_p]),
    "epic_window_register_v1": (c_int32, [c_void_p, c_void_p, c_size_t, c_void_p, c_size_t]),
    "epic_experts_memory_v1": (
        c_int32,
        [c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_int64, c_void_p, c_size_t],
    ),
    "epic_moe_memory_v1": (
        c_int32,
        [c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p, c_size_t],
    ),
}


def find(file: str, kind: str = "lib") -> Path:
    """Return the path of a library, or with kind "bin" of a program.

    The function searches these folders, in this order:

    1. the folders in EPIC_LIBRARY_PATH; for a program, the folder `bin` next to each of them,
    2. the folder `lib` or `bin` of this package. An editable install has two package folders, one
       with the sources and one with the files that were built,
    3. the folder `build/lib` or `build/bin` of the checkout.

    Raises:
        ImportError: The file is in none of these folders.
    """
    here = Path(__file__).resolve().parent
    given = [Path(f) for f in os.environ.get("EPIC_LIBRARY_PATH", "").split(":") if f]
    folders = given if kind == "lib" else [folder.parent / kind for folder in given]
    folders += [Path(folder).resolve() / kind for folder in epic.__path__]
    if len(here.parents) > 2:
        folders += [here.parents[2] / "build" / kind]
    for folder in folders:
        if (folder / file).exists():
            return folder / file
    looked = ", ".join(str(folder) for folder in folders)
    raise ImportError(f"{file} is in none of {looked}: build EPIC, or set EPIC_LIBRARY_PATH")


@functools.cache
def core() -> ctypes.CDLL:
    """Return libepic.so; the first call loads it."""
    library = ctypes.CDLL(str(find("libepic.so")), mode=ctypes.RTLD_GLOBAL)
    for name, (result, arguments) in PROTOTYPES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


PLAIN = b"plain loops"  # epic_blas_name() begins with this if EPIC found no OpenBLAS


@functools.cache
def warn_without_blas() -> None:
    """Warn once that experts on CPUs are slow without OpenBLAS."""
    if core().epic_blas_name().startswith(PLAIN):
        warnings.warn(
            "EPIC finds no OpenBLAS, so on CPUs experts use plain loops, which take about 4 times "
            "as long: install libopenblas0-pthread (Debian, Ubuntu) or pip's scipy-openblas32; a "
            "build with EPIC_BLAS=OFF never uses it",
            RuntimeWarning,
            stacklevel=2,
        )


def failure(code: int, context: int | None = None) -> EpicError:
    """Return the last error of this thread as an exception.

    code: the result of the call that failed. context: the context of the call, or None.
    """
    sentence = to_python(core().epic_error(context).decode(errors="replace"))
    if code == EINVAL:
        return EpicArgumentError(sentence)
    name = RESULTS[code] if 0 <= code < len(RESULTS) else f"result {code}"
    return EpicError(name, sentence)


def check(code: int, context: int | None = None) -> None:
    """Raise the error of the core if `code`, the result of a call, is not EPIC_OK."""
    if code != 0:
        raise failure(code, context)


class Options(Protocol):
    """The part of epic.options.Layer, Router and Experts that this module needs."""

    def numbers(self) -> dict[str, Any]:
        """Return the fields as the core's numbers, by the names of the struct's members."""


def filled(kind: type[ctypes.Structure], options: Options) -> ctypes.Structure:
    """Return the struct of the core for options. If row_type is None, it becomes float32."""
    numbers = options.numbers()
    if kind is Experts:
        numbers["row_type"] = numbers["row_type"] or EPIC_F32
    return kind(**numbers)


def size(name: str, *parts: ctypes.Structure | Options) -> int:
    """Return the number that a size query of the core computes, such as epic_plan_bytes_v1.

    Args:
        name: Name of the function.
        *parts: Its arguments. Options are converted to structs.
    """
    structs = [
        p if isinstance(p, ctypes.Structure) else filled(KINDS[type(p).__name__], p) for p in parts
    ]
    found = c_int64()
    check(getattr(core(), name)(*sized(*structs), ctypes.byref(found)))
    return found.value


def experts_memory(options: Options, slots: int, on_gpu: bool) -> Any:
    """Return the MemoryInfo of the experts' MLP for a number of slots, on GPUs or on CPUs."""
    sizes = MemoryInfo()
    config = Config(max_tokens=1, max_row_bytes=1, backend=PLACES[on_gpu])
    wanted = filled(Experts, options)
    check(core().epic_experts_memory_v1(None, *sized(config, wanted), slots, *sized(sizes)))
    return sizes


def moe_flags(options: Any) -> int:
    """Return epic_moe.flags for an epic.Moe."""
    again = DISPATCH_AGAIN if options.experts.weight_type == "e4m3" else 0
    return again | (INVARIANT if options.invariant else 0)


def moe_struct(options: Any, more_flags: int = 0) -> tuple[Any, list[Any]]:
    """Return the struct epic_moe for an epic.Moe, and the structs that it points to.

    The capacity of the options must be a number, not None. The caller must keep a reference to the
    second result while it uses the first one. more_flags: flags that the options do not contain.
    """
    kinds = {"layer": Layer, "router": Router, "experts": Experts, "shared": Experts}
    parts = {
        name: filled(kind, getattr(options, name))
        for name, kind in kinds.items()
        if getattr(options, name) is not None
    }
    names = ("balance_coeff", "z_coeff", "sequence_tokens", "capacity")
    numbers = {name: getattr(options, name) for name in names}
    numbers["flags"] = moe_flags(options) | more_flags
    addresses = {name: ctypes.addressof(part) for name, part in parts.items()}
    return MoeStruct(**numbers, **addresses), list(parts.values())


def moe_memory(config: ctypes.Structure, options: Any, on_gpu: bool, *, more_flags: int = 0) -> Any:
    """Return the MemoryInfo of a whole layer, on GPUs or on CPUs.

    Args:
        config: Sizes of the group. The function sets its field backend.
        options: An epic.Moe.
        on_gpu: Whether the layer runs on GPUs.
        more_flags: Flags of epic_moe that the options do not contain.
    """
    wanted, references = moe_struct(options, more_flags)
    sizes = MemoryInfo()
    config.backend = PLACES[on_gpu]
    check(core().epic_moe_memory_v1(None, *sized(config, wanted, sizes)))
    del references
    return sizes


def sized(*values: ctypes.Structure) -> list[Any]:
    """Return the arguments of a call of the core: for each struct its address and its size."""
    return [part for value in values for part in (ctypes.byref(value), ctypes.sizeof(value))]
