# SPDX-License-Identifier: Apache-2.0
"""Tests check_finite, the mode that names the first row that is not finite."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import epic.torch
from epic.torch.experts import slab_mm
from parts import HIDDEN, group_of, numbers

WISH = epic.torch.Moe.of(
    num_experts=8, top_k=2, hidden=HIDDEN, inner=12, normalize="sum",
    shared=epic.torch.Experts(1, HIDDEN, 8),
)  # fmt: skip
COUNTS = (5, 0, 9, 6)  # tokens of each rank


class Two(torch.nn.Module):
    """A model of two layers."""

    def __init__(self, group: epic.torch.Group, **more: Any) -> None:
        super().__init__()
        self.first = epic.torch.MoE(group, WISH, **more)
        self.second = epic.torch.MoE(group, WISH, **more)
        self.chosen: list[list[int]] = []

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return the rows after both layers."""
        x = x + self.first(x, mask)[0]
        options = self.second.options.router
        self.chosen = epic.torch.route(options, x.detach() @ self.second.w_gate.detach())[
            0
        ].tolist()
        return x + self.second(x, mask)[0]


# changes the inputs of a rank, and returns a factor for the loss
Case = Callable[[int, Two, torch.Tensor], float]


def bad_input(rank: int, model: Two, x: torch.Tensor) -> float:
    """Make inputs of two ranks not finite; the error names the lower rank."""
    if rank > 1:
        x[rank + 1, 3] = torch.nan
    return 1.0


def bad_expert(rank: int, model: Two, x: torch.Tensor) -> float:
    """Make expert 5 of the second layer return a row that is not finite."""
    if rank == 2:
        model.second.w_down[1, 2, 4] = torch.inf
    return 1.0


def bad_router(rank: int, model: Two, x: torch.Tensor) -> float:
    """Change one column on all ranks, so that the logits of every token are not finite."""
    model.second.w_gate[:, 3] = torch.nan
    return 1.0


def bad_shared(rank: int, model: Two, x: torch.Tensor) -> float:
    """Make the shared expert of the first layer return a row that is not finite."""
    model.first.shared_down[0, 1, 1] = torch.nan
    return 1.0


def bad_loss(rank: int, model: Two, x: torch.Tensor) -> float:
    """Make the gradient of the output not finite."""
    return float("inf") if rank == 2 else 1.0


def bad_gradient(rank: int, model: Two, x: torch.Tensor) -> float:
    """Let the backward of expert 5 in the second layer overflow."""
    if rank == 2:
        model.second.w_down[1] *= 1e20
    return 1e25


# Expected text, layer, and (rank, token). None means the first token that has chosen expert 5.
CASES: dict[Case, tuple[str, str, tuple[int, int] | None]] = {
    bad_input: ("the input row", "first", (2, 3)),
    bad_expert: ("the row that the expert returned", "second", None),
    bad_router: ("the row of router logits", "second", (0, 0)),
    bad_shared: ("the row of the shared expert", "first", (0, 0)),
    bad_loss: ("the gradient of the output row", "second", (2, 0)),
    bad_gradient: ("the gradient that the expert returned", "second", None),
}


def made(rank: int, group: epic.torch.Group, composed: bool) -> tuple[Two, torch.Tensor]:
    """Return a model and its tokens, which need a gradient."""
    model = Two(group, grouped_mm=slab_mm if composed else None)
    return model, numbers(60 + rank, COUNTS[rank], HIDDEN)


def find(rank: int, case: Case, composed: bool) -> tuple[str, Any, list[list[int]]]:
    """Return the fields of the error, and the choices of this rank's tokens in the second layer."""
    with group_of(4) as group:
        model, x = made(rank, group, composed)
        with torch.no_grad():
            factor = case(rank, model, x)
        x.requires_grad_()
        with epic.torch.check_finite(model):
            with pytest.raises(epic.torch.EpicNonFiniteError) as caught:
                (model(x).sum() * factor).backward()
            assert caught.value.code == "EPIC_EINVAL"
        assert "forward" not in model.first.__dict__
        error = caught.value
        return str(error), (error.layer, error.rank, error.token, error.expert), model.chosen


@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_what_is_found(world: Any, case: Case, composed: bool) -> None:
    """Check that all ranks, one of them without tokens, raise the same error."""
    answers = world.run(find, case, composed)
    texts = {text for text, *_ in answers}
    assert len(texts) == 1
    what, layer, where = CASES[case]
    assert f"{what} is not finite: layer '{layer}'" in texts.pop()
    named = where or next(
        (rank, token)
        for rank, (*_, chosen) in enumerate(answers)
        for token, ids in enumerate(chosen)
        if 5 in ids
    )
    assert answers[0][1] == (layer, *named, None if where else 5)


def test_a_replayed_expert() -> None:
    """Check that the error names the replayed expert, not the one that the router would choose."""
    options = epic.torch.Moe.of(num_experts=4, top_k=1, hidden=8, inner=8)
    x = torch.ones(1, 8)
    with epic.torch.Group(num_ranks=1, max_tokens=4, max_row_bytes=64) as group:
        layer = epic.torch.MoE(group, options)
        with torch.no_grad():
            usual = int((x @ layer.w_gate).argmax())
            layer.w_down[(usual + 1) % 4] = torch.inf
        ids = torch.tensor([[(usual + 1) % 4]])
        with (
            pytest.raises(epic.torch.EpicNonFiniteError) as caught,
            epic.torch.replay_routing(layer, {"": ids}),
            epic.torch.check_finite(layer),
        ):
            layer(x)
        assert caught.value.expert == ids.item()
        with epic.torch.check_finite(layer):
            out, _, routing = layer(x, forced=torch.tensor([[usual]]), return_routing=True)
        assert out.isfinite().all() and routing[0].item() == usual


def finite(rank: int) -> None:
    """Check that a finite model computes the same bits in this mode, whatever the padding
    contains."""
    with group_of(4) as group:
        model, x = made(rank, group, False)
        mask = torch.arange(len(x)) != 2
        results = []
        for checks in (False, True):
            for given in (None, mask):
                leaf = x.clone()
                if given is not None and len(x):
                    leaf[2] = 1e30
                leaf.requires_grad_()
                with epic.torch.check_finite(model if checks else torch.nn.Identity()):
                    out = model(leaf, given)
                    out.sum().backward()
                results.append((out.detach(), leaf.grad))
        for plain, seen in zip(results[:2], results[2:], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
        if len(x):
            with torch.no_grad():
                x[2] = torch.nan
        with epic.torch.check_finite(model):
            with epic.torch.check_finite(model.first):
                assert model.first(x, mask)[0].isfinite().all()
            assert "forward" in model.first.__dict__


def test_nothing_to_find(world: Any) -> None:
    """Check that nothing is raised if all rows are finite."""
    world.run(finite)
