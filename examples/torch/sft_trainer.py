# SPDX-License-Identifier: Apache-2.0
"""The SFTTrainer of TRL trains a model whose experts are spread over ranks.

torchrun --nproc-per-node 4 examples/torch/sft_trainer.py MODEL --folder build/sft --steps 10
torchrun --nproc-per-node 2 examples/torch/sft_trainer.py MODEL --folder build/sft --steps 20

MODEL is a folder of transformers with a tokenizer.  The second command continues at step 10.
Without GPUs it runs on the CPU.
"""

import argparse
from typing import Any

import numpy as np
from datasets import Dataset
from hf_trainer import main, options_of
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer


def make_data() -> Dataset:
    """Return prompts and completions of different lengths.  Only the completions have labels."""
    random = np.random.default_rng(0)
    samples = []
    for _ in range(64):
        words = [chr(ord("a") + n) for n in random.integers(0, 26, size=random.integers(2, 6))]
        samples.append({"prompt": " ".join(words), "completion": " ".join(["", *words])})
    return Dataset.from_list(samples)


def make_trainer(args: argparse.Namespace, model: Any, ranks: int, *mixins: type) -> Any:
    """Return the trainer, a subclass of the mixins."""
    kind = type("Trained", (*mixins, SFTTrainer), {})
    options = SFTConfig(**options_of(args, ranks), bf16=False)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    return kind(model, options, train_dataset=make_data(), processing_class=tokenizer)


if __name__ == "__main__":
    main(make_trainer)
