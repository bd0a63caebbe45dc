# SPDX-License-Identifier: Apache-2.0
"""Checks that values in rows after the last slab do not change the gradient of any parameter."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import epic.torch
from epic.torch.experts import mlp
from parts import numbers, poisoned_mm
from reference import relative

ROWS, CAPACITY, HIDDEN, INNER = (3, 0, 2), 9, 4, 6
USED = sum(ROWS)
GATED = ("silu", "gelu", "gelu_tanh", "relu2", "clamped_swiglu", "clamped_silu")
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda v: v / (1 + torch.exp(-v)),
    "gelu": lambda v: v * (1 + torch.erf(v / math.sqrt(2))) / 2,
    "gelu_tanh": lambda v: v * (1 + torch.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) / 2,
    "relu2": lambda v: torch.where(v > 0, v * v, 0 * v),
}


def activated(options: epic.torch.Experts, z: Tensor) -> Tensor:
    """Return the activation, written from its definition."""
    if options.ungated:
        return PLAIN[options.activation](z)
    half = options.inner
    gate, up = (z[0::2], z[1::2]) if options.interleaved else (z[:half], z[half:])
    if options.activation == "clamped_swiglu":
        gate, up = torch.clamp(gate, max=7), torch.clamp(up, -7, 7)
        return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
    if options.activation == "clamped_silu":
        return PLAIN["silu"](torch.clamp(gate, max=10)) * torch.clamp(up, -10, 10)
    return PLAIN[options.activation](gate) * up


def true_rows(
    options: epic.torch.Experts, x: Tensor, w: epic.torch.ExpertWeights, slots: Tensor
) -> Tensor:
    """Return the expected rows, computed one by one in float64."""
    rows = []
    for i, expert in enumerate(e for e, count in enumerate(ROWS) for _ in range(count)):
        row = x[i] * slots[i] if options.weighting == "input" else x[i]
        z = row @ w.w_gate_up[expert]
        a = activated(options, z if w.b_gate_up is None else z + w.b_gate_up[expert])
        y = a @ w.w_down[expert]
        y = y if w.b_down is None else y + w.b_down[expert]
        rows.append(y * slots[i] if options.weighting == "early" else y)
    return torch.stack(rows)


CASES = [
    *(dict(zip(("activation", "weighting"), pair, strict=True))
      for pair in itertools.product(GATED, ("late", "early", "input"))),
    *({"activation": name, "ungated": True} for name in PLAIN),
    {"activation": "clamped_swiglu", "interleaved": True},
]  # fmt: skip


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_a_poisoned_product(case: dict[str, Any], biases: bool) -> None:
    """Check NaN in the tail of the product's result, of its gradients, and of the output
    gradient."""
    options = epic.torch.Experts(hidden=HIDDEN, inner=INNER, **case)
    wide = options.width
    shapes = [(CAPACITY, HIDDEN), (CAPACITY,), (3, HIDDEN, wide), (3, INNER, HIDDEN)]
    shapes += [(3, wide), (3, HIDDEN)] if biases else []
    leaves = [numbers(i, *s, dtype=torch.float64).requires_grad_() for i, s in enumerate(shapes)]
    x, slots, *w = leaves
    weights = epic.torch.ExpertWeights(*w)
    counts = torch.tensor(ROWS, dtype=torch.int32)
    given = None if options.weighting == "late" else slots
    y = mlp(options, poisoned_mm, x, counts, weights, given)
    ct = numbers(9, CAPACITY, HIDDEN, dtype=torch.float64)
    wanted = true_rows(options, x, weights, slots)
    assert relative(y[:USED].detach(), wanted.detach()) < 1e-13
    dirty = torch.where(torch.arange(CAPACITY)[:, None] < USED, ct, torch.nan)
    inputs = [v for v in leaves if v is not slots or given is not None]
    got = torch.autograd.grad(y, inputs, dirty)
    true = torch.autograd.grad(wanted, inputs, ct[:USED])
    for value, a, b in zip(inputs, got, true, strict=True):
        live = slice(USED) if value is x or value is slots else slice(None)
        assert relative(a[live], b[live]) < 1e-12


def test_the_product_of_torch() -> None:
    """Check torch's grouped_mm, which leaves its tail unwritten on some machines."""
    of_torch = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm

    def product(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        return of_torch(x, w, offs=ends)

    options = epic.torch.Experts(hidden=16, inner=8)
    shapes = [(CAPACITY, 16), (3, 16, 16), (3, 8, 16), (3, 16), (3, 16)]
    leaves = [0.5 * numbers(i, *s).bfloat16() for i, s in enumerate(shapes)]
    counts = torch.tensor(ROWS, dtype=torch.int32)
    ct = numbers(9, CAPACITY, 16).bfloat16()
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        x, *w = (v.to(dtype).requires_grad_() for v in leaves)
        weights = epic.torch.ExpertWeights(*w)
        if dtype == torch.bfloat16:
            y = mlp(options, product, x, counts, weights)[:USED]
        else:
            y = true_rows(options, x, weights, x[:, 0])
        found.append([y.detach(), *torch.autograd.grad(y, w, ct[:USED].to(dtype))])
    for a, b in zip(*found, strict=True):
        assert relative(a.double(), b) < 3e-2
