# SPDX-License-Identifier: Apache-2.0
"""Tests EPIC as an implementation of the expert parallelism of transformers.

Logits and gradients must be those of transformers' own all-to-all. Logits must also be those of a
model whose experts are all on one rank.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import epic.torch
from pages import find_block
from reference import relative
from test_pretrained import model_of, transformers

plans = pytest.importorskip("epic.torch.transformers", reason="there is no transformers package")
AUTO: Any = transformers.AutoModelForCausalLM
IDS = torch.randint(3, 64, (8, 7), generator=torch.Generator().manual_seed(4))
# The products of the experts as transformers computes them.
CASES = {"GptOss": "eager", "Mixtral": "grouped_mm", "Qwen3Moe": "grouped_mm", "idle": "eager"}


def spread(folder: str, implementation: str, experts: str = "eager") -> Any:
    """Load a model, and let transformers spread its experts over four ranks."""
    config = transformers.distributed.DistributedConfig(
        fsdp_size=4, ep_size=4, ep_implementation=implementation
    )
    more = {"attn_implementation": "eager", "experts_implementation": experts}
    return AUTO.from_pretrained(folder, distributed_config=config, **more)


def gradients_of(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the logits, and this rank's part of each gradient."""
    logits = model(ids, use_cache=False).logits
    logits.square().mean(dim=-1).sum().backward()
    parts = {}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        parts[name] = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
    return logits.detach(), parts


def compare(rank: int, folder: str, experts: str) -> None:
    """Compare both implementations, and the logits with those of the whole model on one rank."""
    plans.register(max_tokens=64)
    ids = IDS[2 * rank : 2 * rank + 2]
    wanted, parts = gradients_of(spread(folder, "all_to_all", experts), ids)
    mine = spread(folder, "epic", experts)
    found, own = gradients_of(mine, ids)
    assert relative(found, wanted) < 1e-5
    assert own.keys() == parts.keys()
    most = max(float(part.abs().max()) for part in parts.values() if part.numel())
    for name, value in own.items():  # gradients of experts without tokens are only rounding
        size = max(float(parts[name].abs().sum()), 0.01 * most)
        assert float((value - parts[name]).abs().sum()) < 1e-4 * size, name
    local = [p.to_local() for n, p in mine.named_parameters() if n.endswith("experts.down_proj")]
    assert local and all(len(p) == 2 for p in local)  # of 8
    whole = AUTO.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        assert relative(found, whole(ids, use_cache=False).logits) < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_the_same_model(world: Any, name: str, tmp_path: Path) -> None:
    """Run the comparison on four ranks, each with its own tokens.

    In the model "idle" all tokens go to experts of the first rank.
    """
    model = model_of("Qwen3Moe" if name == "idle" else name)
    if name == "idle":
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.gate.weight.zero_()
    model.save_pretrained(tmp_path)
    world.run(compare, str(tmp_path), CASES[name])


def follow_guide(rank: int, folder: str) -> None:
    """Run the program of the guide, and check the error for tp_size above 1."""
    text = find_block("frameworks", "# expert parallelism of transformers")
    names: dict[str, Any] = {"epic": epic, "AutoModelForCausalLM": AUTO, "folder": folder}
    exec(text, names)
    assert torch.isfinite(names["model"](IDS[:1], use_cache=False).logits).all()
    config = transformers.distributed.DistributedConfig
    shared = config(tp_size=2, fsdp_size=2, ep_size=4, ep_implementation="epic")
    with pytest.raises(epic.torch.EpicUnsupportedError, match="tp_size is 2: must be 1"):
        AUTO.from_pretrained(folder, distributed_config=shared)


def test_guide(world: Any, tmp_path: Path) -> None:
    """Follow the guide in each process."""
    model_of("Qwen3Moe").save_pretrained(tmp_path)
    world.run(follow_guide, str(tmp_path))
