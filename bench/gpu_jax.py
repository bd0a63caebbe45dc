# SPDX-License-Identifier: Apache-2.0
"""Time epic.jax on all GPUs of this process: gpu_jax.py steps | overlap | host | soak | layer |
gemm.

steps: plan_dispatch and combine in a compiled step, device time.  overlap: the same together with
an independent all-gather and matrix product of XLA, on XLA's stream and on a stream of their own.
host: time of XLA's host side for an EPIC call, compared with a call that does nothing.  soak:
training steps with XLA's command buffers on and off, losses compared.  layer: the models of
bench/gpu/moe.c, by the core's layer in one call and composed with products of this JAX, compared
with the same in C (--c: the program, which runs first).  gemm: those products.
"""

import argparse
import ctypes
import inspect
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compute_on import compute_on
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import epic.jax
from epic.jax import gemm as gemms

ALL = P("ep")


def mesh_of_all() -> Mesh:
    """Open all GPUs as one group."""
    return Mesh(np.array(jax.devices()), ("ep",))


def put(mesh: Mesh, value: Any) -> Any:
    """Return the array sharded over the first dimension."""
    return jax.device_put(value, NamedSharding(mesh, ALL))


def mapped(mesh: Mesh, function: Callable[..., Any], inputs: int) -> Any:
    """Return the function jitted, on each device's own part."""
    specs = (ALL,) * inputs
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=ALL))


def seconds(run: Callable[[], Any], calls: int = 1, repeats: int = 15) -> float:
    """Return the median time of a call, of `calls` that are enqueued together."""
    jax.block_until_ready(run())
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(calls):
            out = run()
        jax.block_until_ready(out)
        times.append((time.perf_counter() - begin) / calls)
    return statistics.median(times)


def routing(tokens: int, experts: int, top_k: int) -> np.ndarray:
    """Return uniform random experts, different for each token."""
    rng = np.random.default_rng(1)
    return np.argpartition(rng.random((tokens, experts)), top_k, 1)[:, :top_k].astype(np.int32)


# ------------------------------------------------------------------------------ steps ----


def steps(args: argparse.Namespace) -> None:
    """Return the time of one operation: the time that eight more operations add to a program of
    eight."""
    mesh, few, many = mesh_of_all(), 4, 12
    ranks = mesh.size
    layer = epic.jax.Layer(args.experts, args.top_k, alignment=128)
    wish = {"max_tokens": args.tokens, "max_row_bytes": 2 * args.hidden}
    rows = ranks * args.tokens
    x = put(mesh, jnp.zeros((rows, args.hidden), jnp.bfloat16) + 1)
    w = put(mesh, np.ones((rows, args.top_k), np.float32))
    ids = put(mesh, routing(rows, args.experts, args.top_k))
    for graphs in (True, False):
        with epic.jax.open(mesh, "ep", command_buffers=graphs, **wish) as group:
            plan = mapped(mesh, lambda ids, g=group: epic.jax.plan(g, layer, ids).demand, 1)
            capacity = int(jnp.max(plan(ids)))  # exactly as many slots as the plan needs

            def make(
                x: Any,
                w: Any,
                ids: Any,
                after: Any = None,
                group: Any = group,
                capacity: int = capacity,
            ) -> Any:
                more = {"capacity": capacity, "after": after}
                return epic.jax.plan_dispatch(group, layer, ids, x, w, **more)

            def dispatches(n: int, make: Any = make) -> Any:
                def program(x: Any, w: Any, ids: Any) -> Any:
                    after = None
                    for _ in range(n):
                        plan, recv, slot = make(x, w, ids, after)
                        after = plan.demand
                    return recv[:1], slot[:1]

                return mapped(mesh, program, 3)

            def combines(n: int, make: Any = make) -> Any:
                def program(x: Any, w: Any, ids: Any) -> Any:
                    plan, recv, slot = make(x, w, ids)
                    for _ in range(n):
                        out = epic.jax.combine(plan, recv, slot)
                        slot = slot + 0 * out[0, 0].astype(jnp.float32)
                    return out[:1]

                return mapped(mesh, program, 3)

            for name, repeated in (("plan+dispatch", dispatches), ("combine", combines)):
                times = []
                for n in (few, many):
                    run = repeated(n)
                    times.append(seconds(partial(run, x, w, ids), calls=4))
                each = (times[1] - times[0]) / (many - few)
                print(
                    f"{name:14} {ranks} GPUs, T={args.tokens}, hidden {args.hidden}, "
                    f"command buffers {'on' if graphs else 'off'}: {each * 1e6:.1f} us",
                    flush=True,
                )


