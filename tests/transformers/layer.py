#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the whole layer with MoE blocks of the package transformers (5), forward and backward.

usage: layer.py build/lib/libepic.so

Needs torch and transformers. If they are not installed it exits with 77; `make test` does not
install them.
"""

import ctypes
import sys
from ctypes import c_double, c_float, c_int64, c_uint32, c_void_p

try:
    import torch
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek_v4
    from transformers.models.gemma4 import modeling_gemma4 as gemma
    from transformers.models.mixtral import modeling_mixtral as mixtral
    from transformers.models.phimoe import modeling_phimoe as phimoe
    from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen2
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
except ImportError as missing:
    print(f"skipped: {missing}; pip install torch transformers")
    sys.exit(77)

from mirror import (
    CALL,
    F32,
    GROUP_SUM,
    LOGITS,
    NORMALIZE_SUM,
    SIGMOID,
    SOFTMAX,
    SPARSEMIXER,
    SQRTSOFTPLUS,
    Router,
    at,
    fields,
    same,
    struct,
)

TOKENS, HIDDEN, INNER, EXPERTS = 200, 24, 20, 16
SILU, GELU_TANH, CLAMPED_SILU = 0, 2, 5


WEIGHTS = (
    "w_gate b_gate bias scale_of_expert w_gate_up w_down b_gate_up b_down shared_gate_up "
    "shared_down shared_b_gate_up shared_b_down w_shared_gate"
)
Rows = struct(("data", c_void_p), *fields(c_int64, "num_rows row_bytes"))
Bootstrap = struct(
    *fields(ctypes.c_int32, "rank num_ranks"), *fields(c_void_p, "gather close self")
)
Config = struct(
    *fields(c_int64, "max_tokens max_row_bytes staging_bytes"),
    *fields(c_uint32, "num_ranks timeout_ms max_in_flight max_sms"),
    *fields(c_void_p, "backend name native"),
    *fields(c_uint32, "max_top_k pad"),
)
Layer = struct(
    *fields(c_uint32, "num_experts num_logical top_k alignment layout overflow expert_capacity"),
    *fields(c_uint32, "priority sum_order leaves partial_type flags"),
)
Experts = struct(
    *fields(c_uint32, "num_local_experts hidden inner activation ungated interleaved weighting"),
    *fields(c_uint32, "row_type weight_type flags"),
    *fields(c_float, "limit alpha"),
)
Moe = struct(
    *fields(c_void_p, "layer router experts shared"),
    *fields(c_double, "balance_coeff z_coeff"),
    *fields(c_int64, "sequence_tokens capacity"),
    *fields(c_uint32, "flags pad"),
)
Sizes = struct(*fields(c_int64, "saved_bytes forward_bytes backward_bytes"))
Weights = struct(*fields(c_void_p, WEIGHTS))
Gradients = struct(*fields(c_void_p, WEIGHTS.replace("bias ", "", 1)))
MEMORY = [
    ("saved", c_void_p),
    ("saved_bytes", c_int64),
    ("workspace", c_void_p),
    ("workspace_bytes", c_int64),
]
Forward = struct(
    *CALL,
    *fields(c_void_p, "moe weights"),
    *fields(Rows, "x out"),
    *fields(c_void_p, "token_ids table"),
    ("table_rows", c_int64),
    *fields(c_void_p, "rank_of_expert logical_of_expert"),
    *MEMORY,
    *fields(c_void_p, "loss balance_loss z_loss load logical_load demand"),
    *fields(c_uint32, "token_id_type loss_type flags pad"),
)
Backward = struct(
    *CALL,
    *fields(c_void_p, "moe weights"),
    *fields(Rows, "x d_out d_x"),
    ("gradients", c_void_p),
    *MEMORY,
    *fields(c_void_p, "d_loss d_balance_loss d_z_loss"),
    *fields(c_uint32, "flags loss_type"),
)


def rows(x):
    return Rows(x.data_ptr(), x.shape[0], x.shape[1] * 4)


def lines(size):
    """Return memory at a multiple of 64."""
    memory = torch.zeros(size + 64, dtype=torch.uint8)
    return memory, (memory.data_ptr() + 63) // 64 * 64


class Epic:
    """A group of one rank."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.lib.epic_error.restype = ctypes.c_char_p
        self.config = Config(max_tokens=TOKENS, max_row_bytes=4 * HIDDEN, num_ranks=1)
        self.context = c_void_p()
        bootstrap = Bootstrap(num_ranks=1)
        self.call("epic_open_v1", ctypes.byref(self.context), ctypes.byref(bootstrap), self.config)

    def call(self, name, *args):
        """Call a function with structs and their sizes."""
        given = []
        for arg in args:
            if isinstance(arg, ctypes.Structure):
                given += [ctypes.byref(arg), ctypes.c_size_t(ctypes.sizeof(arg))]
            else:
                given.append(arg)
        if getattr(self.lib, name)(*given):
            raise SystemExit(f"{name}: {self.lib.epic_error(None).decode()}")

    def run(self, router, experts, shared, given, x, d_out, **more):
        """Return out, d_x and the gradients of the given weights, by name."""
        layer = Layer(num_experts=router.num_experts, top_k=router.top_k)
        moe = Moe(
            layer=ctypes.addressof(layer),
            router=ctypes.addressof(router),
            experts=ctypes.addressof(experts),
            shared=ctypes.addressof(shared) if shared else None,
            capacity=TOKENS * router.top_k,
        )
        sizes = Sizes()
        self.call("epic_moe_memory_v1", self.context, None, 0, moe, sizes)
        kept, saved = lines(sizes.saved_bytes)
        held, work = lines(max(sizes.forward_bytes, sizes.backward_bytes))
        weights = Weights(**{name: at(value) for name, value in given.items()})
        found = {n: torch.empty_like(v) for n, v in given.items() if n != "bias"}
        gradients = Gradients(**{name: at(value) for name, value in found.items()})
        out, d_x = torch.empty_like(x), torch.empty_like(x)
        common = dict(
            moe=ctypes.addressof(moe),
            weights=ctypes.addressof(weights),
            x=rows(x),
            saved=saved,
            saved_bytes=sizes.saved_bytes,
            workspace=work,
            workspace_bytes=held.numel() - 64,
        )
        forward = Forward(out=rows(out), **common, **more)
        self.call("epic_moe_forward_v1", self.context, forward)
        back = Backward(
            d_out=rows(d_out), d_x=rows(d_x), gradients=ctypes.addressof(gradients), **common
        )
        self.call("epic_moe_backward_v1", self.context, back)
        del kept
        return out, d_x, found


