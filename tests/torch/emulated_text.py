# SPDX-License-Identifier: Apache-2.0
"""Runs examples/torch/train_text.py on emulated GPUs: emulated_text.py BACKEND OPTIONS.

Each process of the example has an emulated GPU (see emulated.py). The program replaces only the
opening of the group. At the end each process writes the bits of its weights, because small
differences of weights may not change a float32 loss.
"""

import hashlib
import os
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path[:0] = [str(Path(__file__).parent), str(EXAMPLES / "torch"), str(EXAMPLES / "common")]

import torch
import train_text

import training
from emulated import open_on
from epic.torch import groups


class Trainer(train_text.Trainer):
    """The trainer of the example, which also records the bits of its weights."""

    def run(self) -> int:
        """Run all steps."""
        code = super().run()
        bits = hashlib.sha256()
        for weight in self.model.parameters():
            bits.update(weight.detach().numpy().tobytes())
        Path(f"{self.args.losses}.{self.args.process}").write_text(bits.hexdigest())
        return code


def main() -> int:
    """Run the example on the given backend."""
    if backend := sys.argv.pop(1) if sys.argv[1] in ("hosts", "p2p") else "":
        os.environ["EPIC_TEST_BACKEND"] = backend  # for the processes that this one starts
    torch.accelerator.is_available = lambda: False  # torch itself must not use CUDA
    groups.open_on = open_on
    groups.choose_backend = lambda device, requested: os.environ["EPIC_TEST_BACKEND"]
    setattr(train_text, "Trainer", Trainer)  # noqa: B010 - mypy has a type in its place
    return training.main(__file__, __doc__, train_text.run)


if __name__ == "__main__":
    sys.exit(main())
