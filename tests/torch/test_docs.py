# SPDX-License-Identifier: Apache-2.0
"""Runs the programs of README and of the guide for PyTorch, and checks the gradients of some."""

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
from pages import Program, find_block, list_pages, list_programs
from ports import free_port
from world import torch_server

LAYER = find_block("torch", "# torchrun --nproc-per-node 4 layer.py")
DATA_PARALLEL = find_block("training", "# torchrun --nproc-per-node 4 ddp.py")
TRANSFORMERS = find_block("frameworks", "# torchrun --nproc-per-node 4 this.py")
EXPERT_PLAN = find_block("frameworks", "# expert parallelism of transformers, on 4 ranks")
# Programs whose gradients are checked have tests of their own below; test_expert_plans.py has one.
CHECKED = (LAYER, DATA_PARALLEL, TRANSFORMERS, EXPERT_PLAN)
ADAPTERS = {"megatron", "titan", "transformers"}  # modules that need packages of their own


def run_program(folder: Path, text: str, processes: int) -> None:
    """Run a program with the variables that torchrun sets."""
    script = folder / "this.py"
    script.write_text(text)
    server = torch_server(*(["transformers"] if "transformers" in text else []))
    early = "group.close()" in text  # without it, the shutdown of Python closes the group
    running = start_ranks(server, str(script), ranks=processes, port=free_port(), ends_early=early)
    finish(running, 200)


PROGRAMS = [program for program in list_programs("torch") if program.text not in CHECKED]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: f"{p.page}-{p.number}")
def test_programs(program: Program, ranks: int, tmp_path: Path) -> None:
    """Run every whole program of README and the guide. test_guide_parts.py runs other blocks.

    test_groups.py and test_launchers.py run programs under torchrun itself.
    """
    run_program(tmp_path, program.text, ranks)


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


@pytest.mark.parametrize("ranks", [1, 2, 4])
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


@pytest.mark.parametrize("ranks", [1, 2, 4])
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


@pytest.mark.parametrize("name", ["MoeWeights", "ExpertWeights", "MoeOut"])
def test_every_field_is_documented(name: str) -> None:
    """Check that help() describes each field, in a line of its own or together with others."""
    kind = getattr(epic.torch, name)
    lines = re.findall(r"^(?: {4})?(\w+(?:, \w+)*): ", inspect.cleandoc(kind.__doc__), re.MULTILINE)
    assert {field for line in lines for field in line.split(", ")} == set(kind._fields)
