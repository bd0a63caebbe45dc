# SPDX-License-Identifier: Apache-2.0
"""Runs the programs of README and of the guide for PyTorch."""

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import epic.torch
from pages import ROOT, Program, find_block, list_pages, list_programs
from ports import free_port

GUIDE = ROOT / "docs/guide/torch.md"
ADAPTERS = {"megatron", "titan"}  # modules that need their packages


def run_processes(script: Path, processes: int) -> None:
    """Run a script under torchrun."""
    words = ["--nproc-per-node", str(processes), "--master-port", str(free_port()), str(script)]
    subprocess.run([sys.executable, "-m", "torch.distributed.run", *words], check=True, timeout=200)


@pytest.mark.parametrize(
    "program", list_programs("torch"), ids=lambda program: f"{program.page}-{program.number}"
)
def test_programs(program: Program, tmp_path: Path) -> None:
    """Run every whole program of the guide, with as many processes as its first line says."""
    begin = ""
    if "transformers" in program.text:
        pytest.importorskip("transformers", reason="there is no transformers package")
        from test_pretrained import model_of

        model_of("Qwen3Moe").save_pretrained(tmp_path / "model")
        begin = f"folder = {str(tmp_path / 'model')!r}\n"
    script = tmp_path / "this.py"
    script.write_text(begin + program.text)
    run_processes(script, program.processes)


def test_names() -> None:
    """Every name of epic.torch that the documentation uses exists."""
    for page in list_pages():
        text = page.read_text(encoding="utf-8")
        names = set(re.findall(r"epic\.torch\.([A-Za-z_0-9]+)", text))
        missing = {n for n in names - ADAPTERS if not hasattr(epic.torch, n)}
        assert missing == set(), page


def test_the_steps() -> None:
    """Run the blocks of the guide that use the steps, for a group of one rank."""
    options = epic.torch.Moe.of(num_experts=4, top_k=2, hidden=8, inner=16)
    tokens, weights = torch.ones(6, 8), torch.full((6, 2), 0.5)
    topk_idx = torch.tensor([[0, 3], [1, 2]] * 3)
    with epic.torch.Group(num_ranks=1, max_tokens=6, max_row_bytes=4 * 8) as group:
        names = {
            "epic": epic,
            "group": group,
            "layer": options.layer,
            "mlp": options.experts,
            "expert_weights": epic.torch.ExpertWeights(torch.ones(4, 8, 32), torch.ones(4, 16, 8)),
            "topk_idx": topk_idx,
            "tokens": tokens,
            "weights": weights,
            "x": torch.ones(3),
        }
        exec(find_block(GUIDE, "plan = "), names)
        assert names["out"].shape == (6, 8) and names["out"][0, 0] > 0
        assert torch.equal(names["recv"].sum(), 2 * tokens.sum())
        assert names["total"].tolist() == [1, 1, 1]
        flat = dataclasses.replace(options.layer, layout="flat")
        names["plan"] = epic.torch.plan(group, flat, topk_idx)
        names["y"] = torch.zeros(names["plan"].capacity, 8)
        exec(find_block(GUIDE, "recv, weights, experts = "), names)
        assert sorted(names["experts"][0].tolist()) == [0, 3]
        assert not names["out"].any()


@pytest.mark.parametrize("name", ["MoeWeights", "ExpertWeights", "MoeOut"])
def test_every_field_is_documented(name: str) -> None:
    """Each has a line of its own in help(), or shares one."""
    kind = getattr(epic.torch, name)
    lines = re.findall(r"^(\w+(?:, \w+)*): ", inspect.cleandoc(kind.__doc__), re.MULTILINE)
    assert {field for line in lines for field in line.split(", ")} == set(kind._fields)
