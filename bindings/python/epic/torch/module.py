# SPDX-License-Identifier: Apache-2.0
"""The module MoE: a Mixture-of-Experts layer as a torch.nn.Module."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from epic.errors import EpicArgumentError, EpicUnsupportedError
from epic.invariance import check_replicas
from epic.options import Moe, check_int, check_kind, check_rate
from epic.torch.arguments import ROW_TYPES, assume_constant_result
from epic.torch.experts import GroupedMm
from epic.torch.groups import Group
from epic.torch.moe import EXPERT_WEIGHTS, MoeWeights, moe
from epic.torch.placement import Placement
from epic.torch.plans import tables_of
from epic.torch.router import bias_update
from epic.torch.routing import Given, Routing
from epic.torch.state import (
    EXTRA,
    check_ddp,
    check_loaded,
    check_sharding,
    experts_in,
    held_experts,
    is_of_experts,
    mark_experts,
    replica_table,
)
from epic.torch.sums import sum as sum_over_ranks


class MoE(nn.Module):
    """A Mixture-of-Experts layer whose experts are spread over the ranks of a group.

    `layer(x)` takes x [..., hidden] and returns (out, loss). out has the shape and dtype of x. loss
    is a scalar, float32 (float64 with float64 rows): this rank's part of balance loss and z-loss.
    It is 0 if options has no coefficients. Add it to your loss. out and loss have gradients. All
    ranks must call their layers in the same order. A rank without tokens passes x with 0 rows.

    The parameters have the names and shapes of `MoeWeights`. Those of the experts (w_gate_up,
    w_down and their biases) are this rank's own num_experts / num_ranks experts. All others are
    equal on all ranks, and `sum_gradients` adds their gradients over the ranks after backward.

    `layer(x, return_routing=True)` also returns which experts the tokens used, and
    `layer(x, forced=routing)` uses these experts. `record_routing` and `replay_routing` do this for
    all layers of a model.

    Args:
        group: The open `Group` whose ranks share the experts. num_ranks must divide num_experts.
        options: An `epic.Moe`, which describes router, experts and losses. `Moe.of(...)` makes one
            from keyword arguments.
        dtype: Dtype of the experts: torch.float32, bfloat16, float16 or float64. None: torch's
            default dtype. The router is float32, or float64 if the experts are float64. It computes
            in this dtype also after `.to(dtype)`.
        device: Device of the parameters. None: the device of the group, or "meta" under
            `with torch.device("meta")`. After "meta" call `to_empty`, then `reset_parameters`.
        gate_bias: Whether the router has a bias b_gate [E], which is added to the logits.
        expert_biases: Whether the experts have biases b_gate_up and b_down.
        shared_gate: Whether the shared expert's output is multiplied by sigmoid(x w_shared_gate).
            Needs `options.shared`.
        bias_rate: By how much one call of `update_bias` changes an element of the buffer `bias` [E]
            float32. The router adds this bias when it chooses experts (DeepSeek-V3), so that their
            loads become even without a balance loss. None: no such bias.
        logical_of_expert: Only with `options.layer.num_logical`: num_experts ids, as a sequence, a
            tensor or an array. Element e is the logical expert of which expert e is a replica.
            Replicas begin with equal weights and get equal gradients. Or a `Placement`, whose table
            can change. The state_dict does not contain this table.
        grouped_mm: A grouped product of your own, such as `torch._grouped_mm`:
            grouped_mm(x [slots, n], w [local experts, n, m], ends [local experts] int32) ->
            [slots, m], where expert e has the rows ends[e - 1] to ends[e]. None: EPIC's product.
        tag: Calls with equal tags run in the same order on all ranks. Layers that threads of one
            process run at the same time need different tags.
        seed: Seed of the initial values, equal on all ranks. None: the number of layers that were
            made with the group before, so that the layers of a model begin with different values.
            Then all ranks must make their layers in the same order. `torch.manual_seed` does not
            change these values.

    Raises:
        EpicArgumentError: An argument does not fit the group or the options.

    Example:
        One rank, on a CPU. With torchrun the same program trains on all processes:

        >>> import torch, epic.torch
        >>> options = epic.torch.Moe.of(
        ...     num_experts=8, top_k=2, hidden=64, inner=128, normalize="sum", balance_coeff=0.01
        ... )
        >>> group = epic.torch.Group(max_tokens=256, max_row_bytes=64 * 4)
        >>> layer = epic.torch.MoE(group, options)
        >>> optimizer = torch.optim.AdamW(layer.parameters())
        >>> x = torch.randn(4, 32, 64)  # [batch, sequence, hidden]: at most max_tokens tokens
        >>> out, loss = layer(x)
        >>> out.shape
        torch.Size([4, 32, 64])
        >>> (out.square().mean() + loss).backward()
        >>> layer.sum_gradients()
        >>> optimizer.step()
        >>> group.close()
    """

    bias: Tensor | None
    load: Tensor | None
    logical_of_expert: Tensor | None
    placement: Placement | None = None
    # record_routing sets `recorded`, and replay_routing sets `replayed`, while they are active.
    recorded: list[Routing] | None = None
    replayed: Any = None

    def __init__(
        self,
        group: Group,
        options: Moe,
        *,
        dtype: torch.dtype | None = None,
        device: Any = None,
        gate_bias: bool = False,
        expert_biases: bool = False,
        shared_gate: bool = False,
        bias_rate: float | None = None,
        logical_of_expert: Sequence[int] | Tensor | Placement | None = None,
        grouped_mm: GroupedMm | None = None,
        tag: int = 0,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        check_kind("group", group, Group)
        check_kind("options", options, Moe)
        if bias_rate is not None:
            check_rate("bias_rate", bias_rate)
        if grouped_mm is not None and not callable(grouped_mm):
            raise EpicArgumentError(f"grouped_mm is {grouped_mm!r}: must be a function, or None")
        self.seed = group.layers_made if seed is None else check_int("seed", seed)
        if options.layer.num_experts % group.num_ranks:
            raise EpicArgumentError(
                f"num_experts is {options.layer.num_experts}: must be a multiple of "
                f"{group.num_ranks}, the number of ranks"
            )
        if shared_gate and options.shared is None:
            raise EpicArgumentError(
                f"shared_gate is {shared_gate}: must be False without options.shared"
            )
        dtype = dtype or torch.get_default_dtype()
        if dtype not in ROW_TYPES:
            raise EpicArgumentError(
                f"dtype is {dtype}: must be float32, bfloat16, float16 or float64"
            )
        self.group, self.options, self.tag = group, options, tag
        self.grouped_mm, self.bias_rate = grouped_mm, bias_rate
        # 16-bit gradients are added during backward, before they are rounded. sum_gradients() would
        # add gradients that each rank has rounded, so their bits would depend on the number of
        # ranks.
        narrow = dtype in (torch.bfloat16, torch.float16)
        self.sums_in_backward = narrow and options.layer.sum_order == "tree"
        self.num_local_experts = options.layer.num_experts // group.num_ranks
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        device = default_device(group) if device is None else device
        shapes = self.shapes(gate_bias, expert_biases, shared_gate)
        self.names = tuple(shapes)
        for name, shape in shapes.items():
            kind = wide if name in ("w_gate", "b_gate", "w_shared_gate") else dtype
            value = None if shape is None else torch.empty(shape, dtype=kind, device=device)
            self.register_parameter(name, None if value is None else nn.Parameter(value))
        columns = options.router.num_experts + options.router.zero_experts
        bias = (
            None if bias_rate is None else torch.zeros(columns, dtype=torch.float32, device=device)
        )
        self.register_buffer("bias", bias)
        load = torch.zeros(options.layer.num_ids, dtype=torch.int32, device=device)
        # load is not a buffer. DistributedDataParallel would overwrite a buffer with that of rank 0
        # before each forward.
        self.load = None if bias_rate is None else load
        self.set_table(logical_of_expert, load)
        mark_experts(self, group)
        group.layers_made += 1
        if torch.device(device).type != "meta":
            self.reset_parameters()

    def shapes(
        self, gate_bias: bool, expert_biases: bool, shared_gate: bool
    ) -> dict[str, tuple[int, ...] | None]:
        """Return the shape of each parameter by its name, or None if the layer does not have it."""
        options, local = self.options, self.num_local_experts
        hidden, inner, width = options.experts.hidden, options.experts.inner, options.experts.width
        columns = options.router.num_experts + options.router.zero_experts
        shared = options.shared
        return {
            "w_gate": (hidden, columns),
            "b_gate": (columns,) if gate_bias else None,
            "w_gate_up": (local, hidden, width),
            "w_down": (local, inner, hidden),
            "b_gate_up": (local, width) if expert_biases else None,
            "b_down": (local, hidden) if expert_biases else None,
            "shared_gate_up": (1, hidden, shared.width) if shared else None,
            "shared_down": (1, shared.inner, hidden) if shared else None,
            "w_shared_gate": (hidden,) if shared_gate else None,
        }

    def set_table(self, given: Any, like: Tensor) -> None:
        """Set logical_of_expert.

        Args:
            given: The argument of the constructor.
            like: A tensor on the device of the table.
        """
        tolist = getattr(given, "tolist", None)
        if tolist is not None:  # of a tensor or an array
            given = tolist()
        self.replicas: list[int] | None = None
        if isinstance(given, Placement):
            given.check_layer(self.group, self.options.layer)
            self.placement = given
            self.logical_of_expert = given.logical_of_expert
            return
        whose = tables_of(self.options.layer, None, given, like)[1]
        if given is not None:
            self.replicas = list(given)  # a copy, because the caller may change the list later
        check_replicas(self.options, self.replicas or ())
        self.register_buffer("logical_of_expert", whose)

    def reset_parameters(self, seed: int | None = None) -> None:
        """Initialize the parameters: weights with random numbers, biases with 0.

        The numbers are normal with standard deviation 1 / sqrt(number of inputs). Those of an
        expert depend only on the expert's id and the seed, not on the number of ranks. The
        constructor calls this method, except on device "meta". There call `to_empty`, then this
        method, also for a layer under fully_shard.

        Args:
            seed: Seed of the random numbers; equal on all ranks. None: the seed of the layer.
        """
        seed = self.seed if seed is None else check_int("seed", seed)
        check_sharding(self.group, experts_in(self))
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                if name.startswith("b_"):
                    parameter.zero_()
                elif hasattr(parameter, "to_local"):
                    mine = parameter.to_local()
                    whole = torch.empty(parameter.shape, dtype=mine.dtype, device=mine.device)
                    self.draw(whole, name, seed)
                    mine.copy_(local_part(whole, parameter))
                else:
                    self.draw(parameter, name, seed)
            for buffer in (self.bias, self.load):
                if buffer is not None:
                    buffer.zero_()
            if self.logical_of_expert is not None and self.replicas is not None:
                self.logical_of_expert.copy_(torch.as_tensor(self.replicas))

    def draw(self, out: Tensor, name: str, seed: int) -> None:
        """Initialize a tensor with the random numbers of a parameter.

        Args:
            out: The tensor, with the shape that the parameter has on this rank of the group.
            name: Name of the parameter.
            seed: Seed of the random numbers.
        """
        if name not in EXPERT_WEIGHTS:
            fill_normal(out, name, seed, 0)
            return
        for logical, expert in zip(self.local_ids(), out, strict=True):
            fill_normal(expert, name, seed, 1 + logical)

    def local_ids(self) -> Sequence[int]:
        """Return the id of each expert of this rank; with replicas, of its logical expert."""
        if self.placement is not None:
            return self.placement.local_experts
        first = self.group.rank * self.num_local_experts
        every = self.replicas or range(self.options.layer.num_experts)
        return every[first : first + self.num_local_experts]

    def _apply(self, fn: Any, recurse: bool = True) -> "MoE":
        """Move or convert the module, but keep the bias in float32.

        In a dtype with fewer bits, adding bias_rate might not change the bias. This overrides a
        private method of torch, which `to`, `cuda` and similar methods call.
        """
        before, load = self.bias, self.load
        super()._apply(fn, recurse)
        if load is not None:
            self.load = move_load(load, fn(load).device)
        if before is not None and self.bias is not None and self.bias.dtype != before.dtype:
            self.bias = before.to(self.bias.device)
        mark_experts(self, self.group)  # _apply may have made new parameters
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        mark_experts(self, self.group)  # unpickled parameters have lost the attribute

    def get_extra_state(self) -> Tensor:
        """Return [first, count, num_experts, ...]: the numbers of the experts in the state_dict.

        torch saves the result in the state_dict under the key "_extra_state".
        """
        check_sharding(self.group, experts_in(self))
        held = self.held_experts()
        return held.to("meta") if self.w_gate.is_meta else held

    def held_experts(self) -> Tensor:
        """Return which experts this rank has; with replicas also their logical experts."""
        layer = self.options.layer
        logical = self.local_ids() if layer.num_logical else ()
        return held_experts(self.group, layer.num_experts, logical)

    def set_extra_state(self, state: Any) -> None:
        """Do nothing, because _load_from_state_dict has compared the experts already."""

    def _load_from_state_dict(
        self, state: Any, prefix: str, metadata: Any, strict: bool, missing: Any, *more: Any
    ) -> None:
        """Load a state, or raise an error if it has the experts of another rank.

        In a group of one rank the state need not have the entry "_extra_state".
        """
        check_sharding(self.group, experts_in(self))
        check_loaded(self.held_experts(), state, prefix)
        super()._load_from_state_dict(state, prefix, metadata, strict, missing, *more)
        if self.group.num_ranks == 1 and prefix + EXTRA in missing:
            missing.remove(prefix + EXTRA)
        mark_experts(self, self.group)  # assign=True makes new parameters

    def weights(self) -> MoeWeights:
        """Return the parameters as `MoeWeights`, for `moe`."""
        # torch.nn.utils.parametrize and prune replace a parameter by a computed attribute.
        own = self._parameters
        given = {name: own[name] if name in own else getattr(self, name) for name in self.names}
        return MoeWeights(bias=self.bias, **given)

    def forward(
        self,
        x: Tensor,
        token_mask: Tensor | None = None,
        *,
        forced: Given | None = None,
        capacity_limit: Tensor | None = None,
        return_routing: bool = False,
    ) -> Any:
        """Run the layer.

        Args:
            x: Tokens [..., hidden] in float32, bfloat16, float16 or float64, at most the group's
                max_tokens of them.
            token_mask: bool [...]. A token whose element is False (padding) has no expert, a
                result of zeros and no part in the losses. None: all tokens count.
            forced: A `Routing`, (ids, weights) or ids alone, as for `moe`: the experts of each
                token, which replace the router's choice. All ranks pass it, or none.
            capacity_limit: A 0-d int32 tensor on the device of x, as for `moe`: the rank then has
                at most this many slots.
            return_routing: Whether the result also has the `Routing` that the layer used.

        Returns:
            out, shaped as x, and loss, a scalar: this rank's part of the losses. With
            return_routing also the routing.

        Raises:
            EpicArgumentError: The shape, dtype or device of x or token_mask is wrong.
            EpicError: A rank failed, was late, or made a different call. `EpicError.code` names it.
        """
        self.check_ddp()
        if forced is None and self.replayed is not None:
            forced = self.replayed.next()
        found = moe(
            self.group,
            self.options,
            x,
            self.weights(),
            grouped_mm=self.grouped_mm,
            logical_of_expert=self.logical_of_expert,
            capacity_limit=capacity_limit,
            token_mask=token_mask,
            forced=forced,
            return_routing=return_routing or self.recorded is not None,
            sum_gradients=self.sums_in_backward,
            tag=self.tag,
        )
        if self.training and self.load is not None:
            # The value of found.load_of_ids; torch 2.9 cannot compile properties of a NamedTuple.
            counts = found.load if found.logical_load is None else found.logical_load
            # load_state_dict(assign=True) and fully_shard move parameters, but not self.load.
            if self.load.device != counts.device:
                self.load = move_load(self.load, counts.device)
            torch.ops.epic.count_load_.default(self.load, counts)
        if self.recorded is not None and found.routing is not None:
            self.recorded.append(found.routing)
        return (found.out, found.loss, found.routing) if return_routing else (found.out, found.loss)

    def update_bias(self, process_group: Any = None) -> None:
        """Move the bias by bias_rate towards an even load; call it once per optimizer step.

        The load counts the choices of all forward calls in training mode since the last call of
        update_bias. If the layer has no bias_rate, the call does nothing.

        Args:
            process_group: Process group of the ranks that hold the same experts (data parallelism):
                their loads are added. None: there are none.
        """
        if self.bias is None or self.load is None or not self.bias_rate:
            return
        if process_group is not None:
            torch.distributed.all_reduce(self.load, group=process_group)
        count = self.options.layer.num_ids
        bias_update(self.bias[:count], self.load, self.bias_rate, self.group)
        self.load.zero_()

    @assume_constant_result
    def check_ddp(self) -> None:
        """Raise an error in DistributedDataParallel over ranks of the group.

        torch.compile calls it while it traces.
        """
        check_ddp(self, self.group)

    def sum_gradients(self) -> None:
        """Sum the gradients of the shared parameters over the ranks of the group.

        Collective: every rank calls it, after backward and before the optimizer steps. Shared
        parameters are those of the router and of the shared expert, which all ranks have. The
        gradients of the experts are complete without it. A parameter without a gradient on this
        rank counts as zeros.

        With the layer's sum_order "tree" the gradients have the same bits for every number of ranks
        that divides `leaves`, if all ranks have equally many tokens. A layer of dtype bfloat16 or
        float16 with this order adds the gradients during backward, before it rounds them. For such
        a layer this method does nothing.

        Raises:
            EpicArgumentError: fully_shard shards a shared parameter over ranks of the group, so it
                has added the gradients already.
        """
        check_sharding(self.group, self.named_parameters())
        if self.sums_in_backward:
            return
        tree = self.options.layer.sum_order == "tree"
        for name, parameter in self.named_parameters():
            if not is_of_experts(name) and parameter.requires_grad:
                add_gradients(self.group, parameter, self.tag, tree)

    def extra_repr(self) -> str:
        """Return the options that print(module) shows."""
        layer, experts = self.options.layer, self.options.experts
        return (
            f"num_experts={layer.num_experts}, top_k={layer.top_k}, hidden={experts.hidden}, "
            f"inner={experts.inner}, group={self.group!r}"
        )


def add_gradients(group: Group, parameter: Tensor, tag: int = 0, tree: bool = False) -> None:
    """Add the gradient of a parameter over the ranks of the group, in place. Collective.

    A rank without a gradient adds zeros, because other ranks may have one. If fully_shard shards
    the parameter over another mesh dimension, all ranks of the group have the same part of it.

    Args:
        group: The group.
        parameter: The parameter.
        tag: Tag of the sum.
        tree: Whether to add the ranks in a binary tree.
    """
    with torch.no_grad():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient: Any = parameter.grad
        mine = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        numbers = torch.view_as_real(mine) if mine.is_complex() else mine
        wide = numbers if numbers.dtype == torch.float64 else numbers.float()
        numbers.copy_(sum_over_ranks(group, wide, tree=tree, tag=tag))


def move_load(load: Tensor, device: torch.device) -> Tensor:
    """Return the load counts of a layer on a device; counts from "meta" become zeros."""
    return torch.zeros_like(load, device=device) if load.is_meta else load.to(device)


def default_device(group: Group) -> torch.device:
    """Return the group's device, or "meta" under `with torch.device("meta")`."""
    default = torch.get_default_device()
    return default if default.type == "meta" else group.device


