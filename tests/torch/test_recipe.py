# SPDX-License-Identifier: Apache-2.0
"""Compares the losses of examples/torch/recipe.py with those of dense layers in float64.

The example runs with several numbers of ranks. Each run continues the run before.
"""

import atexit
import functools
import importlib.util
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding, silu, softmax

import epic.torch
from forked import Server, finish, start_ranks
from pages import ROOT
from ports import free_port

SCRIPT = ROOT / "examples/torch/recipe.py"
STEPS = 2  # of each part of a run
MAX_NORM = 0.89  # some steps have a larger norm, and others a smaller one
IMPORTS = ("epic.torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint")
Parameters = dict[str, Tensor]
Groups = tuple[int, int]  # ranks of a group, and of all groups


def import_recipe() -> Any:
    """Return the script as a module."""
    spec = importlib.util.spec_from_file_location("recipe", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


recipe = import_recipe()


@functools.cache
def recipe_server() -> Server:
    """Return a server whose copies use one thread each, as processes of torchrun do."""
    server = Server(*IMPORTS, env={**os.environ, "OMP_NUM_THREADS": "1"})
    atexit.register(server.close)
    return server


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute the reference with one thread: on small tensors other threads mostly spin."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def first_parameters() -> Parameters:
    """Return the parameters with which every run begins, with the experts of all ranks."""
    torch.set_default_dtype(torch.float64)
    try:
        with epic.torch.Group(num_ranks=1, max_tokens=8, max_row_bytes=8 * 32) as group:
            found = dict(recipe.Model(group).named_parameters())
    finally:
        torch.set_default_dtype(torch.float32)
    return {name: p.detach().clone().requires_grad_() for name, p in found.items()}


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Return the norm of nn.RMSNorm in float64."""
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt() * weight


def attend(w: Parameters, layer: str, x: Tensor) -> Tensor:
    """Return causal attention of one sequence [length, hidden]."""
    q, k, v = (rms_norm(x, w[layer + "before_attention.weight"]) @ w[layer + "qkv.weight"].T).chunk(
        3, dim=-1
    )
    heads = []
    size = recipe.HIDDEN // recipe.HEADS
    for first in range(0, recipe.HIDDEN, size):
        own = slice(first, first + size)
        scores = q[:, own] @ k[:, own].T / math.sqrt(size)
        later = torch.ones_like(scores).triu(1).bool()
        heads.append(softmax(scores.masked_fill(later, -math.inf), -1) @ v[:, own])
    return torch.cat(heads, -1) @ w[layer + "out.weight"].T


def mix(w: Parameters, layer: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output of all experts, the probabilities and the choice, each per token."""
    probabilities = softmax(x @ w[layer + "moe.w_gate"], -1)
    best, ids = probabilities.topk(2)
    weights = best / best.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for expert in range(8):
        gate, up = (x @ w[layer + "moe.w_gate_up"][expert]).chunk(2, dim=-1)
        y = (silu(gate) * up) @ w[layer + "moe.w_down"][expert]
        out = out + torch.where(ids == expert, weights, 0).sum(-1, keepdim=True) * y
    return out, probabilities, ids


def balance(probabilities: Tensor, ids: Tensor) -> Tensor:
    """Return the balance loss over all tokens."""
    share = torch.bincount(ids.flatten(), minlength=8) / ids.numel()
    return 0.01 * 8 * (share * probabilities.mean(0)).sum()


def losses_of(w: Parameters, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of a group's labels, and the balance loss of the group."""
    entropy, layers = torch.zeros(()), [([], []) for _ in range(2)]  # type: ignore[var-annotated]
    for sequence, wanted in zip(ids, labels, strict=True):
        words = sequence[sequence != 0]
        x = embedding(words, w["words.weight"]) + w["places.weight"][: len(words)]
        for number, kept in enumerate(layers):
            layer = f"layers.{number}."
            x = x + attend(w, layer, x)
            out, *routing = mix(w, layer, rms_norm(x, w[layer + "before_moe.weight"]))
            x = x + out
            for some, value in zip(kept, routing, strict=True):
                some.append(value)
        logits = rms_norm(x, w["norm.weight"]) @ w["head.weight"].T
        for t in range(len(words)):
            if wanted[t] != -100:
                entropy = entropy - logits[t].log_softmax(-1)[wanted[t]]
    parts = [balance(torch.cat(p), torch.cat(i)) for p, i in layers if p]
    return entropy, sum(parts, torch.zeros(()))


def batch_of(part: int, step: int, groups: Groups) -> list[list[tuple[Tensor, Tensor]]]:
    """Return the sequences of each group of ranks, for each micro-batch."""
    return [split_groups(recipe.make_batch(part, step, i), groups) for i in range(2)]


def split_groups(batch: tuple[Tensor, Tensor], groups: Groups) -> list[tuple[Tensor, Tensor]]:
    """Return the sequences of each group of ranks."""
    (ids, labels), (ep, ranks) = batch, groups
    each = list(zip(ids.tensor_split(ranks), labels.tensor_split(ranks), strict=True))
    joined = []
    for first in range(0, ranks, ep):
        parts = each[first : first + ep]
        joined.append((torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])))
    return joined


