# SPDX-License-Identifier: Apache-2.0
"""Tests LoRA adapters of peft on transformers models whose experts are spread over ranks.

The ranks are processes, not threads, because peft changes parameters while a layer runs, and
threads would share these changes.
"""

import contextlib
import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard

import epic.torch
from epic.torch.families import unwrapped
from epic.torch.state import adapters_of_experts
from pages import find_block
from parts import SIZES, group_of, meshes, numbers
from reference import relative
from test_pretrained import alone, gradients_of, last_block, model_of, transformers

peft = pytest.importorskip("peft", reason="there is no peft package")

IDS = torch.randint(3, 64, (8, 7), generator=torch.Generator().manual_seed(4))
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
TARGETS = {
    # experts are [E, in, out], with the attribute `is_transposed`
    "GptOss": [*EXPERTS, "router.weight"],
    "Llama4": [*EXPERTS, "router.weight"],  # experts are [E, in, out], without `is_transposed`
    "Mixtral, 4 experts": [*EXPERTS, "gate.weight"],
    "Qwen3Moe": [*EXPERTS, "gate.weight"],
}


def adapted(name: str) -> Any:
    """Return a model with random adapters on experts, router and attention."""
    wish = {"target_modules": ["q_proj"], "target_parameters": TARGETS[name]}
    return draw_adapters(
        peft.get_peft_model(model_of(name), peft.LoraConfig(r=3, lora_alpha=5, **wish))
    )