# ---------------------------------------------------------------------------- overlap ----


def on_own_stream(function: Callable[..., Any]) -> Any:
    """Return the function for a GPU stream of its own."""
    stream: Any = compute_on  # its arguments depend on the version of JAX
    if "out_memory_spaces" in inspect.signature(compute_on).parameters:
        more = {"compute_type": "gpu_stream:1", "out_memory_spaces": jax.memory.Space.Device}
        return stream(function, **more)
    return stream("gpu_stream:1")(jax.jit(function))


def overlap(args: argparse.Namespace) -> None:
    """Print the time of a round of independent parts: each part alone, and several together.

    The parts are plan_dispatch and combine (EPIC), an all-gather of XLA as FSDP makes it, and a
    matrix product. Without any overlap the parts together take the sum of their times, and with
    full overlap the longest of them. In the lines "own stream" EPIC's calls run on a stream of
    their own. XLA moves its collectives away from the calls that need them only with
    XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true.
    """
    mesh, few, many = mesh_of_all(), 2, 6
    rows, hidden = mesh.size * args.tokens, args.hidden
    layer = epic.jax.Layer(args.experts, args.top_k, alignment=128)
    x = put(mesh, jax.random.normal(jax.random.key(0), (rows, hidden), jnp.bfloat16))
    w = put(mesh, np.full((rows, args.top_k), 1 / args.top_k, np.float32))
    ids = put(mesh, routing(rows, args.experts, args.top_k))
    gathered = put(mesh, jnp.ones((rows, hidden), jnp.bfloat16))
    square = put(mesh, jnp.full((mesh.size * hidden, hidden), 1 / hidden, jnp.bfloat16))
    inputs = (x, w, ids, gathered, square)
    with epic.jax.open(mesh, "ep", max_tokens=args.tokens, max_row_bytes=2 * hidden) as group:
        counts = mapped(mesh, lambda ids: epic.jax.plan(group, layer, ids).demand, 1)
        capacity = int(jnp.max(counts(ids)))

        def exchange(x: Any, w: Any, ids: Any) -> Any:
            plan, recv, slot = epic.jax.plan_dispatch(group, layer, ids, x, w, capacity=capacity)
            return epic.jax.combine(plan, recv, slot)

        def gather(part: Any) -> Any:
            whole = jax.lax.all_gather(part, "ep", tiled=True)
            return whole[:: mesh.size]  # rows of all devices

        def time_of(parts: str, call: Any = exchange) -> float:
            def program(x: Any, w: Any, ids: Any, g: Any, m: Any, n: int) -> Any:
                for _ in range(n):
                    x = call(x, w, ids) if "E" in parts else x
                    g = gather(g) if "G" in parts else g
                    m = m @ m if "M" in parts else m
                return x, g, m

            times = []
            for n in (few, many):
                run = jax.jit(
                    jax.shard_map(
                        partial(program, n=n), mesh=mesh, in_specs=(ALL,) * 5, out_specs=ALL
                    )
                )
                times.append(seconds(partial(run, *inputs), calls=4))
            return (times[1] - times[0]) / (many - few)

        own = on_own_stream(exchange)
        results = [np.asarray(mapped(mesh, call, 3)(x, w, ids)) for call in (exchange, own)]
        np.testing.assert_array_equal(results[0], results[1])
        alone = {part: time_of(part) for part in "EGM"}
        names = {"E": "EPIC", "G": "all-gather", "M": "matrix product"}
        for part, time_alone in alone.items():
            print(f"{names[part]:32} alone        {time_alone * 1e6:9.1f} us", flush=True)
        for parts in ("EG", "EM", "EGM"):
            times = [alone[part] * 1e6 for part in parts]
            names_of_parts = " + ".join(names[part] for part in parts)
            for where, call in (("XLA's stream", exchange), ("own stream", own)):
                print(
                    f"{names_of_parts:32} {where:12} {time_of(parts, call) * 1e6:9.1f} us (sum "
                    f"{sum(times):.1f}, longest {max(times):.1f})",
                    flush=True,
                )


