# SPDX-License-Identifier: Apache-2.0
"""The C calls of a step, with arguments that are filled in before, to compare a binding with."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import epic.torch
from epic import _native
from epic._native import sized, struct, uints

Call = Callable[[], Any]
TYPES = {torch.float32: 1, torch.bfloat16: 2}
ROWS = "{0} {0}_rows {0}_bytes"


def words(*names: str) -> list[tuple[str, Any]]:
    """Return fields that are pointers or int64."""
    return [(name, ctypes.c_int64) for text in names for name in text.split()]


CALL = [*words("stream tag"), *uints("timeout_ms max_sms")]
PlanArgs = struct(
    "PlanArgs",
    *CALL,
    *words("layer plan plan_bytes topk_idx num_tokens rank_of_expert logical_of_expert capacity"),
    *uints("index_type flags"),
    *words("expert_rows expert_tokens load logical_load demand"),
)
DispatchArgs = struct(
    "DispatchArgs",
    *CALL,
    *words("layer plan plan_bytes"),
    *words(*(ROWS.format(n) for n in ("tokens", "recv", "scales", "scaled"))),
    *words("weights slot_weights recv_expert"),
    *uints("type quantize flags reserved"),
)
CombineArgs = struct(
    "CombineArgs",
    *CALL,
    *words("layer plan plan_bytes", *(ROWS.format(n) for n in ("rows", "out")), "slot_weights"),
    *uints("type flags"),
)


def rows(name: str, x: Tensor) -> dict[str, int]:
    """Return the fields of an epic_rows."""
    size = x.shape[1] * x.element_size()
    return {name: x.data_ptr(), f"{name}_rows": len(x), f"{name}_bytes": size}


class Core:
    """The C calls of one step with results of their own, on the current stream."""

    def __init__(
        self,
        group: epic.torch.Group,
        layer: epic.torch.Layer,
        ids: Tensor,
        x: Tensor,
        w: Tensor,
        zero_tail: bool,
    ) -> None:
        self.group = group
        self.plan, recv, slot = epic.torch.plan_dispatch(group, layer, ids, x, w)
        assert slot is not None
        self.arrays = {
            "layer": _native.filled(_native.Layer, layer),
            "counts": torch.zeros(4 * layer.num_experts, dtype=torch.int32, device=x.device),
            "recv": recv,
            "slots": slot,
            "out": torch.empty_like(x),
            "inputs": (ids, x, w),
        }
        on_gpu = x.device.type == "cuda"
        call = {"stream": torch.cuda.current_stream().cuda_stream if on_gpu else 0}
        data = self.plan.bytes
        call |= {"plan": data.data_ptr(), "plan_bytes": data.numel()}
        call |= {"layer": ctypes.addressof(self.arrays["layer"])}
        counts, size = self.arrays["counts"].data_ptr(), 4 * layer.num_experts
        self.of_plan = PlanArgs(
            topk_idx=ids.data_ptr(),
            num_tokens=len(ids),
            capacity=self.plan.capacity,
            expert_rows=counts,
            expert_tokens=counts + size,
            load=counts + 2 * size,
            demand=counts + 3 * size,
            **call,
        )
        self.of_dispatch = DispatchArgs(
            weights=w.data_ptr(),
            slot_weights=slot.data_ptr(),
            flags=int(zero_tail),
            **rows("tokens", x),
            **rows("recv", recv),
            **call,
        )
        self.of_combine = CombineArgs(
            slot_weights=slot.data_ptr(),
            type=TYPES[x.dtype],
            **rows("rows", recv),
            **rows("out", self.arrays["out"]),
            **call,
        )

    def calls(self) -> dict[str, Call]:
        """Return the calls by name."""
        return {
            "plan": self.of("plan", self.of_plan),
            "dispatch": self.of("dispatch", self.of_dispatch),
            "plan_dispatch": self.of("plan_dispatch", self.of_plan, self.of_dispatch),
            "combine": self.of("combine", self.of_combine),
        }

    def of(self, name: str, *structs: Any) -> Call:
        """Return a call of epic_NAME, which raises its error at the first call."""
        function = getattr(_native.core(), f"epic_{name}_v1")
        passed = [ctypes.c_void_p(self.group.context), *sized(*structs)]
        passed = [ctypes.c_size_t(v) if isinstance(v, int) else v for v in passed]
        _native.check(function(*passed))

        def call(_: Any = self) -> Any:  # the default argument keeps the arrays alive
            return function(*passed)

        return call
