# SPDX-License-Identifier: Apache-2.0
"""check_invariance: checks whether the bits of a token depend on its batch or its rank."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from epic.errors import EpicArgumentError
from epic.invariance import (
    Difference,
    InvarianceReport,
    Rows,
    as_bytes,
    batch_sizes,
    column_groups,
    compare_batches,
    draw_pool,
    hash_rows,
)
from epic.options import Router
from epic.torch import combining, steps
from epic.torch.families import unwrapped
from epic.torch.groups import Group
from epic.torch.module import MoE
from epic.torch.moe import MoeWeights, moe
from epic.torch.replay import layers_of
from epic.torch.sums import sum as sum_over_ranks

SHARED = ("shared_gate_up", "shared_down", "shared_b_gate_up", "shared_b_down", "w_shared_gate")


def bits_of(x: Tensor) -> np.ndarray:
    """Return a tensor [num_tokens, n] as numpy integers with the same bits."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.detach().contiguous().view(kinds[x.element_size()]).cpu().numpy()


def call_inside(module: nn.Module, layer: MoE, work: Callable[[], Any]) -> Any:
    """Call a function while the adapters of a layer are active, and return its result.

    The wrappers of peft change the parameters of a layer only while they call it. So the function
    runs in place of the layer's forward.

    Args:
        module: The layer in the wrappers of peft, or the layer.
        layer: The layer.
        work: The function.
    """
    found = []

    def forward(x: Tensor) -> Tensor:
        found.append(work())
        return x

    layer.forward = forward  # type: ignore[assignment, method-assign]
    try:
        module(torch.empty(0, layer.options.experts.hidden, device=layer.group.device))
    finally:
        del layer.forward
    return found[0]


