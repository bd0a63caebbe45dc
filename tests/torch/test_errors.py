# SPDX-License-Identifier: Apache-2.0
"""Checks that every rank gets each error within the time limit, with the text of the core."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epic.torch
from epic.torch import EpicArgumentError, EpicError
from epic.words import to_python
from parts import EXPERTS, HIDDEN, LAYER, SIZES, TOKENS, TOP_K, Data, check_round, group_of, through
from world import World

SLACK = int(os.environ.get("EPIC_TEST_SLACK_MS", "0")) / 1000
NOTICED = 1 + SLACK  # the limit of the fault tests, in seconds
NCCL: dict[str, Any] = {"bootstrap": epic.torch.Nccl(1 << 40), "device": "cpu"}


def expect_error(call: Callable[[], Any], code: str, *words: str) -> str:
    """Return the text of the EpicError that the call raises."""
    try:
        call()
    except EpicError as error:
        assert error.code == code, error
        assert all(word in str(error) for word in words), error
        return str(error)
    raise AssertionError(f"no {code}")


def alone(**more: Any) -> epic.torch.Group:
    """Open a group of one rank."""
    return epic.torch.Group(**{**SIZES, "num_ranks": 1, **more})


IDS = torch.zeros((4, TOP_K), dtype=torch.int32)
X = torch.ones((4, HIDDEN))
NUMBER: Any = 2.5
TEXT: Any = "3"
ARGUMENTS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "float ids": (
        lambda g, p: epic.torch.plan(g, LAYER, IDS.float()),
        "topk_idx is float32: must be int",
    ),
    "top_k": (lambda g, p: epic.torch.plan(g, LAYER, IDS[:, :2]), "topk_idx has the shape [4, 2]"),
    "max_tokens": (
        lambda g, p: epic.torch.plan(g, LAYER, IDS.repeat(20, 1)),
        "num_tokens is 80",
    ),
    "capacity": (lambda g, p: epic.torch.plan(g, LAYER, IDS, capacity=-1), "capacity is -1"),
    "no capacity": (
        lambda g, p: epic.torch.plan(g, LAYER, IDS, capacity=NUMBER),
        "capacity is 2.5",
    ),
    "capacity as text": (
        lambda g, p: epic.torch.plan_dispatch(g, LAYER, IDS, torch.ones(4, 3), capacity=TEXT),
        "capacity is '3'",
    ),
    "tokens": (
        lambda g, p: epic.torch.dispatch(p, X[:3]),
        "tokens has the shape [3, 20]: must have 4 rows",
    ),
    "row bytes": (
        lambda g, p: epic.torch.dispatch(p, torch.ones(4, 5000)),
        "rows of tokens have 20000 bytes: must be 1 to max_row_bytes 4096",
    ),
    "integers": (
        lambda g, p: epic.torch.dispatch(p, X.int()),
        "tokens is int32: must be float32, b",
    ),
    "weights": (lambda g, p: epic.torch.dispatch(p, X, X), "weights has the shape [4, 20]"),
    "rows": (lambda g, p: epic.torch.combine(p, X), "rows has the shape [4, 20]"),
    "slot_weights": (
        lambda g, p: epic.torch.combine(p, torch.ones(p.capacity, 2), torch.ones(3)),
        "slot_weights has the shape [3]",
    ),
    "out": (
        lambda g, p: epic.torch.combine(p, torch.ones(p.capacity, 2), out=torch.ones(4, 3)),
        "out out has the shape [4, 3]: must be [4, 2]",
    ),
    "bytes": (
        lambda g, p: epic.torch.dispatch(p._replace(bytes=p.bytes.float()), X),
        "plan is float32: must be uint8",
    ),
    "damaged plan": (
        lambda g, p: epic.torch.dispatch(p._replace(bytes=torch.zeros_like(p.bytes)), X),
        "plan",
    ),
    "quantize": (lambda g, p: epic.torch.dispatch(p, X, quantize="1x64"), "1x128, 1x32"),
    "table": (
        lambda g, p: epic.torch.plan(
            g, LAYER, IDS, rank_of_expert=[0], num_local_experts=8, capacity=9
        ),
        "rank_of_expert has the shape [1]",
    ),
    "expert id": (lambda g, p: epic.torch.plan(g, LAYER, IDS + 8), "expert"),
    "sum": (lambda g, p: epic.torch.sum(g, X.half()), "must be float32 or float64"),
}


@pytest.mark.parametrize("what", ARGUMENTS)
def test_arguments(what: str) -> None:
    """Check that the error has argument, value and rule, and that the group stays usable."""
    call, text = ARGUMENTS[what]
    with alone() as group:
        plan = epic.torch.plan(group, LAYER, IDS)
        with pytest.raises(EpicArgumentError) as caught:
            call(group, plan)
        assert text in str(caught.value), caught.value
        assert isinstance(caught.value, ValueError)
        recv, _ = epic.torch.dispatch(plan, X)
        assert epic.torch.combine(plan, recv).shape == X.shape


WRONG: Any = {
    "array": X.numpy(), "list": [[0.5]], "text": "x", "sparse": X.to_sparse(), "object": object(),
}  # fmt: skip
OPTIONS = epic.torch.Moe.of(num_experts=8, top_k=TOP_K, hidden=HIDDEN, inner=4)
WEIGHTS = epic.torch.MoeWeights(
    torch.ones(HIDDEN, 8), torch.ones(8, HIDDEN, 8), torch.ones(8, 4, HIDDEN)
)
COUNTS = torch.zeros(8, dtype=torch.int32)
# For each argument a function (group, plan, value) that passes a value of a wrong class.
CLASSES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "group": lambda g, p, v: epic.torch.plan(v, LAYER, IDS),
    "layer": lambda g, p, v: epic.torch.plan(g, v, IDS),
    "topk_idx": lambda g, p, v: epic.torch.plan(g, LAYER, v),
    "num_local_experts": lambda g, p, v: epic.torch.plan(g, LAYER, IDS, num_local_experts=v),
    "tag": lambda g, p, v: epic.torch.plan(g, LAYER, IDS, tag=v),
    "plan": lambda g, p, v: epic.torch.dispatch(v, X),
    "tokens": lambda g, p, v: epic.torch.dispatch(p, v),
    "weights": lambda g, p, v: epic.torch.dispatch(p, X, v),
    "topk_idx ": lambda g, p, v: epic.torch.plan_dispatch(g, LAYER, v, X),
    "tokens ": lambda g, p, v: epic.torch.plan_dispatch(g, LAYER, IDS, v),
    "weights ": lambda g, p, v: epic.torch.plan_dispatch(g, LAYER, IDS, X, v),
    "rows": lambda g, p, v: epic.torch.combine(p, v),
    "slot_weights": lambda g, p, v: epic.torch.combine(p, torch.ones(p.capacity, 2), v),
    "out": lambda g, p, v: epic.torch.combine(p, torch.ones(p.capacity, 2), out=v),
    "x": lambda g, p, v: epic.torch.sum(g, v),
    "out ": lambda g, p, v: epic.torch.sum(g, X, out=v),
    "router": lambda g, p, v: epic.torch.route(v, torch.ones(4, 8)),
    "total_tokens": lambda g, p, v: epic.torch.z_loss(
        OPTIONS.router, torch.ones(4, 8), coeff=1.0, total_tokens=v
    ),
    "load": lambda g, p, v: epic.torch.bias_update(torch.ones(8), v, 0.1),
    "expert_rows": lambda g, p, v: epic.torch.experts(
        OPTIONS.experts, X, v, COUNTS, epic.torch.ExpertWeights(*WEIGHTS[1:3])
    ),
    "weights  ": lambda g, p, v: epic.torch.moe(g, OPTIONS, X, [v]),  # type: ignore[arg-type]
    "out.out": lambda g, p, v: epic.torch.moe(
        g, OPTIONS, X, WEIGHTS, out=epic.torch.MoeOut(v, *[None] * 3)
    ),
    "grouped_mm": lambda g, p, v: epic.torch.moe(g, OPTIONS, X, WEIGHTS, grouped_mm=v),
    "plan ": lambda g, p, v: epic.torch.read_plan(v),
    "weights   ": lambda g, p, v: epic.torch.scaled(v),
    "weights    ": lambda g, p, v: epic.torch.unscaled(v, torch.float32),
    "scales": lambda g, p, v: epic.torch.swizzle_scales(v),
    "group ": lambda g, p, v: epic.torch.window(3, torch.float32, v),
}


@pytest.mark.parametrize("name", CLASSES)
def test_classes(name: str) -> None:
    """Check that the error for an argument of a wrong class names the argument and the rule."""
    with alone() as group:
        plan = epic.torch.plan(group, LAYER, IDS)
        for value in WRONG.values():
            with pytest.raises(EpicArgumentError, match=f"^{name.strip()} .*: must ") as caught:
                CLASSES[name](group, plan, value)
            assert "epic::" not in str(caught.value)
        recv, _ = epic.torch.dispatch(plan, X)
        assert epic.torch.combine(plan, recv).shape == X.shape


def test_error_of_grouped_mm() -> None:
    """Check that an error of the caller's function is raised unchanged."""

    def fail(*_: Any) -> Any:
        raise TypeError("of the caller")

    with alone() as group, pytest.raises(TypeError, match="of the caller"):
        epic.torch.moe(group, OPTIONS, X, tuple(WEIGHTS), grouped_mm=fail)  # type: ignore[arg-type]


