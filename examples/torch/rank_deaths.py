# SPDX-License-Identifier: Apache-2.0
"""Trains a small model while processes are killed. docs/guide/rank-dies.md explains it.

python examples/torch/rank_deaths.py             4 processes on the CPU, of which 2 are killed
python examples/torch/rank_deaths.py --kills 0   the same training without kills
python examples/torch/rank_deaths.py --check     both; exit 1 if the losses differ

The program kills processes with SIGKILL at random times.  The processes that are left go on in the
same group: they return to the last step that all of them have finished, and divide the batch among
themselves.  Each expert has two replicas.  If both are lost, all processes return to the last
checkpoint, and load the lost experts from it.
"""

import argparse
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import epic.torch

PROCESSES, HIDDEN, INNER, EXPERTS, BATCH = 4, 16, 32, 8, 48
EVERY = 10  # steps from one checkpoint to the next
OPTIONS = epic.torch.Moe.of(
    num_experts=2 * EXPERTS,  # two replicas of each expert
    num_logical=EXPERTS,
    top_k=2,
    hidden=HIDDEN,
    inner=INNER,
    normalize="sum",
    balance_coeff=0.01,
)
OF_EXPERTS = ("w_gate_up", "w_down")  # the other parameters are equal on all ranks
LOST_RANK = ("EPIC_EPEER", "EPIC_ETIMEOUT")


def arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kills", type=int, default=2, choices=range(3))
    parser.add_argument("--seed", type=int, default=1, help="of the victims and the times")
    parser.add_argument("--check", action="store_true", help="compare with a run without kills")
    return parser.parse_args()


# ---------------------------------------------------------------------------- training ----


class Model(nn.Module):
    """Two Mixture-of-Experts layers, and a linear function of their result."""

    def __init__(self, group: epic.torch.Group, placement: epic.torch.Placement) -> None:
        super().__init__()
        torch.manual_seed(0)  # the parameters must begin with equal values on all ranks
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.moes = nn.ModuleList(
            epic.torch.MoE(group, OPTIONS, logical_of_expert=placement) for _ in range(2)
        )
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the predictions for x [rows, HIDDEN], and this rank's balance loss."""
        balance = x.new_zeros(())
        for norm, moe in zip(self.norms, self.moes, strict=True):
            out, loss = moe(norm(x))
            x, balance = x + out, balance + loss
        return self.head(x)[:, 0], balance


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a step, which depend only on its number."""
    x = torch.randn(BATCH, HIDDEN, generator=torch.Generator().manual_seed(step))
    return x, torch.sin(x).prod(dim=1) + (x[:, 0] * x[:, 1]).abs()


class Trainer:
    """The part of one process in the training."""

    def __init__(self, group: epic.torch.Group, folder: Path) -> None:
        self.group, self.folder = group, folder
        self.placement = epic.torch.Placement(group, OPTIONS.layer)
        self.model = Model(group, self.placement)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        for p in self.model.parameters():  # the optimizer would make its state in the first step
            zeros = (torch.zeros_like(p), torch.zeros_like(p))
            names = ("step", "exp_avg", "exp_avg_sq")
            self.optimizer.state[p] = dict(zip(names, (torch.zeros(()), *zeros), strict=True))
        self.tensors = {name: p.detach() for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            for field, value in self.optimizer.state[p].items():
                self.tensors[f"{name}/{field}"] = value
        self.by_expert = {  # these have a row for each expert of this rank
            name for name, t in self.tensors.items() if t.dim() == 3 and self.is_of_experts(name)
        }
        self.step = 0  # the last step that this rank has finished
        self.before: dict[str, Tensor] = {}  # the tensors before this step
        self.save()

    @staticmethod
    def is_of_experts(name: str) -> bool:
        """Return whether a tensor belongs to the experts of this rank."""
        return name.partition("/")[0].endswith(OF_EXPERTS)

    def train_step(self) -> None:
        """Train on this rank's part of the next batch."""
        ranks = self.group.members.ranks
        place = ranks.index(self.group.rank)
        x, y = (t.tensor_split(len(ranks))[place] for t in make_batch(self.step + 1))
        self.optimizer.zero_grad()
        found, balance = self.model(x)
        ((found - y).square().sum() / BATCH + balance).backward()
        epic.torch.sum_gradients(self.model, self.group)
        # The last call that waits for other ranks is above, so other ranks have finished this step
        # or will, or they will call shrink.
        self.before = {name: t.clone() for name, t in self.tensors.items()}
        self.optimizer.step()
        self.step += 1
        if self.step % EVERY == 0:
            self.save()

    def evaluate(self) -> float:
        """Return the loss on inputs that no step uses."""
        ranks = self.group.members.ranks
        x, y = make_batch(0)
        place = ranks.index(self.group.rank)
        part = [t.tensor_split(len(ranks))[place] for t in (x, y)]
        with torch.no_grad():
            loss = (self.model(part[0])[0] - part[1]).square().sum().reshape(1)
        return float(epic.torch.sum(self.group, loss)) / BATCH

    # ------------------------------------------------------------------ checkpoints ----

    def path(self, step: int, name: object) -> Path:
        """Return the file of an expert, or of the tensors that all ranks have."""
        return self.folder / f"step{step}-{name}.pt"

    def save(self) -> None:
        """Write this rank's part of the checkpoint: each expert has a file of its own.

        All replicas of an expert write the same file.
        """
        for local, logical in enumerate(self.placement.local_experts):
            rows = {name: self.tensors[name][local].clone() for name in self.by_expert}
            self.write(self.path(self.step, logical), rows)
        if self.group.rank == self.group.members.ranks[0]:
            shared = {n: t for n, t in self.tensors.items() if n not in self.by_expert}
            self.write(self.path(self.step, "shared"), shared)

    def write(self, path: Path, tensors: dict[str, Tensor]) -> None:
        """Write a file that is either complete or not there."""
        part = path.with_suffix(f".{self.group.rank}")
        torch.save(tensors, part)
        part.rename(path)

    def load_expert(self, step: int, logical: int, local: int) -> None:
        """Read an expert into the rows `local` of this rank's tensors."""
        for name, row in torch.load(self.path(step, logical)).items():
            self.tensors[name][local].copy_(row)

    # -------------------------------------------------------------------- recovery ----

    def recover(self) -> None:
        """Agree with the other ranks that live, and return to the same step as they."""
        change = self.group.shrink(step=self.step, patience_ms=10_000)
        is_lost = bool(self.placement.absent)
        # A rank begins a step after it has written the checkpoint of the step before. So if a rank
        # has finished a step, all ranks have written all checkpoints before this step.
        saved = max(0, change.greatest_step - 1) // EVERY * EVERY
        self.placement.restore(lambda logical, local: self.load_expert(saved, logical, local))
        how = "nothing to undo"
        if is_lost:
            how = "experts lost"
            for local, logical in enumerate(self.placement.local_experts):
                self.load_expert(saved, logical, local)
            for name, value in torch.load(self.path(saved, "shared")).items():
                self.tensors[name].copy_(value)
            self.step = saved
        elif self.step > change.least_step:
            how = "one step undone"
            for name, value in self.before.items():
                self.tensors[name].copy_(value)
            self.step -= 1
        text = f"rank {self.group.rank}: lost ranks {change.gone}, {how}, back to step {self.step}"
        print(text, flush=True)

    def train(self, steps: int, progress: Any) -> float:
        """Train until `steps` steps are finished, and return the loss."""
        while True:
            try:
                while self.step < steps:
                    self.train_step()
                    progress[self.group.rank] = self.step
                return self.evaluate()
            except epic.torch.EpicError as error:
                if error.code not in LOST_RANK:
                    raise
            self.recover()


