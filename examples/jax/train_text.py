# SPDX-License-Identifier: Apache-2.0
"""A small Mixture-of-Experts transformer learns bytes of text, its experts spread over processes.

python examples/jax/train_text.py                        4 processes, 200 steps, a progress bar
python examples/jax/train_text.py --check                the same losses as one process, else exit 1
python examples/jax/train_text.py --processes 2 book.txt --picture load.png
"""

import argparse
import math
import os
import socket
import struct
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENDINGS = {".md", ".txt", ".c", ".h", ".cu", ".py", ".sh"}
TOLERANCE = 1e-4  # of a loss, against one process
Params = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Of the model and of a step."""

    batch: int = 16
    length: int = 64
    hidden: int = 64
    heads: int = 4
    inner: int = 128
    experts: int = 8
    top_k: int = 2
    layers: int = 2


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("text", nargs="*", type=Path, help="files or folders; none: this project")
    parser.add_argument("--processes", type=int, default=4, help="that share the experts")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--picture", type=Path, default=Path("build/train_text_jax.png"))
    parser.add_argument("--float64", action="store_true", help="compute in float64, not float32")
    parser.add_argument("--check", action="store_true", help="compare with one process, in float64")
    parser.add_argument("--process", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--losses", type=Path, help="write the loss of each step to this file")
    return parser.parse_args()


# -------------------------------------------------------------------------- launching ----


def launch(words: list[str], processes: int) -> int:
    """Starts the processes; 0 if all went well.  The end of one, or Ctrl-C, ends all."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, *words, "--processes", str(processes)]
    command += ["--port", str(port), "--process"]
    running = [subprocess.Popen([*command, str(i)]) for i in range(processes)]
    code = 0
    try:
        while None in (codes := [process.poll() for process in running]):
            code = next((c for c in codes if c), 0)
            if code:
                time.sleep(3)  # the others say themselves who is missing
                break
            time.sleep(0.05)
    except KeyboardInterrupt:
        print("\nended by Ctrl-C", file=sys.stderr)
        code = 130
    finally:
        for process in running:
            process.kill()
            process.wait()
    return code or max(abs(process.returncode) for process in running)


def check(words: list[str], processes: int) -> int:
    """Trains with all processes, then with one; 1 if the losses differ.  In float64: XLA adds the
    dense gradients of several devices in another order, and float32's rounding of that is enough,
    sooner or later, to send a token that is between two experts to the other: the curves part."""
    curves = []
    for count in (processes, 1):
        file = ROOT / "build" / f"train_text_jax_{count}.txt"
        file.parent.mkdir(exist_ok=True)
        print(f"-- {count} process(es)", flush=True)
        code = launch([*words, "--float64", "--losses", str(file)], count)
        if code:
            return code
        curves.append([float(line) for line in file.read_text().split()])
    worst = max(abs(a - b) / abs(b) for a, b in zip(*curves, strict=True))
    verdict = "right" if worst < TOLERANCE else "WRONG"
    print(f"largest relative difference of {len(curves[0])} losses {worst:.1e}: {verdict}")
    return int(not worst < TOLERANCE)


# ------------------------------------------------------------------------------- text ----


def read_text(paths: list[Path]) -> Any:
    """All bytes of the files, in the order of their names."""
    import numpy as np

    roots = paths or [ROOT / name for name in ("README.md", "docs", "include", "src")]
    files = [p for root in roots for p in (sorted(root.rglob("*")) if root.is_dir() else [root])]
    chosen = [p for p in files if p.is_file() and (p.suffix in ENDINGS or p in paths)]
    if not chosen:
        raise SystemExit(f"no text in {', '.join(map(str, roots))}")
    return np.frombuffer(b"".join(p.read_bytes() for p in chosen), np.uint8)


def batch_of(text: Any, sizes: Sizes, step: int, held_out: bool = False) -> Any:
    """[batch, length + 1] bytes: a function of the step; the last tenth is held out."""
    import numpy as np

    border = len(text) * 9 // 10
    low, high = (border, len(text)) if held_out else (0, border)
    starts = np.random.default_rng([step, held_out]).integers(
        low, high - sizes.length - 1, size=sizes.batch
    )
    return np.stack([text[s : s + sizes.length + 1] for s in starts]).astype(np.int32)


# ------------------------------------------------------------------------------ model ----


