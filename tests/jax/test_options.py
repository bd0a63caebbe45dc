# SPDX-License-Identifier: Apache-2.0
"""Tests that constructors check options, and that all exceptions have one base class."""

import inspect
import re
import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import epic
import epic.jax
from epic import _native
from epic.jax import Experts, Layer, Moe, Router, Tcp

LAYER, ROUTER = Layer(8, 2), Router(8, 2)
EXPERTS = Experts(hidden=16, inner=12)
MISTAKES: list[tuple[Any, dict[str, Any], str]] = [
    (
        LAYER,
        {"overflow": "dorp"},
        r"overflow is 'dorp': must be one of error, drop.*did you mean 'drop'",
    ),
    (LAYER, {"sum_order": "trees"}, "did you mean 'tree'"),
    (LAYER, {"layout": 1}, "layout is 1: must be one of expert_major, flat$"),
    (LAYER, {"num_experts": 0}, "num_experts is 0"),
    (LAYER, {"num_experts": 8.5}, "num_experts is 8.5: must be an integer from 0"),
    (LAYER, {"num_experts": -1}, "num_experts is -1"),
    (LAYER, {"num_experts": True}, "num_experts is True: must be an integer from 0"),
    (LAYER, {"num_experts": "8"}, "num_experts is '8'"),
    (LAYER, {"num_experts": 1 << 32}, "4294967296: must be an integer from 0 to 4294967295$"),
    (LAYER, {"top_k": 65}, "top_k is 65: must be 1 to 64"),
    (LAYER, {"distinct": "yes"}, "distinct is 'yes': must be True or False"),
    (LAYER, {"num_logical": 9}, "num_logical is 9"),
    (LAYER, {"alignment": 1 << 21}, "alignment is 2097152"),
    (LAYER, {"expert_capacity": 4}, "expert_capacity is 4"),
    (LAYER, {"leaves": 2}, "leaves is 2"),
    (LAYER, {"sum_order": "tree", "leaves": 3}, "leaves is 3"),
    (LAYER, {"partial_type": "float23"}, "partial_type is 'float23'.*did you mean 'float32'"),
    (LAYER, {"partial_type": "bfloat16"}, "partial_type is"),
    (ROUTER, {"score": "softmaxx"}, "score is 'softmaxx'.*did you mean 'softmax'"),
    (ROUTER, {"top_k": 9}, "top_k is 9"),
    (ROUTER, {"normalize": True}, "normalize is True: must be one of none, sum, clamped"),
    (ROUTER, {"scale": float("nan")}, "scale is nan: must be a finite number"),
    (ROUTER, {"scale": "1"}, "scale is '1'"),
    (ROUTER, {"num_groups": 3, "topk_groups": 1}, "num_groups is 3"),
    (ROUTER, {"topk_groups": 2}, "topk_groups is 2 and num_groups is 0"),
    (ROUTER, {"jitter": 0.1}, "jitter is 0.1 and weight_rule is 'of_score': must be 0"),
    (ROUTER, {"norm_min": 0.1}, "norm_min is 0.1 and normalize is 'none': must be 0"),
    (ROUTER, {"scale": True}, "scale is True: must be a finite number"),
    (EXPERTS, {"limit": 3.0}, "limit is 3.0 and activation is 'silu': must be 0, because only"),
    (EXPERTS, {"activation": "clamped_silu", "alpha": 1.5}, "alpha is 1.5 .*'clamped_swiglu' uses"),
    (EXPERTS, {"activation": "swish"}, "activation is 'swish': must be one of silu"),
    (EXPERTS, {"hidden": 0}, "hidden is 0: must be an integer from 1"),
    (EXPERTS, {"inner": -4}, "inner is -4"),
    (EXPERTS, {"num_local_experts": 2, "ungated": 2}, "ungated is 2"),
    (EXPERTS, {"weighting": "soon"}, "weighting is 'soon'"),
]


@pytest.mark.parametrize(("good", "wrong", "sentence"), MISTAKES, ids=lambda x: str(x)[:40])
def test_a_mistake(good: Any, wrong: dict[str, Any], sentence: str) -> None:
    """The error is raised when the option is created, with the field, its value and the rule."""
    with pytest.raises(epic.EpicArgumentError, match=sentence):
        replace(good, **wrong)


@pytest.mark.parametrize(
    "wish",
    [{"normalize": "sum"}, {"normalize": "clamped", "norm_min": 0.1}]
    + [{"weight_rule": "softmax_chosen", "score": "logits"}],
    ids=str,
)
def test_a_router_that_cannot_learn(wish: dict[str, Any]) -> None:
    """With top_k=1 a normalized weight is 1 for any logits, so the router cannot learn. The error
    is raised at creation. The gradient is indeed zero, and with two weights there is no error."""
    with pytest.warns(RuntimeWarning, match=r"top_k is 1 and .*gradients only from its"):
        router = Router(8, 1, **wish)
    logits = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    gradient = jax.grad(lambda z: epic.jax.route(router, z)[1].sum())(logits)
    assert np.abs(gradient).max() < 1e-6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Router(8, 2, **wish)
        Router(8, 1, score="sigmoid")


