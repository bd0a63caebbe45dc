# SPDX-License-Identifier: Apache-2.0
"""Arguments that do not belong together are told, where the numbers would be wrong in silence."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import epic.torch
from epic.torch import EpicArgumentError, EpicUnsupportedError
from epic.torch.plans import MOST_WAYS
from parts import EXPERTS, HIDDEN, LAYER, SIZES, TOP_K, choices, numbers

COUNT = 6
ALONE = {**SIZES, "num_ranks": 1}
X, W, IDS = numbers(1, COUNT, HIDDEN), numbers(2, COUNT, TOP_K), choices(3, COUNT)
WISH: dict[str, Any] = {"num_experts": EXPERTS, "top_k": 2, "hidden": HIDDEN, "inner": 12}


def step(group: Any, x: Any = X, w: Any = W, ids: Any = IDS, **more: Any) -> torch.Tensor:
    """There and back."""
    plan, recv, slots = epic.torch.plan_dispatch(group, LAYER, ids, x, w, **more)
    return epic.torch.combine(plan, recv, slots)


def placed(group: Any, table: Any, local: int = EXPERTS) -> torch.Tensor:
    """With a table."""
    return step(group, rank_of_expert=table, num_local_experts=local, capacity=99)


def chosen(group: Any, table: Any) -> Any:
    """By token id."""
    router = epic.torch.Router(EXPERTS, TOP_K)
    ids = torch.zeros(2, dtype=torch.int64)
    return epic.torch.route(router, torch.zeros(2, EXPERTS), token_ids=ids, table=table)


META = torch.device("meta")
WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "turned weights": (lambda g: step(g, w=W.T), r"weights: shape \[3, 6\]: \[6, 3\] is needed"),
    "flat weights": (lambda g: step(g, w=W.reshape(-1)), r"weights: shape \[18\]: \[6, 3\]"),
    "tokens in another order": (
        lambda g: step(g, X.reshape(3, 2, HIDDEN), W, IDS.reshape(2, 3, TOP_K)),
        r"tokens: shape \[3, 2, 20\]: topk_idx has \[2, 3\] tokens",
    ),
    "too few local experts": (
        lambda g: step(g, num_local_experts=3),
        "num_local_experts 3: a rank has 8",
    ),
    "too many local experts": (
        lambda g: step(g, num_local_experts=20),
        "num_local_experts 20: a rank has 8 of 8",
    ),
    "fewer than the table has": (lambda g: placed(g, [0] * EXPERTS, 3), "num_local_experts 3"),
    "a table of fractions": (lambda g: placed(g, [0.5] * EXPERTS), "dtype torch.float32: integers"),
    "a table of wide numbers": (
        lambda g: placed(g, torch.full((EXPERTS,), 1 << 32)),
        "expert 0 lives on rank 2147483647",
    ),
    "ids of fractions": (
        lambda g: chosen(g, torch.full((3, TOP_K), 0.7)),
        "table: dtype torch.float32: integers",
    ),
    "ids of wide numbers": (
        lambda g: chosen(g, torch.full((3, TOP_K), 1 << 32)),
        "is 2147483647: the router has 8 experts",
    ),
    "tokens without memory": (lambda g: step(g, X.to(META)), "on cpu and meta"),
    "weights without memory": (lambda g: step(g, w=W.to(META)), "on cpu and meta"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_steps(name: str) -> None:
    """The argument, its value, the rule."""
    wrong, sentence = WRONG[name]
    with epic.torch.Group(**ALONE) as group, pytest.raises(EpicArgumentError, match=sentence):
        wrong(group)


@pytest.mark.parametrize("what", ["tokens", "rows"])
def test_wide_rows_are_not_rounded(what: str) -> None:
    """Said where it is asked for, and not at backward; a block that is none is told with out=."""
    with epic.torch.Group(**ALONE) as group:
        plan = epic.torch.plan(group, LAYER, IDS)
        rows = torch.ones(plan.capacity, HIDDEN)
        if what == "tokens":
            calls = [
                lambda: epic.torch.dispatch(plan, X.double(), quantize="1x32"),
                lambda: epic.torch.dispatch_quantized(plan, X.double()),
            ]
        else:
            calls = [
                lambda: epic.torch.combine(plan, rows.double(), quantize_gradient="1x128"),
            ]
        for call in calls:
            with pytest.raises(EpicUnsupportedError, match=f"{what} of torch.float64"):
                call()
        for wrong in ("1x64", ""):
            with pytest.raises(EpicArgumentError, match=f"quantize_gradient '{wrong}'"):
                epic.torch.combine(plan, rows, quantize_gradient=wrong, out=torch.empty_like(X))


@pytest.mark.parametrize("name", ["timeout_ms", "max_sms", "max_in_flight", "max_top_k"])
def test_numbers_of_a_group(name: str) -> None:
    """-1 was 4294967295."""
    with pytest.raises(EpicArgumentError, match=f"{name} -1: an integer from 0"):
        epic.torch.Group(**{**ALONE, name: -1})


@pytest.mark.parametrize("what", ["fused", "single", "sum", "route"])
def test_forward_mode_is_refused(what: str) -> None:
    """Its derivatives were zeros."""
    with epic.torch.Group(**ALONE) as group, forward_ad.dual_level():
        x = forward_ad.make_dual(X, X)
        with pytest.raises(NotImplementedError, match="jvp"):
            if what == "fused":
                step(group, x)
            elif what == "single":
                epic.torch.dispatch(epic.torch.plan(group, LAYER, IDS), x)
            elif what == "sum":
                epic.torch.sum(group, x)
            else:
                epic.torch.route(epic.torch.Router(HIDDEN, TOP_K), x)


@pytest.mark.parametrize("name", ["b_gate", "b_down", "bias"])
def test_a_parameter_that_was_not_loaded(name: str) -> None:
    """On "meta": the layer gave memory that nobody had written."""
    with epic.torch.Group(**ALONE) as group:
        options = epic.torch.Moe.of(**WISH)
        layer = epic.torch.MoE(group, options, gate_bias=True, expert_biases=True, bias_rate=0.1)
        empty = getattr(layer, name).to(META)
        setattr(layer, name, empty if name == "bias" else torch.nn.Parameter(empty))
        with pytest.raises(EpicArgumentError, match="on cpu and meta"), torch.no_grad():
            layer(X)


@pytest.mark.parametrize("assign", [True, False])
def test_the_load_of_a_layer_made_on_meta(assign: bool) -> None:
    """It is in no state dict: it begins as zeros, and is counted."""
    with epic.torch.Group(**ALONE) as group:
        options = epic.torch.Moe.of(**WISH)
        state = epic.torch.MoE(group, options, bias_rate=0.1).state_dict()
        layer = epic.torch.MoE(group, options, bias_rate=0.1, device="meta")
        if not assign:
            layer.to_empty(device="cpu")
            assert layer.load is not None and not layer.load.any()
        layer.load_state_dict(state, assign=assign)
        layer(X)
        assert layer.load is not None and int(layer.load.sum()) == 2 * COUNT
        layer.update_bias()
        assert layer.bias is not None and layer.bias.any()


def test_padding_may_hold_anything() -> None:
    """Not numbers, where the mask is False: losses and gradients are those of the others alone."""
    mask = torch.tensor([True, True, False, True, False, True])
    with epic.torch.Group(**ALONE) as group:
        more = {"balance_coeff": 0.1, "z_coeff": 0.1, "zero_experts": 2}
        layer = epic.torch.MoE(group, epic.torch.Moe.of(**WISH, **more))
        out, loss = layer(X[mask], torch.ones(4, dtype=torch.bool))
        (out.square().sum() + loss).backward()
        wanted = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
        layer.zero_grad()
        x = torch.where(mask[:, None], X, torch.nan).requires_grad_()
        out, padded = layer(x, mask)
        (out.square().sum() + padded).backward()
        assert not out[~mask].any() and x.grad is not None and not x.grad[~mask].any()
        torch.testing.assert_close(padded, loss)
        for parameter, gradient in zip(layer.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)


def test_a_mask_beside_losses_of_sequences() -> None:
    """They count all tokens."""
    with epic.torch.Group(**ALONE) as group:
        wish = epic.torch.Moe.of(**WISH, balance_coeff=0.1, sequence_tokens=3)
        layer = epic.torch.MoE(group, wish)
        with pytest.raises(EpicUnsupportedError, match="sequence_tokens"):
            layer(X, torch.ones(COUNT, dtype=torch.bool))


def test_counts_of_a_plan_from_outside() -> None:
    """Of a compiled function with dynamic shapes, as after a graph break: torch gave other bytes of
    the plan."""
    with epic.torch.Group(**ALONE) as group:
        plan = epic.torch.plan(group, LAYER, IDS)
        for name in ("expert_rows", "load", "demand"):
            torch._dynamo.reset()

            def counts(plan: Any, name: str = name) -> torch.Tensor:
                return plan.counted(name)

            run = torch.compile(counts, backend="aot_eager", dynamic=True, fullgraph=True)
            assert torch.equal(run(plan), plan.counted(name)), name


@pytest.mark.parametrize("strict", [True, False])
def test_options_made_in_a_program(strict: bool) -> None:
    """Of parts and of plain words: torch.export and torch.compile take them for constants."""
    if strict and torch.__version__.startswith(("2.9.", "2.11.")):
        pytest.skip("torch 2.9 and 2.11 export no tensors that a function closes over")

    class Made(torch.nn.Module):
        """Options in the body."""

        def forward(self, x: Any, w: Any, ids: Any) -> tuple[Any, Any]:
            """A layer's steps, and a whole one."""
            layer = epic.torch.Layer(EXPERTS, TOP_K, alignment=4)
            plan, recv, slots = epic.torch.plan_dispatch(group, layer, ids, x, w)
            wish = epic.torch.Moe.of(num_experts=EXPERTS, top_k=2, hidden=HIDDEN, inner=12)
            return epic.torch.combine(plan, recv, slots), epic.torch.moe(group, wish, x, own).out

    with epic.torch.Group(**ALONE) as group, torch.no_grad():
        own = epic.torch.MoE(group, epic.torch.Moe.of(**WISH)).weights()
        wanted = Made()(X, W, IDS)
        program = torch.export.export(Made(), (X, W, IDS), strict=strict)
        assert all(map(torch.equal, program.module()(X, W, IDS), wanted))
        torch._dynamo.reset()
        run = torch.compile(Made(), backend="aot_eager", fullgraph=True)
        assert all(map(torch.equal, run(X, W, IDS), wanted))