def fill_normal(out: Tensor, name: str, seed: int, part: int) -> None:
    """Fill a tensor with random numbers that depend only on its shape, name, seed and part.

    The CPU makes the numbers, so they are equal on all devices.

    Args:
        out: The tensor.
        name: Name of the parameter.
        seed: Seed of the layer.
        part: 0, or 1 + the id of the expert.
    """
    number = sum((i + 1) * ord(letter) for i, letter in enumerate(name))
    mixed = (seed * 1_000_003 + number) * 65_537 + part
    generator = torch.Generator("cpu").manual_seed(mixed % (1 << 63))
    drawn = torch.randn(out.shape, generator=generator, dtype=torch.float64, device="cpu")
    inputs = out.shape[-2] if out.dim() > 1 else out.shape[0]
    out.copy_(drawn * inputs**-0.5)


def local_part(whole: Tensor, like: Any) -> Tensor:
    """Return this rank's part of a tensor that all ranks have, without communication.

    like: a DTensor with the mesh and the placements.
    """
    from torch.distributed.tensor import distribute_tensor

    place = (like.device_mesh, like.placements)
    return distribute_tensor(whole, *place, src_data_rank=None).to_local()


def sharded_state(layer: MoE, mesh: Any) -> dict[str, Any]:
    """Return the state of a layer as DTensors, for torch.distributed.checkpoint.

    The DTensors share the memory of the layer. The parameters of experts are sharded over the ranks
    of the group, and all other tensors are replicated on them. So a different number of ranks can
    load the checkpoint. With replicas the state also contains the table logical_of_expert, and
    loading into a layer with another table raises an `EpicArgumentError`.

    Args:
        layer: The layer.
        mesh: DeviceMesh of the group. For a layer under fully_shard: the dimensions of fully_shard,
            then the group's, for example mesh["dp", "ep"].

    Returns:
        A state_dict of DTensors.

    Raises:
        EpicArgumentError: The mesh does not fit the sharding of the parameters.
        EpicUnsupportedError: fully_shard splits the experts of a rank unevenly.

    Example:
        state = epic.torch.sharded_state(layer, mesh)
        torch.distributed.checkpoint.save(state, checkpoint_id="step-1000")
    """
    from torch.distributed.tensor import DTensor

    def place(name: str, value: Tensor) -> Any:
        mine, placements, shape = local_and_placements(name, value.detach(), mesh)
        stride = torch.empty(shape, device="meta").stride()
        more = {"run_check": False, "shape": shape, "stride": stride}
        return DTensor.from_local(mine, mesh, placements, **more)

    state = {name: place(name, v) for name, v in layer.state_dict().items() if name != EXTRA}
    if layer.logical_of_expert is not None:
        state["logical_of_expert"] = replica_table(layer.logical_of_expert)
    return state


