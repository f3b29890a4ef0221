"""Engine limits and step times of a group as planning and simulation need them."""

from __future__ import annotations

from pathlib import Path

from millrace.actor.errors import ConfigError
from millrace.cluster.model_folders import context_length
from millrace.cluster.spec import ClusterSpec, EngineName, GroupSpec, ModelSpec
from millrace.enginemodel.parameters import EngineParameters


def engine_parameters(spec: ClusterSpec, model: ModelSpec, group: GroupSpec) -> EngineParameters:
    """Scheduler limits of a group's instances. Limits that no settings name are those of the engine model; the memory
    of a real engine, where ``kv_blocks`` does not say it, is not known before it is started.

    Args:
        model: Its path is a folder.

    Raises:
        ConfigError: the settings name a value that no engine could run with.
    """
    wanted = {**spec.settings.worker, **group.settings}
    try:
        plain = EngineParameters()
        context = 0 if group.engine is EngineName.MODELLED else context_length(Path(model.path))
        length = int(wanted.get("max_model_len", 0)) or context or plain.max_model_len
        block_size = int(wanted.get("block_size", plain.block_size))
        return EngineParameters(
            max_model_len=length,
            block_size=block_size,
            blocks_total=int(wanted.get("kv_blocks", 0)) or max(plain.blocks_total, -(-length // block_size)),
            max_sequences=int(wanted.get("max_num_seqs", plain.max_sequences)),
            token_budget=int(wanted.get("max_num_batched_tokens", plain.token_budget)),
            prefix_caching=bool(wanted.get("enable_prefix_caching", True)),
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"group {group.name} of model {model.name}: {error}") from None


def step_time_of(spec: ClusterSpec, group: GroupSpec) -> str:
    """The step-time set or file that the cluster's file names for a group; empty where it names none."""
    wanted = {**spec.settings.worker, **group.settings}
    modelled = wanted.get("modelled", {}).get("coefficients", "") if group.engine is EngineName.MODELLED else ""
    return str(group.step_time or modelled or wanted.get("step_time", ""))
