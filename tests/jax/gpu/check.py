# SPDX-License-Identifier: Apache-2.0
"""epic.jax on GPUs, against float64 and against the bits that CPU devices give.

check.py NAMES               one process with all GPUs; NAMES: some of CASES, or none for all
check.py PROCESS PROCESSES PORT NAMES     one of several, each with a GPU of its own
"""

import os
import sys
import time
import traceback

from gpu_world import LeftOutError, say  # before JAX, which it tells the platforms

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
    """False: it failed, which has been said."""
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
    """All that is asked for; in several processes, to the first failure."""
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
            os._exit(1)  # the others would wait
    say("right" if good else "wrong")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