def local_and_placements(
    name: str, value: Tensor, mesh: Any
) -> tuple[Tensor, list[Any], torch.Size]:
    """Return what DTensor.from_local needs for a tensor of a layer.

    Args:
        name: Name of the tensor in the layer.
        value: The tensor of this rank, possibly a DTensor of fully_shard.
        mesh: DeviceMesh whose last dimension is the group's.

    Returns:
        The local tensor of this rank, its placements in the mesh, and the shape over all ranks.

    Raises:
        EpicArgumentError: The mesh does not fit the sharding of the tensor.
        EpicUnsupportedError: fully_shard splits the experts of a rank unevenly.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    num_ranks, is_expert = mesh.size(mesh.ndim - 1), is_of_experts(name)
    shape = torch.Size((value.shape[0] * num_ranks, *value.shape[1:])) if is_expert else value.shape
    last = Shard(0) if is_expert else Replicate()
    if not isinstance(value, DTensor):
        return value, [Replicate()] * (mesh.ndim - 1) + [last], shape
    over = value.device_mesh
    if over.ndim != mesh.ndim - 1:
        raise EpicArgumentError(
            f"mesh has the dimensions {mesh.mesh_dim_names}: must have {over.mesh_dim_names}, over "
            f"which {name} is sharded, and then the dimension of the group"
        )
    first = []
    for i, placement in enumerate(value.placements):
        if is_expert and placement.is_shard(0):
            if value.shape[0] % over.size(i):
                raise EpicUnsupportedError(
                    f"{name} has {value.shape[0]} experts on a rank, sharded over {over.size(i)} "
                    f"ranks: must be a multiple of {over.size(i)} for a checkpoint; or pass "
                    "fully_shard a shard_placement_fn= that returns Shard(1)"
                )
            first.append(_StridedShard(0, split_factor=num_ranks))
        else:
            first.append(placement)
    return value.to_local(), [*first, last], shape
