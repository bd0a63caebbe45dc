# SPDX-License-Identifier: Apache-2.0
"""Checks on GPUs that layers with invariant=True have equal bits on 1, 2, 4 and 8 ranks.

One rank computes 4096 tokens. Then groups of each size compute random selections of them, with 1
to 4096 tokens on each rank and random numbers of SMs. The rows of a token in the output and in the
gradient of x must always have the same bits. So must the loss and all gradients of the 4096 tokens,
on each number of ranks.

invariant.py [KIND...] runs one process with all GPUs. KIND: bfloat16, float16, float32, e4m3
(experts in e4m3, rows in bfloat16).

invariant.py PROCESS PROCESSES PORT [KIND...] runs one of several processes, each with a GPU of its
own. Process 0 computes the group of one rank and compares.
"""

import hashlib
import os
import sys
import time
from typing import Any

import gpu_world  # before JAX, because it selects JAX's platforms
from gpu_world import numbers, put, say, whole

# isort: split
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import epic.jax

MOST, DECODE = 4096, 128  # largest number of tokens of a rank, for training and for decoding
COUNTS = (1, 2, 7, 8, 33, 128, 129, 512, 513, 1025, 2048, 4096)
EXPERTS, TOP_K, HIDDEN, INNER = 32, 4, 1024, 512
KINDS = ("bfloat16", "float16", "float32", "e4m3")
SMS = 132
Arrays = dict[str, np.ndarray]


def options_of(kind: str, coeff: float) -> epic.jax.Moe:
    """Return a layer with a shared expert and a zero-expert; coeff: that of both losses."""
    return epic.jax.Moe.of(
        num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, inner=INNER, normalize="sum",
        zero_experts=1, shared=epic.jax.Experts(1, HIDDEN, INNER), invariant=True,
        balance_coeff=coeff, z_coeff=coeff, weight_type="e4m3" if kind == "e4m3" else None,
    )  # fmt: skip


def weights_of(kind: str) -> dict[str, Any]:
    """Return random weights of each kind that a layer can have."""
    shapes: dict[str, tuple[int, ...]] = {
        "w_gate_up": (EXPERTS, HIDDEN, 2 * INNER),
        "w_down": (EXPERTS, INNER, HIDDEN),
        "b_gate_up": (EXPERTS, 2 * INNER),
        "b_down": (EXPERTS, HIDDEN),
        "shared_gate_up": (1, HIDDEN, 2 * INNER),
        "shared_down": (1, INNER, HIDDEN),
    }
    found = {n: as_kind(kind, numbers(i, *s) / 30) for i, (n, s) in enumerate(shapes.items())}
    router = {"w_gate": (HIDDEN, EXPERTS + 1), "b_gate": (EXPERTS + 1,)}
    return found | {n: numbers(20 + i, *s) / 30 for i, (n, s) in enumerate(router.items())}


def as_kind(kind: str, values: np.ndarray) -> np.ndarray:
    """Return the numbers in the dtype of the rows."""
    return np.asarray(jnp.asarray(values, "bfloat16" if kind == "e4m3" else kind))


def bits_of(results: dict[str, Any]) -> Arrays:
    """Return all elements of global arrays as bytes, one row for each index of the first axis."""
    arrays = {name: whole(value) for name, value in results.items()}
    return {n: np.ascontiguousarray(a).reshape(len(a) if a.ndim else 1, -1).view(np.uint8)
            for n, a in arrays.items()}  # fmt: skip


class Layer:
    """The layer of one kind, on the first `ranks` GPUs."""

    def __init__(self, kind: str, ranks: int, most: int) -> None:
        self.kind, self.most = kind, most
        self.mesh = Mesh(np.array(gpu_world.gpus()[:ranks]), ("ep",))
        sizes = {**gpu_world.SIZES, "max_tokens": most, "max_row_bytes": 4 * HIDDEN}
        name = f"{kind} {ranks} {most}"
        self.group = epic.jax.open(self.mesh, "ep", name=name, **{**sizes, "timeout_ms": 60000})
        self.weights = {n: put(self.mesh, w, P()) for n, w in weights_of(kind).items()}

    def run(self, x: np.ndarray, ct: np.ndarray, trains: bool, max_sms: int = 0) -> dict[str, Any]:
        """Return output and gradient of x; trains: with losses, also loss and all gradients."""
        options = options_of(self.kind, 0.01 if trains else 0.0)

        def loss_of(x: Any, w: dict[str, Any], ct: Any) -> Any:
            weights = epic.jax.MoeWeights(**w)
            found = epic.jax.sharded.moe(
                self.mesh, self.group, options, x, weights, max_sms=max_sms
            )
            total = (found.out.astype(jnp.float32) * ct.astype(jnp.float32)).sum()
            return total + found.loss, (found.out, found.loss)

        @jax.jit
        def step(x: Any, w: dict[str, Any], ct: Any) -> dict[str, Any]:
            grad = jax.grad(loss_of, argnums=(0, 1) if trains else 0, has_aux=True)
            gradients, (out, loss) = grad(x, w, ct)
            if not trains:
                return {"out": out, "d_x": gradients}
            return {"out": out, "loss": loss, "d_x": gradients[0], **gradients[1]}

        rows = (put(self.mesh, v, P("ep")) for v in (x, ct))
        return step(next(rows), self.weights, next(rows))


