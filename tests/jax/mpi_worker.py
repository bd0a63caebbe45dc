# SPDX-License-Identifier: Apache-2.0
"""One process of test_mpi.py, started by mpiexec: mpi_worker.py PORT.

It runs dp x ep groups in one mpirun: as a mesh over jax.distributed, and as communicators without
it.
"""

import ctypes
import os
import sys
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import epic.jax
import layers
from epic import _native
from worker import SIZES, initialize, place, say, whole

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
DP = EP = 2


def backend(group: epic.jax.Group) -> str:
    """Return the name of the backend of this process's one context."""
    (context,) = epic.jax.groups.contexts_of(group)
    return _native.core().epic_backend_name(context).decode()


def split(color: int, key: int) -> Any:
    """Return the handle of an MPI_Comm_split of the world."""
    mpi = ctypes.CDLL(str(_native.find("libepic_mpi.so")))
    if hasattr(mpi, "ompi_mpi_comm_world"):
        found: Any = ctypes.c_void_p()
        world: Any = ctypes.c_void_p(
            ctypes.addressof(ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world"))
        )
    else:
        found, world = ctypes.c_int(), ctypes.c_int(0x44000000)
    assert mpi.MPI_Comm_split(world, color, key, ctypes.byref(found)) == 0
    return found


def check_mesh() -> None:
    """Run groups of two ranks, each every other process; the mesh reverses the devices."""
    mesh = Mesh(np.array(jax.devices())[::-1].reshape(EP, DP).T, ("dp", "ep"))
    case = layers.CASES["normalized"]
    with epic.jax.open(mesh, "ep", native="world", backend="mpi", **SIZES) as group:
        assert backend(group) == "mpi"
        x, ct = (place(mesh, v, P(("dp", "ep"))) for v in layers.arrays())
        w = {n: place(mesh, v, P()) for n, v in layers.weights(case).items()}
        got = jax.tree.map(whole, layers.step(mesh, group, case)(x, w, ct))
        layers.compare(got, layers.true_step(case, DP))
    say("mesh")


def check_communicators() -> None:
    """Run a group whose ranks are those of a communicator, not of the world."""
    number = RANK // EP
    mine = split(number, -RANK)  # the communicator has the ranks in reverse order
    with epic.jax.open(native=ctypes.addressof(mine), backend="mpi", **SIZES) as group:
        assert group.num_ranks == EP and backend(group) == "mpi"
        layer = epic.jax.Layer(EP, 1)

        def step(x: Any) -> Any:  # send all tokens to the expert of the group's last rank
            ids = jnp.full((3, 1), EP - 1, jnp.int32)
            plan, recv, _ = epic.jax.plan_dispatch(group, layer, ids, x)
            return epic.jax.sum(group, x), plan.expert_tokens, epic.jax.combine(plan, 2 * recv)

        x = jnp.full((3, 5), RANK + 1.0, jnp.float32)
        total, tokens, out = jax.jit(step)(x)
        others = [r + 1.0 for r in range(DP * EP) if r // EP == number]
        assert np.array_equal(total, np.full((3, 5), sum(others)))
        assert np.array_equal(out, 2 * x)
        is_last = RANK % EP == 0  # because the keys of the communicator are negative
        assert tokens.tolist() == [3 * EP if is_last else 0]
    with epic.jax.open(native="world", name="all", **SIZES) as group:
        assert group.num_ranks == DP * EP
        assert float(jax.jit(lambda v: epic.jax.sum(group, v))(jnp.ones(1))[0]) == DP * EP
    try:
        epic.jax.open(native="world", num_ranks=EP, **SIZES)
    except epic.jax.EpicArgumentError as error:
        assert f"of {DP * EP}, as in the communicator that native names" in str(error), error
        say("refused")
    say("communicators")


if __name__ == "__main__":
    initialize(RANK, DP * EP, int(sys.argv[1]))
    check_mesh()
    check_communicators()