def test_large_tag() -> None:
    """Check the error for an integer that has more than 64 bits."""
    with alone() as group, pytest.raises(EpicArgumentError, match=r"tag .* integer of 64 bits"):
        epic.torch.sum(group, X, tag=1 << 64)


def test_overflow() -> None:
    """Check that an overflow raises EPIC_EOVERFLOW and the group stays usable."""
    with alone() as group:
        expect_error(lambda: epic.torch.plan(group, LAYER, IDS, capacity=3), "EPIC_EOVERFLOW", "3")
        epic.torch.plan(group, LAYER, IDS)


def test_closed() -> None:
    """Check calls with a closed group, and with a plan of a closed group."""
    with alone(name="gone") as group:
        plan = epic.torch.plan(group, LAYER, IDS)
    group.close()
    assert not group.is_open and "closed" in repr(group)
    expect_error(lambda: epic.torch.dispatch(plan, X), "EPIC_ECLOSED")
    expect_error(group.check, "EPIC_ECLOSED", "gone")


def test_closed_in_router() -> None:
    """Check the functions of the router with a closed group on GPUs."""
    with alone(name="gone") as group:
        pass
    group.on_gpu = True  # the router uses groups only on GPUs
    router, logits = epic.torch.Router(num_experts=8, top_k=TOP_K), torch.zeros(4, 8)
    losses: dict[str, Any] = {"coeff": 1.0, "total_tokens": 4, "group": group}
    for call in (
        lambda: epic.torch.route(router, logits, group=group),
        lambda: epic.torch.z_loss(router, logits, **losses),
    ):
        expect_error(call, "EPIC_ECLOSED", "the group was closed")
        with pytest.raises(RuntimeError, match="EPIC_ECLOSED"):
            torch.compile(call, backend="eager", fullgraph=True)()