def turned(x):
    """Transpose weights from torch's [..., out, in] to EPIC's [..., in, out]."""
    return x.detach().transpose(-1, -2).contiguous()


class Block:
    """A block of transformers: converts its weights for EPIC, and EPIC's gradients back."""

    def __init__(self, name, gate, experts, shared=None, shared_gate=None):
        self.name = name
        self.pairs = {  # EPIC's names, each with the parameters of transformers that are joined
            "w_gate": [gate],
            "w_gate_up": [experts.gate_up_proj],
            "w_down": [experts.down_proj],
        }
        if shared is not None:
            both = [shared.gate_proj.weight, shared.up_proj.weight]
            self.pairs |= {"shared_gate_up": both, "shared_down": [shared.down_proj.weight]}
        if shared_gate is not None:
            self.pairs["w_shared_gate"] = [shared_gate.weight]

    def given(self):
        return {
            name: torch.cat([turned(p) for p in parts], -1).contiguous()
            for name, parts in self.pairs.items()
        }

    def compare(self, epic, theirs, router, activation, x, limit=0, shared=0, d_x=True, **more):
        """Compare both layers. theirs(x) returns out. `more`: weights that are not matrices, and
        arguments of forward."""
        experts = Experts(
            num_local_experts=router.num_experts,
            hidden=HIDDEN,
            inner=INNER,
            activation=activation,
            row_type=F32,
            limit=limit,
        )
        wide = Experts(
            num_local_experts=1,
            hidden=HIDDEN,
            inner=shared,
            activation=activation,
            row_type=F32,
            limit=limit,
        )
        x.requires_grad_()
        out = theirs(x)
        d_out = torch.randn_like(out)
        (out * d_out).sum().backward()
        vectors = {n: more.pop(n) for n in ("bias", "scale_of_expert") if n in more}
        given = self.given() | {n: v.detach() for n, v in vectors.items()}
        ours = epic.run(router, experts, wide if shared else None, given, x.detach(), d_out, **more)
        same(f"{self.name}, out", ours[0], out)
        if d_x:
            same(f"{self.name}, gradient of x", ours[1], x.grad)
        for name, parts in self.pairs.items():
            whole = torch.cat([turned(p.grad) for p in parts], -1)
            same(f"{self.name}, gradient of {name}", ours[2][name], whole)
        for name in ours[2].keys() - self.pairs.keys():
            same(f"{self.name}, gradient of {name}", ours[2][name], vectors[name].grad)


