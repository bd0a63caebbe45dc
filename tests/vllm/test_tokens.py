# SPDX-License-Identifier: Apache-2.0
"""Compares what several ranks generate with one process, and one process with transformers."""

from statistics import fmean
from typing import Any

import pytest
import torch
import transformers

from generate import Result
from runs import Runs, make_prompts

NAMES = ["qwen3", "mixtral", "deepseek"]
LAYOUTS = pytest.mark.parametrize(
    ("dp", "tp"), [(2, 1), (1, 2), (2, 2)], ids=["dp2", "tp2", "dp2-tp2"]
)


def distances(one: list[float], other: list[float]) -> list[float]:
    """Return the absolute differences of two lists of equal length."""
    return [abs(a - b) for a, b in zip(one, other, strict=True)]


@pytest.mark.parametrize("name", NAMES)
def test_one_process(runs: Runs, name: str) -> None:
    """Check what the other tests compare with: one process of vLLM against transformers."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(runs.model(name))
    for prompt, found in zip(make_prompts(), runs.results(name, 1, 1), strict=True):
        tokens = torch.tensor(prompt + found.tokens)
        with torch.inference_mode():
            logs = model(tokens[None]).logits[0].log_softmax(-1)
        wanted = logs[:-1].gather(1, tokens[1:, None])[:, 0].tolist()
        assert logs[len(prompt) - 1 : -1].argmax(-1).tolist() == found.tokens
        assert max(distances(found.prompt_logs + found.logs, wanted)) < 2e-4


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "inductor"])
@LAYOUTS
@pytest.mark.parametrize("name", NAMES)
def test_float32(runs: Runs, name: str, dp: int, tp: int, compiled: bool) -> None:
    """Check that the tokens are equal, and all log-probabilities within 1e-4."""
    wanted, found = runs.results(name, 1, 1), runs.results(name, dp, tp, compiled=compiled)
    for one, other in zip(found, wanted, strict=True):
        assert one.tokens == other.tokens
        assert max(distances(one.logs, other.logs)) < 1e-4
        assert max(distances(one.prompt_logs, other.prompt_logs)) < 1e-4


@LAYOUTS
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16(runs: Runs, name: str, dp: int, tp: int) -> None:
    """Check that several ranks are not further from float32 than one process.

    Rounding differs, and may change which of two nearly equal candidates is generated. So the test
    compares the log-probabilities of the prompts.
    """

    def prompt_logs(results: list[Result]) -> list[float]:
        return [log for result in results for log in result.prompt_logs]

    exact = prompt_logs(runs.results(name, 1, 1))
    one = prompt_logs(runs.results(name, 1, 1, "bfloat16"))
    ranks = prompt_logs(runs.results(name, dp, tp, "bfloat16"))
    assert fmean(distances(ranks, exact)) < 1.25 * fmean(distances(one, exact))
