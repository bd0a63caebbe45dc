# SPDX-License-Identifier: Apache-2.0
"""Starts epic-info, which prints the features of this build and machine, or the state of a group.

See `epic-info --help`, or `python -m epic.info --help`.
"""

import os
import sys

from epic import _native


def main() -> None:
    """Replace this process by epic-info, with the arguments of this process."""
    program = str(_native.find("epic-info", "bin"))
    os.execv(program, ["epic-info", *sys.argv[1:]])


if __name__ == "__main__":
    main()
