# SPDX-License-Identifier: Apache-2.0
"""Tests that tokens have equal bits in all batches and groups with invariant=True.

Also tests check_invariance.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import epic.torch
from epic.invariance import STAGES, as_bytes, compare_batches
from parts import group_of, numbers

HIDDEN, INNER = 40, 24
SIZES: dict[str, Any] = {"max_tokens": 48, "max_row_bytes": 4 * HIDDEN}


def options_of(**more: Any) -> epic.torch.Moe:
    """Return the options of a layer with a shared expert, a zero-expert and losses."""
    return epic.torch.Moe.of(
        num_experts=8, top_k=2, hidden=HIDDEN, inner=INNER, normalize="sum", zero_experts=1,
        shared=epic.torch.Experts(1, HIDDEN, INNER),
        **{"invariant": True, "balance_coeff": 0.1, **more},
    )  # fmt: skip


def report_of(_: int, ep: int, dtype: torch.dtype) -> epic.torch.InvarianceReport:
    """Return the report about a layer, on a group of ep ranks."""
    with group_of(ep, **SIZES) as group:
        layer = epic.torch.MoE(group, options_of(), dtype=dtype, gate_bias=True, shared_gate=True)
        return epic.torch.check_invariance(layer, group)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_groups(world: Any, dtype: torch.dtype) -> None:
    """Check that no bit differs between batches, ranks and groups of 1, 2 and 4 ranks."""
    reports = [report for ep in (1, 2, 4) for report in world.run(report_of, ep, dtype)]
    assert all(report.is_invariant for report in reports), reports
    assert {report.fingerprint for report in reports} == {reports[0].fingerprint}
    assert reports[0].batches == (48, 32, 7, 2, 1)
    assert reports[0].layers == ("",)


def report_of_replicas(_: int, ep: int) -> list[epic.torch.InvarianceReport]:
    """Return the reports about layers with equal replicas, with unequal ones, and with none."""
    plain = options_of()
    layer = replace(plain.layer, num_experts=16, num_logical=8)
    options = replace(plain, layer=layer)
    found = []
    with group_of(ep, **SIZES) as group:
        for factor in (1.0, 1.5):
            copies = epic.torch.MoE(
                group, options, logical_of_expert=[e // 2 for e in range(16)], seed=0
            )
            copies.w_down.data[0] *= factor
            found.append(epic.torch.check_invariance(copies))
        found.append(epic.torch.check_invariance(epic.torch.MoE(group, plain, seed=0)))
    return found


def test_replicas(world: Any) -> None:
    """Check that replicas have the bits of a layer without them, if their weights are equal."""
    for equal, unequal, alone in world.run(report_of_replicas, 4):
        assert equal.is_invariant and alone.is_invariant, (equal, alone)
        assert equal.fingerprint == alone.fingerprint
        assert unequal.first is not None and unequal.first.stage == "product"


def test_other_leaves() -> None:
    """Check the error for replicas whose rows would be added in another order."""
    plain = options_of()
    options = replace(plain, layer=replace(plain.layer, num_experts=16, num_logical=8))
    with (
        epic.torch.Group(num_ranks=1, **SIZES) as group,
        pytest.raises(epic.torch.EpicArgumentError, match="is 0 for experts 0 and 8: with inv"),
    ):
        epic.torch.MoE(group, options, logical_of_expert=[e % 8 for e in range(16)])


def few_tokens(rank: int, ep: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return output and gradient of 0, 1, 2 and 24 tokens of a group; a rank may have no token."""
    found = []
    with group_of(ep, **SIZES) as group:
        layer = epic.torch.MoE(group, options_of(balance_coeff=0.0))
        for count in (0, 1, 2, 24):
            at = slice(count * group.rank // ep, count * (group.rank + 1) // ep)
            x = numbers(1, 24, HIDDEN)[at].requires_grad_()
            out, loss = layer(x)
            torch.autograd.backward([out, loss], [numbers(2, 24, HIDDEN)[at], None])
            found.append((out.detach().numpy(), x.grad.numpy()))
    return found


def test_few_tokens(world: Any) -> None:
    """Check that few tokens have the bits that they have among 24 tokens on one rank.

    The layer has more leaves than tokens.
    """
    whole = world.run(few_tokens, 1)[0][-1]
    for ep in (1, 2, 4):
        parts = world.run(few_tokens, ep)[:ep]
        for turn, count in enumerate((0, 1, 2, 24)):
            for k in range(2):
                got = np.concatenate([part[turn][k] for part in parts])
                assert np.array_equal(got, whole[k][:count])


def dense_gradients(_: int, ep: int) -> dict[str, np.ndarray]:
    """Return the gradients of shared parameters for 12 tokens, which 8 blocks do not divide."""
    with group_of(ep, **SIZES) as group:
        layer = epic.torch.MoE(group, options_of())
        out, loss = layer(numbers(1, 12, HIDDEN).chunk(ep)[group.rank])
        torch.autograd.backward([out, loss], [numbers(2, 12, HIDDEN).chunk(ep)[group.rank], None])
        layer.sum_gradients()
        shared = (n for n in layer.names if n not in ("w_gate_up", "w_down"))
        return {n: p.grad.numpy() for n in shared if (p := getattr(layer, n)) is not None}


def test_gradients(world: Any) -> None:
    """Check that gradients of router and shared expert have equal bits on 1, 2 and 4 ranks."""
    whole = world.run(dense_gradients, 1)[0]
    for ep in (2, 4):
        for part in world.run(dense_gradients, ep):
            assert all(np.array_equal(part[name], whole[name]) for name in whole)


def test_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that "product" is the first stage that differs if a product depends on the batch."""

    def product(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return epic.torch.slab_mm(x, w, ends) + float(ends[-1])

    with epic.torch.Group(num_ranks=1, **SIZES) as group:
        options = options_of(invariant=False)
        model = torch.nn.Sequential(epic.torch.MoE(group, options, grouped_mm=product))
        # torch's products for the gate depend on the number of tokens too
        model[0].w_gate.data.mul_(4).round_().div_(4)
        pool = (torch.ones(48, HIDDEN), torch.ones(48, HIDDEN))
        monkeypatch.setattr("epic.torch.invariance.draw_pool", lambda *_: [p.numpy() for p in pool])
        report = epic.torch.check_invariance(model)
    assert report.layers == ("0",)
    assert not report.is_invariant
    assert report.first is not None
    assert report.first.stage == "product"


@pytest.mark.parametrize("stage", STAGES)
def test_first_stage(stage: str) -> None:
    """Check that the report names the first stage that differs, and the number of tokens."""

    def probe(tokens: np.ndarray) -> dict[str, np.ndarray]:
        rows = {name: as_bytes(tokens.astype(np.float32)[:, None]) for name in STAGES}
        if len(tokens) == 7:
            for later in STAGES[STAGES.index(stage) :]:
                rows[later][2:4, 1] ^= 1
        return rows

    found, _ = compare_batches("layer", (40, 7, 1), probe, dict, list, 0, 40)
    assert [(d.layer, d.stage, d.num_tokens, d.tokens) for d in found] == [("layer", stage, 7, 2)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sum_order": "by_rank", "leaves": 0}, "sum_order is 'by_rank' and leaves is 0"),
        ({"leaves": 0}, "leaves is 0: with invariant=True"),
        ({"overflow": "drop"}, "overflow is 'drop': must be 'error'"),
        ({"quantize": "1x128"}, "quantize is '1x128': must be None"),
        ({"invariant": 2}, "invariant is 2: must be True or False"),
    ],
)
def test_refused(change: dict[str, Any], words: str) -> None:
    """Check the errors for options that contradict invariant=True."""
    with pytest.raises(epic.torch.EpicArgumentError, match=words):
        options_of(**change)


def test_refused_calls() -> None:
    """Check the errors for arguments with which the layer would be composed."""
    with epic.torch.Group(num_ranks=1, **SIZES) as group:
        layer = epic.torch.MoE(group, options_of(), grouped_mm=epic.torch.slab_mm)
        x = numbers(1, 4, HIDDEN)
        with pytest.raises(epic.torch.EpicArgumentError, match="grouped_mm is given: must be None"):
            layer(x)
        layer.grouped_mm = None
        with pytest.raises(epic.torch.EpicArgumentError, match="token_mask is given: must be None"):
            layer(x, torch.ones(4, dtype=torch.bool))
        with pytest.raises(epic.torch.EpicArgumentError, match="without a MoE layer"):
            epic.torch.check_invariance(torch.nn.Linear(2, 2))


def other_ranks(rank: int) -> str:
    """Run a layer with invariant=True on one rank, and without it on the other."""
    with group_of(2, **SIZES) as group:
        wish = options_of(invariant=rank % 2 == 0, sum_order="tree", leaves=8)
        layer = epic.torch.MoE(group, wish)
        with pytest.raises(epic.torch.EpicError) as caught:
            layer(numbers(1, 4, HIDDEN))
        return str(caught.value)


def test_ranks_differ(world: Any) -> None:
    """Check that every rank gets an error that contains both values."""
    for text in world.run(other_ranks):
        assert "invariant is 1 on rank 0 and 0 on rank 1" in text


def test_generate() -> None:
    """Check that MoE layers return the same bits for one sequence and for a batch of 32.

    The attention of transformers may return other bits in another batch. So each layer also
    computes the rows of the batch one by one.
    """
    transformers = pytest.importorskip("transformers", reason="there is no transformers package")
    config = transformers.Qwen2MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=24, moe_intermediate_size=24,
        shared_expert_intermediate_size=40, num_experts=8, num_experts_per_tok=2,
        pad_token_id=0, eos_token_id=None, bos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen2MoeForCausalLM(config).eval()
    with epic.torch.Group(num_ranks=1, max_tokens=512, max_row_bytes=128) as group:
        assert epic.torch.replace_moe(model, group, invariant=True) == 2
        calls: list[tuple[torch.Tensor, torch.Tensor]] = []
        layers = [m for m in model.modules() if isinstance(m, epic.torch.MoE)]
        hooks = [
            layer.register_forward_hook(lambda _, args, out: calls.append((args[0], out[0])))
            for layer in layers
        ]
        prompt = torch.randint(3, 64, (32, 5))
        more = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
        alone = [model.generate(prompt[i : i + 1], **more) for i in (0, 9)]
        single = calls[:]
        calls.clear()
        together = model.generate(prompt, **more)
        for hook in hooks:
            hook.remove()
        assert torch.equal(torch.cat(alone), together[[0, 9]])
        with torch.no_grad():
            for i, (x, out) in enumerate([*single[:8], *calls]):
                layer = layers[i % 2]
                rows, wanted = x.reshape(-1, 32), out.reshape(-1, 32)
                for at in range(0, len(rows), 7):
                    assert torch.equal(layer(rows[at : at + 1])[0][0], wanted[at])


# --------------------------------------------------------------- training and serving ----


def train_on_rollout(_: int, __: Any) -> list[bool]:
    """Decode 24 tokens alone, one by one, and replay their routing on four ranks."""
    with group_of(1, **SIZES) as alone, group_of(4, **SIZES) as group:
        server, layer = (epic.torch.MoE(g, options_of()) for g in (alone, group))
        x = numbers(1, 24, HIDDEN)
        with torch.no_grad(), epic.torch.record_routing(server) as record:
            decoded = torch.cat([server(token)[0] for token in x.split(1)])
        mine = slice(6 * group.rank, 6 * group.rank + 6)
        calls = record[""][mine]
        routing = epic.torch.Routing(
            torch.cat([r.topk_idx for r in calls]), torch.cat([r.weights for r in calls])
        )
        found = []
        for weights in (False, True):
            if weights:  # the routers of training are some steps ahead
                layer.w_gate.data.copy_(layer.w_gate.data.flip(1))
                found.append(not torch.equal(layer(x[mine])[0], decoded[mine]))
            with epic.torch.replay_routing(layer, {"": routing}, weights=weights):
                out, loss = layer(x[mine])
                (out.square().sum() + loss).backward()
            found.append(torch.equal(out, decoded[mine]))
            found.append(bool(layer.w_down.grad.abs().sum() > 0))
    return found


def test_training_on_a_rollout(world: Any) -> None:
    """Four ranks that replay the routing of a rollout on one rank have its bits."""
    assert world.run(train_on_rollout, None) == [[True] * 5] * 4


def test_generation() -> None:
    """The MoE layers of a model have the same bits for a sequence alone and among 32."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=32, hidden_size=256, intermediate_size=24, moe_intermediate_size=512,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    prompts = torch.arange(96).reshape(32, 3) * 7 % 32
    sizes: dict[str, Any] = {"num_ranks": 1, "max_tokens": 96, "max_row_bytes": 4 * 256}
    with epic.torch.Group(**sizes) as group, torch.no_grad():
        epic.torch.replace_moe(model, group, invariant=True)
        layers = [m for m in model.modules() if isinstance(m, epic.torch.MoE)]
        calls: list[Any] = []
        hooks = [
            m.register_forward_hook(lambda m, args, found: calls.append((m, args[0], found[0])))
            for m in layers
        ]
        more = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        whole = model.generate(prompts, **more)
        for hook in hooks:
            hook.remove()
        assert len(calls) == 2 * 4
        for i in (0, 17, 31):
            assert torch.equal(model.generate(prompts[i : i + 1], **more)[0], whole[i])
            for layer, x, out in calls:
                assert torch.equal(layer(x[i : i + 1])[0], out[i : i + 1])
