# SPDX-License-Identifier: Apache-2.0
"""The guide's program runs, as its first line says."""

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch

import epic.torch
from ports import free_port

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = DOCS / "guide/torch.md"
ADAPTERS = {"megatron", "titan"}  # modules that need their packages


def test_the_layer(tmp_path: Path) -> None:
    """With 4 processes."""
    text = GUIDE.read_text().split("## A layer")[1]
    code = re.search(r"\n\n((?: {4}.*\n|\n)+)", text)
    assert code is not None
    script = tmp_path / "this.py"
    script.write_text("\n".join(line[4:] for line in code[1].splitlines()))
    words = ["--nproc-per-node", "4", "--master-port", str(free_port()), str(script)]
    subprocess.run([sys.executable, "-m", "torch.distributed.run", *words], check=True, timeout=200)


def test_transformers(tmp_path: Path) -> None:
    """The page's program, with 2 processes and a small model in its folder."""
    pytest.importorskip("transformers", reason="there is no transformers package")
    from test_pretrained import model_of

    folder, script = tmp_path / "model", tmp_path / "this.py"
    model_of("Qwen3Moe").save_pretrained(folder)
    begin = f"import torch\nfolder = {str(folder)!r}\nids = prompt = torch.tensor([[5, 6, 7]])\n"
    block = page_of(DOCS / "guide/frameworks.md", "# torchrun --nproc-per-node 4 this.py")
    script.write_text(begin + block)
    words = ["--nproc-per-node", "2", "--master-port", str(free_port()), str(script)]
    subprocess.run([sys.executable, "-m", "torch.distributed.run", *words], check=True, timeout=200)


def page_of(guide: Path, begin: str) -> str:
    """As block_of, with the empty lines between."""
    text = guide.read_text()
    code = re.search(r"(?:^ {4}.*\n|^\n)+", text[text.index(f"    {begin}") :], re.MULTILINE)
    assert code is not None
    return dedent(code[0])


def test_names() -> None:
    """Every name of epic.torch that the guides have is there."""
    for guide in (GUIDE, DOCS / "guide/frameworks.md"):
        names = set(re.findall(r"epic\.torch\.([A-Za-z_0-9]+)", guide.read_text()))
        assert {n for n in names - ADAPTERS if not hasattr(epic.torch, n)} == set()


def block_of(guide: Path, begin: str) -> str:
    """The indented lines of a guide that begin with these words."""
    text = guide.read_text()
    code = re.search(r"(?:^ {4}.*\n)+", text[text.index(f"    {begin}") :], re.MULTILINE)
    assert code is not None
    return dedent(code[0])


def test_the_steps() -> None:
    """As they stand there, one after the other, for a rank alone."""
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
        exec(block_of(GUIDE, "plan                     = "), names)
        assert names["out"].shape == (6, 8) and names["out"][0, 0] > 0
        assert torch.equal(names["recv"].sum(), 2 * tokens.sum())
        assert names["total"].tolist() == [1, 1, 1]
        flat = dataclasses.replace(options.layer, layout="flat")
        names["plan"] = epic.torch.plan(group, flat, topk_idx)
        names["y"] = torch.zeros(names["plan"].capacity, 8)
        exec(block_of(GUIDE, "recv, weights, experts = "), names)
        assert sorted(names["experts"][0].tolist()) == [0, 3]
        assert not names["out"].any()


@pytest.mark.parametrize("name", ["MoeWeights", "ExpertWeights", "MoeOut"])
def test_every_field_is_documented(name: str) -> None:
    """Each has a line of its own in help(), or shares one."""
    kind = getattr(epic.torch, name)
    lines = re.findall(r"^(\w+(?:, \w+)*): ", inspect.cleandoc(kind.__doc__), re.MULTILINE)
    assert {field for line in lines for field in line.split(", ")} == set(kind._fields)
