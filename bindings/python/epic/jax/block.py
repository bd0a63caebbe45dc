# SPDX-License-Identifier: Apache-2.0
"""Shared code of the Flax modules: parameters with shapes, logical axes and initializers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from epic.errors import EpicArgumentError
from epic.jax import mesh_checks, placement, sharded
from epic.jax.arrays import as_axes, check_kind
from epic.jax.gemm import GroupedGemm
from epic.jax.groups import Group
from epic.jax.layer_args import MoeOut, MoeWeights
from epic.jax.token_specs import TokenAxes
from epic.options import Moe, check_choice, check_rate

Initializer = Callable[..., Any]
Names = tuple[str | None, ...]
AxisNames = Mapping[str, Names]
Rules = Sequence[tuple[str, Any]]

# Variance 1 / fan-in, with the fan-in of one expert.
KERNEL: Initializer = jax.nn.initializers.variance_scaling(
    1.0, "fan_in", "truncated_normal", in_axis=-2, out_axis=-1, batch_axis=(0,)
)
GATE: Initializer = jax.nn.initializers.lecun_normal()
ZEROS: Initializer = jax.nn.initializers.zeros


def init_replicas(init: Initializer, logical_of_expert: tuple[int, ...] | None) -> Initializer:
    """Return an initializer that gives equal values to all replicas of a logical expert."""
    if logical_of_expert is None:
        return init

    def init_equal(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        logical = init(key, (max(logical_of_expert) + 1, *shape[1:]), dtype)
        return jnp.take(logical, np.array(logical_of_expert), axis=0)

    return init_equal


@dataclass(frozen=True)
class Parameter:
    """The description of one parameter of a layer with all experts.

    Attributes:
        shape: the shape.
        names: the logical axis of each dimension; None: the dimension is not sharded.
        init: the initializer.

    """

    shape: tuple[int, ...]
    names: Names
    init: Initializer


@dataclass(frozen=True)
class Biases:
    """Which biases a block has.

    Attributes:
        gate: a bias of the router's logits.
        experts: biases of the experts.
        shared: biases of the shared expert.

    """

    gate: bool = False
    experts: bool = False
    shared: bool = False


# Logical axes of each parameter, with MaxText's names.
AXIS_NAMES: dict[str, Names] = {
    "w_gate": ("embed_moe", None),
    "b_gate": (None,),
    "w_gate_up": ("exp", "embed_moe", "mlp_moe"),
    "w_down": ("exp", "mlp_moe", "embed_moe"),
    "b_gate_up": ("exp", "mlp_moe"),
    "b_down": ("exp", None),
    "shared_gate_up": (None, "embed_moe", "mlp_moe"),
    "shared_down": (None, "mlp_moe", "embed_moe"),
    "shared_b_gate_up": (None, "mlp_moe"),
    "shared_b_down": (None, None),
}


def check_module(mesh: Any, group: Any, options: Any, biases: Any, bias_rate: Any) -> None:
    """Raise an error for arguments that are wrong, or if the group has another mesh."""
    check_kind("mesh", mesh, Mesh)
    check_kind("group", group, Group)
    check_kind("options", options, Moe)
    check_kind("biases", biases, Biases)
    check_rate("bias_rate", bias_rate)
    mesh_checks.check_mesh(group, mesh)


def logical_rules(
    group: Group, fsdp_axes: tuple[str, ...] = (), tensor_axis: str | None = None
) -> tuple[tuple[str, tuple[str, ...] | None], ...]:
    """Return the logical axis rules that fit the shardings in which the layer computes.

    Args:
        group: the group, whose axes shard "exp".
        fsdp_axes: mesh axes for "embed_moe" (hidden).
        tensor_axis: a mesh axis for "mlp_moe" (inner).

    Returns:
        Pairs of a logical axis and mesh axes (None: not sharded).

    """
    check_kind("group", group, Group)
    fsdp_axes = as_axes("fsdp_axes", fsdp_axes)
    inner = as_axes("tensor_axis", (tensor_axis,)) if tensor_axis else None
    return (("exp", group.axes), ("embed_moe", fsdp_axes or None), ("mlp_moe", inner))


def parameter_sharding(mesh: Mesh, names: Names, rules: Rules) -> NamedSharding:
    """Return the sharding of a parameter.

    As in MaxText, the first rule for a logical axis counts. The result leaves out a mesh axis that
    already shards an earlier dimension, and one that the mesh does not have.

    Args:
        mesh: the mesh.
        names: the logical axis of each dimension.
        rules: pairs of a logical axis and mesh axes.

    """
    axes_of_name: dict[str, Any] = {axis: axis for axis in mesh.axis_names} | dict(reversed(rules))
    taken: set[str] = set()
    parts: list[tuple[str, ...] | None] = []
    for name in names:
        if name is not None and name not in axes_of_name:
            raise EpicArgumentError(
                f"axis of a parameter is {name!r}: must be an axis of the mesh, or have a logical "
                "axis rule"
            )
        axes = axes_of_name.get(name) if name else None
        axes = (axes,) if isinstance(axes, str) else axes or ()
        parts.append(tuple(a for a in axes if a in mesh.axis_names and a not in taken) or None)
        taken |= set(parts[-1] or ())
    return NamedSharding(mesh, P(*parts))


def constrain_sharding(value: Any, where: NamedSharding) -> Any:
    """Return the value in a sharding, in and outside of jit, with all types of mesh axes."""
    if getattr(where.mesh, "are_all_axes_explicit", False):
        return jax.sharding.reshard(value, where)
    return jax.lax.with_sharding_constraint(value, where)


def axis_names_of(parameter: str, rank: int, given: AxisNames | None) -> Names:
    """Return the logical axes of a parameter: those of the caller, else those of MaxText."""
    names = tuple((given or {}).get(parameter, AXIS_NAMES[parameter]))
    if len(names) != rank:
        raise EpicArgumentError(f"axis_names[{parameter!r}] is {names}: must have {rank} names")
    return names


def check_axis_names(given: AxisNames | None) -> None:
    """Raise an error if axis_names contains a name that no parameter has."""
    for name in given or {}:
        check_choice("axis_names", name, AXIS_NAMES)


def make_parameters(
    group: Group,
    options: Moe,
    biases: Biases,
    axis_names: AxisNames | None = None,
    kernel_init: Initializer | None = None,
    logical_of_expert: tuple[int, ...] | None = None,
) -> dict[str, Parameter]:
    """Return the parameters of a layer with these options, by their names in MoeWeights.

    If the number of ranks does not divide the number of experts, the parameters of experts are not
    sharded over the ranks.
    """
    check_axis_names(axis_names)
    even = placement.is_even(group, options.layer)
    experts, hidden = options.layer.num_experts, options.experts.hidden
    inner, width = options.experts.inner, options.experts.width
    columns = options.router.num_experts + options.router.zero_experts
    shapes: dict[str, tuple[int, ...]] = {
        "w_gate": (hidden, columns),
        "w_gate_up": (experts, hidden, width),
        "w_down": (experts, inner, hidden),
    }
    if biases.gate:
        shapes["b_gate"] = (columns,)
    if biases.experts:
        shapes |= {"b_gate_up": (experts, width), "b_down": (experts, hidden)}
    if options.shared:
        inner, width = options.shared.inner, options.shared.width
        shapes |= {"shared_gate_up": (1, hidden, width), "shared_down": (1, inner, hidden)}
        if biases.shared:
            shapes |= {"shared_b_gate_up": (1, width), "shared_b_down": (1, hidden)}

    def parameter(name: str, shape: tuple[int, ...]) -> Parameter:
        names = axis_names_of(name, len(shape), axis_names)
        if name in placement.EXPERT_WEIGHTS and not even:
            names = (None, *names[1:])
        kernel = kernel_init or KERNEL
        init = ZEROS if "b_" in name else GATE if name == "w_gate" else kernel
        if name in placement.EXPERT_WEIGHTS:
            init = init_replicas(init, logical_of_expert)
        return Parameter(shape, names, init)

    return {name: parameter(name, shape) for name, shape in shapes.items()}


class Block(Protocol):
    """The attributes that the modules of linen and nnx share."""

    mesh: Mesh
    group: Group
    options: Moe
    dtype: Any
    gate_dtype: Any
    token_axes: TokenAxes
    fsdp_axes: tuple[str, ...]
    tensor_axis: str | None
    loss_axes: tuple[str, ...]
    grouped_gemm: GroupedGemm | None
    logical_of_expert: tuple[int, ...] | None


def logical_table(module: Block) -> Any:
    """Return logical_of_expert of a module as an array; None for None."""
    table = module.logical_of_expert
    return None if table is None else np.array(table, np.int32)


def apply_moe(module: Block, x: Any, weights: dict[str, Any], bias: Any, **tokens: Any) -> MoeOut:
    """Run sharded.moe in the dtype of a module.

    The router's weights are rounded to gate_dtype.  None: float32, or float64 for float64 rows.

    Args:
        module: the module.
        x: [B, ..., hidden].
        weights: the arrays by their names in MoeWeights.
        bias: [num_experts] or None: the bias for the choice of experts. Zero-experts get 0.
        **tokens: token_ids, table, token_mask, forced, capacity_limit and return_routing.

    """
    x = x if module.dtype is None else x.astype(module.dtype)
    wide = module.gate_dtype or ("float64" if x.dtype == "float64" else "float32")
    weights = weights | {n: weights[n].astype(wide) for n in ("w_gate", "b_gate") if n in weights}
    if bias is not None:
        weights["bias"] = jnp.pad(bias, (0, module.options.router.zero_experts))
    return sharded.moe(
        module.mesh,
        module.group,
        module.options,
        x,
        MoeWeights(**weights),
        token_axes=module.token_axes,
        **tokens,
        fsdp_axes=module.fsdp_axes,
        tensor_axis=module.tensor_axis,
        loss_axes=module.loss_axes,
        grouped_gemm=module.grouped_gemm,
        logical_of_expert=logical_table(module),
    )
