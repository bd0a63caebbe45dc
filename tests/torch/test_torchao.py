# SPDX-License-Identifier: Apache-2.0
"""Tests torchao's MXFP8 grouped product as grouped_mm= of the layer.

torchao's kernels for it need sm_100; here it runs its emulation in PyTorch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import epic.torch
from parts import group_of, numbers
from reference import relative

pytest.importorskip("torchao", reason="there is no torchao: make test-torch-adapters")

HIDDEN, INNER, TOKENS = 64, 96, 24


def mxfp8_mm(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply by torchao, as docs/guide/torch.md does."""
    from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
    from torchao.quantization.quantize_.common import KernelPreference

    emulated = KernelPreference.EMULATED
    columns = w.mT.contiguous().mT  # torchao takes the weight of each expert by columns
    return _to_mxfp8_then_scaled_grouped_mm(x, columns, offs=ends, kernel_preference=emulated)


def torch_mm(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply by torch's own grouped product."""
    return F.grouped_mm(x, w, offs=ends)


def layers(rank: int, ranks: int) -> None:
    """Compare a layer with each product with the layer of EPIC's core, forward and backward."""
    options = epic.torch.Moe.of(
        num_experts=8, top_k=2, hidden=HIDDEN, inner=INNER, alignment=32, normalize="sum"
    )
    with group_of(ranks) as group:
        found: list[Any] = []
        for product in (None, torch_mm, mxfp8_mm):
            layer = epic.torch.MoE(group, options, grouped_mm=product, dtype=torch.bfloat16)
            layer.reset_parameters(3)
            x = numbers(rank, TOKENS, HIDDEN, dtype=torch.bfloat16).requires_grad_()
            out = layer(x)[0]
            out.backward(numbers(9 + rank, TOKENS, HIDDEN, dtype=torch.bfloat16))
            grads = [x.grad, *(p.grad for p in layer.parameters())]
            found.append([v.float().numpy() for v in (out.detach(), *grads) if v is not None])
        for most, got in zip((0.02, 0.12), found[1:], strict=True):
            for a, b in zip(got, found[0], strict=True):
                assert relative(a, b) < most, (most, a.shape)


@pytest.mark.parametrize("ranks", [1, 4])
def test_layers(world: Any, ranks: int) -> None:
    """Run it on all ranks."""
    world.run(layers, ranks)
