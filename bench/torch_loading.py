# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a rank that loads a random Qwen3-MoE model of 8 layers, in a process of its own.

python bench/torch_loading.py            1, 2 and 4 ranks, both ways: 2 GB of disk, 6 of memory
python bench/torch_loading.py --inner 128

own: epic.torch.from_pretrained; whole: from_pretrained of transformers, then replace_moe.  resident
is the largest resident memory (VmHWM) less that before loading.  It counts the pages of mapped
files, which the system can take back.  private is the same for the memory that no file backs,
RssAnon + RssShmem, read every 2 ms.  The processes are forks of one that has imported everything,
and the ranks of a group load one after the other, so that they need less memory together."""

import argparse
import contextlib
import multiprocessing
import os
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import epic.torch

MB = 1 << 20


def make_model(folder: str, args: argparse.Namespace) -> None:
    """Write a random model in bfloat16, one tensor for each expert as transformers does."""
    config = Qwen3MoeConfig(
        vocab_size=4096, hidden_size=args.hidden, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, moe_intermediate_size=args.inner,
        num_experts=args.experts, num_experts_per_tok=4, norm_topk_prob=True,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="200MB")
    count = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    other = sum(p.numel() for p in model.parameters()) - count
    print(f"experts {2 * count / MB:.0f} MB, all other parameters {2 * other / MB:.0f} MB")


def memory(*names: str) -> int:
    """Return the sum of fields of /proc/self/status in bytes."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) for name in names) * 1024


def private_bytes() -> int:
    """Return the memory of this process that no file backs."""
    return memory("RssAnon", "RssShmem")


class Peak:
    """The largest private memory while a block runs."""

    def __enter__(self) -> "Peak":
        self.first = self.most = private_bytes()
        self.first_resident = memory("VmRSS")
        self.ends = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        """Read the memory until the block ends."""
        while not self.ends.wait(0.002):
            self.most = max(self.most, private_bytes())

    def __exit__(self, *_: object) -> None:
        self.ends.set()
        self.thread.join()
        self.most = max(self.most, private_bytes())


def run_rank(args: argparse.Namespace, way: str, rank: int, ranks: int, turn: Any) -> None:
    """Load the model on a rank and print what it took."""
    torch.set_num_threads(1)
    bootstrap = epic.torch.Tcp(port=args.port) if ranks > 1 else None
    where: dict[str, Any] = {"bootstrap": bootstrap, "rank": rank, "num_ranks": ranks}
    with epic.torch.Group(max_tokens=16, max_row_bytes=2 * args.hidden, **where) as group:
        with turn:
            start = time.monotonic()
            with Peak() as peak:
                if way == "own":
                    model = epic.torch.from_pretrained(AutoModelForCausalLM, args.folder, group)
                else:
                    model = AutoModelForCausalLM.from_pretrained(args.folder)
                    epic.torch.replace_moe(model, group)
            seconds = time.monotonic() - start
            resident = memory("VmHWM")
        parameter_bytes = sum(p.nbytes for p in model.parameters())
        ids = torch.arange(16).reshape(1, 16)
        with torch.no_grad():
            total = model(ids, use_cache=False).logits.double().sum().item()
        print(
            f"{way:6s} rank {rank} of {ranks}: resident "
            f"{(resident - peak.first_resident) / MB:6.0f} MB, private "
            f"{(peak.most - peak.first) / MB:6.0f} MB, parameters {parameter_bytes / MB:6.0f} MB, "
            f"{seconds:5.1f} s, sum of logits {total:.6f}",
            flush=True,
        )


def run(function: Any, *of_each: tuple[Any, ...]) -> None:
    """Call a function in as many processes at the same time."""
    context = multiprocessing.get_context("fork")
    every = [context.Process(target=function, args=arguments) for arguments in of_each]
    for process in every:
        process.start()
    for process in every:
        process.join()
    if any(process.exitcode for process in every):
        raise SystemExit("a process failed")


def main() -> None:
    """Write a model and load it in new processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, size in (("hidden", 1024), ("inner", 512), ("experts", 64)):
        parser.add_argument(f"--{name}", type=int, default=size)
    args = parser.parse_args()
    turn = multiprocessing.get_context("fork").Lock()
    with tempfile.TemporaryDirectory() as args.folder:
        run(make_model, (args.folder, args))
        for ranks in (1, 2, 4):
            for way in ("whole", "own"):
                with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
                    args.port = free.getsockname()[1]
                run(run_rank, *[(args, way, rank, ranks, turn) for rank in range(ranks)])


if __name__ == "__main__":
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    main()
