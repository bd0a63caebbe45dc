# SPDX-License-Identifier: Apache-2.0
"""The state of a training run for torch.distributed.checkpoint: model, optimizer and counters.

A layer's own state_dict holds the experts of one rank, and an optimizer's state_dict numbers its
parameters without saying whose experts they are.  Here everything that belongs to experts becomes a
DTensor over the ranks of the group, so that a run can be resumed with another number of ranks.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from epic.errors import EpicArgumentError, EpicUnsupportedError
from epic.torch.module import MoE, local_and_placements
from epic.torch.state import EXTRA, adapters_of_experts, is_of_experts


class TrainingState:
    """A model and its optimizer as one stateful object of torch.distributed.checkpoint.

    It holds references only.  dcp.save asks it for the state, and dcp.load writes into the
    parameters and the optimizer.  The number of ranks of the group, and the number of replicas of
    the other dimensions of the mesh, may differ between the two.

    Args:
        model: A model with MoE layers, or one layer; also after replace_moe.
        mesh: The mesh of the layers' group: one dimension, or for a model under fully_shard the
            dimensions of that and then the group's, as mesh["dp", "ep"].
        optimizer: Its optimizer, or None.  All of its parameters must belong to the model.

    Raises:
        EpicArgumentError: The model has no MoE layer, or the optimizer a parameter that the model
            does not have.
        EpicUnsupportedError: Adapters on experts are sharded by fully_shard, or are not LoRA.

    Example:
        state = epic.torch.TrainingState(model, mesh["ep"], optimizer)
        dcp.save({"train": state}, checkpoint_id="step-100")
        # later, with any number of ranks, before the first step
        dcp.load({"train": state}, checkpoint_id="step-100")

    """

    def __init__(
        self, model: nn.Module, mesh: Any, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        if not any(isinstance(module, MoE) for module in model.modules()):
            raise EpicArgumentError(
                f"model is a {type(model).__name__}: must contain an epic.torch.MoE"
            )
        self.model, self.mesh, self.optimizer = model, mesh, optimizer
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.factors = find_factors(model, self.names)
        for group in optimizer.param_groups if optimizer else []:
            for parameter in group["params"]:
                if id(parameter) not in self.names:
                    raise EpicArgumentError(
                        f"optimizer has a parameter of shape {list(parameter.shape)} that the "
                        "model does not have: make the optimizer from model.parameters(), after "
                        "replace_moe and fully_shard"
                    )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, whose tensors share the memory of the model and the optimizer.

        Every rank calls it.
        """
        experts = self.names_of_experts()
        model = {
            name: self.place(name, value, experts)
            for name, value in self.model.state_dict().items()
            if name.rsplit(".", 1)[-1] != EXTRA
        }
        state: dict[str, Any] = {"model": model, "loads": self.sum_loads()}
        if self.optimizer is not None:
            fill_missing_state(self.optimizer)
            state["optimizer"] = {
                f"{self.names[id(parameter)]}/{field}": self.place_field(parameter, value, experts)
                for parameter, field, value in self.fields()
            }
            state["groups"] = {
                str(i): {key: value for key, value in group.items() if key != "params"}
                for i, group in enumerate(self.optimizer.param_groups)
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what dcp.load could not write in place: numbers and the options of the optimizer."""
        with torch.no_grad():
            for name, layer in self.layers():
                if layer.load is not None:
                    # Counts of all replicas: the first one keeps them, and update_bias adds them.
                    counts = state["loads"][name].to(layer.load.device)
                    layer.load.copy_(
                        counts if self.is_first_replica() else torch.zeros_like(counts)
                    )
        if self.optimizer is None:
            return
        for parameter, field, value in self.fields():
            found = state["optimizer"][f"{self.names[id(parameter)]}/{field}"]
            if not isinstance(value, Tensor):
                self.optimizer.state[parameter][field] = found
        for i, group in enumerate(self.optimizer.param_groups):
            group.update(state["groups"][str(i)])

    def layers(self) -> Iterator[tuple[str, MoE]]:
        """Yield the name and the layer of each MoE in the model."""
        for name, module in self.model.named_modules():
            if isinstance(module, MoE):
                yield name, module

    def names_of_experts(self) -> dict[str, str]:
        """Return the name within its layer of each parameter and buffer that belongs to experts."""
        found = {}
        for prefix, layer in self.layers():
            for name in layer.state_dict():
                if is_of_experts(name):
                    found[f"{prefix}.{name}" if prefix else name] = name
        return found

    def place(self, name: str, value: Tensor, experts: dict[str, str]) -> Any:
        """Return a tensor as a DTensor if it belongs to experts, otherwise as it is."""
        from torch.distributed.tensor import DTensor

        if name in self.factors:
            return self.place_factor(value.detach(), self.factors[name])
        if name not in experts:
            return value.detach()
        mine, placements, shape = local_and_placements(experts[name], value.detach(), self.mesh)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            mine, self.mesh, placements, run_check=False, shape=shape, stride=stride
        )

    def place_factor(self, value: Tensor, columns: int) -> Any:
        """Return a factor of an adapter on this rank's experts as a DTensor over all experts.

        Args:
            value: The factor: [experts * r, n], or with columns [n, r * experts].
            columns: 0, or the number of this rank's experts, which are the last dimension.
        """
        from torch.distributed.tensor import DTensor, Replicate, Shard

        mine = value.view(len(value), -1, columns) if columns else value
        dim = 2 if columns else 0
        shape = list(mine.shape)
        shape[dim] *= self.mesh.size(self.mesh.ndim - 1)
        placements = [Replicate()] * (self.mesh.ndim - 1) + [Shard(dim)]
        stride = torch.empty(shape, device="meta").stride()
        more = {"run_check": False, "shape": torch.Size(shape), "stride": stride}
        return DTensor.from_local(mine, self.mesh, placements, **more)

    def place_field(self, parameter: Tensor, value: Any, experts: dict[str, str]) -> Any:
        """Return a field of the optimizer: one of the parameter's shape is placed as that."""
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
            return self.place(self.names[id(parameter)], value, experts)
        return value

    def fields(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield parameter, name and value of each field of the optimizer's state."""
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                for field, value in sorted(self.optimizer.state[parameter].items()):
                    yield parameter, field, value

    def is_first_replica(self) -> bool:
        """Return whether this rank is in the first replica of the group."""
        coordinate = self.mesh.get_coordinate()
        return not any(coordinate[:-1])

    def sum_loads(self) -> dict[str, Tensor]:
        """Return the counts of each layer since its last update_bias, added over the replicas."""
        loads = {}
        for name, layer in self.layers():
            if layer.load is not None:
                loads[name] = layer.load.clone()
                for i in range(self.mesh.ndim - 1):
                    dist.all_reduce(loads[name], group=self.mesh.get_group(i))
        return loads


def find_factors(model: nn.Module, names: dict[int, str]) -> dict[str, int]:
    """Return the factors of adapters on experts by name, with the value of columns for each.

    peft stores lora_A as [experts * r, n] and lora_B as [n, r * experts].
    """
    found = {}
    for module in model.modules():
        for parameter in adapters_of_experts(module):
            name = names[id(parameter)]
            kind = next((k for k in ("lora_A", "lora_B") if f".{k}." in name), None)
            if kind is None or hasattr(parameter, "placements"):
                rule = "be LoRA" if kind is None else "not be sharded by fully_shard"
                raise EpicUnsupportedError(
                    f"{name} is an adapter on experts: must {rule}; save it with "
                    "epic.torch.save_pretrained, whose folder any number of ranks can load"
                )
            found[name] = int(module.num_experts) if kind == "lora_B" else 0
    return found


def fill_missing_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer make the state of all parameters, which it makes in its first step.

    The step has zero gradients and a learning rate of 0, so it changes no parameter.
    """
    every = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(p.requires_grad and not optimizer.state[p] for p in every):
        return
    if any(optimizer.state[p] for p in every):
        return  # the optimizer has stepped, and keeps no state for some parameters
    kept = [(p, p.grad) for p in every]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in every:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient in kept:
        parameter.grad = gradient
    for parameter in every:
        for value in optimizer.state[parameter].values():
            if isinstance(value, Tensor):
                value.zero_()
