"""Messages with plain values for what a test or a bench does not look at."""

from typing import Any, TypeVar

import msgspec
from millrace.contracts.broker import BoundaryMoved, LoadReported, MoveReason
from millrace.contracts.kv import CopierKind, KvEndpoint
from millrace.contracts.migration import MigrationFinished, MigrationOutcome
from millrace.contracts.observers import DecisionMade, RequestFinished
from millrace.contracts.status import BatchComposition, EngineSnapshot, InstanceRecord, InstanceSummary, StatusSnapshot
from millrace.contracts.worker import Sampling, SubmitSequence

M = TypeVar("M", bound=msgspec.Struct)

_RECORD: dict[str, Any] = {
    "incarnation": 1,
    "model": "m",
    "engine": "modelled",
    "engine_version": "1",
    "max_model_len": 4096,
    "max_sequences": 8,
    "token_budget": 512,
    "block_size": 16,
    "blocks_total": 100,
}
_COUNTS = ("running", "waiting", "running_tokens", "waiting_prefill_tokens", "preemptions", "output_tokens_total")
_SUMMARY: dict[str, Any] = dict.fromkeys((*_COUNTS, "at_ns"), 0) | {
    "incarnation": 1,
    "model": "m",
    "blocks_free": 100,
    "blocks_total": 100,
    "block_size": 16,
}
_STATE: dict[str, Any] = {
    "step": 1,
    "at_ns": 1,
    "running": [],
    "waiting": [],
    "blocks_free": 100,
    "blocks_total": 100,
    "preemptions": 0,
    "step_duration_ns": 1,
    "batch": BatchComposition(),
}
_LOADS = ("at_ns", "tokens", "waiting_tokens", "running", "waiting")
_BODIES: dict[type[msgspec.Struct], dict[str, Any]] = {
    EngineSnapshot: _STATE,
    InstanceRecord: _RECORD,
    InstanceSummary: _SUMMARY,
    StatusSnapshot: _STATE | {"incarnation": 1, "model": "m"},
    KvEndpoint: {"fingerprint": "f", "block_tokens": 16, "block_bytes": 1_000, "blocks": 100, "machine": "here"}
    | {"copiers": [CopierKind.MODELLED]},
    LoadReported: dict.fromkeys(_LOADS, 0)
    | {"incarnation": 5, "model": "m", "stage": "s0", "plan_epoch": 1, "blocks_free": 100, "blocks_total": 100},
    BoundaryMoved: {"model": "m", "stage": "s0", "next_stage": "s1", "plan_epoch": 1, "version": 1, "at_ns": 0},
    MigrationFinished: {"migration": "m1", "model": "m", "source": "w0", "target": "w1", "epoch": 1}
    | {"outcome": MigrationOutcome.MOVED, "reason": MoveReason.BALANCE},
    DecisionMade: {"epoch": 0, "kind": "dispatch", "policy": "forecast", "model": "m", "chosen": "w0", "reason": ""},
    RequestFinished: {"model": "m", "outcome": "completed", "ingress": "i", "instances": ["w0"]},
    SubmitSequence: {"epoch": 0, "ingress": "i0", "ingress_incarnation": 1, "sampling": Sampling(max_tokens=10)},
}


def plain(kind: type[M], /, **fields: Any) -> M:
    """One of these messages."""
    return kind(**(_BODIES[kind] | fields))


def decision(request: str, **fields: Any) -> DecisionMade:
    """The placement of a request's only sequence."""
    return plain(DecisionMade, request=request, **({"sequences": [f"{request}.0"]} | fields))


def plain_record(instance: str, **fields: Any) -> InstanceRecord:
    """A registration."""
    return plain(InstanceRecord, instance=instance, **fields)


def plain_summary(instance: str, **fields: Any) -> InstanceSummary:
    """A heartbeat."""
    return plain(InstanceSummary, instance=instance, **fields)


def plain_snapshot(instance: str, **fields: Any) -> StatusSnapshot:
    """The state after a step."""
    return plain(StatusSnapshot, instance=instance, **fields)