def test_a_tag_for_each_call() -> None:
    """A group keeps what layers and tags need, and not for ever."""
    with epic.torch.Group(**ALONE) as group:
        for tag in range(MOST_WAYS + 5):
            epic.torch.plan(group, LAYER, IDS[:1], tag=tag)
        assert len(group.ways) <= MOST_WAYS


def test_losses_of_sequences_on_uneven_ranks() -> None:
    """The composed layer counted as many tokens on each rank."""
    meets, tokens = epic.torch.threads(3), (3, 9, 0)
    wish = epic.torch.Moe.of(**{**WISH, "num_experts": 6}, balance_coeff=0.5, sequence_tokens=3)

    def run(rank: int) -> list[torch.Tensor]:
        sizes = {**SIZES, "meet": meets[rank]}
        with epic.torch.Group(**sizes) as group:
            layer, x = epic.torch.MoE(group, wish), numbers(rank, tokens[rank], HIDDEN)
            core = layer(x)[1]
            layer.grouped_mm = epic.torch.slab_mm
            return [core, layer(x)[1]]

    with ThreadPoolExecutor(3) as pool:
        found = [done.result(60) for done in [pool.submit(run, rank) for rank in range(3)]]
    for core, composed in found:
        torch.testing.assert_close(composed, core)
    assert found[0][0] > 0


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "activation": ({"activation": "gelu"}, "experts.activation is silu on rank 0 and gelu on r"),
    "inner": ({"inner": 16}, "experts.inner is 12 on rank 0 and 16 on rank 1"),
    "score": ({"score": "sigmoid"}, "router.score is softmax on rank 0 and sigmoid on rank 1"),
    "z_coeff": ({"z_coeff": 0.5}, "z_coeff is 0.25 on rank 0 and 0.5 on rank 1"),
    "sequence_tokens": ({"sequence_tokens": 3}, "sequence_tokens is 0 on rank 0 and 3 on rank 1"),
    "shared": (
        {"shared": epic.torch.Experts(hidden=HIDDEN, inner=12)},
        "shared is 0 on rank 0 and 1 on rank 1",
    ),
    "dtype": ({"dtype": torch.bfloat16}, "experts.weight_type is float32 on rank 0 and bfloat16"),
}


