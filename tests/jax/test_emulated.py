# SPDX-License-Identifier: Apache-2.0
"""Runs layers and examples on two emulated hosts over UCX, and on one host, one process per GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from test_processes import LIMIT, free_port

LIBRARIES = Path(os.environ.get("EPIC_LIBRARY_PATH", "build/lib").split(":")[0]).resolve()
EMULATED = LIBRARIES.parent / "tests" / "emulated"
HERE = Path(__file__).parent

for needed in (EMULATED / "libepic_hosts.so", LIBRARIES / "libepic_ucx.so"):
    if not needed.exists():
        pytest.skip(f"there is no {needed}: make builds it", allow_module_level=True)


@pytest.fixture
def libraries(tmp_path: Path) -> Path:
    """Return a folder of libraries, as the core loads plugins from its own folder."""
    folder = tmp_path / "libraries"
    folder.mkdir()
    plugins = [EMULATED / f"libepic_{name}.so" for name in ("cuda", "hosts")]
    own = [LIBRARIES / f"libepic_{name}.so" for name in ("jax", "ucx")]
    for library in (*LIBRARIES.glob("libepic.so*"), *own, *plugins):
        (folder / library.name).symlink_to(library)
    return folder


def environment_of(libraries: Path, **more: str) -> dict[str, str]:
    """Return the environment of a process with a GPU."""
    return os.environ | {
        "EPIC_LIBRARY_PATH": str(libraries),
        "LD_PRELOAD": str(EMULATED / "libemulator.so"),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        "CUDA_LAUNCH_BLOCKING": "1",
        "EMULATED_SMS": "16",
        "UCX_LOG_LEVEL": "fatal",
        "UCX_ERROR_SIGNALS": "",
        **more,
    }


def losses(libraries: Path, backend: str, **more: str) -> list[list[float]]:
    """Return the output of each rank of emulated_worker.py."""
    port = str(free_port())
    running = [
        subprocess.Popen(
            [sys.executable, str(HERE / "emulated_worker.py"), backend, str(rank), port],
            env=environment_of(libraries, **more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=LIMIT) for process in running]
    assert not any(process.returncode for process in running), said
    return [[float.fromhex(word) for word in out.split()] for out, _ in said]


def test_on_two_hosts(libraries: Path) -> None:
    """The losses on two hosts have the bits of those on one host."""
    hosts, one = losses(libraries, "hosts", EPIC_HOST="%r"), losses(libraries, "p2p")
    assert hosts == one
    assert all(loss[-1] < loss[0] for loss in hosts), hosts


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_experts_in_e4m3(libraries: Path, ranks: int) -> None:
    """Layers in e4m3 and quantized flat rows match loops in float64; tokens are unequal."""
    port = str(free_port())
    running = [
        subprocess.Popen(
            [sys.executable, str(HERE / "emulated_e4m3.py"), str(rank), str(ranks), port],
            env=environment_of(libraries),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    said = [process.communicate(timeout=LIMIT) for process in running]
    assert all(out.splitlines()[-1:] == ["right"] for out, _ in said), said


def example(libraries: Path, name: str, host: str, hosts: int, *options: str) -> None:
    """Runs an example as four processes."""
    environment = environment_of(
        libraries,
        EPIC_TEST_EXAMPLE=name,
        EPIC_TEST_BACKEND="hosts" if hosts > 1 else "p2p",
        EPIC_TEST_HOSTS=str(hosts),
        EPIC_HOST=host,
    )
    command = [sys.executable, str(HERE / "emulated_example.py"), "--processes", "4", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("host", "ep"), [("%r/2", "4"), ("%r", "2")], ids=["2x2", "2x1_twice"])
def test_stacked_layers_on_two_hosts(libraries: Path, host: str, ep: str) -> None:
    """Compare examples/jax/ep_moe.py with its loops in float64: a group of two ranks on each host,
    and two groups at the same time with one rank on each host."""
    example(libraries, "ep_moe", host, 2, "--ep", ep, "--steps", "1", "--check")


def trained(libraries: Path, host: str, hosts: int) -> list[str]:
    """Run three steps of examples/jax/train_text.py; return all digits of each loss and the
    weights. The learning rate of the first step is 0, so one step is not enough."""
    losses = libraries.parent / f"losses_of_{hosts}"
    options = ["--steps", "3", "--losses", str(losses), "--picture", f"{losses}.png", "LICENSE"]
    example(libraries, "train_text", host, hosts, *options)
    return losses.read_text().split() + [Path(f"{losses}.{i}").read_text() for i in range(4)]


@pytest.mark.skipif("EPIC_TEST_EXAMPLES" not in os.environ, reason="minutes: EPIC_TEST_EXAMPLES=1")
def test_training_on_two_hosts(libraries: Path) -> None:
    """Training on two hosts of two ranks and on four of one has the bits of one host."""
    one = trained(libraries, "one", 1)
    assert len(one) == 3 + 4
    assert trained(libraries, "%r/2", 2) == one
    assert trained(libraries, "%r", 4) == one
