# SPDX-License-Identifier: Apache-2.0
"""Trains a small language model with Mixture-of-Experts layers. docs/guide/recipe.md explains it.

python examples/jax/recipe.py --folder build/recipe-jax --devices 4 --steps 40
python examples/jax/recipe.py --folder build/recipe-jax --devices 2 --steps 80

The second command continues at step 40.  Without --devices it uses all GPUs, or one CPU device.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import epic.jax

WORDS, LENGTH, HIDDEN, HEADS, INNER, EXPERTS, LAYERS = 32, 12, 32, 4, 48, 8, 2
OPTIONS = epic.jax.Moe.of(
    num_experts=EXPERTS, top_k=2, hidden=HIDDEN, inner=INNER, normalize="sum", balance_coeff=0.01
)
SEQUENCES, MICRO_BATCHES = 8, 2  # sequences of a micro-batch, and micro-batches of a step
WARMUP, RATE = 5, 1e-2
TRAINING, HELD_OUT = 0, 1
DATA = P(None, ("dp", "ep"))  # sharding of the sequences [micro-batches, sequences, positions]


def make_batches(part: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids and labels [MICRO_BATCHES, SEQUENCES, LENGTH] of a step.

    A sequence is 2 to 6 random words, the separator 1, and the words in reverse order.  Only the
    last part has labels.  Padding has id 0, and positions without a label have label -100.
    """
    random = np.random.default_rng([part, step])
    ids = np.zeros((MICRO_BATCHES, SEQUENCES, LENGTH), np.int32)
    labels = np.full_like(ids, -100)
    for row, wanted in zip(ids.reshape(-1, LENGTH), labels.reshape(-1, LENGTH), strict=True):
        words = random.integers(2, WORDS, size=random.integers(2, 7))
        count = len(words)
        row[:count], row[count], row[count + 1 : 2 * count] = words, 1, words[:0:-1]
        wanted[count : 2 * count] = words[::-1]
    return ids, labels


def first_params(dtype: Any) -> Any:
    """Return the parameters with which a run begins."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (random.normal(size=shape) / np.sqrt(shape[-2])).astype(dtype)

    def layer() -> dict[str, Any]:
        moe = epic.jax.MoeWeights(
            w_gate=normal(HIDDEN, EXPERTS),
            w_gate_up=normal(EXPERTS, HIDDEN, 2 * INNER),
            w_down=normal(EXPERTS, INNER, HIDDEN),
        )
        return {"qkv": normal(HIDDEN, 3 * HIDDEN), "out": normal(HIDDEN, HIDDEN), "moe": moe}

    return {
        "words": normal(WORDS, HIDDEN) * 4,
        "places": normal(LENGTH, HIDDEN),
        "layers": [layer() for _ in range(LAYERS)],
        "head": normal(HIDDEN, WORDS),
    }


def shardings_of(mesh: Mesh, group: Any, params: Any) -> Any:
    """Return the sharding of each parameter: experts over "ep", the others on every device."""
    specs = jax.tree.map(lambda _: P(), params)
    for layer, spec in zip(params["layers"], specs["layers"], strict=True):
        spec["moe"] = epic.jax.sharded.weight_specs(group, layer["moe"])
    return jax.tree.map(partial(NamedSharding, mesh), specs, is_leaf=lambda x: isinstance(x, P))


def norm(x: jax.Array) -> jax.Array:
    """Return the RMS norm without a scale."""
    return x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 1e-6)


def attend(layer: dict[str, Any], x: jax.Array) -> jax.Array:
    """Return causal attention. Padding is at the end, so no token reads it."""
    parts = (norm(x) @ layer["qkv"]).reshape(*x.shape[:2], 3, HEADS, -1)
    q, k, v = (parts[:, :, i] for i in range(3))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ layer["out"]


def loss_of(
    mesh: Mesh, group: Any, params: Any, ids: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the sum of the losses of all labels, and the balance loss.

    Arrays are global, so there are no parts of a loss, and jax.grad needs no sum over ranks.
    """
    is_token = ids != 0
    x, balance = params["words"][ids] + params["places"], jnp.zeros(())
    for layer in params["layers"]:
        x = x + attend(layer, x)
        moe = epic.jax.sharded.moe(mesh, group, OPTIONS, norm(x), layer["moe"], token_mask=is_token)
        x, balance = x + jnp.where(is_token[..., None], moe.out, 0), balance + moe.loss
    logits = jax.nn.log_softmax(norm(x) @ params["head"])
    chosen = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    return -jnp.where(labels != -100, chosen, 0).sum(), balance


