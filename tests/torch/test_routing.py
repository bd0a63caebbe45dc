# SPDX-License-Identifier: Apache-2.0
"""Tests recording and replaying the routing of layers and models, and reading it from a trace."""

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import epic
import epic.torch
from epic.torch.experts import slab_mm
from parts import numbers
from world import torch_server

EXPERTS, TOP_K, HIDDEN, INNER, TOKENS = 6, 3, 5, 4, 8
ZERO = 2  # zero-experts
COLUMNS = EXPERTS + ZERO
NAMES = ("w_gate", "w_gate_up", "w_down", "shared_gate_up", "shared_down")
SHAPES = (
    (HIDDEN, COLUMNS),
    (EXPERTS, HIDDEN, 2 * INNER),
    (EXPERTS, INNER, HIDDEN),
    (1, HIDDEN, 2 * INNER),
    (1, INNER, HIDDEN),
)
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {"score": "softmax"},
    "sigmoid": {"score": "sigmoid", "normalize": "sum", "scale": 2.5},
    "chosen": {"score": "logits", "weight_rule": "softmax_chosen"},
}


@pytest.fixture
def alone() -> Iterator[epic.torch.Group]:
    """Open a group of one rank."""
    with epic.torch.Group(num_ranks=1, max_tokens=64, max_row_bytes=512) as group:
        yield group


def options_of(router: str, **more: Any) -> epic.torch.Moe:
    """Return the options of a layer with zero-experts, a shared expert and both losses."""
    return epic.torch.Moe.of(
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden=HIDDEN,
        inner=INNER,
        zero_experts=ZERO,
        balance_coeff=0.3,
        z_coeff=0.2,
        shared=epic.Experts(1, HIDDEN, INNER),
        **{**ROUTERS[router], **more},
    )


def random_ids() -> Tensor:
    """Return ids of experts and zero-experts, some twice for a token, and some -1 (no expert)."""
    ids = np.random.default_rng(7).integers(-1, COLUMNS, (TOKENS, TOP_K))
    ids[0] = (2, 2, -1)
    return torch.from_numpy(ids)


def true_weights(router: str, z: Tensor, ids: Tensor) -> Tensor:
    """Return the weights of the forced ids [tokens, top_k], computed with plain torch."""
    live, at = ids >= 0, ids.clamp(min=0)
    if router == "chosen":
        return torch.where(live, z.gather(1, at), -torch.inf).softmax(1).nan_to_num(0)
    scores = z.softmax(1) if router == "softmax" else torch.sigmoid(z)
    w = torch.where(live, scores.gather(1, at), 0)
    return w if router == "softmax" else 2.5 * w / w.sum(1, keepdim=True).clamp(min=1e-30)


def true_mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return the results of a gated expert with SiLU."""
    gate, value = (x @ up).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * value) @ down


def true_layer(
    router: str, x: Tensor, w: dict[str, Tensor], ids: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the results and losses of the layer, computed in loops over tokens and choices."""
    z = x @ w["w_gate"]
    chosen = true_weights(router, z, ids) if weights is None else weights
    rows = []
    for t in range(TOKENS):
        row = true_mlp(x[t], w["shared_gate_up"][0], w["shared_down"][0])
        for k, e in enumerate(ids[t].tolist()):
            if e >= EXPERTS:
                row = row + chosen[t, k] * x[t]
            elif e >= 0:
                row = row + chosen[t, k] * true_mlp(x[t], w["w_gate_up"][e], w["w_down"][e])
        rows.append(row)
    p = torch.sigmoid(z) if router == "sigmoid" else z.softmax(1)
    p = p / p.sum(1, keepdim=True)
    load = torch.stack([(ids == e).sum() for e in range(EXPERTS)])
    balance = 0.3 * EXPERTS / (TOP_K * TOKENS**2) * (p[:, :EXPERTS].sum(0) * load).sum()
    return torch.stack(rows), balance + 0.2 / TOKENS * z.logsumexp(1).square().sum()


