# SPDX-License-Identifier: Apache-2.0
"""Functions that the tests share: they open groups, draw inputs, and check a step in float64."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh

import epic.torch

TOKENS, TOP_K, EXPERTS, HIDDEN, ALIGN = 6, 3, 8, 20, 4
LAYER = epic.torch.Layer(EXPERTS, TOP_K, alignment=ALIGN)
SIZES: dict[str, Any] = {"max_tokens": 64, "max_row_bytes": 4096, "timeout_ms": 60000}
EVEN = (TOKENS,) * 4
UNEVEN = (5, 0, 11, 1)
RANKS = 4

meshes: dict[int, Any] = {}


def group_of(ep: int, **more: Any) -> epic.torch.Group:
    """Open one of the 4 / ep groups of ep ranks each, over a dimension of a mesh."""
    if ep not in meshes:
        kind = torch.get_default_device().type
        meshes[ep] = init_device_mesh(kind, (RANKS // ep, ep), mesh_dim_names=("dp", "ep"))
    return epic.torch.Group(meshes[ep], "ep", **{**SIZES, **more})


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random normal numbers, on torch's default device."""
    values = torch.from_numpy(np.random.default_rng(seed).normal(size=shape))
    return values.to(torch.get_default_device(), dtype)


def choices(seed: int, rows: int, none: float = 0.1, experts: int = EXPERTS) -> torch.Tensor:
    """Return different experts for each token; some choices are -1 (no expert)."""
    rng = np.random.default_rng(seed)
    ids = np.full((rows, TOP_K), -1, np.int32)
    for row in ids:
        row[:experts] = rng.permutation(experts)[:TOP_K]
    ids[rng.random(ids.shape) < none] = -1
    return torch.from_numpy(ids).to(torch.get_default_device())


class Data:
    """Tokens, weights, choices and output gradient of all ranks."""

    def __init__(
        self, tokens: tuple[int, ...] = EVEN, dtype: torch.dtype = torch.float32, experts: int = 8
    ) -> None:
        self.tokens = tokens
        rows = sum(tokens)
        self.x = numbers(1, rows, HIDDEN, dtype=dtype)
        self.w = numbers(2, rows, TOP_K)
        self.ids = choices(3, rows, experts=experts)
        self.ct = numbers(4, rows, HIDDEN, dtype=dtype)

    def where(self, rank: int, ep: int = 1) -> slice:
        """Return the range of a rank's rows; with ep, of the rows of its group."""
        first = rank // ep * ep
        return slice(sum(self.tokens[:first]), sum(self.tokens[: first + ep]))

    def mine(self, rank: int, device: str | None = None) -> list[torch.Tensor]:
        """Return x and w with requires_grad, the expert ids, and the output gradient."""
        part, every = self.where(rank), (self.x, self.w, self.ids, self.ct)
        x, w, ids, ct = (v[part].clone().to(device or v.device) for v in every)
        return [x.requires_grad_(), w.requires_grad_(), ids, ct]


