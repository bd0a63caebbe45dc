# SPDX-License-Identifier: Apache-2.0
"""The fixtures of all tests."""

import pytest

from runs import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return the runs of all tests."""
    return Runs(tmp_path_factory.mktemp("vllm"))
