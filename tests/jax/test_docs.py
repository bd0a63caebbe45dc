# SPDX-License-Identifier: Apache-2.0
"""The programs of docs/jax.md run as they stand there."""

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

GUIDE = Path(__file__).resolve().parents[2] / "docs/jax.md"
CHECKS = """
assert out.shape == (8, 64, 256) and out.dtype == jnp.bfloat16 and 0 < loss < 1
assert first.shape == out.shape and first.dtype == jnp.float32
assert np.count_nonzero(state["moe"]["expert_bias"])
"""


@pytest.mark.thorough
def test_the_guide() -> None:
    """Its layer, and then its module, in one session."""
    pytest.importorskip("flax")
    indented = re.findall(r"(?:^(?: {4}.*)?\n)+", GUIDE.read_text(), re.MULTILINE)
    layer, module = (b for b in map(dedent, indented) if b.lstrip().startswith("import "))
    program = layer + "first = out\n" + module + CHECKS
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240, env=env)
