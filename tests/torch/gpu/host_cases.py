# SPDX-License-Identifier: Apache-2.0
"""Cases of the CPU tests that also run on GPUs, and cases for models, e4m3 and a killed rank.

torch creates the tensors of the CPU tests on the GPU of the rank. The tests open their own groups
over torch.distributed.
"""

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import epic.torch
from epic.torch.module import EXPERT_WEIGHTS
from parts import EXPERTS, SIZES, UNEVEN, Data, check_round, numbers, through
from reference import relative

Group = epic.torch.Group


def by_itself(group: Group, function: Callable[..., None], *args: Any) -> None:
    """Call function(rank, *args) with the rank's GPU as the default device."""
    with torch.device(group.device):
        function(group.rank, *args)


def case_out(group: Group) -> None:
    """Check out= of every function: the given tensors get the same bits."""
    import test_out

    by_itself(group, test_out.every_function)


def case_opcheck(group: Group) -> None:
    """Run torch's own operator checks."""
    import test_autograd

    by_itself(group, test_autograd.opcheck)


def case_offload(group: Group) -> None:
    """Check activations that are copied away and back."""
    import test_autograd

    by_itself(group, test_autograd.offloaded)


def case_groups(group: Group) -> None:
    """Check groups over process groups, meshes and their dimensions, several at a time."""
    import test_groups

    by_itself(group, test_groups.ways)


def case_apart(group: Group) -> None:
    """Compile several functions with Inductor, with checkpoints around and inside."""
    import test_compiled

    with torch.device(group.device):
        test_compiled.check_apart(group, group.rank, "inductor")


def case_data_parallel(group: Group) -> None:
    """Check FSDP2 and DDP over the other axis of the mesh."""
    import test_moe

    by_itself(group, test_moe.data_parallel)


def case_saved(group: Group) -> None:
    """Check torch.distributed.checkpoint with another number of ranks."""
    import test_moe

    folder = [tempfile.mkdtemp() if group.rank == 0 else ""]
    dist.broadcast_object_list(folder)
    by_itself(group, test_moe.checkpoint_roundtrip, folder[0])


def case_pretrained(group: Group) -> None:
    """Compare small transformers models, spread over the ranks, with the logits and gradients of
    the model on one GPU."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import transformers  # noqa: F401
    except ImportError:
        print("    left out: transformers is not installed")
        return
    import test_pretrained as small

    for name in small.MODELS:
        if name == "Phimoe":  # SparseMixer runs only on CPUs
            continue
        if "4 experts" in name and group.num_ranks > 4:
            continue
        whole, mine = (small.model_of(name).to(group.device) for _ in range(2))
        ids = torch.randint(3, 64, (8, 7), generator=torch.Generator().manual_seed(4))
        part = slice(group.rank * 8 // group.num_ranks, (group.rank + 1) * 8 // group.num_ranks)
        wanted = small.gradients_of(whole, ids.to(group.device))
        epic.torch.replace_moe(mine, group)
        got = small.gradients_of(mine, ids[part].to(group.device))
        layer = small.last_block(mine).moe
        first = group.rank * layer.num_local_experts
        where = slice(first, first + layer.num_local_experts)
        embedded = [m.model.embed_tokens.weight.grad for m in (mine, whole)]
        pairs = {
            "logits": (got, wanted[part]),
            "embeddings": (epic.torch.sum(group, embedded[0].contiguous()), embedded[1]),
        }
        for key, value in small.gradients_as_epic_has_them(small.last_block(whole)).items():
            own, is_expert = getattr(layer, key).grad, key in EXPERT_WEIGHTS
            all_ = own if is_expert else epic.torch.sum(group, own.contiguous())
            pairs[key] = (all_, value[where] if is_expert else value)
        for what, (a, b) in pairs.items():
            error = relative(a.detach().cpu(), b.detach().cpu())
            assert error < 1e-4, f"{name}: {what}: {error}"


SCALED: dict[str, Any] = {
    "num_experts": 8, "top_k": 2, "hidden": 256, "inner": 128, "alignment": 32,
}  # fmt: skip


def case_e4m3(group: Group) -> None:
    """Check a layer with e4m3 experts, rounded in each call or once. Both have the same bits
    forward, and are close to the bfloat16 layer, forward and backward."""
    options = epic.torch.Moe.of(**SCALED, weight_type="e4m3")
    layer = epic.torch.MoE(group, options, dtype=torch.bfloat16, seed=0)
    plain = epic.torch.Moe.of(**SCALED)
    x = numbers(60 + group.rank, 40, 256).bfloat16().to(group.device)
    found = []
    once = epic.torch.scaled(layer.weights())
    for wish, weights in ((plain, layer.weights()), (options, layer.weights()), (options, once)):
        rows = x.clone().requires_grad_()
        out, _ = epic.torch.moe(group, wish, rows, weights)[:2]
        found.append([out.detach(), torch.autograd.grad(out.float().square().sum(), rows)[0]])
    assert torch.equal(found[1][0], found[2][0])
    for rounded in found[1:]:
        for a, b in zip(found[0], rounded, strict=True):
            error = relative(b.float().cpu(), a.float().cpu())
            assert 1e-4 < error < 0.15, error


CASES = {
    name.removeprefix("case_"): f for name, f in list(globals().items()) if name[:5] == "case_"
}
OF_FOUR = {"out", "opcheck", "offload", "groups"}  # processes
# these use collectives of DTensor, which crash with gloo on GPUs
BY_NCCL = {"data_parallel", "saved"}


# ------------------------------------------------------------------------------ a death ----


def killed(rank: int, size: int) -> tuple[float, str]:
    """Kill the last rank between forward and backward. Check that the other ranks continue without
    it. Return the seconds until the error, and the text of the error, which names the rank."""
    import signal
    import time

    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    with Group(**SIZES, device=device, can_shrink=True) as group:
        x, w, ids, ct = mine = Data(UNEVEN).mine(rank, str(device))
        out = through(group, True)(x, w, ids)
        torch.cuda.synchronize()
        dist.barrier()
        if rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        text = ""
        try:  # a rank that notices the death before its backward begins raises here
            out.backward(ct)
            torch.cuda.synchronize()
            group.check()
        except epic.torch.EpicError as error:
            text = str(error)
        seconds = time.monotonic() - begin
        ranks = group.shrink(patience_ms=20_000).ranks
        assert ranks == tuple(range(size - 1)), ranks
        table = torch.tensor([e % (size - 1) for e in range(EXPERTS)], dtype=torch.int32)
        placed = {"rank_of_expert": table.to(device), "num_local_experts": EXPERTS}
        check_round(through(group, True, **placed, capacity=99), mine, 1e-5)
        return seconds, text


def deaths(size: int) -> str:
    """Run the killed-rank case; return what failed."""
    from world import World

    with World(size, uses_cuda=True) as world:
        world.start(killed, size)
        answers = [world.answer(rank, 60) for rank in range(size)]
    for rank, (good, said) in enumerate(answers[:-1]):
        if not good or f"rank {size - 1}" not in said[1] or "EPIC_EPEER" not in said[1]:
            return f"rank {rank}: {said}"
        print(f"  rank {rank}: {said[0]:.2f} s after the death: {said[1][:150]}")
    return ""
