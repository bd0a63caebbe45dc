# SPDX-License-Identifier: Apache-2.0
"""Checks that EPIC_TRACE records the plans of JAX programs, and that layers replay them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import epic
import epic.jax
from conftest import line_of
from forked import server
from steps import numbers

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


LAYER = """
import sys
sys.path.insert(0, sys.argv[2])
import numpy as np
import epic.jax, test_trace
mesh = test_trace.line_of(2)
with epic.jax.open(mesh, "ep", name="layer", max_tokens=8, max_row_bytes=64) as group:
    out = np.asarray(test_trace.layers_on(mesh, group)(None))
np.save(sys.argv[1], out)
"""


def layers_on(mesh: Any, group: Any) -> Callable[..., Any]:
    """Return a compiled function for the outputs of two layers in a row, of 16 tokens.

    Its argument has the ids of each layer, whose router has a bias and would choose other experts.
    None: a router without a bias chooses.
    """
    options = epic.jax.Moe.of(num_experts=8, top_k=2, hidden=8, inner=4, invariant=True)

    def run(forced: Any) -> Any:
        out = [numbers(1, 16, 8)]
        for i in range(2):
            w = epic.jax.MoeWeights(
                w_gate=numbers(2 + i, 8, 8),
                w_gate_up=numbers(4 + i, 8, 8, 8),
                w_down=numbers(6 + i, 8, 4, 8),
                bias=None if forced is None else numbers(8, 8),
            )
            ids = None if forced is None else forced[i]
            out.append(epic.jax.sharded.moe(mesh, group, options, out[-1], w, forced=ids).out)
        return jnp.stack(out[1:])

    return jax.jit(run)


def test_a_trace_is_replayed(tmp_path: Path, opened: Any) -> None:
    """Layers on 1, 2 and 4 devices that use the ids of a trace of 2 devices have its bits."""
    outputs = tmp_path / "out.npy"
    env = {**os.environ, "EPIC_TRACE": str(tmp_path)}
    server("epic.jax", "layers").run(
        LAYER, str(outputs), str(Path(__file__).parent), env=env, timeout=200
    )
    layers = epic.read_trace(tmp_path, num_layers=2)
    assert [len(steps) for steps in layers] == [1, 1]
    ids = [steps[0].topk_idx for steps in layers]
    recorded = np.load(outputs)
    for ranks in (1, 2, 4):
        mesh = line_of(ranks)
        replay = layers_on(mesh, opened(mesh, name=f"of {ranks}"))
        assert np.array_equal(replay(ids), recorded), ranks
    assert not np.array_equal(replay(ids[::-1]), recorded)
