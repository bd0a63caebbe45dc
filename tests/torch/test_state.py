# SPDX-License-Identifier: Apache-2.0
"""Tests the checks for state that belongs to one rank.

A state_dict records which experts it contains. Data parallelism over ranks with different experts
must raise an error.
"""

import copy
import inspect
import io
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import epic.torch
from epic.torch import EpicArgumentError, MoE
from parts import SIZES, numbers
from test_moe import EXPERT_WEIGHTS, WISH

DDP: Any = DistributedDataParallel
OTHERS = "experts 0 to 3 of 8, and this rank has experts 4 to 7 of 8.*epic.torch.sharded_state"


def on_ranks(count: int, run: Callable[[epic.torch.Group], Any]) -> list[Any]:
    """Call run(group) in a thread for each rank."""
    bootstraps = epic.torch.threads(count)

    def one(rank: int) -> Any:
        with epic.torch.Group(bootstrap=bootstraps[rank], **SIZES) as group:
            return run(group)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """Save and load a state with torch.save and weights_only=True."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def through_safetensors(state: dict[str, Any]) -> dict[str, Any]:
    """Save and load a state in the format of save_pretrained."""
    safetensors = pytest.importorskip("safetensors.torch")
    return safetensors.load(safetensors.save(state))


CARRIERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "cloned": lambda state: {name: value.clone() for name, value in state.items()},
    "deepcopy": copy.deepcopy,
    "torch.save": saved,
    "safetensors": through_safetensors,
}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("how", CARRIERS)
def test_the_state_of_another_rank(how: str, strict: bool, assign: bool) -> None:
    """Check that the state of another rank is refused before any parameter changes, and that the
    rank's own state is loaded."""

    def run(group: epic.torch.Group) -> Any:
        layer = MoE(group, WISH, expert_biases=True, bias_rate=0.1)
        layer.reset_parameters(seed=group.rank)
        return layer, CARRIERS[how](layer.state_dict())

    (_, first), (layer, own) = on_ranks(2, run)
    before = {name: p.clone() for name, p in layer.named_parameters()}
    model = torch.nn.ModuleDict({"layer": layer})
    for target, prefix in ((layer, ""), (model, "layer.")):
        with pytest.raises(EpicArgumentError, match=OTHERS):
            state = {prefix + name: value for name, value in first.items()}
            target.load_state_dict(state, strict=strict, assign=assign)
        assert all(torch.equal(p, before[n]) for n, p in layer.named_parameters())
    layer.reset_parameters(seed=9)
    assert layer.load_state_dict(own, strict=strict, assign=assign) == ([], [])
    assert all(torch.equal(p, before[n]) for n, p in layer.named_parameters())


def test_states_of_other_numbers_of_ranks() -> None:
    """Check states of another number of ranks, and a state that does not record its experts."""
    (whole,), (half, _) = (on_ranks(n, lambda group: MoE(group, WISH)) for n in (1, 2))
    with pytest.raises(EpicArgumentError, match=r"0 to 7 of 8, and .* 0 to 3 of 8"):
        half.load_state_dict(whole.state_dict())
    with pytest.raises(EpicArgumentError, match=r"0 to 3 of 8, and .* 0 to 7 of 8"):
        whole.load_state_dict(half.state_dict())
    tensors = {name: value for name, value in half.state_dict().items() if name != "_extra_state"}
    with pytest.raises(RuntimeError, match=r'Missing key.*"_extra_state"'):
        half.load_state_dict(tensors)
    half.load_state_dict(tensors, strict=False)
    whole.load_state_dict(dict(whole.named_parameters()))
    router = {name: v for name, v in whole.state_dict().items() if name not in EXPERT_WEIGHTS}
    found = half.load_state_dict(router, strict=False)  # the router's state fits every rank
    assert set(found.missing_keys) <= set(EXPERT_WEIGHTS) and torch.equal(half.w_gate, whole.w_gate)


def test_a_state_on_meta() -> None:
    """Check a state on "meta", which has no values: its experts are compared all the same."""

    def run(group: epic.torch.Group) -> Any:
        return MoE(group, WISH), MoE(group, WISH, device="meta")

    (first, _), (second, empty) = on_ranks(2, run)
    assert all(value.is_meta for value in empty.state_dict().values())
    with pytest.raises(EpicArgumentError, match=OTHERS):
        empty.load_state_dict(first.state_dict(), assign=True)
    empty.load_state_dict(second.state_dict(), assign=True)
    assert torch.equal(empty.w_down, second.w_down) and not empty.w_down.is_meta


