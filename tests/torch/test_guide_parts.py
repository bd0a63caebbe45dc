# SPDX-License-Identifier: Apache-2.0
"""Runs the blocks of the guide that are parts of programs, in groups of 1, 2 and 4 ranks.

Ranks have different numbers of tokens, and one of four ranks has none.
"""

import contextlib
import io
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import epic.torch
import reference
from pages import find_block
from parts import SIZES, slabs

E, K, H, INNER = 8, 2, 32, 16  # experts, choices of a token, hidden and inner size
TOKENS = (5, 3, 0, 9)  # of each rank
LAYER = epic.torch.Layer(num_experts=E, top_k=K)
OPTIONS = epic.torch.Moe.of(num_experts=E, top_k=K, hidden=H, inner=INNER, balance_coeff=0.01)
Names = dict[str, Any]


def draw(rank: int) -> tuple[torch.Tensor, ...]:
    """Return ids, tokens and weights of a rank. They are small numbers, so that sums are exact."""
    rng = np.random.default_rng(rank)
    ids = np.array([rng.permutation(E)[:K] for _ in range(TOKENS[rank])], np.int32)
    tokens = rng.integers(-2, 3, (TOKENS[rank], H)).astype(np.float32)
    weights = rng.integers(1, 4, (TOKENS[rank], K)).astype(np.float32) / 4
    return torch.from_numpy(ids.reshape(-1, K)), torch.from_numpy(tokens), torch.from_numpy(weights)


def names_of(group: epic.torch.Group, **more: Any) -> Names:
    """Return the names that the blocks use."""
    ids, tokens, weights = draw(group.rank)
    names = {"epic": epic, "torch": torch, "group": group, "layer": LAYER, "hidden": H}
    return names | {"topk_idx": ids, "tokens": tokens, "weights": weights, **more}


def experts_of(group: epic.torch.Group) -> range:
    """Return the experts of this rank."""
    local = E // group.num_ranks
    return range(group.rank * local, (group.rank + 1) * local)


def tokens_of(group: epic.torch.Group, expert: int) -> torch.Tensor:
    """Return the tokens of all ranks that have chosen an expert."""
    every = [draw(rank) for rank in range(group.num_ranks)]
    return torch.cat([tokens[(ids == expert).any(1)] for ids, tokens, _ in every])


def check_recv(group: epic.torch.Group, names: Names) -> None:
    """Check that each expert has received its tokens."""
    spans = slabs(names["plan"].expert_rows.cumsum(0))
    for expert, (begin, end) in zip(experts_of(group), spans, strict=True):
        true = tokens_of(group, expert)
        assert int(names["plan"].expert_tokens[expert - experts_of(group)[0]]) == len(true)
        assert torch.equal(names["recv"][begin:end].sum(0), true.sum(0))


def run_steps(group: epic.torch.Group, members: Any, folder: Path) -> None:
    """Compare with plain loops over tokens and choices."""
    generator = torch.Generator().manual_seed(0)
    whole = {
        "w_gate_up": torch.randn(E, H, 2 * INNER, generator=generator) / 8,
        "w_down": torch.randn(E, INNER, H, generator=generator) / 4,
    }
    mine = slice(experts_of(group)[0], experts_of(group)[-1] + 1)
    x = torch.arange(3.0) + group.rank
    weights = epic.torch.ExpertWeights(*(w[mine] for w in whole.values()))
    names = names_of(group, mlp=OPTIONS.experts, expert_weights=weights, x=x)
    exec(find_block("torch", "plan = "), names)
    check_recv(group, names)
    ids, tokens, weights = draw(group.rank)
    wide = {name: w.double().numpy() for name, w in whole.items()}
    true = np.zeros((len(tokens), H))
    for t in range(len(tokens)):
        for k in range(K):
            row = tokens[t : t + 1].double().numpy()
            true[t] += float(weights[t, k]) * reference.mlp(row, wide, int(ids[t, k]))[0][0]
    assert names["out"].shape == true.shape
    assert not len(tokens) or reference.relative(names["out"].double().numpy(), true) < 1e-6
    every = range(group.num_ranks)
    assert names["total"].tolist() == [sum(i + rank for rank in every) for i in range(3)]


