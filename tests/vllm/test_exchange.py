# SPDX-License-Identifier: Apache-2.0
"""Compares the time of the exchange with that of an all-gather exchange."""

from vllm_exchange import main


def test_exchange() -> None:
    """Check the results of both, and that EPIC takes at most 0.6 of the time, by turns."""
    main(["--ranks", "2", "--tokens", "16", "--rounds", "100", "--at-most", "0.6"])