def through(group: epic.torch.Group, fused: bool, **more: Any) -> Callable[..., torch.Tensor]:
    """Return a function that dispatches tokens, applies sin as the expert, and combines."""

    def step(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if fused:
            plan, recv, slot = epic.torch.plan_dispatch(group, LAYER, ids, x, w, **more)
        else:
            plan = epic.torch.plan(group, LAYER, ids, **more)
            recv, slot = epic.torch.dispatch(plan, x, w)
        return epic.torch.combine(plan, torch.sin(recv), slot)

    return step


def true_round(*tensors: torch.Tensor) -> tuple[np.ndarray, ...]:
    """Return the output of `through`, d_x and d_w, computed in float64."""
    x, w, ct = (v.detach().cpu().double().numpy() for v in (*tensors[:2], tensors[3]))
    live = tensors[2].cpu().numpy() >= 0
    total = (w * live).sum(axis=1, keepdims=True)
    dot = (ct * np.sin(x)).sum(axis=1, keepdims=True)
    return np.sin(x) * total, np.cos(x) * total * ct, dot * live


def check_round(step: Callable[..., Any], mine: list[torch.Tensor], most: float) -> list[Any]:
    """Run a step with gradients, compare with float64, and return out, d_x and d_w."""
    from reference import relative

    x, w, ids, ct = mine
    out = step(x, w, ids)
    got = [out.detach(), *torch.autograd.grad(out, (x, w), ct)]
    for a, b in zip(got, true_round(x, w, ids, ct), strict=True):
        assert relative(a.cpu().double().numpy(), b) < most
    return got


# Options of the layer, and of plan. GPU tests compare these forms with the host's bits.
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "flat": ({"layout": "flat"}, {}),
    "flat, drop": ({"layout": "flat", "overflow": "drop"}, {"capacity": 4}),
    "drop": ({"overflow": "drop", "expert_capacity": 3}, {}),
    "drop by k": ({"overflow": "drop", "priority": "by_k", "expert_capacity": 3}, {}),
    "drop where a rank is full": ({"overflow": "drop"}, {"capacity": 8}),
    "tree": ({"sum_order": "tree", "leaves": 8}, {}),
    "float32 partials": ({"partial_type": "float32"}, {}),
    "placed": ({}, {"rank_of_expert": [0, 1, 1, 0, 1, 0, 1, 1]}),
    "distinct": ({"distinct": True}, {}),
}


def run_form(group: epic.torch.Group, name: str) -> list[torch.Tensor]:
    """Dispatch and combine with gradients, so that only EPIC rounds. Return these results, the
    counts of the plan, and its routing stats."""
    wish, more = FORMS[name]
    layer = epic.torch.Layer(EXPERTS, TOP_K, **{"alignment": ALIGN, **wish})
    local = EXPERTS // group.num_ranks
    if "rank_of_expert" in more:
        table = [rank % group.num_ranks for rank in more["rank_of_expert"]]
        local = table.count(group.rank)
        more = {"rank_of_expert": table, "num_local_experts": EXPERTS, "capacity": 99}
    x, w, ids, ct = Data(UNEVEN, dtype=torch.bfloat16).mine(group.rank, str(group.device))
    plan = epic.torch.plan(group, layer, ids, **more)
    found = [plan.load, plan.demand]
    if layer.layout == "flat":
        rows, weights, experts = epic.torch.dispatch_flat(plan, x, w)
        out = epic.torch.combine(plan, rows * 2)
        found += [experts]
    else:
        rows, weights = epic.torch.dispatch(plan, x, w)
        out = epic.torch.combine(plan, rows * 2, weights)
        found += [plan.expert_rows[:local], plan.expert_tokens[:local]]
    assert weights is not None
    gradients = torch.autograd.grad((out, weights), (x, w), (ct, torch.ones_like(weights)))
    stats = epic.torch.read_plan(plan)
    # GPU plans do not contain the rank of a dropped choice
    where = torch.where(stats.fate >= 0, stats.rank, -1)
    found += [rows, weights, out, *gradients, stats.fate, where]
    return [v.detach().cpu() for v in found]


class PoisonedMm(torch.autograd.Function):
    """A grouped product that writes NaN after the last slab, in result and gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Compute one product for each expert."""
        ctx.save_for_backward(x, w, ends)
        out = x.new_full((x.shape[0], w.shape[2]), torch.nan)
        for expert, (begin, end) in enumerate(slabs(ends)):
            out[begin:end] = x[begin:end] @ w[expert]
        return out

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> tuple[Any, ...]:
        """Compute two products for each expert."""
        x, w, ends = ctx.saved_tensors
        d_x, d_w = torch.full_like(x, torch.nan), torch.zeros_like(w)
        for expert, (begin, end) in enumerate(slabs(ends)):
            d_x[begin:end] = d[begin:end] @ w[expert].T
            d_w[expert] = x[begin:end].T @ d[begin:end]
        return d_x, d_w, None


def slabs(ends: torch.Tensor) -> list[tuple[int, int]]:
    """Return the first and one past the last row of each expert."""
    last = ends.tolist()
    return list(zip([0, *last[:-1]], last, strict=True))


poisoned_mm = PoisonedMm.apply


def same(a: Any, b: Any) -> bool:
    """Return whether both have the same bits."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
