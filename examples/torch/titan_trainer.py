# SPDX-License-Identifier: Apache-2.0
"""torchtitan's own trainer trains a small Qwen3-MoE model with EPIC's dispatcher.

torchrun --nproc-per-node 4 examples/torch/titan_trainer.py --folder build/titan --steps 10
torchrun --nproc-per-node 4 examples/torch/titan_trainer.py --folder build/titan --steps 20 --ep 2

The second command continues at step 10, and spreads the experts over two ranks.  --own selects
torchtitan's own all-to-all instead of EPIC.  Without GPUs the program runs on the CPU.
"""

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

if not torch.cuda.is_available():
    # torchtitan 0.3.0 takes "cuda" if it finds no device, and has no option for the CPU.
    torch._utils._get_available_device_type = lambda: "cpu"

from torchtitan.components import metrics
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.components.metrics import DeviceMemStats, MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.override import OverrideConfig
from torchtitan.distributed import utils
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.qwen3 import model_registry
from torchtitan.trainer import Trainer

SEQUENCES, LENGTH, WORDS = 8, 16, 64  # sequences of all ranks


class Sequences(BaseDataLoader):
    """Random words that repeat. Batches have different numbers of labels."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """No setting of its own."""

    def __init__(self, *, dp_world_size: int, dp_rank: int, **_: Any) -> None:
        self.step, self.ranks, self.rank = 0, dp_world_size, dp_rank

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield the sequences of this rank.

        The sequences of all ranks together do not depend on the number of ranks.
        """
        while True:
            random = np.random.default_rng(self.step)
            self.step += 1
            words = random.integers(0, WORDS, size=(SEQUENCES, LENGTH // 2))
            ids = np.concatenate([words, words, words[:, :1]], axis=1)
            ends = random.integers(2, LENGTH, size=(SEQUENCES, 1))
            labels = np.where(np.arange(LENGTH) < ends, ids[:, 1:], IGNORE_INDEX)
            own = (torch.from_numpy(v).chunk(self.ranks)[self.rank] for v in (ids, labels))
            yield {"input": next(own)[:, :-1]}, next(own)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, which is equal on all ranks."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position."""
        self.step = state["step"]


class NoTokenizer(BaseTokenizer):
    """A tokenizer that is never used, because the data are ids already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """No setting of its own."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        """Not used."""
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        """Not used."""
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        """Return the number of ids."""
        return WORDS


class Losses(MetricsProcessor):
    """A metrics processor that prints loss and norm with eight decimals."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """No setting of its own."""

    def log(self, *args: Any, **_: Any) -> None:
        """Print a line once for all ranks."""
        step, loss, norm = args[0], args[1], args[3]
        if os.environ["RANK"] == "0":
            print(f"step {step} loss {loss:.8f} norm {norm:.8f}", flush=True)


def use_cpu() -> None:
    """Replace what torchtitan 0.3.0 can do on a GPU only: statistics of the device's memory, and a
    barrier of devices before it shortens the timeout of the process groups."""
    none = SimpleNamespace(
        device_name="cpu",
        get_peak_stats=lambda: DeviceMemStats(0, 0, 0, 0, 0, 0),
        reset_peak_stats=lambda: None,
    )
    metrics.build_device_memory_monitor = lambda: none
    utils.set_pg_timeouts = lambda *_, **__: None


def make_config(args: argparse.Namespace, ranks: int) -> Trainer.Config:
    """Return the configuration of the trainer."""
    spec = model_registry("debugmodel_moe")
    del spec.model.layers[2:]
    for layer in spec.model.layers:
        # The default is FlexAttention, which has no gradient on CPUs.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    sizes = {"hidden_dim": spec.model.dim, "num_max_tokens_per_rank": SEQUENCES // ranks * LENGTH}
    return Trainer.Config(
        model_spec=spec,
        dump_folder=args.folder,
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
        tokenizer=NoTokenizer.Config(),
        dataloader=Sequences.Config(),
        metrics=Losses.Config(log_freq=1),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=100),
        training=TrainingConfig(
            local_batch_size=SEQUENCES // ranks,
            seq_len=LENGTH,
            steps=args.steps,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        parallelism=ParallelismConfig(expert_parallel_degree=args.ep or ranks),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=args.steps, last_save_model_only=False
        ),
        activation_checkpoint=None,
        debug=DebugConfig(seed=0),  # otherwise each run begins with other parameters
        override=OverrideConfig(imports=[] if args.own else [("epic.torch.titan.epic", sizes)]),
    )


def main() -> None:
    """Run one of torchrun's processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True, help="of the checkpoints")
    parser.add_argument("--steps", type=int, default=10, help="of the whole run")
    parser.add_argument("--ep", type=int, help="ranks that share the experts; default: all")
    parser.add_argument("--own", action="store_true", help="use torchtitan's own dispatcher")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        use_cpu()
    trainer = make_config(args, int(os.environ["WORLD_SIZE"])).build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            # Otherwise FSDP divides while it adds (PREMUL_SUM), which gloo does not support.
            module.set_force_sum_reduction_for_comms(True)
        if isinstance(module, RoutedExperts) and os.environ["RANK"] == "0":
            print("dispatcher", type(module.token_dispatcher).__name__)
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
