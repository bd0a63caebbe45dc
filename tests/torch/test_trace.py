# SPDX-License-Identifier: Apache-2.0
"""Checks that EPIC_TRACE records the plans of PyTorch programs."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import epic
from world import torch_server

PROGRAM = """
import torch, epic.torch
with epic.torch.Group(num_ranks=1, name="traced", max_tokens=4, max_row_bytes=64) as group:
    layer = epic.torch.Layer(num_experts=8, top_k=2)
    epic.torch.plan(group, layer, torch.tensor([[7, 0], [3, -1], [2, 5]]))
"""


def test_ids_are_recorded(tmp_path: Path) -> None:
    """Check that the variable alone records all ids (docs/guide/traces.md)."""
    wishes = {**os.environ, "EPIC_TRACE": str(tmp_path)}
    torch_server().run(PROGRAM, env=wishes, timeout=200)
    (file,) = tmp_path.glob("traced-*-0.epictrace")
    data = file.read_bytes()
    tokens, top_k, experts = np.frombuffer(data[128 + 40 : 128 + 56], "<i8,<u4,<u4")[0]
    assert (tokens, top_k, experts) == (3, 2, 8)
    assert list(data[192:198]) == [7, 0, 3, 255, 2, 5]


@pytest.mark.parametrize("experts", [8, 300, 70000])
def test_writer(tmp_path: Path, experts: int) -> None:
    """Check that read_trace returns what TraceWriter wrote, for each size of an id."""
    ranks, layers, steps = 3, 2, 4
    draw = torch.Generator().manual_seed(experts)
    written = [
        [torch.randint(-1, experts, (rank + step, 2), generator=draw) for rank in range(ranks)]
        for step in range(layers * steps)
    ]
    for rank in range(ranks):
        with epic.TraceWriter(tmp_path, rank=rank, num_ranks=ranks, group="a b") as writer:
            for plan in written:
                ids = plan[rank]
                writer.write(ids if rank else ids.numpy(), num_experts=experts)
        writer.close()
    found = epic.read_trace(tmp_path, num_layers=layers, group="a b")
    for layer in range(layers):
        assert len(found[layer]) == steps
        for step, plan in enumerate(written[layer::layers]):
            got = found[layer][step]
            assert got.num_experts == experts
            for rank in range(ranks):
                assert np.array_equal(got.of_rank(rank), plan[rank].numpy())


def test_writer_refuses(tmp_path: Path) -> None:
    """Check that wrong arguments are named, and that nothing is written then."""
    with pytest.raises(epic.EpicArgumentError, match="rank is 2: must be from 0 to 1"):
        epic.TraceWriter(tmp_path, rank=2, num_ranks=2)
    with pytest.raises(epic.EpicArgumentError, match=r"rank is 0.0: must be an integer"):
        epic.TraceWriter(tmp_path, rank=0.0, num_ranks=2)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    with epic.TraceWriter(tmp_path, rank=0, num_ranks=1) as writer:
        for ids, text in (
            (torch.zeros(2, dtype=torch.int32), r"int32 \[2\]: must be integers"),
            (torch.zeros(2, 1), "float32"),
            (torch.full((2, 1), 8), "has the id 8: must be below num_experts 8"),
        ):
            with pytest.raises(epic.EpicArgumentError, match=text):
                writer.write(ids, num_experts=8)
    assert epic.read_trace(tmp_path) == [[]]


def test_files_of_two_runs(tmp_path: Path) -> None:
    """Check that files of an earlier run with more ranks are an error, not an empty trace."""
    for ranks in (3, 2):
        for rank in range(ranks):
            with epic.TraceWriter(tmp_path, rank=rank, num_ranks=ranks) as writer:
                writer.write(torch.zeros(1, 1, dtype=torch.int64), num_experts=4)
    with pytest.raises(epic.EpicArgumentError, match="files of groups of 2 and 3 ranks"):
        epic.read_trace(tmp_path)