@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize("with_weights", [False, True])
@pytest.mark.parametrize("router", ROUTERS)
def test_values(alone: epic.torch.Group, router: str, with_weights: bool, composed: bool) -> None:
    """Compare out, loss and all gradients with plain loops in float64."""
    ids, options = random_ids(), options_of(router)
    x = numbers(1, TOKENS, HIDDEN, dtype=torch.float64)
    w = {n: numbers(i, *SHAPES[i], dtype=torch.float64) for i, n in enumerate(NAMES)}
    forced = numbers(9, TOKENS, TOP_K, dtype=torch.float64) if with_weights else None
    leaves = [x, *w.values(), *([forced] if forced is not None else [])]
    for leaf in leaves:
        leaf.requires_grad_()
    ct = numbers(8, TOKENS, HIDDEN, dtype=torch.float64)
    more: dict[str, Any] = {"grouped_mm": slab_mm} if composed else {}
    close = {"rtol": 1e-10, "atol": 1e-10}
    if composed:  # dispatch sends weights as float32
        close = {"rtol": 1e-6, "atol": 1e-6}
    found = epic.torch.moe(
        alone,
        options,
        x,
        epic.torch.MoeWeights(**w),
        forced=(ids, forced),
        return_routing=True,
        **more,
    )
    want, want_loss = true_layer(router, x, w, ids, forced)
    torch.testing.assert_close(found.out, want, **close)
    torch.testing.assert_close(found.loss, want_loss, **close)
    assert found.routing is not None and found.routing.weights is not None
    assert torch.equal(found.routing.topk_idx.long(), ids)
    used = true_weights(router, x @ w["w_gate"], ids) if forced is None else forced
    torch.testing.assert_close(found.routing.weights, used.detach(), **close)
    load = torch.stack([(ids == e).sum() for e in range(EXPERTS)])
    assert torch.equal(found.load.long(), load)
    got = torch.autograd.grad((found.out * ct).sum() + found.loss, leaves)
    true = torch.autograd.grad((want * ct).sum() + want_loss, leaves)
    for name, a, b in zip(("x", *w, "forced weights"), got, true, strict=False):
        torch.testing.assert_close(a, b, **close, msg=lambda m, n=name: f"{n}: {m}")


def test_route(alone: epic.torch.Group) -> None:
    """Check route() with forced ids: ids that the router chose get weights of the same bits."""
    router = options_of("sigmoid").router
    z = numbers(3, 2, 4, COLUMNS)
    ids, weights = epic.torch.route(router, z)
    again = epic.torch.route(router, z, forced=ids.reshape(2, 4, TOP_K).long())
    assert torch.equal(again[0], ids) and torch.equal(again[1], weights)
    with pytest.raises(epic.EpicArgumentError, match=r"forced ids of token 0, k 0, is 8"):
        epic.torch.route(router, z, forced=torch.full((8, TOP_K), COLUMNS))
    with pytest.raises(epic.EpicArgumentError, match="forced is given and token_ids is given"):
        table = torch.zeros(1, TOP_K, dtype=torch.int32)
        epic.torch.route(router, z, token_ids=torch.zeros(2, 4).int(), table=table, forced=ids)


# ------------------------------------------------------------------------------- ranks ----

OF_RANKS = epic.torch.Moe.of(
    num_experts=8, top_k=2, hidden=16, inner=12, normalize="sum", balance_coeff=0.01,
    sum_order="tree", leaves=4, shared=epic.Experts(1, 16, 8),
)  # fmt: skip


