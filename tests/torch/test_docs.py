# SPDX-License-Identifier: Apache-2.0
"""The guide's program runs, as its first line says."""

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch

import epic.torch
import reference
from epic.torch.module import OF_EXPERTS
from ports import free_port

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = DOCS / "guide/torch.md"
ADAPTERS = {"megatron", "titan"}  # modules that need their packages


def run_script(folder: Path, text: str, ranks: int) -> None:
    """A program under torchrun."""
    script = folder / "this.py"
    script.write_text(text)
    words = ["--nproc-per-node", str(ranks), "--master-port", str(free_port()), str(script)]
    subprocess.run([sys.executable, "-m", "torch.distributed.run", *words], check=True, timeout=200)


KEEP = """
layer_state = {n: (p.detach(), p.grad) for n, p in layer.named_parameters()}
torch.save(layer_state, f"FOLDER/{rank}.pt")
"""


def layer_of(folder: Path, text: str, ranks: int) -> list[dict[str, Any]]:
    """Parameters and gradients that each rank of a guide's program has at its end."""
    run_script(folder, text + KEEP.replace("FOLDER", str(folder)), ranks)
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


def true_gradients(
    weights: dict[str, np.ndarray], parts: list[np.ndarray]
) -> dict[str, np.ndarray]:
    """Of the mean over all tokens of the mean square, and the mean over the groups' balance losses,
    in float64; parts: the tokens of each group."""
    options = reference.Options(2, "softmax", False, 0.01, 0.0, False, 0)
    numbers = sum(x.size for x in parts)
    found: dict[str, Any] = dict.fromkeys(weights, 0.0)
    for x in parts:
        out = reference.moe(options, x, weights, np.zeros_like(x), 0.0)[0]
        d_w = reference.moe(options, x, weights, 2 * out / numbers, 1 / len(parts))[3]
        found = {name: found[name] + d_w[name] for name in found}
    return found


def check_gradients(states: list[dict[str, Any]], ep: int) -> None:
    """Of each rank; the guide's tokens, by groups of ep ranks."""
    batch = torch.randn(102, 256, generator=torch.Generator().manual_seed(0)).double().numpy()
    ranks = len(states)
    each = np.array_split(batch, ranks)
    parts = [np.concatenate(each[first : first + ep]) for first in range(0, ranks, ep)]
    weights = {
        name: (
            torch.cat([states[r][name][0] for r in range(ep)])
            if name in OF_EXPERTS
            else states[0][name][0]
        )
        .double()
        .numpy()
        for name in states[0]
    }
    wanted = true_gradients(weights, parts)
    for rank, state in enumerate(states):
        for name, (_, gradient) in state.items():
            true = wanted[name]
            if name in OF_EXPERTS:
                local = len(true) // ep
                true = true[rank % ep * local :][:local]
            assert reference.relative(gradient.double().numpy(), true) < 2e-5, (rank, name)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_layer(tmp_path: Path, ranks: int) -> None:
    """Its gradients are those of the mean over all tokens; ranks have different numbers."""
    code = page_of(GUIDE, "# torchrun --nproc-per-node 4 this.py; with 1 or 2")
    check_gradients(layer_of(tmp_path, code, ranks), ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_data_parallel(tmp_path: Path, ranks: int) -> None:
    """The same beside DistributedDataParallel."""
    code = page_of(GUIDE, "# torchrun --nproc-per-node 4 this.py\n")
    check_gradients(layer_of(tmp_path, code, ranks), min(2, ranks))


LABELS = """import os, torch
folder = {folder!r}
prompt = torch.tensor([[5, 6, 7]])
every = torch.randint(3, 64, (7, 6), generator=torch.Generator().manual_seed(5))
last = torch.tensor([[5], [1], [2], [5], [3], [1], [4]])
wanted = every.masked_fill(torch.arange(6) > last, -100)
mine = slice({begin}[int(os.environ.get("RANK", 0))], {end}[int(os.environ.get("RANK", 0))])
ids, labels = every[mine], wanted[mine]
"""
KEEP_MODEL = """
torch.save({n: p.grad for n, p in model.named_parameters()}, f"{folder}/{dist.get_rank()}.pt")
"""


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_transformers(tmp_path: Path, ranks: int) -> None:
    """The page's program with a small model in its folder: its gradients are those of the model on
    one process, of the mean over all labels, of which ranks have different numbers."""
    transformers = pytest.importorskip("transformers", reason="there is no transformers package")
    from test_pretrained import model_of

    folder = tmp_path / "model"
    model_of("Qwen3Moe").save_pretrained(folder)
    code = page_of(DOCS / "guide/frameworks.md", "# torchrun --nproc-per-node 4 this.py")
    code = code.replace("optimizer.step()", KEEP_MODEL + "optimizer.step()")
    ends = {1: [7], 2: [2, 7], 4: [1, 3, 4, 7]}[ranks]
    begin = LABELS.format(folder=str(folder), begin=[0, *ends], end=ends)
    run_script(tmp_path, begin + code, ranks)
    eager = {"experts_implementation": "eager"}  # torch's grouped products take no float64
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **eager).double()
    known: dict[str, Any] = {}
    exec(begin, known)
    model(known["every"], labels=known["wanted"]).loss.backward()
    true = {n: p.grad for n, p in model.named_parameters()}
    compared = 0
    for rank in range(ranks):
        for key, gradient in torch.load(folder / f"{rank}.pt").items():
            if key in true and true[key] is not None:
                assert reference.relative(gradient.double(), true[key]) < 1e-4, (rank, key)
                compared += 1
    assert compared >= 10 * ranks
    own = sorted(k for k in torch.load(folder / "0.pt") if k.endswith("moe.w_down"))
    whole = sorted(k for k in true if k.endswith("experts.down_proj"))
    for new, old in zip(own, whole, strict=True):
        found = torch.cat([torch.load(folder / f"{rank}.pt")[new] for rank in range(ranks)])
        assert reference.relative(found.double(), true[old].transpose(1, 2)) < 1e-4, new


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
