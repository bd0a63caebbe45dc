# SPDX-License-Identifier: Apache-2.0
"""Converts separate gate and up kernels, as MaxText has them, to EPIC's one weight and back.

MaxText's names: wi_0 is the gate kernel, wi_1 the up kernel and wo the down kernel.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from epic.errors import EpicArgumentError
from epic.jax.arrays import ANY_ROWS, FLOATS, as_array, check_kind
from epic.jax.layer_args import MoeWeights
from epic.options import check_choice

GATE_BIASES = {"logits": "b_gate", "choice": "bias"}  # the field of MoeWeights for each gate_bias


def merge_gate_up(gate: Any, up: Any, *, interleaved: bool = False) -> Any:
    """Merge the columns of gate and up into one array, as in `MoeWeights.w_gate_up`.

    It also merges biases, for `MoeWeights.b_gate_up`.  It is differentiable.

    Args:
        gate: [..., inner] any float dtype.
        up: [..., inner], shape and dtype of gate.
        interleaved: as in `Experts`.  False: all columns of gate come first.  True: the columns of
            gate and up alternate.

    Returns:
        [..., 2 * inner].

    Raises:
        EpicArgumentError: shapes or dtypes differ.

    Example:
        >>> import jax.numpy as jnp
        >>> import epic.jax
        >>> gate, up = jnp.array([[0.0, 1.0]]), jnp.array([[2.0, 3.0]])
        >>> epic.jax.merge_gate_up(gate, up, interleaved=True).tolist()
        [[0.0, 2.0, 1.0, 3.0]]

    """
    gate = as_array("gate", gate, FLOATS, ["inner"], (ANY_ROWS, "inner"))
    up = as_array("up", up, (gate.dtype.name,), gate.shape)
    if not interleaved:
        return jnp.concatenate([gate, up], axis=-1)
    return jnp.stack([gate, up], axis=-1).reshape(*gate.shape[:-1], 2 * gate.shape[-1])


def split_gate_up(w_gate_up: Any, *, interleaved: bool = False) -> tuple[Any, Any]:
    """Return gate and up columns of a weight or bias separately; the inverse of `merge_gate_up`.

    Args:
        w_gate_up: [..., 2 * inner] any float dtype.
        interleaved: see `merge_gate_up`.

    Returns:
        gate and up, [..., inner] each.

    Raises:
        EpicArgumentError: the number of columns is odd.

    Example:
        >>> import jax.numpy as jnp
        >>> import epic.jax
        >>> gate, up = epic.jax.split_gate_up(jnp.array([[0.0, 2.0, 1.0, 3.0]]), interleaved=True)
        >>> gate.tolist(), up.tolist()
        ([[0.0, 1.0]], [[2.0, 3.0]])

    """
    w = as_array("w_gate_up", w_gate_up, FLOATS, ["width"], (ANY_ROWS, "width"))
    if w.shape[-1] % 2:
        raise EpicArgumentError(
            f"w_gate_up has {w.shape[-1]} columns: must have an even number, gate and up"
        )
    if interleaved:
        return w[..., 0::2], w[..., 1::2]
    gate, up = jnp.split(w, 2, axis=-1)
    return gate, up


def merged(params: Mapping[str, Any], names: tuple[str, str], interleaved: bool) -> Any:
    """Return the merged parameters with these two names; None if both are absent."""
    found = [params.get(name) for name in names]
    if found[0] is None and found[1] is None:
        return None
    for name, value in zip(names, found, strict=True):
        if value is None:
            raise EpicArgumentError(f"{name} is missing: pass both {names[0]} and {names[1]}")
    return merge_gate_up(*found, interleaved=interleaved)


def require(params: Mapping[str, Any], name: str) -> Any:
    """Return a parameter; raise an error if it is missing."""
    if name not in params:
        names = ", ".join(map(str, params))
        raise EpicArgumentError(f"params has no {name!r}: its names are {names}")
    return params[name]


def from_maxtext(
    params: Mapping[str, Any], *, interleaved: bool = False, gate_bias: str = "logits"
) -> MoeWeights:
    """Return the parameters of a MaxText MoE block of one layer as MoeWeights.

    It is differentiable.  So a program can train the parameters under MaxText's names.

    Args:
        params: the block's parameters by name: "gate" with "kernel" [hidden, E] and "bias" [E] or
            none; "wi_0" and "wi_1" [experts, hidden, inner], "wo" [experts, inner, hidden]; and
            "wi_0_bias", "wi_1_bias", "wo_bias" or none.  In a block with a shared expert these are
            in "MoeBlock_0", and "shared_experts" has "wi_0", "wi_1" and "wo", each with "kernel".
        interleaved: the value of `Experts.interleaved` of the layer.
        gate_bias: the meaning of "bias" in "gate".  "logits": it is added to the logits (gpt-oss).
            "choice": it is used only to choose experts (DeepSeek).

    Returns:
        MoeWeights: the weights.

    Raises:
        EpicArgumentError: a parameter is missing, or shapes or dtypes differ.

    Example:
        >>> import jax.numpy as jnp
        >>> import epic.jax
        >>> params = {
        ...     "gate": {"kernel": jnp.ones((8, 4))},
        ...     "wi_0": jnp.ones((4, 8, 16)),
        ...     "wi_1": jnp.ones((4, 8, 16)),
        ...     "wo": jnp.ones((4, 16, 8)),
        ... }
        >>> epic.jax.from_maxtext(params).w_gate_up.shape
        (4, 8, 32)

    """
    check_kind("params", params, Mapping)
    check_choice("gate_bias", gate_bias, GATE_BIASES)
    routed, shared = params.get("MoeBlock_0", params), params.get("shared_experts")
    for name in ("wi_0", "wi_1"):
        require(routed, name)
    gate = require(routed, "gate")
    found = {
        "w_gate": require(gate, "kernel"),
        GATE_BIASES[gate_bias]: gate.get("bias"),
        "w_gate_up": merged(routed, ("wi_0", "wi_1"), interleaved),
        "w_down": require(routed, "wo"),
        "b_gate_up": merged(routed, ("wi_0_bias", "wi_1_bias"), interleaved),
        "b_down": routed.get("wo_bias"),
    }
    if shared is not None:
        kernels = [require(require(shared, name), "kernel") for name in ("wi_0", "wi_1", "wo")]
        gate_up = merge_gate_up(*kernels[:2], interleaved=interleaved)
        found |= {"shared_gate_up": gate_up[None], "shared_down": jnp.asarray(kernels[2])[None]}
    return MoeWeights(**found)


def to_maxtext(
    weights: MoeWeights, *, interleaved: bool = False, gate_bias: str = "logits"
) -> dict[str, Any]:
    """Return MoeWeights as the parameters of a MaxText MoE block; the inverse of `from_maxtext`.

    Args:
        weights: the weights, gated, in float dtypes.
        interleaved: `Experts.interleaved` of the layer.
        gate_bias: which field becomes "bias" in "gate".  "logits": b_gate.  "choice": bias.

    Returns:
        The parameters by name, as `from_maxtext` takes them; absent biases are left out.

    Raises:
        EpicArgumentError: MaxText has no name for one of the weights.

    Example:
        >>> import jax.numpy as jnp
        >>> import epic.jax
        >>> weights = epic.jax.MoeWeights(
        ...     w_gate=jnp.ones((8, 4)), w_gate_up=jnp.ones((4, 8, 32)), w_down=jnp.ones((4, 16, 8))
        ... )
        >>> epic.jax.to_maxtext(weights)["wi_0"].shape
        (4, 8, 16)

    """
    check_kind("weights", weights, MoeWeights)
    check_choice("gate_bias", gate_bias, GATE_BIASES)
    other = GATE_BIASES["choice" if gate_bias == "logits" else "logits"]
    for name in (other, "shared_b_gate_up", "shared_b_down", "w_gate_up_scales"):
        if getattr(weights, name) is not None:
            raise EpicArgumentError(
                f"{name} is given: must be None, as a block of MaxText has no place for it"
            )
    gate = {"kernel": weights.w_gate, "bias": getattr(weights, GATE_BIASES[gate_bias])}
    first, second = split_gate_up(weights.w_gate_up, interleaved=interleaved)
    found = {"wi_0": first, "wi_1": second, "wo": weights.w_down, "wo_bias": weights.b_down}
    if weights.b_gate_up is not None:
        biases = split_gate_up(weights.b_gate_up, interleaved=interleaved)
        found |= {"wi_0_bias": biases[0], "wi_1_bias": biases[1]}
    routed = {"gate": {n: x for n, x in gate.items() if x is not None}}
    routed |= {name: x for name, x in found.items() if x is not None}
    if weights.shared_gate_up is None:
        return routed
    halves = split_gate_up(weights.shared_gate_up[0], interleaved=interleaved)
    kernels = {"wi_0": halves[0], "wi_1": halves[1], "wo": weights.shared_down[0]}
    shared = {name: {"kernel": kernel} for name, kernel in kernels.items()}
    return {"MoeBlock_0": routed, "shared_experts": shared}
