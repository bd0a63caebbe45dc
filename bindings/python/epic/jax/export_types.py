# SPDX-License-Identifier: Apache-2.0
"""Lets jax.export serialize programs whose arguments and results have EPIC's types."""

import json
from dataclasses import fields
from typing import Any

import jax
import numpy as np
from jax import export
from jax.sharding import AxisType, Mesh, PartitionSpec

from epic.jax import steps
from epic.jax.experts import ExpertWeights
from epic.jax.groups import Group
from epic.jax.layer_args import MoeOut, MoeWeights, Routing
from epic.options import Layer, field_names

TUPLES = (MoeWeights, MoeOut, Routing, ExpertWeights)
NUMBERS = ("token_dims", "capacity", "max_sms", "hidden_axis")  # fields of PlanSpec that JSON has


def write_axes(axes: Any) -> Any:
    """Return a PartitionSpec or a tuple of axes as values of JSON; None for None."""
    if axes is None:
        return None
    parts = [part if part is None or isinstance(part, str) else list(part) for part in axes]
    return {"is_spec": isinstance(axes, PartitionSpec), "parts": parts}


def read_axes(found: Any) -> Any:
    """Return the axes that write_axes() wrote."""
    if found is None:
        return None
    parts = [tuple(part) if isinstance(part, list) else part for part in found["parts"]]
    return PartitionSpec(*parts) if found["is_spec"] else tuple(parts)


def write_mesh(mesh: Mesh | None) -> Any:
    """Return the axes of a mesh with their sizes and types, and the ids of its devices."""
    if mesh is None:
        return None
    ids = [device.id for device in mesh.devices.flat]
    types = [kind.name for kind in mesh.axis_types]
    axes = list(zip(mesh.axis_names, mesh.devices.shape, types, strict=True))
    return {"axes": axes, "devices": ids}


def read_mesh(found: Any, platform: str) -> Mesh | None:
    """Return the mesh that write_mesh() wrote; None if this process does not have its devices."""
    if found is None:
        return None
    here = {device.id: device for device in jax.devices(platform)}
    if not set(found["devices"]) <= set(here):
        return None
    names, shape, types = zip(*found["axes"], strict=True)
    devices = np.array([here[i] for i in found["devices"]]).reshape(shape)
    return Mesh(devices, names, axis_types=tuple(AxisType[kind] for kind in types))


def write_group(group: Group) -> dict[str, Any]:
    """Return a group as values of JSON."""
    named = {field.name: getattr(group, field.name) for field in fields(Group)}
    named["mesh"] = write_mesh(group.mesh)
    return {**named, "token_axes": write_axes(group.token_axes)}


def read_group(found: dict[str, Any]) -> Group:
    """Return the group that write_group() wrote."""
    axes, devices = tuple(found["axes"]), tuple(tuple(row) for row in found["devices"])
    mesh = read_mesh(found["mesh"], found["platform"])
    places = {"mesh": mesh, "token_axes": read_axes(found["token_axes"])}
    return Group(**{**found, "axes": axes, "devices": devices, **places})


def write_spec(spec: steps.PlanSpec) -> bytes:
    """Return a PlanSpec as JSON."""
    layer = {name: getattr(spec.layer, name) for name in field_names(Layer)}
    parts = {"group": write_group(spec.group), "layer": layer}
    parts |= {name: getattr(spec, name) for name in NUMBERS}
    return json.dumps({**parts, "token_axes": write_axes(spec.token_axes)}).encode()


def read_spec(data: bytes) -> steps.PlanSpec:
    """Return the PlanSpec that write_spec() wrote."""
    found = json.loads(data)
    numbers = {name: found[name] for name in NUMBERS}
    numbers["token_dims"] = tuple(numbers["token_dims"])
    return steps.PlanSpec(
        read_group(found["group"]),
        Layer(**found["layer"]),
        token_axes=read_axes(found["token_axes"]),
        **numbers,
    )


def register_dataclass(kind: Any, fields: tuple[str, ...]) -> None:
    """Register a dataclass of arrays whose last field is a PlanSpec."""
    export.register_pytree_node_serialization(
        kind,
        serialized_name=f"epic.jax.{kind.__name__}",
        serialize_auxdata=lambda aux: write_spec(aux[0]),
        deserialize_auxdata=lambda data: (read_spec(bytes(data)),),
        from_children=lambda aux, children: kind(
            **dict(zip(fields, children, strict=True)), spec=aux[0]
        ),
    )


def register_types() -> None:
    """Register all types of EPIC with jax.export."""
    for kind in TUPLES:
        export.register_namedtuple_serialization(kind, serialized_name=f"epic.jax.{kind.__name__}")
    register_dataclass(steps.Plan, steps.PLAN_FIELDS)
    register_dataclass(steps.Record, ("bytes",))
