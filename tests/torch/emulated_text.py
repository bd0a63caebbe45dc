# SPDX-License-Identifier: Apache-2.0
"""examples/torch/train_text.py on GPUs of threads, as emulated.py: emulated_text.py BACKEND OPTIONS

The example itself, of which each process has a GPU; only its group is opened there.  At the end
each writes what its weights are: a loss of float32 hides most bits."""

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
    """The example's, whose weights' bits lie beside the losses."""

    def run(self) -> int:
        """All steps."""
        code = super().run()
        bits = hashlib.sha256()
        for weight in self.model.parameters():
            bits.update(weight.detach().numpy().tobytes())
        Path(f"{self.args.losses}.{self.args.process}").write_text(bits.hexdigest())
        return code


def main() -> int:
    """As the example, on that backend."""
    if backend := sys.argv.pop(1) if sys.argv[1] in ("hosts", "p2p") else "":
        os.environ["EPIC_TEST_BACKEND"] = backend  # for the processes that it starts
    torch.accelerator.is_available = lambda: False  # torch's own CUDA is not there
    groups.open_on = open_on
    groups.choose_backend = lambda device, requested: os.environ["EPIC_TEST_BACKEND"]
    setattr(train_text, "Trainer", Trainer)  # noqa: B010 - mypy has a type in its place
    return training.main(__file__, __doc__, train_text.run)


if __name__ == "__main__":
    sys.exit(main())
