# SPDX-License-Identifier: Apache-2.0
"""Checks that wrong arguments of public functions raise an EpicArgumentError that names them."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import epic.jax
from conftest import make_mesh
from epic.jax import sharded

T, K, E, H, INNER, SLOTS = 6, 2, 8, 16, 12, 16
LAYER, ROUTER = epic.jax.Layer(E, K), epic.jax.Router(E, K)
EXPERTS = epic.jax.Experts(hidden=H, inner=INNER)
MOE = epic.jax.Moe(LAYER, ROUTER, EXPERTS, shared=epic.jax.Experts(hidden=H, inner=INNER))
REPLICAS = epic.jax.Layer(E, K, num_logical=4)
FLAT = epic.jax.Layer(E, K, layout="flat")
# functions that other files test, and:
NO_ARRAYS = {"open", "close", "check", "read_plan", "error_code"}
NO_ARRAYS |= {"check_invariance", "from_maxtext", "to_maxtext", "scaled", "unscaled"}
NO_ARRAYS |= {"find_non_finite", "check_finite"}


def real(*shape: int) -> np.ndarray:
    """Return random numbers."""
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def whole(*shape: int) -> np.ndarray:
    """Return expert ids that differ in each row."""
    return (np.arange(np.prod(shape)).reshape(shape) % 4).astype(np.int32)


WEIGHTS = {
    "w_gate": real(H, E),
    "w_gate_up": real(E, H, 2 * INNER),
    "w_down": real(E, INNER, H),
    "b_gate": real(E),
    "bias": real(E),
    "b_gate_up": real(E, 2 * INNER),
    "b_down": real(E, H),
    "shared_gate_up": real(1, H, 2 * INNER),
    "shared_down": real(1, INNER, H),
    "shared_b_gate_up": real(1, 2 * INNER),
    "shared_b_down": real(1, H),
}
NEEDED = ("w_gate", "w_gate_up", "w_down", "shared_gate_up", "shared_down")


def of_weights(function: Callable[..., Any], kind: Any) -> Callable[..., Any]:
    """Return the function with the fields of its weights as arguments."""

    def run(**given: Any) -> Any:
        fields = {name: given.pop(name) for name in kind._fields if name in given}
        return function(weights=kind(**fields), **given)

    return run


class Case:
    """A call with correct arrays.

    needed: arrays that must not be None. free: arrays whose last dimension may have another size.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arrays: dict[str, Any],
        needed: tuple[str, ...],
        free: tuple[str, ...] = (),
        **others: Any,
    ) -> None:
        self.function, self.arrays, self.needed = function, arrays, needed
        self.free, self.others = free, others

    def run(self, **changes: Any) -> Any:
        """Make the call with other arguments."""
        return self.function(**{**self.arrays, **self.others, **changes})


