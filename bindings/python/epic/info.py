# SPDX-License-Identifier: Apache-2.0
"""The program epic-info of the wheel: what this build and machine can do, or what a group is doing.

See `epic-info --help`, or `python -m epic.info --help`.
"""

import os
import sys

from epic import _native


def main() -> None:
    """Replace this process by the program."""
    program = str(_native.find("epic-info", "bin"))
    os.execv(program, ["epic-info", *sys.argv[1:]])


if __name__ == "__main__":
    main()
