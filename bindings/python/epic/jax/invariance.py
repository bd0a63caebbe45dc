# SPDX-License-Identifier: Apache-2.0
"""check_invariance: checks whether the bits of a token depend on its batch or its device."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from epic.invariance import (
    InvarianceReport,
    Rows,
    as_bytes,
    batch_sizes,
    column_groups,
    compare_batches,
    draw_pool,
    hash_rows,
)
from epic.jax import sharded
from epic.jax.arrays import check_kind
from epic.jax.groups import Group
from epic.jax.layer_args import MoeWeights, check_parts
from epic.options import Moe, Router

SHARED = ("shared_gate_up", "shared_down", "shared_b_gate_up", "shared_b_down")


def bits_of(x: Any) -> np.ndarray:
    """Return a global array as numpy bytes [num_tokens, n].  Collective over its processes."""
    if not x.is_fully_addressable:
        x = multihost_utils.process_allgather(x, tiled=True)
    return as_bytes(np.asarray(x))


def first_choices(ids: Any, num_ids: int) -> tuple[Any, Any]:
    """Return the ids with only the first choice of each token, and those below num_ids."""
    own = ids.at[:, 1:].set(-1)
    return own, jnp.where(own < num_ids, own, -1)


class Probe:
    """A function that runs the stages of a layer on tokens of a pool (see epic.invariance)."""

    def __init__(
        self,
        mesh: Mesh,
        group: Group,
        options: Moe,
        weights: MoeWeights,
        dtype: Any,
        most: int,
        tables: dict[str, Any],
        grouped_gemm: Any,
    ) -> None:
        self.mesh, self.group, self.weights, self.tables = mesh, group, weights, tables
        self.grouped_gemm = grouped_gemm
        self.axes = tuple(mesh.axis_names)  # also if the group has other token_axes
        # No losses, because their gradients depend on all tokens.
        self.options = replace(options, balance_coeff=0.0, z_coeff=0.0, sequence_tokens=0)
        rows, gradients = draw_pool(most, options.experts.hidden)
        self.pool, self.gradients = (values.astype(dtype) for values in (rows, gradients))
        self.layer = jax.jit(self.run_layer)
        self.logits = jax.jit(self.run_gate)
        self.travel = jax.jit(self.run_travel)
        self.one_expert = jax.jit(self.run_one_expert)
        self.first_choices = jax.jit(first_choices, static_argnums=1)

    def place(self, values: np.ndarray) -> Any:
        """Return the global array of tokens, spread over the mesh, that every process has whole."""
        sharding = NamedSharding(self.mesh, PartitionSpec(self.axes))
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    def run(self, options: Moe, x: Any, weights: Any, **more: Any) -> Any:
        """Run the layer over the mesh."""
        more |= {**self.tables, "grouped_gemm": self.grouped_gemm, "token_axes": self.axes}
        return sharded.moe(self.mesh, self.group, options, x, weights, **more)

    def run_layer(self, x: Any, ct: Any, weights: Any) -> Any:
        """Return the output, the routing and the gradient of the tokens."""

        def forward(x: Any) -> Any:
            found = self.run(self.options, x, weights, return_routing=True)
            return found.out, found.routing

        out, pull, routing = jax.vjp(forward, x, has_aux=True)
        return out, routing, pull(ct)[0]

    def run_gate(self, x: Any, ids: Any, weights: Any) -> Any:
        """Return the logits of the columns in ids.

        The layer does not return its logits.  But with the score "logits", the weights of forced
        ids are the logits of these ids.
        """
        own = self.options.router
        router = Router(own.num_experts, own.top_k, score="logits", zero_experts=own.zero_experts)
        options = replace(self.options, router=router)
        return self.run(options, x, weights, forced=ids, return_routing=True).routing.weights

    def run_travel(self, x: Any, ids: Any) -> Any:
        """Return the rows x after they were sent to the experts in ids and back."""
        plan, rows, _ = sharded.plan_dispatch(
            self.mesh,
            self.group,
            self.options.layer,
            ids,
            x,
            token_axes=self.axes,
            **self.tables,
        )
        return sharded.combine(self.mesh, plan, rows)

    def run_one_expert(self, x: Any, ids: Any, weights: Any) -> Any:
        """Return the result of one expert for each token, with weight 1."""
        options = replace(self.options, shared=None)
        plain = weights._replace(**dict.fromkeys(SHARED))
        ones = jnp.ones(ids.shape, self.weights.w_gate.dtype)
        return self.run(options, x, plain, forced=(ids, ones)).out

    def __call__(self, tokens: np.ndarray) -> Rows:
        """Return the bits of all stages for a batch; tokens: numbers of tokens in the pool."""
        x, ct = self.place(self.pool[tokens]), self.place(self.gradients[tokens])
        router = self.options.router
        out, routing, d_x = self.layer(x, ct, self.weights)
        own, sent = self.first_choices(routing.topk_idx, self.options.layer.num_ids)
        groups = column_groups(router.num_experts + router.zero_experts, router.top_k)
        forced = [self.place(np.tile(ids.astype(np.int32), (len(tokens), 1))) for ids in groups]
        logits = [bits_of(self.logits(x, ids, self.weights)) for ids in forced]
        return {
            "gate": as_bytes(*logits),
            "router": as_bytes(bits_of(routing.topk_idx), bits_of(routing.weights)),
            "dispatch": bits_of(self.travel(x, sent)),
            "product": bits_of(self.one_expert(x, own, self.weights)),
            "combine": bits_of(out),
            "gradient": bits_of(d_x),
        }


def check_invariance(
    mesh: Mesh,
    group: Group,
    options: Moe,
    weights: MoeWeights,
    *,
    dtype: Any = None,
    rank_of_expert: Any = None,
    logical_of_expert: Any = None,
    grouped_gemm: Any = None,
) -> InvarianceReport:
    """Check whether the bits of a token depend on its batch or its device.

    Runs the layer on batches of 1, 2, 7, 32, 100, 1000, 4096 and max_tokens tokens on each device,
    except those larger than max_tokens.  All batches draw their tokens at random from the same 64
    tokens.  The check compares the bits of each token in every stage of the layer.  A layer with
    `Moe.of(..., invariant=True)` has no differences.  Call it outside of `jax.jit`, in all
    processes of the mesh.

    Args:
        mesh: the mesh that the group was opened with.
        group: the group.
        options: the layer.
        weights: global arrays, as for `epic.jax.sharded.moe`.  Replicas of an expert must have
            equal weights.
        dtype: dtype of the tokens; None: that of w_gate_up.
        rank_of_expert: as for `epic.jax.moe`.
        logical_of_expert: as for `epic.jax.moe`.
        grouped_gemm: as for `epic.jax.moe`.

    Returns:
        An `InvarianceReport`, equal in all processes.  Compare its `fingerprint` with that of a
        group of another size and with equal max_tokens.

    Raises:
        EpicArgumentError: an argument is wrong.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import epic.jax
        >>> options = epic.jax.Moe.of(
        ...     num_experts=16, top_k=2, hidden=8, inner=8, leaves=8, invariant=True
        ... )
        >>> weights = epic.jax.MoeWeights(
        ...     w_gate=jnp.ones((8, 16)),
        ...     w_gate_up=jnp.ones((16, 8, 16)),
        ...     w_down=jnp.ones((16, 8, 8)),
        ... )
        >>> mesh = jax.sharding.Mesh(jax.devices(), ("ep",))
        >>> with epic.jax.open(mesh, "ep", max_tokens=8, max_row_bytes=32) as group:
        ...     epic.jax.check_invariance(mesh, group, options, weights).is_invariant
        True

    """
    check_kind("mesh", mesh, Mesh)
    check_kind("group", group, Group)
    check_parts(options, weights)
    devices, sizes = mesh.devices.size, batch_sizes(group.max_tokens)
    kind = weights.w_gate_up.dtype if dtype is None else dtype
    tables = {"rank_of_expert": rank_of_expert, "logical_of_expert": logical_of_expert}
    probe = Probe(mesh, group, options, weights, kind, sizes[0], tables, grouped_gemm)
    batches = [size * devices for size in sizes]
    differences, references = compare_batches("", batches, probe, dict, list, 0, len(probe.pool))
    found = (replace(d, num_tokens=d.num_tokens // devices) for d in differences)
    return InvarianceReport(("",), sizes, tuple(found), hash_rows([references]))
