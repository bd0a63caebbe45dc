# SPDX-License-Identifier: Apache-2.0
"""Shared code of jax/train_text.py and torch/train_text.py, which uses neither JAX nor PyTorch.

It contains the command line, the launcher, the check, the text, the initial parameters, the
progress bar and the picture.
"""

import argparse
import math
import socket
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENDINGS = {".md", ".txt", ".c", ".h", ".cu", ".py", ".sh"}
TOLERANCE = 1e-4  # largest relative difference of a loss from that of one process
Params = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """The sizes of the model and of a batch."""

    batch: int = 16
    length: int = 64
    hidden: int = 64
    heads: int = 4
    inner: int = 128
    experts: int = 8
    top_k: int = 2
    layers: int = 2


def framework_of(program: str) -> str:
    """Return "jax" or "torch", the name of the folder that contains the program."""
    return Path(program).resolve().parent.name


def arguments(program: str, about: str | None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    picture = Path(f"build/train_text_{framework_of(program)}.png")
    parser = argparse.ArgumentParser(description=about.split("\n")[0] if about else None)
    parser.add_argument("text", nargs="*", type=Path, help="files or folders; none: this project")
    parser.add_argument("--processes", type=int, default=4, help="processes that share the experts")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--picture", type=Path, default=picture)
    parser.add_argument("--float64", action="store_true", help="compute in float64, not float32")
    parser.add_argument("--check", action="store_true", help="compare with one process, in float64")
    parser.add_argument("--process", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--losses", type=Path, help="write the loss of each step to this file")
    return parser.parse_args()


# -------------------------------------------------------------------------- launching ----


def launch(program: str, words: list[str], processes: int) -> int:
    """Start the processes and return 0 if all of them succeed.

    If one process fails, or with Ctrl-C, all processes are ended.
    """
    with socket.socket() as holder:  # keeps the system from using the port for a connection
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # lets a process listen too
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        command = [sys.executable, program, *words, "--processes", str(processes)]
        return watch([*command, "--port", str(port), "--process"], processes)


def watch(command: list[str], processes: int) -> int:
    """Run the command once for each process, with the number of the process as last argument."""
    running = [subprocess.Popen([*command, str(i)]) for i in range(processes)]
    code = 0
    try:
        while None in (codes := [process.poll() for process in running]):
            code = next((c for c in codes if c), 0)
            if code:
                time.sleep(3)  # the other processes print which process is missing
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


def check(program: str, words: list[str], processes: int) -> int:
    """Train with all processes, then with one process, and return 1 if the losses differ.

    It trains in float64. Several ranks add the gradients of shared parameters in another order than
    one rank. In float32, after some steps, the difference in rounding would be enough to send a
    token to another expert, if the scores of two experts are almost equal.
    """
    curves = []
    for count in (processes, 1):
        file = ROOT / "build" / f"train_text_{framework_of(program)}_{count}.txt"
        file.parent.mkdir(exist_ok=True)
        print(f"-- {count} process(es)", flush=True)
        code = launch(program, [*words, "--float64", "--losses", str(file)], count)
        if code:
            return code
        curves.append([float(line) for line in file.read_text().split()])
    worst = max(abs(a - b) / abs(b) for a, b in zip(*curves, strict=True))
    verdict = "right" if worst < TOLERANCE else "WRONG"
    print(f"largest relative difference of {len(curves[0])} losses {worst:.1e}: {verdict}")
    return int(not worst < TOLERANCE)


# ------------------------------------------------------------------------------- text ----


def read_text(paths: list[Path]) -> Any:
    """Return the bytes of all files, in the order of their names."""
    import numpy as np

    roots = paths or [ROOT / name for name in ("README.md", "docs", "include", "src")]
    files = [p for root in roots for p in (sorted(root.rglob("*")) if root.is_dir() else [root])]
    chosen = [p for p in files if p.is_file() and (p.suffix in ENDINGS or p in paths)]
    if not chosen:
        raise SystemExit(f"no text in {', '.join(map(str, roots))}")
    return np.frombuffer(b"".join(p.read_bytes() for p in chosen), np.uint8)


def batch_of(text: Any, sizes: Sizes, step: int, held_out: bool = False) -> Any:
    """Return a batch of bytes [batch, length + 1] for a step.

    held_out: whether the batch is from the last tenth of the text, which is not used for training.
    """
    import numpy as np

    border = len(text) * 9 // 10
    low, high = (border, len(text)) if held_out else (0, border)
    starts = np.random.default_rng([step, held_out]).integers(
        low, high - sizes.length - 1, size=sizes.batch
    )
    return np.stack([text[s : s + sizes.length + 1] for s in starts]).astype(np.int32)


# ------------------------------------------------------------------------- parameters ----


def initial(sizes: Sizes) -> Params:
    """Return the initial parameters, which are equal in all processes."""
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


# --------------------------------------------------------------------------- progress ----


def bar(step: int, steps: int, loss: float, seconds: float) -> None:
    """Print the progress: one line that changes on a terminal, else about ten lines."""
    if not sys.stdout.isatty() and step > 1 and step % max(steps // 10, 1):
        return
    full = 30 * step // steps
    rate = step / max(seconds, 1e-9)
    text = f"[{'#' * full}{'.' * (30 - full)}] {step}/{steps}  loss {loss:.4f}  {rate:.1f} steps/s"
    end = "\r" if sys.stdout.isatty() and step < steps else "\n"
    print(text, end=end, flush=True)


def report(
    args: argparse.Namespace, before: float, after: float, losses: list[float], loads: Any
) -> int:
    """Print and write the results in process 0, and return 1 if the model has learned nothing.

    Args:
        args: The arguments of the command line.
        before: Bits for each byte of text that is not used for training, before the first step.
        after: The same number after the last step.
        losses: The loss of each step.
        loads: [steps, layers, experts]: choices of each expert.
    """
    if args.process == 0:
        print(f"held-out text: {before:.2f} bits a byte before, {after:.2f} after")
        if args.losses:
            args.losses.write_text("".join(f"{loss!r}\n" for loss in losses))
        write_picture(args.picture, loads)
        print(f"load of each expert over time: {args.picture}")
    return int(not after < before)


# ---------------------------------------------------------------------------- picture ----


def write_picture(path: Path, loads: Any) -> None:
    """Write a PNG with the loads [steps, layers, experts] of all experts.

    A column is a step, and a row is an expert, layer below layer. A load of 0 is white, the mean
    load is orange, and three times the mean is black.
    """
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


# ------------------------------------------------------------------------------- main ----


def main(program: str, about: str | None, run: Callable[[argparse.Namespace], int]) -> int:
    """Run as the launcher, or as one of its processes, which calls `run`."""
    args = arguments(program, about)
    if args.steps < 1 or args.processes < 1 or Sizes.experts % args.processes:
        rule = f"--steps must be at least 1, and --processes must divide {Sizes.experts}"
        print(rule, file=sys.stderr)
        return 2
    if args.port:
        return run(args)
    words = [str(p) for p in args.text]
    words += ["--steps", str(args.steps), "--rate", str(args.rate), "--picture", str(args.picture)]
    if args.check:
        return check(program, words, args.processes)
    words += ["--float64"] * args.float64
    words += ["--losses", str(args.losses)] if args.losses else []
    return launch(program, words, args.processes)
