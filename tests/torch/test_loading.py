# SPDX-License-Identifier: Apache-2.0
"""Tests loading models of transformers of which each rank reads only its own experts."""

import json
import shutil
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import epic.torch
from epic.torch import loading
from epic.torch.pretrained import Block
from pages import find_block
from parts import group_of
from reference import relative
from test_pretrained import (
    DEEPSEEK,
    MODELS,
    SMALL,
    SOME_MODELS,
    VARIANTS,
    alone,
    last_block,
    model_of,
    on_two,
    transformers,
)
from test_restore import IDS, logits_of, same_bits

files = pytest.importorskip("safetensors.torch", reason="there is no safetensors package")
AUTO: Any = transformers.AutoModelForCausalLM
EXPERTS = (".experts.", "input_linear", "output_linear")  # parts of the names of experts in files


def save(model: Any, folder: Path, layout: str) -> None:
    """Write a model to a folder in one of three layouts.

    "own" is that of transformers. "sharded" also has several small files. "stacked" has the names
    and shapes of the loaded model.
    """
    sizes = {"max_shard_size": "20KB"} if layout == "sharded" else {}
    model.save_pretrained(folder, **sizes)
    if layout == "stacked":
        state = {name: value.contiguous() for name, value in model.state_dict().items()}
        files.save_file(state, folder / loading.SINGLE)


