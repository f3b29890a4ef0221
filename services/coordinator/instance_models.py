"""Step costs and memory of instances, as their records tell them: what planning and step bounds compute with."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from millrace.actor.errors import ConfigError
from millrace.contracts.kv import blocks_for
from millrace.contracts.status import InstanceRecord
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.registered import load_step_times, scheduler_parameters
from millrace.enginemodel.step_time_models import StepTimeModel
from millrace.policies.stages.instance import InstanceModel, linear_instance

#: Kinds of instances whose linear costs are kept; a fit takes 3 ms.
KINDS_MAX = 256


class InstanceModels:
    """Linear costs by kind of instance, fitted once each."""

    def __init__(self, step_times: Mapping[str, StepTimeModel]) -> None:
        """``step_times``: by the name in instance records."""
        self._step_times = step_times
        self._known: dict[tuple[str, int, int, int, int], InstanceModel | None] = {}

    def of(self, record: InstanceRecord) -> InstanceModel | None:
        """None where its step time is unknown, or no engine has such limits."""
        key = (record.step_time, record.blocks_total, record.block_size, record.max_sequences, record.token_budget)
        if key not in self._known and len(self._known) < KINDS_MAX:
            self._known[key] = _instance_model(record, self._step_times.get(record.step_time))
        return self._known.get(key)


def _instance_model(record: InstanceRecord, step_time: StepTimeModel | None) -> InstanceModel | None:
    if step_time is None:
        return None
    try:
        parameters = scheduler_parameters(record)
    except ValueError:
        return None  # no engine could run with what the record says
    made = linear_instance(
        step_time.cost(parameters),
        kv_tokens=_kv_tokens(parameters),
        max_sequences=record.max_sequences,
        token_budget=record.token_budget,
    )
    if record.kv is None:
        return made
    return msgspec.structs.replace(made, kv_bytes_per_token=record.kv.block_bytes / max(1, record.kv.block_tokens))


def _kv_tokens(parameters: EngineParameters) -> int:
    """Tokens of long sequences that its blocks hold."""
    longest = parameters.max_model_len
    return parameters.blocks_total * longest // blocks_for(longest, parameters.block_size, parameters.groups)


def read_step_times(files: Mapping[str, str]) -> dict[str, StepTimeModel]:
    """Sets that ship, and those of files, by the name that instances give in their records.

    Raises:
        ConfigError: a file cannot be read.
    """
    found, unreadable = load_step_times(files)
    if unreadable:
        raise ConfigError(f"stages.step_times: {next(iter(unreadable.values()))}")
    return {**found}