def on_ranks(count: int, function: Callable[[int, epic.torch.Group], Any]) -> list[Any]:
    """Run function(rank, group) in a thread for each rank."""
    bootstraps = epic.torch.threads(count)

    def run(rank: int) -> Any:
        with epic.torch.Group(
            bootstrap=bootstraps[rank], max_tokens=64, max_row_bytes=4096
        ) as group:
            return function(rank, group)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def step_on(ranks: int, record: Any, *, weights: bool = False, dtype: Any = torch.float32) -> Any:
    """Record on all ranks together, or replay a record with a bias that would choose others.

    Gives out, d_x, the gradients, and the routing of all tokens."""

    def run(rank: int, group: epic.torch.Group) -> Any:
        layer = epic.torch.MoE(group, OF_RANKS, bias_rate=0.1, dtype=dtype)
        if record is not None:
            assert layer.bias is not None
            layer.bias.copy_(torch.arange(8) % 3 * 10.0)
        part = 16 // ranks
        x = numbers(5, 16, 16, dtype=dtype)[rank * part : (rank + 1) * part].requires_grad_()
        given: Any = None
        if record is not None:
            given = {"": [r[rank * part : (rank + 1) * part] for r in record]}
            given = {"": epic.torch.Routing(*given[""])}
        with epic.torch.record_routing(layer) as found:
            if given is None:
                out, loss = layer(x)
            else:
                with epic.torch.replay_routing(layer, given, weights=weights):
                    out, loss = layer(x)
        (out.float().square().sum() + loss).backward()
        layer.sum_gradients()
        grads = {n: p.grad for n, p in layer.named_parameters()}
        return out.detach(), x.grad, grads, found[""][0]

    parts = on_ranks(ranks, run)
    whole = [torch.cat([p[i] for p in parts]) for i in (0, 1)]
    grads = {}
    for name, first in parts[0][2].items():
        every = [p[2][name] for p in parts]
        is_expert = name in ("w_gate_up", "w_down")
        grads[name] = torch.cat(every) if is_expert else first
        assert is_expert or all(torch.equal(g, first) for g in every)
    routing = [torch.cat([p[3][i] for p in parts]) for i in (0, 1)]
    return (*whole, grads, routing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [False, True])
def test_record_on_one_rank_and_replay_on_more(weights: bool, dtype: Any) -> None:
    """Check that tree order gives the same bits on 1, 2 and 4 ranks."""
    out, d_x, grads, routing = step_on(1, None, dtype=dtype)
    before = None
    for ranks in (1, 2, 4):
        found = step_on(ranks, routing, weights=weights, dtype=dtype)
        assert torch.equal(found[0], out), ranks
        assert all(torch.equal(a, b) for a, b in zip(found[3], routing, strict=True)), ranks
        if weights:  # the router has gradients of the losses only
            expected, before = before or found, before or found
        else:
            expected = (out, d_x, grads)
        assert torch.equal(found[1], expected[1]), ranks
        for name, value in found[2].items():
            assert torch.equal(value, expected[2][name]), (ranks, name)


def test_one_rank_has_no_tokens() -> None:
    """Check that a rank without tokens can pass ids of shape [0, top_k]."""

    def run(rank: int, group: epic.torch.Group) -> Any:
        options = epic.torch.Moe.of(num_experts=8, top_k=2, hidden=16, inner=4)
        layer = epic.torch.MoE(group, options)
        x = numbers(5, 4 * rank, 16)
        out, _, first = layer(x, return_routing=True)
        again, _ = layer(x, forced=first)
        return torch.equal(out, again) and first.topk_idx.shape == (4 * rank, 2)

    assert on_ranks(2, run) == [True, True]


def test_an_invalid_id_is_reported_on_every_rank() -> None:
    """Check this for both forms of the layer, and that the group stays usable."""

    def run(rank: int, group: epic.torch.Group) -> list[str]:
        texts = []
        options = epic.torch.Moe.of(num_experts=8, top_k=2, hidden=16, inner=4)
        for product in (None, slab_mm):
            layer = epic.torch.MoE(group, options, grouped_mm=product)
            x, ids = numbers(5, 3, 16), torch.zeros(3, 2, dtype=torch.int64)
            if rank == 1:
                ids[2, 1] = 1 << 40 if product is None else 8
            try:
                layer(x, forced=ids)
            except epic.EpicError as error:
                texts.append(str(error))
            layer(x, forced=torch.full((3, 2), 7))
        return texts

    for texts in on_ranks(2, run):
        assert "rank 1, token 2, k 1 has expert 2147483647: must be below" in texts[0]
        assert "rank 1, token 2, k 1 has expert 8: must be below" in texts[1]
        assert "forced ids" in texts[0]


ON_ONE_RANK: dict[str, Any] = {
    "forced": torch.zeros(3, 2, dtype=torch.int32),
    "token_mask": torch.ones(3, dtype=torch.bool),
    "grouped_mm": slab_mm,
}


