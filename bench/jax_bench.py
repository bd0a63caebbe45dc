# SPDX-License-Identifier: Apache-2.0
"""Time dispatch, combine and the whole layer in JAX, EPIC compared with JAX itself.

JAX itself, in the same run: sort by expert, exchange (ragged_all_to_all; on CPUs, where XLA lacks
it, all_to_all of padded blocks), sort again, ragged_dot.  Both must first give the same layer.
A third form is common elsewhere: each rank has capacity_factor * tokens * top_k / experts slots
for each expert and drops the rest, all_to_all of these blocks, one batched matmul for all experts.
With slots for all choices it must give the same layer, too.

python bench/jax_bench.py                                   4 virtual CPU devices
python bench/jax_bench.py --platform cuda --tokens 4096 --hidden 7168 --experts 256 --top-k 8
"""

import argparse
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

Step = Callable[..., Any]
Key = tuple[str, str]


@dataclass(frozen=True)
class Sizes:
    """Sizes of one rank's part and of the group."""

    ranks: int
    tokens: int
    hidden: int
    inner: int
    experts: int
    top_k: int

    @property
    def local(self) -> int:
        """Return the number of experts of a rank."""
        return self.experts // self.ranks

    @property
    def most(self) -> int:
        """Return the largest number of rows that one rank may send to another."""
        return self.tokens * min(self.top_k, self.local)


def arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--platform", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="of each device")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--factors", type=float, nargs="*", default=[1.25, 1.5])
    parser.add_argument("--exchange", choices=("ragged", "padded"), help="of JAX's own way")
    return parser.parse_args()


# ---------------------------------------------------------------------- JAX's own way ----


class Routes(NamedTuple):
    """Describes where rows go.

    `order` sorts the choices by expert, and `back` reverses it. The counts are those of every rank
    [ranks, experts]. `inner` sorts received rows by expert, and `outer` reverses it.
    """

    order: Any
    counts: Any
    inner: Any
    outer: Any
    sizes: Any


def before(x: Any, axis: int) -> Any:
    """Return the sum of the elements before each element."""
    import jax.numpy as jnp

    return jnp.cumsum(x, axis=axis) - x


def make_routes(s: Sizes, ragged: bool, ids: Any) -> Routes:
    """Return the routes of the choices [tokens, top_k] of this rank."""
    import jax
    import jax.numpy as jnp

    flat = ids.reshape(-1)
    counts = jax.lax.all_gather(jnp.bincount(flat, length=s.experts), "ep")
    mine = jax.lax.dynamic_slice_in_dim(counts, jax.lax.axis_index("ep") * s.local, s.local, 1)
    ends = jnp.cumsum(mine, axis=1)  # [source, local expert]
    if ragged:  # rows of the sources are packed
        starts = before(ends[:, -1], 0)
        row = jnp.arange(s.ranks * s.most)
        source = jnp.searchsorted(starts, row, side="right") - 1
        place = row - starts[source]
    else:
        source = jnp.repeat(jnp.arange(s.ranks), s.most)
        place = jnp.tile(jnp.arange(s.most), s.ranks)
    expert = (place[:, None] >= ends[source]).sum(axis=1)  # `local` where there is no row
    inner = jnp.argsort(expert, stable=True)
    return Routes(
        jnp.argsort(flat, stable=True), counts, inner, jnp.argsort(inner), mine.sum(axis=0)
    )


def exchange(s: Sizes, ragged: bool, r: Routes, rows: Any, home: bool) -> Any:
    """Send sorted rows to the ranks of their experts, or return received rows."""
    import jax
    import jax.numpy as jnp

    me = jax.lax.axis_index("ep")
    pairs = r.counts.reshape(s.ranks, s.ranks, s.local).sum(axis=2)  # [source, destination]
    send, take = pairs[me], pairs[:, me]
    if ragged:
        first, there = before(pairs, 1), before(pairs, 0)
        room = s.tokens * s.top_k if home else s.ranks * s.most
        out = jnp.zeros((room, rows.shape[1]), rows.dtype)
        out = jax.lax.pcast(out, ("ep",), to="varying")
        if home:
            args = (there[:, me], take, first[:, me], send)
        else:
            args = (first[me], send, there[me], take)
        args = tuple(a.astype(jnp.int32) for a in args)
        return jax.lax.ragged_all_to_all(rows, out, *args, axis_name="ep")
    row = jnp.arange(s.tokens * s.top_k)
    starts = before(send, 0)
    rank = jnp.searchsorted(jnp.cumsum(send), row, side="right")
    place = rank * s.most + row - starts[rank]  # index of each sorted row in the padded blocks
    if home:
        blocks = rows.reshape(s.ranks, s.most, -1)
        return jax.lax.all_to_all(blocks, "ep", 0, 0).reshape(rows.shape)[place]
    blocks = jnp.zeros((s.ranks * s.most, rows.shape[1]), rows.dtype).at[place].set(rows)
    blocks = blocks.reshape(s.ranks, s.most, -1)
    return jax.lax.all_to_all(blocks, "ep", 0, 0).reshape(s.ranks * s.most, -1)