# ------------------------------------------------------------------------------- host ----

EMPTY = """
#include "xla/ffi/api/c_api.h"
XLA_FFI_Error *empty(XLA_FFI_CallFrame *frame)
{
    XLA_FFI_Metadata_Extension *query = (XLA_FFI_Metadata_Extension *)frame->extension_start;
    if (query && query->extension_base.type == XLA_FFI_Extension_Metadata)
        query->metadata->api_version.minor_version = 3;
    return 0;
}
"""


def register_empty() -> None:
    """Return a custom call that does nothing, for CUDA."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "empty.c"), Path(folder, "empty.so")
        source.write_text(EMPTY)
        words = ["cc", "-O2", "-shared", "-fPIC", "-isystem", jax.ffi.include_dir()]
        subprocess.run([*words, str(source), "-o", str(library)], check=True)
        handler = jax.ffi.pycapsule(ctypes.CDLL(str(library)).empty)
    jax.ffi.register_ffi_target("epic_bench_empty", handler, platform="CUDA")


def enqueue_time(run: Any, x: Any) -> float:
    """Return the median time until the call returns, with an idle device before it."""
    times = []
    for _ in range(100):
        begin = time.perf_counter()
        out = run(x)
        times.append(time.perf_counter() - begin)
        jax.block_until_ready(out)
    return statistics.median(times[10:])


def host(_: argparse.Namespace) -> None:
    """Print what one more call costs on the host, on one GPU, outside of command buffers."""
    register_empty()
    mesh, few, many = Mesh(np.array(jax.devices()[:1]), ("ep",)), 4, 36
    x = put(mesh, np.ones((1, 8), np.float32))
    wish: dict[str, Any] = {"max_tokens": 8, "max_row_bytes": 64, "command_buffers": False}
    with epic.jax.open(mesh, "ep", **wish) as group:

        def empty(x: Any) -> Any:
            out = jax.ShapeDtypeStruct(x.shape, x.dtype)
            y = jax.ffi.ffi_call("epic_bench_empty", out, input_output_aliases={0: 0})(x)
            return jax.lax.pcast(y, "ep", to="varying")

        def combine(x: Any) -> Any:
            ids = jnp.zeros((1, 1), jnp.int32)
            plan = epic.jax.plan(group, epic.jax.Layer(1, 1), ids, capacity=1, after=x)
            return epic.jax.combine(plan, x)

        def total(x: Any) -> Any:
            return epic.jax.sum(group, x)

        for name, one, calls in (
            ("an empty call", empty, 1),
            ("sum", total, 1),
            ("plan, then combine", combine, 2),
        ):
            times = []
            for n in (few, many):

                def chain(x: Any, n: int = n, one: Any = one) -> Any:
                    for _ in range(n):
                        x = one(x)
                    return x

                times.append(enqueue_time(mapped(mesh, chain, 1), x))
            each = (times[1] - times[0]) / (many - few) / calls
            print(f"host time of {name}: {each * 1e6:.2f} us a call", flush=True)


# ------------------------------------------------------------------------------- soak ----


def soak(args: argparse.Namespace) -> None:
    """Train a small model with command buffers on and off; the losses must be equal."""
    mesh = mesh_of_all()
    ranks, hidden, inner, experts, tokens = mesh.size, 128, 128, 16, 256
    layer = epic.jax.Layer(experts, 2, alignment=128)
    rng = np.random.default_rng(0)
    shapes = {"up": (experts, hidden, 2 * inner), "down": (experts, inner, hidden)}
    start = {n: (rng.normal(size=(4, *s)) / 30).astype(np.float32) for n, s in shapes.items()}
    x = put(mesh, rng.normal(size=(ranks * tokens, hidden)).astype(np.float32))
    y = put(mesh, rng.normal(size=(ranks * tokens, hidden)).astype(np.float32))
    ids = put(mesh, routing(ranks * tokens, experts, 2))
    spec = P(None, "ep")
    losses = []
    for graphs in (True, False):
        with epic.jax.open(
            mesh, "ep", max_tokens=tokens, max_row_bytes=4 * hidden, command_buffers=graphs
        ) as group:
            own = epic.jax.Experts(experts // ranks, hidden, inner)

            def model(
                params: Any,
                x: Any,
                ids: Any,
                group: Any = group,
                own: Any = own,
            ) -> Any:
                def body(h: Any, p: Any) -> Any:
                    plan, recv, _ = epic.jax.plan_dispatch(group, layer, ids, h)
                    weights = epic.jax.ExpertWeights(p["up"], p["down"])
                    counts = plan.expert_rows, plan.expert_tokens
                    out = epic.jax.experts(own, recv, *counts, weights, group=group)
                    return h + epic.jax.combine(plan, out), None

                return jax.lax.scan(body, x, params)[0]

            def step(params: Any, x: Any, y: Any, ids: Any, model: Any = model) -> Any:
                def loss_of(p: Any) -> Any:
                    return jnp.square(model(p, x, ids) - y).mean()

                loss, grads = jax.value_and_grad(loss_of)(params)
                new = jax.tree.map(lambda p, g: p - 2.0 * g, params, grads)
                return new, jax.lax.pmean(loss, "ep")

            run = jax.jit(
                jax.shard_map(
                    step,
                    mesh=mesh,
                    in_specs=({"up": spec, "down": spec}, ALL, ALL, ALL),
                    out_specs=({"up": spec, "down": spec}, P()),
                ),
                donate_argnums=0,
            )
            place = NamedSharding(mesh, spec)
            params = {n: jax.device_put(v, place) for n, v in start.items()}
            series, begin = [], 0.0
            for i in range(args.steps):
                params, loss = run(params, x, y, ids)
                if i % 50 == 49:
                    series.append(float(loss))
                    epic.jax.check(group)
                    # start the clock after compilation and the first step
                    begin = begin or time.perf_counter()
            losses.append(series)
            print(
                f"soak, {ranks} GPUs, command buffers {'on' if graphs else 'off'}: {args.steps} "
                f"steps, {(time.perf_counter() - begin) / (args.steps - 50) * 1e3:.2f} ms each, "
                f"loss {series[0]:.6f} to {series[-1]:.6f}",
                flush=True,
            )
    if losses[0] != losses[1] or losses[0][-1] >= losses[0][0]:
        raise SystemExit(f"losses differ or do not fall: {losses}")
    print("soak: the same losses, bit for bit")


# ------------------------------------------------------------------------------ layer ----

# Experts per rank, top_k, hidden, inner.
MODELS = {
    "7168, inner 2048, 8 a rank, top-8": (8, 8, 7168, 2048),
    "7168, inner 2048, 128 a rank, top-8": (128, 8, 7168, 2048),
    "gpt-oss, 2880, inner 2880, 32 a rank, top-4": (32, 4, 2880, 2880),
    "Qwen3-30B, 2048, inner 768, 64 a rank, top-8": (64, 8, 2048, 768),
}


def of_c(args: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Return milliseconds of the models in C by name, forward and with backward.

    The gradients of weights are in bf16 as here.  The program runs before JAX uses the GPUs.
    """
    if not args.c:
        return {}
    last = args.first + args.models
    words = [args.c, f"tokens={args.tokens}", f"first={args.first}", f"models={last}", "whole"]
    said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    found = re.findall(r"layer, (.*), \d+ ranks .*forward ([\d.]+) ms.*weights ([\d.]+)", said)
    if len(found) != args.models:
        raise SystemExit(f"{args.c} said what is not understood: {said}")
    return {name: (float(ahead), float(both)) for name, ahead, both in found}


