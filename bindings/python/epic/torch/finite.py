# SPDX-License-Identifier: Apache-2.0
"""A mode that finds the first NaN or infinity in the MoE layers of a model.

Each layer checks its input, its output and their gradients. All ranks then exchange their findings.
If an output or a gradient of an input is not finite, all ranks compute the layer again, with one
choice of each token at a time. Each row that a token gets back then comes from one expert, so the
error can name this expert.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from epic.errors import EpicNonFiniteError
from epic.non_finite import (
    D_EXPERT,
    D_INPUT,
    D_OUTPUT,
    EXPERT,
    INPUT,
    LOGITS,
    OUTPUT,
    SHARED,
    STAGES,
)
from epic.options import Layer
from epic.torch import combining, steps
from epic.torch.experts import ExpertWeights
from epic.torch.module import MoE
from epic.torch.moe import EXPERT_WEIGHTS, MoeWeights, logits_of, run_experts, run_shared_expert
from epic.torch.routing import Routing
from epic.torch.sums import sum as sum_over_ranks


class Finding(NamedTuple):
    """A row that is not finite.

    Findings are ordered: the smallest one is computed first.

    Attributes:
        stage: The value that the row belongs to: INPUT to D_INPUT.
        token: Number of the token on its rank.
        expert: Expert that computed the row; -1 if it belongs to no expert.
    """

    stage: int
    token: int
    expert: int = -1


@contextlib.contextmanager
def check_finite(model: nn.Module) -> Iterator[None]:
    """Find the first row of a model's MoE layers that contains a NaN or an infinity.

    While the context is active, each forward and backward of an MoE layer checks its rows. If a
    rank finds such a row, all ranks raise the same error. Use it only for debugging, because it
    adds a small all-reduce to each layer, and the host waits for the device. Do not use it
    under torch.compile.

    All ranks must enter and leave the context at the same place of the program.

    Args:
        model: A model with `MoE` layers, or a `MoE`; also a model whose blocks `replace_moe` has
            replaced.

    Returns:
        A context manager.

    Raises:
        EpicNonFiniteError: Forward or backward of a layer found a row. The error names its layer,
            rank and token, and the expert that computed it. If a layer has several such rows, it
            names one in the value that is computed first, for example in the logits and not in the
            output. In this value it names the row of the lowest rank, and of its first token.

    Example:
        >>> import torch, epic.torch
        >>> options = epic.torch.Moe.of(num_experts=4, top_k=1, hidden=8, inner=16)
        >>> with epic.torch.Group(num_ranks=1, max_tokens=16, max_row_bytes=32) as group:
        ...     layer = epic.torch.MoE(group, options)
        ...     x = torch.randn(3, 8)
        ...     x[1, 5] = torch.nan
        ...     with epic.torch.check_finite(layer):
        ...         try:
        ...             layer(x)
        ...         except epic.torch.EpicNonFiniteError as error:
        ...             print(error.token, error)
        1 EPIC_EINVAL: the input row is not finite: layer '', rank 0, token 1; look at the
        layers before this one
    """
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, MoE)]
    # None: the instance has no forward of its own, so the class's is used.
    before = [layer.__dict__.get("forward") for _, layer in layers]
    try:
        for name, layer in layers:
            # A replaced forward, not a hook. Under fully_shard and peft the parameters have their
            # complete values only inside of forward, and the check needs these values.
            layer.forward = checked(name, layer, layer.forward)  # type: ignore[method-assign]
        yield
    finally:
        for (_, layer), forward in zip(layers, before, strict=True):
            layer.__dict__.pop("forward", None)
            if forward is not None:
                layer.forward = forward  # type: ignore[method-assign]


def checked(name: str, layer: MoE, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward for a layer that calls `forward` and checks the rows of each call.

    Args:
        name: Name of the layer, for the error.
        layer: The layer.
        forward: The layer's own forward.
    """

    def checked_forward(x: Tensor, token_mask: Tensor | None = None, **more: Any) -> Any:
        # The gradient of a view comes from this layer only, even if other modules use x too.
        entry = x.view_as(x) if x.requires_grad else x
        found = forward(entry, token_mask, **{**more, "return_routing": True})
        out, _, routing = found
        call = Call(name, layer, x, token_mask, routing)
        with torch.no_grad():
            call.check_forward(out)
        if out.requires_grad:
            out.register_hook(call.check_d_output)
        if entry.requires_grad:
            entry.register_hook(call.check_d_input)
        return found if more.get("return_routing") else found[:2]

    return checked_forward