class Dense:
    """The whole run in one process: parameters, and the moments of AdamW."""

    def __init__(self) -> None:
        self.w = first_parameters()
        self.moments = {name: [torch.zeros_like(p)] * 2 for name, p in self.w.items()}

    def loss(self, part: int, step: int, groups: Groups) -> tuple[Tensor, Tensor]:
        """Return the mean loss of all labels, and the mean of the groups' balance losses."""
        batches = batch_of(part, step, groups)
        total = sum((labels != -100).sum() for batch in batches for _, labels in batch)
        found = [[losses_of(self.w, *group) for group in batch] for batch in batches]
        entropy = sum(e for batch in found for e, _ in batch) / total
        extra = sum(b for batch in found for _, b in batch) / (2 * len(found[0]))
        return entropy, extra

    def step(self, step: int, groups: Groups) -> tuple[float, float]:
        """Change the parameters; return the loss and the norm of the gradients."""
        loss, extra = self.loss(recipe.TRAINING, step, groups)
        gradients = torch.autograd.grad(loss + extra, list(self.w.values()))
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
        scale = min(1.0, MAX_NORM / (norm + 1e-6))
        cosine = math.cos(math.pi * (step - recipe.WARMUP) / 100)
        rise = (step + 1) / recipe.WARMUP
        rate = recipe.RATE * (rise if step < recipe.WARMUP else 0.55 + 0.45 * cosine)
        with torch.no_grad():
            for (name, p), gradient in zip(self.w.items(), gradients, strict=True):
                g = gradient * scale
                first, second = self.moments[name]
                first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g**2
                self.moments[name] = [first, second]
                root = (second / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
                p.mul_(1 - rate * 0.01)
                p.sub_(rate * first / (1 - 0.9 ** (step + 1)) / root)
        return loss.item(), norm


def read_numbers(text: str) -> list[float]:
    """Return the losses and norms that the script printed."""
    return [float(n) for n in re.findall(r"(?:loss|norm) ([\d.]+)", text)]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "parts",
    [
        [(2, 4), (1, 1)],
        pytest.param([(4, 4), (2, 2), (1, 1), (2, 4)], marks=pytest.mark.night),
        pytest.param([(2, 2), (2, 4), (1, 2), (4, 4)], marks=pytest.mark.night),
        pytest.param([(1, 1), (1, 4), (4, 4), (2, 2)], marks=pytest.mark.night),
    ],
    ids=["2x2-1", "4-2-1-2x2", "2-2x2-1x2-4", "1-1x4-4-2"],
)
def test_the_recipe(tmp_path: Path, parts: list[Groups]) -> None:
    """Check losses, norms and evaluations. Each part continues the run of the part before.
    Ranks have different numbers of tokens and labels."""
    dense = Dense()
    norms = []
    for number, groups in enumerate(parts):
        first, last = STEPS * number, STEPS * (number + 1)
        words = ["--folder", str(tmp_path), "--steps", str(last), "--save-every", "2"]
        words += ["--ep", str(groups[0]), "--float64", "--max-norm", str(MAX_NORM)]
        running = start_ranks(
            recipe_server(), str(SCRIPT), *words, ranks=groups[1], port=free_port(), ends_early=True
        )
        text = finish(running, 200)[0]
        with torch.no_grad():
            wanted = [dense.loss(recipe.HELD_OUT, 0, groups)[0].item()]
        for step in range(first, last):
            wanted += dense.step(step, groups)
            norms.append(wanted[-1])
        with torch.no_grad():
            wanted.append(dense.loss(recipe.HELD_OUT, 0, groups)[0].item())
        assert f"begin at step {first}," in text
        got = read_numbers(text)
        losses = [i for i in range(len(wanted)) if i % 2 or i == 0]
        assert [got[i] for i in losses] == pytest.approx([wanted[i] for i in losses], rel=1e-8)
        assert got == pytest.approx(wanted, rel=1e-3)  # norms have four digits
    clipped = sum(norm > MAX_NORM for norm in norms)
    assert 0 < clipped < len(norms)  # the test covers both
    assert wanted[-1] < wanted[0]