@pytest.mark.parametrize("kind", ["core", "composed", "quantized", "masked"])
@pytest.mark.parametrize("change", CHANGES)
def test_options_that_differ(change: str, kind: str) -> None:
    """No shape of what is sent differs, so the results of both ranks would be wrong."""
    (more, sentence), meets = CHANGES[change], epic.torch.threads(2)
    if kind == "masked" and change == "sequence_tokens":
        pytest.skip("refused beside a mask")

    def run(rank: int) -> str:
        given = {"z_coeff": 0.25, **WISH} | (more if rank else {})
        dtype = given.pop("dtype", torch.float32)
        if kind == "quantized":
            given["quantize"] = "1x32"
        sizes = {**SIZES, "meet": meets[rank], "timeout_ms": 9000}
        options = epic.torch.Moe.of(**given)
        with epic.torch.Group(**sizes) as group, torch.no_grad():
            product = epic.torch.slab_mm if kind == "composed" else None
            layer = epic.torch.MoE(group, options, dtype=dtype, grouped_mm=product)
            mask = torch.ones(COUNT, dtype=torch.bool) if kind == "masked" else None
            try:
                layer(X, mask)
            except RuntimeError as error:
                return str(error)
        return "no error"

    with ThreadPoolExecutor(2) as pool:
        found = [done.result(60) for done in [pool.submit(run, rank) for rank in range(2)]]
    assert all("EPIC_EMISMATCH" in said and sentence in said for said in found), found
