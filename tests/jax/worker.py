# SPDX-License-Identifier: Apache-2.0
"""One process of test_processes.py: worker.py WHAT PROCESS PROCESSES PORT."""

import os
import signal
import sys
import time
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import epic.jax
import layers
import reference
import steps

SIZES: dict[str, Any] = {"max_tokens": 64, "max_row_bytes": 4096, "timeout_ms": 60000}
QUICK = bool(os.environ.get("EPIC_JAX_QUICK"))  # each process compiles every program itself
CASES = [case for i, case in enumerate(layers.CASES.values()) if i % 3 == 0 or not QUICK]
SIDE_BY_SIDE = 6 if QUICK else 16


def say(*words: object) -> None:
    """Print a line for the test immediately."""
    print(*words, flush=True)


def initialize(process: int, processes: int, port: int) -> None:
    """Initialize jax.distributed on this host."""
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)


def place(mesh: Mesh, value: np.ndarray, spec: P) -> Any:
    """Return a global array from an array that every process has."""
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def whole(x: Any) -> np.ndarray:
    """Return all elements of a global array."""
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def check_steps(group: Any, mesh: Mesh) -> None:
    """Compare the round trip with float64, with gradients."""
    rows, top_k = 4 * steps.TOKENS, steps.TOP_K
    ids = np.asarray(steps.choices(3))
    x, w, ct = (
        np.asarray(steps.numbers(i, rows, columns))
        for i, columns in ((1, steps.HIDDEN), (2, top_k), (4, steps.HIDDEN))
    )
    args = [place(mesh, a, steps.ALL) for a in (x, w, ids, ct)]
    for fused in (False, True):
        step = steps.mapped(mesh, steps.through(group, fused), 3)

        def run(x: Any, w: Any, ids: Any, ct: Any, step: Any = step) -> Any:
            out, pull = jax.vjp(lambda x, w: step(x, w, ids), x, w)
            return out, *pull(ct)

        got = jax.tree.map(whole, jax.jit(run)(*args))
        for a, b in zip(got, steps.true_round(x, w, ids, ct), strict=True):
            assert reference.relative(a, b) < 2e-6


def run_layers(process: int, processes: int, port: int) -> None:
    """Run the round trip and cases of layers.py on every mesh."""
    initialize(process, processes, port)
    for ep in (1, 2, 4):
        mesh = Mesh(np.array(jax.devices()[:4]).reshape(4 // ep, ep), ("dp", "ep"))
        with epic.jax.open(mesh, "ep", **SIZES) as group:
            check_steps(group, mesh)
            for case in CASES:
                x, ct = (place(mesh, v, P(("dp", "ep"))) for v in layers.arrays())
                w = {n: place(mesh, v, P()) for n, v in layers.weights(case).items()}
                got = jax.tree.map(whole, layers.step(mesh, group, case)(x, w, ct))
                layers.compare(got, layers.true_step(case, 4 // ep))
    say("right")


def run_invariance(process: int, processes: int, port: int) -> None:
    """Layers over the devices of all processes, and over those of one, have equal bits."""
    initialize(process, processes, port)
    options = epic.jax.Moe.of(num_experts=8, top_k=2, hidden=8, inner=16, invariant=True)
    shapes = {"w_gate": (8, 8), "w_gate_up": (8, 8, 32), "w_down": (8, 16, 8)}
    values = {n: np.asarray(steps.numbers(i, *s)) for i, (n, s) in enumerate(shapes.items())}
    prints = set()
    for name, devices in (("all", jax.devices()), (f"of {process}", jax.local_devices())):
        mesh = Mesh(np.array(devices), ("ep",))
        weights = epic.jax.MoeWeights(**{n: place(mesh, v, P()) for n, v in values.items()})
        with epic.jax.open(mesh, "ep", name=name, **SIZES) as group:
            report = epic.jax.check_invariance(mesh, group, options, weights)
        assert report.is_invariant, report
        prints.add(report.fingerprint)
    assert len(prints) == 1, prints
    say("right")


def run_independent(process: int, processes: int, port: int) -> None:
    """Run independent layers, forward and backward, many times."""
    initialize(process, processes, port)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "ep"))
    case = layers.CASES["softmax"]
    with epic.jax.open(mesh, "ep", **SIZES) as group:
        one = layers.step(mesh, group, case).__wrapped__
        run = jax.jit(lambda x, w, ct: [one(x * (1 + i), w, ct) for i in range(SIDE_BY_SIDE)])
        x, ct = (place(mesh, v, P(("dp", "ep"))) for v in layers.arrays())
        w = {n: place(mesh, v, P()) for n, v in layers.weights(case).items()}
        first = jax.tree.map(whole, run(x, w, ct))
        layers.compare(first[0], layers.true_step(case, 2))
        for _ in range(20):
            again = jax.tree.map(lambda a: np.asarray(a.addressable_data(0)), run(x, w, ct))
        last = jax.tree.map(whole, run(x, w, ct))
    assert all(
        np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (first, last)), strict=True)
    )
    assert len(again) == SIDE_BY_SIDE
    say("right")


