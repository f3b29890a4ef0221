"""Messages that engines send, with plain values for what a test or a bench does not look at."""

from __future__ import annotations

from typing import Any

from millrace.contracts.status import BatchComposition, InstanceRecord, InstanceSummary, StatusSnapshot

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
_SNAPSHOT: dict[str, Any] = {
    "incarnation": 1,
    "model": "m",
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


def plain_record(instance: str, **fields: Any) -> InstanceRecord:
    """A registration."""
    return InstanceRecord(instance=instance, **(_RECORD | fields))


def plain_summary(instance: str, **fields: Any) -> InstanceSummary:
    """A heartbeat."""
    return InstanceSummary(instance=instance, **(_SUMMARY | fields))


def plain_snapshot(instance: str, **fields: Any) -> StatusSnapshot:
    """The state after a step."""
    return StatusSnapshot(instance=instance, **(_SNAPSHOT | fields))
