# SPDX-License-Identifier: Apache-2.0
"""Tests the bits of sums over the ranks, and of sums of gradients of shared parameters."""

from typing import Any

import numpy as np
import pytest
import torch

import epic.torch
from epic.torch.experts import slab_mm
from parts import RANKS, SIZES, group_of, numbers

HIDDEN, TOKENS = 20, 32
KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def wide_numbers(rank: int) -> np.ndarray:
    """Return float64 numbers of all magnitudes, including special values."""
    rng = np.random.default_rng(rank)
    plain = rng.normal(size=2000) * 10.0 ** rng.integers(-300, 300, size=2000)
    special = [np.inf, -np.inf, np.nan, 0.0, -0.0, 5e-324, 1e308, 2.0**-1060, 1 + 2.0**-52]
    return np.concatenate([plain, np.roll(special, rank), -np.array(special)])


def float64_sum(rank: int, ep: int, tree: bool) -> None:
    """Compare a float64 sum with additions of numpy in the same order, and check its gradient."""
    with group_of(ep) as group:
        first = rank // ep * ep
        rows = [wide_numbers(r) for r in range(first, first + ep)]
        with np.errstate(all="ignore"):
            if tree and ep == 4:
                wanted = (rows[0] + rows[1]) + (rows[2] + rows[3])
            else:
                wanted = sum(rows[1:], start=rows[0])
        x = torch.from_numpy(wide_numbers(rank)).requires_grad_()
        got = epic.torch.sum(group, x.view(2, -1), tree=tree)
        check_bits(got.detach().reshape(-1).numpy(), wanted)
        (d_x,) = torch.autograd.grad(got.view(-1)[:2000], x, 2 * torch.ones(2000).double())
        assert d_x[:2000].eq(2 * ep).all() and not d_x[2000:].any()
        out = x.detach().clone()
        assert epic.torch.sum(group, out, tree=tree, out=out) is out
        check_bits(out.numpy(), wanted)
        assert epic.torch.sum(group, x.detach()[:0]).shape == (0,)


def check_bits(got: np.ndarray, wanted: np.ndarray) -> None:
    """Compare the bits of all numbers; NaN equals NaN."""
    number = ~np.isnan(wanted)
    assert np.array_equal(np.isnan(got), ~number)
    assert np.array_equal(got[number].view(np.int64), wanted[number].view(np.int64))


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_float64(world: Any, ep: int, tree: bool) -> None:
    """Check that no bit of a float64 sum is lost."""
    world.run(float64_sum, ep, tree)


def test_wrong_dtypes() -> None:
    """Check that other dtypes are refused."""
    with epic.torch.Group(num_ranks=1, **SIZES) as group:
        for dtype in (torch.float16, torch.int32, torch.complex64):
            with pytest.raises(epic.torch.EpicArgumentError, match="float32 or float64"):
                epic.torch.sum(group, torch.ones(3, dtype=dtype))