def test_options() -> None:
    """Check the errors for wrong options of Group."""
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"device": "meta"}, "'meta'"),
        ({"backend": "p2p"}, "p2p"),
        ({"num_ranks": 2}, "bootstrap="),
        (
            {"num_ranks": 2, "bootstrap": "tcp"},
            "bootstrap is 'tcp': must be a Tcp(address, port, secret)",
        ),
        ({"num_ranks": None, "bootstrap": 3}, "bootstrap is 3: must be a Tcp"),
        (
            {"num_ranks": 1, "bootstrap": lambda r, b: 3},
            "the bootstrap returned 3: must be a list",
        ),
        ({"num_ranks": 0, "bootstrap": lambda r, b: [b]}, "num_ranks is 0: must be an integer"),
        ({"num_ranks": None, "rank": 1}, "rank is 1 without bootstrap="),
        (
            {"rank": 1, "bootstrap": epic.torch.threads(2)[0]},
            "must be rank 0 of 2, as in bootstrap",
        ),
        ({"rank": 1, **NCCL}, "rank is 1 and num_ranks is 1 with bootstrap=Nccl(...)"),
        ({"num_ranks": 2, **NCCL}, "num_ranks is 2 with bootstrap=Nccl(...)"),
        ({"name": None}, "name is None: must be a str"),
        ({"name": "a\0b"}, "name is 'a\\x00b': must not contain a NUL"),
        ({"name": "a\udc80"}, "must be text that UTF-8 can encode"),
        ({"backend": "self\0"}, "must not contain a NUL"),
        ({"backend": 3}, "backend is 3: must be a str"),
        ({"staging_bytes": 1.5}, "staging_bytes is 1.5: must be an integer"),
        ({"num_ranks": None, "bootstrap": lambda r, b: [b]}, "num_ranks="),
        ({"dim": "ep"}, "DeviceMesh"),
    ]
    for options, text in wrong:
        with pytest.raises(EpicArgumentError) as caught:
            alone(**options)
        assert text in str(caught.value), caught.value


