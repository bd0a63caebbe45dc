# SPDX-License-Identifier: Apache-2.0
"""A small Mixture-of-Experts transformer learns bytes of text, its experts spread over processes.

python examples/torch/train_text.py                      4 processes, 200 steps, a progress bar
python examples/torch/train_text.py --check              compare the losses with one process's
python examples/torch/train_text.py --processes 2 book.txt --picture load.png

With --check the exit status is 1 if the losses differ.
"""

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import epic.torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
import training
from training import Sizes

EXPERT_WEIGHTS = ("w_gate_up", "w_down")

# ------------------------------------------------------------------------------ model ----


def norm(x: Tensor) -> Tensor:
    """Return the RMS norm without a scale."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6)


class Layer(nn.Module):
    """Causal self-attention, then the experts, both with residual connections."""

    def __init__(self, sizes: Sizes, group: epic.torch.Group, first: dict[str, Any]) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.qkv, self.out = (nn.Parameter(first[name]) for name in ("qkv", "out"))
        options = epic.torch.Moe.of(
            num_experts=sizes.experts,
            top_k=sizes.top_k,
            hidden=sizes.hidden,
            inner=sizes.inner,
            normalize="sum",
            sum_order="tree",
            leaves=sizes.experts,
            balance_coeff=0.02,
        )
        # With bias_rate=0 the layer counts the loads of its experts, and the bias stays 0.
        self.moe = epic.torch.MoE(group, options, dtype=self.qkv.dtype, bias_rate=0.0)
        local = self.moe.num_local_experts
        own = slice(group.rank * local, (group.rank + 1) * local)
        with torch.no_grad():
            for name, value in first["moe"].items():
                getattr(self.moe, name).copy_(value[own] if name in EXPERT_WEIGHTS else value)

    def attention(self, x: Tensor) -> Tensor:
        """Return the attention of x [batch, length, hidden]."""
        batch, length, hidden = x.shape
        parts = (norm(x) @ self.qkv).reshape(batch, length, 3, self.heads, hidden // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return found.transpose(1, 2).reshape(x.shape) @ self.out

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return x, and this rank's part of the balance loss."""
        x = x + self.attention(x)
        out, loss = self.moe(norm(x))
        return x + out, loss


class Model(nn.Module):
    """A transformer that reads bytes and returns the logits of the next byte."""

    def __init__(self, sizes: Sizes, group: epic.torch.Group, dtype: torch.dtype) -> None:
        super().__init__()

        def tensors(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: tensors(part) for name, part in value.items()}
            return torch.from_numpy(value).to(dtype)

        first = training.initial(sizes)
        layers = [Layer(sizes, group, tensors(layer)) for layer in first.pop("layers")]
        self.layers = nn.ModuleList(layers)
        for name, value in tensors(first).items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [batch, length, 256] for text [batch, length], and the balance loss.

        The balance loss is this rank's part.
        """
        x = self.embed[text] + self.place
        extra = x.new_zeros(())
        for layer in self.layers:
            x, loss = layer(x)
            extra = extra + loss
        return norm(x) @ self.head, extra


# --------------------------------------------------------------------------- training ----


def add_up(x: Tensor) -> Tensor:
    """Add x over the processes, in place, and return it."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def sum_gradients(model: Model) -> None:
    """Add the gradients of shared parameters over the processes; those of experts are complete."""
    shared = [p for name, p in model.named_parameters() if not name.endswith(EXPERT_WEIGHTS)]
    whole = add_up(torch.cat([p.grad.reshape(-1) for p in shared if p.grad is not None]))
    for parameter, part in zip(shared, whole.split([p.numel() for p in shared]), strict=True):
        parameter.grad = part.reshape(parameter.shape)


def clip(model: Model) -> None:
    """Scale the gradients so that the norm of the whole model, on all processes, is at most 1."""
    squares = torch.zeros(2, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        squares[int(name.endswith(EXPERT_WEIGHTS))] += parameter.grad.double().square().sum()
    length = float((squares[0] + add_up(squares[1:])[0]).sqrt())
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(min(1.0, 1 / length))


def rate_at(step: int, steps: int) -> float:
    """Return the learning rate as a part of the highest one.

    It rises along a line, then falls along a cosine to a tenth.
    """
    up = max(steps // 20, 1)
    if step < up:
        return step / up
    return 0.55 + 0.45 * math.cos(math.pi * (step - up) / max(steps - up, 1))


class Trainer:
    """The part of one process in the training."""

    def __init__(self, args: argparse.Namespace, group: epic.torch.Group, sizes: Sizes) -> None:
        self.args, self.sizes = args, sizes
        self.text = training.read_text(args.text)
        self.model = Model(sizes, group, torch.float64 if args.float64 else torch.float32)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=args.rate, betas=(0.9, 0.98), weight_decay=1e-4
        )

        def rate(step: int) -> float:
            return rate_at(step, args.steps)

        self.rates = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate)

    def losses_of(self, step: int, held_out: bool = False) -> tuple[Tensor, Tensor]:
        """Return this process's parts of the cross entropy and of the balance loss."""
        text = training.batch_of(self.text, self.sizes, step, held_out)
        each = len(text) // self.args.processes
        mine = torch.from_numpy(text).long().split(each)[self.args.process]
        logits, extra = self.model(mine[:, :-1])
        entropy = nn.functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
        return entropy / self.args.processes, extra

    def step(self, number: int) -> float:
        """Run one training step and return its loss over all processes."""
        self.optimizer.zero_grad()
        loss = sum(self.losses_of(number))
        loss.backward()
        sum_gradients(self.model)
        clip(self.model)
        self.optimizer.step()
        self.rates.step()
        return float(add_up(loss.detach()))

    def loads(self) -> np.ndarray:
        """Return the choices [layers, experts] of all processes since the last call."""
        found = [layer.moe.load.clone() for layer in self.model.layers]
        for layer in self.model.layers:
            layer.moe.load.zero_()
        return torch.stack(found).numpy()

    @torch.no_grad()
    def held_out(self) -> float:
        """Return the cross entropy of text that is not used for training, in bits per byte."""
        parts = [self.losses_of(i, True)[0] for i in range(4)]
        self.loads()
        return float(add_up(torch.stack(parts).mean())) / math.log(2)

    def run(self) -> int:
        """Run all steps; return 1 if the model has learned nothing."""
        before, losses, loads = self.held_out(), [], []
        start = time.perf_counter()
        for i in range(self.args.steps):
            losses.append(self.step(i))
            loads.append(self.loads())
            if self.args.process == 0:
                training.bar(i + 1, self.args.steps, losses[-1], time.perf_counter() - start)
        after = self.held_out()
        return training.report(self.args, before, after, losses, np.stack(loads))


def run(args: argparse.Namespace) -> int:
    """Run one process."""
    torch.set_num_threads(1)
    if args.processes > 1:
        where = f"tcp://127.0.0.1:{args.port}"
        dist.init_process_group(
            "gloo", init_method=where, rank=args.process, world_size=args.processes
        )
    sizes = Sizes()
    tokens = sizes.batch * sizes.length // args.processes
    row_bytes = sizes.hidden * (8 if args.float64 else 4)
    with epic.torch.Group(max_tokens=tokens, max_row_bytes=row_bytes) as group:
        return Trainer(args, group, sizes).run()


if __name__ == "__main__":
    sys.exit(training.main(__file__, __doc__, run))