MOE = Moe(LAYER, ROUTER, EXPERTS)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"router": Router(4, 2)}, "layer.num_experts is 8 and router.num_experts is 4"),
        ({"router": Router(8, 1)}, "layer.top_k is 2 and router.top_k is 1"),
        ({"layer": Layer(8, 2, layout="flat")}, "layer.layout is 'flat'"),
        ({"shared": Experts(hidden=8, inner=12)}, "shared.hidden is 8 and experts.hidden is 16"),
        ({"shared": Experts(2, 16, 12)}, "shared.num_local_experts is 2"),
        ({"capacity": 0}, "capacity is 0: must be an integer from 1"),
        ({"balance_coeff": float("inf")}, "balance_coeff is inf"),
        ({"balance_coeff": -0.5}, r"balance_coeff is -0.5: must be 0 \(no loss\) or more"),
        ({"z_coeff": -1}, r"z_coeff is -1: must be 0 \(no loss\) or more"),
        ({"experts": Experts(9, 16, 12)}, "num_local_experts is 9: must be at most 8"),
        ({"sequence_tokens": -1}, "sequence_tokens is -1"),
        ({"quantize": "1x64"}, "quantize is '1x64': must be one of 1x128, 1x32"),
        ({"layer": ROUTER}, "layer is a Router: must be an epic.Layer"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_a_layer_of_parts_that_do_not_fit(wrong: dict[str, Any], sentence: str) -> None:
    """Options that two parts share must agree."""
    with pytest.raises(epic.EpicArgumentError, match=sentence):
        replace(MOE, **wrong)


def test_all_at_once() -> None:
    """Moe.of passes every number to the parts that need it."""
    got = Moe.of(
        num_experts=8, top_k=2, hidden=16, inner=12, score="sigmoid", alignment=4,
        activation="gelu", balance_coeff=0.5, shared=Experts(hidden=16, inner=4),
    )  # fmt: skip
    assert got == Moe(
        Layer(8, 2, alignment=4),
        Router(8, 2, score="sigmoid"),
        Experts(hidden=16, inner=12, activation="gelu"),
        shared=Experts(hidden=16, inner=4),
        balance_coeff=0.5,
    )
    with pytest.raises(
        epic.EpicArgumentError, match=r"argument of Moe.of is .hiden.: .*did you mean 'hidden'"
    ):
        Moe.of(num_experts=8, top_k=2, hiden=16, inner=12)
    with pytest.raises(epic.EpicArgumentError, match=r"experts is 100: must be at most 8"):
        Moe.of(num_experts=8, top_k=2, hidden=16, inner=12, num_local_experts=100)
    with pytest.raises(epic.EpicArgumentError, match=r"argument of Moe.of is .router."):
        Moe.of(num_experts=8, top_k=2, hidden=16, inner=12, router=ROUTER)


MESH = ("data", "context", "ep")


@pytest.mark.parametrize(
    ("token_axes", "tokens"),
    [
        (None, 2 * 6),
        (("ep",), 4 * 6),
        (("data", "ep"), 2 * 6),
        (jax.sharding.PartitionSpec("data", "ep"), 4 * 3),
        (jax.sharding.PartitionSpec(None, ("context", "ep")), 8 * 3),
    ],
    ids=str,
)
def test_sizes_of_a_group(token_axes: Any, tokens: int) -> None:
    """like= derives the sizes of a device, and the largest layer of these sizes fits."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 1, 2), MESH)
    x = np.ones((8, 6, 16), np.float32)
    with epic.jax.open(mesh, "ep", like=x, token_axes=token_axes) as group:
        assert (group.max_tokens, group.max_row_bytes) == (tokens, 64)
        weights = epic.jax.MoeWeights(
            np.ones((16, 8), np.float32),
            np.ones((8, 16, 24), np.float32),
            np.ones((8, 12, 16), np.float32),
        )
        layer = partial(epic.jax.sharded.moe, mesh, group, MOE, token_axes=token_axes)
        # Closing the group must not overtake a device that still runs.
        found = jax.block_until_ready(jax.jit(layer)(x, weights))
        assert found.out.shape == x.shape
    half = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
    with epic.jax.open(mesh, "ep", like=half, token_axes=token_axes, max_tokens=99) as group:
        assert (group.max_tokens, group.max_row_bytes) == (99, 32)


def test_sizes_are_needed() -> None:
    """max_row_bytes must be given directly or by like=."""
    with pytest.raises(epic.EpicArgumentError, match="max_row_bytes is None: pass a number, or"):
        epic.jax.open(max_tokens=4)
    with pytest.raises(epic.EpicArgumentError, match=r"must be \[..., hidden\]"):
        epic.jax.open(like=np.ones(3))
    with pytest.raises(epic.EpicArgumentError, match="max_tokens is -1"):
        epic.jax.open(max_tokens=-1, max_row_bytes=4)


def test_a_port() -> None:
    """Errors of a bootstrap are reported."""
    with pytest.raises(epic.EpicArgumentError, match="port is 65536: must be from 1 to 65535"):
        Tcp(port=65536)
    with pytest.raises(epic.EpicArgumentError, match="address is 29507: must be a str"):
        Tcp(29507)  # type: ignore[arg-type]


def test_one_family() -> None:
    """All errors are EpicErrors with a code; argument errors are ValueErrors, too."""
    argument, unsupported = epic.EpicArgumentError("a"), epic.EpicUnsupportedError("b")
    group = epic.EpicError("EPIC_EPEER", "rank 3 is gone")
    assert isinstance(argument, epic.EpicError) and isinstance(argument, ValueError)
    assert isinstance(unsupported, epic.EpicError) and isinstance(unsupported, NotImplementedError)
    assert not isinstance(group, ValueError)
    assert [e.code for e in (argument, unsupported, group)] == [
        "EPIC_EINVAL",
        "EPIC_ENOTSUP",
        "EPIC_EPEER",
    ]
    assert [str(e) for e in (argument, unsupported, group)] == [
        "a",
        "b",
        "EPIC_EPEER: rank 3 is gone",
    ]


def test_dtypes_are_values_too() -> None:
    """Errors that were once TypeErrors are EpicArgumentErrors."""
    with pytest.raises(epic.EpicArgumentError, match="float type"):
        epic.jax.route(ROUTER, jnp.zeros((3, 8), jnp.int32))
    with pytest.raises(epic.EpicArgumentError, match=r"w_down is bfloat16.*must be float32"):
        weights = epic.jax.ExpertWeights(jnp.zeros((1, 16, 24)), jnp.zeros((1, 12, 16), "bfloat16"))
        counts = jnp.zeros(1, jnp.int32)
        epic.jax.experts(EXPERTS, jnp.zeros((2, 16)), counts, counts, weights)


def test_a_build_without_openblas_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning is raised once, with the remedy. This build itself has OpenBLAS."""
    assert _native.core().epic_blas_name() != _native.PLAIN
    core = SimpleNamespace(epic_blas_name=lambda: _native.PLAIN)
    monkeypatch.setattr(_native, "core", lambda: core)
    _native.warn_without_blas.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match=r"plain loops.*libopenblas0-pthread") as said:
            _native.warn_without_blas()
            _native.warn_without_blas()
        assert len(said) == 1
    finally:
        _native.warn_without_blas.cache_clear()


