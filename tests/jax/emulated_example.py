# SPDX-License-Identifier: Apache-2.0
"""Runs an example of examples/jax on emulated GPUs (see emulated_worker.py): emulated_example.py
OPTIONS.

It is the original example, and each of its processes has an emulated GPU. Three environment
variables configure the processes that it starts: EPIC_TEST_EXAMPLE is the name of the example,
EPIC_TEST_BACKEND the backend of its groups, and EPIC_TEST_HOSTS the number of hosts that they must
have. Processes of train_text write the bits of their weights at the end, because a float32 loss
does not show small differences.
"""

import argparse
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES / "jax"), str(EXAMPLES / "common")]

import ep_moe
import jax
import numpy as np
import train_text

import training
from emulated_worker import take_cpus_for_gpus
from epic import _native
from epic.jax import groups

opening: Any = groups
open_member = opening.open_member
training_text: Any = train_text
make_steps = training_text.make_steps
weights: list[Any] = []  # the weights after the last step


def open_on_hosts(*arguments: Any) -> Any:
    """Open the context, and check the number of hosts. On one host the losses would be equal,
    too."""
    context = open_member(*arguments)
    assert _native.core().epic_num_hosts(context) == int(os.environ["EPIC_TEST_HOSTS"])
    return context


def make_steps_that_keep(*arguments: Any) -> tuple[Any, Any]:
    """Return the example's functions; the step keeps its last weights."""
    step, entropy = make_steps(*arguments)

    def step_and_keep(*operands: Any) -> Any:
        found = step(*operands)
        weights[:] = jax.tree.leaves(found[0])
        return found

    return step_and_keep, entropy


def train(args: argparse.Namespace) -> int:
    """Train as one process; write a hash of its weights next to the file of losses."""
    code = train_text.run(args)
    bits = hashlib.sha256()
    for part in (np.asarray(w.addressable_shards[0].data) for w in weights):
        bits.update(part.tobytes())
    Path(f"{args.losses}.{args.process}").write_text(bits.hexdigest())
    return code


def main() -> int:
    """Run the example on that backend."""
    take_cpus_for_gpus(os.environ["EPIC_TEST_BACKEND"])
    opening.open_member = open_on_hosts
    training_text.make_steps = make_steps_that_keep
    if os.environ["EPIC_TEST_EXAMPLE"] == "ep_moe":
        return ep_moe.main()
    return training.main(__file__, __doc__, train)


if __name__ == "__main__":
    sys.exit(main())
