# SPDX-License-Identifier: Apache-2.0
"""Checks that arguments that do not fit together raise an error instead of giving wrong numbers."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import epic.torch
from epic.torch import EpicArgumentError, EpicUnsupportedError
from epic.torch.experts import slab_mm
from epic.torch.plans import MAX_SPECS
from parts import EXPERTS, HIDDEN, LAYER, SIZES, TOP_K, choices, numbers

COUNT = 6
ALONE = {**SIZES, "num_ranks": 1}
X, W, IDS = numbers(1, COUNT, HIDDEN), numbers(2, COUNT, TOP_K), choices(3, COUNT)
WISH: dict[str, Any] = {"num_experts": EXPERTS, "top_k": 2, "hidden": HIDDEN, "inner": 12}


def step(group: Any, x: Any = X, w: Any = W, ids: Any = IDS, **more: Any) -> torch.Tensor:
    """Dispatch and combine."""
    plan, recv, slots = epic.torch.plan_dispatch(group, LAYER, ids, x, w, **more)
    return epic.torch.combine(plan, recv, slots)


def placed(group: Any, table: Any, local: int = EXPERTS) -> torch.Tensor:
    """Plan with a table of ranks."""
    return step(group, rank_of_expert=table, num_local_experts=local, capacity=99)


def chosen(group: Any, table: Any) -> Any:
    """Choose experts by token id."""
    router = epic.torch.Router(EXPERTS, TOP_K)
    ids = torch.zeros(2, dtype=torch.int64)
    return epic.torch.route(router, torch.zeros(2, EXPERTS), token_ids=ids, table=table)


META = torch.device("meta")


def make_weights() -> dict[str, Any]:
    """Return all weights of a layer with a shared expert. No two of its sizes are equal."""
    shapes = {"w_gate": (HIDDEN, EXPERTS), "b_gate": (EXPERTS,), "bias": (EXPERTS,)}
    for prefix, local in (("", EXPERTS), ("shared_", 1)):
        names = [prefix + name for name in ("gate_up", "down", "b_gate_up", "b_down")]
        names = names if prefix else ["w_gate_up", "w_down", "b_gate_up", "b_down"]
        sizes = [(local, HIDDEN, 24), (local, 12, HIDDEN), (local, 24), (local, HIDDEN)]
        shapes |= dict(zip(names, sizes, strict=True))
    shapes |= {"w_shared_gate": (HIDDEN,)}
    return {name: numbers(5, *shape) / 4 for name, shape in shapes.items()}


# Changes of one weight, and the error.
DAMAGE: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "transposed": (lambda w: w.mT if w.dim() > 1 else w[:-1], "has the shape|elements: must"),
    "reshaped": (lambda w: w.reshape(w.shape[-1], -1)[None], "has the shape|dimensions: must"),
    "one less": (lambda w: w[..., :-1], "has the shape|elements: must"),
    "a list": (lambda w: w.tolist(), "is a list: must be a tensor"),
    "sparse": (lambda w: w.to_sparse(), "is torch.sparse_coo: must be dense"),
    "integers": (lambda w: w.int(), "is torch.int32: must be float32"),
    "on another device": (lambda w: w.to("meta"), "is on meta and x is on cpu: must be on one"),
}


@pytest.mark.parametrize("name", make_weights())
@pytest.mark.parametrize("product", [None, slab_mm], ids=["core", "composed"])
def test_weights_of_a_layer(name: str, product: Any) -> None:
    """Check that each weight that does not fit is an error that names it, and nothing else."""
    shared = epic.torch.Experts(hidden=HIDDEN, inner=12)
    options = epic.torch.Moe.of(**WISH, shared=shared)
    weights = make_weights()
    with epic.torch.Group(**ALONE) as group:

        def run(value: Any) -> Any:
            given = epic.torch.MoeWeights(**{**weights, name: value})
            return epic.torch.moe(group, options, X, given, grouped_mm=product).out

        for change, text in DAMAGE.values():
            with pytest.raises(EpicArgumentError, match=rf"{name} ({text})"):
                run(change(weights[name]))
        if name in ("w_gate", "w_gate_up", "w_down", "shared_down"):
            with pytest.raises(EpicArgumentError, match=f"{name} is None: must be a tensor"):
                run(None)
        assert run(weights[name]).isfinite().all()


DICT: Any = dict(WISH)
NONE: Any = None
THREE: Any = 3
E4M3_ROWS = (torch.zeros(4, 64).to(torch.float8_e4m3fn), torch.ones(4, 1))
WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "options as a dict": (lambda g: epic.torch.MoE(g, DICT), "options is a dict: must be a"),
    "no group": (lambda g: epic.torch.MoE(NONE, epic.torch.Moe.of(**WISH)), "group is a NoneType"),
    "a product that is no function": (
        lambda g: epic.torch.MoE(g, epic.torch.Moe.of(**WISH), grouped_mm=THREE),
        "grouped_mm is 3: must be a function",
    ),
    "a rate that is NaN": (
        lambda g: epic.torch.MoE(g, epic.torch.Moe.of(**WISH), bias_rate=float("nan")),
        "bias_rate is nan: must be a finite number",
    ),
    "a rate below 0": (
        lambda g: epic.torch.MoE(g, epic.torch.Moe.of(**WISH), bias_rate=-1.0),
        "bias_rate is -1.0: must be at least 0",
    ),
    "integers of e4m3 rows": (
        lambda g: epic.torch.dequantize(*E4M3_ROWS, torch.int32),
        "dtype is torch.int32: must be",
    ),
    "e4m3 rows as bytes": (
        lambda g: epic.torch.dequantize(E4M3_ROWS[0].view(torch.uint8), E4M3_ROWS[1], X.dtype),
        "rows are torch.uint8 of shape",
    ),
    "an e4m3 row without others": (
        lambda g: epic.torch.dequantize(E4M3_ROWS[0][0], E4M3_ROWS[1], X.dtype),
        "of shape .*: must be torch.float8_e4m3fn of shape",
    ),
    "logits as a list": (
        lambda g: epic.torch.route(epic.torch.Router(8, 2), [[0.0] * 8]),
        "logits is a list: must be a tensor",
    ),
    "turned weights": (lambda g: step(g, w=W.T), r"weights has .*\[3, 6\]: must be \[6, 3\]"),
    "flat weights": (lambda g: step(g, w=W.reshape(-1)), r"weights has .*\[18\]: must be \[6, 3\]"),
    "tokens in another order": (
        lambda g: step(g, X.reshape(3, 2, HIDDEN), W, IDS.reshape(2, 3, TOP_K)),
        r"tokens has the shape \[3, 2, 20\]: .* topk_idx, \[2, 3\]",
    ),
    "too few local experts": (
        lambda g: step(g, num_local_experts=3),
        "num_local_experts is 3: must be from 8 to 8",
    ),
    "too many local experts": (
        lambda g: step(g, num_local_experts=20),
        "num_local_experts is 20: must be from 8 to 8",
    ),
    "fewer than the table has": (lambda g: placed(g, [0] * EXPERTS, 3), "num_local_experts is 3"),
    "a table of fractions": (lambda g: placed(g, [0.5] * EXPERTS), "float32: must be an integer"),
    "a table of wide numbers": (
        lambda g: placed(g, torch.full((EXPERTS,), 1 << 32)),
        "expert 0 has owner 2147483647",
    ),
    "ids of fractions": (
        lambda g: chosen(g, torch.full((3, TOP_K), 0.7)),
        "table is torch.float32: must be an integer type",
    ),
    "ids of wide numbers": (
        lambda g: chosen(g, torch.full((3, TOP_K), 1 << 32)),
        "is 2147483647: it must be below the router's 8 experts",
    ),
    "tokens without memory": (lambda g: step(g, X.to(META)), "on cpu and meta"),
    "weights without memory": (lambda g: step(g, w=W.to(META)), "on cpu and meta"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_steps(name: str) -> None:
    """Check that the error has the argument, its value and the rule."""
    wrong, sentence = WRONG[name]
    with epic.torch.Group(**ALONE) as group, pytest.raises(EpicArgumentError, match=sentence):
        wrong(group)


@pytest.mark.parametrize("what", ["tokens", "rows"])
def test_wide_rows_are_not_rounded(what: str) -> None:
    """Check that the error is raised by forward and not by backward, also with out=."""
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
            with pytest.raises(EpicUnsupportedError, match=f"{what} is torch.float64"):
                call()
        for wrong in ("1x64", ""):
            with pytest.raises(EpicArgumentError, match=f"quantize_gradient is '{wrong}'"):
                epic.torch.combine(plan, rows, quantize_gradient=wrong, out=torch.empty_like(X))


@pytest.mark.parametrize("name", ["timeout_ms", "max_sms", "max_in_flight", "max_top_k"])
def test_numbers_of_a_group(name: str) -> None:
    """Check negative numbers: -1 was once read as 4294967295."""
    with pytest.raises(EpicArgumentError, match=f"{name} is -1: must be an integer"):
        epic.torch.Group(**{**ALONE, name: -1})


@pytest.mark.parametrize("what", ["fused", "single", "sum", "route"])
def test_forward_mode_is_refused(what: str) -> None:
    """Check that forward mode raises an error: its derivatives were once zeros."""
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
    """Check parameters left on "meta": the layer once returned uninitialized memory."""
    with epic.torch.Group(**ALONE) as group:
        options = epic.torch.Moe.of(**WISH)
        layer = epic.torch.MoE(group, options, gate_bias=True, expert_biases=True, bias_rate=0.1)
        empty = getattr(layer, name).to(META)
        setattr(layer, name, empty if name == "bias" else torch.nn.Parameter(empty))
        with (
            pytest.raises(EpicArgumentError, match=f"{name} is on meta and x is on cpu"),
            torch.no_grad(),
        ):
            layer(X)


@pytest.mark.parametrize("assign", [True, False])
def test_the_load_of_a_layer_made_on_meta(assign: bool) -> None:
    """Check that the load of such a layer starts as zeros and counts; no state dict contains it."""
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
    """Check that NaN in masked tokens changes neither losses nor gradients of the others."""
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


@pytest.mark.parametrize("product", [None, slab_mm], ids=["core", "product"])
@pytest.mark.parametrize("fill", [float("nan"), float("inf"), 1e30])
def test_padding_with_a_shared_expert(fill: float, product: Any) -> None:
    """Compare a layer with a mask and a layer that gets only the unmasked tokens.

    Masked tokens return zeros whatever they contain. Outputs, losses and gradients of the others
    are equal.
    """
    mask = torch.tensor([True, True, False, True, False, True])
    more = {"balance_coeff": 0.1, "z_coeff": 0.1, "shared": epic.torch.Experts(1, HIDDEN, 8)}
    given: dict[str, Any] = {"gate_bias": True, "expert_biases": True, "shared_gate": True}
    with epic.torch.Group(**ALONE) as group:
        options = epic.torch.Moe.of(**WISH, **more)
        layer = epic.torch.MoE(group, options, grouped_mm=product, dtype=torch.float64, **given)
        biases = {"shared_b_gate_up": (1, 16), "shared_b_down": (1, HIDDEN)}
        extra = {n: numbers(9, *s, dtype=torch.float64) for n, s in biases.items()}
        leaves = [v.requires_grad_() for v in extra.values()] + list(layer.parameters())

        def run(x: torch.Tensor, mask: Any, ct: torch.Tensor) -> list[torch.Tensor]:
            x = x.clone().requires_grad_()
            found = epic.torch.moe(
                group, options, x, layer.weights()._replace(**extra), token_mask=mask,
                grouped_mm=product,
            )  # fmt: skip
            total = (found.out * ct).sum() + found.loss
            return [
                found.out.detach(),
                found.loss.detach(),
                *torch.autograd.grad(total, [x, *leaves]),
            ]

        x, ct = X.double(), numbers(8, COUNT, HIDDEN, dtype=torch.float64)
        wanted = run(x[mask], None, ct[mask])
        got = run(torch.where(mask[:, None], x, fill), mask, ct)
        assert not got[0][~mask].any() and not got[2][~mask].any()
        got[0], got[2] = got[0][mask], got[2][mask]
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_token_ids_in_another_order() -> None:
    """Check that token ids must have the dimensions of the tokens, not only their number."""
    table = torch.tensor([[0, 1], [2, 3]])
    ids = torch.arange(6) % 2
    router = epic.torch.Router(EXPERTS, 2)
    with epic.torch.Group(**ALONE) as group:
        layer = epic.torch.MoE(group, epic.torch.Moe.of(**WISH))
        x = X.reshape(2, 3, HIDDEN)

        def chosen(ids: torch.Tensor, **more: Any) -> torch.Tensor:
            weights = layer.weights()
            more |= {"token_ids": ids, "table": table}
            return epic.torch.moe(group, layer.options, x, weights, **more).out

        assert torch.equal(chosen(ids.view(2, 3)), chosen(ids))
        for wrong in (ids.view(3, 2), ids.view(6, 1), ids[:4]):
            for more in ({}, {"grouped_mm": slab_mm}):
                with pytest.raises(EpicArgumentError, match=r"token_ids has the shape \["):
                    chosen(wrong, **more)
            with pytest.raises(EpicArgumentError, match=r"must be \[2, 3\]"):
                logits = torch.zeros(2, 3, EXPERTS)
                epic.torch.route(router, logits, token_ids=wrong, table=table)


NO_NUMBERS = (torch.int32, torch.bool, torch.complex64)


@pytest.mark.parametrize("dtype", NO_NUMBERS)
@pytest.mark.parametrize("grad", [False, True])
def test_weights_of_other_dtypes(dtype: torch.dtype, grad: bool) -> None:
    """Check that other dtypes are refused. They were once cast, complex ones to their real part."""
    x = X.clone().requires_grad_(grad)
    wrong = torch.ones(COUNT, TOP_K).to(dtype)
    flat = epic.torch.Layer(EXPERTS, TOP_K, layout="flat")
    own = epic.torch.ExpertWeights(torch.ones(8, HIDDEN, 8), torch.ones(8, 4, HIDDEN))
    with epic.torch.Group(**ALONE) as group:
        plan = epic.torch.plan(group, LAYER, IDS)
        rows = torch.ones(plan.capacity, HIDDEN, requires_grad=grad)
        slots = torch.ones(plan.capacity).to(dtype)
        calls: list[Callable[[], Any]] = [
            lambda: step(group, x, wrong),
            lambda: epic.torch.dispatch(plan, x, wrong),
            lambda: epic.torch.dispatch(plan, x, wrong, quantize="1x32"),
            lambda: epic.torch.dispatch_quantized(plan, X, wrong),
            lambda: epic.torch.dispatch_flat(epic.torch.plan(group, flat, IDS), x, wrong),
            lambda: epic.torch.combine(plan, rows, slots),
            lambda: epic.torch.route(epic.torch.Router(HIDDEN, 2), x, bias=slots[:HIDDEN]),
            lambda: epic.torch.sum_replica_grads(copies(group), torch.ones(EXPERTS, 4).to(dtype)),
            lambda: epic.torch.scaled(own._replace(w_down=own.w_down.to(dtype))),
            lambda: epic.torch.MoE(group, epic.torch.Moe.of(**WISH), dtype=dtype),
        ]
        for call in calls:
            with pytest.raises(EpicArgumentError, match="float32, bfloat16, float16 or float64"):
                call()


def copies(group: epic.torch.Group) -> epic.torch.Plan:
    """Return a plan with replicas."""
    layer = epic.torch.Layer(EXPERTS, TOP_K, num_logical=4)
    return epic.torch.plan(group, layer, IDS % 4, logical_of_expert=[0, 1, 2, 3] * 2)


@pytest.mark.parametrize("dtype", NO_NUMBERS)
@pytest.mark.parametrize("product", [None, slab_mm], ids=["core", "product"])
def test_a_layer_of_other_dtypes(dtype: torch.dtype, product: Any) -> None:
    """Check that the error names the array that has another dtype."""
    more: dict[str, Any] = {"gate_bias": True, "expert_biases": True, "shared_gate": True}
    with epic.torch.Group(**ALONE) as group:
        options = epic.torch.Moe.of(**WISH, shared=epic.torch.Experts(1, HIDDEN, 8))
        layer = epic.torch.MoE(group, options, bias_rate=0.1, **more)
        weights = layer.weights()
        for name, value in weights._asdict().items():
            if value is not None:
                wrong = weights._replace(**{name: value.detach().to(dtype)})
                with pytest.raises(EpicArgumentError, match=f"{name} is {dtype}: must be float32"):
                    epic.torch.moe(group, options, X, wrong, grouped_mm=product)


@pytest.mark.parametrize("product", [None, slab_mm], ids=["core", "product"])
def test_shapes_of_a_layer(product: Any) -> None:
    """Check the shape of each array: a composed layer once used one element for all."""
    more: dict[str, Any] = {"gate_bias": True, "expert_biases": True, "shared_gate": True}
    with epic.torch.Group(**ALONE) as group:
        options = epic.torch.Moe.of(**WISH, shared=epic.torch.Experts(1, HIDDEN, 8))
        layer = epic.torch.MoE(group, options, bias_rate=0.1, **more)
        weights = layer.weights()
        for name, value in weights._asdict().items():
            if value is not None:
                for wrong in (value[..., :1], torch.cat([value, value])):
                    changed = weights._replace(**{name: wrong.detach()})
                    # If w_gate_up has twice as many experts, the error may name it or the other
                    # arrays.
                    named = "experts|w_down|w_gate_up" if name == "w_gate_up" else name
                    with pytest.raises(EpicArgumentError, match=named):
                        epic.torch.moe(group, options, X, changed, grouped_mm=product)


def test_scales_of_another_block() -> None:
    """Check that scales of blocks 1x32 are refused for 1x128."""
    with epic.torch.Group(**ALONE) as group:
        for hidden in (20, 300):
            x = numbers(1, COUNT, hidden)
            plan = epic.torch.plan(group, LAYER, IDS)
            for block, other in (("1x32", "1x128"), ("1x128", "1x32")):
                rows, scales, _ = epic.torch.dispatch_quantized(plan, x, block=block)
                wanted, _ = epic.torch.dispatch(plan, x, quantize=block)
                found = epic.torch.dequantize(rows, scales, torch.float32, block)
                assert torch.equal(found, wanted)
                if block == "1x32":
                    octets = scales.view(torch.float8_e8m0fnu)
                    found = epic.torch.dequantize(rows, octets, torch.float32, block)
                    assert torch.equal(found, wanted)
                wrong: list[tuple[torch.Tensor, str, str]] = [
                    (scales, other, "scales are torch"),
                    (scales[:, :0], block, "scales are torch"),
                    (scales[:-1], block, "scales are torch"),
                    (scales.to(torch.float16), block, "scales are torch.float16"),
                    (scales, "1x64", "block is '1x64'"),
                ]
                for value, name, sentence in wrong:
                    with pytest.raises(EpicArgumentError, match=sentence):
                        epic.torch.dequantize(rows, value, torch.float32, name)


def test_a_mask_with_losses_of_sequences() -> None:
    """Check that a token mask and losses per sequence are refused, because these count all
    tokens."""
    with epic.torch.Group(**ALONE) as group:
        wish = epic.torch.Moe.of(**WISH, balance_coeff=0.1, sequence_tokens=3)
        layer = epic.torch.MoE(group, wish)
        with pytest.raises(EpicUnsupportedError, match="sequence_tokens"):
            layer(X, torch.ones(COUNT, dtype=torch.bool))


def test_counts_of_a_plan_from_outside() -> None:
    """Check the counts of a plan outside of a compiled function with dynamic shapes, for which
    torch once returned other bytes of the plan."""
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
    """Check that options can be created inside a program, because torch.export and torch.compile
    treat their parts as constants."""
    if strict and torch.__version__.startswith(("2.9.", "2.11.")):
        pytest.skip("torch 2.9 and 2.11 export no tensors that a function closes over")

    class Made(torch.nn.Module):
        """A module that creates its options in forward."""

        def forward(self, x: Any, w: Any, ids: Any) -> tuple[Any, Any]:
            """Run single steps, and a whole layer."""
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
    """Check that a group keeps memory for a bounded number of layers and tags."""
    with epic.torch.Group(**ALONE) as group:
        for tag in range(MAX_SPECS + 5):
            epic.torch.plan(group, LAYER, IDS[:1], tag=tag)
        assert len(group.specs) <= MAX_SPECS


def test_losses_of_sequences_on_uneven_ranks() -> None:
    """Check losses per sequence on uneven ranks: a composed layer once assumed equal numbers."""
    bootstraps, tokens = epic.torch.threads(3), (3, 9, 0)
    wish = epic.torch.Moe.of(**{**WISH, "num_experts": 6}, balance_coeff=0.5, sequence_tokens=3)

    def run(rank: int) -> list[torch.Tensor]:
        sizes = {**SIZES, "bootstrap": bootstraps[rank]}
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
    """Check options that differ between ranks although all shapes are equal."""
    (more, sentence), bootstraps = CHANGES[change], epic.torch.threads(2)
    if kind == "masked" and change == "sequence_tokens":
        pytest.skip("refused together with a mask")

    def run(rank: int) -> str:
        given = {"z_coeff": 0.25, **WISH} | (more if rank else {})
        dtype = given.pop("dtype", torch.float32)
        if kind == "quantized":
            given["quantize"] = "1x32"
        sizes = {**SIZES, "bootstrap": bootstraps[rank], "timeout_ms": 9000}
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
