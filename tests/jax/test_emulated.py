# SPDX-License-Identifier: Apache-2.0
"""Runs layers and examples on two emulated hosts over UCX, and on one host, one process per GPU."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from forked import Server, finish
from ports import free_port
from test_processes import LIMIT

LIBRARIES = Path(os.environ.get("EPIC_LIBRARY_PATH", "build/lib").split(":")[0]).resolve()
EMULATED = LIBRARIES.parent / "tests" / "emulated"
HERE = Path(__file__).parent

for needed in (EMULATED / "libepic_hosts.so", LIBRARIES / "libepic_ucx.so"):
    if not needed.exists():
        pytest.skip(f"there is no {needed}: make builds it", allow_module_level=True)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of libraries, as the core loads plugins from its own folder."""
    folder = tmp_path_factory.mktemp("emulated") / "libraries"
    folder.mkdir()
    plugins = [EMULATED / f"libepic_{name}.so" for name in ("cuda", "cuda_regroup", "hosts")]
    own = [LIBRARIES / f"libepic_{name}.so" for name in ("jax", "ucx")]
    for library in (*LIBRARIES.glob("libepic.so*"), *own, *plugins):
        (folder / library.name).symlink_to(library)
    return folder


@pytest.fixture(scope="module")
def emulated(libraries: Path) -> Iterator[Server]:
    """Return a server of processes with a GPU."""
    found = Server("epic.jax", "rounded", env=environment_of(libraries))
    yield found
    found.close()


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


def losses(emulated: Server, libraries: Path, backend: str, **more: str) -> list[list[float]]:
    """Return the output of each rank of emulated_worker.py."""
    port, program = str(free_port()), str(HERE / "emulated_worker.py")
    env = environment_of(libraries, **more)
    running = [emulated.start(program, backend, str(rank), port, env=env) for rank in range(2)]
    return [[float.fromhex(word) for word in out.split()] for out in finish(running, LIMIT)]


@pytest.mark.night
def test_on_two_hosts(emulated: Server, libraries: Path) -> None:
    """The losses on two hosts have the bits of those on one host."""
    hosts = losses(emulated, libraries, "hosts", EPIC_HOST="%r")
    one = losses(emulated, libraries, "p2p")
    assert hosts == one
    assert all(loss[-1] < loss[0] for loss in hosts), hosts


night = pytest.mark.night


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=night), 2, pytest.param(4, marks=night)])
def test_experts_in_e4m3(emulated: Server, libraries: Path, ranks: int) -> None:
    """Layers in e4m3 and quantized flat rows match loops in float64; tokens are unequal."""
    port, program = str(free_port()), str(HERE / "emulated_e4m3.py")
    env = environment_of(libraries)
    running = [
        emulated.start(program, str(rank), str(ranks), port, env=env) for rank in range(ranks)
    ]
    said = finish(running, LIMIT)
    assert all(out.splitlines()[-1:] == ["right"] for out in said), said


def test_members(emulated: Server, libraries: Path) -> None:
    """Two ranks of one host continue without the third, with the program compiled before."""
    port, program = str(free_port()), str(HERE / "emulated_members.py")
    env = environment_of(libraries)
    running = [emulated.start(program, str(rank), port, env=env) for rank in range(3)]
    said = finish(running, LIMIT)
    assert all(out.splitlines()[-1:] == ["right"] for out in said), said


def example(
    emulated: Server, libraries: Path, name: str, host: str, hosts: int, *options: str
) -> None:
    """Runs an example as four processes, without its launcher."""
    env = environment_of(
        libraries,
        EPIC_TEST_EXAMPLE=name,
        EPIC_TEST_BACKEND="hosts" if hosts > 1 else "p2p",
        EPIC_TEST_HOSTS=str(hosts),
        EPIC_HOST=host,
    )
    words = ["--processes", "4", *options, "--port", str(free_port()), "--process"]
    program = str(HERE / "emulated_example.py")
    finish([emulated.start(program, *words, str(process), env=env) for process in range(4)], LIMIT)


@pytest.mark.parametrize(
    ("host", "ep"),
    [pytest.param("%r/2", "4", id="2x2"), pytest.param("%r", "2", id="2x1_twice", marks=night)],
)
def test_stacked_layers_on_two_hosts(emulated: Server, libraries: Path, host: str, ep: str) -> None:
    """Compare examples/jax/ep_moe.py with its loops in float64: a group of two ranks on each host,
    and two groups at the same time with one rank on each host."""
    example(emulated, libraries, "ep_moe", host, 2, "--ep", ep, "--steps", "1", "--check")


def trained(emulated: Server, libraries: Path, host: str, hosts: int) -> list[str]:
    """Run three steps of examples/jax/train_text.py; return all digits of each loss and the
    weights. The learning rate of the first step is 0, so one step is not enough."""
    losses = libraries.parent / f"losses_of_{hosts}"
    options = ["--steps", "3", "--losses", str(losses), "--picture", f"{losses}.png", "LICENSE"]
    example(emulated, libraries, "train_text", host, hosts, *options)
    return losses.read_text().split() + [Path(f"{losses}.{i}").read_text() for i in range(4)]


@pytest.mark.skipif("EPIC_TEST_EXAMPLES" not in os.environ, reason="minutes: EPIC_TEST_EXAMPLES=1")
def test_training_on_two_hosts(emulated: Server, libraries: Path) -> None:
    """Training on two hosts of two ranks and on four of one has the bits of one host."""
    one = trained(emulated, libraries, "one", 1)
    assert len(one) == 3 + 4
    assert trained(emulated, libraries, "%r/2", 2) == one
    assert trained(emulated, libraries, "%r", 4) == one
