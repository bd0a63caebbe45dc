# SPDX-License-Identifier: Apache-2.0
"""An example of examples/jax on GPUs of threads, as emulated_worker.py: emulated_example.py OPTIONS

The example itself, of which each process has a GPU.  EPIC_TEST_EXAMPLE is its name,
EPIC_TEST_BACKEND its groups' backend, EPIC_TEST_HOSTS the number of hosts that they must be of: in
the environment, for the processes that it starts.  Those of train_text write what their weights
are at the end: a loss of float32 hides most bits."""

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
weights: list[Any] = []  # after the last step


def open_on_hosts(*arguments: Any) -> Any:
    """Open the context as on several hosts: a group on one host would have equal losses."""
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
