# SPDX-License-Identifier: Apache-2.0
"""Writes tiny models with random weights, from the configuration classes of transformers."""

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

WORDS = 256
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}

# The rotary embedding of DeepSeek-V2. With the type "default" vLLM 0.32.0 uses an operator for CPUs
# that rotates queries of shape [T, heads, 64] wrongly, also without EPIC.
ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}


def config_of(name: str) -> Any:
    """Return the configuration of the model "qwen3", "mixtral" or "deepseek"."""
    if name == "qwen3":
        sizes = SIZES | {"head_dim": 32}
        return transformers.Qwen3MoeConfig(
            **sizes, num_key_value_heads=2, intermediate_size=128, num_experts=8,
            num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True,
        )  # fmt: skip
    if name == "mixtral":
        return transformers.MixtralConfig(
            **SIZES, num_key_value_heads=2, intermediate_size=64, num_local_experts=8,
            num_experts_per_tok=2,
        )  # fmt: skip
    return transformers.DeepseekV2Config(
        **SIZES, num_key_value_heads=4, intermediate_size=128, moe_intermediate_size=64,
        n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=2, first_k_dense_replace=1,
        kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=32, qk_rope_head_dim=64,
        v_head_dim=32, n_group=1, topk_group=1, topk_method="greedy", norm_topk_prob=False,
        routed_scaling_factor=1.0, rope_parameters=ROPE,
    )  # fmt: skip


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose token number i is the word "w<i>"."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", eos_token="w1", pad_token="w2"
    )
    fast.save_pretrained(folder)


def write_model(name: str, folder: Path) -> None:
    """Write the model and its tokenizer."""
    transformers.utils.logging.disable_progress_bar()  # its thread would outlive a fork
    torch.manual_seed(3)
    config = config_of(name)
    config.eos_token_id = None
    config.bos_token_id = None
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    write_tokenizer(folder)


if __name__ == "__main__":
    write_model(sys.argv[1], Path(sys.argv[2]))
