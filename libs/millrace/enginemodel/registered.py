"""Inputs of a registered instance's forecast: its scheduler's parameters and the step-time sets that are here."""

from __future__ import annotations

from collections.abc import Mapping

from millrace.contracts.scheduler import scheduler_fields
from millrace.contracts.status import InstanceRecord
from millrace.enginemodel.coefficients import coefficient_names, load_step_time
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_time_models import LinearStepTime

#: Bound of any limit that a record may tell, tokens or blocks; larger ones would not fit an engine's own integers.
LIMIT_MAX = 1 << 31


def scheduler_parameters(record: InstanceRecord, *, prefix_caching: bool = False) -> EngineParameters:
    """Return the parameters of the instance's scheduler.

    Args:
        prefix_caching: Whether its prefix cache counts, if it has one.

    Raises:
        ValueError: no engine could run with what the record says; the message names the field.
    """
    for field in ("max_model_len", "block_size", "blocks_total", "max_sequences", "token_budget"):
        if getattr(record, field) >= LIMIT_MAX:
            raise ValueError(f"{field} must be below {LIMIT_MAX}, is {getattr(record, field)}")
    room = record.blocks_total * record.block_size
    changes = {
        "max_model_len": min(record.max_model_len, room),  # vLLM counts its null block in when it checks this
        "prefix_caching": record.prefix_caching and prefix_caching,
        "groups": tuple(record.kv.groups) if record.kv is not None else (),
    }
    return EngineParameters(**scheduler_fields(record) | changes)


def load_step_times(files: Mapping[str, str]) -> tuple[dict[str, LinearStepTime], dict[str, str]]:
    """Step-time sets by name, and for those that cannot be read, why. Reads files.

    Args:
        files: Paths of sets besides those that ship, by the name that instances give in their record.
    """
    found: dict[str, LinearStepTime] = {}
    unreadable: dict[str, str] = {}
    for name, origin in [*((name, name) for name in coefficient_names()), *files.items()]:
        try:
            found[name] = load_step_time(origin)
        except ValueError as error:
            found.pop(name, None)  # where a file shall stand in for a set that ships, that one is not meant
            unreadable[name] = str(error)
    return found, unreadable