def make_cases(group: Any, mesh: Any, meshed: Any) -> dict[str, Case]:
    """Return a correct call of each public function."""
    ids, x, w = whole(T, K), real(T, H), real(T, K)
    plan = epic.jax.plan(group, LAYER, ids, capacity=SLOTS)
    flat = epic.jax.plan(group, FLAT, ids)
    copies = np.arange(E, dtype=np.int32) % 4
    replicas = epic.jax.plan(group, REPLICAS, ids, logical_of_expert=copies)
    counts = np.full(E, 2, np.int32)
    owners = np.zeros(E, np.int32)
    table = {"token_ids": np.zeros(T, np.int32), "table": whole(3, K)}
    own = {name: WEIGHTS[name] for name in epic.jax.ExpertWeights._fields if name in WEIGHTS}
    early = replace(EXPERTS, weighting="early")
    everywhere, slots, _ = sharded.plan_dispatch(mesh, meshed, LAYER, whole(8, K), real(8, H))
    return {
        "route": Case(
            epic.jax.route,
            {"logits": real(T, E), "bias": real(E), **table},
            ("logits", "token_ids", "table"),
            router=ROUTER,
        ),
        "balance_loss": Case(
            epic.jax.balance_loss,
            {"logits": real(T, E), "load": counts},
            ("logits", "load"),
            router=ROUTER, coeff=0.5, total_tokens=T,
        ),
        "balance_loss by sequence": Case(
            epic.jax.balance_loss,
            {"logits": real(T, E), "topk_idx": ids},
            ("logits", "topk_idx"),
            router=ROUTER, coeff=0.5, total_tokens=T, sequence_tokens=3,
        ),
        "z_loss": Case(
            epic.jax.z_loss, {"logits": real(T, E)}, ("logits",),
            router=ROUTER, coeff=0.5, total_tokens=T,
        ),
        "bias_update": Case(
            epic.jax.bias_update, {"bias": real(E), "load": counts}, ("bias", "load"), rate=0.5
        ),
        "plan": Case(
            epic.jax.plan,
            {"topk_idx": ids, "rank_of_expert": owners, "logical_of_expert": copies},
            ("topk_idx", "logical_of_expert"),
            group=group, layer=REPLICAS,
        ),
        "plan_dispatch": Case(
            epic.jax.plan_dispatch,
            {"topk_idx": ids, "tokens": x, "weights": w, "rank_of_expert": owners},
            ("topk_idx", "tokens"),
            ("tokens",),
            group=group, layer=LAYER,
        ),
        "dispatch": Case(
            epic.jax.dispatch, {"tokens": x, "weights": w}, ("tokens",), ("tokens",), plan=plan
        ),
        "dispatch rounded": Case(
            epic.jax.dispatch, {"tokens": x, "weights": w}, ("tokens",), ("tokens",),
            plan=plan, quantize="1x128",
        ),
        "dispatch_flat": Case(
            epic.jax.dispatch_flat, {"tokens": x, "weights": w}, ("tokens",), ("tokens",), plan=flat
        ),
        "dispatch_quantized": Case(
            epic.jax.dispatch_quantized, {"tokens": x, "weights": w}, ("tokens",), ("tokens",),
            plan=plan,
        ),
        "dispatch_quantized with scales": Case(
            epic.jax.dispatch_quantized,
            {"tokens": jnp.asarray(x, jnp.float8_e4m3fn), "weights": w, "scales": real(T, 1)},
            ("tokens",),
            ("tokens", "scales"),
            plan=plan,
        ),
        "dispatch_flat_quantized": Case(
            epic.jax.dispatch_flat_quantized, {"tokens": x, "weights": w}, ("tokens",),
            ("tokens",), plan=flat,
        ),
        "dispatch_flat_quantized with scales": Case(
            epic.jax.dispatch_flat_quantized,
            {"tokens": jnp.asarray(x, jnp.float8_e4m3fn), "weights": w, "scales": real(T, 1)},
            ("tokens",),
            ("tokens", "scales"),
            plan=flat,
        ),
        "merge_gate_up": Case(
            epic.jax.merge_gate_up, {"gate": x, "up": x}, ("gate", "up"), ("gate", "up")
        ),
        "split_gate_up": Case(
            epic.jax.split_gate_up, {"w_gate_up": x}, ("w_gate_up",), ("w_gate_up",)
        ),
        "dequantize": Case(
            epic.jax.dequantize,
            {"rows": jnp.ones((4, 130), jnp.float8_e4m3fn), "scales": real(4, 2)},
            ("rows", "scales"),
            ("rows",),
            dtype=jnp.float32,
        ),
        "combine": Case(
            epic.jax.combine, {"rows": real(SLOTS, H), "slot_weights": real(SLOTS)}, ("rows",),
            ("rows",), plan=plan,
        ),
        "sum": Case(epic.jax.sum, {"x": real(3)}, ("x",), ("x",), group=group),
        "sum_replicas": Case(
            epic.jax.sum_replicas, {"x": real(E, 5)}, ("x",), ("x",), plan=replicas
        ),
        "sum_replica_grads": Case(
            epic.jax.sum_replica_grads, {"weight": real(E, 5)}, (), ("weight",), plan=replicas
        ),
        "experts": Case(
            of_weights(epic.jax.experts, epic.jax.ExpertWeights),
            {"rows": real(SLOTS, H), "expert_rows": counts, "expert_tokens": counts,
             "slot_weights": real(SLOTS), **own},
            ("rows", "expert_rows", "expert_tokens", "slot_weights", "w_gate_up", "w_down"),
            options=early,
        ),
        "moe": Case(
            of_weights(epic.jax.moe, epic.jax.MoeWeights),
            {"x": x, **table, "token_mask": np.ones(T, bool), "rank_of_expert": owners, **WEIGHTS},
            ("x", "token_ids", "table", *NEEDED),
            group=group, options=MOE,
        ),
        "sharded.moe": Case(
            of_weights(sharded.moe, epic.jax.MoeWeights),
            {"x": real(8, H), "token_ids": np.zeros(8, np.int32), "table": whole(3, K),
             "token_mask": np.ones(8, bool), **WEIGHTS},
            ("x", "token_ids", "table", *NEEDED),
            mesh=mesh, group=meshed, options=MOE,
        ),
        "sharded.plan_dispatch": Case(
            sharded.plan_dispatch,
            {"topk_idx": whole(8, K), "tokens": real(8, H), "weights": real(8, K)},
            ("topk_idx", "tokens"),
            ("tokens",),
            mesh=mesh, group=meshed, options=LAYER,
        ),
        "sharded.combine": Case(
            sharded.combine, {"rows": slots, "slot_weights": real(slots.shape[0])},
            ("rows",), ("rows",),
            mesh=mesh, plan=everywhere,
        ),
    }  # fmt: skip


