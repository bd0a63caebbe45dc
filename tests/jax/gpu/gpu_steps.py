# SPDX-License-Identifier: Apache-2.0
"""Cases that must succeed: single steps, whole programs and layers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_world import (
    SIZES,
    LeftOutError,
    choices,
    failure,
    gpu_mesh,
    gpus,
    host_mesh,
    numbers,
    put,
    rank_counts,
    same,
    say,
    whole,
)
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import epic.jax
import layers
from reference import load_of, mlp, mlp_backward, relative, slots_of
from steps import ALIGN, EXPERTS, LAYER, TOKENS, TOP_K, mapped, through, true_round

# ------------------------------------------------------------------------------ steps ----


def case_steps() -> None:
    """Check round trips and gradients against float64: dtypes, odd rows, fused or not, vma on or
    off."""
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
    """Check rows, weights and counts of every slot exactly, including padding and tail."""
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
    """Return the results that EPIC alone computes: out, every gradient, and a sum."""

    def step(x: Any, w: Any, ids: Any, ct: Any) -> Any:
        def forward(x: Any, w: Any) -> Any:
            plan, recv, slot = epic.jax.plan_dispatch(group, layer, ids, x, w, capacity=capacity)
            return epic.jax.combine(plan, recv, slot), (recv, slot, plan.load, plan.expert_rows)

        out, pull, more = jax.vjp(forward, x, w, has_aux=True)
        total = epic.jax.sum(group, w), epic.jax.sum(group, w, tree=True)
        return out, pull(ct), more, total

    return step


def case_host_bits() -> None:
    """Check that GPUs return the bits of CPU devices, forward and backward."""
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
    """Check that drops return zeros, forward and backward, and that placements do not change
    sums."""
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
    """Check calls without tokens."""
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
    """Check sixteen independent layers with psums between them, forward and backward."""
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
    """Compare layers in a scan, recomputed by several policies and with donation, with unrolled
    ones."""
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
    """Return a program with enough calls in a row for a command buffer."""
    one = through(group, True)

    def model(x: Any, w: Any, ids: Any) -> Any:
        for _ in range(6):
            x = jnp.tanh(x + one(x, w, ids))
        return x

    return model


def case_graphs() -> None:
    """Check that a long program has the same bits with XLA's command buffers and without."""
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
    again: list[Any] = []  # a new group with the name of a closed one must not use its graphs
    for _ in range(2):
        with epic.jax.open(mesh, "ep", **{**SIZES, "command_buffers": True}) as group:
            run = run if again else mapped(mesh, long_model(group), 3)
            again.append(whole(run(*(put(mesh, v) for v in (x, w, ids)))))
            epic.jax.check(group)
    same(*again)


def case_groups() -> None:
    """Open several groups, close and open them again under a compiled program, in any device
    order."""
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
    text = failure(run, x)
    assert "was closed on CUDA device" in text, text
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
    """Check router and losses, with gradients: choices and weights have the bits of CPUs."""
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
    """Check the whole layer: every case of layers.py, every size of a group, against float64."""
    x, ct = layers.arrays()
    for ep in rank_counts():
        mesh = gpu_mesh(ep)
        with epic.jax.open(mesh, "ep", **SIZES) as group:
            for name, case in layers.CASES.items():
                args = put(mesh, x), layers.weights(case), put(mesh, ct)
                args = (args[0], {n: put(mesh, v, P()) for n, v in args[1].items()}, args[2])
                # otherwise float32 products would use TF32
                with jax.default_matmul_precision("highest"):
                    got = jax.tree.map(whole, layers.step(mesh, group, case)(*args))
                layers.compare(got, layers.true_step(case, mesh.shape["dp"]))
                say("  ", ep, name)


def case_experts() -> None:
    """Check dispatch, JAX's grouped GEMM and combine, with all gradients, against float64."""
    from epic.jax import gemm
    from epic.jax.composed import apply_experts as experts_of

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
            # otherwise float32 products would use TF32 on GPUs
            with jax.default_matmul_precision("highest"):
                got, pull = jax.vjp(lambda x, ws, f=run, a=fixed: f(x, ws, *a), args[0], ws)
                grads = pull(args[1])
        bound = most if dtype == "float32" else 3e-2
        assert relative(whole(got), out) < bound, relative(whole(got), out)
        assert relative(whole(grads[0]), d_x) < bound, relative(whole(grads[0]), d_x)
        for n, v in true.items():
            assert relative(whole(grads[1][n]), v) < bound, (n, relative(whole(grads[1][n]), v))
