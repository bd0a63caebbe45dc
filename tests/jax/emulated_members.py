# SPDX-License-Identifier: Apache-2.0
"""One rank of test_emulated.py: emulated_members.py RANK PORT. The last line is "right".

Three ranks on emulated GPUs sum in a compiled program. Rank 1 leaves, and the others continue with
the same program. Then a group without can_shrink is opened, which cannot continue without a rank.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import epic.jax
from emulated_worker import take_cpus_for_gpus

RANKS, LEFT = 3, 1
SIZES: dict[str, Any] = {"max_tokens": 16, "max_row_bytes": 64, "timeout_ms": 120000}


def shrink(group: epic.jax.Group, rank: int) -> None:
    """Check the sums before and after a rank leaves."""
    traced = []

    def total(x: Any) -> Any:
        traced.append(1)
        return epic.jax.sum(group, x)

    program, x = jax.jit(total), jnp.full(4, 2.0**rank)
    assert np.array_equal(program(x), np.full(4, 7.0))
    if rank == LEFT:
        group.leave(step=5)
        return
    (members,) = group.shrink(step=5 + rank)
    assert members == epic.Members(1, (0, 2), (LEFT,), 5, 7), members
    assert np.array_equal(program(x), np.full(4, 5.0)) and len(traced) == 1


def main(rank: int, port: int) -> None:
    """Run a rank."""
    take_cpus_for_gpus("gpu")
    where: dict[str, Any] = {"ranks": [rank], "num_ranks": RANKS}
    bootstrap = epic.jax.Tcp("127.0.0.1", port)
    with epic.jax.open(**where, **SIZES, bootstrap=bootstrap, can_shrink=True) as group:
        shrink(group, rank)
    if rank != LEFT:
        alone: dict[str, Any] = {"ranks": [0], "num_ranks": 1}
        with epic.jax.open(**alone, **SIZES) as group:
            try:
                group.shrink()
            except epic.jax.EpicError as error:
                assert error.code == "EPIC_ENOTSUP"
                assert 'can_shrink is False, and the backend is "p2p"' in str(error), error
            else:
                raise AssertionError("shrink raised no error")
    print("right")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
