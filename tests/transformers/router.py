#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the router with modules of the package transformers (5), forward and backward.

usage: router.py build/lib/libepic.so

Needs torch and transformers. If they are not installed it exits with 77; `make test` does not
install them.
"""

import ctypes
import sys
from ctypes import c_int64, c_uint32, c_void_p

try:
    import torch
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
    from transformers.models.gemma4 import modeling_gemma4 as gemma
    from transformers.models.mixtral import modeling_mixtral as mixtral
    from transformers.models.phimoe import modeling_phimoe as phimoe
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
    Router,
    at,
    fields,
    same,
    struct,
)

TOKENS = 500
Forward = struct(
    *CALL,
    *fields(c_void_p, "router logits"),
    ("num_tokens", c_int64),
    *fields(c_void_p, "bias scale_of_expert token_ids table"),
    ("table_rows", c_int64),
    ("workspace", c_void_p),
    ("workspace_bytes", c_int64),
    *fields(c_void_p, "topk_idx weights scores"),
    *fields(c_uint32, "type weights_type token_id_type flags"),
)
Backward = struct(
    *CALL,
    *fields(c_void_p, "router logits"),
    ("num_tokens", c_int64),
    *fields(c_void_p, "topk_idx scale_of_expert d_weights workspace"),
    ("workspace_bytes", c_int64),
    *fields(c_void_p, "d_logits d_scale_of_expert"),
    *fields(c_uint32, "type weights_type grad_type flags"),
)


class Epic:
    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.lib.epic_error.restype = ctypes.c_char_p

    def call(self, name, args):
        call = getattr(self.lib, name)
        if call(None, ctypes.byref(args), ctypes.c_size_t(ctypes.sizeof(args))):
            raise SystemExit(f"{name}: {self.lib.epic_error(None).decode()}")

    def run(self, router, logits, bias=None, scale=None, topk_idx=None, d_weights=None):
        """Return ids and weights. With d_weights also return the gradients of logits and scale.
        topk_idx replaces the choice for the gradients."""
        found = c_int64()
        if self.lib.epic_router_workspace_v1(
            ctypes.byref(router), ctypes.c_size_t(ctypes.sizeof(router)), ctypes.byref(found)
        ):
            raise SystemExit(f"epic_router_workspace: {self.lib.epic_error(None).decode()}")
        size = found.value
        work = torch.empty(size // 8 + 2, dtype=torch.float64)
        logits = logits.detach().contiguous()
        ids = torch.empty(len(logits), router.top_k, dtype=torch.int32)
        weights = torch.empty(len(logits), router.top_k)
        common = dict(
            router=ctypes.addressof(router),
            logits=at(logits),
            num_tokens=len(logits),
            scale_of_expert=at(scale),
            workspace=(at(work) + 15) // 16 * 16,
            workspace_bytes=size,
            type=F32,
        )
        args = Forward(bias=at(bias), topk_idx=at(ids), weights=at(weights), **common)
        self.call("epic_router_forward_v1", args)
        if d_weights is None:
            return ids.long(), weights
        d_logits = torch.empty_like(logits)
        d_scale = None if scale is None else torch.empty_like(scale)
        chosen = ids if topk_idx is None else topk_idx.int().contiguous()
        args = Backward(
            topk_idx=at(chosen),
            d_weights=at(d_weights),
            d_logits=at(d_logits),
            d_scale_of_expert=at(d_scale),
            **common,
        )
        self.call("epic_router_backward_v1", args)
        return ids.long(), weights, d_logits, d_scale


def compare(epic, name, router, logits, module, bias=None, scale=None):
    """Compare with module(), which takes logits with a gradient and returns weights and ids in any
    order."""
    weights, theirs = module()
    order = theirs.argsort(dim=-1)
    theirs, weights = theirs.gather(1, order), weights.gather(1, order)
    d_weights = torch.randn_like(weights)
    logits.retain_grad()
    (weights * d_weights).sum().backward()

    ids, _ = epic.run(router, logits, bias, scale)
    back = ids.argsort(dim=-1)
    same(f"{name}, experts", ids.gather(1, back), theirs, 0)
    # The gradient in EPIC's order of the choices, which is that of transformers where it matters.
    ours = torch.empty_like(d_weights).scatter_(1, back, d_weights)
    _, got, d_logits, d_scale = epic.run(router, logits, bias, scale, d_weights=ours)
    same(f"{name}, weights", got.gather(1, back), weights)
    same(f"{name}, gradient of the logits", d_logits, logits.grad)
    return d_scale


def check_mixtral(epic):
    config = mixtral.MixtralConfig(hidden_size=8, num_local_experts=8, num_experts_per_tok=2)
    module = mixtral.MixtralTopKRouter(config)
    module.weight.data = torch.eye(8)
    logits = torch.randn(TOKENS, 8, requires_grad=True)
    router = Router(num_experts=8, top_k=2, score=SOFTMAX, normalize=NORMALIZE_SUM)
    compare(epic, "Mixtral", router, logits, lambda: module(logits)[1:])


def check_deepseek(epic):
    """Check biases below -1: all selection values are negative, so a wrong 0 would be chosen."""
    config = deepseek.DeepseekV3Config(
        hidden_size=64, n_routed_experts=64, num_experts_per_tok=8, n_group=8, topk_group=4
    )
    module = deepseek.DeepseekV3TopkRouter(config)
    module.weight.data = torch.eye(64)
    bias = -1 - torch.rand(64)
    module.e_score_correction_bias.copy_(bias)
    logits = torch.randn(TOKENS, 64, requires_grad=True)
    router = Router(
        num_experts=64,
        top_k=8,
        score=SIGMOID,
        num_groups=8,
        topk_groups=4,
        group_score=GROUP_SUM,
        group_best=2,
        normalize=NORMALIZE_SUM,
        eps=1e-20,
        scale=config.routed_scaling_factor,
    )
    compare(epic, "DeepSeek-V3", router, logits, lambda: module(logits)[1:], bias)


def check_gemma(epic):
    config = gemma.Gemma4TextConfig(hidden_size=32, num_experts=16, top_k_experts=4)
    module = gemma.Gemma4TextRouter(config)
    module.per_expert_scale.data = torch.randn(16)
    seen = []
    module.proj.register_forward_hook(lambda _m, _in, out: seen.append(out))
    with torch.no_grad():
        module.proj.weight.normal_()
        module.scale.fill_(config.hidden_size**0.5)
    _, weights, ids = module(torch.randn(TOKENS, 32))
    router = Router(num_experts=16, top_k=4, score=SOFTMAX, normalize=NORMALIZE_SUM)
    scale = module.per_expert_scale.data.contiguous()
    d_scale = compare(epic, "Gemma 4", router, seen[0], lambda: (weights, ids), scale=scale)
    same("Gemma 4, gradient of per_expert_scale", d_scale, module.per_expert_scale.grad)


def phimoe_router(jitter):
    return Router(num_experts=16, top_k=2, score=LOGITS, weight_rule=SPARSEMIXER, jitter=jitter)


def check_phimoe(epic):
    for jitter in (0.01, 0.2):
        for shift in (0, -5):  # also with a largest logit below 0
            logits = (torch.randn(TOKENS, 16) + shift).requires_grad_()
            compare(
                epic,
                f"Phi-3.5-MoE, jitter {jitter}, around {shift}",
                phimoe_router(jitter),
                logits,
                lambda: phimoe.sparsemixer(logits, jitter, training=False),
            )


def check_phimoe_training(epic):
    """Check training, where Phimoe draws experts at random. For the drawn experts the gradient must
    be that of PhimoeMultiplier."""
    logits = torch.randn(TOKENS, 16, requires_grad=True)
    weights, ids = phimoe.sparsemixer(logits, 0.2, training=True)
    d_weights = torch.randn_like(weights)
    (weights * d_weights).sum().backward()
    router = phimoe_router(0.2)
    _, _, d_logits, _ = epic.run(router, logits, topk_idx=ids, d_weights=d_weights)
    same("Phi-3.5-MoE in training, gradient of the logits", d_logits, logits.grad)


def main():
    torch.manual_seed(1)
    epic = Epic(sys.argv[1] if len(sys.argv) > 1 else "build/lib/libepic.so")
    for check in (check_mixtral, check_deepseek, check_gemma, check_phimoe, check_phimoe_training):
        check(epic)
    print("passed")


main()