def draw_adapters(model: Any) -> Any:
    """Return a model after its adapters got random values."""
    torch.manual_seed(5)
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "lora_" in key:
                value.normal_(std=0.3)
    return model


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits, computed without gradients."""
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def step_of(model: Any) -> None:
    """Make one step of SGD on the adapters."""
    with torch.no_grad():
        for value in model.parameters():
            if value.grad is not None:
                value -= 0.05 * value.grad


def train_adapters(rank: int, name: str, ep: int, folder: str) -> None:
    """Train, save and merge adapters, and compare with the model of transformers."""
    whole, mine = adapted(name), adapted(name)
    first = rank // ep * ep
    ids, own = IDS[2 * first : 2 * (first + ep)], IDS[2 * rank : 2 * rank + 2]
    with group_of(ep) as group:
        epic.torch.replace_moe(mine, group)
        wanted = gradients_of(whole, ids)[2 * (rank - first) :][:2]
        assert relative(gradients_of(mine, own), wanted) < 1e-5
        epic.torch.sum_gradients(mine, group)
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        for parameters in (mine, mine.parameters()):
            got = epic.torch.clip_grad_norm_(parameters, 1e9, group)
            assert abs(got - norm) < 1e-4 * norm
        epic.torch.clip_grad_norm_(mine, 1.0, group)
        step_of(whole)
        step_of(mine)
        wanted = logits_of(whole, own)
        assert relative(logits_of(mine, own), wanted) < 1e-5

        epic.torch.save_pretrained(mine, folder, group)
        # groups that do not contain process 0 write nothing
        for replaces in (False, True) if first == 0 else ():
            loaded = peft.PeftModel.from_pretrained(model_of(name), folder)
            if replaces:
                epic.torch.replace_moe(loaded, group)
            assert relative(logits_of(loaded, own), wanted) < 1e-5

        with mine.disable_adapter():
            assert relative(logits_of(mine, own), logits_of(model_of(name), own)) < 1e-5
        mine.merge_adapter()
        assert relative(logits_of(mine, own), wanted) < 1e-4
        mine.unmerge_adapter()
        assert relative(logits_of(mine, own), wanted) < 1e-4

        blocks = epic.torch.restore_moe(mine, group)
        state = whole.state_dict()
        assert mine.state_dict().keys() == state.keys()
        for key, value in mine.state_dict().items():
            assert relative(value, state[key]) < 1e-4, key
        trained = [[k for k, p in m.named_parameters() if p.requires_grad] for m in (whole, mine)]
        assert trained[0] == trained[1]
        assert epic.torch.replace_moe(mine, group) == blocks

        plain = mine.merge_and_unload()
        epic.torch.save_pretrained(plain, f"{folder}/merged", group)
        if first == 0:
            stock = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/merged")
            stock.config._attn_implementation = "eager"
            assert relative(logits_of(stock.train(), own), wanted) < 1e-4


@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize("name", TARGETS)
def test_adapters(world: Any, name: str, ep: int, tmp_path: Path) -> None:
    """Check adapters with one expert or several experts per rank."""
    world.run(train_adapters, name, ep, str(tmp_path))


def save_sharded(rank: int, folder: str) -> None:
    """Save adapters of a model under fully_shard, and load them with peft alone."""
    with group_of(2, max_tokens=256) as group:
        model: Any = adapted("Qwen3Moe")
        epic.torch.replace_moe(model, group)
        for layer in (*model.base_model.model.model.layers, model):
            fully_shard(layer, mesh=meshes[2]["dp"])
        wanted = logits_of(model, IDS)
        epic.torch.save_pretrained(model, folder, group)
        if rank == 0:
            stock = peft.PeftModel.from_pretrained(model_of("Qwen3Moe"), folder)
            assert relative(logits_of(model_of("Qwen3Moe"), IDS), wanted) > 1e-2
            assert relative(logits_of(stock.train(), IDS), wanted) < 1e-5


@pytest.mark.night
def test_save_under_fully_shard(world: Any, tmp_path: Path) -> None:
    """Check that peft loads what 2 x 2 ranks save."""
    world.run(save_sharded, str(tmp_path))


def make_run(ep: int, group: epic.torch.Group) -> tuple[Any, Any, epic.torch.TrainingState]:
    """Return a model with adapters, the optimizer of the adapters, and their state."""
    model = adapted("Qwen3Moe").double()
    epic.torch.replace_moe(model, group)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    return model, optimizer, epic.torch.TrainingState(model, meshes[ep]["ep"], optimizer)


def run_steps(model: Any, optimizer: Any, group: epic.torch.Group) -> list[float]:
    """Run some steps and return their losses, over the sequences of all ranks of a group."""
    losses = []
    for _ in range(3):
        ids = IDS.tensor_split(group.num_ranks)[group.rank]
        optimizer.zero_grad()
        loss = model(ids, use_cache=False).logits.square().mean(dim=(1, 2)).sum()
        loss.backward()
        epic.torch.sum_gradients(model, group)
        optimizer.step()
        losses.append(epic.torch.sum(group, loss.detach().reshape(1)).item())
    return losses


def save_run(rank: int, folder: str) -> list[float]:
    """Train on four ranks, save, and continue."""
    with group_of(4) as group:
        model, optimizer, state = make_run(4, group)
        run_steps(model, optimizer, group)
        dcp.save({"train": state}, checkpoint_id=folder)
        return run_steps(model, optimizer, group)


def resume_run(rank: int, ep: int, folder: str) -> list[float]:
    """Load with other adapters in the model, and continue."""
    with group_of(ep) as group:
        model, optimizer, state = make_run(ep, group)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.zero_()
        dcp.load({"train": state}, checkpoint_id=folder)
        return run_steps(model, optimizer, group)


def test_training_state(world: Any, tmp_path: Path) -> None:
    """Check that the adapters and the optimizer of four ranks continue on 4, 2 and 1 ranks."""
    wanted = world.run(save_run, str(tmp_path))[0]
    assert wanted[0] > wanted[-1]
    for ep in (4, 2, 1):
        for losses in world.run(resume_run, ep, str(tmp_path)):
            assert losses == pytest.approx(wanted, rel=1e-8), ep


def run_invariant(rank: int, ep: int, folder: str) -> tuple[str, np.ndarray, np.ndarray]:
    """Compare an invariant model that from_pretrained has adapted with one that was loaded as a
    whole. Return the fingerprint, and output and gradient of a layer for the same tokens."""

    def adapt(model: Any) -> Any:
        wish = {"target_modules": ["q_proj"], "target_parameters": TARGETS["Qwen3Moe"]}
        return draw_adapters(peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=5, **wish)))

    kind = transformers.AutoModelForCausalLM
    with group_of(ep) as group:
        mine = epic.torch.from_pretrained(kind, folder, group, adapt=adapt, invariant=True)
        whole = adapt(kind.from_pretrained(folder))
        epic.torch.replace_moe(whole, group, invariant=True)
        gradients = []
        for model in (mine.train(), whole.train()):
            gradients_of(model, IDS[2 * rank : 2 * rank + 2])
            epic.torch.sum_gradients(model, group)
            gradients.append({name: p.grad for name, p in model.named_parameters()})
        for name, value in gradients[1].items():
            assert (value is None) == (gradients[0][name] is None), name
            assert value is None or torch.equal(gradients[0][name], value), name
        block = last_block(mine)
        assert unwrapped(block.moe).options.invariant
        report = epic.torch.check_invariance(mine, group)
        assert report.is_invariant
        with mine.disable_adapter():  # the report is about the active adapters
            plain = epic.torch.check_invariance(mine, group)
        assert plain.is_invariant and plain.fingerprint != report.fingerprint
        part = slice(12 * group.rank // ep, 12 * (group.rank + 1) // ep)
        x = numbers(1, 1, 12, 32)[:, part].requires_grad_()
        out = block(x)
        out.backward(numbers(2, 1, 12, 32)[:, part])
        return report.fingerprint, out.detach().numpy(), x.grad.numpy()


def test_invariant_models(world: Any, tmp_path: Path) -> None:
    """Output and gradient of an adapted layer have equal bits on 1, 2 and 4 ranks."""
    model_of("Qwen3Moe").save_pretrained(tmp_path)
    fingerprint, *whole = world.run(run_invariant, 1, str(tmp_path))[0]
    for ep in (2, 4):
        fingerprints, *parts = zip(*world.run(run_invariant, ep, str(tmp_path))[:ep], strict=True)
        assert set(fingerprints) == {fingerprint}
        for wanted, got in zip(whole, parts, strict=True):
            assert np.array_equal(np.concatenate(got, axis=1), wanted)


def load_run(ep: int, group: epic.torch.Group, folder: str, saved: str | None) -> tuple[Any, ...]:
    """Load a model, of which each rank reads its own experts, with new or saved adapters."""

    def adapt(model: Any) -> Any:
        if saved:
            return peft.PeftModel.from_pretrained(model, saved, is_trainable=True)
        torch.manual_seed(3)
        wish = {"target_modules": ["q_proj"], "target_parameters": TARGETS["Qwen3Moe"]}
        return peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=5, **wish))

    kind = transformers.AutoModelForCausalLM
    model = epic.torch.from_pretrained(kind, folder, group, dtype=torch.float64, adapt=adapt)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all("lora_" in name for name, p in model.named_parameters() if p.requires_grad)
    moe = last_block(model).moe
    assert unwrapped(moe).num_local_experts == 8 // ep
    factors = [p for module in moe.modules() for p in adapters_of_experts(module)]
    assert {3 * 8 // ep in p.shape for p in factors} == {True} and len(factors) == 4
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    return model, optimizer, epic.torch.TrainingState(model, meshes[ep]["ep"], optimizer)


def run_loaded(rank: int, ep: int, folder: str, begin: str | None, save: str | None) -> Any:
    """Load, or continue with the adapters and the state of another run; save, and train on."""
    with group_of(ep) as group:
        model, optimizer, state = load_run(ep, group, folder, begin)
        if begin:
            dcp.load({"train": state}, checkpoint_id=f"{begin}/state")
        else:
            run_steps(model, optimizer, group)
        before = logits_of(model, IDS[:2])
        if save:
            epic.torch.save_pretrained(model, save, group)
            dcp.save({"train": state}, checkpoint_id=f"{save}/state")
        return before, run_steps(model, optimizer, group)


@pytest.mark.parametrize("ep", [4, pytest.param(1, marks=pytest.mark.night)])
def test_loaded_models(world: Any, ep: int, tmp_path: Path) -> None:
    """Train adapters on a model of from_pretrained with two ranks; continue on 4 ranks or on 1."""
    folder, saved = str(tmp_path / "model"), str(tmp_path / "adapter")
    model_of("Qwen3Moe").save_pretrained(folder)
    logits, losses = world.run(run_loaded, 2, folder, None, saved)[0]
    assert losses[-1] < losses[0]
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    stock.config._attn_implementation = "eager"
    stock.set_experts_implementation("eager")  # the others do not support float64
    stock = peft.PeftModel.from_pretrained(stock, saved)
    assert relative(logits_of(stock, IDS[:2]), logits) < 1e-6
    assert relative(logits_of(stock.unload(), IDS[:2]), logits) > 1e-3
    for again, more in world.run(run_loaded, ep, folder, saved, None):
        assert relative(again, logits) < 1e-6
        assert more == pytest.approx(losses, rel=1e-8)


def test_bits_of_adapters() -> None:
    """Check that a replaced and restored model has its original bits, scalings and modes."""
    model, wanted = adapted("Qwen3Moe"), adapted("Qwen3Moe")
    model.add_adapter("other", peft.LoraConfig(r=2, target_parameters=TARGETS["Qwen3Moe"]))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    ids = IDS[:2]
    with alone() as group:
        epic.torch.replace_moe(model, group)
        assert relative(logits_of(model, ids), logits_of(wanted, ids)) < 1e-5
        model.set_adapter("other")
        epic.torch.restore_moe(model, group)
        assert state.keys() == model.state_dict().keys()
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        assert last_block(model).experts.active_adapters == ["other"]
        model.set_adapter("default")
        assert torch.equal(logits_of(model, ids), logits_of(wanted, ids))


def follow_guide(rank: int, ranks: int, folder: str) -> None:
    """Run the program of the guide in the first ranks, and check that its files can be loaded."""
    members = torch.distributed.new_group(list(range(ranks)))
    if rank >= ranks:
        return
    ids = IDS[: rank + 1]  # the number of tokens differs between ranks
    with contextlib.chdir(folder), epic.torch.Group(members, **SIZES) as group:
        names = {"epic": epic, "torch": torch, "model": model_of("Qwen3Moe"), "group": group}
        names["ids"] = ids
        exec(find_block("frameworks", "# LoRA on experts, router and attention"), names)
        wanted = logits_of(names["model"], ids)
        torch.distributed.barrier(members)  # rank 0 writes the files
        adapters = peft.PeftModel.from_pretrained(model_of("Qwen3Moe"), "adapter")
        assert relative(logits_of(adapters, ids), wanted) < 1e-5
        stock = transformers.AutoModelForCausalLM.from_pretrained("merged")
        assert relative(logits_of(stock, ids), wanted) < 1e-5


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_guide(world: Any, ranks: int, tmp_path: Path) -> None:
    """Follow the guide with this number of ranks."""
    world.run(follow_guide, ranks, str(tmp_path))


def test_what_is_refused(tmp_path: Path) -> None:
    """Check that adapters on other modules, or added after replace_moe, are refused."""
    model = model_of("Llama4")
    config = peft.LoraConfig(r=2, target_modules=["shared_expert.up_proj"])
    with alone() as group:
        with pytest.raises(epic.torch.EpicUnsupportedError, match=r"shared_expert\.up_proj\.lora"):
            epic.torch.replace_moe(peft.get_peft_model(model, config), group)
        block = last_block(adapted("Qwen3Moe"))
        with pytest.raises(epic.torch.EpicUnsupportedError, match="adapters of peft on"):
            epic.torch.from_block(block, group)
        model = model_of("Qwen3Moe")
        model.save_pretrained(tmp_path)
        with pytest.raises(epic.torch.EpicArgumentError, match="adapt returned a Qwen3Moe"):
            kind = transformers.AutoModelForCausalLM
            epic.torch.from_pretrained(kind, tmp_path, group, adapt=copy.deepcopy)
        epic.torch.replace_moe(model, group)
        config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["moe.w_down"])
        model = peft.get_peft_model(model, config)
        logits_of(model, IDS[:1])
        with pytest.raises(epic.torch.EpicUnsupportedError, match="be added before replace_moe"):
            epic.torch.save_pretrained(model, tmp_path, group)
