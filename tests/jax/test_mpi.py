# SPDX-License-Identifier: Apache-2.0
"""Tests groups over MPI: dp x ep inside one mpirun."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import epic.jax
from epic import _native, bootstrapping
from ports import free_port
from test_processes import LIMIT

WORKER = Path(__file__).with_name("mpi_worker.py")
PERMIT = {  # for Open MPI 4 and 5: run as root, and more processes than cores
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
}


def mpiexec() -> str:
    """Return mpirun of the MPI that the plugin was built for."""
    name = shutil.which(os.environ.get("EPIC_MPIEXEC", "mpiexec"))
    if name is None:
        pytest.skip("there is no mpiexec (Debian: openmpi-bin)")
    try:
        _native.find("libepic_mpi.so")
    except ImportError:
        pytest.skip("libepic was built without MPI (Debian: libopenmpi-dev)")
    return name


def test_in_one_mpirun() -> None:
    """Check a mesh over jax.distributed, and communicators without it: correct results over backend
    mpi, and every process ends with status 0."""
    words = [mpiexec(), "-n", "4", sys.executable, str(WORKER), str(free_port())]
    done = subprocess.run(
        words, env=os.environ | PERMIT, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    for word in ("mesh", "refused", "communicators"):
        assert done.stdout.count(word) == 4, done.stdout  # lines of several processes may mix


def test_what_native_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that native may be "world", an address, or a communicator of mpi4py."""
    assert bootstrapping.address_of("world") is None
    assert bootstrapping.address_of(1 << 40) == 1 << 40
    comm = object()

    def address(given: Any) -> int:
        if given is not comm:
            raise TypeError(given)
        return 12345678

    package = SimpleNamespace(_addressof=address)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=package))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", package)
    assert bootstrapping.address_of(comm) == 12345678
    for wrong in (True, 0, "wordl", object()):
        with pytest.raises(epic.jax.EpicArgumentError, match=r"native .*: must be 'world', a"):
            epic.jax.open(native=wrong, max_tokens=1, max_row_bytes=4)
