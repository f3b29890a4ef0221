"""Reports that a worker publishes about itself: snapshot, summary, record and presence as messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from millrace.actor.engine import EngineInfo
from millrace.contracts.kv import KvGroup
from millrace.contracts.scheduler import scheduler_fields
from millrace.contracts.status import (
    BatchComposition,
    EngineDescription,
    EngineSnapshot,
    InstanceRecord,
    InstanceSummary,
    SequenceStatus,
    StatusSnapshot,
)

from services.worker.indicators import load_indicators
from services.worker.state import Held


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


def record(identity: Identity, info: EngineInfo) -> InstanceRecord:
    """Record of the worker for the KV bucket ``instance``."""
    described = {name: getattr(info, name) for name in EngineDescription.__struct_fields__}
    return InstanceRecord(**described | scheduler_fields(info) | msgspec.structs.asdict(identity))


def empty_snapshot(info: EngineInfo, now_ns: int) -> EngineSnapshot:
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


def status(
    identity: Identity, snapshot: EngineSnapshot, *, running: list[SequenceStatus], waiting: list[SequenceStatus]
) -> StatusSnapshot:
    """The full snapshot as it goes out, with the sequences as the worker tells them."""
    return StatusSnapshot(
        instance=identity.instance,
        incarnation=identity.incarnation,
        model=identity.model,
        **msgspec.structs.asdict(snapshot) | {"running": running, "waiting": waiting},
    )


class SummaryCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a summary besides the snapshot.

    Attributes:
        moves: Sequences whose KV leaves, and those whose KV arrives.
    """

    now_ns: int
    block_size: int
    groups: Sequence[KvGroup] = ()
    output_tokens_total: int
    draining: bool
    engine_silent_ns: int = 0
    step_age_ns: int = 0
    step_longest_ns: int = 0
    moves: tuple[int, int] = (0, 0)


def summary(
    identity: Identity, snapshot: EngineSnapshot, unseen: Iterable[Held], counts: SummaryCounts
) -> InstanceSummary:
    """The small form. ``unseen`` are sequences submitted after the snapshot: they count as waiting."""
    later = list(unseen)
    return InstanceSummary(
        instance=identity.instance,
        incarnation=identity.incarnation,
        model=identity.model,
        at_ns=counts.now_ns,
        running=len(snapshot.running),
        waiting=len(snapshot.waiting) + len(later),
        running_tokens=sum(entry.prompt_tokens + entry.output_tokens for entry in snapshot.running),
        waiting_prefill_tokens=sum(
            entry.prompt_tokens + entry.output_tokens - entry.computed_tokens for entry in snapshot.waiting
        )
        + sum(held.to_compute for held in later),
        blocks_free=snapshot.blocks_free,
        blocks_total=snapshot.blocks_total,
        block_size=counts.block_size,
        preemptions=snapshot.preemptions,
        output_tokens_total=counts.output_tokens_total,
        draining=counts.draining,
        engine_silent_ns=counts.engine_silent_ns,
        step_age_ns=counts.step_age_ns,
        step_longest_ns=counts.step_longest_ns,
        indicators=load_indicators(
            snapshot,
            later,
            now_ns=counts.now_ns,
            block_size=counts.block_size,
            groups=counts.groups,
            moves=counts.moves,
        ),
        token_budget=snapshot.token_budget,
    )
