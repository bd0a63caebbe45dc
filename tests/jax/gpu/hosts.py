# SPDX-License-Identifier: Apache-2.0
"""Trains a layer on ranks that act as hosts, and on the same ranks as one host. Losses and weights
must have the same bits.

hosts.py [RANKS] starts 2 processes by default, which may share a GPU. EPIC_NET selects the net, and
EPIC_NET_MEMORY the memory that it reads and writes (gpu for the net "local"). On several hosts sums
use a tree by default; on one host the program selects the tree.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

STEPS, TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 8, 48, 64, 96, 8, 3
RATE = 0.05
LIMIT = 120  # seconds


def train(rank: int, ranks: int, port: int, apart: bool) -> list[Any]:
    """Return the losses of this rank, then its weights. The core selects the backend."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import epic.jax

    def drawn(seed: int, *shape: int) -> Any:
        return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)

    group = epic.jax.open(
        ranks=[rank],
        num_ranks=ranks,
        bootstrap=epic.jax.Tcp(port=port),
        max_tokens=TOKENS,
        max_row_bytes=4 * HIDDEN,
        max_top_k=TOP_K,
        timeout_ms=60000,
    )
    local, layer = EXPERTS // ranks, epic.jax.Layer(EXPERTS, TOP_K)
    if not apart:
        layer = replace(layer, sum_order="tree")
    options = epic.jax.Moe(
        layer,
        epic.jax.Router(EXPERTS, TOP_K, normalize="sum"),
        epic.jax.Experts(local, HIDDEN, INNER),
    )
    weights = {
        "w_gate": drawn(1, HIDDEN, EXPERTS) / HIDDEN**0.5,
        "w_gate_up": drawn(10 + rank, local, HIDDEN, 2 * INNER) / HIDDEN**0.5,
        "w_down": drawn(20 + rank, local, INNER, HIDDEN) / INNER**0.5,
    }
    x = drawn(30 + rank, TOKENS, HIDDEN)

    def loss_of(weights: dict[str, Any]) -> Any:
        found = epic.jax.moe(group, options, x, epic.jax.MoeWeights(**weights))
        return jnp.square(found.out - jnp.sin(2 * x)).mean() + found.loss

    def step(weights: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        loss, grads = jax.value_and_grad(loss_of)(weights)
        grads["w_gate"] = epic.jax.sum(group, grads["w_gate"])
        return loss, {name: w - RATE * grads[name] for name, w in weights.items()}

    run, losses = jax.jit(step), []
    for _ in range(STEPS):
        loss, weights = run(weights)
        losses.append(float(loss))
    found = [np.array(losses), *(np.asarray(weights[name]) for name in sorted(weights))]
    epic.jax.check(group)
    group.close()
    return found


def of_rank(rank: int, ranks: int, port: int) -> int:
    """Run one process."""
    import numpy as np

    os.environ["EPIC_HOST"] = "%r"
    there = train(rank, ranks, port, True)
    del os.environ["EPIC_HOST"]
    here = train(rank, ranks, port + 1, False)
    assert there[0][-1] < there[0][0], there[0]
    for a, b in zip(there, here, strict=True):
        assert np.isfinite(a).all()
        assert np.array_equal(a, b), f"{np.abs(a - b).max()} of {np.abs(b).max()}"
    print(f"rank {rank}: losses {there[0][0]:.6f} to {there[0][-1]:.6f}, the same bits", flush=True)
    return 0


def main(words: list[str]) -> int:
    """Run all processes, which use the GPUs in turn."""
    if len(words) == 3:
        return of_rank(*map(int, words))
    from ports import free_port

    ranks, port = int(words[0]) if words else 2, free_port()
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    gpus = len(listed.stdout.splitlines())
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(ranks), str(port)],
            env={
                **os.environ,
                "CUDA_VISIBLE_DEVICES": str(rank % gpus),
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            },
        )
        for rank in range(ranks)
    ]
    try:
        codes = [process.wait(LIMIT) for process in processes]
    except subprocess.TimeoutExpired:
        codes = [1]
    finally:
        for process in processes:
            process.kill()
    print("right" if not any(codes) else "wrong")
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