@pytest.mark.parametrize("name", ON_ONE_RANK)
@pytest.mark.parametrize("rank_with", [0, 1])
def test_an_argument_on_one_rank(rank_with: int, name: str) -> None:
    """Check that every rank gets an error that names the argument that one rank did not pass."""

    def run(rank: int, group: epic.torch.Group) -> str:
        options = epic.torch.Moe.of(num_experts=8, top_k=2, hidden=16, inner=4)
        weights = epic.torch.MoE(group, options).weights()
        more = {name: ON_ONE_RANK[name]} if rank == rank_with else {}
        with pytest.raises(epic.EpicError, match="EPIC_EMISMATCH") as raised:
            epic.torch.moe(group, options, numbers(5, 3, 16), weights, **more)
        return str(raised.value)

    says = [f"rank {rank} passed distinct={rank != rank_with}" for rank in range(2)]
    for text in on_ranks(2, run):
        assert all(says_of_rank in text for says_of_rank in says), text
        (listed,) = re.findall(r"unless it has ([\w, ]+): pass these on every rank or", text)
        assert name in listed, text


def test_an_expert_twice() -> None:
    """Check that every rank gets the place of a forced id that is not distinct."""

    def run(rank: int, group: epic.torch.Group) -> str:
        options = epic.torch.Moe.of(num_experts=8, top_k=2, hidden=16, inner=4, distinct=True)
        ids = torch.tensor([[0, 1], [2, 3 - rank]])
        with pytest.raises(epic.EpicArgumentError) as raised:
            epic.torch.MoE(group, options)(numbers(5, 2, 16), forced=ids)
        return str(raised.value)

    for text in on_ranks(2, run):
        assert "rank 1, token 1, k 1 has expert 2 a second time: the ids of a token must" in text
        assert "must differ with distinct=True; pass other ids, or a layer without it" in text


def test_errors(alone: epic.torch.Group) -> None:
    """Check the errors for wrong shapes, dtypes, devices and combinations."""
    layer = epic.torch.MoE(alone, epic.torch.Moe.of(num_experts=8, top_k=2, hidden=16, inner=4))
    x, ids = numbers(1, 2, 3, 16), torch.zeros(2, 3, 2, dtype=torch.int32)
    weights = torch.ones(2, 3, 2)
    wrong: list[tuple[Any, str]] = [
        (ids[:1], r"forced ids have the shape \[1, 3, 2\]: must be \[2, 3, 2\], with top_k ids"),
        (ids[..., :1], r"forced ids have the shape \[2, 3, 1\]"),
        (ids.float(), "forced ids is torch.float32: must be an integer type"),
        (ids.bool(), "forced ids is torch.bool: must be an integer type"),
        (ids.to("meta"), "forced ids are on meta and x is on cpu"),
        ((ids, weights[0]), r"forced weights have the shape \[3, 2\]: must be \[2, 3, 2\], as the"),
        ((ids, weights.to("meta")), "forced weights are on meta and x is on cpu"),
        ((ids, weights.int()), "forced weights is torch.int32: must be float32"),
    ]
    for forced, text in wrong:
        with pytest.raises(epic.EpicArgumentError, match=text):
            layer(x, forced=forced)
    with pytest.raises(epic.EpicArgumentError, match="forced is given and token_ids is given"):
        epic.torch.moe(
            alone,
            layer.options,
            x,
            layer.weights(),
            token_ids=torch.zeros(2, 3).int(),
            table=torch.zeros(1, 2).int(),
            forced=ids,
        )
    text = "model is a Linear without a MoE layer"
    with (
        pytest.raises(epic.EpicArgumentError, match=text),
        epic.torch.record_routing(torch.nn.Linear(2, 2)),
    ):
        pass
    model = torch.nn.ModuleDict({"a": layer})
    for record, text in (
        ({}, "record has no routing of 'a': must have the layers of the model, 'a'"),
        ({"a": ids, "b": ids}, "record has routing of 'b'"),
    ):
        replay = epic.torch.replay_routing(model, record)
        with pytest.raises(epic.EpicArgumentError, match=text), replay:
            pass
    with epic.torch.replay_routing(model, {"a": [ids]}):
        layer(x)
        with pytest.raises(epic.EpicArgumentError, match="has 1 routings of 'a', and its call num"):
            layer(x)
    replay = epic.torch.replay_routing(model, {"a": ids}, weights=True)
    with replay, pytest.raises(epic.EpicArgumentError, match="record has no weights of 'a'"):
        layer(x)
    assert layer.recorded is None and layer.replayed is None