class Probe:
    """A function that runs the stages of a layer on tokens of a pool (see epic.invariance).

    Args:
        module: The layer in the wrappers of its adapters, or the layer.
        layer: The layer.
        most: Largest number of tokens in a batch.
    """

    def __init__(self, module: nn.Module, layer: MoE, most: int) -> None:
        self.module, self.layer, self.group = module, layer, layer.group
        # No losses, because their gradients depend on all tokens.
        self.options = replace(layer.options, balance_coeff=0.0, z_coeff=0.0, sequence_tokens=0)
        held = layer.w_gate_up.dtype
        self.dtype = held if held.itemsize > 1 else torch.bfloat16
        rows, gradients = draw_pool(most, self.options.experts.hidden)
        self.pool, self.gradients = (
            torch.from_numpy(values).to(self.group.device, self.dtype)
            for values in (rows, gradients)
        )

    def run(self, x: Tensor, options: Any = None, **more: Any) -> Any:
        """Run the layer on x, with its own options and weights or with others.

        **more: other arguments of `moe`, among them weights.
        """
        weights = more.pop("weights", None) or self.layer.weights()
        return moe(
            self.group,
            options or self.options,
            x,
            weights,
            grouped_mm=self.layer.grouped_mm,
            logical_of_expert=self.layer.logical_of_expert,
            tag=self.layer.tag,
            **more,
        )

    def logits(self, x: Tensor) -> list[np.ndarray]:
        """Return the bits of logits, as arrays [num_tokens, top_k] for groups of columns.

        The layer does not return its logits. But with the score "logits", the weights of forced ids
        are the logits of these ids.
        """
        own = self.options.router
        router = Router(own.num_experts, own.top_k, score="logits", zero_experts=own.zero_experts)
        found = []
        for columns in column_groups(own.num_experts + own.zero_experts, own.top_k):
            ids = torch.from_numpy(columns).to(x.device).expand(len(x), -1)
            options = replace(self.options, router=router)
            used = self.run(x, options, forced=ids, return_routing=True).routing
            found.append(bits_of(used.weights))
        return found

    def travel(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return the rows x after they were sent to the experts in ids and back."""
        replicas = self.layer.logical_of_expert
        plan = steps.plan(
            self.group, self.options.layer, ids, logical_of_expert=replicas, tag=self.layer.tag
        )
        return combining.combine(plan, steps.dispatch(plan, x)[0])

    def one_expert(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return the result of one expert for each token, with weight 1.

        ids: [num_tokens, top_k], where only the first column has experts.
        """
        weights: MoeWeights = self.layer.weights()._replace(**dict.fromkeys(SHARED))
        ones = torch.ones(ids.shape, device=x.device)
        ones = ones.double() if x.dtype == torch.float64 else ones
        options = replace(self.options, shared=None)
        return self.run(x, options, weights=weights, forced=(ids, ones)).out

    def __call__(self, tokens: np.ndarray) -> Rows:
        """Return the bits of all stages for a batch; tokens: numbers of tokens in the pool."""
        rows: Rows = call_inside(self.module, self.layer, lambda: self.stages(tokens))
        return rows

    def stages(self, tokens: np.ndarray) -> Rows:
        """Return the same, with the parameters that the layer has now."""
        at = torch.from_numpy(tokens).to(self.group.device)
        x = self.pool[at].requires_grad_()
        found = self.run(x, return_routing=True)
        (d_x,) = torch.autograd.grad(found.out, x, self.gradients[at])
        with torch.no_grad():
            ids, weights = found.routing
            own = ids.clone()
            own[:, 1:] = -1
            sent = torch.where(own < self.options.layer.num_ids, own, -1)
            return {
                "gate": as_bytes(*self.logits(x)),
                "router": as_bytes(bits_of(ids), bits_of(weights)),
                "dispatch": as_bytes(bits_of(self.travel(x, sent))),
                "product": as_bytes(bits_of(self.one_expert(x, own))),
                "combine": as_bytes(bits_of(found.out)),
                "gradient": as_bytes(bits_of(d_x)),
            }

    def add(self, numbers: list[int]) -> list[int]:
        """Return counts, added over the ranks. Collective."""
        values = torch.tensor(numbers, dtype=torch.float32, device=self.group.device)
        return [int(v) for v in sum_over_ranks(self.group, values, tag=self.layer.tag)]

    def share(self, rows: Rows) -> Rows:
        """Return the rows of the first member on all ranks. Collective.

        It is a sum over the ranks, to which all other ranks add zeros.
        """
        found, is_first = {}, self.group.rank == self.group.members.ranks[0]
        for stage, values in rows.items():
            own = values if is_first else np.zeros_like(values)
            numbers = torch.from_numpy(own.astype(np.float32)).to(self.group.device)
            whole = sum_over_ranks(self.group, numbers, tag=self.layer.tag)
            found[stage] = whole.cpu().numpy().astype(np.uint8)
        return found


def check_invariance(model: nn.Module, group: Group | None = None) -> InvarianceReport:
    """Check whether the bits of a token depend on its batch or its rank.

    Runs each MoE layer on batches of 1, 2, 7, 32, 100, 1000, 4096 and max_tokens tokens on each
    rank, except those larger than max_tokens. All batches draw their tokens at random from the same
    64 tokens. The check compares the bits of each token in every stage of the layer. A layer with
    `Moe.of(..., invariant=True)` has no differences. The check does not change parameters or their
    gradients.

    Collective: every rank calls it.

    Args:
        model: A model with `MoE` layers, or a `MoE`; also a model whose blocks `replace_moe` has
            replaced, with the adapters of peft that are active.
        group: Only layers of this group are checked. None: all layers.

    Returns:
        An `InvarianceReport`, equal on all ranks. Compare its `fingerprint` with that of a group of
        another size.

    Raises:
        EpicArgumentError: The model has no MoE layer of the group.
        EpicError: A rank failed, was late, or made a different call.

    Example:
        >>> import epic.torch
        >>> options = epic.torch.Moe.of(
        ...     num_experts=4, top_k=2, hidden=8, inner=16, invariant=True
        ... )
        >>> with epic.torch.Group(num_ranks=1, max_tokens=40, max_row_bytes=32) as group:
        ...     report = epic.torch.check_invariance(epic.torch.MoE(group, options))
        >>> report.is_invariant, report.batches
        (True, (40, 32, 7, 2, 1))
    """
    layers = {n: v for n, v in layers_of(model).items() if group is None or v.group is group}
    if not layers:
        raise EpicArgumentError("group is not that of a MoE layer of model: pass its group or None")
    differences: list[Difference] = []
    references: list[Rows] = []
    tried: set[int] = set()
    wrapped: dict[MoE, nn.Module] = {}
    for module in model.modules():  # a wrapper comes before the module in it
        if isinstance(unwrapped(module), MoE):
            wrapped.setdefault(unwrapped(module), module)
    for name, layer in layers.items():
        sizes = batch_sizes(layer.group.max_tokens)
        probe = Probe(wrapped[layer], layer, sizes[0])
        with torch.enable_grad():
            found, rows = compare_batches(
                name, sizes, probe, probe.share, probe.add, layer.group.rank, len(probe.pool)
            )
        differences += found
        references.append(rows)
        tried.update(sizes)
    return InvarianceReport(
        tuple(layers),
        tuple(sorted(tried, reverse=True)),
        tuple(differences),
        hash_rows(references),
    )
