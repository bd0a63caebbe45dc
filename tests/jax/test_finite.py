# SPDX-License-Identifier: Apache-2.0
"""Tests find_non_finite and check_finite, which name the first row that is not finite."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import epic.jax
import layers
from conftest import make_mesh

SHARED, PLAIN = layers.CASES["shared"], layers.CASES["normalized"]
TOKENS = layers.BATCH * layers.LENGTH // 4  # of each device
EVERY = ("dp", "ep")
Arrays = dict[str, np.ndarray]


def program(mesh: Any, group: Any, case: Any, **more: Any) -> Callable[..., Any]:
    """Return a jitted function of x, weights and a mask that returns the findings."""
    weights = epic.jax.MoeWeights(**layers.weights(case))
    specs = epic.jax.sharded.weight_specs(group, weights)
    wish = layers.options(case, group.num_ranks)

    def find(x: Any, weights: Any, mask: Any) -> Any:
        return epic.jax.find_non_finite(group, wish, x, weights, token_mask=mask, **more)

    sharding: Any = {"in_specs": (P(EVERY), specs, P(EVERY)), "out_specs": P(EVERY)}
    return jax.jit(jax.shard_map(find, mesh=mesh, **sharding))


def tokens() -> np.ndarray:
    """Return the tokens of all devices [4 * TOKENS, hidden]."""
    return layers.arrays()[0].reshape(-1, layers.HIDDEN)


def spoil(value: str, x: np.ndarray, w: Arrays, expert: int) -> None:
    """Change the tokens or weights so that this value of the layer is not finite."""
    if value == "the input row":  # of two ranks; the error names the lower rank
        x[2 * TOKENS + 1, 3] = np.nan
        x[3 * TOKENS, 0] = np.inf
    elif value == "the row of router logits":
        w["w_gate"][:, 3] = np.nan
    elif value == "the row that the expert returned":
        w["w_down"][expert, 2, 4] = np.inf
    else:
        assert value == "the row of the shared expert"
        w["shared_down"][0, 1, 1] = np.nan


def second_choice() -> tuple[int, int]:
    """Return an expert and the first token that chooses it, not as its first choice (by numpy)."""
    logits = tokens().astype(np.float64) @ layers.weights(SHARED)["w_gate"]
    chosen = np.argsort(-logits, axis=1)[:, :2]
    first = {e: int(np.argmax((chosen == e).any(axis=1))) for e in np.unique(chosen).tolist()}
    return next((e, token) for e, token in first.items() if token and chosen[token, 1] == e)


def test_what_is_found(opened: Any) -> None:
    """Check the fields of the error, and that all ranks find the same."""
    mesh = make_mesh(4)
    run = program(mesh, opened(mesh), SHARED)
    expert, token = second_choice()
    cases = {
        "the input row": (2, 1),
        "the row of router logits": (0, 0),
        "the row that the expert returned": None,
        "the row of the shared expert": (0, 0),
    }
    good = run(tokens(), epic.jax.MoeWeights(**layers.weights(SHARED)), None)
    epic.jax.check_finite({"first": good})
    for value, where in cases.items():
        x, w = tokens().copy(), layers.weights(SHARED)
        spoil(value, x, w, expert)
        bad = run(x, epic.jax.MoeWeights(**w), None)
        assert (np.asarray(bad) == np.asarray(bad)[0]).all()
        with pytest.raises(epic.jax.EpicNonFiniteError, match=f"{value} is not finite") as caught:
            epic.jax.check_finite({"first": good, "second": bad, "third": bad})
        error = caught.value
        assert (error.layer, error.rank, error.token) == (
            "second",
            *(where or divmod(token, TOKENS)),
        )
        assert error.expert == (None if where else expert)


def test_padding_and_groups(opened: Any) -> None:
    """Check that padding is ignored, and that each group of a mesh has its own finding."""
    mesh = make_mesh(2)
    run = program(mesh, opened(mesh), PLAIN)
    weights = epic.jax.MoeWeights(**layers.weights(PLAIN))
    x, mask = tokens().copy(), np.ones(4 * TOKENS, bool)
    x[3 * TOKENS + 1] = np.nan  # rank 1 of the second group
    mask[3 * TOKENS + 1] = False
    epic.jax.check_finite({"": run(x, weights, mask)})
    mask[:] = True
    found = run(x, weights, mask)
    assert np.asarray(found)[:, 0].tolist() == [8, 8, 0, 0]
    with pytest.raises(epic.jax.EpicNonFiniteError, match="layer '', rank 1, token 1;"):
        epic.jax.check_finite({"": found})


def test_what_is_refused(opened: Any) -> None:
    """Check the errors for global arrays and scattered tokens."""
    mesh = make_mesh(4)
    group = opened(mesh)
    weights = epic.jax.MoeWeights(**layers.weights(PLAIN))
    with pytest.raises(epic.jax.EpicUnsupportedError, match=r"inside of a jax\.shard_map"):
        epic.jax.find_non_finite(group, layers.options(PLAIN, 4), tokens(), weights)
    run = program(mesh, group, PLAIN, scatter_tokens=True)
    with pytest.raises(epic.jax.EpicUnsupportedError, match="leave it out"):
        run(tokens(), weights, None)
    with pytest.raises(epic.jax.EpicArgumentError, match=r"\[\.\.\., 4\]"):
        epic.jax.check_finite({"a": np.zeros((0, 4))})
