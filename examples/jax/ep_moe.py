# SPDX-License-Identifier: Apache-2.0
"""Stacked Mixture-of-Experts layers on a dp x ep mesh, with gradients, on the CPU.

python examples/jax/ep_moe.py                             4 devices of one process
python examples/jax/ep_moe.py --processes 4               4 processes, one device each
python examples/jax/ep_moe.py --check --ep 4              compare with numpy, exit 1 on a miss
"""

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Params = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model."""

    batch: int = 8
    length: int = 16
    hidden: int = 32
    inner: int = 48
    experts: int = 8
    top_k: int = 2
    layers: int = 3


def arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--devices", type=int, default=4, help="devices of all processes together")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--ep", type=int, default=2, help="ranks that share the experts")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="compare with float64 numpy")
    parser.add_argument("--process", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def launch(args: argparse.Namespace) -> int:
    """Start the processes; return 0 if all succeed."""
    with socket.socket() as holder:  # keeps the system from using the port for a connection
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # lets a process listen too
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        words = [sys.executable, *sys.argv, "--port", str(port), "--process"]
        running = [subprocess.Popen([*words, str(i)]) for i in range(args.processes)]
        return max(abs(process.wait()) for process in running)


# ----------------------------------------------------------------------------- numpy ----


def initial(sizes: Sizes) -> tuple[list[Params], Any, Any]:
    """Return the weights of every layer, x, and the cotangent of the output."""
    import numpy as np

    rng = np.random.default_rng(0)
    h, i, e = sizes.hidden, sizes.inner, sizes.experts
    shapes = {"w_gate": (h, e), "w_gate_up": (e, h, 2 * i), "w_down": (e, i, h)}
    layers = [
        {n: (rng.normal(size=s) / s[-2] ** 0.5).astype(np.float32) for n, s in shapes.items()}
        for _ in range(sizes.layers)
    ]
    x, ct = rng.normal(size=(2, sizes.batch, sizes.length, h)).astype(np.float32)
    return layers, x, ct


def numpy_layer(sizes: Sizes, w: Params, x: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return out of tokens x, and the function from d_out to (d_x, d_w)."""
    import numpy as np

    z = x @ w["w_gate"]
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    ids = np.argsort(-z, axis=1, kind="stable")[:, : sizes.top_k]
    out, saved = np.zeros_like(x), []
    for e in range(sizes.experts):
        t = np.nonzero((ids == e).any(axis=1))[0]
        gate, up = np.split(x[t] @ w["w_gate_up"][e], 2, axis=1)
        s = 1 / (1 + np.exp(-gate))
        y = (gate * s * up) @ w["w_down"][e]
        out[t] += p[t, e][:, None] * y
        saved.append((t, gate, up, s, y))

    def pull(d_out: Any) -> Any:
        d_x, d_p = np.zeros_like(x), np.zeros_like(p)
        d = {name: np.zeros_like(v) for name, v in w.items()}
        for e, (t, gate, up, s, y) in enumerate(saved):
            d_p[t, e] = (d_out[t] * y).sum(axis=1)
            d_y = p[t, e][:, None] * d_out[t]
            d["w_down"][e] = (gate * s * up).T @ d_y
            d_a = d_y @ w["w_down"][e].T
            d_z = np.concatenate([d_a * up * s * (1 + gate * (1 - s)), d_a * gate * s], axis=1)
            d["w_gate_up"][e] = x[t].T @ d_z
            d_x[t] += d_z @ w["w_gate_up"][e].T
        d_z = p * (d_p - (d_p * p).sum(axis=1, keepdims=True))
        d["w_gate"] = x.T @ d_z
        return d_x + d_z @ w["w_gate"].T, d

    return out, pull


def numpy_model(sizes: Sizes, layers: list[Params], x: Any, ct: Any) -> tuple[Any, Any, Any]:
    """Return output and gradients of x and the weights, in float64.  Each layer is residual."""
    import numpy as np

    shape, pulls = x.shape, []
    h, d_h = (np.asarray(v, np.float64).reshape(-1, sizes.hidden) for v in (x, ct))
    for w in layers:
        out, pull = numpy_layer(sizes, {n: v.astype(np.float64) for n, v in w.items()}, h)
        h = h + out
        pulls.append(pull)
    grads: list[Params] = []
    for pull in reversed(pulls):
        d_x, d_w = pull(d_h)
        d_h = d_h + d_x
        grads.insert(0, d_w)
    return h.reshape(shape), d_h.reshape(shape), grads


# ------------------------------------------------------------------------------- JAX ----


def make_step(sizes: Sizes, mesh: Any, group: Any) -> Callable[..., Any]:
    """Return a jitted function of (layers, x, ct): output and gradients of x and the weights."""
    import jax

    import epic.jax

    options = epic.jax.Moe(
        epic.jax.Layer(sizes.experts, sizes.top_k),
        epic.jax.Router(sizes.experts, sizes.top_k),
        epic.jax.Experts(sizes.experts // group.num_ranks, sizes.hidden, sizes.inner),
    )

    def model(layers: list[Params], x: Any) -> Any:
        for w in layers:
            weights = epic.jax.MoeWeights(**w)
            x = x + epic.jax.sharded.moe(mesh, group, options, x, weights).out
        return x

    def step(layers: list[Params], x: Any, ct: Any) -> Any:
        out, pull = jax.vjp(model, layers, x)
        d_layers, d_x = pull(ct)
        return out, d_x, d_layers

    return jax.jit(step)


def place(mesh: Any, value: Any, *axes: Any) -> Any:
    """Return a global array from an array that every process has."""
    import jax

    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def miss(got: Any, wanted: Any) -> float:
    """Return the largest relative error of all arrays."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        whole = np.asarray(multihost_utils.process_allgather(a, tiled=True), np.float64)
        worst = max(worst, float(np.abs(whole - b).max() / np.abs(b).max()))
    return worst


def run(args: argparse.Namespace) -> int:
    """Run one process."""
    import jax
    import numpy as np

    import epic.jax

    if args.processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{args.port}", args.processes, args.process)
    sizes = Sizes()
    grid = np.array(jax.devices()[: args.devices]).reshape(-1, args.ep)
    mesh = jax.sharding.Mesh(grid, ("dp", "ep"))
    layers, x, ct = initial(sizes)
    tokens = sizes.batch * sizes.length // args.devices
    with epic.jax.open(mesh, "ep", max_tokens=tokens, max_row_bytes=4 * sizes.hidden) as group:
        step = make_step(sizes, mesh, group)
        placed = [
            {n: place(mesh, v, *(["ep"] if n != "w_gate" else [])) for n, v in w.items()}
            for w in layers
        ]
        rows = [place(mesh, v, ("dp", "ep")) for v in (x, ct)]
        got = jax.block_until_ready(step(placed, *rows))
        start = time.perf_counter()
        for _ in range(args.steps):
            jax.block_until_ready(step(placed, *rows))
        ms = (time.perf_counter() - start) / args.steps * 1e3
        error = miss(got, numpy_model(sizes, layers, x, ct)) if args.check else 0.0
    if args.process == 0:
        shape = f"{args.devices // args.ep} x {args.ep} devices, {args.processes} process(es)"
        print(f"{shape}: forward and backward of {sizes.layers} layers in {ms:.1f} ms")
        if args.check:
            print(f"largest relative error {error:.1e}: {'right' if error < 1e-5 else 'WRONG'}")
    return int(error >= 1e-5)


def main() -> int:
    """Run as the launcher, or as one of its processes."""
    args = arguments()
    if args.processes > 1 and not args.port:
        return launch(args)
    count = args.devices // args.processes
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
