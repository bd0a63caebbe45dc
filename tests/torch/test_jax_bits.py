# SPDX-License-Identifier: Apache-2.0
"""Checks that PyTorch and JAX compute the same bits of a layer, if both are installed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
from test_moe import EXPERT_WEIGHTS, layer_step

HERE = Path(__file__).parent
# Look for JAX without importing it: this process uses torch, and JAX runs in a process of its own.
if importlib.util.find_spec("jax") is None:
    pytest.skip("JAX is not installed: make test-torch-adapters", allow_module_level=True)

IN_JAX = """
import sys, numpy as np
sys.path[:0] = [{here!r}]
import conftest, epic.jax, layers
mesh = conftest.make_mesh(4)
x, ct = layers.arrays()
with epic.jax.open(mesh, "ep", max_tokens=64, max_row_bytes=4096) as group:
    for name in sys.argv[2:]:
        case = layers.CASES[name]
        out, loss, d_x, d_w = layers.step(mesh, group, case)(x, layers.weights(case), ct)
        found = {{"out": out, "d_x": d_x, **{{n: d_w[n] for n in d_w}}}}
        np.savez(f"{{sys.argv[1]}}/{{name}}.npz", **{{n: np.asarray(v) for n, v in found.items()}})
"""


@pytest.fixture(scope="module")
def of_jax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run epic.jax for every case on four devices of one process; return the folder of results."""
    folder = tmp_path_factory.mktemp("jax")
    code = IN_JAX.format(here=str(HERE.parent / "jax"))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    subprocess.run(
        [sys.executable, "-c", code, str(folder), *cases.CASES],
        check=True, timeout=300, env=environment,
    )  # fmt: skip
    return folder


@pytest.mark.parametrize("name", cases.CASES)
def test_the_same_bits(world: Any, of_jax: Path, name: str) -> None:
    """Compare output, gradient of x, and gradients of the experts, on 4 ranks."""
    answers = world.run(layer_step, name, 4, {})
    with np.load(of_jax / f"{name}.npz") as found:
        for key, at in (("out", 0), ("d_x", 2)):
            got = np.stack([answer[at] for answer in answers])
            assert np.array_equal(got.reshape(found[key].shape), found[key]), key
        for key in EXPERT_WEIGHTS:
            if key in answers[0][3]:
                got = np.concatenate([answer[3][key] for answer in answers])
                assert np.array_equal(got, found[key]), key
