# SPDX-License-Identifier: Apache-2.0
"""The options of the plugin, and what it refuses."""

from typing import Any, NamedTuple

from epic.errors import EpicArgumentError, EpicUnsupportedError

SWITCH = "additional_config['epic']"


class Options(NamedTuple):
    """Options of the plugin: the value of the key "epic" of additional_config.

    Attributes:
        timeout_ms: How long a rank waits for another one in an operation, in ms. It is the time
            until a stopped worker ends the server. A worker that has ended is noticed at once.
    """

    timeout_ms: int = 60_000


def read_options(additional_config: Any) -> Options | None:
    """Read the options from vLLM's additional_config.

    Args:
        additional_config: The value of `--additional-config`.

    Returns:
        The options; None if the key "epic" is absent, so that EPIC is off.

    Raises:
        EpicArgumentError: An option is unknown or has an invalid value.
    """
    if not isinstance(additional_config, dict) or "epic" not in additional_config:
        return None
    passed = additional_config["epic"]
    if not isinstance(passed, dict):
        raise EpicArgumentError(
            f"{SWITCH} is {passed!r}: must be a dict of options; pass {{}} for the defaults"
        )
    for name in passed:
        if name not in Options._fields:
            raise EpicArgumentError(
                f"{SWITCH} has the key {name!r}: must be one of {', '.join(Options._fields)}; "
                "remove the key"
            )
    options = Options(**passed)
    timeout = options.timeout_ms
    if not isinstance(timeout, int) or isinstance(timeout, bool) or timeout <= 0:
        raise EpicArgumentError(
            f"{SWITCH}['timeout_ms'] is {timeout!r}: must be a positive integer; "
            "pass a time in milliseconds"
        )
    return options


def check_supported(config: Any, moe: Any, experts: Any, is_known_platform: bool) -> None:
    """Refuse what the plugin does not do, before any weight is loaded.

    Args:
        config: The VllmConfig.
        moe: The FusedMoEConfig of a layer.
        experts: The ExpertMapManager of the layer.
        is_known_platform: Whether vLLM runs on CPUs or on NVIDIA's GPUs.

    Raises:
        EpicUnsupportedError: The first thing that is not supported, in one sentence.
    """
    parallel, ranks = config.parallel_config, moe.moe_parallel_config
    placement = getattr(parallel, "expert_placement_strategy", "linear")
    refused = (
        (not is_known_platform, "vLLM's platform is neither the CPU nor CUDA: must be one of "
            "them; remove 'epic' from additional_config"),
        (not parallel.enable_expert_parallel, "enable_expert_parallel is False: must be True; "
            "pass --enable-expert-parallel"),
        (parallel.use_ubatching, "enable_dbo or ubatch_size is set: a batch must not be split "
            "into micro-batches; remove these options"),
        (config.lora_config is not None, "enable_lora is True: must be False, because epic.vllm "
            "has no adapters of experts; merge the adapter into the weights"),
        (ranks.pcp_size > 1, f"prefill_context_parallel_size is {ranks.pcp_size}: must be 1; "
            "use data or tensor parallelism"),
        (parallel.pipeline_parallel_size > 1, "pipeline_parallel_size is "
            f"{parallel.pipeline_parallel_size}: must be 1; use data or tensor parallelism"),
        (placement != "linear", f"expert_placement_strategy is {placement!r}: must be 'linear'; "
            "remove the option"),
        (ranks.enable_eplb, "enable_eplb is True: must be False; remove the option"),
        (getattr(parallel, "enable_elastic_ep", False), "enable_elastic_ep is True: must be "
            "False; remove the option"),
        (experts.num_fused_shared_experts > 0, "the shared experts are fused with the routed "
            "ones: they must be a layer of their own; switch the fusion off"),
        (moe.num_experts % ranks.ep_size != 0, f"num_experts is {moe.num_experts}: must be a "
            f"multiple of the {ranks.ep_size} expert-parallel ranks; use another number of ranks"),
    )  # fmt: skip
    for is_refused, sentence in refused:
        if is_refused:
            raise EpicUnsupportedError(sentence)
