# SPDX-License-Identifier: Apache-2.0
"""Tests Group.waits of epic.jax: a table for each rank of this process."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import epic
import epic.jax
from conftest import make_mesh


@pytest.mark.parametrize("ep", [2, 4])
def test_tables(opened: Callable[..., Any], ep: int) -> None:
    """Each rank of each group has a table, and the text for Prometheus has no sample twice."""
    mesh = make_mesh(ep)
    group = opened(mesh)
    layer = epic.jax.Layer(num_experts=8, top_k=1)
    ids = np.zeros((8, 1), np.int32)

    def load(ids: Any) -> Any:
        return epic.jax.plan(group, layer, ids).load

    spec = P(("dp", "ep"))
    run = jax.jit(jax.shard_map(load, mesh=mesh, in_specs=spec, out_specs=spec))
    for _ in range(3):
        run(ids).block_until_ready()
    found = group.waits()
    names = ["epic"] if ep == 4 else ["epic/0", "epic/1"]
    assert sorted((w.group, w.rank) for w in found) == [(n, r) for n in names for r in range(ep)]
    for waits in found:
        for wait in waits.table:
            assert wait.num_operations == (3 if wait.operation == "plan" else 0)
            assert wait.seconds >= wait.alone_seconds >= 0.0
            assert wait.peer != waits.rank or wait.seconds == 0.0
    assert any(wait.seconds > 0 for waits in found for wait in waits.table)
    samples = [
        line.rpartition(" ")[0]
        for line in epic.format_prometheus(found).splitlines()
        if not line.startswith("#")
    ]
    assert len(samples) == len(set(samples)) > 0
    group.close()
    with pytest.raises(epic.EpicError, match="not open in this process"):
        group.waits()