def state_of(model: Any) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers, including buffers that are in no state_dict."""
    return {**model.state_dict(), **dict(model.named_buffers()), **dict(model.named_parameters())}


def compare(rank: int, ep: int, folder: str, changes: dict[str, Any]) -> None:
    """Compare a loaded model with one that was loaded as a whole, over groups of ep ranks."""
    with group_of(ep) as group:
        whole = AUTO.from_pretrained(folder, **changes)
        blocks = epic.torch.replace_moe(whole, group)
        mine = epic.torch.from_pretrained(AUTO, folder, group, **changes)
        assert type(mine) is type(whole)
        assert blocks == sum(isinstance(module, Block) for module in mine.modules())
        wanted, got = state_of(whole), state_of(mine)
        assert got.keys() == wanted.keys()
        for key, value in got.items():
            if value.dtype.is_floating_point:
                assert same_bits(value, wanted[key]), key
            else:
                assert torch.equal(value, wanted[key]), key
            assert value.requires_grad == wanted[key].requires_grad, key
        assert torch.equal(logits_of(mine, IDS), logits_of(whole, IDS))
        assert mine.training == whole.training
        assert mine.generation_config.to_dict() == whole.generation_config.to_dict()
        assert mine.config.to_dict() == whole.config.to_dict()
        assert mine.name_or_path == whole.name_or_path


@pytest.mark.parametrize("name", [*SOME_MODELS, *VARIANTS])
def test_the_same_model(world: Any, name: str, tmp_path: Path) -> None:
    """Check that parameters, buffers and logits have the bits of replace_moe."""
    save(model_of(name).eval(), tmp_path, "own")
    world.run(compare, 2, str(tmp_path), {})


@pytest.mark.night
@pytest.mark.parametrize("name", MODELS)
def test_each_family_in_each_layout(world: Any, name: str, tmp_path: Path) -> None:
    """Check 4 ranks that read the layout of transformers, 2 ranks that read one tensor for all
    experts, and 1 rank that reads many files."""
    model = model_of(name).eval()
    for layout, ep, changes in (
        ("own", 4, {}),
        ("stacked", 2, {}),
        ("sharded", 1, {"dtype": torch.bfloat16}),
    ):
        save(model, tmp_path / layout, layout)
        world.run(compare, ep, str(tmp_path / layout), changes)


@pytest.mark.parametrize(("layout", "ep"), [("own", 1), ("stacked", 4), ("sharded", 2)])
def test_each_layout(world: Any, layout: str, ep: int, tmp_path: Path) -> None:
    """Check each layout, and each number of ranks."""
    save(model_of("Qwen3Moe").eval(), tmp_path, layout)
    world.run(compare, ep, str(tmp_path), {})


def test_dtypes(tmp_path: Path) -> None:
    """Check the dtype: that of config.json, else that of the files, or the one that is passed."""
    model_of("Qwen3Moe").to(torch.bfloat16).save_pretrained(tmp_path)

    def dtype(**options: Any) -> torch.dtype:
        with alone() as group:
            model = epic.torch.from_pretrained(AUTO, tmp_path, group, **options)
            kinds = {value.dtype for name, value in model.named_parameters() if name != "w_gate"}
            assert model.config.dtype == model.dtype
            return model.model.layers[0].mlp.moe.w_down.dtype if kinds else torch.float32

    assert dtype() == torch.bfloat16
    assert dtype(dtype="float16") == torch.float16
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["dtype"]
    file.write_text(json.dumps(config))
    assert dtype() == torch.bfloat16
    assert dtype(torch_dtype=torch.float16) == torch.float16
    for wrong in ("flat", 3, torch.int8):
        with pytest.raises(epic.torch.EpicArgumentError, match=rf"dtype is {wrong!r}: must be"):
            dtype(dtype=wrong)


def test_fields_of_the_configuration(tmp_path: Path) -> None:
    """Check that options can change fields of the configuration, as in transformers."""
    model_of("Qwen3Moe").save_pretrained(tmp_path)
    changes: dict[str, Any] = {"num_experts_per_tok": 1, "use_cache": False}
    changes["attn_implementation"] = "eager"
    with alone() as group:
        model = epic.torch.from_pretrained(AUTO, tmp_path, group, **changes)
        stock = AUTO.from_pretrained(tmp_path, **changes)
        assert model.config.to_dict() == stock.config.to_dict()
        assert relative(logits_of(model, IDS), logits_of(stock, IDS)) < 1e-5


def test_tied_weights_and_training(tmp_path: Path) -> None:
    """Check tied embeddings, a training step, and saving: names and bits are those of the files."""
    torch.manual_seed(3)
    more = {"num_experts": 8, "moe_intermediate_size": 24, "tie_word_embeddings": True}
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SMALL, **more))
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path / "first", max_shard_size="30KB")
    kind = transformers.Qwen3MoeForCausalLM
    folder = tmp_path / "first"

    def run(rank: int, mine: Any, group: epic.torch.Group) -> Any:
        loaded = epic.torch.from_pretrained(kind, folder, group)
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert loaded.generation_config.max_new_tokens == 7
        epic.torch.save_pretrained(loaded, tmp_path / "second", group, max_shard_size="30KB")
        states = []
        for one in (loaded, mine.eval()):
            one(IDS, labels=IDS, use_cache=False).loss.backward()
            epic.torch.sum_gradients(one, group)
            states.append({name: p.grad for name, p in one.named_parameters()})
        for name, value in states[0].items():
            assert value is not None and torch.equal(value, states[1][name]), name

    on_two([kind.from_pretrained(folder) for _ in range(2)], run)
    read, written = (
        {key: value for file in path.glob("*.safetensors") for key, value in
         files.load_file(file).items()} for path in (folder, tmp_path / "second")
    )  # fmt: skip
    assert read.keys() == written.keys()
    assert all(same_bits(value, written[key]) for key, value in read.items())


def follow_guide(rank: int, ranks: int, folder: str) -> None:
    """Run the line of the guide in the first ranks."""
    members = torch.distributed.new_group(list(range(ranks)))
    if rank >= ranks:
        return
    with epic.torch.Group(members, max_tokens=64, max_row_bytes=4096) as group:
        names: dict[str, Any] = {"epic": epic, "torch": torch, "AutoModelForCausalLM": AUTO}
        names |= {"group": group, "folder": folder}
        exec(find_block("frameworks", "# each rank reads its own experts only"), names)
        assert names["model"].dtype == torch.bfloat16
        assert len(last_block(names["model"]).moe.w_down) == 8 // ranks


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_guide(world: Any, ranks: int, tmp_path: Path) -> None:
    """Check that the line of the guide runs, and that each rank has its experts."""
    model_of("Qwen3Moe").save_pretrained(tmp_path)
    world.run(follow_guide, ranks, str(tmp_path))


class Reading:
    """Records what is read from files: names, bytes, and the bytes that are alive at the same
    time."""

    def __init__(self) -> None:
        self.num_bytes: dict[str, int] = {}
        self.alive: dict[int, int] = {}
        self.most_alive = 0

    def count(self, name: str, value: torch.Tensor) -> None:
        """Count a tensor until it is deleted."""
        size = value.nbytes
        self.num_bytes[name] = self.num_bytes.get(name, 0) + size
        if any(word in name for word in EXPERTS):
            self.alive[id(value)] = size
            weakref.finalize(value, self.alive.pop, id(value))
            self.most_alive = max(self.most_alive, sum(self.alive.values()))


class Counted:
    """A file whose tensors are counted."""

    def __init__(self, reading: Reading, name: str, part: Any) -> None:
        self.reading, self.name, self.part = reading, name, part

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part, name)

    def __getitem__(self, where: Any) -> torch.Tensor:
        value = self.part[where]
        self.reading.count(self.name, value)
        return value


@pytest.mark.parametrize("layout", ["own", "stacked", "sharded"])
@pytest.mark.parametrize("name", ["GptOss", "GraniteMoe", "Llama4", "Mixtral", "Qwen3Moe"])
def test_what_is_read(name: str, layout: str, tmp_path: Path) -> None:
    """Check that a rank reads each byte of its own experts once and no other expert, and that the
    tensors of only one expert are alive at a time, in addition to the layer."""
    save(model_of(name), tmp_path, layout)
    state = loading.Checkpoint(tmp_path)
    expert_bytes = {
        key: files.load_file(file)[key].nbytes
        for key, file in state.file_of.items()
        if any(word in key for word in EXPERTS)
    }
    plain = loading.Checkpoint.tensor
    for rank in range(2):
        reading = Reading()

        def count(checkpoint: Any, key: str, reading: Reading = reading) -> Any:
            return Counted(reading, key, plain(checkpoint, key))

        with alone() as group, pytest.MonkeyPatch.context() as patch:
            patch.setattr(loading.Checkpoint, "tensor", count)
            # loading does not communicate, so one process can act as each rank
            patch.setattr(group, "rank", rank)
            patch.setattr(group, "num_ranks", 2)
            epic.torch.from_pretrained(AUTO, tmp_path, group)
        read = {key: size for key, size in reading.num_bytes.items() if key in expert_bytes}
        assert sum(read.values()) == sum(expert_bytes.values()) // 2
        for_each = any(".experts.0." in key for key in expert_bytes)
        if for_each:
            numbers = {int(key.split(".experts.")[1].split(".")[0]) for key in read}
            assert numbers == set(range(4 * rank, 4 * rank + 4))
        one = max(expert_bytes.values()) // (1 if for_each else 8)
        # gate and up of an expert, or one slice
        assert reading.most_alive <= one * (2 if for_each else 1)


def names_in(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder with one file."""
    return files.load_file(folder / loading.SINGLE)


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    """Return a change of a file that removes a tensor."""
    return lambda state: state.pop(name)