@pytest.fixture(scope="module")
def cases() -> Iterator[dict[str, Case]]:
    """Return all calls, over a group of one rank and a group of two."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("ep",))
    sizes: dict[str, Any] = {"max_tokens": 16, "max_row_bytes": 4 * 32, "timeout_ms": 20000}
    with (
        epic.jax.open(name="one", **sizes) as group,
        epic.jax.open(mesh, "ep", name="two", **sizes) as meshed,
    ):
        yield make_cases(group, mesh, meshed)


def wrong_values(case: Case, name: str) -> Iterator[Any]:
    """Yield values that are wrong in place of an array."""
    good = np.asarray(case.arrays[name])
    yield good.astype(np.complex64)
    yield good.astype(np.int16 if good.dtype == bool else bool)
    if good.dtype.kind == "i":
        yield good.astype(np.float32)
    elif good.dtype.kind != "b":
        yield good.astype(np.int32)
    if not (name == "x" and good.ndim == 1):  # epic.jax.sum takes any shape
        yield good.reshape(-1)[0]  # a numpy scalar
    if name not in case.free:
        yield np.concatenate([good, good[..., :1]], axis=-1)
        yield good[..., :-1]
    yield from ("text", {"a": 1}, object(), [None], np.array(["text"] * 3))
    if name in case.needed:
        yield None


NAMES = (
    "route,balance_loss,balance_loss by sequence,z_loss,bias_update,plan,plan_dispatch,dispatch,"
    "dispatch rounded,dispatch_flat,dispatch_quantized,dispatch_quantized with scales,"
    "dispatch_flat_quantized,dispatch_flat_quantized with scales,merge_gate_up,split_gate_up,"
    "dequantize,combine,sum,sum_replicas,sum_replica_grads,experts,moe,sharded.moe,"
    "sharded.plan_dispatch,sharded.combine"
).split(",")


def test_every_function_is_here(cases: dict[str, Case]) -> None:
    """Every public function has a case."""
    assert set(NAMES) == set(cases)
    found = {name for name in epic.jax.__all__ if inspect.isfunction(getattr(epic.jax, name))}
    assert found == {name.split(" ")[0] for name in NAMES if "." not in name} | NO_ARRAYS
    for name, case in cases.items():
        jax.block_until_ready(case.run())
        if "moe" not in name and name != "experts":
            given = inspect.signature(case.function).parameters
            assert set(case.arrays) <= set(given), name


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_array(name: str, cases: dict[str, Case]) -> None:
    """Another dtype, rank or size, a scalar, None, or no array is refused."""
    case = cases[name]
    for argument in case.arrays:
        for wrong in wrong_values(case, argument):
            shown = f"{argument}: {type(wrong).__name__} {getattr(wrong, 'dtype', '')}"
            with pytest.raises(epic.jax.EpicArgumentError) as caught:
                jax.block_until_ready(case.run(**{argument: wrong}))
                pytest.fail(f"{name} took {shown} {np.shape(wrong)}")
            assert argument in str(caught.value), (shown, caught.value)


OBJECTS = ("group", "layer", "router", "options", "plan", "mesh", "weights")


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_object(name: str, cases: dict[str, Case]) -> None:
    """A dict, a list, a text or None in place of options, weights, a plan or a group is refused."""
    case = cases[name]
    for argument in set(case.others) & set(OBJECTS):
        for wrong in ({"num_experts": 8}, [1, 2], "text", None, 3):
            with pytest.raises(epic.jax.EpicArgumentError) as caught:
                case.run(**{argument: wrong})
            assert argument in str(caught.value), (argument, caught.value)


@pytest.mark.parametrize("kind", ["moe", "sharded.moe", "experts"])
def test_weights_are_an_object_of_ours(kind: str, cases: dict[str, Case]) -> None:
    """A dict of arrays in place of MoeWeights is refused."""
    group, mesh = cases["moe"].others["group"], cases["sharded.moe"].others
    x, counts = real(T, H), np.zeros(E, np.int32)
    for wrong in (WEIGHTS, list(WEIGHTS.values()), None, "text"):
        with pytest.raises(epic.jax.EpicArgumentError, match="weights is a"):
            if kind == "moe":
                epic.jax.moe(group, MOE, x, wrong)  # type: ignore[arg-type]
            elif kind == "experts":
                epic.jax.experts(EXPERTS, x, counts, counts, wrong)  # type: ignore[arg-type]
            else:
                sharded.moe(mesh["mesh"], mesh["group"], MOE, real(8, H), wrong)  # type: ignore[arg-type]


NUMBERS: list[tuple[str, dict[str, Any], str]] = [
    ("plan", {"capacity": 0}, "capacity is 0"),
    (
        "plan",
        {"capacity": 1 << 38},
        "capacity is 274877906944: must be an integer from 1 to 2147483647",
    ),
    ("plan", {"capacity": True}, "capacity is True"),
    ("plan", {"capacity": 2.5}, "capacity is 2.5"),
    ("plan_dispatch", {"capacity": "8"}, "capacity is '8'"),
    ("plan_dispatch", {"capacity": 1 << 31}, "capacity is 2147483648"),
    ("sharded.plan_dispatch", {"capacity": 1 << 31}, "capacity is 2147483648"),
    ("plan", {"num_local_experts": 9}, "num_local_experts is 9: must be at most 8"),
    ("plan", {"channel": -1}, "channel is -1"),
    ("plan", {"channel": 1.5}, "channel is 1.5"),
    ("plan", {"channel": np.zeros(2, np.int32)}, r"channel is int32\[2\]"),
    ("plan", {"after": ["text"]}, "after contains a str"),
    ("balance_loss", {"coeff": "1"}, "coeff is '1'"),
    ("balance_loss", {"total_tokens": -1}, "total_tokens is -1"),
    ("balance_loss by sequence", {"sequence_tokens": 4}, "sequence_tokens is 4: must divide"),
    ("bias_update", {"rate": "1"}, "rate is '1'"),
    ("bias_update", {"rate": -1.0}, "rate is -1.0: must be at least 0"),
    ("dispatch", {"quantize": "1x64"}, "quantize is '1x64': must be one of 1x128, 1x32"),
    ("dispatch_quantized", {"block": "1x64"}, "block is '1x64': must be one of 1x128, 1x32"),
    ("dispatch_quantized with scales", {"block": "1x64"}, "block is '1x64'"),
    ("dequantize", {"block": "1x64"}, "block is '1x64': must be one of 1x128, 1x32"),
    ("dequantize", {"block": "1x32"}, "scales is float32"),
    (
        "dequantize",
        {"rows": jnp.ones((4, 64), jnp.float8_e4m3fn), "scales": np.full((4, 2), 127, np.uint8)},
        r"scales is uint8\[4, 2\]: must be float32\[4, 64 columns / 128 = 1\]",
    ),
    ("plan", {"capacity": np.zeros(3, np.int32)}, "capacity is array"),
    ("balance_loss", {"coeff": np.zeros(3)}, "coeff is array"),
    ("dequantize", {"dtype": "int8"}, "dtype is int8"),
    ("sum", {"tree": "yes"}, "tree is 'yes'"),
    ("moe", {"loss_axes": "dp"}, "loss_axes is 'dp'"),
    ("sharded.moe", {"token_axes": ("ep", "ep")}, "must not contain 'ep' twice"),
    ("sharded.moe", {"token_axes": ("pe",)}, "token_axes is 'pe': must be an axis of the mesh"),
    ("sharded.moe", {"fsdp_axes": ("pe",)}, "fsdp_axes is 'pe': must be an axis of the mesh"),
    ("sharded.moe", {"fsdp_axes": {"a": 1}}, "fsdp_axes is"),
    ("sharded.moe", {"tensor_axis": "pe"}, "tensor_axis is 'pe'"),
    (
        "sharded.moe",
        {"token_axes": jax.sharding.PartitionSpec(("ep", "ep"))},
        "must not contain 'ep' twice",
    ),
]


@pytest.mark.parametrize(("name", "wrong", "sentence"), NUMBERS, ids=str)
def test_a_wrong_number(
    name: str, wrong: dict[str, Any], sentence: str, cases: dict[str, Case]
) -> None:
    """Wrong numbers, words and axes are refused."""
    with pytest.raises(epic.jax.EpicArgumentError, match=sentence):
        cases[name].run(**wrong)


def test_what_the_guide_promises_while_tracing(opened: Any) -> None:
    """Errors that the guide promises while tracing do not wait for the running program."""
    mesh = make_mesh(4)
    group = opened(mesh, max_top_k=1)
    weights = epic.jax.MoeWeights(**{n: w for n, w in WEIGHTS.items() if "shared" not in n})
    plain = replace(MOE, shared=None)
    x = jax.ShapeDtypeStruct((8, H), np.float32)

    def trace(options: Any = plain, weights: Any = weights, **more: Any) -> None:
        jax.eval_shape(lambda x: sharded.moe(mesh, group, options, x, weights, **more), x)

    with pytest.raises(epic.jax.EpicArgumentError, match="top_k is 2: must be at most 1, the"):
        trace()
    with pytest.raises(epic.jax.EpicArgumentError, match="max_top_k is 65: must be an integer"):
        epic.jax.open(max_tokens=1, max_row_bytes=1, max_top_k=65)
    epic.jax.close(group)
    group = epic.jax.open(mesh, "ep", name="wide", max_tokens=16, max_row_bytes=64)
    try:
        trace()
        few = weights._replace(w_gate_up=WEIGHTS["w_gate_up"][:4], w_down=WEIGHTS["w_down"][:4])
        with pytest.raises(epic.jax.EpicArgumentError, match=r"w_gate_up is float32\[4, 16, 24\]"):
            trace(weights=few._replace(b_gate_up=None, b_down=None))
        with pytest.raises(epic.jax.EpicArgumentError, match="table is None"):
            trace(token_ids=np.zeros(8, np.int32))
        with pytest.raises(epic.jax.EpicArgumentError, match="w_gate_up is a list: must be an arr"):
            trace(weights=weights._replace(w_gate_up=weights.w_gate_up.tolist()))
        with pytest.raises(epic.jax.EpicArgumentError, match="forced is a tuple of 1: must be ids"):
            trace(forced=(np.zeros((8, 2), np.int32),))
        uneven = replace(plain, balance_coeff=0.5, sequence_tokens=3)
        with pytest.raises(epic.jax.EpicArgumentError, match="sequence_tokens is 3: must divide"):
            trace(uneven)
        owners = np.array([0, 0, 0, 1, 1, 2, 2, 3], np.int32)
        with pytest.raises(epic.jax.EpicArgumentError, match="w_gate_up has 2 experts: must have"):
            trace(rank_of_expert=owners)
    finally:
        epic.jax.close(group)


def test_integers_that_int32_cannot_represent(opened: Any) -> None:
    """Check that 2^32 + 1 is refused, and does not become id 1."""
    group, wide = opened(None), (1 << 32) + 1
    z, owners = jnp.zeros((1, E)), np.zeros(E, np.int64)
    ids, table = np.array([[wide, 3]]), np.array([[0, 1], [2, 3]])
    owners[3] = wide
    for call, text in (
        (lambda: epic.jax.plan(group, LAYER, ids).load, "token 0, k 0 has expert"),
        (lambda: epic.jax.route(ROUTER, z, forced=ids), "forced ids of token 0, k 0"),
        (lambda: epic.jax.route(ROUTER, z, token_ids=np.array([wide]), table=table), "token 0"),
        (lambda: epic.jax.plan(group, LAYER, whole(1, K), rank_of_expert=owners).load, "rank_of_"),
    ):
        with pytest.raises((epic.jax.EpicArgumentError, jax.errors.JaxRuntimeError), match=text):
            jax.block_until_ready(call())


def test_what_is_traced_is_no_number(opened: Any) -> None:
    """Traced sizes are refused."""
    group = opened(None)

    def run(capacity: Any) -> Any:
        return epic.jax.plan(group, LAYER, whole(T, K), capacity=capacity).load

    with pytest.raises(epic.jax.EpicArgumentError, match=r"capacity .*an integer from 1"):
        jax.jit(run)(8)


def test_blocks_and_groups(opened: Any) -> None:
    """Wrong arguments of the Flax modules and of epic.jax.open are refused."""
    pytest.importorskip("flax")
    from flax import nnx

    import epic.jax.linen
    import epic.jax.nnx

    mesh = make_mesh(4)
    group = opened(mesh)
    good = {"mesh": mesh, "group": group, "options": replace(MOE, shared=None)}
    x = real(8, H)
    for name in good:
        for wrong in ({"a": 1}, [1], "text", None):
            given: Any = {**good, name: wrong}
            with pytest.raises(epic.jax.EpicArgumentError, match=f"{name} is a "):
                epic.jax.linen.MoEBlock(**given).init(jax.random.key(0), x)
            with pytest.raises(epic.jax.EpicArgumentError, match=f"{name} is a "):
                epic.jax.nnx.MoEBlock(**given, rngs=nnx.Rngs(0))
    wrong_open: list[tuple[dict[str, Any], str]] = [
        ({"mesh": {"ep": 4}}, "mesh is a dict: must be a Mesh"),
        ({"mesh": mesh, "axis": ("ep", "ep")}, "must not contain 'ep' twice"),
        ({"mesh": mesh, "axis": 3}, "axis is 3"),
        ({"mesh": mesh, "like": [1, 2]}, "like is a list"),
        ({"mesh": mesh, "name": "a\0b"}, "must not contain a NUL"),
        ({"mesh": mesh, "name": None}, "name is None: must be a str"),
    ]
    for wrong, sentence in wrong_open:
        with pytest.raises(epic.jax.EpicArgumentError, match=sentence):
            given = {"max_tokens": 8, "max_row_bytes": 64, **wrong}
            epic.jax.open(**given)
    for function in (epic.jax.close, epic.jax.check):
        with pytest.raises(epic.jax.EpicArgumentError, match="group is a dict"):
            function({"name": "epic"})  # type: ignore[arg-type]
    with pytest.raises(epic.jax.EpicArgumentError, match="plan is a list"):
        epic.jax.read_plan([1])  # type: ignore[arg-type]
    with pytest.raises(epic.jax.EpicArgumentError, match="shared is a dict"):
        replace(MOE, shared={"inner": 4})  # type: ignore[arg-type]
