# SPDX-License-Identifier: Apache-2.0
"""A small Mixture-of-Experts transformer learns bytes of text, its experts spread over processes.

python examples/jax/train_text.py                        4 processes, 200 steps, a progress bar
python examples/jax/train_text.py --check                compare the losses with one process's
python examples/jax/train_text.py --processes 2 book.txt --picture load.png

With --check the exit status is 1 if the losses differ.
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
import training
from training import Params, Sizes

# ------------------------------------------------------------------------------ model ----


def norm(x: Any) -> Any:
    """Return the RMS norm without a scale."""
    import jax
    import jax.numpy as jnp

    return x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 1e-6)


def attention(sizes: Sizes, w: Params, x: Any) -> Any:
    """Return causal self-attention."""
    import jax
    import jax.numpy as jnp

    heads = (*x.shape[:2], sizes.heads, sizes.hidden // sizes.heads)
    q, k, v = (part.reshape(heads) for part in jnp.split(norm(x) @ w["qkv"], 3, axis=-1))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ w["out"]


def make_loss(sizes: Sizes, mesh: Any, group: Any) -> Any:
    """Return the loss function.

    It maps (params, text [batch, length + 1]) to loss, (cross entropy, load [layers, E]).
    """
    import jax
    import jax.numpy as jnp

    import epic.jax

    options = epic.jax.Moe(
        epic.jax.Layer(sizes.experts, sizes.top_k, sum_order="tree", leaves=sizes.experts),
        epic.jax.Router(sizes.experts, sizes.top_k, normalize="sum"),
        epic.jax.Experts(sizes.experts // group.num_ranks, sizes.hidden, sizes.inner),
        balance_coeff=0.02,
    )

    def loss_of(params: Params, text: Any) -> Any:
        x = params["embed"][text[:, :-1]] + params["place"]
        extra, loads = jnp.zeros(()), []
        for w in params["layers"]:
            x = x + attention(sizes, w, x)
            weights = epic.jax.MoeWeights(**w["moe"])
            moe = epic.jax.sharded.moe(mesh, group, options, norm(x), weights)
            x, extra = x + moe.out, extra + moe.loss
            loads.append(moe.load)
        logits = jax.nn.log_softmax(norm(x) @ params["head"])
        entropy = -jnp.take_along_axis(logits, text[:, 1:, None], axis=-1).mean()
        return entropy + extra, (entropy, jnp.stack(loads))

    return loss_of


# --------------------------------------------------------------------------- training ----


def place(mesh: Any, value: Any, *axes: Any) -> Any:
    """Return a global array from an array that every process has."""
    import jax

    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def place_params(mesh: Any, params: Params) -> Params:
    """Return the parameters as global arrays, with the experts sharded over the group."""
    import jax

    def one(path: Any, value: Any) -> Any:
        return place(mesh, value, *(["ep"] if path[-1].key in ("w_gate_up", "w_down") else []))

    return jax.tree_util.tree_map_with_path(one, params)


def make_optimizer(args: argparse.Namespace, mesh: Any, params: Params) -> tuple[Any, Any]:
    """Return AdamW with a cosine schedule, and its state, sharded like the parameters."""
    import jax
    import optax

    rates = optax.warmup_cosine_decay_schedule(
        0.0, args.rate, max(args.steps // 20, 1), args.steps, args.rate / 10
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rates, b2=0.98))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    places = optax.tree_map_params(
        optimizer,
        lambda _, p: p.sharding,
        jax.eval_shape(optimizer.init, params),
        params,
        transform_non_params=lambda _: everywhere,
    )
    return optimizer, jax.jit(optimizer.init, out_shardings=places)(params)


def make_steps(loss_of: Any, optimizer: Any) -> tuple[Any, Any]:
    """Return a training step and an evaluation, compiled."""
    import jax
    import optax

    def step(params: Params, state: Any, text: Any) -> Any:
        (loss, aux), grads = jax.value_and_grad(loss_of, has_aux=True)(params, text)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, aux[1]

    def entropy(params: Params, text: Any) -> Any:
        return loss_of(params, text)[1][0]

    return jax.jit(step, donate_argnums=(0, 1)), jax.jit(entropy)


def train(args: argparse.Namespace, mesh: Any, group: Any, sizes: Sizes) -> int:
    """Run all steps; return 1 if the loss did not fall."""
    import jax
    import numpy as np

    text = training.read_text(args.text)
    kind = np.float64 if args.float64 else np.float32
    first = jax.tree.map(lambda value: value.astype(kind), training.initial(sizes))
    params = place_params(mesh, first)
    optimizer, state = make_optimizer(args, mesh, params)
    step, entropy = make_steps(make_loss(sizes, mesh, group), optimizer)

    def rows(number: int, held_out: bool = False) -> Any:
        return place(mesh, training.batch_of(text, sizes, number, held_out), ("dp", "ep"))

    def held_out() -> float:
        return float(np.mean([float(entropy(params, rows(i, True))) for i in range(4)])) / math.log(
            2
        )

    before, losses, loads = held_out(), [], []
    start = time.perf_counter()
    for i in range(args.steps):
        params, state, loss, load = step(params, state, rows(i))
        losses.append(float(loss))
        loads.append(np.asarray(load))
        if args.process == 0:
            training.bar(i + 1, args.steps, losses[-1], time.perf_counter() - start)
    after = held_out()
    jax.block_until_ready((params, state))
    return training.report(args, before, after, losses, np.stack(loads))


def run(args: argparse.Namespace) -> int:
    """Run one process."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax
    import numpy as np

    import epic.jax

    jax.config.update("jax_enable_x64", args.float64)
    if args.processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{args.port}", args.processes, args.process)
    sizes = Sizes()
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(1, -1), ("dp", "ep"))
    tokens = sizes.batch * sizes.length // len(jax.devices())
    row_bytes = sizes.hidden * (8 if args.float64 else 4)
    with epic.jax.open(mesh, "ep", max_tokens=tokens, max_row_bytes=row_bytes) as group:
        return train(args, mesh, group, sizes)


if __name__ == "__main__":
    sys.exit(training.main(__file__, __doc__, run))