def in_bursts(run: Callable[[], Any], rounds: int = 12) -> tuple[float, float]:
    """Return the time of a call, by the schedule of bench/gpu/moe.c, and of a single call.

    The schedule is: rest, one call, three calls that are timed.  The result is the difference
    between four calls and one, divided by three.  So it excludes the time between host and GPUs,
    which the events in C exclude, too.  A single call is timed from rest until the host has its
    results.
    """
    jax.block_until_ready(run())
    times: dict[int, list[float]] = {1: [], 4: []}
    for calls in (1, 4) * rounds:
        time.sleep(0.015)
        begin = time.perf_counter()
        for _ in range(calls):
            out = run()
        jax.block_until_ready(out)
        times[calls].append(time.perf_counter() - begin)
    one, four = (statistics.median(times[calls]) for calls in (1, 4))
    return (four - one) / 3, one


def parameters(mesh: Mesh, local: int, hidden: int, inner: int) -> tuple[Any, Any]:
    """Return random weights, created in their shardings, and these shardings."""
    experts = local * mesh.size
    shapes = {
        "w_gate": ((hidden, experts), jnp.float32, P()),
        "w_gate_up": ((experts, hidden, 2 * inner), jnp.bfloat16, ALL),
        "w_down": ((experts, inner, hidden), jnp.bfloat16, ALL),
    }
    specs = {name: spec for name, (_, _, spec) in shapes.items()}

    def make() -> Any:
        key = jax.random.key(0)
        return {n: 0.02 * jax.random.normal(key, s, kind) for n, (s, kind, _) in shapes.items()}

    places = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    return jax.jit(make, out_shardings=places)(), specs