class Check:
    """Compares all groups of one kind with the group of one rank."""

    def __init__(self, kind: str) -> None:
        self.kind, self.good, self.programs = kind, True, 0
        self.x, self.ct = (as_kind(kind, numbers(seed, MOST, HIDDEN)) for seed in (30, 31))
        self.rows: Arrays = {}
        self.whole: Arrays = {}

    def compare(self, ranks: int, what: str, got: Arrays, wanted: Arrays) -> None:
        """Print which arrays have other bits, and in how many rows; nothing without a reference."""
        for name in got.keys() & wanted.keys():
            is_other = got[name] != wanted[name]
            if is_other.any():
                self.good = False
                first = tuple(np.argwhere(is_other)[0])
                say(f"FAILED {self.kind}, {ranks} ranks, {what}: {is_other.any(axis=1).sum()} rows "
                    f"({is_other.sum()} bytes) of {name} differ; byte {first[1]} of row {first[0]} "
                    f"is {got[name][first]:#x} instead of {wanted[name][first]:#x}")  # fmt: skip

    def run_all(self, layer: Layer, ranks: int) -> None:
        """Compute all tokens, without losses, and with losses and all gradients."""
        for trains, wanted in ((False, self.rows), (True, self.whole)):
            got = bits_of(layer.run(self.x, self.ct, trains))
            if ranks == 1:
                wanted.update(got)
            assert all(value.any() for value in got.values())
            self.compare(ranks, f"{MOST} tokens", got, wanted)

    def run_selections(self, layer: Layer, ranks: int) -> None:
        """Compute random selections of the tokens, in random order."""
        for count in (c for c in COUNTS if c <= layer.most):
            rng = np.random.default_rng((ranks, count, layer.most))
            drawn, sms = rng.integers(0, MOST, count * ranks), int(rng.integers(0, SMS + 1))
            got = bits_of(layer.run(self.x[drawn], self.ct[drawn], False, sms))
            wanted = {name: rows[drawn] for name, rows in self.rows.items()}
            self.compare(ranks, f"{count} tokens a rank, {sms} SMs", got, wanted)
            self.programs += 1

    def run_kit(self, layer: Layer, ranks: int) -> None:
        """Compare the stages of the layer."""
        report = epic.jax.check_invariance(
            layer.mesh, layer.group, options_of(self.kind, 0.0),
            epic.jax.MoeWeights(**layer.weights), dtype=self.x.dtype,
        )  # fmt: skip
        print_of = {"fingerprint": np.frombuffer(report.fingerprint.encode(), np.uint8)[None]}
        if ranks == 1:
            self.whole |= print_of
        self.compare(ranks, "check_invariance", print_of, self.whole)
        if not report.is_invariant:
            self.good = False
            say(f"FAILED {self.kind}, {ranks} ranks: {report.first}")

    def run(self) -> bool:
        """Run all groups and print a line for each."""
        gpus = gpu_world.gpus()
        for ranks in (n for n in (1, 2, 4, 8) if n <= len(gpus)):
            begin, before = time.monotonic(), self.programs
            multihost_utils.sync_global_devices(f"{self.kind} {ranks}")
            if all(d.process_index != jax.process_index() for d in gpus[:ranks]):
                continue  # this process has no rank of the group
            for most in (MOST, DECODE):
                layer = Layer(self.kind, ranks, most)
                if most == MOST:
                    self.run_all(layer, ranks)
                self.run_selections(layer, ranks)
                if most == DECODE and self.kind != "e4m3":
                    self.run_kit(layer, ranks)
                epic.jax.check(layer.group)
                epic.jax.close(layer.group)
            took, count = time.monotonic() - begin, self.programs - before
            verdict = "ok" if self.good else "FAILED"
            say(f"{verdict:6} {self.kind:8} {ranks} ranks, {count} selections, {took:.0f} s")
        if self.rows:
            bits = b"".join(a.tobytes() for a in (*self.rows.values(), *self.whole.values()))
            say(f"       {self.kind:8} hash {hashlib.sha256(bits).hexdigest()[:16]}")
        return self.good


def main(words: list[str]) -> int:
    """Check the named kinds, or all."""
    if words and words[0].isdigit():
        process, processes, port = map(int, words[:3])
        words = words[3:]
        jax.distributed.initialize(
            f"127.0.0.1:{port}", processes, process, local_device_ids=[process]
        )
    results = [Check(kind).run() for kind in words or KINDS]
    multihost_utils.sync_global_devices("end")  # process 0 must not exit before the others
    say("right" if all(results) else "wrong")
    sys.stdout.flush()
    os._exit(0 if all(results) else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
