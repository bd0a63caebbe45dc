# SPDX-License-Identifier: Apache-2.0
"""Checks that EPIC_TRACE records the plans of JAX programs."""

import os
from pathlib import Path

import numpy as np

from forked import server

PROGRAM = """
import jax, numpy as np
from jax.sharding import PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 2)
import epic.jax
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ep",))
group = epic.jax.open(mesh, "ep", name="traced", max_tokens=4, max_row_bytes=64)
layer = epic.jax.Layer(num_experts=8, top_k=2)
ids = np.array([[7, 0], [3, -1], [2, 5], [1, 6]], np.int32)
def load(ids):
    return epic.jax.plan(group, layer, ids).load
out = jax.jit(jax.shard_map(load, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))(ids)
out.block_until_ready()
epic.jax.close(group)
"""


def test_ids_are_recorded(tmp_path: Path) -> None:
    """One environment variable makes every rank record (docs/guide/traces.md)."""
    server("epic.jax", "layers").run(
        PROGRAM, env={**os.environ, "EPIC_TRACE": str(tmp_path)}, timeout=200
    )
    for rank, ids in enumerate(([7, 0, 3, 255], [2, 5, 1, 6])):
        (file,) = tmp_path.glob(f"traced-*-{rank}.epictrace")
        data = file.read_bytes()
        tokens, top_k, experts = np.frombuffer(data[128 + 40 : 128 + 56], "<i8,<u4,<u4")[0]
        assert (tokens, top_k, experts) == (2, 2, 8)
        assert list(data[192:196]) == ids
