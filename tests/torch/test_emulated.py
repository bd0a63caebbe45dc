# SPDX-License-Identifier: Apache-2.0
"""Runs the operators on GPU contexts of the emulator (tests/emulator)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIBRARIES = Path(os.environ.get("EPIC_LIBRARY_PATH", "build/lib").split(":")[0]).resolve()
EMULATED = LIBRARIES.parent / "tests" / "emulated"

if not (EMULATED / "libepic_cuda.so").exists():
    pytest.skip(f"there is no emulator in {EMULATED}: make builds it", allow_module_level=True)


def environment_of(folder: Path, plugins: tuple[str, ...], **more: str) -> dict[str, str]:
    """Return an environment in which the core finds the emulated plugins in its own folder."""
    names = ("libepic_torch.so", "libepic_ucx.so")
    own = [path for path in (LIBRARIES / name for name in names) if path.exists()]
    for library in (*LIBRARIES.glob("libepic.so*"), *own):
        (folder / library.name).symlink_to(library)
    for plugin in plugins:
        (folder / plugin).symlink_to(EMULATED / plugin)
    return os.environ | {
        "EPIC_LIBRARY_PATH": str(folder),
        "LD_PRELOAD": str(EMULATED / "libemulator.so"),
        "CUDA_LAUNCH_BLOCKING": "1",
        "EMULATED_SMS": "4",
        **more,
    }


def run(script: str, folder: Path, plugins: tuple[str, ...], *words: str, **more: str) -> None:
    """Run the script; the last line of its output must be "right"."""
    environment = environment_of(folder, plugins, **more)
    command = [sys.executable, str(Path(__file__).parent / script), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.stdout.splitlines()[-1:] == ["right"], done.stdout + done.stderr


@pytest.mark.parametrize("words", [["quick"], pytest.param([], marks=pytest.mark.night)])
def test_on_a_gpu_of_threads(tmp_path: Path, words: list[str]) -> None:
    """Check two ranks of one host."""
    more = {"EMULATED_GPUS": "3", "EPIC_NCCL": str(EMULATED / "nccl" / "libnccl.so.2")}
    run("emulated.py", tmp_path, ("libepic_cuda.so", "libepic_cuda_regroup.so"), *words, **more)


@pytest.mark.night
def test_on_two_hosts(tmp_path: Path) -> None:
    """Check two hosts of two ranks each."""
    plugins = ("libepic_cuda.so", "libepic_hosts.so", "libepic_chaos.so")
    net = {"EPIC_NET": "chaos", "EPIC_NET_MEMORY": "host"}
    run("emulated_hosts.py", tmp_path, plugins, EMULATED_GPUS="4", **net)


def example(folder: Path, backend: str, **more: str) -> list[str]:
    """Run three steps of examples/torch/train_text.py with four processes; return all digits of
    each loss and the weights. The learning rate of the first step is 0, so one step is not enough.
    """
    folder.mkdir()
    losses = folder / "losses"
    script = str(Path(__file__).parent / "emulated_text.py")
    options = ["--processes", "4", "--steps", "3", "--losses", str(losses)]
    command = [sys.executable, script, backend, *options, "--picture", str(folder / "load.png")]
    plugins = ("libepic_cuda.so", "libepic_hosts.so")
    of_all = {"EMULATED_GPUS": "4", "UCX_LOG_LEVEL": "fatal", "UCX_ERROR_SIGNALS": "", **more}
    environment = environment_of(folder, plugins, **{**of_all, "EMULATED_SMS": "16"})
    subprocess.run([*command, str(script)], env=environment, check=True, timeout=900)
    return losses.read_text().split() + [Path(f"{losses}.{i}").read_text() for i in range(4)]


@pytest.mark.skipif("EPIC_TEST_EXAMPLES" not in os.environ, reason="minutes: EPIC_TEST_EXAMPLES=1")
def test_example_on_two_hosts(tmp_path: Path) -> None:
    """Check that two hosts of two ranks, over UCX, learn the same as one host, bit by bit."""
    one = example(tmp_path / "p2p", "p2p")
    assert len(one) == 3 + 4
    assert example(tmp_path / "2x2", "hosts", EPIC_HOST="%r/2") == one
    assert example(tmp_path / "4x1", "hosts", EPIC_HOST="%r") == one
