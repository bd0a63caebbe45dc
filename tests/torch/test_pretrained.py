# SPDX-License-Identifier: Apache-2.0
"""Tests replace_moe with small random models of transformers.

Logits and gradients must stay equal if the experts of a model are spread over ranks.
"""

import copy
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

import epic.torch
from epic.torch.families import FAMILIES
from epic.torch.module import EXPERT_WEIGHTS
from epic.torch.pretrained import Block, read_block
from reference import relative

transformers = pytest.importorskip("transformers", reason="there is no transformers package")

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 64,
    "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 8, "n_shared_experts": 2, "moe_intermediate_size": 24, "n_group": 4,
    "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}  # fmt: skip
HEADS = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
         "v_head_dim": 8}  # fmt: skip
QWEN: dict[str, Any] = {"num_experts": 8, "moe_intermediate_size": 24}
SHARED = {**QWEN, "shared_expert_intermediate_size": 40}
LINEAR: dict[str, Any] = {
    "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "DeepseekV2": {
        **DEEPSEEK, **HEADS, "num_key_value_heads": 4, "topk_method": "group_limited_greedy",
    },
    "DeepseekV3": {**DEEPSEEK, **HEADS, "num_key_value_heads": 4},
    "Ernie4_5_Moe": {
        "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1, "moe_norm_min": 0.4, "tie_word_embeddings": False,
    },
    "Glm4Moe": {**DEEPSEEK, "n_group": 1, "topk_group": 1, "head_dim": 8},
    "Glm4MoeLite": {
        **DEEPSEEK, **HEADS, "num_key_value_heads": 4, "mlp_layer_types": ["dense", "sparse"],
    },
    "GptOss": {"num_local_experts": 8, "head_dim": 8, "sliding_window": 16},
    "GraniteMoe": {"num_local_experts": 8},
    "HunYuanMoEV1": {"num_experts": 8, "moe_topk": 2, "head_dim": 8},
    "Lfm2Moe": {
        **QWEN, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"],
        "routed_scaling_factor": 1.5, "tie_word_embeddings": False,
    },
    "Llama4": {"num_local_experts": 8, "head_dim": 8, "intermediate_size_mlp": 24},
    "Mixtral": {"num_local_experts": 8},
    "Olmoe": {"num_experts": 8, "clip_qkv": 8.0},
    "Phimoe": {"num_local_experts": 8, "router_jitter_noise": 0.1},
    "Qwen2Moe": SHARED,
    "Qwen3Moe": {**QWEN, "norm_topk_prob": True},
    "Qwen3Next": {**SHARED, **LINEAR},
    "Qwen3_5Moe": {**SHARED, **LINEAR},
}  # fmt: skip
# Other configurations of the same model classes.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepseekV2, greedy": ("DeepseekV2", {"topk_method": "greedy", "n_group": None}),
    "Ernie4_5_Moe, no shared expert": ("Ernie4_5_Moe", {"moe_num_shared_experts": 0}),
    "Lfm2Moe, no bias": ("Lfm2Moe", {"use_expert_bias": False, "norm_topk_prob": False}),
    "Mixtral, 4 experts": ("Mixtral", {"num_local_experts": 4}),
    "Qwen2Moe, normalized": ("Qwen2Moe", {"norm_topk_prob": True}),
}
# models whose text configuration is part of another configuration
OF_TEXT = ("Llama4", "Qwen3_5Moe")
IN_BLOCKS = ("mlp", "moe", "feed_forward")  # parts of the names of parameters in blocks


def model_of(name: str) -> Any:
    """Return a model with random weights and biases, in training mode unless that is random."""
    torch.manual_seed(3)
    name, changes = VARIANTS.get(name, (name, {}))
    kind = f"{name}Text" if name in OF_TEXT else name
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **MODELS[name], **changes})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).float()
    with torch.no_grad():
        for key, value in (*model.named_parameters(), *model.named_buffers()):
            if any(word in key for word in IN_BLOCKS):
                value.normal_(std=0.3)
    return model.train(name != "Phimoe")


