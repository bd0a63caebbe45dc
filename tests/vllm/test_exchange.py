# SPDX-License-Identifier: Apache-2.0
"""Compares the time of EPIC's exchange with the time of an exchange by all-gather."""

from vllm_exchange import main


def test_exchange() -> None:
    """Check the results of both, and that EPIC takes at most 0.6 of the time of the other."""
    main(["--ranks", "2", "--tokens", "16", "--rounds", "100", "--at-most", "0.6"])