def chosen(args: argparse.Namespace) -> list[tuple[str, tuple[int, int, int, int]]]:
    """Return the models that the command line names."""
    return list(MODELS.items())[args.first : args.first + args.models]


def layer(args: argparse.Namespace) -> None:
    """Print the times of forward, and of forward with backward and all gradients in the weights'
    dtype."""
    in_c = of_c(args)
    mesh, tokens = mesh_of_all(), args.tokens
    for name, (local, top_k, hidden, inner) in chosen(args):
        experts = local * mesh.size
        options = epic.jax.Moe.of(
            num_experts=experts, top_k=top_k, hidden=hidden, inner=inner, alignment=128
        )
        options = replace(options, capacity=tokens * top_k * 3 // 2 + local * 128)
        w, specs = parameters(mesh, local, hidden, inner)
        rows = jax.random.normal(jax.random.key(1), (mesh.size * tokens, hidden), jnp.bfloat16)
        x = put(mesh, rows)
        wish = {"max_tokens": tokens, "max_row_bytes": 2 * hidden}
        with epic.jax.open(mesh, "ep", **wish) as group:
            for way in args.ways:
                product: dict[str, Any]
                product = {} if way == "core" else {"grouped_gemm": gemms.best(128)}
                call = partial(epic.jax.moe, group, options, **product)

                def out_of(x: Any, w: Any, call: Any = call) -> Any:
                    return call(x, epic.jax.MoeWeights(**w)).out

                f = jax.shard_map(out_of, mesh=mesh, in_specs=(ALL, specs), out_specs=ALL)

                def both(x: Any, w: Any, ct: Any, f: Any = f) -> Any:
                    out, pull = jax.vjp(f, x, w)
                    return out, pull(ct)

                try:
                    runs = partial(jax.jit(f), x, w), partial(jax.jit(both), x, w, x)
                    took = [in_bursts(run) for run in runs]
                    ahead, there_and_back = (1e3 * each for each, _ in took)
                    said = f"forward {ahead:.3f} ms, with backward {there_and_back:.3f}"
                    said += " (by themselves {:.3f}, {:.3f})".format(*(1e3 * t for _, t in took))
                    if name in in_c:
                        c = in_c[name]
                        said += f"; C {c[0]:.3f}, {c[1]:.3f}: "
                        said += f"{ahead / c[0]:.3f} and {there_and_back / c[1]:.3f} times"
                except Exception as error:
                    said = str(error)[:80]
                where = f"{mesh.size} ranks of {tokens} tokens"
                print(f"layer, {name}, {where}, {way}: {said}", flush=True)
            epic.jax.check(group)
        del w, x


# ------------------------------------------------------------------------------- gemm ----


def even(rows: int, experts: int) -> np.ndarray:
    """Return equally many rows for each expert."""
    return np.full(experts, rows // experts, np.int32)


def skewed(rows: int, experts: int) -> np.ndarray:
    """Return Zipf 0.7 slabs of multiples of 128 rows; four experts have none."""
    weight = 1 / np.arange(1, experts + 1) ** 0.7
    weight[-4:] = 0
    sizes = (weight / weight.sum() * rows // 128 * 128).astype(np.int32)
    sizes[0] += rows - sizes.sum()
    return np.random.default_rng(0).permutation(sizes)


def gemm(args: argparse.Namespace) -> None:
    """Print the times of forward, d_x and d_w of [rows, K] x [experts, K, N], in bf16."""
    rows = 32768
    for k, n in ((7168, 4096), (2048, 7168))[: args.shapes]:
        for name, sizes in (("even", even(rows, 64)), ("skewed", skewed(rows, 64))):
            x = jax.random.normal(jax.random.key(0), (rows, k), jnp.bfloat16)
            w = jax.random.normal(jax.random.key(1), (64, k, n), jnp.bfloat16) / 64
            ct = jax.random.normal(jax.random.key(2), (rows, n), jnp.bfloat16)
            counts = jnp.asarray(sizes)
            for method in args.methods:
                product = getattr(gemms, method)

                def forward(x: Any, w: Any, p: Any = product, c: Any = counts) -> Any:
                    return p(x, w, c)

                def d_x(x: Any, w: Any, ct: Any, f: Any = forward) -> Any:
                    return jax.vjp(lambda x: f(x, w), x)[1](ct)

                def d_w(x: Any, w: Any, ct: Any, f: Any = forward) -> Any:
                    return jax.vjp(lambda w: f(x, w), w)[1](ct)

                rates = []
                for f, arrays in ((forward, (x, w)), (d_x, (x, w, ct)), (d_w, (x, w, ct))):
                    try:
                        took = seconds(partial(jax.jit(f), *arrays), 3, 5)
                        rates.append(f"{2 * rows * k * n / took / 1e12:.0f}")
                    except Exception as error:
                        rates.append(str(error)[:60])
                print(f"{method:12} K={k} N={n} {name:6}: TFLOP/s {' / '.join(rates)}", flush=True)


def main() -> None:
    """Run the benchmark of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["steps", "overlap", "host", "soak", "layer", "gemm"])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--shapes", type=int, default=2)
    parser.add_argument("--models", type=int, default=4)
    parser.add_argument("--first", type=int, default=0, help="of the models")
    parser.add_argument("--c", help="bench/gpu/moe.c, built: gpu_moe")
    parser.add_argument("--ways", nargs="*", default=["core", "composed"])
    parser.add_argument("--methods", nargs="*", default=["mosaic", "ragged_dot"])
    args = parser.parse_args()
    args.models = min(args.models, len(MODELS) - args.first)
    if args.steps < 100:
        parser.error(f"--steps {args.steps}: 100 or more, of which 50 are not timed")
    globals()[args.what](args)


if __name__ == "__main__":
    main()