def sums(group: Any, mesh: Mesh) -> Any:
    """Return a jitted sum of four rows."""
    inner = jax.shard_map(
        lambda v: epic.jax.sum(group, v), mesh=mesh, in_specs=P("ep"), out_specs=P("ep")
    )
    return jax.jit(inner)


def kill() -> None:
    """End the process without a cleanup."""
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    """Raise an exception, like a loader without data."""
    raise RuntimeError("no more data")


def leave() -> None:
    """End the process early without an error in Python."""
    sys.exit(3)


def step_until_gone(run: Any, process: int, end: Any) -> None:
    """Run steps until the last process ends; print the errors of the others and their times."""

    def steps(count: int) -> None:
        for i in range(count):
            say("step", i, np.asarray(run().addressable_shards[0].data).ravel()[0])

    if process == 3:
        steps(5)
        say("gone", time.time())
        end()
    try:
        steps(5)  # a slow process may get the error in the middle of the last step
        jax.block_until_ready(run())
        say("no error")
    except Exception as error:
        say("error", time.time(), str(error).splitlines()[0])
    finally:
        sys.stdout.flush()
        os._exit(0)  # jax.distributed would wait for the process that is gone


def run_gone(process: int, processes: int, port: int, end: Any = kill) -> None:
    """Run step_until_gone() with jax.distributed."""
    initialize(process, processes, port)
    mesh = Mesh(np.array(jax.devices()), ("ep",))
    group = epic.jax.open(mesh, "ep", **SIZES)
    x = place(mesh, np.ones((4, 3), np.float32), P("ep"))
    run = sums(group, mesh)
    step_until_gone(lambda: run(x), process, end)


def run_gone_tcp(process: int, processes: int, port: int, end: Any = kill) -> None:
    """Run step_until_gone() without jax.distributed; the ranks bootstrap over TCP."""
    group = epic.jax.open(
        ranks=[process], num_ranks=processes, bootstrap=epic.jax.Tcp(port=port), **SIZES
    )
    run = jax.jit(lambda x: epic.jax.sum(group, x))
    step_until_gone(lambda: run(jnp.ones(3, jnp.float32)), process, end)


run_kill, run_kill_tcp = run_gone, run_gone_tcp
run_raise, run_exit = partial(run_gone, end=fail), partial(run_gone, end=leave)


def run_with(process: int, processes: int, port: int) -> None:
    """Raise an exception inside a group's with statement."""

    def end() -> None:
        with group:
            fail()

    group = epic.jax.open(
        ranks=[process], num_ranks=processes, bootstrap=epic.jax.Tcp(port=port), **SIZES
    )
    run = jax.jit(lambda x: epic.jax.sum(group, x))
    step_until_gone(lambda: run(jnp.ones(3, jnp.float32)), process, end)


def run_shrink(process: int, processes: int, port: int) -> None:
    """Process 3 is killed and process 1 leaves; the others place the experts on themselves."""
    group = epic.jax.open(
        ranks=[process], num_ranks=processes, bootstrap=epic.jax.Tcp(port=port), **SIZES
    )
    layer = epic.jax.Layer(4, 1)

    def step(place: Any, x: Any) -> Any:
        ids = jnp.asarray([[0], [1], [2], [3]], jnp.int32)
        more = {"rank_of_expert": place, "num_local_experts": 4, "capacity": 64}
        plan, rows, _ = epic.jax.plan_dispatch(group, layer, ids, x, **more)
        return epic.jax.combine(plan, rows * 2)

    program, x = jax.jit(step), jnp.arange(12, dtype=jnp.float32).reshape(4, 3)
    jax.block_until_ready(program(jnp.arange(4, dtype=jnp.int32), x))
    if process == 3:
        say("gone")
        kill()
    try:
        while True:
            jax.block_until_ready(program(jnp.arange(4, dtype=jnp.int32), x))
    except jax.errors.JaxRuntimeError as error:
        assert "EPIC_EPEER" in str(error), error
    (members,) = group.shrink(step=10 + process)
    assert members == group.members[0]
    assert members == epic.Members(1, (0, 1, 2), (3,), 10, 12), members
    assert np.array_equal(program(jnp.asarray([2, 0, 1, 0], jnp.int32), x), 2 * x)
    if process == 1:
        group.leave()
        say("left")
        return
    (members,) = group.shrink()
    assert members.ranks == (0, 2) and members.gone == (1,)
    assert np.array_equal(program(jnp.asarray([2, 0, 2, 0], jnp.int32), x), 2 * x)
    group.close()
    say("right")


