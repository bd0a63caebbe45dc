# SPDX-License-Identifier: Apache-2.0
"""Cases for the layers of Megatron-Core and torchtitan on GPUs, with EPIC's dispatcher.

They compare with loops over all experts in float64. If NCCL supports the ranks, they also compare
with the dispatchers of the frameworks. If a framework is not installed, its case is skipped with a
message.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import silu

import epic.torch
from parts import choices, numbers
from reference import relative

Group = epic.torch.Group
# weights of an expert: [2 * inner, hidden] (gate, then up), and [hidden, inner]
Expert = tuple[Tensor, Tensor]
HIDDEN, INNER, EXPERTS = 64, 96, 8
TOKENS = 2 * (24, 7, 40, 1)  # tokens of each of up to eight ranks


def installed(name: str) -> bool:
    """Return whether the package is installed."""
    try:
        if importlib.util.find_spec(name):
            return True
    except ImportError:
        pass
    print(f"    left out: {name} is not installed", flush=True)
    return False


def of_all(own: Any) -> list[Any]:
    """Collect a value of every rank; tensors are converted to float64 on the CPU."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def wide(values: list[Tensor]) -> list[Tensor]:
    """Return copies in float64 on the CPU."""
    return [value.detach().to("cpu", torch.float64) for value in values]


def near(got: list[Tensor], wanted: list[Tensor], most: float) -> None:
    """Check that each tensor is within a relative error, and that none is zero."""
    for number, (a, b) in enumerate(zip(wide(got), wanted, strict=True)):
        assert b.abs().max() > 0, f"number {number} is of zeros"
        error = relative(a, b.detach())
        assert error < most, f"number {number} of {len(got)}: {error}"


def mixed(x: Tensor, ids: Tensor, scores: Tensor, experts: list[Expert]) -> Tensor:
    """Return the sum over each token's choices, computed expert by expert."""
    out = torch.zeros_like(x)
    for number, (up, down) in enumerate(experts):
        gate, value = (x @ up.T).chunk(2, -1)
        weight = torch.where(ids == number, scores, 0).sum(-1, keepdim=True)
        out = out + weight * ((silu(gate) * value) @ down.T)
    return out


# ------------------------------------------------------------------------- Megatron-Core ----

CONFIG: dict[str, Any] = {
    "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 4, "num_moe_experts": EXPERTS,
    "moe_router_topk": 2, "moe_router_dtype": "fp32", "moe_router_load_balancing_type": "none",
    "moe_ffn_hidden_size": INNER, "gated_linear_unit": True, "activation_func": silu,
    "add_bias_linear": False, "bias_activation_fusion": False,
    "gradient_accumulation_fusion": False, "hidden_dropout": 0.0,
}  # fmt: skip
BF16 = {"bf16": True, "params_dtype": torch.bfloat16}


def megatron_layer(grouped: bool, dispatcher: str, **more: Any) -> Any:
    """Return a Megatron layer with SequentialMLP or grouped experts; values depend only on the
    seed."""
    specs = importlib.import_module("megatron.core.models.gpt.moe_module_specs")
    configs = importlib.import_module("megatron.core.transformer.transformer_config")
    config = configs.TransformerConfig(
        **CONFIG,
        moe_token_dispatcher_type=dispatcher,
        moe_grouped_gemm=grouped,
        expert_model_parallel_size=dist.get_world_size(),
        **more,
    )
    spec = specs.get_moe_module_spec(grouped, EXPERTS, grouped)
    layer = spec(config).to(torch.get_default_device())
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            shared = parameter is layer.router.weight
            seed = 50 + number + (0 if shared else 100 * dist.get_rank())
            parameter.copy_(numbers(seed, *parameter.shape) * HIDDEN**-0.5)
    return layer.train()


def experts_of(layer: Any) -> list[Tensor]:
    """Return the parameters of this rank's experts, two for each."""
    experts = layer.experts
    if hasattr(experts, "local_experts"):
        pairs = [(e.linear_fc1.weight, e.linear_fc2.weight) for e in experts.local_experts]
    else:
        names = [f"weight{i}" for i in range(experts.num_local_experts)]
        pairs = [(getattr(experts.linear_fc1, n), getattr(experts.linear_fc2, n)) for n in names]
    return [weight for pair in pairs for weight in pair]


