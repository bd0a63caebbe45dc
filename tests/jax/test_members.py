# SPDX-License-Identifier: Apache-2.0
"""Tests Group.members, shrink and leave: groups that go on after an error or without a rank."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import epic.jax
from conftest import make_mesh
from epic import Members, _native
from epic.jax.groups import find_open
from test_processes import run


@pytest.mark.parametrize("ep", [2, 4])
def test_group_of_one_process(ep: int, opened: Any) -> None:
    """A group that was aborted works again, with the program that was compiled before."""
    mesh, traced = make_mesh(ep), []
    group = opened(mesh)

    def total(x: Any) -> Any:
        traced.append(1)
        return epic.jax.sum(group, x)

    spec = P(("dp", "ep"))
    program = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=spec, out_specs=spec))
    x = jnp.arange(8.0)
    wanted = np.repeat(np.arange(8.0).reshape(-1, ep, 2).sum(axis=1), ep, axis=0).ravel()
    assert np.array_equal(program(x), wanted)
    every = tuple(range(ep))
    assert group.members == [Members(0, every, (), 0, 0)] * (4 // ep)
    for context in find_open(group).contexts.values():
        _native.core().epic_abort(context, 0, b"a test")
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match="EPIC_EPEER"):
            jax.block_until_ready(program(x))
    assert group.shrink(step=3) == [Members(1, every, (), 3, 3)] * (4 // ep)
    assert np.array_equal(program(x), wanted) and len(traced) == 1
    with pytest.raises(epic.jax.EpicUnsupportedError, match="has a mesh"):
        group.leave()
    assert np.array_equal(program(x), wanted)


def test_arguments(opened: Any) -> None:
    """Errors name the argument in Python."""
    group = opened(make_mesh(4))
    with pytest.raises(epic.jax.EpicArgumentError, match="only contains 4: must"):
        group.shrink(only=[4], authority=1)
    with pytest.raises(epic.jax.EpicArgumentError, match="patience_ms is -1"):
        group.shrink(patience_ms=-1)
    group.close()
    sizes: Any = {"max_tokens": 1, "max_row_bytes": 4, "name": "members"}
    with pytest.raises(epic.jax.EpicArgumentError, match="can_shrink is a int"):
        epic.jax.open(**sizes, can_shrink=1)  # type: ignore[arg-type]
    wanted = 'can_shrink is True: must be False with backend "self"'
    with pytest.raises(epic.jax.EpicError, match=wanted):
        epic.jax.open(**sizes, can_shrink=True, backend="self", ranks=[0], num_ranks=1)
    for call in (group.shrink, lambda: group.members):
        with pytest.raises(epic.jax.EpicError, match="not open"):
            call()


def test_lost_process() -> None:
    """Process 3 is killed, then process 1 leaves; the others go on with their programs."""
    said = run("shrink", 4)
    assert [text.split()[-1] for text in said[:3]] == ["right", "left", "right"], said
    assert "gone" in said[3]
