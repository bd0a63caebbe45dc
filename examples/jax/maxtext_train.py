# SPDX-License-Identifier: Apache-2.0
"""Trains a model of MaxText 0.2.5 with EPIC's layer in place of MaxText's routed experts.

It takes the arguments of MaxText's own program, maxtext.trainers.pre_train.train:

    python examples/jax/maxtext_train.py base.yml model_name=mixtral-8x7b ici_expert_parallelism=8

MaxText keeps its parameters, its sharding and its checkpoints.  Only the call of RoutedMoE changes.
It supports routers that apply softmax to the chosen logits (Mixtral, Qwen3-MoE).
"""

import functools
from typing import Any

import jax
from absl import app
from jax.sharding import Mesh, PartitionSpec
from maxtext.layers.moe import RoutedMoE
from maxtext.trainers.pre_train import train

import epic.jax

TOKENS = PartitionSpec(("data", "fsdp", "expert"))  # how MaxText shards the batch


@functools.cache
def open_group(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> epic.jax.Group:
    """Open the group of the mesh axis "expert" once for each shape of a batch."""
    like = jax.ShapeDtypeStruct(shape, dtype)
    return epic.jax.open(mesh, "expert", name=f"maxtext {shape}", like=like, token_axes=TOKENS)


def run_experts(self: Any, inputs: Any, *_: Any, **__: Any) -> tuple[Any, Any, None]:
    """Run the routed experts of a RoutedMoE; return the output, the balance loss and None."""
    x = inputs.astype(self.dtype)
    group = open_group(self.mesh, x.shape, x.dtype)
    options = epic.jax.Moe.of(
        num_experts=self.num_experts, top_k=self.num_experts_per_tok, hidden=x.shape[2],
        inner=self.intermediate_dim, score="logits", weight_rule="softmax_chosen",
        balance_coeff=self.config.load_balance_loss_weight, sequence_tokens=x.shape[1],
    )  # fmt: skip
    kernels = {name: getattr(self, name)[...].astype(self.dtype) for name in ("wi_0", "wi_1", "wo")}
    weights = epic.jax.from_maxtext({"gate": {"kernel": self.gate.kernel[...]}, **kernels})
    found = epic.jax.sharded.moe(self.mesh, group, options, x, weights, fsdp_axes=("fsdp",))
    return found.out, found.loss, None


if __name__ == "__main__":
    RoutedMoE.__call__ = run_experts
    app.run(train.main)