def megatron_step(layer: Any, x: Tensor, ct: Tensor) -> list[Tensor]:
    """Return the output, and the gradients of tokens, router and experts."""
    fp8 = importlib.import_module("megatron.core.fp8_utils").get_fp8_context(layer.config)
    layer.zero_grad()
    rows = x.clone().requires_grad_()
    with fp8:
        out, _ = layer(rows)
    out.backward(ct)
    parts = [layer.router.weight, *experts_of(layer)]
    return [out.detach(), rows.grad, *(p.grad.clone() for p in parts)]


def megatron_loops(rank: int, layer: Any, x: Tensor, ct: Tensor) -> list[Tensor]:
    """Compute the same values in float64, from all tokens and experts."""
    gathered = of_all((wide([x, ct, layer.router.weight]), wide(experts_of(layer))))
    leaves = [weight.requires_grad_() for _, weights in gathered for weight in weights]
    experts = list(zip(leaves[::2], leaves[1::2], strict=True))
    ranks = [[leaf.requires_grad_(leaf is not its[1]) for leaf in its] for its, _ in gathered]
    outs = []
    for its_x, _, gate in ranks:
        best, ids = (its_x[:, 0] @ gate.T).topk(2)
        outs.append(mixed(its_x[:, 0], ids, best.softmax(-1), experts)[:, None])
    torch.autograd.backward(outs, [its_ct for _, its_ct, _ in ranks])
    here = len(leaves) // len(gathered)
    own = [ranks[rank][0], ranks[rank][2], *leaves[rank * here : (rank + 1) * here]]
    return [outs[rank], *(leaf.grad for leaf in own if leaf.grad is not None)]


MEGATRON: dict[str, tuple[bool, float, dict[str, Any]]] = {
    "sequential": (False, 1e-4, {}),
    "sequential, bf16": (False, 0.03, BF16),
    "grouped": (True, 0.03, BF16),
    "grouped, tensorwise fp8": (True, 0.2, {**BF16, "fp8": "hybrid", "fp8_recipe": "tensorwise"}),
    "grouped, blockwise fp8": (True, 0.2, {**BF16, "fp8": "e4m3", "fp8_recipe": "blockwise"}),
}


def case_megatron(group: Group) -> None:
    """Check each kind of experts against loops, against a second run bit by bit, and against
    Megatron's own dispatcher."""
    if not installed("megatron.core"):
        return
    state = importlib.import_module("megatron.core.parallel_state")
    use_epic = importlib.import_module("epic.torch.megatron").use_epic
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    state.destroy_model_parallel()
    state.initialize_model_parallel(expert_model_parallel_size=group.num_ranks)
    random.model_parallel_cuda_manual_seed(1)
    by_nccl = dist.get_backend() == "nccl"
    with torch.device(group.device):
        for name, (grouped, most, more) in MEGATRON.items():
            if grouped and not installed("transformer_engine"):
                return
            layer = megatron_layer(grouped, "alltoall", **more)
            x, ct = (numbers(s + group.rank, TOKENS[group.rank], 1, HIDDEN) for s in (1, 11))
            x, ct = x.to(layer.config.params_dtype), ct.to(layer.config.params_dtype)
            theirs = megatron_step(layer, x, ct) if by_nccl else None
            with use_epic(layer, max_tokens=max(TOKENS), device=group.device) as opened:
                assert opened.num_ranks == group.num_ranks and opened.backend == group.backend
                got, again = (megatron_step(layer, x, ct) for _ in range(2))
            near(got, megatron_loops(group.rank, layer, x, ct), most)
            assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True)), name
            if theirs:
                near(got, wide(theirs), most)
            print(f"    {name}{': as alltoall, too' if theirs else ''}", flush=True)


# ---------------------------------------------------------------------------- torchtitan ----

LENGTH, TOP_K = 10, 3
WISHES: dict[str, dict[str, Any]] = {
    "exact": {},
    "bound": {"capacity": None},
    "padded": {"pad_multiple": 16},
    "fp8": {"quantize": "1x32"},
}


def titan_layer(config: Any, mesh: Any) -> Any:
    """Return routed experts with the parameters of this rank's experts."""
    moe = importlib.import_module("torchtitan.models.common.moe")
    local = EXPERTS // mesh.size()
    inner = moe.GroupedExperts.Config(dim=HIDDEN, hidden_dim=INNER, num_experts=local)
    layer = moe.RoutedExperts.Config(inner_experts=inner, token_dispatcher=config).build()
    layer = layer.to(torch.get_default_device())
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            drawn = numbers(10 * number + dist.get_rank(), *parameter.shape)
            parameter.copy_(drawn * parameter.shape[2] ** -0.5)
    layer.token_dispatcher.wire_meshes(ep_mesh=mesh)
    return layer