def first_bad_row(rows: Tensor, mask: Tensor | None = None) -> int | None:
    """Return the number of the first row that is not finite, or None.

    Args:
        rows: [..., n].
        mask: bool [rows]; a row whose element is False is not checked. None: all rows are checked.
    """
    bad = ~rows.detach().reshape(-1, rows.shape[-1]).isfinite().all(dim=1)
    if mask is not None:
        bad &= mask
    found = bad.nonzero()
    return int(found[0]) if len(found) else None


class Call:
    """One forward of a layer, and the data with which its backward finds the expert.

    Collective: every rank of the group calls the methods named check_* and search_*, first_of_ranks
    and run_choice.

    Args:
        name: Name of the layer, for the error.
        layer: The layer.
        x: The input [..., hidden] of the forward.
        mask: The token mask [...] of the forward, or None.
        routing: The experts that the forward used, for example those of replay_routing.
    """

    def __init__(
        self, name: str, layer: MoE, x: Tensor, mask: Tensor | None, routing: Routing
    ) -> None:
        self.name, self.layer, self.routing = name, layer, routing
        self.mask = None if mask is None else mask.reshape(-1)
        rows = x.detach().reshape(-1, x.shape[-1])
        self.rows = rows if self.mask is None else torch.where(self.mask[:, None], rows, 0)
        self.d_output = torch.zeros_like(self.rows)
        self.weights = MoeWeights(*(None if w is None else w.detach() for w in layer.weights()))

    def check_forward(self, out: Tensor) -> None:
        """Check the input and the output [..., hidden] of the layer."""
        came, went = first_bad_row(self.rows), first_bad_row(out, self.mask)
        found = []
        if came is not None:
            found.append(Finding(INPUT, came))
        if went is not None:
            found.append(Finding(OUTPUT, went))
        rank, worst = self.first_of_ranks(found)
        if worst is not None and worst.stage != INPUT:
            rank, worst = self.first_of_ranks([*found, *self.search_forward()])
        self.raise_if_found(rank, worst)

    def check_d_output(self, d_output: Tensor) -> None:
        """Check the gradient of the output, and keep it for search_experts."""
        self.d_output = d_output.detach().reshape(self.rows.shape)
        token = first_bad_row(self.d_output, self.mask)
        found = [] if token is None else [Finding(D_OUTPUT, token)]
        self.raise_if_found(*self.first_of_ranks(found))

    def check_d_input(self, d_input: Tensor) -> None:
        """Check the gradient of the input."""
        token = first_bad_row(d_input, self.mask)
        found = [] if token is None else [Finding(D_INPUT, token)]
        rank, worst = self.first_of_ranks(found)
        if worst is not None:
            rank, worst = self.first_of_ranks([*found, *self.search_experts(D_EXPERT)])
        self.raise_if_found(rank, worst)

    def first_of_ranks(self, found: list[Finding]) -> tuple[int, Finding | None]:
        """Return the first finding of all ranks and its rank; all ranks return the same.

        Args:
            found: Findings of this rank.

        Returns:
            The rank and its finding; (0, None) if no rank has a finding.
        """
        group = self.layer.group
        table = torch.zeros(group.num_ranks, 4, device=group.device)
        if found:
            stage, token, expert = min(found)
            table[group.rank] = torch.tensor([1, stage, token, expert + 1])
        rows = sum_over_ranks(group, table, tag=self.layer.tag).tolist()
        every = [
            (int(stage), rank, int(token), int(expert) - 1)
            for rank, (is_found, stage, token, expert) in enumerate(rows)
            if is_found
        ]
        if not every:
            return 0, None
        stage, rank, token, expert = min(every)
        return rank, Finding(stage, token, expert)

    def raise_if_found(self, rank: int, found: Finding | None) -> None:
        """Raise the error of a finding of a rank; do nothing if it is None."""
        if found is not None:
            what, remedy = STAGES[found.stage]
            expert = None if found.expert < 0 else found.expert
            raise EpicNonFiniteError(what, remedy, self.name, rank, found.token, expert)

    def search_forward(self) -> list[Finding]:
        """Return the findings of this rank between input and output.

        Checks the results of the experts, the logits and the result of the shared expert.
        """
        found = self.search_experts(EXPERT)
        token = first_bad_row(logits_of(self.rows, self.weights), self.mask)
        if token is not None:
            found.append(Finding(LOGITS, token))
        if self.layer.options.shared is not None:
            shared = run_shared_expert(self.layer.options, self.rows, self.weights)
            token = first_bad_row(shared, self.mask)
            if token is not None:
                found.append(Finding(SHARED, token))
        return found

    def search_experts(self, stage: int) -> list[Finding]:
        """Return the rows of single experts that are not finite, at most one for each choice k.

        Args:
            stage: EXPERT: check the results of experts. D_EXPERT: check the gradients of their
                inputs.
        """
        layer = self.layer
        router = layer.options.router
        assert self.routing.weights is not None  # a layer returns ids and weights
        chosen = self.routing.topk_idx.reshape(-1, router.top_k)
        probabilities = self.routing.weights.reshape(-1, router.top_k)
        # Zero-experts compute nothing, so leave out their ids, which follow those of the experts.
        chosen = torch.where(chosen < router.num_experts, chosen, -1)
        if self.mask is not None:
            chosen = torch.where(self.mask[:, None], chosen, -1)
        found = []
        for k in range(router.top_k):
            one = (chosen[:, k : k + 1].contiguous(), probabilities[:, k : k + 1].detach())
            with torch.set_grad_enabled(stage == D_EXPERT):
                token = first_bad_row(self.run_choice(*one, stage == D_EXPERT))
            if token is not None:
                found.append(Finding(stage, token, int(chosen[token, k])))
        return found

    def run_choice(self, chosen: Tensor, weight: Tensor, backward: bool) -> Tensor:
        """Run the experts with one choice of each token.

        Args:
            chosen: [tokens, 1] int32: the expert of each token, or -1.
            weight: [tokens, 1]: the weight of this choice.
            backward: Whether to run backward too.

        Returns:
            The results of the experts [tokens, hidden]; with backward the gradients of their inputs
            [tokens, hidden].
        """
        layer, options = self.layer, self.layer.options
        own = ExpertWeights(*(getattr(self.weights, name) for name in EXPERT_WEIGHTS))
        wish = Layer(
            options.layer.num_experts,
            1,
            alignment=options.layer.alignment,
            num_logical=options.layer.num_logical,
            drop_absent=options.layer.drop_absent,
        )
        late = options.experts.weighting == "late"
        x = self.rows.clone().requires_grad_(backward)
        more: dict[str, Any] = {"logical_of_expert": layer.logical_of_expert, "tag": layer.tag}
        plan, recv, slots = steps.plan_dispatch(layer.group, wish, chosen, x, weight, **more)
        experts = replace(options.experts, num_local_experts=0)
        y = run_experts(experts, layer.grouped_mm, recv, plan, own, None if late else slots)
        out = combining.combine(plan, y)
        if not backward:
            return out
        d_out = self.d_output * weight.to(out.dtype) if late else self.d_output
        return torch.autograd.grad(out, x, d_out.to(out.dtype))[0]
