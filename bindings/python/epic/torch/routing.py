# SPDX-License-Identifier: Apache-2.0
"""The type Routing: the experts that the tokens of a layer used, or must use."""

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from epic.errors import EpicArgumentError
from epic.options import Moe
from epic.torch.arguments import check_floats
from epic.torch.router import as_forced_ids


class Routing(NamedTuple):
    """The experts of each token, as a layer used them, or as it must use them.

    Attributes:
        topk_idx: [..., top_k] integers: ids of experts; negative: no expert.
        weights: [..., top_k], float32 (float64 with float64 rows): the weights of these experts.
            None: the router computes them from its scores.
    """

    topk_idx: Tensor
    weights: Tensor | None = None


# The routing of one call, as callers pass it: a Routing, (ids, weights) or ids alone.
Given: TypeAlias = Routing | tuple[Tensor, Tensor | None] | Tensor


def as_forced(options: Moe, forced: Given, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return forced ids and weights as [num_tokens, top_k], after checking them.

    Args:
        options: The options of the layer.
        forced: The routing, as for `moe`.
        x: The tokens [..., hidden].

    Returns:
        Ids int32, and weights float32 (float64 with float64 tokens), or None without weights.
    """
    parts = (forced, None) if isinstance(forced, Tensor) else forced
    if not isinstance(parts, tuple) or len(parts) != 2:
        raise EpicArgumentError(
            f"forced is a {type(forced).__name__}: must be a tensor of ids, a tuple (ids, weights) "
            "or a Routing"
        )
    ids, weights = parts
    whole = as_forced_ids(options.router, ids, x)
    if weights is None:
        return whole, None
    check_floats("forced weights", weights)
    if weights.shape != ids.shape:
        raise EpicArgumentError(
            f"forced weights have the shape {list(weights.shape)}: must be {list(ids.shape)}, as "
            "the forced ids"
        )
    if weights.device != x.device:
        raise EpicArgumentError(
            f"forced weights are on {weights.device} and x is on {x.device}: must be on one device"
        )
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return whole, weights.reshape(whole.shape).to(wide).contiguous()