def titan_inputs(rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, scores, ids and output gradient; ranks have different numbers of tokens."""
    shape = (TOKENS[rank], LENGTH)
    x, ct = (numbers(seed + rank, *shape, HIDDEN) for seed in (100, 200))
    ids = choices(400 + rank, TOKENS[rank] * LENGTH, 0.0, EXPERTS).reshape(*shape, TOP_K).long()
    return x, numbers(300 + rank, *shape, TOP_K), ids, ct


def titan_step(layer: Any, rank: int, call: Callable[..., Tensor]) -> list[Tensor]:
    """Return the output, and the gradients of tokens, scores and experts."""
    x, scores, ids, ct = titan_inputs(rank)
    layer.zero_grad()
    leaves = [x.requires_grad_(), scores.requires_grad_()]
    out = call(x, scores, ids, torch.bincount(ids.flatten(), minlength=EXPERTS))
    out.backward(ct)
    return [out.detach(), *(leaf.grad.clone() for leaf in (*leaves, *layer.parameters()))]


def titan_loops(rank: int, layer: Any) -> list[Tensor]:
    """Compute the same values in float64, from all tokens and experts."""
    x, scores, ids, ct = titan_inputs(rank)
    names = [name for name, _ in layer.named_parameters()]
    gathered = of_all((wide([x, scores, ct]), ids.cpu(), wide(list(layer.parameters()))))
    experts, outs = [], []
    for _, _, weights in gathered:
        w = dict(zip((n.split(".")[-1].split("_")[0] for n in names), weights, strict=True))
        for weight in weights:
            weight.requires_grad_()
        ups = torch.cat([w["w1"], w["w3"]], 1)
        experts += list(zip(ups, w["w2"], strict=True))
    for (its_x, its_scores, _), its_ids, _ in gathered:
        rows = its_x.requires_grad_().flatten(0, 1)
        weights = its_scores.requires_grad_().flatten(0, 1)
        outs.append(mixed(rows, its_ids.flatten(0, 1), weights, experts).reshape(its_x.shape))
    torch.autograd.backward(outs, [its[2] for its, _, _ in gathered])
    (its_x, its_scores, _), _, weights = gathered[rank]
    grads = [leaf.grad for leaf in (its_x, its_scores, *weights) if leaf.grad is not None]
    return [outs[rank], *grads]


def case_titan(group: Group) -> None:
    """Check each way to size the buffer, eager and compiled, against loops, against a second run
    bit by bit, and against torchtitan's all-to-all."""
    if not installed("torchtitan"):
        return
    importlib.import_module("torchtitan.distributed.utils").set_spmd_backend("default")
    own = importlib.import_module("torchtitan.models.common.token_dispatcher")
    epic_titan = importlib.import_module("epic.torch.titan")
    mesh = init_device_mesh("cuda", (group.num_ranks,), mesh_dim_names=("ep",))
    standard = own.AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K)
    sizes = {"hidden_dim": HIDDEN, "num_max_tokens_per_rank": max(TOKENS) * LENGTH}
    with torch.device(group.device):
        theirs = None
        # torchtitan 0.3.0 needs a torch newer than 2.11 for its own dispatcher.
        if dist.get_backend() == "nccl" and hasattr(torch.compiler, "_is_non_strict_tracing"):
            layer = titan_layer(standard, mesh)
            theirs = titan_step(layer, group.rank, layer)
        for name, wishes in WISHES.items():
            layer = titan_layer(epic_titan.epic(standard, **sizes, **wishes), mesh)
            most = 0.1 if name == "fp8" else 0.02  # because products are bfloat16
            got, again = (titan_step(layer, group.rank, layer) for _ in range(2))
            near(got, titan_loops(group.rank, layer), most)
            assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True)), name
            if theirs:
                near(got, wide(theirs), most)
            print(f"    {name}{': as its all-to-all, too' if theirs else ''}", flush=True)
        compiled = torch.compile(layer.__class__.__call__, dynamic=False)
        near(titan_step(layer, group.rank, lambda *a: compiled(layer, *a)), wide(got), 0.02)
        layer.token_dispatcher.group.close()


CASES = {
    name.removeprefix("case_"): f for name, f in list(globals().items()) if name[:5] == "case_"
}
