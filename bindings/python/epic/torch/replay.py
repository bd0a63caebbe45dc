# SPDX-License-Identifier: Apache-2.0
"""Records which experts the layers of a model use, and makes another run use the same experts."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from epic.errors import EpicArgumentError
from epic.torch.module import MoE
from epic.torch.routing import Given, Routing


class Replay:
    """The routings that a layer replays.

    Args:
        name: Name of the layer, for errors.
        given: A list with one routing for each call, or one routing for all calls.
        weights: Whether the layer also uses the recorded weights.
    """

    def __init__(self, name: str, given: Given | list[Given], weights: bool) -> None:
        self.name, self.given, self.weights, self.calls = name, given, weights, 0

    def next(self) -> Routing:
        """Return the routing of the next call."""
        given = self.given
        if isinstance(given, list):
            if self.calls >= len(given):
                raise EpicArgumentError(
                    f"record has {len(given)} routings of {self.name}, and its call number "
                    f"{self.calls + 1} needs another: must have one for each call; or pass one "
                    "Routing instead of a list, for all calls"
                )
            given = given[self.calls]
        self.calls += 1
        found = Routing(given) if isinstance(given, Tensor) else Routing(*given)
        if self.weights and found.weights is None:
            raise EpicArgumentError(
                f"record has no weights of {self.name}: must have them with weights=True"
            )
        return found if self.weights else Routing(found.topk_idx)


def layers_of(model: nn.Module) -> dict[str, MoE]:
    """Return the MoE layers of a model by their names; raise an error if there are none."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, MoE)}
    if not layers:
        raise EpicArgumentError(
            f"model is a {type(model).__name__} without a MoE layer: must have one; call "
            "replace_moe on a model of transformers first"
        )
    return layers


@contextmanager
def set_on_layers(name: str, values: Mapping[MoE, Any]) -> Iterator[None]:
    """Set the attribute `name` of each layer to its value while the context is active."""
    before = {layer: getattr(layer, name) for layer in values}
    try:
        for layer, value in values.items():
            setattr(layer, name, value)
        yield
    finally:
        for layer, value in before.items():
            setattr(layer, name, value)


@contextmanager
def record_routing(model: nn.Module) -> Iterator[dict[str, list[Routing]]]:
    """Record which experts each layer uses, and their weights, while the context is active.

    Args:
        model: A model with `MoE` layers, or a `MoE`; also a model whose blocks `replace_moe` has
            replaced.

    Returns:
        A context manager. Its `as` target is a dict, whose keys are the names of the layers in the
        model. Each value is a list with one `Routing` for each call of the layer. The ids have the
        leading dimensions of the layer's input, and are on its device.

    Raises:
        EpicArgumentError: The model has no MoE layer.

    Example:
        >>> import torch, epic.torch
        >>> options = epic.torch.Moe.of(num_experts=8, top_k=2, hidden=4, inner=4)
        >>> group = epic.torch.Group(num_ranks=1, max_tokens=16, max_row_bytes=16)
        >>> model = torch.nn.ModuleDict({"moe": epic.torch.MoE(group, options)})
        >>> x = torch.randn(2, 5, 4)
        >>> with torch.no_grad(), epic.torch.record_routing(model) as record:
        ...     rollout, _ = model["moe"](x)
        >>> record["moe"][0].topk_idx.shape
        torch.Size([2, 5, 2])
        >>> with epic.torch.replay_routing(model, record):
        ...     out, loss = model["moe"](x)
        >>> torch.equal(out, rollout)
        True
        >>> group.close()
    """
    layers = layers_of(model)
    record: dict[str, list[Routing]] = {name: [] for name in layers}
    with set_on_layers("recorded", {layer: record[name] for name, layer in layers.items()}):
        yield record


@contextmanager
def replay_routing(
    model: nn.Module,
    record: Mapping[str, Given | list[Given]],
    *,
    weights: bool = False,
) -> Iterator[None]:
    """Make each layer use the experts of a record while the context is active.

    The record may come from a run with a different number of ranks. Each rank passes the ids of its
    own tokens. Either all ranks of a group replay, or none.

    Args:
        model: A model with `MoE` layers, or a `MoE`.
        record: A dict like that of `record_routing`: the routings of each layer by its name. A
            value is a list with one entry for each call of the layer, or one entry for all calls.
            An entry is a `Routing`, (ids, weights) or ids alone. Activation checkpointing calls a
            layer again during backward. So with checkpointing pass one entry for all calls, and
            call backward inside the context.
        weights: Whether the layers also use the recorded weights. Then their routers have no
            gradients, except those of the losses. If False the routers compute the weights of the
            recorded experts.

    Returns:
        A context manager.

    Raises:
        EpicArgumentError: The names in the record are not those of the model's layers, or the
            record has too few routings.

    Example:
        See `record_routing`.
    """
    layers = layers_of(model)
    if layers.keys() != record.keys():
        wrong = sorted(layers.keys() ^ record.keys())[0]
        raise EpicArgumentError(
            f"record {'has' if wrong in record else 'has no'} routing of {wrong or 'the model'!r}: "
            f"must have the layers of the model, {', '.join(map(repr, layers))}"
        )
    values = {layer: Replay(repr(name), record[name], weights) for name, layer in layers.items()}
    with set_on_layers("replayed", values):
        yield
