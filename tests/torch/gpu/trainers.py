# SPDX-License-Identifier: Apache-2.0
"""Runs the training examples on the GPUs of this machine, and compares the losses of their runs.

Prints how long each program takes, and how much of this is after the last line that it prints.
Each program has a deadline.  If it misses it, the Python stacks of all its processes are printed.
Packages that are not installed are left out.  Without GPUs everything runs on the CPU.

usage: trainers.py [RANKS [PACKAGE]...]    PACKAGE: torch, torchtitan, accelerate, megatron, trl
"""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[3] / "examples/torch"
DEADLINE = 240  # seconds for a program; the first run of Megatron-Core takes 170
TOTAL = 540  # seconds for all programs
BEGIN = time.monotonic()


def say(text: str) -> None:
    """Print a line with the seconds since the begin."""
    print(f"{time.monotonic() - BEGIN:6.1f} s  {text}", flush=True)


def processes_under(pid: int) -> list[int]:
    """Return a process and all its descendants.  Each rank of torchrun has its own session."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def stop(pid: int) -> None:
    """Kill the processes of a program, after they have printed their stacks (faulthandler)."""
    pids = processes_under(pid)
    for number, pause in ((signal.SIGABRT, 3), (signal.SIGKILL, 0)):
        for each in reversed(pids):
            with suppress(ProcessLookupError):
                os.kill(each, number)
        time.sleep(pause)


class Program:
    """A running program whose lines are read as it prints them."""

    def __init__(self, command: list[str]) -> None:
        self.begin = time.monotonic()
        self.lines: list[tuple[float, str]] = []  # seconds since the begin, and the line
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
        )
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        """Keep all lines with their times."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic() - self.begin, line.rstrip()))

    def log(self) -> str:
        """Return the last lines with their times."""
        return "\n".join(f"    {when:6.1f} s  {line}" for when, line in self.lines[-200:])


def run(what: str, *command: str) -> str:
    """Run a program and return its output.  Exits if it fails or misses its deadline."""
    program = Program(list(command))
    seconds = min(DEADLINE, TOTAL - (time.monotonic() - BEGIN))
    try:
        program.process.wait(max(seconds, 1))
        ended = time.monotonic() - program.begin
        program.reader.join(10)
        missed = program.reader.is_alive() and "a process that it started holds its output open"
    except subprocess.TimeoutExpired:
        missed = f"did not end within {seconds:.0f} s"
    if missed:
        stop(program.process.pid)
        program.reader.join(5)
        raise SystemExit(f"{what}: {missed}\n{program.log()}")
    if program.process.returncode:
        raise SystemExit(f"{what}: exit {program.process.returncode}\n{program.log()}")
    first, last = (program.lines[end][0] if program.lines else ended for end in (0, -1))
    silent = f"{first:.1f} s before its first line, {ended - last:.1f} s after its last line"
    say(f"{what}: {ended:.1f} s, of which {silent}")
    return "\n".join(line for _, line in program.lines)


def run_example(name: str, ranks: int, *words: str) -> list[float]:
    """Return the losses that an example prints."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    program = [*launcher, str(EXAMPLES / f"{name}.py"), *words]
    text = run(f"{name}, {ranks} ranks", sys.executable, "-W", "ignore", *program)
    return [float(n) for n in re.findall(r"(?:^step \d+ loss |'loss': '?)([\d.]+)", text, re.M)]


def compare(what: str, got: list[float], wanted: list[float], most: float) -> None:
    """Exit if two runs differ."""
    assert len(got) == len(wanted) > 0, (what, got, wanted)
    worst = max(abs(a - b) / abs(b) for a, b in zip(got, wanted, strict=True))
    say(f"{what}: largest relative difference of {len(got)} losses {worst:.1e}")
    if not worst < most:
        raise SystemExit(f"{what}: the losses differ: {got}, {wanted}")


def check_recipe(folder: str, ranks: int) -> None:
    """Compare all GPUs with one, which also continues the run of all."""
    alone = run_example("recipe", 1, "--folder", f"{folder}/one", "--steps", "10")
    some = run_example("recipe", ranks, "--folder", f"{folder}/all", "--steps", "5")
    some += run_example("recipe", 1, "--folder", f"{folder}/all", "--steps", "10")
    compare("recipe", some, alone, 1e-3)


def check_titan(folder: str, ranks: int) -> None:
    """Compare EPIC's dispatcher with torchtitan's own."""
    own = run_example("titan_trainer", ranks, "--folder", f"{folder}/own", "--steps", "6", "--own")
    epic = run_example("titan_trainer", ranks, "--folder", f"{folder}/epic", "--steps", "6")
    compare("torchtitan", epic, own, 1e-2)


MODEL = """
import sys
import transformers

sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
counts = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
config = transformers.Qwen3MoeConfig(**sizes, **counts, **experts)
transformers.Qwen3MoeForCausalLM(config).save_pretrained(sys.argv[1])
"""


def check_transformers(folder: str, ranks: int) -> None:
    """Compare all GPUs with one, which also continues the run of all."""
    model = f"{folder}/model"
    run("transformers makes a model", sys.executable, "-W", "ignore", "-c", MODEL, model)
    words = [model, "--save-every", "3"]
    alone = run_example("hf_trainer", 1, *words, "--folder", f"{folder}/one", "--steps", "6")
    some = run_example("hf_trainer", ranks, *words, "--folder", f"{folder}/all", "--steps", "3")
    some += run_example("hf_trainer", 1, *words, "--folder", f"{folder}/all", "--steps", "6")
    compare("transformers", some, alone, 1e-2)


def check_megatron(folder: str, ranks: int) -> None:
    """Compare Megatron-Core with EPIC on all GPUs with its own dispatcher on one."""

    def losses_of(count: int, name: str, steps: int, *more: str) -> list[float]:
        words = ("--folder", f"{folder}/{name}", "--steps", str(steps), *more)
        return run_example("megatron_trainer", count, *words)

    losses_of(1, "first", 1, "--own")
    start = ("--parameters-of", f"{folder}/first/000001")
    own = losses_of(1, "own", 4, "--own", *start)
    epic = losses_of(ranks, "epic", 2, "--ep", str(ranks), *start)
    epic += losses_of(ranks, "epic", 4, "--ep", str(ranks), "--tp", str(min(ranks, 2)))
    compare("Megatron-Core", epic, own, 1e-3)


TOKENIZER = """
import sys
import tokenizers
import transformers

words = ["<pad>", "<end>", "<unknown>", *map(chr, range(ord("a"), ord("z") + 1))]
table = {word: number for number, word in enumerate(words)}
made = tokenizers.Tokenizer(tokenizers.models.WordLevel(table, unk_token="<unknown>"))
made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
special = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unknown>"}
transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(sys.argv[1])
"""


def check_trl(folder: str, ranks: int) -> None:
    """Compare TRL's trainer on all GPUs with one GPU.  The model has no balance loss, because TRL
    computes that of each rank's sequences, so it depends on the number of ranks."""
    model = f"{folder}/model"
    for program in (MODEL, TOKENIZER):
        run("a model for TRL", sys.executable, "-W", "ignore", "-c", program, model)
    words = [model, "--steps", "4"]
    alone = run_example("sft_trainer", 1, *words, "--folder", f"{folder}/one")
    some = run_example("sft_trainer", ranks, *words, "--folder", f"{folder}/all")
    compare("TRL", some, alone, 1e-2)


def main() -> None:
    """Run what is installed.  This process imports no torch, so its own exit cannot hang in it."""
    count = "import torch; print(torch.cuda.device_count())"
    gpus = int(run("import torch", sys.executable, "-W", "ignore", "-c", count).split()[-1])
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else min(4, gpus or 2)
    say(f"{gpus} GPUs, {ranks} ranks" + ("" if gpus else ", ON THE CPU"))
    checks = {"torch": check_recipe, "torchtitan": check_titan, "accelerate": check_transformers}
    checks |= {"megatron": check_megatron, "trl": check_trl}
    if len(sys.argv) > 2:
        checks = {package: checks[package] for package in sys.argv[2:]}
    missing = [package for package in checks if not importlib.util.find_spec(package)]
    for package, check in checks.items():
        if package in missing:
            say(f"LEFT OUT: {package} is not installed")
            continue
        with tempfile.TemporaryDirectory() as folder:
            check(folder, ranks)
    say("right" + (f", but LEFT OUT: {', '.join(missing)}" if missing else ""))


if __name__ == "__main__":
    main()
