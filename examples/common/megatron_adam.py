# SPDX-License-Identifier: Apache-2.0
"""Lets Megatron-Core 0.19.2 load checkpoints where Transformer Engine and Apex are not installed.

Megatron then uses torch's Adam, on CPUs and on GPUs.  But its distributed optimizer can only load a
checkpoint with the Adam of Transformer Engine, which has one step for all parameters.  torch's Adam
has a tensor with the step for each parameter.
"""

from typing import Any

from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE, DistributedOptimizer


def fix_optimizer() -> None:
    """Let the distributed optimizer load a checkpoint with torch's Adam."""
    if HAVE_APEX_OR_TE:
        return
    kind: Any = DistributedOptimizer
    sharded, load, write = (
        kind.sharded_state_dict,
        kind.load_state_dict,
        kind._set_main_param_and_optimizer_states,
    )

    def sharded_state_dict(self: Any, *args: Any, **more: Any) -> Any:
        if not self.optimizer.state:  # "assert len(steps) == 1"
            self._init_optimizer_states_with_dummy_values()
        return sharded(self, *args, **more)

    def load_state_dict(self: Any, state: Any) -> None:
        load(self, state)
        for each in self.optimizer.state.values():  # all have the same tensor, so each adds to it
            each["step"] = each["step"].clone()

    def set_states(self: Any, parameter: Any, tensors: Any) -> None:
        write(self, parameter, {"step": None, **tensors})  # "KeyError: 'step'"

    kind.sharded_state_dict, kind.load_state_dict = sharded_state_dict, load_state_dict
    kind._set_main_param_and_optimizer_states = set_states
