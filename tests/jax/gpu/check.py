# SPDX-License-Identifier: Apache-2.0
"""epic.jax on GPUs, against float64 and against the bits that CPU devices give.

check.py NAMES               one process with all GPUs; NAMES: some of CASES, or none for all
check.py PROCESS PROCESSES PORT NAMES     one of several, each with a GPU of its own
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import epic.jax
import layers
from reference import load_of, mlp, mlp_backward, relative, slots_of
from steps import ALIGN, ALL, EXPERTS, LAYER, TOKENS, TOP_K, mapped, through, true_round

SIZES: dict[str, Any] = {
    "max_tokens": 64,
    "max_row_bytes": 4096,
    "timeout_ms": 20000,
    "command_buffers": os.environ.get("EPIC_GRAPHS", "1") == "1",
}
Failure = jax.errors.JaxRuntimeError


class LeftOutError(Exception):
    """A case that cannot be run here, and why."""


# ------------------------------------------------------------------------------ world ----


def say(*words: object) -> None:
    """At once."""
    print(*words, flush=True)


def gpus() -> list[Any]:
    """Of all processes."""
    return jax.devices("gpu")


def gpu_mesh(ep: int) -> Mesh:
    """All GPUs as dp x ep."""
    return Mesh(np.array(gpus()).reshape(-1, ep), ("dp", "ep"))


def host_mesh(ep: int) -> Mesh:
    """As many CPU devices of this process."""
    devices = jax.local_devices(backend="cpu")[: len(gpus())]
    return Mesh(np.array(devices).reshape(-1, ep), ("dp", "ep"))


def rank_counts() -> list[int]:
    """Every size of a group that the GPUs allow."""
    return [n for n in (1, 2, 4, 8) if len(gpus()) % n == 0]


def put(mesh: Mesh, value: Any, spec: P = ALL) -> Any:
    """A global array of which every process knows all."""
    value = np.asarray(value)
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def whole(x: Any) -> np.ndarray:
    """All of a global array."""
    if isinstance(x, np.ndarray) or x.is_fully_addressable:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def numbers(seed: int, *shape: int, dtype: Any = np.float32) -> Any:
    """Random normal numbers."""
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def choices(seed: int, tokens: int, none: float = 0.1) -> np.ndarray:
    """Different experts for each token; some are none."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)])
    ids[rng.random(ids.shape) < none] = -1
    return ids.astype(np.int32)


