# SPDX-License-Identifier: Apache-2.0
"""Checks epic.jax on GPUs, against float64 and against the bits of CPU devices.

check.py NAMES runs one process with all GPUs. NAMES are some of CASES; without names it runs all.

check.py PROCESS PROCESSES PORT NAMES runs one of several processes, each with a GPU of its own.
"""

import os
import sys
import time
import traceback

from gpu_world import LeftOutError, say  # before JAX, because it selects JAX's platforms

# isort: split
import gpu_errors
import gpu_forms
import gpu_steps
import jax

CASES = {
    name.removeprefix("case_"): value
    for name, value in {**vars(gpu_steps), **vars(gpu_forms), **vars(gpu_errors)}.items()
    if name.startswith("case_")
}


def run_case(name: str) -> bool:
    """Run a case; after a failure print it and return False."""
    begin = time.monotonic()
    try:
        CASES[name]()
    except LeftOutError as reason:
        say("left out:", name, "-", reason)
    except Exception:
        traceback.print_exc()
        say("FAILED:", name)
        return False
    else:
        say(f"ok {name} ({time.monotonic() - begin:.1f} s)")
    return True


def main(words: list[str]) -> int:
    """Run the named cases. Several processes stop at the first failure."""
    several = bool(words) and words[0].isdigit()
    if several:
        process, processes, port = map(int, words[:3])
        words = words[3:]
        device = process % max(1, int(os.environ.get("EPIC_GPUS", processes)))
        jax.distributed.initialize(
            f"127.0.0.1:{port}", processes, process, local_device_ids=[device]
        )
    good = True
    for name in words or CASES:
        good = run_case(name) and good
        if several and not good:
            sys.stdout.flush()
            os._exit(1)  # otherwise the other processes would wait
    say("right" if good else "wrong")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