def shared_gradients(rank: int, ep: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the bytes of gradients of shared parameters, for the same tokens on all ranks."""
    options = epic.torch.Moe.of(
        num_experts=8, top_k=2, hidden=HIDDEN, inner=12, sum_order="tree", leaves=8,
        balance_coeff=0.01, z_coeff=0.001, shared=epic.torch.Experts(1, HIDDEN, 12),
    )  # fmt: skip
    with group_of(ep) as group:
        layer = epic.torch.MoE(group, options, dtype=dtype, gate_bias=True, shared_gate=True)
        x, ct = (numbers(i, TOKENS, HIDDEN).to(dtype).chunk(ep)[group.rank] for i in (1, 2))
        torch.autograd.backward(layer(x), [ct, None])
        layer.sum_gradients()
        whole = {n: p.grad for n, p in layer.named_parameters() if n not in EXPERT_WEIGHTS}
    assert all(g.dtype == layer.get_parameter(n).dtype for n, g in whole.items())
    return {n: g.view(torch.uint8).numpy().tobytes() for n, g in whole.items()}


EXPERT_WEIGHTS = ("w_gate_up", "w_down")


@pytest.mark.parametrize("dtype", KINDS)
def test_bits_of_shared_gradients(world: Any, dtype: torch.dtype) -> None:
    """Check equal bits with sum_order "tree" on 1, 2 and 4 ranks."""
    wanted = world.run(shared_gradients, 1, dtype)[0]
    assert len(wanted) == 5 and all(any(v) for v in wanted.values())
    for ep in (1, 2, 4):
        for found in world.run(shared_gradients, ep, dtype):
            assert found == wanted, [n for n in wanted if found[n] != wanted[n]]


def summed_in_backward(rank: int, composed: bool, dtype: torch.dtype) -> None:
    """Check moe(sum_gradients=True).

    Each gradient is the float64 sum of the ranks' parts. A 16-bit layer with tree order does not
    add them a second time.
    """
    options = epic.torch.Moe.of(
        num_experts=8, top_k=2, hidden=HIDDEN, inner=12, sum_order="tree", balance_coeff=0.1,
        shared=epic.torch.Experts(1, HIDDEN, 12),
    )  # fmt: skip
    more: dict[str, Any] = {"grouped_mm": slab_mm} if composed else {}
    with group_of(RANKS) as group:
        layer = epic.torch.MoE(group, options, dtype=dtype, shared_gate=True, **more)
        # tree order needs equal numbers
        x = numbers(60 + rank, 5 + rank if composed else 8, HIDDEN).to(dtype)

        def gradients(summed: bool) -> dict[str, torch.Tensor]:
            layer.zero_grad()
            out, loss = epic.torch.moe(
                group, options, x, layer.weights(), sum_gradients=summed, **more
            )[:2]
            (out.square().sum() + loss).backward()
            return {n: p.grad.clone() for n, p in layer.named_parameters()}

        parts, whole = gradients(False), gradients(True)
        for name, part in parts.items():
            wanted = part.double()
            if name not in EXPERT_WEIGHTS:
                wanted = epic.torch.sum(group, wanted)
            most = 1e-5 if dtype == torch.float32 else 2e-2
            error = (whole[name].double() - wanted).abs().max() / wanted.abs().max()
            assert error < most, (name, float(error))
        layer.zero_grad()
        out, loss = layer(x)
        (out.square().sum() + loss).backward()
        layer.sum_gradients()
        epic_sums = {n: p.grad.clone() for n, p in layer.named_parameters()}
        layer.zero_grad()
        out, loss = layer(x)
        (out.square().sum() + loss).backward()
        epic.torch.sum_gradients(torch.nn.ModuleList([layer]), group)
        for name, p in layer.named_parameters():
            assert torch.equal(p.grad, epic_sums[name]), name
            torch.testing.assert_close(p.grad, whole[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("composed", [False, True])
def test_sums_in_backward(world: Any, composed: bool, dtype: torch.dtype) -> None:
    """Check the core's own layer and a composed one."""
    world.run(summed_in_backward, composed, dtype)


def other_parameters(rank: int) -> None:
    """Sum gradients of complex and float64 parameters of a model."""
    with group_of(RANKS) as group:
        model = torch.nn.ParameterList(
            [torch.zeros(3, dtype=torch.complex64), torch.zeros(3, dtype=torch.float64)]
        )
        step = 1 + (rank + 1) * 2.0**-40
        (model[0].real.sum() * rank + model[0].imag.sum() * 10 * rank).backward()
        (model[1] * step).sum().backward()
        epic.torch.sum_gradients(model, group)
        assert model[0].grad.tolist() == [complex(6, 60)] * 3
        assert model[1].grad.tolist() == [4 + 10 * 2.0**-40] * 3


def test_other_parameters(world: Any) -> None:
    """Check that they are not rounded to float32, as they once were."""
    world.run(other_parameters)