def run_losses(process: int, processes: int, port: int) -> None:
    """Processes with different numbers of tokens; the losses are those of the tokens of all."""
    group = epic.jax.open(
        ranks=[process], num_ranks=processes, bootstrap=epic.jax.Tcp(port=port), **SIZES
    )
    options = epic.jax.Moe.of(
        num_experts=processes, num_logical=1, top_k=1, hidden=8, inner=4, drop_absent=True,
        balance_coeff=0.5, z_coeff=0.1, sum_order="by_rank",
    )  # fmt: skip
    tokens = [
        np.random.default_rng(p).normal(size=(3 + 2 * p, 8)).astype(np.float32)
        for p in range(processes)
    ]
    weights = epic.jax.MoeWeights(
        jnp.ones((8, 1)), w_gate_up=jnp.ones((1, 8, 8)), w_down=jnp.ones((1, 4, 8))
    )

    def loss_of(x: Any) -> Any:
        gemm = epic.jax.gemm.best(1)
        table = jnp.zeros(processes, jnp.int32)
        found = epic.jax.moe(group, options, x, weights, grouped_gemm=gemm, logical_of_expert=table)
        return epic.jax.sum(group, found.loss[None])[0]

    def check(members: tuple[int, ...]) -> None:
        z = np.concatenate([tokens[p] for p in members]).astype(np.float64).sum(axis=1)
        wanted = 0.5 + 0.1 * np.square(z).mean()  # one logical expert has probability 1
        assert reference.relative(program(tokens[process]), wanted) < 1e-5

    def find(x: Any) -> Any:
        table = jnp.zeros(processes, jnp.int32)
        return epic.jax.find_non_finite(group, options, x, weights, logical_of_expert=table)

    program, find = jax.jit(loss_of), jax.jit(find)
    check(tuple(range(processes)))
    if process == 0:
        group.leave()
    else:
        group.shrink()
        check(tuple(range(1, processes)))
        epic.jax.check_finite({"layer": find(tokens[process])})
        try:
            epic.jax.check_finite(
                {"layer": find(tokens[process] + (np.nan if process == 2 else 0))}
            )
        except epic.jax.EpicNonFiniteError as error:
            assert (error.rank, error.token) == (2, 0), error
            say("found")
        group.close()
    say("right")


def run_interrupt(process: int, processes: int, port: int) -> None:
    """The last process sleeps. The others wait for it inside XLA and are interrupted."""
    group = epic.jax.open(
        ranks=[process], num_ranks=processes, bootstrap=epic.jax.Tcp(port=port), **SIZES
    )
    run = jax.jit(lambda x: epic.jax.sum(group, x))
    jax.block_until_ready(run(jnp.ones(3, jnp.float32)))
    say("waits")
    if process == processes - 1:
        time.sleep(600)
    jax.block_until_ready(run(jnp.ones(3, jnp.float32)))


def run_interrupt_open(process: int, processes: int, port: int) -> None:
    """The last process never opens the group."""
    say("waits")
    if process == processes - 1:
        time.sleep(600)
    epic.jax.open(ranks=[process], num_ranks=processes, bootstrap=epic.jax.Tcp(port=port), **SIZES)


def run_late(process: int, processes: int, port: int) -> None:
    """A process whose open fails is named, and then a group of the same name opens."""
    initialize(process, processes, port)
    mesh = Mesh(np.array(jax.devices()), ("ep",))
    # otherwise a process that starts slowly would be late, too
    multihost_utils.sync_global_devices("begin")
    try:
        wrong = {"max_tokens": -1} if process == 2 else {"timeout_ms": 1500}
        epic.jax.open(mesh, "ep", **{**SIZES, **wrong})
    except epic.jax.EpicError as error:
        say("error", error)
    multihost_utils.sync_global_devices("late")
    with epic.jax.open(mesh, "ep", **SIZES) as group:
        x = place(mesh, np.ones((4, 3), np.float32), P("ep"))
        say("sum", whole(sums(group, mesh)(x)).ravel()[0])


if __name__ == "__main__":
    what, *numbers = sys.argv[1:]
    globals()[f"run_{what}"](*map(int, numbers))