def test_nccl() -> None:
    """Check the errors of Nccl, and of a group over it in a process that has no NCCL."""
    for wrong in (None, 0, 7, -5, 2.0, "comm", True, ctypes.c_void_p(None)):
        with pytest.raises(EpicArgumentError, match=r"comm is .*: must be an initialized ncclComm"):
            epic.torch.Nccl(wrong)
    assert epic.torch.Nccl(ctypes.c_void_p(1 << 40)) == epic.torch.Nccl(1 << 40)
    program = (
        "import epic.torch\n"
        "wish = {'max_tokens': 8, 'max_row_bytes': 64, 'device': 'cpu'}\n"
        "try:\n"
        "    epic.torch.Group(bootstrap=epic.torch.Nccl(1 << 40), **wish)\n"
        "except epic.EpicError as error:\n"
        "    print(error.code)\n"
        "with epic.torch.Group(num_ranks=1, **wish) as group:\n"
        "    print(group.num_ranks)\n"
    )
    # If there are kernels, the path of a library that is not NCCL leads to the same error.
    environment = os.environ | {"EPIC_NCCL": "libm.so.6"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["EPIC_ENOTSUP", "1"], done.stdout + done.stderr


def test_tcp_with_nul() -> None:
    """Check that a secret with a NUL is refused, because C would use only the part before it."""
    for field, wrong in (("address", "localhost\0"), ("secret", "hush\0hush")):
        options: dict[str, Any] = {field: wrong}
        with pytest.raises(EpicArgumentError, match=f"{field} .*must not contain a NUL"):
            epic.torch.Tcp(**options)


# ---------------------------------------------------------------- the words of Python ----

SOURCES = Path(__file__).parents[2] / "src"
# Names that errors may contain: environment variables, and C flags that the Python packages set.
KEPT = {
    "EPIC_SECRET", "EPIC_TIMEOUT_MS", "EPIC_TRACE", "EPIC_NET_MEMORY", "EPIC_BACKEND", "EPIC_HEAP",
    "EPIC_EARLY_START",
    "EPIC_CHECK_WEIGHTS", "EPIC_ACCUMULATE", "EPIC_DISPATCH_AGAIN", "EPIC_PLANNED",
    "EPIC_RECOMPUTE", "EPIC_SUM_DENSE", "EPIC_LOSS_BY_CALLER", "EPIC_FORCED_WEIGHTS",
    "EPIC_INVARIANT", "EPIC_NCCL", "EPIC_MANY", "EPIC_GPU_REGROUP",
}  # fmt: skip
OF_TYPES = r"\b(?:B?F16|F32|F64|E4M3)\b"


def test_no_names_of_c() -> None:
    """Check that no error of the core contains names of C: enumerators, types, functions,
    fields."""
    wrong = []
    for file in SOURCES.rglob("*.c"):
        for literal in re.findall(r'"((?:[^"\\\n]|\\.)* (?:[^"\\\n]|\\.)*)"', file.read_text()):
            said = to_python(literal)
            names = set(
                re.findall(r"\b(?:NULL|B?F16|F32|F64|E4M3)\b|EPIC_\w+|epic_\w+|config\.\w+", said)
            )
            wrong += [f"{file.name}: {said}"] if names - KEPT else []
    assert not wrong, "\n".join(wrong)


def test_values_as_python_has_them() -> None:
    """Check that errors of real calls contain the Python arguments and their values."""
    with pytest.raises(
        EpicArgumentError, match="expert_capacity is 4: must be 0 unless overflow is 'drop'"
    ):
        epic.torch.Layer(8, 2, expert_capacity=4)
    with alone() as group, pytest.raises(EpicError, match="capacity"):
        epic.torch.plan(group, LAYER, IDS, capacity=3)
    table = torch.zeros(3, TOP_K, dtype=torch.int32)
    with alone() as group, pytest.raises(EpicArgumentError, match="token_ids is None and table is"):
        epic.torch.moe(group, OPTIONS, X, WEIGHTS, table=table)
    bootstraps = epic.torch.threads(2)

    def run(rank: int) -> str:
        with epic.torch.Group(bootstrap=bootstraps[rank], **SIZES) as group:
            layer = replace(LAYER, distinct=rank == 1)
            return expect_error(lambda: epic.torch.plan(group, layer, IDS - 1), "EPIC_EMISMATCH")

    with ThreadPoolExecutor(2) as pool:
        for said in pool.map(run, range(2)):
            assert re.search(r"distinct=(True|False), rank \d passed distinct=(True|False)", said)


# -------------------------------------------------------------------- among processes ----


def planned(group: epic.torch.Group, ids: torch.Tensor) -> epic.torch.Plan:
    """Make a plan on every rank, then let one rank break the group while others are in a call."""
    plan = epic.torch.plan(group, LAYER, ids)
    dist.barrier()
    return plan


def different_tokens(rank: int) -> None:
    """Let one rank pass rows of another width, which is EPIC_EMISMATCH on all ranks."""
    with group_of(4) as group:
        _, _, ids, _ = Data().mine(rank)
        plan = planned(group, ids)
        x = torch.ones(TOKENS, HIDDEN + (rank == 2))
        expect_error(lambda: epic.torch.dispatch(plan, x), "EPIC_EMISMATCH", "rank")
        expect_error(lambda: epic.torch.dispatch(plan, x), "EPIC_EMISMATCH")
        expect_error(group.check, "EPIC_EMISMATCH")


def different_dtype(rank: int) -> None:
    """Let one rank pass rows of another dtype with the same number of bytes."""
    with group_of(4) as group:
        x, _, ids, _ = Data(dtype=torch.bfloat16 if rank else torch.float16).mine(rank)
        plan = planned(group, ids)
        rows = torch.ones(plan.capacity, HIDDEN, dtype=x.dtype)
        expect_error(lambda: epic.torch.combine(plan, rows), "EPIC_EMISMATCH")


def different_plans(rank: int) -> None:
    """Let one rank pass an older plan."""
    with group_of(4) as group:
        x, _, ids, _ = Data().mine(rank)
        old, new = planned(group, ids), planned(group, ids)
        expect_error(
            lambda: epic.torch.dispatch(old if rank == 1 else new, x), "EPIC_EMISMATCH", "plan"
        )


def different_calls(rank: int) -> None:
    """Let one rank call sum while the others plan."""
    with group_of(4) as group:
        ids = Data().mine(rank)[2]
        if rank == 3:
            expect_error(lambda: epic.torch.sum(group, torch.ones(3)), "EPIC_EMISMATCH")
        else:
            expect_error(lambda: epic.torch.plan(group, LAYER, ids), "EPIC_EMISMATCH")


def wrong_expert(rank: int) -> None:
    """Let one rank pass an invalid expert id; all ranks get the same error and continue."""
    with group_of(4) as group:
        mine = Data().mine(rank)
        wrong = mine[2].clone()
        if rank == 2:
            wrong[1, 2] = EXPERTS + 5
        expect_error(lambda: epic.torch.plan(group, LAYER, wrong), "EPIC_EINVAL", "rank 2", "13")
        check_round(through(group, True), mine, 2e-6)


def in_backward(rank: int) -> None:
    """Let a rank leave between forward and backward; backward raises its sentence on the others."""
    with group_of(4) as group:
        x, w, ids, ct = Data().mine(rank)
        out = through(group, True)(x, w, ids)
        dist.barrier()
        if rank == 3:
            group.abort("no more data")
        else:
            expect_error(lambda: out.backward(ct), "EPIC_EPEER", "no more data")


def leaves_with(rank: int) -> None:
    """Let an exception leave the with block of a group; the other ranks get its text."""
    try:
        with group_of(4) as group:
            if rank == 3:
                raise ValueError("the loader is empty")
            expect_error(
                lambda: epic.torch.sum(group, torch.ones(3)), "EPIC_EPEER", "the loader is empty"
            )
    except ValueError:
        assert rank == 3


AMONG = [
    different_tokens, different_dtype, different_plans, different_calls, wrong_expert, in_backward,
    leaves_with,
]  # fmt: skip


@pytest.mark.parametrize("what", AMONG)
def test_among_processes(world: Any, what: Callable[[int], None]) -> None:
    """Check that all ranks get the error at once, and that a new group opens afterwards."""
    begin = time.monotonic()
    world.run(what)
    assert time.monotonic() - begin < 30 + 10 * SLACK  # far less than the deadline of one minute


def killed(rank: int, sizes: dict[str, Any]) -> tuple[float, str]:
    """Kill rank 3 in the middle of a layer's backward."""
    with epic.torch.Group(**sizes) as group:
        x, w, ids, ct = Data().mine(rank)
        out = through(group, True)(x, w, ids)
        dist.barrier()
        if rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        sentence = expect_error(lambda: out.backward(ct), "EPIC_EPEER", "rank 3")
        return time.monotonic() - begin, sentence


def test_a_killed_rank() -> None:
    """Check that all other ranks raise an error that names the killed rank, within a second."""
    with World(4) as four:
        four.start(killed, SIZES)
        answers = [four.answer(rank) for rank in range(4)]
    assert answers[3] == (False, "rank 3 is gone")
    for good, said in answers[:3]:
        assert good, said
        assert said[0] < NOTICED + 1, said


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_nothing_is_kept() -> None:
    """Check that neither successful nor failing calls leak their arguments or results."""
    rows = torch.ones(64, 1000)
    ids = torch.zeros((64, TOP_K), dtype=torch.int32)
    ops = torch.ops.epic
    with alone() as group:
        plan = epic.torch.plan(group, LAYER, ids)
        weights = torch.ones(64, TOP_K)
        damaged = torch.zeros_like(plan.bytes)

        def run(count: int) -> None:
            for _ in range(count):
                recv, slot = epic.torch.dispatch(plan, rows.clone(), weights.clone())
                epic.torch.combine(plan, recv, slot)
                into = (torch.empty_like(recv), torch.empty_like(slot))
                epic.torch.dispatch(plan, rows, weights, out=into)
                place = (plan.capacity, plan.spec.layer, 0, 1)
                ops.dispatch_out.default(
                    group.order_token, plan.bytes, rows, None, *place, None, None
                )
                with pytest.raises(EpicArgumentError, match="out recv has the shape"):
                    epic.torch.dispatch(plan, rows, weights, out=(into[0][1:].clone(), into[1]))
                out = (plan._replace(bytes=torch.empty_like(plan.bytes)), *into)
                with pytest.raises(EpicArgumentError, match="topk_idx is float32"):
                    epic.torch.plan_dispatch(group, LAYER, ids.float(), rows, weights, out=out)
                more = (plan.spec.layer, plan.capacity, 0, None, None, None, into[0].view(-1))
                with pytest.raises(RuntimeError, match="topk_idx has 1 columns"):
                    ops.plan_out.default(group.order_token, ids[:, :1], *more)
                for data in (damaged, weights):
                    args = (data, rows.clone(), weights.clone(), plan.capacity, plan.spec.layer)
                    with pytest.raises(RuntimeError, match="EPIC_EINVAL"):
                        ops.dispatch.default(group.order_token, *args)

        run(20)
        before = resident()
        run(200)  # each call has at least 256 kB of tensors
        assert resident() - before < 20e6
