# SPDX-License-Identifier: Apache-2.0
"""The state of a training run for torch.distributed.checkpoint: model, optimizer and counters.

The state_dict of a layer contains the experts of one rank. The state_dict of an optimizer numbers
its parameters, so it does not show which experts they belong to. TrainingState names the parameters
and makes each tensor of experts a DTensor over the ranks of the group. So a run can be resumed with
a different number of ranks.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from epic.errors import EpicArgumentError, EpicUnsupportedError
from epic.torch.module import MoE, local_and_placements
from epic.torch.state import EXTRA, adapters_of_experts, is_of_experts, replica_table


class TrainingState:
    """A model and its optimizer as one stateful object of torch.distributed.checkpoint.

    It has only references to the model and the optimizer, no copies. dcp.save calls its state_dict
    method. dcp.load writes into the parameters and into the state of the optimizer. Between saving
    and loading, the number of ranks of the group may change, and also the sizes of the other
    dimensions of the mesh. With replicas, dcp.load raises an `EpicArgumentError` if the checkpoint
    has another table logical_of_expert than the model.

    Args:
        model: A model with `MoE` layers, or a `MoE`; also a model whose blocks `replace_moe` has
            replaced.
        mesh: DeviceMesh of the layers' group, with one dimension. For a model under fully_shard:
            the dimensions of fully_shard, then the group's, for example mesh["dp", "ep"].
        optimizer: The optimizer of the model. All its parameters must belong to the model. None:
            the state contains no optimizer.

    Raises:
        EpicArgumentError: The model has no MoE layer, or the optimizer has a parameter that the
            model does not have.
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
        """Return the state as torch.distributed.checkpoint saves it.

        Collective: every rank calls it. The tensors of "model" and "optimizer" share the memory of
        the model and the optimizer. If the optimizer has not stepped yet, this call makes its
        state.

        Returns:
            A dict with "model" (tensors by name), "loads" (counts of choices by layer), and with an
            optimizer "optimizer" (its fields by PARAMETER/FIELD) and "groups" (options of its
            parameter groups).
        """
        experts = self.names_of_experts()
        model = {
            name: self.place(name, value, experts)
            for name, value in self.model.state_dict().items()
            if name.rsplit(".", 1)[-1] != EXTRA
        }
        for prefix, layer in self.layers():
            if layer.logical_of_expert is not None:
                name = f"{prefix}.logical_of_expert" if prefix else "logical_of_expert"
                model[name] = replica_table(layer.logical_of_expert)
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
        """Copy what dcp.load could not write in place.

        dcp.load has written the tensors of "model" and "optimizer" already. This method sets the
        counts of choices, the numbers in the optimizer's state, and its options.

        Args:
            state: A state as state_dict returns it, with the values that were loaded.
        """
        with torch.no_grad():
            for name, layer in self.layers():
                if layer.load is not None:
                    # The state has the sum over all data-parallel replicas. Only the first replica
                    # takes it, because update_bias(process_group) adds the counts of all replicas.
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
        """Yield each MoE layer of the model, after its name."""
        for name, module in self.model.named_modules():
            if isinstance(module, MoE):
                yield name, module

    def names_of_experts(self) -> dict[str, str]:
        """Return the names of all parameters and buffers of experts.

        The keys are names in the model, the values names in the layer.
        """
        found = {}
        for prefix, layer in self.layers():
            for name in layer.state_dict():
                if is_of_experts(name):
                    found[f"{prefix}.{name}" if prefix else name] = name
        return found

    def place(self, name: str, value: Tensor, experts: dict[str, str]) -> Any:
        """Return a tensor of the model as a DTensor if it belongs to experts, else unchanged.

        Args:
            name: The tensor's name in the model.
            value: The tensor of this rank.
            experts: The result of names_of_experts.
        """
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
        """Return a LoRA factor on this rank's experts as a DTensor over the experts of all ranks.

        Args:
            value: [local experts * r, n] if columns is 0, else [n, r * local experts].
            columns: The number of local experts if they are the columns of the factor, else 0.
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
        """Return a field of the optimizer's state for a parameter.

        A tensor with the shape of the parameter is placed like the parameter. All other fields are
        returned unchanged.
        """
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
        """Return whether this rank has coordinate 0 in all mesh dimensions except the group's."""
        coordinate = self.mesh.get_coordinate()
        return not any(coordinate[:-1])

    def sum_loads(self) -> dict[str, Tensor]:
        """Return the choices that each layer has counted since its last update_bias.

        They are added over all mesh dimensions except the group's.
        """
        loads = {}
        for name, layer in self.layers():
            if layer.load is not None:
                loads[name] = layer.load.clone()
                for i in range(self.mesh.ndim - 1):
                    dist.all_reduce(loads[name], group=self.mesh.get_group(i))
        return loads


def find_factors(model: nn.Module, names: dict[int, str]) -> dict[str, int]:
    """Return the `columns` argument of place_factor for each LoRA factor on experts, by name.

    peft stores lora_A as [experts * r, n] and lora_B as [n, r * experts].

    Args:
        model: The model.
        names: The name of each parameter by its id().
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
    """Make the state of an optimizer that has not stepped yet, and set it to zero.

    Optimizers make their state in the first step, but dcp.load needs tensors to write into. So this
    function runs a step with zero gradients and learning rate 0, which changes no parameter. It
    does nothing if the optimizer already has state.
    """
    every = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(p.requires_grad and not optimizer.state[p] for p in every):
        return
    if any(optimizer.state[p] for p in every):
        return  # the optimizer has stepped, and keeps no state for some parameters
    gradients = [(p, p.grad) for p in every]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in every:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient in gradients:
        parameter.grad = gradient
    for group in optimizer.param_groups:
        # The fields of NAdam, ASGD and Rprop that do not begin with zeros.
        first = {"mu_product": 1.0, "mu": 1.0, "eta": group["lr"], "step_size": group["lr"]}
        for parameter in group["params"]:
            for field, value in optimizer.state[parameter].items():
                local = value.to_local() if hasattr(value, "to_local") else value  # of a DTensor
                # The 8-bit tensors of torchao have no fill_, but they are already zero.
                if type(local) is Tensor:
                    local.fill_(first.get(field, 0.0))
