# SPDX-License-Identifier: Apache-2.0
"""Runs the programs of README and of the guide for PyTorch, and checks the gradients of some."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import epic.torch
import reference
from epic.torch.module import EXPERT_WEIGHTS
from forked import finish, start_ranks
from pages import ROOT, Program, find_block, list_pages, list_programs
from ports import free_port
from world import torch_server

GUIDE = ROOT / "docs/guide/torch.md"
LAYER = find_block(GUIDE, "# torchrun --nproc-per-node 4 layer.py")
DATA_PARALLEL = find_block(ROOT / "docs/guide/training.md", "# torchrun --nproc-per-node 4 ddp.py")
TRANSFORMERS = find_block(
    ROOT / "docs/guide/frameworks.md", "# torchrun --nproc-per-node 4 this.py"
)
EXPERT_PLAN = find_block(
    ROOT / "docs/guide/frameworks.md", "# expert parallelism of transformers, on 4 ranks"
)
# Programs whose gradients are checked have tests of their own below; test_expert_plans.py has one.
CHECKED = (LAYER, DATA_PARALLEL, TRANSFORMERS, EXPERT_PLAN)
# numbers of ranks of the slowest tests; make test runs the largest only
NIGHTLY_1_2 = [*(pytest.param(n, marks=pytest.mark.night) for n in (1, 2)), 4]
ADAPTERS = {"megatron", "titan", "transformers"}  # modules that need packages of their own


def run_program(folder: Path, text: str, processes: int) -> None:
    """Run a program with the variables that torchrun sets."""
    script = folder / "this.py"
    script.write_text(text)
    more = ["transformers"] if "transformers" in text else []
    running = start_ranks(torch_server(*more), str(script), ranks=processes, port=free_port())
    finish(running, 200)


PROGRAMS = [program for program in list_programs("torch") if program.text not in CHECKED]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: f"{p.page}-{p.number}")
def test_programs(program: Program, tmp_path: Path) -> None:
    """Run every whole program of the guide, with as many processes as its first line says.

    test_groups.py and test_launchers.py run programs under torchrun itself.
    """
    run_program(tmp_path, program.text, program.processes)


KEEP_LAYER = """
state = {n: (p.detach(), p.grad) for n, p in layer.named_parameters()}
torch.save(state, f"FOLDER/{rank}.pt")
"""


def run_layer(folder: Path, text: str, ranks: int, before: str) -> list[dict[str, Any]]:
    """Run a program and return the layer's (parameter, gradient) by name, as each rank has them
    before the line `before`."""
    assert text.count(before) == 1
    keep = KEEP_LAYER.replace("FOLDER", str(folder))
    run_program(folder, text.replace(before, keep + before), ranks)
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


def true_gradients(
    weights: dict[str, np.ndarray], parts: list[np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the expected gradients in float64.

    The loss is the mean square over all tokens, plus the mean of the groups' balance losses.
    `parts` contains the tokens of each group.
    """
    options = reference.Options(2, "softmax", False, 0.01, 0.0, False, 0)
    numbers = sum(x.size for x in parts)
    found: dict[str, Any] = dict.fromkeys(weights, 0.0)
    for x in parts:
        out = reference.moe(options, x, weights, np.zeros_like(x), 0.0)[0]
        d_w = reference.moe(options, x, weights, 2 * out / numbers, 1 / len(parts))[3]
        found = {name: found[name] + d_w[name] for name in found}
    return found


def join_ranks(states: list[dict[str, Any]], ep: int, name: str) -> np.ndarray:
    """Return a parameter with the experts of all `ep` ranks of the first group."""
    ranks = range(ep) if name in EXPERT_WEIGHTS else range(1)
    return torch.cat([states[r][name][0] for r in ranks]).double().numpy()