def gradients_of(model: Any, ids: torch.Tensor) -> Any:
    """Return the logits, after backward of a loss that depends on every logit."""
    logits = model(ids, use_cache=False).logits
    logits.square().mean(dim=-1).sum().backward()
    return logits.detach()


def gradients_as_epic_has_them(block: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of a transformers block under the names and shapes of EPIC."""
    filled = copy.deepcopy(block).requires_grad_(False)
    for kept, found in zip(filled.parameters(), block.parameters(), strict=True):
        if found.grad is not None:
            kept.copy_(found.grad)
    found = read_block(filled)[1]
    return {name: value for name, value in found.items() if name != "bias"}


def blocks_of(model: Any) -> dict[str, Any]:
    """Return the blocks of all layers by name, of transformers or of EPIC."""
    names = (*FAMILIES, "Block")
    return {name: m for name, m in model.named_modules() if type(m).__name__ in names}


def last_block(model: Any) -> Any:
    """Return the block of the last layer, of transformers or of EPIC."""
    return list(blocks_of(model).values())[-1]


def gradients_outside(model: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of all parameters that are not in a block."""
    within = tuple(f"{name}." for name in blocks_of(model))
    named = {n: p for n, p in model.named_parameters() if not n.startswith(within)}
    return {n: p.grad for n, p in named.items() if p.grad is not None}


def on_two(copies: list[Any], function: Any) -> list[Any]:
    """Call function(rank, model, group) in two threads, each with half of the experts."""
    bootstraps = epic.torch.threads(2)

    def run(rank: int) -> Any:
        with epic.torch.Group(
            bootstrap=bootstraps[rank], max_tokens=64, max_row_bytes=4096
        ) as group:
            epic.torch.replace_moe(copies[rank], group)
            return function(rank, copies[rank], group)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


# Each of these models has another layout of weights or another router.  `make test` uses all models
# in test_the_same_model, and these in the tests that depend less on the family.
DIFFERENT = ("DeepseekV3", "GptOss", "Llama4", "Mixtral", "Qwen3Moe")
SOME_MODELS = [
    pytest.param(name, marks=() if name in DIFFERENT else pytest.mark.night) for name in MODELS
]
assert set(DIFFERENT) <= set(MODELS)


@pytest.mark.parametrize("name", [*MODELS, *VARIANTS])
def test_the_same_model(name: str) -> None:
    """Compare with 2 ranks (threads of this process), each with half of the batch."""
    model = model_of(name)
    ids = torch.randint(3, 64, (4, 7), generator=torch.Generator().manual_seed(4))
    copies = [copy.deepcopy(model) for _ in range(2)]
    wanted = gradients_of(model, ids)

    def run(rank: int, mine: Any, _: Any) -> torch.Tensor:
        return gradients_of(mine, ids[2 * rank : 2 * rank + 2])

    assert relative(torch.cat(on_two(copies, run)), wanted) < 1e-5
    blocks = [sum(isinstance(m, Block) for m in mine.modules()) for mine in copies]
    assert blocks == [sum(type(m).__name__ in FAMILIES for m in model.modules())] * 2
    outside = [gradients_outside(m) for m in (model, *copies)]
    assert outside[0].keys() == outside[1].keys() and len(outside[0]) > 8
    for key, value in outside[0].items():
        # The parts of two ranks may cancel, for example for dt_bias of linear attention.
        assert relative(outside[1][key] + outside[2][key], value) < 5e-5, key
    for name_of_block, block in blocks_of(model).items():
        layers = [blocks_of(m)[name_of_block].moe for m in copies]
        wanted = gradients_as_epic_has_them(block)
        assert wanted.keys() == dict(layers[0].named_parameters()).keys()
        for key, value in wanted.items():
            assert value.any(), key
            mine = [getattr(layer, key).grad for layer in layers]
            got = torch.cat(mine) if key in EXPERT_WEIGHTS else mine[0] + mine[1]
            assert relative(got, value) < 1e-5, key


def train(model: Any, ids: torch.Tensor, group: epic.torch.Group | None) -> list[float]:
    """Train for a few steps; return this rank's part of the mean loss over 4 sequences."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(ids, labels=ids, use_cache=False).loss * (len(ids) / 4)
        loss.backward()
        if group is not None:
            epic.torch.sum_gradients(model, group)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", ["Qwen3Moe", "Llama4"])
def test_training(name: str) -> None:
    """Check that the losses fall, and are equal for any number of ranks."""
    model = model_of(name)
    ids = torch.randint(3, 64, (4, 7), generator=torch.Generator().manual_seed(5))
    copies = [copy.deepcopy(model) for _ in range(2)]
    wanted = train(model, ids, None)
    parts = on_two(copies, lambda rank, mine, group: train(mine, ids[rank::2], group))
    for whole, *halves in zip(wanted, *parts, strict=True):
        assert abs(sum(halves) - whole) < 1e-4 * whole
    assert wanted[-1] < 0.98 * wanted[0]


@pytest.mark.parametrize("name", SOME_MODELS)
def test_generation(name: str, tmp_path: Path) -> None:
    """Check that a model from a folder generates the same tokens on one rank and on two."""
    model_of(name).eval().save_pretrained(tmp_path)
    models = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path) for _ in range(4)]
    ids = torch.tensor([[5, 6, 7], [9, 8, 7]])

    def generate(model: Any, ids: torch.Tensor) -> torch.Tensor:
        return model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)

    wanted = generate(models[0], ids)
    with epic.torch.Group(max_tokens=64, max_row_bytes=4096) as group:
        epic.torch.replace_moe(models[1], group)
        assert torch.equal(generate(models[1], ids), wanted)
    halves = on_two(models[2:], lambda rank, mine, _: generate(mine, ids[rank : rank + 1]))
    assert torch.equal(torch.cat(halves), wanted)


def test_other_caches() -> None:
    """Check generation with a static cache, and with a padded batch, on two ranks."""
    model = model_of("Qwen3Moe").eval()
    copies = [copy.deepcopy(model) for _ in range(2)]
    ids = torch.tensor([[5, 6, 7], [0, 8, 7]])
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])

    def generate(model: Any, rows: slice) -> list[torch.Tensor]:
        more = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
        kinds: list[dict[str, Any]] = [{}, {"cache_implementation": "static"}, {"use_cache": False}]
        return [
            model.generate(ids[rows], attention_mask=mask[rows], **more, **kind) for kind in kinds
        ]

    wanted = generate(model, slice(0, 2))
    halves = on_two(copies, lambda rank, mine, _: generate(mine, slice(rank, rank + 1)))
    for whole, *parts in zip(wanted, *halves, strict=True):
        assert torch.equal(torch.cat(parts), whole)


def test_gradient_checkpointing() -> None:
    """Check that gradients are equal with gradient checkpointing."""
    model = model_of("Qwen3Moe")
    copies = [copy.deepcopy(model) for _ in range(2)]
    ids = torch.randint(3, 64, (4, 7), generator=torch.Generator().manual_seed(4))
    gradients_of(model, ids)

    def run(rank: int, mine: Any, group: epic.torch.Group) -> torch.Tensor:
        mine.gradient_checkpointing_enable()
        gradients_of(mine, ids[2 * rank : 2 * rank + 2])
        epic.torch.sum_gradients(mine, group)
        return last_block(mine).moe.w_gate.grad

    for got in on_two(copies, run):
        assert relative(got, last_block(model).gate.weight.grad.T) < 1e-5


def test_unknown_blocks() -> None:
    """Check that the error names blocks that are not supported."""
    with epic.torch.Group(max_tokens=64, max_row_bytes=4096) as group:
        with pytest.raises(epic.torch.EpicUnsupportedError, match=r"Linear .* MixtralSparseMoe"):
            epic.torch.from_block(torch.nn.Linear(2, 2), group)
        with pytest.raises(epic.torch.EpicUnsupportedError, match=r"no Mixture.* MixtralSparseMoe"):
            epic.torch.replace_moe(torch.nn.Linear(2, 2), group)


UNKNOWN: dict[str, dict[str, Any]] = {
    "Dots1": {**DEEPSEEK, "n_group": 1, "topk_group": 1},
    "MiniMaxM2": {"num_local_experts": 8, "head_dim": 8},
    "Jamba": {"num_experts": 8, "mamba_d_state": 4, "use_mamba_kernels": False},
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_models_that_are_not_supported(name: str) -> None:
    """Check that the error names the blocks of such models, and that nothing is replaced."""
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **UNKNOWN[name]})
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    before = [type(module) for module in model.modules()]
    with alone() as group, pytest.raises(epic.torch.EpicUnsupportedError) as caught:
        epic.torch.replace_moe(model, group)
    kinds = {kind.__name__ for kind in before}
    named = str(caught.value).split(":")[0].split(" has ")[1].split(", ")
    assert named and set(named) <= kinds and "MixtralSparseMoeBlock" in str(caught.value)
    assert [type(module) for module in model.modules()] == before


def test_a_class_of_the_same_name() -> None:
    """Check that blocks of a known class name with unknown parts are refused, for example those of
    an older release."""
    with alone() as group:
        model = model_of("Mixtral")
        old = last_block(model)
        old.experts = torch.nn.ModuleList(torch.nn.Linear(32, 24) for _ in range(8))
        with pytest.raises(epic.torch.EpicUnsupportedError, match="parameters of transformers 5"):
            epic.torch.replace_moe(model, group)
        assert not any(isinstance(module, Block) for module in model.modules())
        model = model_of("Qwen3Moe")
        last_block(model).experts.bias = torch.nn.Parameter(torch.ones(8, 32))
        with pytest.raises(epic.torch.EpicUnsupportedError, match=r"parameter experts\.bias"):
            epic.torch.replace_moe(model, group)
        assert not any(isinstance(module, Block) for module in model.modules())


@pytest.mark.parametrize("name", ["GptOss", "HunYuanMoEV1", "Llama4", "Mixtral", "Phimoe"])
def test_router_logits(name: str) -> None:
    """Check that router logits are recorded as in transformers, on each rank for its tokens."""
    model = model_of(name)
    ids = torch.randint(3, 64, (4, 7), generator=torch.Generator().manual_seed(4))
    copies = [copy.deepcopy(model) for _ in range(2)]

    def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
        model(ids, output_hidden_states=True)
        return torch.cat(model.model(ids, output_router_logits=True).router_logits, dim=-1)

    halves = on_two(copies, lambda rank, mine, _: logits(mine, ids[2 * rank : 2 * rank + 2]))
    assert relative(torch.cat(halves).detach(), logits(model, ids).detach()) < 1e-5


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe"])
def test_balance_loss(name: str) -> None:
    """Check the balance loss of transformers, which is part of the model's loss."""
    model = model_of(name)
    model.config.output_router_logits = True
    model.router_aux_loss_coef = 0.5
    other = copy.deepcopy(model)
    ids = torch.tensor([[5, 6, 7, 8], [9, 8, 7, 3]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    with alone() as group:
        epic.torch.replace_moe(other, group)
        found = [m(ids, attention_mask=mask, labels=ids, use_cache=False) for m in (model, other)]
        for m in found:
            m.loss.backward()
        assert abs(found[1].loss - found[0].loss) < 1e-5 * found[0].loss
        assert found[0].aux_loss > 0 and relative(*(m.aux_loss.detach() for m in found)) < 1e-5
        got, wanted = last_block(other).moe.w_gate.grad, last_block(model).gate.weight.grad
        assert relative(got, wanted.T) < 1e-5
        copy.deepcopy(other)(ids)


def test_save_pretrained_keeps_whose_experts_they_are(tmp_path: Path) -> None:
    """Check that save_pretrained refuses, and that another rank does not load its files."""
    model = model_of("Qwen3Moe")
    copies = [copy.deepcopy(model) for _ in range(2)]

    def run(rank: int, mine: Any, _: Any) -> Any:
        for inner in (mine, mine.model, copy.deepcopy(mine)):
            with pytest.raises(epic.torch.EpicUnsupportedError, match="call epic"):
                inner.save_pretrained(tmp_path / str(rank))
        assert not (tmp_path / str(rank)).exists()
        type(mine).save_pretrained(mine, tmp_path / str(rank))
        return mine

    models = on_two(copies, run)
    safetensors = pytest.importorskip("safetensors.torch")
    states = [safetensors.load_file(tmp_path / str(r) / "model.safetensors") for r in range(2)]
    before = last_block(models[1]).moe.w_down.clone()
    with pytest.raises(epic.torch.EpicArgumentError, match=r"experts 4 to 7 of 8.*sharded_state"):
        models[1].load_state_dict(states[0], strict=False)
    assert torch.equal(last_block(models[1]).moe.w_down, before)
    models[1].load_state_dict(states[1], strict=False)
    assert torch.equal(last_block(models[1]).moe.w_down, before)


def alone() -> epic.torch.Group:
    """Return a group of this process alone."""
    return epic.torch.Group(num_ranks=1, max_tokens=64, max_row_bytes=4096)


@pytest.mark.parametrize("name", SOME_MODELS)
def test_what_was_frozen_stays_so(name: str) -> None:
    """Check that replaced parameters keep their requires_grad."""
    model = model_of(name).requires_grad_(False)
    block = last_block(model)
    block.experts.down_proj.requires_grad_(True)
    with alone() as group:
        epic.torch.replace_moe(model, group)
        found = [key for key, p in model.named_parameters() if p.requires_grad]
        assert [key.split(".")[-2:] for key in found] == [["moe", "w_down"]]
        gradients_of(model, torch.tensor([[5, 6, 7]]))
        assert last_block(model).moe.w_down.grad.any()


def test_phimoe_in_training() -> None:
    """Check that a Phimoe model in training mode is refused, because its router is random there."""
    model = model_of("Phimoe")
    ids = torch.tensor([[5, 6, 7]])
    with alone() as group:
        epic.torch.replace_moe(model, group)
        with pytest.raises(epic.torch.EpicUnsupportedError, match="must be in evaluation mode"):
            model.train()(ids)
        model.eval()(ids)


def test_another_activation() -> None:
    """Check that an unsupported activation is refused by name."""
    model = model_of("Qwen3Moe")
    last_block(model).experts.act_fn = torch.nn.GELU()
    with alone() as group, pytest.raises(epic.torch.EpicUnsupportedError, match="with GELU: must"):
        epic.torch.replace_moe(model, group)


def test_table_of_families() -> None:
    """Check that the table of the guide lists exactly the supported classes."""
    guide = Path(__file__).parents[2] / "docs/guide/frameworks.md"
    rows = [line.split("|") for line in guide.read_text().splitlines() if line.startswith("| ")]
    listed = [row[2].strip(" `") for row in rows if row[2].strip(" `") in FAMILIES]
    assert listed == list(FAMILIES)


def test_noise_of_mixtral() -> None:
    """Check the noise in training: equal generator states give equal numbers."""
    model = model_of("Mixtral")
    ids = torch.tensor([[5, 6, 7, 8]])
    for layer in model.model.layers:
        layer.mlp.jitter_noise = 0.3
    other = copy.deepcopy(model)

    def logits(model: Any) -> torch.Tensor:
        torch.manual_seed(11)
        return model(ids, use_cache=False).logits.detach()

    with alone() as group:
        epic.torch.replace_moe(other, group)
        noisy = logits(model)
        assert relative(logits(other), noisy) < 1e-5
        assert relative(logits(other.eval()), logits(model.eval())) < 1e-5
        assert relative(logits(model), noisy) > 1e-3
        assert torch.equal(logits(other.train()), logits(other))


def test_quantized_experts_are_refused() -> None:
    """Check that quantized experts are refused, because their scales are in other parameters."""
    model = model_of("DeepseekV3").requires_grad_(False)
    experts = last_block(model).experts
    narrow = experts.gate_up_proj.to(torch.float8_e4m3fn)
    experts.gate_up_proj = torch.nn.Parameter(narrow, requires_grad=False)
    with (
        alone() as group,
        pytest.raises(epic.torch.EpicUnsupportedError, match="must not be quantized"),
    ):
        epic.torch.replace_moe(model, group)
