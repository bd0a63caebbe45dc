# SPDX-License-Identifier: Apache-2.0
"""Checks that mistakes and failures raise exceptions that name the remedy."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import epic.jax
from conftest import make_mesh
from epic import words
from steps import ALL, EXPERTS, HIDDEN, LAYER, TOKENS, TOP_K, choices, mapped, numbers

RuntimeFailure = jax.errors.JaxRuntimeError


def failure(function: Any, *args: Any) -> str:
    """Return the text of the runtime error."""
    with pytest.raises(RuntimeFailure) as caught:
        jax.block_until_ready(function(*args))
    return str(caught.value)


def test_data_errors_leave_the_group_usable(opened: Any) -> None:
    """A bad expert id and too many slots fail on every rank, and the next step works."""
    mesh = make_mesh(4)
    group = opened(mesh)
    x, w, ids = numbers(1, 4 * TOKENS, HIDDEN), numbers(2, 4 * TOKENS, TOP_K), choices(3, 0)

    def step(x: Any, w: Any, ids: Any, capacity: int | None = None) -> Any:
        plan, recv, slot = epic.jax.plan_dispatch(group, LAYER, ids, x, w, capacity=capacity)
        return epic.jax.combine(plan, recv, slot)

    good = mapped(mesh, step, 3)
    wanted = good(x, w, ids)
    text = failure(good, x, w, ids.at[7, 1].set(EXPERTS + 5))
    assert text.startswith("INVALID_ARGUMENT") and "13" in text and "rank 1" in text, text
    tight = mapped(mesh, lambda x, w, ids: step(x, w, ids, 4), 3)
    text = failure(tight, x, w, ids)
    assert text.startswith("RESOURCE_EXHAUSTED"), text
    assert np.array_equal(good(x, w, ids), wanted)
    epic.jax.check(group)


def test_closed_and_opened_again(opened: Any) -> None:
    """A compiled program finds the new group by its name."""
    mesh = make_mesh(2)
    group = opened(mesh)
    x = numbers(1, 4, 5)
    step = mapped(mesh, lambda x: epic.jax.sum(group, x), 1)
    wanted = step(x)
    epic.jax.close(group)
    for _ in range(2):
        text = failure(step, x)
        assert 'group "epic" was closed on CPU device' in text, text
        assert 'open it again before the program runs, epic.jax.open(..., name="epic")' in text
    assert jax.eval_shape(step, x).shape == x.shape  # tracing does not communicate with any rank
    opened(mesh)
    assert np.array_equal(step(x), wanted)


def test_several_groups(opened: Any) -> None:
    """Groups over different axes work in one program."""
    mesh = make_mesh(2)
    ep = opened(mesh)
    wish: dict[str, Any] = {"max_tokens": 8, "max_row_bytes": 64, "name": "other"}
    with epic.jax.open(mesh, "dp", **wish) as dp:
        x = jnp.arange(4.0, dtype=jnp.float32)
        both = mapped(mesh, lambda x: (epic.jax.sum(ep, x), epic.jax.sum(dp, x)), 1)(x)
    assert both[0].tolist() == [1, 1, 5, 5] and both[1].tolist() == [2, 4, 2, 4]


def test_any_device_order(opened: Any) -> None:
    """Ranks follow the mesh, not the devices' ids."""
    devices = np.array(jax.devices()[:4])[[2, 0, 3, 1]].reshape(1, 4)
    mesh = jax.sharding.Mesh(devices, ("dp", "ep"))
    group = opened(mesh)
    ids = choices(3, 0)
    x, w = numbers(1, 4 * TOKENS, HIDDEN), jnp.ones((4 * TOKENS, TOP_K))

    def step(x: Any, w: Any, ids: Any) -> Any:
        return epic.jax.plan_dispatch(group, LAYER, ids, x, w)[0].expert_tokens

    assert np.array_equal(mapped(mesh, step, 3)(x, w, ids), np.bincount(np.ravel(ids)))


def test_misuse_is_explained(opened: Any) -> None:
    """Errors while tracing have the argument, its value and the rule."""
    mesh = make_mesh(4)
    with pytest.raises(ValueError, match="'nope': must be an axis of the mesh"):
        epic.jax.open(mesh, "nope", max_tokens=1, max_row_bytes=1)
    with pytest.raises(ValueError, match="at most 8 ranks"):
        epic.jax.open(ranks=range(9), num_ranks=9, max_tokens=1, max_row_bytes=1)
    group = opened(mesh)
    with pytest.raises(ValueError, match="is already open"):
        opened(mesh)
    ids, x = choices(1), numbers(1, 4 * TOKENS, HIDDEN)
    with pytest.raises(ValueError, match="int32 or int64"):
        epic.jax.plan(group, LAYER, x[:, :TOP_K])
    with pytest.raises(ValueError, match="top_k 3"):
        epic.jax.plan(group, LAYER, ids[:, :2])
    with pytest.raises(ValueError, match="must be at most 64, the max_tokens"):
        epic.jax.plan(group, LAYER, jnp.zeros((4 * 65, TOP_K), jnp.int32))


