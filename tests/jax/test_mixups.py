# SPDX-License-Identifier: Apache-2.0
"""Tests that arguments that do not fit together raise errors.

Without these checks the numbers would be wrong without an error, or the process would end.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import epic.jax
import layers
from conftest import make_mesh
from epic.jax import EpicArgumentError
from steps import ALL, EXPERTS, HIDDEN, LAYER, TOKENS, TOP_K, choices, numbers

ROWS = (2, 3, HIDDEN)  # for one device, because its choices are [2, 3, TOP_K]
Step = Callable[..., Any]


def table(*counts: int) -> np.ndarray:
    """Return a table with this many experts for each rank."""
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts)


def step(group: Any, x: Any, w: Any, ids: Any, **more: Any) -> Any:
    """Run plan_dispatch and combine."""
    plan, recv, slots = epic.jax.plan_dispatch(group, LAYER, ids, x, w, **more)
    return epic.jax.combine(plan, recv, slots)


WRONG: dict[str, tuple[Step, str]] = {
    "turned weights": (
        lambda g, x, w, ids: step(g, x, w.T, ids),
        r"weights is float32\[3, 6\]: must be of shape \[..., top_k 3\]",
    ),
    "flat weights": (
        lambda g, x, w, ids: step(g, x, w.reshape(-1), ids),
        r"weights is float32\[18\]: must be of shape \[..., top_k 3\]",
    ),
    "tokens in another order": (
        lambda g, x, w, ids: step(g, x.reshape(3, 2, HIDDEN), w, ids.reshape(2, 3, TOP_K)),
        r"tokens is float32\[3, 2, 20\]: must be \[2, 3, hidden\], with a row for each token",
    ),
    "weights in another order": (
        lambda g, x, w, ids: step(g, x, w.reshape(3, 2, TOP_K), ids.reshape(2, 3, TOP_K)),
        r"weights is float32\[3, 2, 3\]: must be \[2, 3, top_k 3\], with a row for each",
    ),
    "too few local experts": (
        lambda g, x, w, ids: step(g, x, w, ids, num_local_experts=2),
        "num_local_experts is 2: must be at least 4",
    ),
    "too many local experts": (
        lambda g, x, w, ids: step(g, x, w, ids, num_local_experts=5),
        "num_local_experts is 5: must be at most 4",
    ),
    "fewer than the table has": (
        lambda g, x, w, ids: step(g, x, w, ids, rank_of_expert=table(6, 2), num_local_experts=4),
        "num_local_experts is 4: must be at least 6",
    ),
    "a table of fractions": (
        lambda g, x, w, ids: step(g, x, w, ids, rank_of_expert=table(4, 4) + 0.5),
        "rank_of_expert is float32",
    ),
    "a channel below 0": (
        lambda g, x, w, ids: step(g, x, w, ids, channel=-7),
        "channel is -7: must be an integer from 0",
    ),
    "half a channel": (
        lambda g, x, w, ids: step(g, x, w, ids, channel=2.5),
        "channel is 2.5: must be an integer from 0",
    ),
    "a traced half of a channel": (
        lambda g, x, w, ids: step(g, x, w, ids, channel=x[0, 0]),
        "channel is float32.*must be one integer",
    ),
    "a large channel": (
        lambda g, x, w, ids: step(g, x, w, ids, channel=1 << 23),
        "channel is 8388608: must be an integer from 0 to 8388607",
    ),
    "four bits": (
        lambda g, x, w, ids: step(g, x.astype(jnp.int4), w, ids),
        "tokens is int4",
    ),
}  # fmt: skip


def test_steps(opened: Any) -> None:
    """Wrong arguments are refused while tracing."""
    mesh = make_mesh(2)
    group = opened(mesh)
    x, w, ids = numbers(1, 4 * TOKENS, HIDDEN), numbers(2, 4 * TOKENS, TOP_K), choices(3)
    for name, (wrong, sentence) in WRONG.items():

        def run(*arrays: Any, wrong: Step = wrong) -> Any:
            return wrong(group, *arrays)

        mapped = jax.shard_map(run, mesh=mesh, in_specs=(ALL,) * 3, out_specs=ALL)
        with pytest.raises(EpicArgumentError, match=sentence):
            jax.eval_shape(mapped, x, w, ids)
            raise AssertionError(name)


def test_a_computed_table(opened: Any) -> None:
    """The handler counts a traced table when the program runs; the group stays usable."""
    mesh = make_mesh(2)
    group = opened(mesh)
    x, ids = numbers(1, 4 * TOKENS, HIDDEN), choices(3)

    def run(x: Any, ids: Any, ranks: Any) -> Any:
        more = {"rank_of_expert": ranks, "num_local_experts": 5}
        return step(group, x, None, ids, **more, capacity=4 * TOKENS * TOP_K)

    whole = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(ALL, ALL, P()), out_specs=ALL))
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="rank 0 has more than num_local_experts 5"
    ):
        whole(x, ids, table(6, 2)).block_until_ready()
    wanted = np.asarray(x) * (np.asarray(ids) >= 0).sum(axis=1, keepdims=True)
    assert np.abs(whole(x, ids, table(3, 5)) - wanted).max() < 1e-5


LOSSES: list[tuple[Any, str]] = [
    (("dp", "ep"), "loss_axes contains 'ep': must not contain an axis of the group"),
    (("dp", "dp"), "must not contain 'dp' twice"),
    ("dp", r"must be a tuple of axes, \('dp',\)"),
    (("tp",), "loss_axes is 'tp': must be an axis of the mesh"),
]


@pytest.mark.parametrize(("axes", "sentence"), LOSSES)
def test_loss_axes(axes: Any, sentence: str, opened: Any) -> None:
    """loss_axes must not contain the group's axis, an axis twice, or an unknown axis."""
    mesh = make_mesh(2)
    group = opened(mesh)
    wish = layers.options({"balance_coeff": 1.0}, 2)
    weights = epic.jax.MoeWeights(**layers.weights({}))
    x, _ = layers.arrays()
    with pytest.raises(EpicArgumentError, match=sentence):
        jax.eval_shape(
            lambda x: epic.jax.sharded.moe(mesh, group, wish, x, weights, loss_axes=axes).loss, x
        )
    if "tp" not in axes:
        with pytest.raises(EpicArgumentError, match=sentence):
            epic.jax.moe(group, wish, x, weights, loss_axes=axes)


