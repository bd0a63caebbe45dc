# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism for vLLM on CPUs.

vLLM finds this package by its entry point in the group vllm.general_plugins, so no program imports
it. `--additional-config '{"epic": {}}'` switches it on. Then each rank of vLLM's expert-parallel
group holds its own experts, and EPIC moves the tokens to them and back.

No module of this package is imported before vLLM is.
"""