def own_steps(s: Sizes, ragged: bool) -> dict[str, Step]:
    """The functions of one rank; prepare returns the arguments of combine."""
    import jax
    import jax.numpy as jnp

    def dispatch(x: Any, ids: Any) -> tuple[Routes, Any]:
        r = make_routes(s, ragged, ids)
        recv = exchange(s, ragged, r, x[r.order // s.top_k], False)
        return r, recv[r.inner]

    def combine(r: Routes, y: Any, weights: Any) -> Any:
        rows = exchange(s, ragged, r, y[r.outer], True)
        rows = rows[jnp.argsort(r.order)].reshape(s.tokens, s.top_k, -1)
        return (rows.astype(jnp.float32) * weights[..., None]).sum(axis=1).astype(y.dtype)

    def layer(x: Any, w: Any) -> Any:
        scores = jax.nn.softmax(x.astype(jnp.float32) @ w["w_gate"])
        weights, ids = jax.lax.top_k(scores, s.top_k)
        r, recv = dispatch(x, ids)
        live = jnp.arange(recv.shape[0]) < r.sizes.sum()
        z = jax.lax.ragged_dot(jnp.where(live[:, None], recv, 0), w["w_gate_up"], r.sizes)
        gate, up = jnp.split(z, 2, axis=1)
        y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, w["w_down"], r.sizes)
        return combine(r, jnp.where(live[:, None], y, 0), weights)

    def both(x: Any, ids: Any, weights: Any) -> Any:
        r, recv = dispatch(x, ids)
        return combine(r, recv, weights)

    return {
        "dispatch": lambda x, ids: dispatch(x, ids)[1],
        "combine": lambda y, weights, r: combine(r, y, weights),
        "both": both,
        "layer": layer,
        "prepare": lambda x, ids, weights: (*dispatch(x, ids)[::-1], weights),
    }


# ------------------------------------------------------------- a capacity for each expert ----


def places_of(s: Sizes, most: int, ids: Any) -> tuple[Any, Any]:
    """Return the slot of each choice among this rank's for its expert, and whether it has one."""
    import jax
    import jax.numpy as jnp

    chosen = jax.nn.one_hot(ids.reshape(-1), s.experts, dtype=jnp.int32)
    place = ((jnp.cumsum(chosen, axis=0) - 1) * chosen).sum(axis=1)
    return place, place < most


def capacity_layer(s: Sizes, most: int) -> Step:
    """Return the layer with a limited number of rows per expert and rank; it drops the others."""
    import jax
    import jax.numpy as jnp

    def exchanged(blocks: Any) -> Any:
        """Return [ranks, local experts, slots, n] of destinations or sources."""
        return jax.lax.all_to_all(blocks, "ep", 0, 0)

    def layer(x: Any, w: Any) -> Any:
        scores = jax.nn.softmax(x.astype(jnp.float32) @ w["w_gate"])
        weights, ids = jax.lax.top_k(scores, s.top_k)
        place, is_kept = places_of(s, most, ids)
        at = jnp.where(is_kept, ids.reshape(-1) * most + place, s.experts * most)
        rows = jnp.repeat(x, s.top_k, axis=0)
        blocks = jnp.zeros((s.experts * most, s.hidden), x.dtype).at[at].set(rows, mode="drop")
        recv = exchanged(blocks.reshape(s.ranks, s.local, most, s.hidden))
        recv = recv.transpose(1, 0, 2, 3).reshape(s.local, s.ranks * most, s.hidden)
        gate, up = jnp.split(jnp.einsum("enh,ehw->enw", recv, w["w_gate_up"]), 2, axis=2)
        y = jnp.einsum("eni,eih->enh", jax.nn.silu(gate) * up, w["w_down"])
        y = y.reshape(s.local, s.ranks, most, s.hidden).transpose(1, 0, 2, 3)
        home = exchanged(y).reshape(s.experts * most, s.hidden)
        rows = jnp.where(is_kept[:, None], home[jnp.where(is_kept, at, 0)], 0)
        rows = rows.reshape(s.tokens, s.top_k, s.hidden).astype(jnp.float32)
        return (rows * weights[..., None]).sum(axis=1).astype(x.dtype)

    return layer


def capacity_ways(s: Sizes, factors: list[float]) -> dict[str, dict[str, Step]]:
    """Return the layer for each capacity factor, by name."""
    found = {}
    for factor in factors:
        most = math.ceil(factor * s.tokens * s.top_k / s.experts)
        found[f"capacity {factor:g}"] = {"layer": capacity_layer(s, most)}
    return found


# ----------------------------------------------------------------------------- EPIC ----


def epic_steps(s: Sizes, group: Any) -> dict[str, Step]:
    """Return the forms of EPIC by name."""
    import epic.jax

    place = epic.jax.Layer(s.experts, s.top_k)
    options = epic.jax.Moe(
        place,
        epic.jax.Router(s.experts, s.top_k),
        epic.jax.Experts(s.local, s.hidden, s.inner),
    )

    def dispatch(x: Any, ids: Any) -> Any:
        return epic.jax.plan_dispatch(group, place, ids, x)[1]

    def both(x: Any, ids: Any, weights: Any) -> Any:
        plan, recv, slot = epic.jax.plan_dispatch(group, place, ids, x, weights)
        return epic.jax.combine(plan, recv, slot)

    def layer(x: Any, w: Any) -> Any:
        return epic.jax.moe(group, options, x, epic.jax.MoeWeights(**w)).out

    def prepare(x: Any, ids: Any, weights: Any) -> Any:
        plan, recv, slot = epic.jax.plan_dispatch(group, place, ids, x, weights)
        return recv, plan, slot

    return {
        "dispatch": dispatch,
        "combine": lambda y, slot, plan: epic.jax.combine(plan, y, slot),
        "both": both,
        "layer": layer,
        "prepare": prepare,
    }


# ---------------------------------------------------------------------------- timing ----


def mapped(mesh: Any, step: Step, ins: Any) -> Step:
    """Return the function over the devices; results are stacked."""
    import jax
    from jax.sharding import PartitionSpec as P

    return jax.shard_map(step, mesh=mesh, in_specs=ins, out_specs=P("ep"))


def programs(mesh: Any, steps: dict[str, Step]) -> dict[Key, Step]:
    """Return compiled functions: forward, and forward with backward of a weighted sum."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    def weigh(y: Any) -> Any:  # a cotangent that is not constant
        return (y.astype(jnp.float32) * jnp.cos(jnp.arange(y.shape[1]))).sum()

    whole = {"w_gate": P(), "w_gate_up": P("ep"), "w_down": P("ep")}
    found: dict[Key, Step] = {}
    for name, step in steps.items():
        if name == "prepare":
            continue
        inner = mapped(mesh, step, (P("ep"), whole) if name == "layer" else P("ep"))
        wanted = 0 if name == "dispatch" else (0, 2) if name == "both" else (0, 1)

        def backward(*args: Any, f: Any = inner, by: Any = wanted) -> Any:
            return jax.value_and_grad(lambda *a: weigh(f(*a)), argnums=by)(*args)

        found[name, "forward"] = jax.jit(inner)
        found[name, "forward and backward"] = jax.jit(backward)
    return found


class Time(NamedTuple):
    """Milliseconds of the clock, and of all cores together, which other programs disturb less."""

    wall: float
    cores: float


def now() -> tuple[float, float]:
    """Return seconds of the clock and of all cores."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), used.ru_utime + used.ru_stime


def medians(runs: Mapping[Any, Callable[[], Any]], rounds: int) -> dict[Any, Time]:
    """Time all functions in turn in each round."""
    import jax

    times: dict[Any, list[tuple[float, ...]]] = {key: [] for key in runs}
    for run in runs.values():
        jax.block_until_ready(run())
    for _ in range(rounds):
        for key, run in runs.items():
            before = now()
            jax.block_until_ready(run())
            times[key].append(tuple((b - a) * 1e3 for a, b in zip(before, now(), strict=True)))
    middle = statistics.median
    return {key: Time(*map(middle, zip(*values, strict=True))) for key, values in times.items()}


def inputs(s: Sizes, mesh: Any, dtype: str) -> dict[str, tuple[Any, ...]]:
    """Return the arguments of the three programs, in their shardings."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    rng = np.random.default_rng(0)
    count = s.ranks * s.tokens

    def put(value: Any, spec: Any, kind: str = dtype) -> Any:
        return jax.device_put(jax.numpy.asarray(value, kind), NamedSharding(mesh, spec))

    x = put(rng.normal(size=(count, s.hidden)), P("ep"))
    ids = rng.random((count, s.experts)).argsort(axis=1)[:, : s.top_k]
    weights = put(rng.random((count, s.top_k)), P("ep"), "float32")
    w = {
        "w_gate": put(rng.normal(size=(s.hidden, s.experts)), P(), "float32"),
        "w_gate_up": put(
            rng.normal(size=(s.experts, s.hidden, 2 * s.inner)) / s.hidden**0.5, P("ep")
        ),
        "w_down": put(rng.normal(size=(s.experts, s.inner, s.hidden)) / s.inner**0.5, P("ep")),
    }
    chosen = put(ids, P("ep"), "int32")
    return {"dispatch": (x, chosen), "both": (x, chosen, weights), "layer": (x, w)}


def miss(a: Any, b: Any) -> float:
    """Return the largest difference over the largest value, of all arrays."""
    import jax
    import numpy as np

    worst = 0.0
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        p, q = np.asarray(one, np.float64), np.asarray(other, np.float64)
        worst = max(worst, float(np.abs(p - q).max() / np.abs(q).max()))
    return worst


def main() -> int:
    """Check, time and print; return 1 if the two ways differ."""
    args = arguments()
    if args.platform == "cpu":
        flag = f"--xla_force_host_platform_device_count={args.devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    os.environ["JAX_PLATFORMS"] = args.platform
    import jax
    import numpy as np
    from jax.sharding import PartitionSpec as P

    import epic.jax

    s = Sizes(args.devices, args.tokens, args.hidden, args.inner, args.experts, args.top_k)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: s.ranks]), ("ep",))
    has_ragged = args.platform == "cuda" and s.ranks > 1
    ragged = (args.exchange or ("ragged" if has_ragged else "padded")) == "ragged"
    group = epic.jax.open(mesh, "ep", max_tokens=s.tokens, max_row_bytes=4 * s.hidden)
    data = inputs(s, mesh, args.dtype)
    ways, runs = {}, {}
    for way, steps in (("EPIC", epic_steps(s, group)), ("JAX", own_steps(s, ragged))):
        ways[way] = programs(mesh, steps)
        rows, plan, weights = jax.jit(mapped(mesh, steps["prepare"], P("ep")))(*data["both"])
        mine = {**data, "combine": (rows, weights, plan)}
        for key, program in ways[way].items():
            if key[0] != "both":  # this run was only for the comparison
                runs[way, *key] = partial(program, *mine[key[0]])
    limit = 1e-4 if args.dtype == "float32" else 5e-2
    for key in ways["EPIC"]:
        if key[0] in ("both", "layer"):  # the slots have another order
            error = miss(*(way[key](*data[key[0]]) for way in ways.values()))
            if not error < limit:
                print(f"{' '.join(key)}: the two ways differ by {error:.1e}")
                return 1
    every = programs(mesh, {"layer": capacity_layer(s, s.tokens)})
    for key, program in every.items():
        error = miss(ways["EPIC"][key](*data["layer"]), program(*data["layer"]))
        if not error < limit:
            print(f"{' '.join(key)}: blocks with all places differ by {error:.1e}")
            return 1
    blocks = capacity_ways(s, args.factors)
    for way, steps in blocks.items():
        for key, program in programs(mesh, steps).items():
            runs[way, *key] = partial(program, *data["layer"])
    times = medians(runs, args.rounds)
    epic.jax.close(group)
    own = "ragged_all_to_all" if ragged else "all_to_all"
    kind = jax.devices()[0].device_kind
    print(f"jax {jax.__version__}, {s.ranks} x {kind}; {args.tokens} tokens a device, {args.dtype}")
    print(f"hidden {s.hidden}, inner {s.inner}, top-{s.top_k} of {s.experts}; median ms")
    other = own + " + ragged_dot"
    print(
        f"{'':29}{'EPIC':>10}{'other':>10}{'ratio':>7}{'cores: EPIC':>13}{'other':>10}{'ratio':>7}"
    )
    for key in ways["EPIC"]:
        if key[0] != "both":
            ours, theirs = (times[way, *key] for way in ways)
            line(", ".join(key), ours, theirs, other)
    for way in blocks:
        for pass_ in ("forward", "forward and backward"):
            ours, theirs = (times[name, "layer", pass_] for name in ("EPIC", way))
            line(f"layer, {pass_}", ours, theirs, way)
    return 0


def line(what: str, a: Time, b: Time, way: str) -> None:
    """Print a row of the table."""
    text = f"{a.wall:10.2f}{b.wall:10.2f}{b.wall / a.wall:7.2f}"
    text += f"{a.cores:13.2f}{b.cores:10.2f}{b.cores / max(a.cores, 1e-3):7.2f}"
    print(f"{what:29}{text}  {way}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