def test_loss_axes_of_the_same_tokens(opened: Any) -> None:
    """loss_axes must not contain an axis whose devices have the same tokens."""
    mesh = make_mesh(2)
    group = opened(mesh)
    wish = layers.options({"balance_coeff": 1.0}, 2)
    weights = epic.jax.MoeWeights(**layers.weights({}))
    x, _ = layers.arrays()
    more: dict[str, Any] = {"token_axes": ("ep",), "loss_axes": ("dp",)}
    with pytest.raises(EpicArgumentError, match="loss_axes contains 'dp': must not"):
        epic.jax.sharded.moe(mesh, group, wish, jnp.asarray(x), weights, **more)


OPENED: list[tuple[dict[str, Any], str]] = [
    ({"ranks": [0, 0], "num_ranks": 2}, r"ranks is \[0, 0\]: must be different numbers"),
    ({"ranks": [0, 2], "num_ranks": 2}, r"ranks is \[0, 2\]: must be different numbers"),
    ({"ranks": [-1, 0], "num_ranks": 2}, "ranks is -1: must be an integer from 0"),
    ({"ranks": 1, "num_ranks": 2}, "ranks is 1: must be a list"),
    ({"num_ranks": 0}, "num_ranks is 0: must be an integer from 1"),
    ({"bootstrap": "tcp"}, r"bootstrap is 'tcp': must be a Tcp\(address, port, secret\), or"),
    (
        {"bootstrap": lambda _r, _b: 3},
        "the bootstrap returned 3: must be a list with the bytes of all ranks",
    ),
    (
        {"bootstrap": lambda _, b: ["x" * len(b)]},
        "the bootstrap returned .'xxx.*: must be a list with the bytes",
    ),
    ({"name": None}, "name is None: must be a str"),
    ({"backend": 3}, "backend is 3: must be a str"),
    ({"timeout_ms": -1}, "timeout_ms is -1: must be an integer from 0"),
    ({"max_sms": -1}, "max_sms is -1: must be an integer from 0"),
    ({"mesh": True, "num_ranks": 4}, "num_ranks is 4: must be None with a mesh"),
    ({"mesh": True, "axis": ("ep", "ep")}, "must not contain 'ep' twice"),
    ({"mesh": True, "max_tokens": -5, "like": layers.arrays()[0]}, "max_tokens is -5"),
    (
        {"mesh": True, "like": layers.arrays()[0], "token_axes": ("tp",)},
        "token_axes is 'tp': must be an axis",
    ),
    (
        {"mesh": True, "like": layers.arrays()[0], "token_axes": P("dp", "ep", None)},
        "at most 2 dimensions",
    ),
]


@pytest.mark.parametrize(("wish", "sentence"), OPENED)
def test_open(wish: dict[str, Any], sentence: str) -> None:
    """Wrong arguments of open() are refused."""
    sizes = {"max_tokens": 8, "max_row_bytes": 64, "timeout_ms": 2000}
    mesh = make_mesh(2) if wish.get("mesh") else None
    with pytest.raises(EpicArgumentError, match=sentence):
        epic.jax.open(**{**sizes, **wish, "mesh": mesh})


def test_much_staging() -> None:
    """staging_bytes may exceed 4 GiB."""
    with epic.jax.open(max_tokens=8, max_row_bytes=64, staging_bytes=5 << 30) as group:
        assert group.max_tokens == 8


def test_experts_are_asked_together() -> None:
    """All fields of experts are checked, even if num_local_experts is derived later."""
    wish: dict[str, Any] = {"num_experts": EXPERTS, "top_k": 2, "hidden": 16, "inner": 8}
    for wrong in ({"interleaved": True}, {"activation": "clamped_swiglu"}):
        with pytest.raises(EpicArgumentError, match="needs a gate"):
            epic.jax.Moe.of(**wish, ungated=True, **wrong)
