"""Identity of a worker, and what it registers of itself."""

from __future__ import annotations

import msgspec
from millrace.contracts.scheduler import scheduler_fields
from millrace.contracts.status import BatchComposition, EngineDescription, EngineSnapshot, InstanceRecord


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a worker.

    Attributes:
        incarnation: Start time of the process, unix ns.
        shape: Device kind and tensor parallel size; empty where unknown.
    """

    instance: str
    incarnation: int
    model: str
    host: str = ""
    pid: int = 0
    shape: str = ""


def record(identity: Identity, info: EngineDescription) -> InstanceRecord:
    """Record of the worker for the KV bucket ``instance``."""
    described = {name: getattr(info, name) for name in EngineDescription.__struct_fields__}
    return InstanceRecord(**described | scheduler_fields(info) | msgspec.structs.asdict(identity))


def empty_snapshot(info: EngineDescription, now_ns: int) -> EngineSnapshot:
    """The state of an engine that has computed nothing yet."""
    return EngineSnapshot(
        step=0,
        at_ns=now_ns,
        running=[],
        waiting=[],
        blocks_free=info.blocks_total,
        blocks_total=info.blocks_total,
        preemptions=0,
        step_duration_ns=0,
        batch=BatchComposition(),
    )
