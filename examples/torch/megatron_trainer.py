# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core trains a small Mixture-of-Experts model, its experts spread over ranks by EPIC.

torchrun --nproc-per-node 4 examples/torch/megatron_trainer.py --folder build/megatron --steps 10
torchrun --nproc-per-node 4 examples/torch/megatron_trainer.py --folder build/megatron --steps 20 \
    --ep 2 --tp 2

The second command continues at step 10, with two ranks for the experts and two ranks for attention.
--own selects Megatron's own dispatcher.  Without GPUs it runs on the CPU.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
if not torch.cuda.is_available():
    import megatron_cpu
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

import megatron_adam
from epic.torch.megatron import use_epic

SEQUENCES, LENGTH, WORDS = 16, 16, 64  # sequences of all ranks in a step
MICROBATCHES = 2
LAYERS = 2


class Norm(torch.nn.RMSNorm):
    """A norm for tensor parallelism without Transformer Engine.

    With sequence parallelism each rank has a part of the tokens, and Megatron adds the gradients of
    parameters that have the attribute `sequence_parallel`.  Megatron's own WrappedTorchNorm refuses
    sequence parallelism, and its MoE layer needs it if there is tensor parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def make_config(args: argparse.Namespace) -> TransformerConfig:
    """Return the configuration of the model."""
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_router_dtype="fp64" if args.float64 else "fp32",
        moe_router_load_balancing_type="none",
        moe_ffn_hidden_size=32,
        moe_token_dispatcher_type="allgather",  # "alltoall" needs a GPU
        tensor_model_parallel_size=args.tp,
        sequence_parallel=args.tp > 1,
        expert_model_parallel_size=args.ep,
        expert_tensor_parallel_size=1,
        params_dtype=torch.float64 if args.float64 else torch.float32,
        calculate_per_token_loss=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
    )


def separate_experts(model: GPTModel) -> None:
    """Give the experts an optimizer of their own also if no expert parallelism divides them.

    Megatron does that only with expert parallelism, and cannot load the state of two optimizers
    into one.
    """
    for module in model.modules():
        if isinstance(module, BaseMoELayer):
            for parameter in module.experts.parameters():
                parameter.allreduce = False  # type: ignore[attr-defined]


def make_model(args: argparse.Namespace) -> DistributedDataParallel:
    """Return the model, with EPIC's dispatcher in each layer."""
    config = make_config(args)
    layer = get_gpt_layer_local_spec(num_experts=8, moe_grouped_gemm=False, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    torch.manual_seed(1)
    model = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules([layer] * LAYERS, Norm),
        vocab_size=WORDS,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
    )
    separate_experts(model)
    if not args.own:
        tokens = SEQUENCES // MICROBATCHES * LENGTH // dist.get_world_size()
        use_epic(model, max_tokens=tokens)
    if torch.cuda.is_available():
        model.cuda()
    settings = DistributedDataParallelConfig(use_distributed_optimizer=not args.plain)
    model = DistributedDataParallel(config, settings, model)
    config.finalize_model_grads_func = finalize_model_grads
    return model


def make_optimizer(args: argparse.Namespace, model: DistributedDataParallel) -> tuple[Any, Any]:
    """Return optimizer and schedule."""
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        min_lr=1e-3,
        weight_decay=0.1,
        clip_grad=1.0,
        use_distributed_optimizer=not args.plain,
    )
    optimizer = get_megatron_optimizer(settings, [model])
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-3,
        lr_warmup_steps=2,
        lr_decay_steps=100,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=100,
        wd_incr_style="constant",
    )
    return optimizer, schedule