def same(a: Any, b: Any) -> None:
    """Bit for bit, leaf by leaf."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.array_equal(whole(x), whole(y))


def failure(function: Any, *args: Any) -> str:
    """The text of the error that it raises."""
    try:
        jax.block_until_ready(function(*args))
    except (Failure, ValueError) as error:
        return str(error)
    raise AssertionError("there was no error")


# ------------------------------------------------------------------------------ steps ----


def case_steps() -> None:
    """Round trip and gradients against float64: types, odd rows, fused or not, vma on and off."""
    tokens = TOKENS * len(gpus())
    bounds = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 3e-3}
    for ep in rank_counts():
        mesh = gpu_mesh(ep)
        with epic.jax.open(mesh, "ep", **SIZES) as group:
            for dtype, hidden, fused, vma in (
                ("float32", 20, True, True),
                ("float32", 256, False, False),
                ("bfloat16", 33, False, True),
                ("float16", 64, True, False),
            ):
                x = jnp.asarray(numbers(1, tokens, hidden), dtype)
                ct = jnp.asarray(numbers(4, tokens, hidden), dtype)
                w, ids = numbers(2, tokens, TOP_K), choices(3, tokens)
                step = mapped(mesh, through(group, fused), 3, vma)
                fixed = put(mesh, ids)
                out, pull = jax.vjp(
                    lambda x, w, f=step, i=fixed: f(x, w, i), put(mesh, x), put(mesh, w)
                )
                got = (out, *pull(put(mesh, ct)))
                for g, t in zip(got, true_round(x, w, ids, ct), strict=True):
                    assert relative(whole(g), t) < bounds[dtype], (ep, dtype)


def case_slots() -> None:
    """Rows, weights and counts in every slot, exactly, padding and tail included."""
    count, hidden = len(gpus()), 20
    x, w = numbers(1, count * TOKENS, hidden), numbers(2, count * TOKENS, TOP_K)
    ids = choices(3, count * TOKENS)
    for ep in rank_counts():
        mesh = gpu_mesh(ep)
        with epic.jax.open(mesh, "ep", **SIZES) as group:

            def step(x: Any, w: Any, ids: Any, group: Any = group) -> Any:
                return epic.jax.plan_dispatch(group, LAYER, ids, x, w)

            out = mapped(mesh, step, 3)(*(put(mesh, v) for v in (x, w, ids)))
            plan, recv, slot = jax.tree.map(whole, out)
            capacity = group.capacity_bound(LAYER)
        for device in range(count):
            first = device // ep * ep * TOKENS
            mine = slice(first, first + ep * TOKENS)
            slots = slots_of(ids[mine], device % ep, ep, EXPERTS, ALIGN)
            rows, weights = np.zeros((capacity, hidden)), np.zeros(capacity)
            for i, (t, k) in enumerate(slots.choices):
                if t >= 0:
                    rows[i], weights[i] = x[mine][t], w[mine][t, k]
            part = slice(device * capacity, (device + 1) * capacity)
            assert np.array_equal(recv[part], rows) and np.array_equal(slot[part], weights)
            local = slice(device * EXPERTS // ep, (device + 1) * EXPERTS // ep)
            assert plan.expert_rows[local].tolist() == slots.rows
            assert plan.expert_tokens[local].tolist() == slots.tokens
            every = slice(device * EXPERTS, (device + 1) * EXPERTS)
            assert plan.load[every].tolist() == load_of(ids[mine], EXPERTS).tolist()
            assert int(plan.demand[device]) == len(slots.choices)


def identity_round(group: Any, layer: Any, capacity: int) -> Callable[..., Any]:
    """All that the core computes, nothing that XLA does: out, every gradient, a sum."""

    def step(x: Any, w: Any, ids: Any, ct: Any) -> Any:
        def forward(x: Any, w: Any) -> Any:
            plan, recv, slot = epic.jax.plan_dispatch(group, layer, ids, x, w, capacity=capacity)
            return epic.jax.combine(plan, recv, slot), (recv, slot, plan.load, plan.expert_rows)

        out, pull, more = jax.vjp(forward, x, w, has_aux=True)
        total = epic.jax.sum(group, w), epic.jax.sum(group, w, tree=True)
        return out, pull(ct), more, total

    return step


def case_host_bits() -> None:
    """GPUs give the bits that CPU devices give, forward and backward."""
    count, hidden = len(gpus()), 1100
    w, ids = numbers(2, count * 40, TOP_K), choices(3, count * 40)
    for ep in rank_counts():
        for dtype in ("float32", "bfloat16", "float16"):
            x = np.asarray(jnp.asarray(numbers(1, count * 40, hidden), dtype))
            ct = np.asarray(jnp.asarray(numbers(4, count * 40, hidden), dtype))
            for order in ("by_rank", "tree"):
                layer = epic.jax.Layer(
                    EXPERTS, TOP_K, alignment=8, sum_order=order, leaves=8 if order == "tree" else 0
                )
                results = []
                for name, mesh in (("device", gpu_mesh(ep)), ("host", host_mesh(ep))):
                    wish = {**SIZES, "max_row_bytes": 8192, "name": name}
                    with epic.jax.open(mesh, "ep", **wish) as group:
                        step = identity_round(group, layer, ep * 40 * TOP_K + 64)
                        args = [put(mesh, v) for v in (x, w, ids, ct)]
                        results.append(jax.tree.map(whole, mapped(mesh, step, 4)(*args)))
                same(*results)


def case_drop_and_placement() -> None:
    """Drops give zeros, forward and backward; any placement gives the same sums."""
    count, hidden = len(gpus()), 20
    mesh = gpu_mesh(count)
    layer = epic.jax.Layer(EXPERTS, 1, overflow="drop", expert_capacity=2)
    x, ct = numbers(1, count * TOKENS, hidden), numbers(2, count * TOKENS, hidden)
    ids = np.zeros((count * TOKENS, 1), np.int32)
    with epic.jax.open(mesh, "ep", **SIZES) as group:

        def dropped(x: Any, ids: Any) -> Any:
            plan, recv, _ = epic.jax.plan_dispatch(group, layer, ids, x, capacity=8)
            return epic.jax.combine(plan, recv)

        run = mapped(mesh, dropped, 2)
        out, pull = jax.vjp(lambda x: run(x, put(mesh, ids)), put(mesh, x))
        kept = np.zeros((count * TOKENS, 1))
        kept[:2] = 1
        assert np.array_equal(whole(out), x * kept)
        assert np.array_equal(whole(pull(put(mesh, ct))[0]), ct * kept)
        table = jnp.asarray(np.arange(EXPERTS)[::-1] % count, jnp.int32)
        w, ids = numbers(2, count * TOKENS, TOP_K), choices(3, count * TOKENS)
        more = {"rank_of_expert": table, "num_local_experts": EXPERTS, "capacity": 400}
        step = mapped(mesh, through(group, True, **more), 3)
        got = step(*(put(mesh, v) for v in (x, w, ids)))
        assert relative(whole(got), true_round(x, w, ids, x)[0]) < 2e-6


def case_no_tokens() -> None:
    """Zero rows are no special case."""
    if jax.__version__.startswith("0.11.") and len(gpus()) > 1:
        raise LeftOutError("this JAX crashes when it compiles calls of empty arrays")
    mesh = gpu_mesh(len(gpus()))
    with epic.jax.open(mesh, "ep", **SIZES) as group:
        x, w = np.zeros((0, 20), np.float32), np.zeros((0, TOP_K), np.float32)
        ids = np.zeros((0, TOP_K), np.int32)
        step = mapped(mesh, through(group, True), 3)
        out, pull = jax.vjp(lambda x, w: step(x, w, put(mesh, ids)), put(mesh, x), put(mesh, w))
        assert out.shape == x.shape and pull(out)[1].shape == w.shape


# ----------------------------------------------------------------------- whole programs ----


def case_independent() -> None:
    """Sixteen layers that do not depend on each other, psums between, forward and backward."""
    count, layers_count, hidden = len(gpus()), 16, 20
    rows = count * TOKENS
    x = np.stack([numbers(i, rows, hidden) for i in range(layers_count)], 1)
    w = np.stack([numbers(100 + i, rows, TOP_K) for i in range(layers_count)], 1)
    ids = np.stack([choices(i, rows) for i in range(layers_count)], 1)
    ct = numbers(9, rows, layers_count, hidden)
    mesh = gpu_mesh(count)
    true = [true_round(x[:, i], w[:, i], ids[:, i], ct[:, i]) for i in range(layers_count)]
    with epic.jax.open(mesh, "ep", **SIZES) as group:
        one = through(group, False)

        def step(x: Any, w: Any, ids: Any) -> Any:
            out = []
            for i in range(layers_count):
                y = one(x[:, i], w[:, i], ids[:, i])
                out.append(y + 0 * jax.lax.psum(y.sum(), "ep"))
            return jnp.stack(out, 1)

        mapped_step = mapped(mesh, step, 3)
        args = [put(mesh, v) for v in (x, w, ct, ids)]
        run = jax.jit(
            lambda x, w, ct, ids: jax.vjp(lambda x, w: mapped_step(x, w, ids), x, w)[1](ct)
        )
        first = jax.tree.map(whole, run(*args))
        assert relative(first[0], np.stack([t[1] for t in true], 1)) < 5e-6
        assert relative(first[1], np.stack([t[2] for t in true], 1)) < 5e-6
        for _ in range(10):
            last = run(*args)
        same(first, last)


def case_scan_and_remat() -> None:
    """Layers in a scan, recomputed by several policies, donated: as the unrolled ones."""
    count, hidden = len(gpus()), 20
    rows = count * TOKENS
    x, w, ids = numbers(1, rows, hidden), numbers(2, rows, TOP_K), choices(3, rows)
    mesh, results = gpu_mesh(count), []
    with epic.jax.open(mesh, "ep", **SIZES) as group:
        one = through(group, False)
        args = [put(mesh, v) for v in (w, ids, numbers(4, rows, hidden))]
        for policy in (None, "nothing_saveable", "everything_saveable", "unrolled"):

            def body(h: Any, w: Any, ids: Any) -> Any:
                return h + one(h, w, ids)

            kept = body
            if policy not in (None, "unrolled"):
                kept = jax.checkpoint(body, policy=getattr(jax.checkpoint_policies, policy))

            def model(x: Any, w: Any, ids: Any, kept: Any = kept, policy: Any = policy) -> Any:
                if policy == "unrolled":
                    return kept(kept(kept(x, w, ids), w, ids), w, ids)
                return jax.lax.scan(lambda h, _: (kept(h, w, ids), None), x, None, length=3)[0]

            step = mapped(mesh, model, 3)
            run = jax.jit(
                lambda x, w, ids, ct, f=step: jax.vjp(lambda x, w: f(x, w, ids), x, w)[1](ct),
                donate_argnums=0,
            )
            results.append(jax.tree.map(whole, run(put(mesh, x), *args)))
    for got in results[:-1]:
        assert all(relative(a, b) < 2e-6 for a, b in zip(got, results[-1], strict=True))


def long_model(group: Any) -> Callable[..., Any]:
    """Enough calls in a row for a command buffer."""
    one = through(group, True)

    def model(x: Any, w: Any, ids: Any) -> Any:
        for _ in range(6):
            x = jnp.tanh(x + one(x, w, ids))
        return x

    return model


def case_graphs() -> None:
    """A long program with XLA's command buffers and without: the same bits, step after step."""
    count, hidden = len(gpus()), 64
    rows = count * TOKENS
    x, w, ids = numbers(1, rows, hidden), numbers(2, rows, TOP_K), choices(3, rows)
    mesh, results = gpu_mesh(count), []
    for graphs in (True, False):
        with epic.jax.open(mesh, "ep", **{**SIZES, "command_buffers": graphs}) as group:
            run = mapped(mesh, long_model(group), 3)
            h, *more = (put(mesh, v) for v in (x, w, ids))
            for _ in range(50):
                h = run(h, *more)
            results.append(whole(h))
            epic.jax.check(group)
    same(*results)
    again: list[Any] = []  # the graphs of a closed group are not used for the next of its name
    for _ in range(2):
        with epic.jax.open(mesh, "ep", **{**SIZES, "command_buffers": True}) as group:
            run = run if again else mapped(mesh, long_model(group), 3)
            again.append(whole(run(*(put(mesh, v) for v in (x, w, ids)))))
            epic.jax.check(group)
    same(*again)


