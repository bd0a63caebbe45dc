# SPDX-License-Identifier: Apache-2.0
"""Compares the tokens of several ranks with those of one process, in float32."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from models import write_model

HERE = Path(__file__).parent
LIMIT = 280  # time limit of one run in seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the models and results of all tests."""
    return tmp_path_factory.mktemp("vllm")


def make_prompts() -> list[list[int]]:
    """Return prompts of several lengths; two have more tokens than a step."""
    draw = random.Random(1)
    return [[draw.randrange(3, 256) for _ in range(n)] for n in (5, 80, 17, 40, 3, 120)]


def free_port() -> int:
    """Return a port that no program uses."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


def generate(folder: Path, name: str, dp: int, tp: int) -> list[Any]:
    """Return the tokens and log-probabilities of all prompts."""
    model, out = folder / name, folder / f"{name}-{dp}-{tp}.json"
    if out.exists():
        return json.loads(out.read_text())
    if not model.exists():
        write_model(name, model)
    job = {
        "model": str(model),
        "dp": dp,
        "tp": tp,
        "dtype": "float32",
        "eager": True,
        "prompts": make_prompts(),
        "port": free_port(),
        "out": str(out),
    }
    words = [sys.executable, str(HERE / "generate.py"), json.dumps(job)]
    log = out.with_suffix(".log")
    with log.open("w") as file:
        running = subprocess.Popen(words, stdout=file, stderr=file, start_new_session=True)
        try:
            code = running.wait(LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            code = running.wait()
    text = log.read_text(errors="replace")
    assert code == 0, text
    used = "EPIC: expert-parallel rank 0 of" in text
    assert used == (dp * tp > 1), "EPIC must be on if there are several ranks, and only then"
    return json.loads(out.read_text())


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2), (2, 2)], ids=["dp2", "tp2", "dp2-tp2"])
def test_tokens(folder: Path, dp: int, tp: int) -> None:
    """Check that the tokens are equal, and the log-probabilities within 1e-4."""
    wanted, found = generate(folder, "qwen3", 1, 1), generate(folder, "qwen3", dp, tp)
    for (tokens, logs), (other_tokens, other_logs) in zip(found, wanted, strict=True):
        assert tokens == other_tokens
        assert max(abs(a - b) for a, b in zip(logs, other_logs, strict=True)) < 1e-4


def test_refuses_shared_experts(folder: Path) -> None:
    """Check that a model with shared experts is refused when the server starts."""
    with pytest.raises(AssertionError, match="the model has shared experts: must have none"):
        generate(folder, "deepseek", 1, 2)
