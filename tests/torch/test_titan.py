# SPDX-License-Identifier: Apache-2.0
"""Compares torchtitan's routed experts with EPIC's dispatcher and with its own all-to-all.

It compares forward and backward. Also tests the override that selects EPIC.
"""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from parts import choices, numbers
from reference import relative

pytest.importorskip("torchtitan", reason="there is no torchtitan: make test-torch-adapters")

DIM, INNER, EXPERTS, TOP_K, BATCH, LENGTH = 32, 48, 8, 3, 2, 5
WISHES: dict[str, dict[str, Any]] = {
    "exact": {},
    "bound": {"capacity": None},
    "padded": {"pad_multiple": 8},
    "fp8": {"quantize": "1x32"},
}


def routed(config: Any, mesh: Any, rank: int) -> Any:
    """Return routed experts with the parameters of this rank's experts."""
    moe = importlib.import_module("torchtitan.models.common.moe")
    local = EXPERTS // (mesh.size() if mesh else 1)
    inner = moe.GroupedExperts.Config(dim=DIM, hidden_dim=INNER, num_experts=local)
    module = moe.RoutedExperts.Config(inner_experts=inner, token_dispatcher=config).build()
    with torch.no_grad():
        for seed, p in enumerate(module.parameters()):
            p.copy_(numbers(10 * seed + rank, *p.shape) * p.shape[2] ** -0.5)
    module.token_dispatcher.wire_meshes(ep_mesh=mesh)
    return module


def gradients_of(module: Any, rank: int) -> list[torch.Tensor]:
    """Return the output, and the gradients of x, scores and parameters."""
    x, ct = (numbers(seed + rank, BATCH, LENGTH, DIM) for seed in (100, 200))
    scores = numbers(300 + rank, BATCH, LENGTH, TOP_K).requires_grad_()
    ids = choices(400 + rank, BATCH * LENGTH, 0.0).reshape(BATCH, LENGTH, TOP_K).long()
    out = module(x.requires_grad_(), scores, ids, torch.bincount(ids.flatten(), minlength=EXPERTS))
    out.backward(ct)
    assert x.grad is not None and scores.grad is not None
    return [out.detach(), x.grad, scores.grad, *(p.grad for p in module.parameters())]


def modules() -> tuple[Any, Any]:
    """Return EPIC's module for torchtitan, and torchtitan's dispatchers."""
    importlib.import_module("torchtitan.distributed.utils").set_spmd_backend("default")
    own = importlib.import_module("torchtitan.models.common.token_dispatcher")
    return importlib.import_module("epic.torch.titan"), own


def the_same(rank: int, name: str) -> None:
    """Compare with torchtitan's all-to-all, and check equal bits in two runs. Products are
    bfloat16."""
    titan, own = modules()
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    standard = own.AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K)
    sizes = {"hidden_dim": DIM, "num_max_tokens_per_rank": BATCH * LENGTH}
    config = titan.epic(standard, **sizes, **WISHES[name])
    wanted = gradients_of(routed(standard, mesh, rank), rank)
    got = gradients_of(module := routed(config, mesh, rank), rank)
    again = gradients_of(routed(config, mesh, rank), rank)
    for a, b, c in zip(got, wanted, again, strict=True):
        assert relative(a, b) < (0.1 if name == "fp8" else 0.01)
        assert torch.equal(a, c)
    group = module.token_dispatcher.group
    assert group.num_ranks == 4 and group.is_open
    assert routed(config, mesh, rank).token_dispatcher.group is group  # all layers share one group
    group.close()
    assert routed(config, mesh, rank).token_dispatcher.group.is_open


@pytest.mark.parametrize("name", WISHES)
def test_the_same(world: Any, name: str) -> None:
    """Check each way to size the receive buffer."""
    world.run(the_same, name)


def without_mesh(rank: int) -> None:
    """Check without expert parallelism: equal bits as torchtitan's local dispatcher."""
    titan, own = modules()
    local = own.LocalTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K)
    got, wanted = (gradients_of(routed(c, None, 0), rank) for c in (titan.epic(local), local))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def unsized(rank: int) -> None:
    """Check that the error for missing sizes names them and shows what to write."""
    titan, own = modules()
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    config = titan.epic(own.AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K))
    with pytest.raises(ValueError, match="hidden_dim is None: pass"):
        routed(config, mesh, rank)


@pytest.mark.parametrize("what", [without_mesh, unsized])
def test_among_processes(world: Any, what: Callable[[int], None]) -> None:
    """Run the test on every rank."""
    world.run(what)


@pytest.mark.parametrize("backend", ["standard", "hybridep"])
def test_override(backend: str) -> None:
    """Check the override for all layers of a torchtitan model, from the command line on."""
    titan, _ = modules()
    configs = importlib.import_module("torchtitan.config.override")
    qwen3 = importlib.import_module("torchtitan.models.qwen3")
    model = qwen3._debugmodel_moe("flex", backend)
    sizes = {"num_max_tokens_per_rank": 64} | ({"hidden_dim": 256} if backend == "standard" else {})
    wishes = configs.parse_cli_imports(["epic.torch.titan.epic=" + str(sizes).replace("'", '"')])
    lines = configs.apply_overrides(configs.OverrideConfig(imports=wishes), model)
    assert len(lines) == len(model.layers)
    with torch.device("meta"):
        built = model.layers[0].build()
    dispatcher = built.moe.routed_experts.token_dispatcher
    assert type(dispatcher) is titan.EpicTokenDispatcher
    assert dispatcher.config.hidden_dim == 256 and dispatcher.config.num_max_tokens_per_rank == 64