def initial(sizes: Sizes) -> Params:
    """Parameters, the same everywhere."""
    import numpy as np

    rng = np.random.default_rng(0)
    h, e, i = sizes.hidden, sizes.experts, sizes.inner

    def normal(*shape: int) -> Any:
        return (rng.normal(size=shape) / math.sqrt(shape[-2])).astype(np.float32)

    def layer() -> Params:
        moe = {"w_gate": normal(h, e), "w_gate_up": normal(e, h, 2 * i), "w_down": normal(e, i, h)}
        return {"qkv": normal(h, 3 * h), "out": normal(h, h), "moe": moe}

    layers = [layer() for _ in range(sizes.layers)]
    return {
        "embed": normal(256, h) * 4,
        "place": normal(sizes.length, h),
        "layers": layers,
        "head": normal(h, 256),
    }


def norm(x: Any) -> Any:
    """RMS norm without a scale."""
    import jax
    import jax.numpy as jnp

    return x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 1e-6)


def attention(sizes: Sizes, w: Params, x: Any) -> Any:
    """Causal self-attention."""
    import jax
    import jax.numpy as jnp

    heads = (*x.shape[:2], sizes.heads, sizes.hidden // sizes.heads)
    q, k, v = (part.reshape(heads) for part in jnp.split(norm(x) @ w["qkv"], 3, axis=-1))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ w["out"]


def make_loss(sizes: Sizes, mesh: Any, group: Any) -> Any:
    """A function (params, text [batch, length + 1]) -> loss, (cross entropy, load [layers, E])."""
    import jax
    import jax.numpy as jnp

    import epic.jax

    options = epic.jax.Moe(
        epic.jax.Layer(sizes.experts, sizes.top_k, sum_order="tree", leaves=sizes.experts),
        epic.jax.Router(sizes.experts, sizes.top_k, normalize="sum"),
        epic.jax.Experts(sizes.experts // group.num_ranks, sizes.hidden, sizes.inner),
        balance_coeff=0.02,
    )

    def loss_of(params: Params, text: Any) -> Any:
        x = params["embed"][text[:, :-1]] + params["place"]
        extra, loads = jnp.zeros(()), []
        for w in params["layers"]:
            x = x + attention(sizes, w, x)
            weights = epic.jax.MoeWeights(**w["moe"])
            moe = epic.jax.sharded.moe(mesh, group, options, norm(x), weights)
            x, extra = x + moe.out, extra + moe.loss
            loads.append(moe.load)
        logits = jax.nn.log_softmax(norm(x) @ params["head"])
        entropy = -jnp.take_along_axis(logits, text[:, 1:, None], axis=-1).mean()
        return entropy + extra, (entropy, jnp.stack(loads))

    return loss_of


# --------------------------------------------------------------------------- training ----


def place(mesh: Any, value: Any, *axes: Any) -> Any:
    """A global array of which every process knows all."""
    import jax

    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def place_params(mesh: Any, params: Params) -> Params:
    """Experts over the group, everything else on every device."""
    import jax

    def one(path: Any, value: Any) -> Any:
        return place(mesh, value, *(["ep"] if path[-1].key in ("w_gate_up", "w_down") else []))

    return jax.tree_util.tree_map_with_path(one, params)


def make_optimizer(args: argparse.Namespace, mesh: Any, params: Params) -> tuple[Any, Any]:
    """AdamW with a cosine, and its state, each part where its parameter is."""
    import jax
    import optax

    rates = optax.warmup_cosine_decay_schedule(
        0.0, args.rate, max(args.steps // 20, 1), args.steps, args.rate / 10
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rates, b2=0.98))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    places = optax.tree_map_params(
        optimizer,
        lambda _, p: p.sharding,
        jax.eval_shape(optimizer.init, params),
        params,
        transform_non_params=lambda _: everywhere,
    )
    return optimizer, jax.jit(optimizer.init, out_shardings=places)(params)


def make_steps(loss_of: Any, optimizer: Any) -> tuple[Any, Any]:
    """A training step and an evaluation, compiled."""
    import jax
    import optax

    def step(params: Params, state: Any, text: Any) -> Any:
        (loss, aux), grads = jax.value_and_grad(loss_of, has_aux=True)(params, text)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, aux[1]

    def entropy(params: Params, text: Any) -> Any:
        return loss_of(params, text)[1][0]

    return jax.jit(step, donate_argnums=(0, 1)), jax.jit(entropy)


def bar(step: int, steps: int, loss: float, seconds: float) -> None:
    """One line that moves on a terminal; elsewhere the first step's, then ten lines."""
    if not sys.stdout.isatty() and step > 1 and step % max(steps // 10, 1):
        return
    full = 30 * step // steps
    rate = step / max(seconds, 1e-9)
    text = f"[{'#' * full}{'.' * (30 - full)}] {step}/{steps}  loss {loss:.4f}  {rate:.1f} steps/s"
    end = "\r" if sys.stdout.isatty() and step < steps else "\n"
    print(text, end=end, flush=True)


def train(args: argparse.Namespace, mesh: Any, group: Any, sizes: Sizes) -> int:
    """All steps; 1 if nothing was learnt."""
    import jax
    import numpy as np

    text = read_text(args.text)
    kind = np.float64 if args.float64 else np.float32
    params = place_params(mesh, jax.tree.map(lambda value: value.astype(kind), initial(sizes)))
    optimizer, state = make_optimizer(args, mesh, params)
    step, entropy = make_steps(make_loss(sizes, mesh, group), optimizer)

    def rows(number: int, held_out: bool = False) -> Any:
        return place(mesh, batch_of(text, sizes, number, held_out), ("dp", "ep"))

    def held_out() -> float:
        return float(np.mean([float(entropy(params, rows(i, True))) for i in range(4)])) / math.log(
            2
        )

    before, losses, loads = held_out(), [], []
    start = time.perf_counter()
    for i in range(args.steps):
        params, state, loss, load = step(params, state, rows(i))
        losses.append(float(loss))
        loads.append(np.asarray(load))
        if args.process == 0:
            bar(i + 1, args.steps, losses[-1], time.perf_counter() - start)
    after = held_out()
    jax.block_until_ready((params, state))
    if args.process == 0:
        print(f"held-out text: {before:.2f} bits a byte before, {after:.2f} after")
        if args.losses:
            args.losses.write_text("".join(f"{loss!r}\n" for loss in losses))
        write_picture(args.picture, np.stack(loads))
        print(f"load of each expert over time: {args.picture}")
    return int(not after < before)


# ---------------------------------------------------------------------------- picture ----


def write_picture(path: Path, loads: Any) -> None:
    """A PNG of loads [steps, layers, experts]: time to the right, experts of layer after layer
    downwards; white is nothing, the even share is orange, three times as much is black."""
    import numpy as np

    steps, layers, experts = loads.shape
    share = loads / loads.sum(axis=2, keepdims=True) * experts
    heat = np.clip(share.transpose(1, 2, 0) / 3, 0, 1)[..., None]  # [layers, experts, steps, 1]
    points = np.array([0.0, 1 / 3, 2 / 3, 1.0])
    colours = np.array([[255, 255, 255], [245, 160, 60], [170, 30, 60], [0, 0, 0]])
    rgb = np.concatenate([np.interp(heat, points, c) for c in colours.T], axis=-1)
    wide = max(1, 800 // steps)
    rgb = rgb.repeat(12, axis=1).repeat(wide, axis=2)
    gap = np.full((layers, 6, steps * wide, 3), 128)
    image = np.concatenate([rgb, gap], axis=1).reshape(-1, steps * wide, 3).astype(np.uint8)

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", image.shape[1], image.shape[0], 8, 2, 0, 0, 0)
    lines = b"".join(b"\0" + line.tobytes() for line in image)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(lines))
        + chunk(b"IEND", b"")
    )


def run(args: argparse.Namespace) -> int:
    """One process's part."""
    import jax
    import numpy as np

    import epic.jax

    jax.config.update("jax_enable_x64", args.float64)
    if args.processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{args.port}", args.processes, args.process)
    sizes = Sizes()
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(1, -1), ("dp", "ep"))
    tokens = sizes.batch * sizes.length // len(jax.devices())
    row_bytes = sizes.hidden * (8 if args.float64 else 4)
    with epic.jax.open(mesh, "ep", max_tokens=tokens, max_row_bytes=row_bytes) as group:
        return train(args, mesh, group, sizes)


def main() -> int:
    """The launcher, or one of its processes."""
    args = arguments()
    if args.steps < 1 or args.processes < 1 or Sizes.experts % args.processes:
        print(f"--steps is 1 or more, --processes divides {Sizes.experts}", file=sys.stderr)
        return 2
    if args.port:
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        return run(args)
    words = [str(p) for p in args.text]
    words += ["--steps", str(args.steps), "--rate", str(args.rate), "--picture", str(args.picture)]
    if args.check:
        return check(words, args.processes)
    words += ["--float64"] * args.float64
    return launch(words + (["--losses", str(args.losses)] if args.losses else []), args.processes)


if __name__ == "__main__":
    sys.exit(main())