def filled(module, size=0.5):
    """Fill the module with random parameters, because blocks leave some of them uninitialized."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=size)
    return module.eval()


def tokens():
    return torch.randn(TOKENS, HIDDEN)


def flat(module, *more):
    """Return the module as a function of [tokens, hidden], because blocks expect a batch of
    sequences."""
    return lambda x: module(x[None], *more)[0]


def check_mixtral(epic):
    config = mixtral.MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=8, num_experts_per_tok=2
    )
    module = filled(mixtral.MixtralSparseMoeBlock(config))
    router = Router(num_experts=8, top_k=2, score=SOFTMAX, normalize=NORMALIZE_SUM)
    block = Block("Mixtral", module.gate.weight, module.experts)
    block.compare(epic, flat(module), router, SILU, tokens())


def check_qwen(epic):
    """Check a shared expert whose output is multiplied by the sigmoid of a gate."""
    kinds = (
        ("Qwen2-MoE", qwen2.Qwen2MoeConfig, qwen2.Qwen2MoeSparseMoeBlock, False),
        ("Qwen3-Next", qwen3_next.Qwen3NextConfig, qwen3_next.Qwen3NextSparseMoeBlock, True),
    )
    for name, describe, make, normalized in kinds:
        config = describe(
            hidden_size=HIDDEN,
            moe_intermediate_size=INNER,
            shared_expert_intermediate_size=28,
            num_experts=EXPERTS,
            num_experts_per_tok=4,
            norm_topk_prob=normalized,
        )
        module = filled(make(config))
        router = Router(num_experts=EXPERTS, top_k=4, score=SOFTMAX)
        router.normalize = NORMALIZE_SUM if normalized else 0
        block = Block(
            name,
            module.gate.weight,
            module.experts,
            module.shared_expert,
            module.shared_expert_gate,
        )
        block.compare(epic, flat(module), router, SILU, tokens(), shared=28)


def check_deepseek_v3(epic):
    """Check biases below -1: all selection values are negative, so a wrong 0 would be chosen."""
    config = deepseek_v3.DeepseekV3Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
    )
    module = filled(deepseek_v3.DeepseekV3MoE(config))
    bias = -1 - torch.rand(EXPERTS)
    module.gate.e_score_correction_bias.copy_(bias)
    router = Router(
        num_experts=EXPERTS,
        top_k=4,
        score=SIGMOID,
        num_groups=4,
        topk_groups=2,
        group_score=GROUP_SUM,
        group_best=2,
        normalize=NORMALIZE_SUM,
        eps=1e-20,
        scale=config.routed_scaling_factor,
    )
    block = Block("DeepSeek-V3", module.gate.weight, module.experts, module.shared_experts)
    block.compare(epic, flat(module), router, SILU, tokens(), shared=2 * INNER, bias=bias)


def check_deepseek_v4(epic):
    """Check the clamped SiLU, with a limit that many numbers reach, also in the shared expert. The
    choice comes from the router, and from a table of token ids."""
    for kind in ("moe", "hash_moe"):
        config = deepseek_v4.DeepseekV4Config(
            hidden_size=HIDDEN,
            moe_intermediate_size=INNER,
            n_routed_experts=EXPERTS,
            num_experts_per_tok=3,
            num_hidden_layers=1,
            mlp_layer_types=[kind],
            vocab_size=50,
            swiglu_limit=1.5,
            layer_types=["heavily_compressed_attention"],
        )
        module = filled(deepseek_v4.DeepseekV4SparseMoeBlock(config, 0))
        router = Router(
            num_experts=EXPERTS,
            top_k=3,
            score=SQRTSOFTPLUS,
            normalize=NORMALIZE_SUM,
            eps=1e-20,
            scale=config.routed_scaling_factor,
        )
        more, theirs = {}, flat(module)
        if kind == "hash_moe":
            table = torch.stack([torch.randperm(EXPERTS)[:3] for _ in range(50)])
            module.gate.tid2eid.copy_(table)
            ids, narrow = torch.randint(50, (TOKENS,)).int(), table.int().contiguous()
            more = dict(token_ids=at(ids), table=at(narrow), table_rows=50)
            theirs = flat(module, ids[None])
        else:
            more["bias"] = torch.randn(EXPERTS) / 4
            module.gate.e_score_correction_bias.copy_(more["bias"])
        block = Block(
            f"DeepSeek-V4, {kind}", module.gate.weight, module.experts, module.shared_experts
        )
        block.compare(epic, theirs, router, CLAMPED_SILU, tokens(), limit=1.5, shared=INNER, **more)


def check_gemma(epic):
    """Check the scale of each expert.

    The norm of Gemma's router is not a part of EPIC's layer. So the rows are already normalized,
    and the norm changes nothing. The gradient of x is not compared, because it would go through the
    norm.
    """
    config = gemma.Gemma4TextConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, top_k_experts=4
    )
    choose = filled(gemma.Gemma4TextRouter(config))
    experts = filled(gemma.Gemma4TextExperts(config))
    with torch.no_grad():
        choose.scale.fill_(HIDDEN**0.5)
    x = tokens()
    x = x / x.pow(2).mean(-1, keepdim=True).sqrt()
    router = Router(num_experts=EXPERTS, top_k=4, score=SOFTMAX, normalize=NORMALIZE_SUM)

    def theirs(x):
        _, weights, ids = choose(x)
        return experts(x, ids, weights)

    block = Block("Gemma 4", choose.proj.weight, experts)
    scale = choose.per_expert_scale
    block.compare(epic, theirs, router, GELU_TANH, x, d_x=False, scale_of_expert=scale)


def check_phimoe(epic):
    config = phimoe.PhimoeConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        router_jitter_noise=0.1,
    )
    module = filled(phimoe.PhimoeSparseMoeBlock(config))
    router = Router(num_experts=EXPERTS, top_k=2, score=LOGITS, weight_rule=SPARSEMIXER, jitter=0.1)
    block = Block("Phi-3.5-MoE", module.router.weight, module.experts)
    block.compare(epic, flat(module), router, SILU, tokens())


def main():
    torch.manual_seed(1)
    epic = Epic(sys.argv[1] if len(sys.argv) > 1 else "build/lib/libepic.so")
    checks = (
        check_mixtral,
        check_qwen,
        check_deepseek_v3,
        check_deepseek_v4,
        check_gemma,
        check_phimoe,
    )
    for check in checks:
        check(epic)
    print("passed")


main()
