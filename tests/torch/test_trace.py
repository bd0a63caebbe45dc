# SPDX-License-Identifier: Apache-2.0
"""Checks that EPIC_TRACE records the plans of PyTorch programs."""

import os
from pathlib import Path

import numpy as np

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
