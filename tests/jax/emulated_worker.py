# SPDX-License-Identifier: Apache-2.0
"""One rank of test_emulated.py: emulated_worker.py BACKEND RANK PORT.

BACKEND is the backend that the core must select for these GPUs. An emulated GPU (tests/emulator)
uses host memory, so it can access arrays on JAX's CPU device. Each rank is a process with one GPU.
JAX has no stream here on which it could wait, so CUDA_LAUNCH_BLOCKING is set.
"""

import importlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import epic.jax
from epic import _native
from epic.jax import call, groups

RANKS, STEPS, TOKENS, HIDDEN, INNER, EXPERTS = 2, 2, 6, 16, 24, 4


def numbers(seed: int, *shape: int) -> Any:
    """Return random normal numbers."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def trained(group: epic.jax.Group, rank: int, **wish: Any) -> list[str]:
    """Return the losses of a layer that learns to return its tokens, for comparison of bits."""
    options = epic.jax.Moe.of(
        num_experts=EXPERTS, top_k=2, hidden=HIDDEN, inner=INNER, balance_coeff=0.1, **wish
    )
    local, first = EXPERTS // RANKS, rank * EXPERTS // RANKS
    w = epic.jax.MoeWeights(
        w_gate=numbers(1, HIDDEN, EXPERTS),
        w_gate_up=numbers(2, EXPERTS, HIDDEN, 2 * INNER)[first : first + local] / 4,
        w_down=numbers(3, EXPERTS, INNER, HIDDEN)[first : first + local] / 4,
    )
    x = numbers(4 + rank, TOKENS, HIDDEN)

    def loss_of(w: Any) -> Any:
        found = epic.jax.moe(group, options, x, w)
        return jnp.square(found.out - x).mean() + found.loss

    step = jax.jit(jax.value_and_grad(loss_of))
    said = []
    for _ in range(STEPS):
        loss, d_w = step(w)
        # the other gradients are already complete
        gate = jax.jit(lambda d: epic.jax.sum(group, d))(d_w.w_gate)
        w = jax.tree.map(lambda a, d: a - 0.05 * d, w, d_w._replace(w_gate=gate))
        said.append(float(loss).hex())
    epic.jax.check(group)
    return said


def in_tree(group: epic.jax.Group, **wish: Any) -> bool:
    """Return whether the rows of a plan are added in a tree."""
    layer = epic.jax.Layer(EXPERTS, 1, **wish)
    plan = jax.jit(lambda ids: epic.jax.plan(group, layer, ids).bytes)
    data = np.asarray(plan(jnp.zeros((1, 1), jnp.int32)))[: group.plan_bytes(layer)].copy()
    info = _native.PlanInfo()
    _native.check(
        _native.core().epic_plan_read_v1(data.ctypes.data, data.size, *_native.sized(info))
    )
    return info.num_leaves > 0


def take_cpus_for_gpus(backend: str) -> None:
    """Let the core treat CPU devices as GPUs, and reserve the memory that GPUs need for a layer."""
    # import_module, because the package has a function of the same name
    layers: Any = importlib.import_module("epic.jax.moe")
    opening: Any = groups
    opening.choose_backend = lambda *_: backend
    layers.memory_specs = lambda query, _: call.memory_specs(query, None)


def main(backend: str, rank: int, port: int) -> None:
    """Run the layers in the default order of several hosts, and in a tree."""
    take_cpus_for_gpus("gpu")
    bootstrap = epic.jax.Tcp("127.0.0.1", port)
    sizes: Any = {"max_tokens": 16, "max_row_bytes": 256, "max_top_k": 2, "timeout_ms": 120000}
    where: Any = {"ranks": [rank], "num_ranks": RANKS, "bootstrap": bootstrap}
    with epic.jax.open(**where, **sizes) as group:
        assert in_tree(group) == (backend == "hosts") and not in_tree(group, sum_order="by_rank")
        left = {} if backend == "hosts" else {"sum_order": "tree"}
        print(*trained(group, rank, **left), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
