# SPDX-License-Identifier: Apache-2.0
"""What the core does on GPUs, called through the operators: on the emulator of tests/emulator."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIBRARIES = Path(os.environ.get("EPIC_LIBRARY_PATH", "build/lib").split(":")[0]).resolve()
EMULATED = LIBRARIES.parent / "tests" / "emulated"
SCRIPT = Path(__file__).parent / "emulated.py"

if not (EMULATED / "libepic_cuda.so").exists():
    pytest.skip(f"there is no emulator in {EMULATED}: make builds it", allow_module_level=True)


def test_on_a_gpu_of_threads(tmp_path: Path) -> None:
    """Plugins lie beside the core: so it finds the emulated one."""
    for library in (*LIBRARIES.glob("libepic.so*"), LIBRARIES / "libepic_torch.so"):
        (tmp_path / library.name).symlink_to(library)
    (tmp_path / "libepic_cuda.so").symlink_to(EMULATED / "libepic_cuda.so")
    environment = os.environ | {
        "EPIC_LIBRARY_PATH": str(tmp_path),
        "LD_PRELOAD": str(EMULATED / "libemulator.so"),
        "CUDA_LAUNCH_BLOCKING": "1",
        "EMULATED_GPUS": "2",
        "EMULATED_SMS": "4",
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.stdout.splitlines()[-1:] == ["right"], done.stdout + done.stderr