# --------------------------------------------------------------------------- processes ----


def run_rank(rank: int, port: int, steps: int, folder: str, progress: Any, losses: Any) -> None:
    """Run one process."""
    torch.set_num_threads(1)
    with epic.torch.Group(
        bootstrap=epic.torch.Tcp(port=port),
        rank=rank,
        num_ranks=PROCESSES,
        max_tokens=BATCH,  # if only one rank is left, it has all rows
        max_row_bytes=4 * HIDDEN,
    ) as group:
        losses[rank] = Trainer(group, Path(folder)).train(steps, progress)


def kill_some(processes: list[Any], progress: Any, kills: list[int], draw: random.Random) -> None:
    """Kill a process at a random time after each of these steps."""
    for step in kills:
        while max(progress) < step and any(process.is_alive() for process in processes):
            time.sleep(1e-4)
        time.sleep(draw.uniform(0, 5e-3))
        victim = draw.choice([p for p in processes if p.is_alive()])
        print(f"kill -9 of {victim.name} after step {max(progress)}", flush=True)
        victim.kill()
        victim.join()


def run(steps: int, num_kills: int, seed: int) -> float:
    """Train in several processes, of which some are killed, and return the final loss."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["epic.torch", "torch._dynamo"])
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # lets a process listen too
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        progress = context.Array("q", PROCESSES, lock=False)
        losses = context.Array("d", [float("nan")] * PROCESSES, lock=False)
        processes = [
            context.Process(
                target=run_rank,
                args=(rank, port, steps, folder, progress, losses),
                name=f"rank {rank}",
            )
            for rank in range(PROCESSES)
        ]
        for process in processes:
            process.start()
        kills = sorted(draw.sample(range(2, steps - 5), num_kills))
        kill_some(processes, progress, kills, draw)
        for process in processes:
            process.join()
        codes = [process.exitcode for process in processes]
        if not {0} <= set(codes) <= {0, -signal.SIGKILL}:
            raise RuntimeError(f"the exit codes of the processes are {codes}")
        final = {loss for loss, code in zip(losses, codes, strict=True) if code == 0}
    if len(final) != 1:
        raise RuntimeError(f"the ranks have different losses: {final}")
    return final.pop()


def main() -> int:
    """Train, and compare if --check is given."""
    args = arguments()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # starts no pool of processes
    loss = run(args.steps, args.kills, args.seed)
    print(f"loss {loss:.7f} after {args.steps} steps and {args.kills} kills")
    if not args.check:
        return 0
    without = run(args.steps, 0, args.seed)
    error = abs(loss - without) / without
    print(f"loss {without:.7f} without kills: relative difference {error:.1e}")
    return int(error > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
