# SPDX-License-Identifier: Apache-2.0
"""A layer on two hosts, and on one: GPUs of threads (tests/emulator), a process each, by UCX."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from test_processes import LIMIT, free_port

LIBRARIES = Path(os.environ.get("EPIC_LIBRARY_PATH", "build/lib").split(":")[0]).resolve()
EMULATED = LIBRARIES.parent / "tests" / "emulated"
WORKER = Path(__file__).with_name("emulated_worker.py")

for needed in (EMULATED / "libepic_hosts.so", LIBRARIES / "libepic_ucx.so"):
    if not needed.exists():
        pytest.skip(f"there is no {needed}: make builds it", allow_module_level=True)


def losses(folder: Path, backend: str) -> list[list[float]]:
    """Of each rank."""
    port = str(free_port())
    environment = os.environ | {
        "EPIC_LIBRARY_PATH": str(folder),
        "LD_PRELOAD": str(EMULATED / "libemulator.so"),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        "CUDA_LAUNCH_BLOCKING": "1",
        "EMULATED_SMS": "16",
        "UCX_LOG_LEVEL": "fatal",
        "UCX_ERROR_SIGNALS": "",
        **({"EPIC_HOST": "%r"} if backend == "hosts" else {}),
    }
    running = [
        subprocess.Popen(
            [sys.executable, str(WORKER), backend, str(rank), port],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=LIMIT) for process in running]
    assert not any(process.returncode for process in running), said
    return [[float.fromhex(word) for word in out.split()] for out, _ in said]


def test_on_two_hosts(tmp_path: Path) -> None:
    """The losses of one host, bit for bit.  Plugins lie beside the core: so it finds them."""
    plugins = [EMULATED / f"libepic_{name}.so" for name in ("cuda", "hosts")]
    own = [LIBRARIES / f"libepic_{name}.so" for name in ("jax", "ucx")]
    for library in (*LIBRARIES.glob("libepic.so*"), *own, *plugins):
        (tmp_path / library.name).symlink_to(library)
    hosts, one = (losses(tmp_path, backend) for backend in ("hosts", "p2p"))
    assert hosts == one
    assert all(loss[-1] < loss[0] for loss in hosts), hosts
