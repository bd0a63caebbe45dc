# SPDX-License-Identifier: Apache-2.0
"""Compares MaxText's training losses with its own experts and with EPIC's; see maxtext.sh."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
STEPS = 6
OPTIONS = {
    "run_name": "tiny", "decoder_block": "mixtral", "base_emb_dim": 64, "base_num_query_heads": 4,
    "base_num_kv_heads": 4, "head_dim": 16, "base_mlp_dim": 96, "base_moe_mlp_dim": 96,
    "base_num_decoder_layers": 2,
    "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 256, "max_target_length": 32,
    "per_device_batch_size": 2, "steps": STEPS, "learning_rate": 0.01, "dtype": "float32",
    "matmul_precision": "highest", "load_balance_loss_weight": 0.1, "dataset_type": "synthetic",
    "enable_checkpointing": False, "attention": "dot_product", "hardware": "cpu",
    "sparse_matmul": False, "megablox": False, "capacity_factor": -1.0,
    "enable_goodput_recording": False, "monitor_goodput": False, "log_config": False,
    "skip_jax_distributed_system": True, "sharding_tolerance": 1.0, "jax_cache_dir": "",
}  # fmt: skip
MESHES = ({"ici_fsdp_parallelism": 1, "ici_expert_parallelism": 4},
          {"ici_fsdp_parallelism": 2, "ici_expert_parallelism": 2})  # fmt: skip


def losses(program: list[str], mesh: dict[str, int], folder: str) -> list[float]:
    """Train, and return the loss of each step."""
    import maxtext

    config = Path(maxtext.__file__).parent / "configs/base.yml"
    options = {**OPTIONS, **mesh, "base_output_directory": folder}
    words = [f"{name}={value}" for name, value in options.items()]
    command = [sys.executable, *program, str(config), *words]
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    env = {**os.environ, **flags, "EPIC_TRACE": f"{folder}/trace"}
    env["DECOUPLE_GCLOUD"] = "TRUE"  # MaxText then needs no Google Cloud
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=480, check=False, env=env, cwd=ROOT
    )
    text = done.stdout + done.stderr
    found = [float(x) for x in re.findall(r"completed step: \d+.*?loss: ([0-9.]+)", text)]
    if done.returncode or len(found) != STEPS:
        sys.exit(f"{' '.join(program)} printed {len(found)} losses:\n{text[-6000:]}")
    return found


def main() -> None:
    """Train once with MaxText's experts, then with EPIC on each mesh, and compare the losses."""
    program = ["-m", "maxtext.trainers.pre_train.train"]
    with tempfile.TemporaryDirectory() as folder:
        wanted = losses(program, MESHES[0], folder)
        assert not list(Path(folder).glob("trace/*")), "MaxText alone calls EPIC"
    print("MaxText", wanted, flush=True)
    for mesh in MESHES:
        with tempfile.TemporaryDirectory() as folder:
            found = losses(["examples/jax/maxtext_train.py"], mesh, folder)
            assert list(Path(folder).glob("trace/*")), "MaxText does not call EPIC"
        print(mesh, "EPIC", found, flush=True)
        assert found[-1] < found[0] - 0.1, "the model does not learn"
        for a, b in zip(wanted, found, strict=True):
            assert abs(a - b) <= 2e-3, (wanted, found)


if __name__ == "__main__":
    main()
