# SPDX-License-Identifier: Apache-2.0
"""Tests models of transformers that were spread over ranks and are then restored or saved."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize

import epic.torch
from epic.torch.pretrained import Block
from parts import group_of, meshes
from test_pretrained import SOME_MODELS, alone, last_block, model_of, on_two, transformers

IDS = torch.randint(3, 64, (4, 7), generator=torch.Generator().manual_seed(4))


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits in evaluation mode."""
    with torch.no_grad():
        return model.eval()(ids, use_cache=False).logits


def train_step(model: Any, rank: int, group: epic.torch.Group) -> None:
    """Make one step of SGD on half of the batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    ids = IDS[2 * rank : 2 * rank + 2]
    model(ids, use_cache=False).logits.square().mean().backward()
    epic.torch.sum_gradients(model, group)
    optimizer.step()
    optimizer.zero_grad()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether all bits are equal; NaN equals NaN."""
    return a.dtype == b.dtype and torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SOME_MODELS)
def test_save_pretrained(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Check that a saved model equals the original bit by bit. After training, transformers
    computes the logits of the ranks from the saved files."""
    model = model_of(name).to(dtype)
    last = [p for n, p in model.named_parameters() if n.endswith("down_proj")][-1]
    with torch.no_grad():
        last.view(-1)[:2] = torch.tensor([-0.0, torch.nan], dtype=dtype)
    copies = [copy.deepcopy(model) for _ in range(2)]

    def run(rank: int, mine: Any, group: epic.torch.Group) -> Any:
        epic.torch.save_pretrained(mine, tmp_path / "first", group)
        assert any(isinstance(m, Block) for m in mine.modules())
        with torch.no_grad():
            for layer in (m for m in mine.modules() if isinstance(m, epic.torch.MoE)):
                layer.w_down.nan_to_num_()
        train_step(mine, rank, group)
        epic.torch.save_pretrained(mine, tmp_path / "second", group)
        return logits_of(mine, IDS)

    answers = on_two(copies, run)
    stock = transformers.AutoModelForCausalLM
    loaded = stock.from_pretrained(tmp_path / "first", dtype=dtype)
    assert type(loaded) is type(model)
    wanted = model.state_dict()
    assert loaded.state_dict().keys() == wanted.keys()
    for key, value in loaded.state_dict().items():
        # from_pretrained keeps the router's bias in float32
        assert same_bits(value.to(wanted[key].dtype), wanted[key]), key
    loaded = stock.from_pretrained(tmp_path / "second", dtype=dtype)
    loaded.config._attn_implementation = "eager"
    got = logits_of(loaded, IDS)
    for answer in answers:
        error = (got - answer).abs().max() / answer.abs().max()
        if dtype == torch.float32:
            assert error < 1e-5
        # SparseMixer compares with limits, so other rounding gives other choices
        elif name != "Phimoe":
            assert error < 0.05


@pytest.mark.parametrize("name", SOME_MODELS)
def test_restore(name: str) -> None:
    """Check that every rank gets the whole model with its original class, names and bits, and can
    replace it again."""
    model = model_of(name)
    last_block(model).experts.down_proj.requires_grad_(False)
    copies = [copy.deepcopy(model) for _ in range(2)]

    def run(rank: int, mine: Any, group: epic.torch.Group) -> Any:
        before = logits_of(mine, IDS)
        blocks = epic.torch.restore_moe(mine, group)
        assert not any(isinstance(m, Block) for m in mine.modules())
        state = {key: value.clone() for key, value in mine.state_dict().items()}
        frozen = [n for n, p in mine.named_parameters() if not p.requires_grad]
        assert epic.torch.replace_moe(mine, group) == blocks
        return before, state, frozen, logits_of(mine, IDS)

    for before, state, frozen_names, again in on_two(copies, run):
        wanted = model.state_dict()
        assert state.keys() == wanted.keys()
        assert all(same_bits(value, wanted[key]) for key, value in state.items())
        assert frozen_names == [n for n, p in model.named_parameters() if not p.requires_grad]
        assert torch.equal(before, again)


@pytest.mark.parametrize("name", SOME_MODELS)
def test_restore_after_changes(name: str, tmp_path: Path) -> None:
    """Check that a conversion to another dtype, and frozen parameters, survive a restore."""
    model, mine = model_of(name), model_of(name)
    last_block(model).experts.down_proj.requires_grad_(False)
    last_block(mine).experts.down_proj.requires_grad_(False)
    with alone() as group:
        epic.torch.replace_moe(mine, group)
        for key, parameter in (*model.named_parameters(), *mine.named_parameters()):
            if "score_correction" not in key:  # `MoE` has no gradient for it
                parameter.requires_grad_(not parameter.requires_grad)
        model.bfloat16().save_pretrained(tmp_path / "plain")
        mine.bfloat16()
        epic.torch.save_pretrained(mine, tmp_path / "epic", group)
        epic.torch.restore_moe(mine, group)
    for (key, wanted), (other, found) in zip(
        model.named_parameters(), mine.named_parameters(), strict=True
    ):
        assert key == other and same_bits(found.detach(), wanted.detach()), key
        assert found.requires_grad == wanted.requires_grad, key
    assert logits_of(mine, IDS).dtype == torch.bfloat16
    sizes = [
        sum(f.stat().st_size for f in (tmp_path / form).glob("*.safetensors"))
        for form in ("plain", "epic")
    ]
    assert sizes[1] < 1.1 * sizes[0]  # biases of the router may have 32 bits


def test_router_logits_after_restore() -> None:
    """Check that a restored model records router logits, also if it did before."""
    copies = [model_of("Mixtral") for _ in range(2)]

    def run(_: int, mine: Any, group: epic.torch.Group) -> Any:
        counts = []
        for call in (None, epic.torch.restore_moe, epic.torch.replace_moe, epic.torch.restore_moe):
            if call is not None:
                call(mine, group)
            counts.append(len(mine(IDS, output_router_logits=True, use_cache=False).router_logits))
        return counts

    assert on_two(copies, run) == [[2] * 4] * 2


class Halved(torch.nn.Module):
    """A parametrization that halves the parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return half of the stored value."""
        return x / 2


def test_computed_parameters(tmp_path: Path) -> None:
    """Check that parameters computed by torch.nn.utils.parametrize are trained and saved."""
    copies = [model_of("Qwen3Moe") for _ in range(2)]

    def run(rank: int, mine: Any, group: epic.torch.Group) -> Any:
        for name in ("w_down", "w_gate"):
            parametrize.register_parametrization(last_block(mine).moe, name, Halved())
        train_step(mine, rank, group)
        epic.torch.save_pretrained(mine, tmp_path, group)
        return logits_of(mine, IDS)

    answers = on_two(copies, run)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded.config._attn_implementation = "eager"
    wanted = logits_of(loaded, IDS)
    for answer in answers:
        assert (wanted - answer).abs().max() < 1e-5 * answer.abs().max()


def save_sharded(rank: int, folder: Path) -> None:
    """Train and save a model under fully_shard over the other axis of the mesh."""
    with group_of(2, max_tokens=256) as group:
        model = model_of("Qwen3Moe")
        model.lm_head.weight = model.model.embed_tokens.weight  # fully_shard keeps them tied
        model.config.tie_word_embeddings = True
        wanted = model.state_dict() if rank == 0 else {}
        wanted = {name: value.clone() for name, value in wanted.items()}
        epic.torch.replace_moe(model, group)
        for layer in (*model.model.layers, model):
            fully_shard(layer, mesh=meshes[2]["dp"])
        epic.torch.save_pretrained(model, folder / "first", group)
        train_step(model, rank % 2, group)
        logits = logits_of(model, IDS)  # fully_shard keeps parameters of the root after forward
        epic.torch.save_pretrained(model, folder / "second", group)
        assert torch.equal(logits_of(model, IDS), logits)
        train_step(model, rank % 2, group)
        with pytest.raises(epic.torch.EpicUnsupportedError, match="sharded by fully_shard"):
            epic.torch.restore_moe(model, group)
        if rank == 0:
            load = transformers.AutoModelForCausalLM.from_pretrained
            first, second = load(folder / "first"), load(folder / "second")
            assert first.state_dict().keys() == wanted.keys()
            assert all(same_bits(v, wanted[name]) for name, v in first.state_dict().items())
            second.config._attn_implementation = "eager"
            assert second.config.architectures == ["Qwen3MoeForCausalLM"]
            assert (logits_of(second, IDS) - logits).abs().max() < 1e-5 * logits.abs().max()


def test_save_under_fully_shard(world: Any, tmp_path: Path) -> None:
    """Check that transformers loads what 2 x 2 ranks save, before and after training."""
    world.run(save_sharded, tmp_path)


def sharded_over_the_group(rank: int, folder: Path) -> None:
    """Save a model whose experts fully_shard has mixed up."""
    with group_of(4) as group:
        model = model_of("Qwen3Moe")
        epic.torch.replace_moe(model, group)
        fully_shard(model, mesh=meshes[4]["ep"])
        with pytest.raises(epic.torch.EpicArgumentError, match="which have different experts"):
            epic.torch.save_pretrained(model, folder, group)


def test_save_under_fully_shard_over_the_group(world: Any, tmp_path: Path) -> None:
    """Check that it is refused."""
    world.run(sharded_over_the_group, tmp_path)


def test_what_is_refused(tmp_path: Path) -> None:
    """Check models without replaced blocks, and that a failed write on rank 0 fails on all
    ranks."""
    with epic.torch.Group(num_ranks=1, max_tokens=64, max_row_bytes=4096) as group:
        for call in (epic.torch.restore_moe, lambda m, g: epic.torch.save_pretrained(m, "x", g)):
            with pytest.raises(epic.torch.EpicUnsupportedError, match="no block that replace_moe"):
                call(model_of("Mixtral"), group)
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")

    def run(rank: int, mine: Any, group: epic.torch.Group) -> str:
        with pytest.raises((OSError, AssertionError)) as caught:
            epic.torch.save_pretrained(mine, blocked / "inside", group)
        assert any(isinstance(m, Block) for m in mine.modules())
        logits_of(mine, IDS)  # the group stays usable
        return str(caught.value)

    answers = on_two([model_of("Mixtral") for _ in range(2)], run)
    assert "rank 0 could not write" in answers[1]


def test_lost_rank(tmp_path: Path) -> None:
    """Check that a model without the experts of a rank that has left is not saved."""
    copies = [copy.deepcopy(model_of("Mixtral")) for _ in range(2)]

    def run(rank: int, mine: Any, group: epic.torch.Group) -> None:
        if rank == 1:
            group.leave()
            return
        group.shrink()
        for call in (
            lambda: epic.torch.save_pretrained(mine, tmp_path / "model", group),
            lambda: epic.torch.restore_moe(mine, group),
        ):
            with pytest.raises(epic.torch.EpicUnsupportedError, match="has lost rank 1 and its"):
                call()

    on_two(copies, run)
    assert not (tmp_path / "model").exists()


def test_no_memory_is_kept() -> None:
    """Check that replace_moe keeps little of the original, and nothing in the model's state."""
    model = model_of("Qwen3Moe")
    with epic.torch.Group(num_ranks=1, max_tokens=64, max_row_bytes=4096) as group:
        epic.torch.replace_moe(model, group)
        blocks = [m for m in model.modules() if isinstance(m, Block)]
        for block in blocks:
            assert all(p.is_meta for p in block.original[0].parameters())
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        assert not [key for key in model.state_dict() if "original" in key]
        again = copy.deepcopy(model)
        assert epic.torch.restore_moe(again, group) == len(blocks)