def test_a_peer_that_never_comes() -> None:
    """A missing rank causes an error at the deadline that names it, and no endless wait."""
    mesh = make_mesh(4)
    sizes: dict[str, Any] = {"max_tokens": 8, "max_row_bytes": 64, "timeout_ms": 2000}
    with epic.jax.open(mesh, "ep", name="slow", **sizes) as group:

        def step(x: Any) -> Any:
            late = jax.lax.axis_index("ep") == 2
            return jax.lax.cond(late, lambda v: v, lambda v: epic.jax.sum(group, v), x)

        inner = jax.shard_map(step, mesh=mesh, in_specs=ALL, out_specs=ALL, check_vma=False)
        text = failure(jax.jit(inner), jnp.ones(4, jnp.float32))
        assert "DEADLINE_EXCEEDED" in text and "rank 2" in text, text
        with pytest.raises(epic.jax.EpicError, match="EPIC_ETIMEOUT"):
            epic.jax.check(group)


def test_a_group_that_was_never_open(opened: Any) -> None:
    """The error differs from that of a closed group, because the name may be wrong."""
    mesh = make_mesh(2)
    other = replace(opened(mesh), name="of another job")
    step = mapped(mesh, lambda x: epic.jax.sum(other, x), 1)
    text = failure(step, numbers(1, 4, 5))
    assert 'group "of another job" is not open on CPU device' in text, text


def test_the_code_in_any_exception(opened: Any) -> None:
    """Check error_code if another program uses the result of a failed one. XLA then calls the error
    INTERNAL, but EPIC's code stays in the text."""
    mesh = make_mesh(4)
    group = opened(mesh)
    x, ids = numbers(1, 4 * TOKENS, HIDDEN), choices(3, 0)

    def step(x: Any, ids: Any, capacity: int | None = None) -> Any:
        plan, recv, _ = epic.jax.plan_dispatch(group, LAYER, ids, x, capacity=capacity)
        return epic.jax.combine(plan, recv)

    good = mapped(mesh, step, 2)
    tight = mapped(mesh, lambda x, ids: step(x, ids, 4), 2)
    wrong = ids.at[7, 1].set(EXPERTS + 5)
    programs: list[tuple[Any, str]] = [
        (lambda: good(x, wrong), "EPIC_EINVAL"),
        (lambda: good(x, wrong) + 1, "EPIC_EINVAL"),
        (lambda: jax.jit(jnp.sin)(good(x, wrong)), "EPIC_EINVAL"),
        (lambda: good(good(x, wrong), ids), "EPIC_EINVAL"),
        (lambda: np.asarray(good(x, wrong)), "EPIC_EINVAL"),
        (lambda: tight(x, ids) * 2, "EPIC_EOVERFLOW"),
        (lambda: epic.jax.route(epic.jax.Router(8, 2), None), "EPIC_EINVAL"),
    ]
    for program, code in programs:
        with pytest.raises(Exception) as caught:
            jax.block_until_ready(program())
        assert epic.jax.error_code(caught.value) == code, caught.value
        try:
            raise KeyError("of the caller") from caught.value
        except KeyError as error:
            assert epic.jax.error_code(error) == code
    epic.jax.close(group)
    with pytest.raises(RuntimeFailure) as gone:
        jax.block_until_ready(good(x, ids) + 1)
    assert epic.jax.error_code(gone.value) == "EPIC_ECLOSED"
    assert epic.jax.error_code(ValueError("EPIC_EPEER")) is None
    assert epic.jax.error_code(None) is None


def test_errors_have_the_words_of_python(opened: Any) -> None:
    """Errors while tracing and at run time contain no C names."""
    mesh = make_mesh(4)
    group = opened(mesh)
    x, ids = numbers(1, 4 * TOKENS, HIDDEN), choices(3, 0)
    tight = mapped(
        mesh, lambda x, ids: epic.jax.plan_dispatch(group, LAYER, ids, x, capacity=4)[1], 2
    )
    text = failure(tight, x, ids)
    assert "(capacity=None always suffices)" in text and "epic_" not in text, text
    mistakes: list[tuple[Any, str]] = [
        (lambda: epic.jax.Layer(8, 2, expert_capacity=4), "unless overflow is 'drop'"),
        (lambda: epic.jax.Layer(8, 2, priority="by_k"), "'by_k' needs overflow 'drop'"),
        (lambda: epic.jax.Layer(8, 2, leaves=4), "unless sum_order is 'tree'"),
        (lambda: epic.jax.Layer(8, 2, partial_type="bfloat16"), "float32"),
        (lambda: epic.jax.Router(8, 2, normalize="clamped"), "'clamped' needs it above 0"),
        (
            lambda: epic.jax.Experts(hidden=4, inner=4, ungated=True, activation="clamped_silu"),
            "'clamped_silu' needs a gate",
        ),
    ]
    for make, wanted in mistakes:
        with pytest.raises(epic.jax.EpicArgumentError) as caught:
            make()
        said = str(caught.value)
        assert wanted in said and "EPIC_" not in said and "epic_" not in said, said


def test_every_enumerator_has_a_word() -> None:
    """epic/words.py translates every constant of the header that options use, and C's prefixes."""
    header = (Path(__file__).parents[2] / "include" / "epic" / "epic.h").read_text()
    for name in words.WORDS:
        if name.startswith("EPIC_") and name not in ("EPIC_BYTES", "EPIC_E8M0"):
            assert re.search(rf"\b{name}\b", header), name
    assert words.to_python("config.max_tokens is 3") == "max_tokens is 3"
    assert words.to_python("moe.layer.layout EPIC_FLAT, epic_plan") == "layer.layout 'flat', plan"
    assert words.to_python('name "epic_a", in config. Use it') == 'name "epic_a", in config. Use it'
    assert words.to_python("EPIC_FLATTER xEPIC_FLAT /epic_1") == "EPIC_FLATTER xEPIC_FLAT /epic_1"
