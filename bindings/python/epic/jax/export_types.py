# SPDX-License-Identifier: Apache-2.0
"""Lets jax.export serialize programs whose arguments and results have EPIC's types."""

import json
from dataclasses import asdict
from typing import Any

from jax import export

from epic.jax import steps
from epic.jax.experts import ExpertWeights
from epic.jax.groups import Group
from epic.jax.layer_args import MoeOut, MoeWeights
from epic.options import Layer, field_names

TUPLES = (MoeWeights, MoeOut, ExpertWeights)


def write_spec(spec: steps.PlanSpec) -> bytes:
    """Return a PlanSpec as JSON."""
    layer = {name: getattr(spec.layer, name) for name in field_names(Layer)}
    parts = {"group": asdict(spec.group), "layer": layer}
    return json.dumps({**parts, "token_dims": spec.token_dims, "capacity": spec.capacity}).encode()


def read_spec(data: bytes) -> steps.PlanSpec:
    """Return the PlanSpec that write_spec() wrote."""
    found = json.loads(data)
    group = found["group"]
    group["axes"] = tuple(group["axes"])
    group["devices"] = tuple(tuple(row) for row in group["devices"])
    dims = tuple(found["token_dims"])
    return steps.PlanSpec(Group(**group), Layer(**found["layer"]), dims, found["capacity"])


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