def test_out_and_mask(alone: epic.torch.Group) -> None:
    """Check that out= receives the routing, and that a masked token has no expert."""
    layer = epic.torch.MoE(alone, epic.torch.Moe.of(num_experts=8, top_k=2, hidden=16, inner=4))
    x = numbers(1, 2, 3, 16)
    out, _, routing = layer(x, return_routing=True)
    room = epic.torch.MoeOut(
        torch.empty_like(x),
        None,
        None,
        None,
        routing=epic.torch.Routing(torch.empty_like(routing.topk_idx), torch.empty(2, 3, 2)),
    )
    with torch.no_grad():
        epic.torch.moe(alone, layer.options, x, layer.weights(), out=room)
    assert torch.equal(room.out, out) and room.routing is not None
    assert all(torch.equal(a, b) for a, b in zip(room.routing, routing, strict=True))
    mask = torch.tensor([[True, False, True], [True, True, False]])
    _, _, masked = layer(x, mask, return_routing=True)
    assert torch.equal(masked.topk_idx, torch.where(mask[..., None], routing.topk_idx, -1))


@pytest.mark.parametrize("composed", [False, True])
def test_compiled(alone: epic.torch.Group, composed: bool) -> None:
    """Check that recording and replaying compile to one graph each, with the same bits."""
    options = epic.torch.Moe.of(num_experts=4, top_k=2, hidden=16, inner=4, balance_coeff=0.1)
    layer = epic.torch.MoE(alone, options, grouped_mm=slab_mm if composed else None)
    x = numbers(1, 6, 16).requires_grad_()

    def run(x: Tensor, ids: Tensor | None, weights: Tensor | None) -> Any:
        return layer(x, forced=None if ids is None else (ids, weights), return_routing=True)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    _, _, routing = run(x, None, None)
    weights = routing.weights.clone().requires_grad_()
    for given in ((None, None), (routing.topk_idx, None), (routing.topk_idx, weights)):
        leaves = [x, layer.w_gate] if given[1] is None else [x, layer.w_gate, weights]
        found = []
        for function in (run, compiled):
            out, loss, used = function(x, *given)
            d = torch.autograd.grad(out.square().sum() + loss, leaves)
            found.append((out, loss, *used, *d))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    torch._dynamo.reset()


def test_checkpointing(alone: epic.torch.Group) -> None:
    """Check that a layer that checkpointing runs again in backward uses the same ids."""
    options = epic.torch.Moe.of(num_experts=8, top_k=2, hidden=16, inner=4)
    layer = epic.torch.MoE(alone, options)
    x = numbers(1, 6, 16).requires_grad_()
    ids = torch.tensor([[7, 0]]).expand(6, 2)
    found = []
    for reentrant in (None, False, True):
        with epic.torch.replay_routing(layer, {"": ids}):
            if reentrant is None:
                out, _ = layer(x)
            else:
                out, _ = checkpoint(layer, x, use_reentrant=reentrant)
            found.append(torch.autograd.grad(out.square().sum(), x)[0] if not reentrant else None)
            if reentrant:
                x.grad = None
                out.square().sum().backward()
                found[-1] = x.grad
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


# ------------------------------------------------------------------------------ models ----