def run_product(group: epic.torch.Group, members: Any, folder: Path) -> None:
    """Check the rows of each expert, and the gradient of the tokens."""
    w = torch.randint(-2, 3, (E, H, 5), generator=torch.Generator().manual_seed(0)).float()
    names = names_of(group, w=w[experts_of(group)[0] :][: E // group.num_ranks])
    names["plan"] = epic.torch.plan(group, LAYER, names["topk_idx"])
    names["tokens"].requires_grad_()
    exec(find_block("torch", "class Product"), names)
    for expert, (begin, end) in zip(experts_of(group), slabs(names["rows"].ends), strict=True):
        true = tokens_of(group, expert).sum(0) @ w[expert]
        assert torch.equal(names["y"][begin:end].sum(0), true)
    (gradient,) = torch.autograd.grad(names["y"].sum(), names["tokens"])
    assert torch.equal(gradient, w.sum(2)[names["topk_idx"].long()].sum(1))


def run_permutation(group: epic.torch.Group, members: Any, folder: Path) -> None:
    """Check the order of the rows and the sums against loops over the choices of this rank."""
    names = names_of(group)
    ids, tokens, weights = draw(group.rank)
    exec(find_block("torch", "alone = "), names)
    order = [(e, t, k) for e in range(E) for t, k in (ids == e).nonzero().tolist()]
    assert names["plan"].expert_rows.tolist() == [int((ids == e).sum()) for e in range(E)]
    for slot, (_, t, k) in enumerate(order):
        assert torch.equal(names["permuted"][slot], tokens[t])
        assert names["slot_weights"][slot] == weights[t, k]
    assert torch.equal(names["restored"], tokens * weights.sum(1, keepdim=True))
    names["alone"].close()


def run_flat(group: epic.torch.Group, members: Any, folder: Path) -> None:
    """Let expert e multiply rows by e + 1, and check what comes back."""
    names = names_of(group)
    ids, tokens, weights = draw(group.rank)
    names["plan"] = epic.torch.plan(group, epic.torch.Layer(E, K, layout="flat"), ids)
    dispatch, combine = find_block("torch", "recv, weights, experts = ").splitlines()
    exec(dispatch, names)
    used = names["experts"] >= 0
    factors = torch.where(used, names["experts"] + 1 + experts_of(group)[0], 0)
    names["y"] = names["recv"] * (factors * torch.where(used, names["weights"], 0)).sum(1)[:, None]
    exec(combine, names)
    assert torch.equal(names["out"], tokens * ((ids + 1) * weights).sum(1)[:, None])


def run_overflow(group: epic.torch.Group, members: Any, folder: Path) -> None:
    """Check the factor with enough slots, and with too few."""
    names = names_of(group)
    drop = epic.torch.Layer(E, K, overflow="drop")
    for capacity, wanted in ((None, 1.0), (1, 0.0)):
        names["plan"] = epic.torch.plan(group, drop, names["topk_idx"], capacity=capacity)
        exec(find_block("torch", "any_overflow = "), names)
        assert names["scale"].tolist() == [wanted]


def run_windows(group: epic.torch.Group, members: Any, folder: Path) -> None:
    """Check that the rows are in the window."""
    names = names_of(group)
    exec(find_block("torch", "slots = "), names)
    assert names["recv"].data_ptr() == names["window"].data_ptr()
    assert names["slot_weights"].data_ptr() == names["window_of_weights"].data_ptr()
    check_recv(group, names)
    out = epic.torch.combine(names["plan"], names["recv"], names["slot_weights"])
    assert torch.equal(out, names["tokens"] * names["weights"].sum(1, keepdim=True))


def run_loss(group: epic.torch.Group, members: Any, folder: Path) -> None:
    """Check that the parts of all ranks add up to the mean of all tokens."""
    all_reduce = dist.all_reduce
    names = names_of(group, dist=SimpleNamespace(all_reduce=lambda t: all_reduce(t, group=members)))
    names |= {"x": names["tokens"], "losses": names["tokens"].sum(1)}
    exec(find_block("training", "total = "), names)
    dist.all_reduce(names["part"], group=members)
    every = torch.cat([draw(rank)[1] for rank in range(group.num_ranks)])
    assert int(names["total"]) == len(every)
    torch.testing.assert_close(names["part"], every.sum(1).mean())


def run_clipping(group: epic.torch.Group, members: Any, folder: Path) -> None:
    """Compare the norm with the gradients of all experts in float64, and check the step."""
    layer = epic.torch.MoE(group, OPTIONS)
    before = layer.w_gate.detach().clone()
    tokens = draw(group.rank)[1]
    every = [draw(rank)[1] for rank in range(group.num_ranks)]
    out, balance = layer(tokens)
    names = names_of(group, model=layer, optimizer=torch.optim.SGD(layer.parameters(), lr=1.0))
    names["loss"] = 100 * (out.square().sum() / (len(torch.cat(every)) * H) + balance)
    parts = {name: p.detach().double() for name, p in layer.named_parameters()}
    exec(find_block("training", "loss.backward()"), names)
    whole = {"w_gate": parts["w_gate"].numpy()}
    for name in ("w_gate_up", "w_down"):
        gathered = [torch.empty_like(parts[name]) for _ in every]
        dist.all_gather(gathered, parts[name], group=members)
        whole[name] = torch.cat(gathered).numpy()
    options = reference.Options(K, "softmax", False, 0.01, 0.0, False, 0)
    x = torch.cat(every).double().numpy()
    out = reference.moe(options, x, whole, np.zeros_like(x), 0.0)[0]
    true = reference.moe(options, x, whole, 200 * out / x.size, 100.0)[3]
    norm = float(np.sqrt(sum((d**2).sum() for d in true.values())))
    assert norm > 1.0  # so that the block clips
    assert abs(float(names["norm"]) - norm) < 1e-5 * norm
    step = (before - layer.w_gate.detach()).double().numpy()
    assert reference.relative(step, true["w_gate"] / norm) < 1e-5


def run_one_file(group: epic.torch.Group, members: Any, folder: Path) -> None:
    """Load the folders that the block makes from a checkpoint."""
    pytest.importorskip("safetensors")
    mesh = dist.device_mesh.DeviceMesh.from_group(members, "cpu", mesh_dim_names=("ep",))
    layer = epic.torch.MoE(group, OPTIONS)
    optimizer = torch.optim.AdamW(layer.parameters())
    out, balance = layer(draw(group.rank)[1])
    (out.sum() + balance).backward()
    optimizer.step()
    state = epic.torch.TrainingState(layer, mesh, optimizer)
    before = layer.w_down.detach().clone()
    dcp.save({"train": state}, checkpoint_id=folder / "step-100", process_group=members)
    if group.rank == 0:
        with contextlib.chdir(folder):
            exec(find_block("training", "from safetensors"), {"torch": torch, "dcp": dcp})
    dist.barrier(members)
    alone = epic.torch.TrainingState(layer, mesh)
    for name, into in (("copy-of-step-100", state), ("start", alone)):
        layer.reset_parameters(seed=9)
        dcp.load({"train": into}, checkpoint_id=folder / name, process_group=members)
        assert torch.equal(layer.w_down, before), name


def run_waits(group: epic.torch.Group, members: Any, folder: Path) -> None:
    """Let the last rank be late, and check that the other ranks print its number."""
    late = group.num_ranks - 1

    def run_steps(count: int) -> None:
        for step in range(count):
            time.sleep(0.01 if group.rank == late and step < 5 else 0)
            epic.torch.sum(group, torch.ones(1))

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(find_block("debugging", "before = "), names_of(group, run_steps=run_steps))
    if group.rank != late:
        assert said.getvalue().endswith(f" s only for rank {late}\n"), said.getvalue()


def run_check_finite(group: epic.torch.Group, members: Any, folder: Path) -> None:
    """Check that nothing is raised for finite rows, and that each rank names the same row."""
    block = find_block("debugging", "# find the first row that is not finite")
    names = names_of(group, model=torch.nn.ModuleDict({"moe": epic.torch.MoE(group, OPTIONS)}))
    names |= {"batch": names["tokens"], "loss_of": lambda model, x: sum(model["moe"](x)).sum()}
    exec(block, names)
    assert names["model"]["moe"].w_gate.grad is not None
    if group.rank == min(1, group.num_ranks - 1):
        names["batch"][2, 7] = torch.nan
    with pytest.raises(epic.torch.EpicNonFiniteError) as raised:
        exec(block, names)
    found = (raised.value.layer, raised.value.rank, raised.value.token)
    assert found == ("moe", min(1, group.num_ranks - 1), 2)


def run_traces(group: epic.torch.Group, members: Any, folder: Path) -> None:
    """Write the ids of two layers, read them, and use them in a layer of 64 experts."""
    written = find_block("traces", "writer = ").replace("/tmp/run", str(folder))
    ids, tokens, _ = draw(group.rank)
    names = names_of(group, graph=SimpleNamespace(replay=lambda: None))
    exec(written, names | {"ids_of_layers": [ids * 8, ids]})
    dist.barrier(members)
    many = epic.torch.Moe.of(num_experts=64, top_k=K, hidden=H, inner=INNER)
    names |= {"layer": epic.torch.MoE(group, many), "x": tokens}
    with epic.torch.record_routing(names["layer"]) as record:
        exec(find_block("traces", "step = ").replace("/tmp/run", str(folder)), names)
    (calls,) = record.values()
    assert torch.equal(names["ids"], ids * 8)
    assert torch.equal(calls[0].topk_idx, ids * 8)


Part = Callable[[epic.torch.Group, Any, Path], None]
PARTS: dict[str, Part] = {
    name.removeprefix("run_"): function
    for name, function in list(globals().items())
    if name.startswith("run_")
}


def run_part(rank: int, name: str, ranks: int, folder: str) -> None:
    """Run a part in the first ranks."""
    members = dist.new_group(list(range(ranks)))
    if rank < ranks:
        with epic.torch.Group(members, **SIZES) as group:
            PARTS[name](group, members, Path(folder))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", PARTS)
def test_part(world: Any, name: str, ranks: int, tmp_path: Path) -> None:
    """Run a block with names that the page describes, and check its results."""
    world.run(run_part, name, ranks, str(tmp_path))
