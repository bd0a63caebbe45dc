# SPDX-License-Identifier: Apache-2.0
"""The Trainer of transformers trains a model whose experts are spread over ranks.

torchrun --nproc-per-node 4 examples/torch/hf_trainer.py MODEL --folder build/hf --steps 10
torchrun --nproc-per-node 2 examples/torch/hf_trainer.py MODEL --folder build/hf --steps 20

MODEL is a folder of transformers. The second command continues at step 10.
Without GPUs it runs on the CPU.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import epic.torch

LENGTH = 12


class WithEpic:
    """A mixin for Trainer, for models whose experts are spread over ranks.

    Put it before Trainer, or a subclass of it, in the list of base classes. Set `group` and `mesh`
    before the first step. The methods with an underscore override private methods of transformers
    5.24.0.
    """

    group: epic.torch.Group
    mesh: Any

    def create_accelerator_and_postprocess(self: Any) -> None:
        """Keep Trainer from wrapping the model in DDP, which would treat all experts as copies."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.prepare_model = lambda model, *_, **__: model

    def _clip_grad_norm(self: Any, model: Any) -> Any:
        """Add the gradients over the ranks, then clip them by the norm of the whole model.

        Trainer multiplies the loss by the number of processes, because DDP would average gradients.
        Without DDP, this method divides the gradients by this number.
        """
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.accelerator.num_processes
        epic.torch.sum_gradients(model, self.group)
        return epic.torch.clip_grad_norm_(model, self.args.max_grad_norm, self.group)

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model with the experts of all ranks."""
        epic.torch.save_pretrained(self.model, output_dir or self.args.output_dir, self.group)

    def states(self: Any) -> dict[str, Any]:
        """Return what a checkpoint contains in addition to the files of transformers."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # without accelerate
        state = epic.torch.TrainingState(self.model, self.mesh, optimizer)
        return {"train": state, "schedule": self.lr_scheduler}

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        """Write the state of all ranks."""
        dcp.save(self.states(), checkpoint_id=Path(output_dir) / "epic")

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        """Read the state, for any number of ranks."""
        if checkpoint is not None:
            dcp.load(self.states(), checkpoint_id=Path(checkpoint) / "epic")

    def _load_from_checkpoint(self, *_: Any, **__: Any) -> None:
        """Do nothing, because the state that is loaded also contains the parameters."""


def make_data(vocabulary: int) -> list[dict[str, Any]]:
    """Return sequences with different numbers of labels; -100 is no label."""
    random = np.random.default_rng(0)
    data = []
    for _ in range(64):
        ids = random.integers(3, vocabulary, size=LENGTH)
        ids[LENGTH // 2 :] = ids[: LENGTH // 2]
        labels = ids.copy()
        labels[: random.integers(1, LENGTH - 1)] = -100
        data.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return data


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return a batch."""
    return {key: torch.tensor([sample[key] for sample in samples]) for key in samples[0]}


def options_of(args: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Return the arguments for TrainingArguments."""
    return {
        "output_dir": str(args.folder),
        "max_steps": args.steps,
        "per_device_train_batch_size": 8 // ranks,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 2,
        "max_grad_norm": args.max_norm,
        "save_steps": args.save_every,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
    }


def make_trainer(args: argparse.Namespace, model: Any, ranks: int, *mixins: type) -> Any:
    """Return the trainer, a subclass of the mixins."""
    data: Any = make_data(model.config.vocab_size)
    kind = type("Trained", (*mixins, Trainer), {})
    options = TrainingArguments(**options_of(args, ranks))
    return kind(model, options, data_collator=collate, train_dataset=data)


def read_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="a folder of transformers")
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoints")
    parser.add_argument("--steps", type=int, default=10, help="of the whole run")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--float64", action="store_true")
    parser.add_argument("--own", action="store_true", help="train without EPIC")
    return parser.parse_args(words)


def train_own(args: argparse.Namespace, make_trainer: Callable[..., Any], dtype: Any) -> None:
    """Train without EPIC: each rank has all experts."""
    options = {"dtype": dtype, "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(args.model, **options)
    trainer = make_trainer(args, model.train(), dist.get_world_size())
    trainer.train()
    trainer.save_model(str(args.folder / "final"))


def train(args: argparse.Namespace, make_trainer: Callable[..., Any], dtype: Any) -> None:
    """Train with the experts spread over all ranks."""
    device, ranks = "cuda" if torch.cuda.is_available() else "cpu", dist.get_world_size()
    mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("ep",))
    with epic.torch.Group(mesh, "ep", max_tokens=8 * LENGTH, max_row_bytes=1 << 14) as group:
        model = epic.torch.from_pretrained(AutoModelForCausalLM, args.model, group, dtype=dtype)
        trainer = make_trainer(args, model.train(), ranks, WithEpic)
        trainer.group, trainer.mesh = group, mesh
        folder = args.folder
        trainer.train(
            resume_from_checkpoint=get_last_checkpoint(folder) if folder.exists() else None
        )
        trainer.save_model(str(folder / "final"))


def main(make_trainer: Callable[..., Any] = make_trainer) -> None:
    """Run one of torchrun's processes."""
    args = read_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    dtype = torch.float64 if args.float64 else torch.float32
    (train_own if args.own else train)(args, make_trainer, dtype)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
