# SPDX-License-Identifier: Apache-2.0
"""What the core does on GPUs, called through the operators: on the emulator of tests/emulator."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIBRARIES = Path(os.environ.get("EPIC_LIBRARY_PATH", "build/lib").split(":")[0]).resolve()
EMULATED = LIBRARIES.parent / "tests" / "emulated"

if not (EMULATED / "libepic_cuda.so").exists():
    pytest.skip(f"there is no emulator in {EMULATED}: make builds it", allow_module_level=True)


def run(script: str, folder: Path, plugins: tuple[str, ...], **more: str) -> None:
    """Plugins lie beside the core: so it finds the emulated ones."""
    for library in (*LIBRARIES.glob("libepic.so*"), LIBRARIES / "libepic_torch.so"):
        (folder / library.name).symlink_to(library)
    for plugin in plugins:
        (folder / plugin).symlink_to(EMULATED / plugin)
    environment = os.environ | {
        "EPIC_LIBRARY_PATH": str(folder),
        "LD_PRELOAD": str(EMULATED / "libemulator.so"),
        "CUDA_LAUNCH_BLOCKING": "1",
        "EMULATED_SMS": "4",
        **more,
    }
    command = [sys.executable, str(Path(__file__).parent / script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.stdout.splitlines()[-1:] == ["right"], done.stdout + done.stderr


def test_on_a_gpu_of_threads(tmp_path: Path) -> None:
    """Two ranks, of one host."""
    run("emulated.py", tmp_path, ("libepic_cuda.so",), EMULATED_GPUS="2")


def test_on_two_hosts(tmp_path: Path) -> None:
    """Of two ranks each."""
    plugins = ("libepic_cuda.so", "libepic_hosts.so", "libepic_chaos.so")
    run("emulated_hosts.py", tmp_path, plugins, EMULATED_GPUS="4", EPIC_WIRE="chaos")