def case_groups() -> None:
    """Several at a time, closed and opened again under a compiled program, any device order."""
    count = len(gpus())
    ep = 2 if count % 2 == 0 else 1
    mesh = gpu_mesh(ep)
    x = put(mesh, np.arange(count, dtype=np.float32))
    wish: dict[str, Any] = {"max_tokens": 8, "max_row_bytes": 64, "max_sms": 16}
    with epic.jax.open(mesh, "ep", **wish) as a, epic.jax.open(mesh, "dp", name="b", **wish) as b:
        run = mapped(mesh, lambda x: (epic.jax.sum(a, x), epic.jax.sum(b, x)), 1)
        table = np.arange(count).reshape(-1, ep)
        by_ep, by_dp = map(whole, run(x))
        assert by_ep.tolist() == np.repeat(table.sum(1), ep).tolist()
        assert by_dp.tolist() == np.tile(table.sum(0), count // ep).tolist()
        jax.block_until_ready(run(x))
    assert "is not open on CUDA device" in failure(run, x)
    with epic.jax.open(mesh, "ep", **wish), epic.jax.open(mesh, "dp", name="b", **wish):
        assert whole(run(x)[0]).tolist() == by_ep.tolist()
    backwards = Mesh(np.array(gpus())[::-1].reshape(1, -1), ("dp", "ep"))
    ids = choices(3, count * TOKENS, 0)
    with epic.jax.open(backwards, "ep", **SIZES) as group:
        plan = mapped(backwards, lambda ids: epic.jax.plan(group, LAYER, ids), 1)
        tokens = plan(put(backwards, ids)).expert_tokens
        assert np.array_equal(whole(tokens), np.bincount(np.ravel(ids)))


# ------------------------------------------------------------------------------- layers ----


def case_router() -> None:
    """Router and losses, with gradients: the bits of the host's choice and weights."""
    rng = np.random.default_rng(1)
    logits = (3 * rng.normal(size=(64, 32))).astype(np.float32)
    bias = rng.normal(size=32).astype(np.float32)
    ct = rng.normal(size=(64, 4)).astype(np.float32)
    load = rng.integers(0, 30, size=32).astype(np.int32)
    wishes = (
        epic.jax.Router(32, 4),
        epic.jax.Router(32, 4, score="sigmoid", normalize="sum", scale=2.5),
        epic.jax.Router(32, 4, num_groups=8, topk_groups=2),
    )
    with epic.jax.open(gpu_mesh(len(gpus())), "ep", **SIZES):
        for wish in wishes:

            def both(z: Any, b: Any, load: Any, wish: Any = wish) -> Any:
                chosen, weights = epic.jax.route(wish, z, bias=b)
                balance = epic.jax.balance_loss(wish, z, coeff=0.5, total_tokens=64, load=load)
                return (
                    weights,
                    balance + epic.jax.z_loss(wish, z, coeff=0.1, total_tokens=64),
                    chosen,
                )

            def all_of(z: Any, b: Any, load: Any, ct: Any, both: Any = both) -> Any:
                out, pull, chosen = jax.vjp(
                    lambda z: (both(z, b, load)[:2], both(z, b, load)[2]), z, has_aux=True
                )
                return out[0], chosen, out[1], pull((ct, jnp.float32(2)))[0]

            got = []
            for platform in ("gpu", "cpu"):
                device = jax.local_devices(backend=platform)[0]
                args = jax.device_put((logits, bias, load, ct), device)
                got.append(jax.tree.map(np.asarray, jax.jit(all_of)(*args)))
            same(got[0][:2], got[1][:2])
            assert relative(got[0][2], got[1][2]) < 1e-6
            assert relative(got[0][3], got[1][3]) < 1e-6


def case_layers() -> None:
    """The whole layer: every case of layers.py, every size of a group, against float64."""
    x, ct = layers.arrays()
    for ep in rank_counts():
        mesh = gpu_mesh(ep)
        with epic.jax.open(mesh, "ep", **SIZES) as group:
            for name, case in layers.CASES.items():
                args = put(mesh, x), layers.weights(case), put(mesh, ct)
                args = (args[0], {n: put(mesh, v, P()) for n, v in args[1].items()}, args[2])
                with jax.default_matmul_precision("highest"):  # else float32 is TF32
                    got = jax.tree.map(whole, layers.step(mesh, group, case)(*args))
                layers.compare(got, layers.true_step(case, mesh.shape["dp"]))
                say("  ", ep, name)


def case_experts() -> None:
    """Dispatch, JAX's grouped GEMM and combine, with all gradients, against float64."""
    from epic.jax import gemm
    from epic.jax.moe import mlp as experts_of

    count, hidden, inner, most = len(gpus()), 256, 128, 1e-5
    rows = count * 24
    mesh = gpu_mesh(count)
    x, ct = numbers(1, rows, hidden), numbers(4, rows, hidden)
    w, ids = numbers(2, rows, TOP_K), choices(3, rows)
    weights = {
        "w_gate_up": 0.1 * numbers(5, EXPERTS, hidden, 2 * inner),
        "w_down": 0.1 * numbers(6, EXPERTS, inner, hidden),
    }
    wide = {n: v.astype(np.float64) for n, v in weights.items()}
    true = {n: np.zeros_like(v) for n, v in wide.items()}
    out, d_x = np.zeros((rows, hidden)), np.zeros((rows, hidden))
    for e in range(EXPERTS):
        token, k = np.nonzero(ids == e)
        scale = w[token, k][:, None].astype(np.float64)
        y, kept = mlp(x[token].astype(np.float64), wide, e)
        np.add.at(out, token, scale * y)
        np.add.at(d_x, token, mlp_backward(wide, true, e, kept, scale * ct[token]))
    for dtype in ("float32", "bfloat16"):
        with epic.jax.open(mesh, "ep", **SIZES) as group:
            wish = epic.jax.Experts(EXPERTS // count, hidden, inner)
            layer = epic.jax.Layer(EXPERTS, TOP_K, alignment=128)

            def step(
                x: Any,
                ws: Any,
                w: Any,
                ids: Any,
                group: Any = group,
                wish: Any = wish,
                layer: Any = layer,
            ) -> Any:
                plan, recv, slot = epic.jax.plan_dispatch(group, layer, ids, x, w)
                own = epic.jax.ExpertWeights(**ws)
                counts = plan.expert_rows, plan.expert_tokens
                y = experts_of(group, wish, gemm.best(128), recv, counts, own, None)
                return epic.jax.combine(plan, y, slot)

            run = mapped(mesh, step, 4)
            args = [put(mesh, np.asarray(jnp.asarray(v, dtype))) for v in (x, ct)]
            ws = {n: put(mesh, np.asarray(jnp.asarray(v, dtype))) for n, v in weights.items()}
            fixed = put(mesh, w), put(mesh, ids)
            with jax.default_matmul_precision("highest"):  # else float32 is TF32 on GPUs
                got, pull = jax.vjp(lambda x, ws, f=run, a=fixed: f(x, ws, *a), args[0], ws)
                grads = pull(args[1])
        bound = most if dtype == "float32" else 3e-2
        assert relative(whole(got), out) < bound, relative(whole(got), out)
        assert relative(whole(grads[0]), d_x) < bound, relative(whole(grads[0]), d_x)
        for n, v in true.items():
            assert relative(whole(grads[1][n]), v) < bound, (n, relative(whole(grads[1][n]), v))


# ------------------------------------------------------------------------------- errors ----


def good_step(mesh: Mesh, group: Any) -> None:
    """A step that is right: the group is usable."""
    rows = len(gpus()) * TOKENS
    x, w, ids = numbers(1, rows, 20), numbers(2, rows, TOP_K), choices(3, rows)
    got = mapped(mesh, through(group, True), 3)(*(put(mesh, v) for v in (x, w, ids)))
    assert relative(whole(got), true_round(x, w, ids, x)[0]) < 2e-6


def checked(group: Any) -> str:
    """What epic.jax.check says, behind the name of its result."""
    try:
        epic.jax.check(group)
    except epic.jax.EpicError as error:
        return f"{error.code}: {error}"
    return ""


def case_arguments() -> None:
    """What the host can check is an error at once, and the group goes on."""
    mesh = gpu_mesh(len(gpus()))
    rows = len(gpus()) * TOKENS
    for backend in ("shm", "threads"):
        try:
            epic.jax.open(mesh, "ep", backend=backend, **SIZES)
        except ValueError as error:
            assert "p2p" in str(error)
        else:
            raise AssertionError("a host backend was accepted")
    with epic.jax.open(mesh, "ep", **SIZES) as group:
        wide = numbers(1, rows, 2000), numbers(2, rows, TOP_K), choices(3, rows)
        text = failure(mapped(mesh, through(group, True), 3), *(put(mesh, v) for v in wide))
        assert "opened with max_row_bytes" in text, text
        good_step(mesh, group)
        with epic.jax.open(host_mesh(1), "ep", name="host", **SIZES) as host:
            run = mapped(mesh, lambda x: epic.jax.sum(host, x), 1)
            text = failure(run, put(mesh, np.ones(len(gpus()), np.float32)))
            assert "'host'" in text and "mesh that the group was opened with" in text, text
        good_step(mesh, group)


def case_meshes() -> None:
    """A mesh that is not the group's, and a group opened again with other devices under a compiled
    program: refused by what the host knows, without a wait for the GPU."""
    count = len(gpus())
    if count < 2:
        raise LeftOutError("one GPU")
    mesh = gpu_mesh(count)
    turned = Mesh(mesh.devices[:, ::-1], mesh.axis_names)
    x = np.ones(count, np.float32)
    with epic.jax.open(mesh, "ep", **SIZES) as group:
        run = mapped(mesh, lambda x: epic.jax.sum(group, x), 1)
        assert whole(run(put(mesh, x))).tolist() == [count] * count
        text = failure(mapped(turned, lambda x: epic.jax.sum(group, x), 1), put(turned, x))
        assert "the mesh has devices" in text, text
        good_step(mesh, group)
    with epic.jax.open(turned, "ep", **SIZES) as group:
        text = failure(run, put(mesh, x))
        # who is traced again hears it before it runs
        assert "was made for group" in text or "the mesh has devices" in text, text
        good_step(turned, group)
    with epic.jax.open(mesh, "ep", **SIZES) as group:  # `run` may be traced again, with this one
        assert whole(run(put(mesh, x))).tolist() == [count] * count


def case_data_errors() -> None:
    """A bad expert id, and too many slots: zeros, no call fails, check tells it once on every
    rank, at once or some steps later; the group goes on."""
    mesh = gpu_mesh(len(gpus()))
    rows = len(gpus()) * TOKENS
    x, w, ids = numbers(1, rows, 20), numbers(2, rows, TOP_K), choices(3, rows, 0)
    bad = ids.copy()
    bad[rows - 1, 1] = EXPERTS + 5
    with epic.jax.open(mesh, "ep", **SIZES) as group:
        run = mapped(mesh, through(group, True), 3)
        tight = mapped(mesh, through(group, True, capacity=4), 3)
        for step, chosen, word in ((run, bad, "EPIC_EINVAL"), (tight, ids, "EPIC_EOVERFLOW")):
            for later in (0, 3):
                out = step(*(put(mesh, v) for v in (x, w, chosen)))
                assert not np.any(whole(jax.block_until_ready(out)))
                for _ in range(later):
                    good_step(mesh, group)
                text = checked(group)
                assert text.startswith(word), text
                assert checked(group) == ""
                good_step(mesh, group)


def sync(name: str) -> None:
    """All processes."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def what_broke(group: Any, run: Any, x: Any) -> str:
    """What check says; a rank that found nothing itself hears of it in its next operation."""
    for _ in range(2):
        text = checked(group)
        if text:
            return text
        jax.block_until_ready(run(x))
    return checked(group)


def case_missing_peer() -> None:
    """A rank that does not come: the others' error names it, then a new group opens."""
    count = len(gpus())
    if count == 1:
        raise LeftOutError("one GPU")
    mesh = gpu_mesh(count)
    x = put(mesh, np.ones(count, np.float32))
    wish = {**SIZES, "timeout_ms": 700, "name": "slow"}
    with epic.jax.open(mesh, "ep", **wish) as group:

        def step(x: Any) -> Any:
            late = jax.lax.axis_index("ep") == 1
            return jax.lax.cond(late, lambda v: v, lambda v: epic.jax.sum(group, v), x)

        inner = jax.shard_map(step, mesh=mesh, in_specs=ALL, out_specs=ALL, check_vma=False)
        begin = time.monotonic()
        jax.block_until_ready(jax.jit(inner)(x))
        sync("after the deadline")
        total = mapped(mesh, lambda x: epic.jax.sum(group, x), 1)
        text = what_broke(group, total, x)
        assert "EPIC_ETIMEOUT" in text and "rank 1" in text, text
        assert time.monotonic() - begin < 30
        text = failure(total, x)
        assert text.startswith("DEADLINE_EXCEEDED") and "rank 1" in text, text
    with epic.jax.open(mesh, "ep", **{**wish, "timeout_ms": 20000}) as group:
        good_step(mesh, group)


def case_different_calls() -> None:
    """Ranks that call different things: an error on all that names both."""
    count = len(gpus())
    if count == 1:
        raise LeftOutError("one GPU")
    mesh = gpu_mesh(count)
    x = put(mesh, np.ones(count * TOKENS * TOP_K, np.float32))
    with epic.jax.open(mesh, "ep", name="mixed", **SIZES) as group:

        def step(x: Any) -> Any:
            other = jax.lax.axis_index("ep") == 1
            return jax.lax.cond(
                other,
                lambda v: epic.jax.sum(group, v),
                lambda v: epic.jax.sum(group, v, tree=True),
                x,
            )

        inner = jax.shard_map(step, mesh=mesh, in_specs=ALL, out_specs=ALL, check_vma=False)
        jax.block_until_ready(jax.jit(inner)(x))
        total = mapped(mesh, lambda x: epic.jax.sum(group, x), 1)
        text = what_broke(group, total, x)
        assert "EPIC_EMISMATCH" in text, text
        text = failure(total, x)
        assert text.startswith("FAILED_PRECONDITION"), text
    with epic.jax.open(mesh, "ep", name="mixed", **SIZES) as group:
        good_step(mesh, group)


def case_killed() -> None:
    """A process that dies is named by the others at once; ends this program."""
    last = jax.process_count() - 1
    if last == 0:
        raise LeftOutError("one process")
    mesh = gpu_mesh(len(gpus()))
    x = put(mesh, np.ones(len(gpus()), np.float32))
    with epic.jax.open(mesh, "ep", name="killed", **SIZES) as group:
        run = mapped(mesh, lambda x: epic.jax.sum(group, x), 1)
        for _ in range(5):
            jax.block_until_ready(run(x))
        sync("all are well")
        if jax.process_index() == last:
            say("right")
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        jax.block_until_ready(run(x))
        took, text = time.monotonic() - begin, checked(group)
        good = "EPIC_EPEER" in text and f"rank {last}" in text and took < 2
        say(f"{'ok' if good else 'FAILED:'} killed ({took:.1f} s): {text}")
        say("right" if good else "wrong")
        sys.stdout.flush()
        os._exit(0 if good else 1)  # jax.distributed would wait for the dead


CASES = {name[5:]: value for name, value in list(globals().items()) if name.startswith("case_")}


def run_case(name: str) -> bool:
    """False: it failed, which has been said."""
    begin = time.monotonic()
    try:
        CASES[name]()
    except LeftOutError as reason:
        say("left out:", name, "-", reason)
    except Exception:
        traceback.print_exc()
        say("FAILED:", name)
        return False
    else:
        say(f"ok {name} ({time.monotonic() - begin:.1f} s)")
    return True


def main(words: list[str]) -> int:
    """All that is asked for; in several processes, to the first failure."""
    several = bool(words) and words[0].isdigit()
    if several:
        process, processes, port = map(int, words[:3])
        words = words[3:]
        device = process % max(1, int(os.environ.get("EPIC_GPUS", processes)))
        jax.distributed.initialize(
            f"127.0.0.1:{port}", processes, process, local_device_ids=[device]
        )
    good = True
    for name in words or CASES:
        good = run_case(name) and good
        if several and not good:
            sys.stdout.flush()
            os._exit(1)  # the others would wait
    say("right" if good else "wrong")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