def put(name: str, *shape: int) -> Callable[[dict[str, Any]], None]:
    """Return a change of a file that adds a tensor, or gives it another shape."""
    return lambda state: state.update({name: torch.zeros(shape)})


def move(name: str, new_name: str) -> Callable[[dict[str, Any]], None]:
    """Return a change of a file that renames a tensor."""
    return lambda state: state.update({new_name: state.pop(name)})


LAYER = "model.layers.1.mlp"
GATE = f"{LAYER}.experts.3.gate_proj.weight"
WRONG: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "an expert's part": (drop(GATE), rf"not contain {GATE}: must .* 8 experts"),
    "an expert more": (
        put(f"{LAYER}.experts.8.gate_proj.weight", 24, 32),
        r"experts\.8\.gate_proj\.weight in .*model\.safetensors has no place",
    ),
    "an expert's number": (
        move(
            f"{LAYER}.experts.7.gate_proj.weight", f"{LAYER}.experts.8.gate_proj.weight"
        ),
        r"not contain .*experts\.7\.gate_proj\.weight: must .* 8 experts",
    ),
    "an expert's shape": (
        put(GATE, 25, 32), r"experts\.3\.gate_proj\.weight in .*model\.safetensors",
    ),
    "a norm": (drop("model.norm.weight"), r"not contain model\.norm\.weight: must contain it"),
    "a shape": (
        put("model.norm.weight", 33),
        r"model\.norm\.weight in .*model\.safetensors has the shape \[33\]: must be \[32\]",
    ),
    "a tensor more": (
        put("model.layers.1.other.weight", 2),
        r"other\.weight in .*model\.safetensors is not a parameter of Qwen3MoeForCausalLM",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_tensors(what: str, tmp_path: Path) -> None:
    """Check that all ranks name the tensor and the file, whichever rank owns the expert."""
    model_of("Qwen3Moe").save_pretrained(tmp_path)
    change, words = WRONG[what]
    state = names_in(tmp_path)
    change(state)
    files.save_file(state, tmp_path / loading.SINGLE)
    with alone() as group:
        with pytest.raises(epic.torch.EpicArgumentError, match=words):
            epic.torch.from_pretrained(AUTO, tmp_path, group)
        if what == "a tensor more":
            model = epic.torch.from_pretrained(AUTO, tmp_path, group, strict=False)
            assert torch.isfinite(logits_of(model, IDS)).all()


def test_wrong_files(tmp_path: Path) -> None:
    """Check missing files, truncated files, files whose tensors differ from the index, and missing
    experts."""
    model_of("Qwen3Moe").save_pretrained(tmp_path / "good", max_shard_size="20KB")

    def refused(change: Callable[[Path], None], words: str) -> None:
        folder = tmp_path / "bad"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "good", folder)
        change(folder)
        with (
            alone() as group,
            pytest.raises(epic.torch.EpicArgumentError, match=words),
        ):
            epic.torch.from_pretrained(AUTO, folder, group)

    def second(folder: Path) -> Path:
        return sorted(folder.glob("model-00002-*"))[0]

    def cut(folder: Path) -> None:
        file = second(folder)
        file.write_bytes(file.read_bytes()[:-8])

    def swap(folder: Path) -> None:
        file = second(folder)
        state = files.load_file(file)
        state.pop(sorted(state)[0])
        files.save_file(state, file)

    def write_index(folder: Path, text: str) -> None:
        (folder / loading.INDEX).write_text(text)

    def no_index(folder: Path) -> None:
        (folder / loading.INDEX).unlink()

    refused(lambda folder: second(folder).unlink(), r"model-00002-.* does not exist: must be")
    refused(cut, r"model-00002-.* cannot be read \(.*\): must be a complete safetensors file")
    refused(swap, r"model-00002-.* does not contain .*: must contain it, because model")
    for text in ("{", "[]", "{}"):
        refused(partial(write_index, text=text), r"index\.json cannot be read \(.*\): must be")
    refused(no_index, r"bad/model\.safetensors does not exist: must be")