@pytest.mark.parametrize("options", [LAYER, ROUTER, EXPERTS])
def test_numbers_are_the_cores(options: Any) -> None:
    """Each number is a field of the core's struct."""
    fields = [name for name, *_ in getattr(_native, type(options).__name__)._fields_]
    assert set(options.numbers()) <= set(fields)
    assert replace(LAYER, distinct=True).numbers()["flags"] == 8
    assert set(LAYER.numbers("x_")) == {"x_" + name for name in LAYER.numbers()}


VALUES = [epic.jax.MoeWeights, epic.jax.ExpertWeights, epic.jax.MoeOut]


@pytest.mark.parametrize("kind", [Layer, Router, Experts, Moe, Tcp, *VALUES])
def test_every_field_is_documented(kind: Any) -> None:
    """help() describes each field, in a line of its own or together with others."""
    text = inspect.cleandoc(kind.__doc__).partition("Raises:")[0]
    lines = re.findall(r"^(?: {4})?(\w+(?:, \w+)*): ", text, re.MULTILINE)
    said = {name for line in lines for name in line.split(", ")}
    assert said == set(kind._fields if kind in VALUES else epic.options.field_names(kind))


def test_every_argument_is_documented() -> None:
    """Each argument of a public function is in its docstring, or in that of a function to which its
    docstring refers."""
    like = {"moe": epic.jax.moe, "plan_dispatch": epic.jax.plan, "combine": epic.jax.combine}
    of_sharded = ("plan_dispatch", "combine", "moe", "weight_specs")
    for place, names in ((epic.jax, epic.jax.__all__), (epic.jax.sharded, of_sharded)):
        for name in names:
            function = getattr(place, name)
            if not inspect.isfunction(function):
                continue
            text = (function.__doc__ or "") + (like[name].__doc__ or "" if name in like else "")
            for argument in inspect.signature(function).parameters:
                assert re.search(rf"\b{argument}\b", text) or argument in OBVIOUS, (name, argument)


OBVIOUS = ("group", "mesh", "options", "more", "layer", "router", "plan")


def test_options_are_values() -> None:
    """Options are equal if their contents are, also with numpy integers, and can be static
    arguments of jitted functions."""
    eight: Any = np.int32(8)
    assert Layer(eight, 2) == LAYER and hash(Layer(eight, 2)) == hash(LAYER)
    assert Layer(eight, 2).numbers() == LAYER.numbers()
    assert Router(8, 2, scale=2).numbers()["scale"] == 2.0
