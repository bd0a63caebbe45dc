# SPDX-License-Identifier: Apache-2.0
"""Checks the layer on GPUs against float64.

Prints a table of relative errors, and whether repeated runs had the same bits. If the core supports
the layer on GPUs, it must be one call.

layer.py runs one process with all GPUs. layer.py PROCESS PROCESSES PORT runs one of several
processes, each with a GPU of its own.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpu_world
import jax
import jax.numpy as jnp
import numpy as np
from gpu_world import gpu_mesh, gpus, put, rank_counts, say, whole
from jax.sharding import PartitionSpec as P

import cases
import epic.jax
from epic.jax.placement import EXPERT_WEIGHTS
from reference import mlp, mlp_backward, relative

ROUNDED = 0.25  # factor for the weights of cases, whose scale is meant for rows of 16 elements
AGAIN = 20
EXACT = ("w_gate", "bias")  # float32 whatever the dtype of the rows is
BOUNDS = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}
SIZES = {**gpu_world.SIZES, "max_tokens": 256, "max_row_bytes": 4096}
SIXTEEN = np.array([0, 3, 1, 2, 3, 4, 5, 3, 6, 7, 0, 0, 1, 2, 5, 6], np.int32)
FULL = {**cases.CASES["normalized"], "biases": True}


@dataclass(frozen=True)
class Case:
    """A layer: a case of cases.py, further arguments of moe, and whether it must be one call."""

    case: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)
    one_call: bool = True
    dtype: str = "bfloat16"
    bound: float = 0.0
    table: np.ndarray | None = None
    quantize: str | None = None


def all_cases() -> dict[str, Case]:
    """Return all cases by name. A layer that the core does not support is composed of several
    calls."""
    found = {n: Case(c) for n, c in cases.CASES.items()}
    found["float32"] = Case(FULL, dtype="float32")
    found["float16"] = Case(FULL, dtype="float16")
    found["aligned"] = Case({**FULL, "alignment": 128})
    found["mask"] = Case(FULL, {"token_mask": True}, False)
    found["replicas"] = Case(FULL, {"logical_of_expert": SIXTEEN}, table=SIXTEEN)
    found["quantized"] = Case(FULL, {}, False, bound=0.15, quantize="1x128")
    found["owners"] = Case(FULL, {"rank_of_expert": True})
    found["ragged_dot"] = Case(FULL, {"grouped_gemm": jax.lax.ragged_dot}, False, bound=5e-2)
    return found


def options(case: Case, ranks: int) -> epic.Moe:
    """Return the options of the case."""
    wish = cases.options(case.case, ranks)
    if case.table is not None:
        count = len(case.table)
        layer = replace(wish.layer, num_experts=count, num_logical=cases.EXPERTS)
        wish = replace(wish, layer=layer, experts=replace(wish.experts, num_local_experts=0))
    return replace(wish, quantize=case.quantize)


def rounded(values: Any, dtype: str) -> np.ndarray:
    """Return numbers that the dtype can represent, as float32."""
    return np.array(jnp.asarray(values, dtype), np.float32)


def make_cases_large(dtype: str) -> None:
    """Use sizes for tensor cores, and numbers that the dtype can represent."""
    cases.LENGTH, cases.HIDDEN, cases.INNER = 32, 256, 128
    of_weights, of_arrays = ORIGINAL

    def weights(case: dict[str, Any]) -> dict[str, np.ndarray]:
        found = {n: ROUNDED * v for n, v in of_weights(case).items()}
        return {n: v if n in EXACT else rounded(v, dtype) for n, v in found.items()}

    def arrays() -> tuple[np.ndarray, np.ndarray]:
        x, ct = of_arrays()
        return rounded(x, dtype), rounded(ct, dtype)

    cases.weights, cases.arrays = weights, arrays


ORIGINAL: tuple[Callable[..., Any], Callable[..., Any]] = (cases.weights, cases.arrays)


def more_of(case: Case, ranks: int) -> dict[str, Any]:
    """Return further arguments of moe."""
    more = {**cases.tables(case.case), **case.more}
    if more.get("token_mask") is True:
        more["token_mask"] = np.ones((cases.BATCH, cases.LENGTH), bool)
    if more.get("rank_of_expert") is True:
        more["rank_of_expert"] = np.arange(cases.EXPERTS, dtype=np.int32) * ranks // cases.EXPERTS
    return more


def arguments(mesh: Any, case: Case) -> tuple[Any, ...]:
    """Return x, weights and output gradient on the mesh."""
    x, ct = cases.arrays()
    w = cases.weights(case.case)
    if case.table is not None:
        w = {n: v[case.table] if n in EXPERT_WEIGHTS else v for n, v in w.items()}
    typed = {n: v if n in EXACT else np.asarray(jnp.asarray(v, case.dtype)) for n, v in w.items()}
    x, ct = (put(mesh, np.asarray(jnp.asarray(v, case.dtype))) for v in (x, ct))
    return x, {n: put(mesh, v, P()) for n, v in typed.items()}, ct


def step(mesh: Any, group: Any, case: Case) -> Any:
    """Return a jitted function of x, weights and ct, which returns out, loss, d_x and d_weights."""
    wish, more = options(case, group.num_ranks), more_of(case, group.num_ranks)

    def loss_of(x: Any, w: Any, ct: Any) -> Any:
        found = epic.jax.sharded.moe(mesh, group, wish, x, epic.jax.MoeWeights(**w), **more)
        return (found.out.astype(jnp.float32) * ct).sum() + found.loss, found

    def run(x: Any, w: Any, ct: Any) -> Any:
        grad = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)
        (_, found), (d_x, d_w) = grad(x, w, ct)
        return found.out, found.loss, d_x, d_w

    return jax.jit(run)


def errors(case: Case, got: Any, groups: int) -> dict[str, float]:
    """Return the relative error of each array."""
    out, loss, d_x, d_w = cases.true_step(case.case, groups)
    if case.table is not None:
        d_w = {n: d[case.table] if n in EXPERT_WEIGHTS else d for n, d in d_w.items()}
    found = {"out": relative(got[0], out), "d_x": relative(got[2], d_x)}
    found["loss"] = abs(float(got[1]) - loss) / max(abs(loss), 1e-3)
    return found | {n: relative(got[3][n], d) for n, d in d_w.items()}


def run_layer(name: str, case: Case, ep: int) -> bool:
    """Run a layer and print a line of the table."""
    make_cases_large(case.dtype)
    mesh = gpu_mesh(ep)
    with epic.jax.open(mesh, "ep", **SIZES) as group, jax.default_matmul_precision("highest"):
        args, run = arguments(mesh, case), step(mesh, group, case)
        text = run.lower(*args).as_text()
        one_call = "@epic_moe" in text and "@epic_combine" not in text
        first = run(*args)
        last = first
        for _ in range(AGAIN):
            last = run(*args)
        same = jax.tree.all(
            jax.tree.map(lambda a, b: np.array_equal(whole(a), whole(b)), first, last)
        )
        found = errors(case, jax.tree.map(whole, first), mesh.shape["dp"])
        epic.jax.check(group)
    worst = max((e, n) for n, e in found.items() if n not in ("out", "d_x"))
    good = max(found.values()) < (case.bound or BOUNDS[case.dtype]) and one_call == case.one_call
    good = good and (same or not case.one_call)
    how = "one call" if one_call else "steps"
    say(
        f"{'ok' if good else 'FAILED':6} {ep:2} {name:12} {case.dtype:8} {how:8} "
        f"{found['out']:8.1e} {found['d_x']:8.1e} {worst[0]:8.1e} {worst[1]:14} "
        f"{'same' if same else 'OTHER'} bits"
    )
    return good


def run_groups(dtype: str) -> bool:
    """Check that groups of 1, 2, 4 and 8 GPUs compute the same bits in tree order."""
    case = Case(cases.CASES["tree"], dtype=dtype)
    make_cases_large(dtype)
    first, good = None, True
    for ranks in (1, 2, 4, 8):
        if ranks > len(gpus()):
            break
        mesh = jax.sharding.Mesh(np.array(gpus()[:ranks]).reshape(1, ranks), ("dp", "ep"))
        with epic.jax.open(mesh, "ep", name=f"{ranks} of {dtype}", **SIZES) as group:
            args, run = arguments(mesh, case), step(mesh, group, case)
            out, loss, d_x, d_w = jax.block_until_ready(run(*args))
        found = {"out": out, "loss": loss, "d_x": d_x, **d_w}
        bits = {name: whole(value).tobytes() for name, value in found.items()}
        first = first or bits
        others = [name for name in bits if bits[name] != first[name]]
        good = good and not others
        say(f"{'FAILED' if others else 'ok':6} {ranks:2} same bits    {dtype:8}", *others)
    return good


def run_experts(dtype: str) -> bool:
    """Check epic.jax.experts alone on one GPU: three slabs, one of them empty, padding, and a tail
    with arbitrary values."""
    hidden, inner, counts, tokens = 256, 128, (128, 0, 256), (100, 0, 256)
    slots = sum(counts) + 96
    rng = np.random.default_rng(3)
    shapes: dict[str, tuple[int, ...]]
    shapes = {"w_gate_up": (3, hidden, 2 * inner), "w_down": (3, inner, hidden)}
    shapes |= {"b_gate_up": (3, 2 * inner), "b_down": (3, hidden)}
    w = {n: rounded(0.1 * rng.normal(size=s), dtype) for n, s in shapes.items()}
    x, ct = (rounded(rng.normal(size=(slots, hidden)), dtype) for _ in range(2))
    live = np.zeros(slots, bool)
    true_y, true_x = np.zeros((slots, hidden)), np.zeros((slots, hidden))
    true_w = {n: np.zeros(s) for n, s in shapes.items()}
    wide = {n: v.astype(np.float64) for n, v in w.items()}
    for e, first in enumerate(np.cumsum((0, *counts[:-1]))):
        part = slice(first, first + tokens[e])
        live[part] = True
        true_y[part], kept = mlp(x[part].astype(np.float64), wide, e)
        true_x[part] = mlp_backward(wide, true_w, e, kept, ct[part].astype(np.float64))
    x[: sum(counts)] *= live[: sum(counts), None]
    ct[: sum(counts)] *= live[: sum(counts), None]
    x[sum(counts) :] = ct[sum(counts) :] = np.nan
    wish = epic.jax.Experts(3, hidden, inner)
    device = jax.local_devices(backend="gpu")[0]

    def both(group: Any) -> Any:
        def run(x: Any, w: Any, ct: Any) -> Any:
            own = epic.jax.ExpertWeights(**w)
            rows, live = jnp.array(counts, jnp.int32), jnp.array(tokens, jnp.int32)
            y, pull = jax.vjp(
                lambda x, own: epic.jax.experts(wish, x, rows, live, own, group=group), x, own
            )
            return y, *pull(ct)

        return jax.jit(run)

    mesh = jax.sharding.Mesh(np.array([device]), ("ep",))
    good = True
    with epic.jax.open(mesh, "ep", name="experts", **SIZES) as group:
        args = jax.device_put(
            jax.tree.map(lambda v: np.asarray(jnp.asarray(v, dtype)), (x, w, ct)), device
        )
        for known in (None, group):
            y, d_x, d_w = jax.tree.map(np.asarray, both(known)(*args))
            found = {"y": relative(y, true_y), "d_x": relative(d_x, true_x)}
            found |= {n: relative(getattr(d_w, n), d) for n, d in true_w.items()}
            clean = not np.any(y[~live]) and not np.any(d_x[~live])
            worst = max((e, n) for n, e in found.items())
            fine = worst[0] < BOUNDS[dtype] and clean
            say(
                f"{'ok' if fine else 'FAILED':6}  - {'experts':12} {dtype:8} "
                f"{'group' if known else 'no group':8} worst {worst[0]:8.1e} {worst[1]:10} "
                f"{'zeros' if clean else 'NOT ZEROS'} where no token is"
            )
            good = good and fine
        epic.jax.check(group)
    return good


def main(words: list[str]) -> int:
    """Print the table; return 1 if a line of it failed."""
    if words:
        process, processes, port = map(int, words)
        jax.distributed.initialize(
            f"127.0.0.1:{port}", processes, process, local_device_ids=[process]
        )
    say("       ep layer        dtype    by       out      d_x      worst of loss and d_w")
    lines = [run_layer(n, c, ep) for ep in rank_counts() for n, c in all_cases().items()]
    if not words:
        lines += [run_groups(dtype) for dtype in BOUNDS]
        lines += [run_experts(dtype) for dtype in BOUNDS]
    good = all(lines)
    say("right" if good else "wrong")
    sys.stdout.flush()
    os._exit(0 if good else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
