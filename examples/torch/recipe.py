# SPDX-License-Identifier: Apache-2.0
"""Trains a small language model with Mixture-of-Experts layers. docs/guide/recipe.md explains it.

torchrun --nproc-per-node 4 examples/torch/recipe.py --folder build/recipe --steps 40
torchrun --nproc-per-node 2 examples/torch/recipe.py --folder build/recipe --steps 80

The second command continues at step 40.  Processes use GPUs if there is one for each of them.
"""

import argparse
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import epic.torch

WORDS, LENGTH, HIDDEN, HEADS = 32, 12, 32, 4
OPTIONS = epic.torch.Moe.of(
    num_experts=8, top_k=2, hidden=HIDDEN, inner=48, normalize="sum", balance_coeff=0.01
)
SEQUENCES, MICRO_BATCHES = 7, 2  # sequences of a micro-batch, and micro-batches of a step
WARMUP, RATE = 5, 1e-2
TRAINING, HELD_OUT = 0, 1


def make_batch(part: int, step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    """Return token ids and labels [SEQUENCES, LENGTH], equal on all ranks.

    A sequence is 2 to 6 random words, the separator 1, and the words in reverse order.  Only the
    last part has labels.  Padding has id 0, and positions without a label have label -100.
    """
    random = np.random.default_rng([part, step, micro_batch])
    ids = torch.zeros(SEQUENCES, LENGTH, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for i in range(SEQUENCES):
        words = torch.from_numpy(random.integers(2, WORDS, size=random.integers(2, 7)))
        count = len(words)
        ids[i, :count] = words
        ids[i, count] = 1
        ids[i, count + 1 : 2 * count] = words.flip(0)[:-1]
        labels[i, count : 2 * count] = words.flip(0)
    return ids, labels


class Layer(nn.Module):
    """Causal attention, then the experts, each added to its input."""

    def __init__(self, group: epic.torch.Group, number: int) -> None:
        super().__init__()
        self.before_attention, self.before_moe = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.moe = epic.torch.MoE(group, OPTIONS)
        self.moe.reset_parameters(seed=number)

    def forward(self, x: Tensor, is_token: Tensor) -> tuple[Tensor, Tensor]:
        """Return x, and this rank's part of the balance loss."""
        heads = self.qkv(self.before_attention(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        found = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        tokens = self.before_moe(x)[is_token]  # [tokens, HIDDEN]: padding is not sent
        out, loss = self.moe(tokens)
        return x.index_put((is_token,), out, accumulate=True), loss


class Model(nn.Module):
    """A transformer with two layers."""

    def __init__(self, group: epic.torch.Group) -> None:
        super().__init__()
        torch.manual_seed(0)  # the parameters must begin with equal values on all ranks
        self.words, self.places = nn.Embedding(WORDS, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.layers = nn.ModuleList(Layer(group, number) for number in range(2))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of this rank's labels, and its part of the balance loss."""
        x = self.words(ids) + self.places.weight
        balance = x.new_zeros(())
        for layer in self.layers:
            x, loss = layer(x, ids != 0)
            balance = balance + loss
        logits = self.head(self.norm(x))
        entropy = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return entropy, balance


class Trainer:
    """The part of one process in a training run."""

    def __init__(self, args: argparse.Namespace, device: str, ranks: int) -> None:
        self.args, self.device = args, device
        ep = args.ep or ranks
        self.mesh = init_device_mesh(device, (ranks // ep, ep), mesh_dim_names=("dp", "ep"))
        self.dp = self.mesh.get_group("dp")
        item = torch.get_default_dtype().itemsize
        sizes = {"max_tokens": SEQUENCES * LENGTH, "max_row_bytes": HIDDEN * item}
        self.group = epic.torch.Group(self.mesh, "ep", **sizes)
        self.model: Any = Model(self.group).to(device)
        for layer in self.model.layers:
            fully_shard(layer, mesh=self.mesh["dp"])
        fully_shard(self.model, mesh=self.mesh["dp"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate_at)
        state = epic.torch.TrainingState(self.model, self.mesh, self.optimizer)
        self.state = {"train": state, "schedule": self.schedule}

    def rate_at(self, step: int) -> float:
        """Return the learning rate as a part of RATE: it rises, then falls along a cosine."""
        if step < WARMUP:
            return (step + 1) / WARMUP
        fraction = min((step - WARMUP) / self.args.decay, 1)
        return 0.55 + 0.45 * math.cos(math.pi * fraction)

    def read(self, part: int, step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
        """Return this rank's sequences; the number differs between ranks."""
        ids, labels = make_batch(part, step, micro_batch)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mine = ids.tensor_split(ranks)[rank], labels.tensor_split(ranks)[rank]
        return mine[0].to(self.device), mine[1].to(self.device)

    def count(self, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the number of labels of all ranks in these micro-batches."""
        labels = torch.cat([labels for _, labels in batches])
        return epic.torch.count_labels(labels, self.group, process_group=self.dp)

    def train_step(self, step: int) -> tuple[float, float]:
        """Change the parameters; return the loss and the norm of the gradients."""
        batches = [self.read(TRAINING, step, i) for i in range(MICRO_BATCHES)]
        total = self.count(batches)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for ids, labels in batches:
            entropy, balance = self.model(ids, labels)
            part = entropy / total  # parts of all ranks and micro-batches add up to the mean
            # fully_shard averages gradients over "dp": the factor makes this a sum.
            (part * self.dp.size() + balance / MICRO_BATCHES).backward()
            loss += part.detach()
        epic.torch.sum_gradients(self.model, self.group)  # over "ep", once per step
        norm = epic.torch.clip_grad_norm_(self.model, self.args.max_norm, self.group)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        dist.all_reduce(loss)
        return loss.item(), norm.item()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss of text that is not used for training."""
        self.model.eval()
        batches = [self.read(HELD_OUT, 0, i) for i in range(2)]  # equally many on all ranks
        loss = torch.stack([self.model(*batch)[0] for batch in batches]).double().sum()
        self.model.train()
        dist.all_reduce(loss)
        return (loss / self.count(batches)).item()

    def resume(self) -> int:
        """Load the newest complete checkpoint, if there is one; return the first step to run."""
        # DCP writes .metadata last, so a folder without it is not complete.
        complete = [path.parent for path in self.args.folder.glob("step-*/.metadata")]
        if not complete:
            return 0
        newest = max(complete, key=lambda path: int(path.name.removeprefix("step-")))
        dcp.load(self.state, checkpoint_id=newest)
        return self.schedule.last_epoch

    def run(self) -> None:
        """Run all steps that a checkpoint does not contain."""
        first = self.resume()
        self.print(f"begin at step {first}, held-out loss {self.evaluate():.8f}")
        for step in range(first, self.args.steps):
            loss, norm = self.train_step(step)
            self.print(f"step {step} loss {loss:.8f} norm {norm:.4f}")
            if (step + 1) % self.args.save_every == 0 or step + 1 == self.args.steps:
                dcp.save(self.state, checkpoint_id=self.args.folder / f"step-{step + 1}")
        self.print(f"end, held-out loss {self.evaluate():.8f}")
        self.group.close()

    def print(self, line: str) -> None:
        """Print a line once for all ranks."""
        if dist.get_rank() == 0:
            print(line, flush=True)


def main() -> None:
    """Run one of torchrun's processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoints, shared")
    parser.add_argument("--steps", type=int, default=40, help="of the whole run")
    parser.add_argument("--decay", type=int, default=100, help="steps until the rate is lowest")
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--ep", type=int, help="ranks that share the experts; default: all")
    parser.add_argument("--float64", action="store_true")
    args = parser.parse_args()
    local, on_host = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = "cuda" if torch.cuda.device_count() >= on_host else "cpu"
    if device == "cuda":
        torch.cuda.set_device(local)
    torch.set_default_dtype(torch.float64 if args.float64 else torch.float32)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    Trainer(args, device, dist.get_world_size()).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