def test_a_model_of_transformers() -> None:
    """Replay a rollout of one rank on two ranks, whose routers would choose other experts."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 12,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
    }  # fmt: skip

    def model_of(group: epic.torch.Group, changed: bool) -> Any:
        torch.manual_seed(3)
        config = transformers.Qwen3MoeConfig(**sizes)
        config._attn_implementation = "eager"
        model = transformers.Qwen3MoeForCausalLM(config).float()
        if changed:  # the routers of training are some steps ahead
            with torch.no_grad():
                for name, p in model.named_parameters():
                    if name.endswith("gate.weight"):
                        p.copy_(p.flip(0))
        epic.torch.replace_moe(model, group)
        return model

    def rollout(_: int, group: epic.torch.Group) -> Any:
        model = model_of(group, False)
        prompt = torch.arange(6).reshape(2, 3)
        with torch.no_grad(), epic.torch.record_routing(model) as record:
            sequence = model.generate(
                prompt, max_new_tokens=4, do_sample=False, min_new_tokens=4, pad_token_id=0
            )
        joined = {
            name: torch.cat([step.topk_idx for step in steps], dim=1)
            for name, steps in record.items()
        }
        return sequence, joined

    ((sequence, joined),) = on_ranks(1, rollout)
    assert list(joined) == [f"model.layers.{i}.mlp.moe" for i in range(2)]
    assert all(ids.shape == (2, 6, 2) for ids in joined.values())

    def train(_: int, group: epic.torch.Group) -> Any:
        model = model_of(group, True)
        tokens = sequence[:, :-1]  # the last token was never an input
        plain = model(tokens).logits
        with epic.torch.replay_routing(model, joined), epic.torch.record_routing(model) as again:
            logits = model(tokens).logits
            logits.square().mean().backward()
        same_ids = all(torch.equal(again[n][0].topk_idx, ids) for n, ids in joined.items())
        gate = model.model.layers[0].mlp.moe.w_gate.grad
        return same_ids, torch.equal(plain, logits), bool(gate.abs().sum() > 0)

    assert on_ranks(2, train) == [(True, False, True)] * 2


# ------------------------------------------------------------------------------ traces ----

TRACED = """
import sys, torch, epic.torch
from concurrent.futures import ThreadPoolExecutor
bootstraps = epic.torch.threads(2)
def run(rank):
    options = epic.torch.Moe.of(num_experts=8, top_k=2, hidden=4, inner=4)
    with epic.torch.Group(bootstrap=bootstraps[rank], max_tokens=8, max_row_bytes=64) as group:
        torch.manual_seed(rank)
        layers = [epic.torch.MoE(group, options, tag=i) for i in range(2)]
        found = []
        for step in range(3):
            x = torch.randn(3 + rank, 4)
            found.append([layer(x, return_routing=True)[2].topk_idx for layer in layers])
        return found
with ThreadPoolExecutor(2) as pool:
    torch.save(list(pool.map(run, range(2))), sys.argv[1])
"""


def test_traces(tmp_path: Path) -> None:
    """Check that read_trace returns the ids of each layer and step, as the layers returned them."""
    ids = tmp_path / "ids.pt"
    wishes = {**os.environ, "EPIC_TRACE": str(tmp_path)}
    torch_server().run(TRACED, str(ids), env=wishes, timeout=200)
    recorded = torch.load(ids)
    layers = epic.read_trace(tmp_path, num_layers=2)
    assert [len(steps) for steps in layers] == [3, 3]
    for i, steps in enumerate(layers):
        for j, step in enumerate(steps):
            assert step.tokens_of == [3, 4] and step.num_experts == 8
            for rank in range(2):
                assert np.array_equal(step.of_rank(rank), recorded[rank][j][i].numpy())
    (name,) = {file.name.rsplit("-", 2)[1] for file in tmp_path.glob("*.epictrace")}
    assert len(epic.read_trace(tmp_path, group=name)[0]) == 6
    with pytest.raises(epic.EpicArgumentError, match="has 0 groups"):
        epic.read_trace(tmp_path, group="another")
    with pytest.raises(epic.EpicArgumentError, match="num_layers is 0"):
        epic.read_trace(tmp_path, num_layers=0)
    first = sorted(tmp_path.glob("*.epictrace"))[0]
    whole = first.read_bytes()
    first.write_bytes(whole[:-30])  # the job was killed
    assert len(epic.read_trace(tmp_path)[0]) in (5, 6)
    first.write_bytes(b"no trace")
    with pytest.raises(epic.EpicArgumentError, match="is not a trace"):
        epic.read_trace(tmp_path)