def batches(step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ids and labels of this rank's micro-batches, which have different numbers of labels.

    -1 is no label.
    """
    random = np.random.default_rng(step)
    words = random.integers(0, WORDS, size=(SEQUENCES, LENGTH // 2))
    ids = np.concatenate([words, words, words[:, :1]], axis=1)
    ends = random.integers(2, LENGTH, size=(SEQUENCES, 1))
    labels = np.where(np.arange(LENGTH) < ends, ids[:, 1:], -1)
    rank, ranks = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    device = torch.cuda.current_device()
    for part in range(MICROBATCHES):
        own = slice(part * ranks + rank, None, MICROBATCHES * ranks)
        yield tuple(torch.from_numpy(v[own]).to(device) for v in (ids[:, :-1], labels))


def sum_losses(labels: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of the losses, the number of labels, and both in one tensor."""
    mask = labels >= 0
    total, count = (losses * mask).sum(), mask.sum().int()
    return total, count, torch.stack([total.detach().double(), count.double()])


def forward(data: Iterator[tuple[Tensor, Tensor]], model: Any) -> tuple[Tensor, Any]:
    """Return losses of a micro-batch, and the function that adds them."""
    ids, labels = next(data)
    positions = torch.arange(LENGTH, device=ids.device).expand_as(ids)
    return model(ids, positions, None, labels=labels.clamp(min=0)), partial(sum_losses, labels)


class Run:
    """A training run that continues from its last checkpoint."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.folder, self.step = Path(args.folder), 0
        self.model = make_model(args)
        self.optimizer, self.schedule = make_optimizer(args, self.model)
        saved = sorted(self.folder.glob("[0-9]*"))
        if saved:
            self.load(saved[-1])
        elif args.parameters_of:
            self.load_parameters(args.parameters_of)

    def state(self, is_loading: bool) -> dict[str, Any]:
        """Return the state that a checkpoint contains, for any number of ranks."""
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "chained_optim_avoid_prefix": True,
        }
        model = self.model.module.sharded_state_dict(metadata=metadata)
        return {
            "model": model,
            "optimizer": self.optimizer.sharded_state_dict(
                model, is_loading=is_loading, metadata=metadata
            ),
            "schedule": self.schedule.state_dict(),
            "step": self.step,
        }

    def save(self) -> None:
        """Write a checkpoint."""
        folder = self.folder / f"{self.step:06}"
        folder.mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save(self.state(False), str(folder))

    def load(self, folder: Path) -> None:
        """Read a checkpoint."""
        state = dist_checkpointing.load(self.state(True), str(folder))
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.step = state["step"]

    def load_parameters(self, folder: str) -> None:
        """Read the parameters of a checkpoint, but not its optimizer."""
        state = {"model": self.model.module.sharded_state_dict()}
        state = dist_checkpointing.load(state, folder)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.reload_model_params()

    def train(self, steps: int) -> None:
        """Train until this step."""
        while self.step < steps:
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            sums = get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=batches(self.step),
                model=[self.model],
                num_microbatches=MICROBATCHES,
                seq_length=LENGTH,
                micro_batch_size=SEQUENCES // MICROBATCHES,
            )
            _, norm, _ = self.optimizer.step()
            self.schedule.step(increment=1)
            self.step += 1
            total = torch.stack(sums).sum(0)
            dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
            if dist.get_rank() == 0:
                loss = total[0] / total[1]
                print(f"step {self.step} loss {loss:.12f} norm {float(norm):.8f}", flush=True)


def main() -> None:
    """Run one of torchrun's processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True, help="of the checkpoint")
    parser.add_argument("--steps", type=int, default=10, help="of the whole run")
    parser.add_argument("--ep", type=int, help="ranks that share the experts; default: all")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the attention")
    parser.add_argument(
        "--parameters-of", help="a checkpoint; a new run begins with its parameters"
    )
    parser.add_argument("--own", action="store_true", help="use Megatron's own dispatcher")
    parser.add_argument("--float64", action="store_true", help="compute in float64; only on CPUs")
    parser.add_argument("--plain", action="store_true", help="use no distributed optimizer")
    args = parser.parse_args()
    with_gpu = torch.cuda.is_available()
    if args.float64 and with_gpu:
        parser.error("--float64 works only on CPUs: hide the GPUs with CUDA_VISIBLE_DEVICES=")
    dist.init_process_group("nccl" if with_gpu else "gloo")
    args.ep = args.ep or dist.get_world_size()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tp,
        expert_model_parallel_size=args.ep,
        expert_tensor_parallel_size=1,
    )
    if with_gpu:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    else:
        megatron_cpu.use_cpu()
    megatron_adam.fix_optimizer()
    with contextlib.nullcontext() if with_gpu else megatron_cpu.OnCpu(args.float64):
        run = Run(args)
        run.train(args.steps)
        run.save()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