class Trainer:
    """A training run."""

    def __init__(self, args: argparse.Namespace, mesh: Mesh, group: Any) -> None:
        self.args, self.mesh, self.loss_of = args, mesh, partial(loss_of, mesh, group)
        rates = optax.warmup_cosine_decay_schedule(
            RATE / WARMUP, RATE, WARMUP, WARMUP + args.decay, RATE / 10
        )
        self.optimizer = optax.chain(
            optax.clip_by_global_norm(args.max_norm), optax.adamw(rates, weight_decay=0.01)
        )
        params = first_params(np.float64 if args.float64 else np.float32)
        shardings = shardings_of(mesh, group, params)
        self.params = jax.device_put(params, shardings)
        places = optax.tree_map_params(
            self.optimizer,
            lambda _, place: place,
            jax.eval_shape(self.optimizer.init, params),
            shardings,
            transform_non_params=lambda _: NamedSharding(mesh, P()),
        )
        self.state = jax.jit(self.optimizer.init, out_shardings=places)(self.params)
        self.train_step = jax.jit(self.make_step(), donate_argnums=(0, 1))
        self.evaluate = jax.jit(self.mean_loss)
        options = ocp.CheckpointManagerOptions(save_interval_steps=args.save_every)
        self.checkpoints = ocp.CheckpointManager(args.folder.resolve(), options=options)

    def read(self, part: int, step: int) -> Any:
        """Return ids and labels as global arrays."""
        return jax.device_put(make_batches(part, step), NamedSharding(self.mesh, DATA))

    def make_step(self) -> Any:
        """Return a function that changes the parameters and returns loss and norm."""

        def micro_batch(params: Any, total: Any, ids: Any, labels: Any) -> Any:
            entropy, balance = self.loss_of(params, ids, labels)
            part = entropy / total  # parts of all micro-batches add up to the mean
            return part + balance / MICRO_BATCHES, part

        def step(params: Any, state: Any, ids: Any, labels: Any) -> Any:
            total = (labels != -100).sum()

            def accumulate(carry: Any, batch: Any) -> tuple[Any, None]:
                gradient = jax.grad(micro_batch, has_aux=True)
                return jax.tree.map(jnp.add, carry, gradient(params, total, *batch)), None

            zeros = jax.tree.map(jnp.zeros_like, params), jnp.zeros((), params["words"].dtype)
            (gradients, loss), _ = jax.lax.scan(accumulate, zeros, (ids, labels))
            updates, state = self.optimizer.update(gradients, state, params)
            norm_of_all = optax.tree.norm(gradients)
            return optax.apply_updates(params, updates), state, loss, norm_of_all

        return step

    def mean_loss(self, params: Any, ids: jax.Array, labels: jax.Array) -> jax.Array:
        """Return the mean loss of all labels."""
        entropies = [self.loss_of(params, *batch)[0] for batch in zip(ids, labels, strict=True)]
        return jnp.stack(entropies).sum() / (labels != -100).sum()

    def resume(self) -> int:
        """Load the newest checkpoint, if there is one; return the first step to run."""
        newest = self.checkpoints.latest_step()
        if newest is None:
            return 0
        now = {"params": self.params, "state": self.state}
        # The arrays get the shardings of this run, for any number of devices.
        kinds = jax.tree.map(ocp.utils.to_shape_dtype_struct, now)
        found = self.checkpoints.restore(newest, args=ocp.args.StandardRestore(kinds))
        self.params, self.state = found["params"], found["state"]
        return newest

    def run(self) -> None:
        """Run all steps that a checkpoint does not contain."""
        first = self.resume()
        held_out = self.read(HELD_OUT, 0)
        print(f"begin at step {first}, held-out loss {self.evaluate(self.params, *held_out):.8f}")
        for step in range(first, self.args.steps):
            self.params, self.state, loss, length = self.train_step(
                self.params, self.state, *self.read(TRAINING, step)
            )
            print(f"step {step} loss {loss:.8f} norm {length:.4f}", flush=True)
            now = ocp.args.StandardSave({"params": self.params, "state": self.state})
            self.checkpoints.save(step + 1, args=now, force=step + 1 == self.args.steps)
        self.checkpoints.close()  # waits until the last checkpoint is complete
        print(f"end, held-out loss {self.evaluate(self.params, *held_out):.8f}")


def main() -> None:
    """Run the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoints")
    parser.add_argument("--devices", type=int, help="number of CPU devices")
    parser.add_argument("--steps", type=int, default=40, help="of the whole run")
    parser.add_argument("--decay", type=int, default=100, help="steps until the rate is lowest")
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--ep", type=int, help="devices that share the experts; default: all")
    parser.add_argument("--float64", action="store_true")
    args = parser.parse_args()
    if args.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)
    jax.config.update("jax_enable_x64", args.float64)
    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(-1, args.ep or len(devices)), ("dp", "ep"))
    tokens = SEQUENCES * LENGTH // len(devices)
    row_bytes = HIDDEN * (8 if args.float64 else 4)
    with epic.jax.open(mesh, "ep", max_tokens=tokens, max_row_bytes=row_bytes) as group:
        trainer = Trainer(args, mesh, group)
        trainer.run()
        jax.block_until_ready((trainer.params, trainer.state))


if __name__ == "__main__":
    main()