def check_gradients(states: list[dict[str, Any]], ep: int) -> None:
    """Compare each rank's gradients with float64. Groups have `ep` ranks."""
    batch = torch.randn(102, 256, generator=torch.Generator().manual_seed(0)).double().numpy()
    ranks = len(states)
    each = np.array_split(batch, ranks)
    parts = [np.concatenate(each[first : first + ep]) for first in range(0, ranks, ep)]
    wanted = true_gradients({name: join_ranks(states, ep, name) for name in states[0]}, parts)
    for rank, state in enumerate(states):
        for name, (_, gradient) in state.items():
            true = wanted[name]
            if name in EXPERT_WEIGHTS:
                local = len(true) // ep
                true = true[rank % ep * local :][:local]
            assert reference.relative(gradient.double().numpy(), true) < 2e-5, (rank, name)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_layer(tmp_path: Path, ranks: int) -> None:
    """Check that the gradients are those of the mean over all tokens, with uneven ranks."""
    check_gradients(run_layer(tmp_path, LAYER, ranks, "group.close()"), ranks)


@pytest.mark.parametrize("ranks", NIGHTLY_1_2)
def test_data_parallel(tmp_path: Path, ranks: int) -> None:
    """Check the gradients with DistributedDataParallel over the other mesh dimension."""
    states = run_layer(tmp_path, DATA_PARALLEL, ranks, "optimizer.step()")
    check_gradients(states, min(2, ranks))


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


@pytest.mark.parametrize("ranks", NIGHTLY_1_2)
def test_transformers(tmp_path: Path, ranks: int) -> None:
    """Run the program with a small model and different numbers of labels per rank. Compare its
    gradients with those of the model in one process, for the mean over all labels."""
    transformers = pytest.importorskip("transformers", reason="there is no transformers package")
    from test_pretrained import model_of

    folder = tmp_path / "model"
    model_of("Qwen3Moe").save_pretrained(folder)
    code = TRANSFORMERS.replace("optimizer.step()", KEEP_MODEL + "optimizer.step()")
    ends = {1: [7], 2: [2, 7], 4: [1, 3, 4, 7]}[ranks]
    begin = LABELS.format(folder=str(folder), begin=[0, *ends], end=ends)
    run_program(tmp_path, begin + code, ranks)
    eager = {"experts_implementation": "eager"}  # torch's grouped products do not support float64
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


def test_names() -> None:
    """Check that every name of epic.torch in the documentation exists."""
    for page in list_pages():
        text = page.read_text(encoding="utf-8")
        names = set(re.findall(r"epic\.torch\.([A-Za-z_0-9]+)", text))
        missing = {n for n in names - ADAPTERS if not hasattr(epic.torch, n)}
        assert missing == set(), page


def test_the_steps() -> None:
    """Run the blocks of the guide that call single steps, with a group of one rank."""
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
        names |= {"torch": torch, "w": torch.ones(4, 8, 5, requires_grad=True)}
        names["tokens"] = tokens.clone().requires_grad_()
        exec(find_block(GUIDE, "class Product"), names)
        assert torch.equal(names["y"][: names["rows"].ends[-1]], torch.full((12, 5), 8.0))
        (d_tokens,) = torch.autograd.grad(names["y"].sum(), names["tokens"])
        assert torch.equal(d_tokens, torch.full((6, 8), 10.0))
        exec(find_block(GUIDE, "any_overflow = "), names)
        assert names["scale"].tolist() == [1.0]
        names["tokens"] = tokens
        flat = dataclasses.replace(options.layer, layout="flat")
        names["plan"] = epic.torch.plan(group, flat, topk_idx)
        names["y"] = torch.zeros(names["plan"].capacity, 8)
        exec(find_block(GUIDE, "recv, weights, experts = "), names)
        assert sorted(names["experts"][0].tolist()) == [0, 3]
        assert not names["out"].any()


@pytest.mark.parametrize("name", ["MoeWeights", "ExpertWeights", "MoeOut"])
def test_every_field_is_documented(name: str) -> None:
    """Check that help() describes each field, in a line of its own or together with others."""
    kind = getattr(epic.torch, name)
    lines = re.findall(r"^(?: {4})?(\w+(?:, \w+)*): ", inspect.cleandoc(kind.__doc__), re.MULTILINE)
    assert {field for line in lines for field in line.split(", ")} == set(kind._fields)