# -------------------------------------------------- torch.distributed.checkpoint ----


def refused(call: Callable[[], Any], why: str = "epic.torch.sharded_state") -> None:
    """Check the text of the error, which torch.distributed.checkpoint may wrap."""
    try:
        call()
    except BaseException as error:
        assert why in str(error), error
    else:
        raise AssertionError("it was loaded")


def plain_checkpoints(rank: int, folder: str) -> None:
    """Save plain states of one rank with torch.distributed.checkpoint. Loading them on another rank
    is refused by every call. With a folder for each rank all can be loaded."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    alone = [dist.new_group([r]) for r in range(4)][rank]
    with epic.torch.Group(mesh, **SIZES) as group:
        layer = MoE(group, WISH, bias_rate=0.1)
        dcp.save(layer.state_dict(), checkpoint_id=f"{folder}/plain")
        dcp.save({"model": layer}, checkpoint_id=f"{folder}/stateful")
        other = MoE(group, WISH, bias_rate=0.1)
        refused(lambda: dcp.load(other.state_dict(), checkpoint_id=f"{folder}/plain"))
        refused(lambda: dcp.load({"model": other}, checkpoint_id=f"{folder}/stateful"))
        dist.barrier()
        mine = {"checkpoint_id": f"{folder}/{rank}", "process_group": alone}
        layer.reset_parameters(seed=rank)
        dcp.save(layer.state_dict(), **mine)
        state = other.state_dict()
        dcp.load(state, **mine)
        other.load_state_dict(state)
        assert all(map(torch.equal, layer.parameters(), other.parameters()))


def test_plain_checkpoints(world: Any, tmp_path: Path) -> None:
    """Run the checks in several processes."""
    world.run(plain_checkpoints, str(tmp_path))


def replica_tables(rank: int, folder: str) -> None:
    """Save layers with replicas on all ranks. Loading with another table is refused."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    options = epic.torch.Moe.of(num_experts=8, num_logical=4, top_k=2, hidden=16, inner=8)
    tables = [[e % 4 for e in range(8)], [e // 2 for e in range(8)]]
    with epic.torch.Group(mesh, **SIZES) as group:

        def made(which: int, placed: bool, seed: int) -> MoE:
            table: Any = tables[which]
            if placed:
                table = epic.torch.Placement(group, options.layer, table)
            layer = MoE(group, options, logical_of_expert=table)
            layer.reset_parameters(seed)
            return layer

        for placed in (False, True):
            for kind in ("sharded", "training"):

                def state_of(layer: MoE, kind: str = kind) -> dict[str, Any]:
                    if kind == "sharded":
                        return epic.torch.sharded_state(layer, mesh)
                    return {"train": epic.torch.TrainingState(torch.nn.Sequential(layer), mesh)}

                where = {"checkpoint_id": f"{folder}/{kind}{placed}"}
                saved, same = made(0, placed, 1), made(0, placed, 2)
                dcp.save(state_of(saved), **where)
                dcp.load(state_of(same), **where)
                assert all(map(torch.equal, saved.parameters(), same.parameters()))
                why = f"logical_of_expert {tables[0]}, and the layer has {tables[1]}"
                refused(lambda: dcp.load(state_of(made(1, placed, 2)), **where), why)  # noqa: B023


def test_checkpoints_with_replicas(world: Any, tmp_path: Path) -> None:
    """Check checkpoints of layers with the same and with another table of replicas."""
    world.run(replica_tables, str(tmp_path))


def sharded_states(rank: int) -> None:
    """Use torch's own functions for the state of a model under fully_shard."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    with epic.torch.Group(mesh, "ep", **SIZES) as group:
        model = torch.nn.Sequential(MoE(group, WISH, gate_bias=True))
        model[0].reset_parameters(seed=3)
        fully_shard(model, mesh=mesh["dp"])
        for options in (StateDictOptions(), StateDictOptions(full_state_dict=True)):
            state = get_model_state_dict(model, options=options)
            state = {name: value.clone() for name, value in state.items()}
            model[0].reset_parameters(seed=4)
            set_model_state_dict(model, state, options=options)
            wanted = MoE(group, WISH, gate_bias=True)
            wanted.reset_parameters(seed=3)
            for mine, plain in zip(model.parameters(), wanted.parameters(), strict=True):
                assert torch.equal(mine.full_tensor(), plain)
            every: list[Any] = [None] * 4
            held = state["0._extra_state"].tolist()
            dist.all_gather_object(every, held)
            assert every == [[0, 4, 8], [4, 4, 8]] * 2
            state["0._extra_state"] = torch.tensor(every[(rank + 1) % 4])
            refused(partial(set_model_state_dict, model, state, options=options))


def test_states_under_fully_shard(world: Any) -> None:
    """Check these states with data parallelism over the other axis."""
    world.run(sharded_states)


# ----------------------------------------------------------------- data parallelism ----


def marks(layer: MoE) -> dict[str, bool]:
    """Return the attribute of each parameter that Megatron-Core and DeepSpeed read."""
    return {name: getattr(p, "allreduce", True) for name, p in layer.named_parameters()}


def test_parameters_of_experts_are_marked() -> None:
    """Check the attribute, however the parameters were created."""

    def run(group: epic.torch.Group) -> Any:
        made = MoE(group, WISH, expert_biases=True)
        meta = MoE(group, WISH, expert_biases=True, device="meta").to_empty(device="cpu")
        assigned = MoE(group, WISH, expert_biases=True, device="meta")
        assigned.load_state_dict(made.state_dict(), assign=True)
        return made, meta, assigned, copy.deepcopy(made), made.to(torch.bfloat16)

    for layer in on_ranks(2, run)[1]:
        assert marks(layer) == {name: name not in EXPERT_WEIGHTS for name in marks(layer)}
    assert all(marks(on_ranks(1, run)[0][0]).values())


def wrapped(rank: int) -> None:
    """Wrap a layer in DDP over the ranks of its group: refused, unless DDP ignores the experts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    x = numbers(3 + rank, 5, 16)
    with epic.torch.Group(mesh, "ep", **SIZES) as group:

        def model() -> Any:
            return torch.nn.Sequential(torch.nn.Linear(16, 16), MoE(group, WISH))

        for over in (mesh.get_group("ep"), None):
            wrong = DDP(model(), process_group=over)
            ranks = "0, 1" if rank in (0, 1) else "2, 3"
            with pytest.raises(EpicArgumentError, match=f"over ranks {ranks}, .*sum_gradients"):
                wrong(x)
            with pytest.raises(RuntimeError, match="sum_gradients"):
                torch.compile(wrong, backend="eager")(x)
        # torch newer than 2.9
        if "_active_ddp_module" in inspect.getsource(sys.modules[replicate.__module__]):
            composed = replicate(model(), process_group=mesh.get_group("ep"))
            with pytest.raises(EpicArgumentError, match="DistributedDataParallel is over"):
                composed(x)
            DDP._active_ddp_module = None  # a failed forward of replicate does not reset this
        DDP(model(), process_group=mesh.get_group("dp"))(x)
        ignored, names = model(), [f"1.{name}" for name in EXPERT_WEIGHTS]
        DDP._set_params_and_buffers_to_ignore_for_model(ignored, names)
        DDP(ignored)(x)
    with epic.torch.Group(num_ranks=1, **SIZES) as group:
        DDP(MoE(group, WISH))(x)


def test_ddp_over_ranks_of_the_group(world: Any) -> None:
    """Check that DDP over the group is refused, because it would make all experts equal."""
    world.run(wrapped)


def sharded_over_the_group(rank: int) -> None:
    """Call fully_shard over the ranks of the group, which would mix different experts."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    with epic.torch.Group(mesh, **SIZES) as group:
        layer = fully_shard(MoE(group, WISH), mesh=mesh)
        for call in (layer.state_dict, layer.reset_parameters, layer.sum_gradients):
            with pytest.raises(EpicArgumentError, match="sharded over ranks 0, 1, 2, 3"):
                call()
        layer = MoE(group, WISH)
        linear = torch.nn.Linear(16, 16)
        model = torch.nn.Sequential(linear, layer)
        fully_shard(model, mesh=mesh, ignored_params=set(layer.parameters()))
        layer.state_dict()
        with pytest.raises(EpicArgumentError, match=r"0\.weight is .* do not call sum_gradients"):
            epic.torch.sum_gradients(model, group)


def test_fully_shard_over_ranks_of_the_group(world: Any) -> None:
    """Check that it is refused like DDP."""
    world.run(sharded_over_the_group)