def test_what_is_refused(tmp_path: Path) -> None:
    """Check that unknown blocks, quantized models, and options for whole models are refused."""
    config = transformers.Dots1Config(**{**SMALL, **DEEPSEEK, "n_group": 1, "topk_group": 1})
    transformers.Dots1ForCausalLM(config).save_pretrained(tmp_path / "other")
    model_of("Qwen3Moe").save_pretrained(tmp_path / "known")
    with alone() as group:
        with pytest.raises(epic.torch.EpicUnsupportedError, match=r"Dots1MoE.*MixtralSparseMoe"):
            epic.torch.from_pretrained(AUTO, tmp_path / "other", group)
        with pytest.raises(epic.torch.EpicArgumentError, match="none': must be a folder with"):
            epic.torch.from_pretrained(AUTO, tmp_path / "none", group)
        no_group: Any = None
        for call in (
            lambda: epic.torch.from_pretrained(AUTO, tmp_path / "known", no_group),
            lambda: epic.torch.replace_moe(model_of("Qwen3Moe"), no_group),
        ):
            with pytest.raises(epic.torch.EpicArgumentError, match="group is a NoneType: must be"):
                call()
        with pytest.raises(epic.torch.EpicArgumentError, match="device_map is 'cpu': must be left"):
            epic.torch.from_pretrained(AUTO, tmp_path / "known", group, device_map="cpu")
        file = tmp_path / "known/config.json"
        file.write_text(
            json.dumps({**json.loads(file.read_text()), "quantization_config": {"bits": 4}})
        )
        with pytest.raises(epic.torch.EpicUnsupportedError, match="must not be quantized"):
            epic.torch.from_pretrained(AUTO, tmp_path / "known", group)
