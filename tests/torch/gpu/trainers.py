# SPDX-License-Identifier: Apache-2.0
"""Runs the training examples on the GPUs of this machine, and compares the losses of their runs.

This program has not run on GPUs yet.  Packages that are not installed are left out.

usage: trainers.py [GPUS]
"""

import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

EXAMPLES = Path(__file__).resolve().parents[3] / "examples/torch"


def run_example(name: str, ranks: int, *words: str) -> list[float]:
    """Return the losses that an example prints."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", str(ranks), str(EXAMPLES / f"{name}.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(f"{name} with {ranks} ranks failed:\n{done.stdout}{done.stderr}")
    text = done.stdout
    return [float(n) for n in re.findall(r"(?:^step \d+ loss |'loss': '?)([\d.]+)", text, re.M)]


def compare(what: str, got: list[float], wanted: list[float], most: float) -> None:
    """Exit if two runs differ."""
    assert len(got) == len(wanted) > 0, (what, got, wanted)
    worst = max(abs(a - b) / abs(b) for a, b in zip(got, wanted, strict=True))
    print(f"{what}: largest relative difference of {len(got)} losses {worst:.1e}", flush=True)
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


def check_transformers(folder: str, ranks: int) -> None:
    """Compare all GPUs with one, which also continues the run of all."""
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    counts = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = transformers.Qwen3MoeConfig(**sizes, **counts, **experts)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(f"{folder}/model")
    words = [f"{folder}/model", "--save-every", "3"]
    alone = run_example("hf_trainer", 1, *words, "--folder", f"{folder}/one", "--steps", "6")
    some = run_example("hf_trainer", ranks, *words, "--folder", f"{folder}/all", "--steps", "3")
    some += run_example("hf_trainer", 1, *words, "--folder", f"{folder}/all", "--steps", "6")
    compare("transformers", some, alone, 1e-2)


def main() -> None:
    """Run what is installed."""
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else min(4, torch.cuda.device_count())
    checks = {"torch": check_recipe, "torchtitan": check_titan, "accelerate": check_transformers}
    for package, check in checks.items():
        if importlib.util.find_spec(package):
            with tempfile.TemporaryDirectory() as folder:
                check(folder, ranks)
        else:
            print(f"left out: {package} is not installed")
    print("right")


if __name__ == "__main__":
    main()
