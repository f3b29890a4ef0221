"""State of a migrator's migrations, away from its instances and to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from millrace.contracts.kv import KvEndpoint, KvRefusal
from millrace.contracts.leases import KvLeased, SequenceFrozen
from millrace.contracts.migration import (
    EvacuateInstance,
    MigrateSequence,
    MigrationMode,
    MigrationOutcome,
    MigrationReason,
)
from millrace.contracts.status import MigrationStatus, SequenceStatus, StatusSnapshot
from millrace.contracts.worker import SubmitSequence
from millrace.policies.migration.backoff import MoveBackoff


class OutgoingStep(StrEnum):
    """Step of an outgoing migration: what it waits for."""

    QUEUED = "queued"  # a free slot
    RESTING = "resting"  # the sequence cannot move yet, or nobody was heard yet who could take it: a timer
    LEASING = "leasing"
    ALLOTTING = "allotting"
    PREPARING = "preparing"
    PULLING = "pulling"
    RENEWING = "renewing"
    FREEZING = "freezing"
    COMMITTING = "committing"


#: Steps that take none of the instance's slots.
IDLE_STEPS = (OutgoingStep.QUEUED, OutgoingStep.RESTING)

#: Askers of one migration: an operator, its broker, and what either of them repeats.
ASKERS_MAX = 32

Event = tuple[str, int, dict[str, Any]]


@dataclass
class OutgoingMigration:
    """One migration away from an instance of ours.

    Attributes:
        wanted: Target that the asker named; empty for any.
        rounds: Of copying, begun.
        begin_until_ns: A sequence that cannot move yet may take until then.
        waiters: Reply subjects of those who wait for its end.
        orders: Names that they gave it.
        number: Of its last request: only that one's answer counts.
        target: The present choice.
        excluded: Those that have refused it.
        epoch: In which the source holds it; -1 until the first lease.
        target_epoch: Allotted; -1 before.
        traceparent: Of the sequence's submission. ``span``: this migration's own. ``target_span``: what ingress made
            for the target's part in decoding it.
        lease_until_ns, freeze_until_ns: By our clock from the moment of asking, so never later than the source's.
        from_block: First position that the target does not have.
        reserved_blocks: Positions below this have room at the target.
        ahead_ns: By how much the clock of the target's worker is ahead of ours, at least; None where it does not say.
        slow_ns: What the slowest answer of an engine took so far, copying apart.
        pull_bytes: As much as the next pull may copy; 0 before the first.
        round_to: Where the present round ends: what was full when it began, whatever is decoded meanwhile.
        released: The source's lease is over, or was never given.
        asked_target: The target's worker was asked to prepare: it must hear of an abort.
        committed_ns: When the target had it; 0 before.
        note: Why its asker wants it, for the span.
    """

    migration: str
    sequence: str
    source: str
    wanted: str
    reason: MigrationReason
    mode: MigrationMode
    asked_ns: int
    begin_until_ns: int
    waiters: list[str] = field(default_factory=list)
    orders: list[str] = field(default_factory=list)
    step: OutgoingStep = OutgoingStep.QUEUED
    number: int = 0
    target: str = ""
    excluded: set[str] = field(default_factory=set)
    started_ns: int = 0
    epoch: int = -1
    target_epoch: int = -1
    submission: SubmitSequence | None = None
    endpoint: KvEndpoint | None = None
    leased: KvLeased | None = None
    lease_until_ns: int = 0
    released: bool = True
    asked_target: bool = False
    traceparent: str = ""
    span: str = ""
    target_span: str = ""
    from_block: int = 0
    matched_blocks: int = 0
    reserved_blocks: int = 0
    copier: str = ""
    target_asked_ns: int = 0
    ahead_ns: int | None = None
    slow_ns: int = 0
    pull_bytes: int = 0
    round_to: int = 0
    rounds: int = 0
    bytes: int = 0
    descriptors: int = 0
    freeze_asked_ns: int = 0
    freeze_until_ns: int = 0
    stopped_ns: int = 0
    frozen: SequenceFrozen | None = None
    committed_ns: int = 0
    note: str = ""
    outcome: MigrationOutcome | None = None
    refusal: KvRefusal | None = None
    detail: str = ""
    events: list[Event] = field(default_factory=list)

    def join(self, body: MigrateSequence, reply_to: str) -> bool:
        """Add an asker. False where it wants another target, or too many wait already."""
        if self.refusal_to_join(body) is not None:
            return False
        if reply_to and reply_to not in self.waiters:
            self.waiters.append(reply_to)
        if body.order and body.order not in self.orders:
            self.orders.append(body.order)
        return True

    def refusal_to_join(self, body: MigrateSequence) -> tuple[KvRefusal, str] | None:
        """Reason why an asker cannot join it; None where it can."""
        if body.target not in ("", self.wanted, self.target):
            return KvRefusal.INVALID, f"moves to {self.target or self.wanted}"
        if max(len(self.waiters), len(self.orders)) >= ASKERS_MAX:
            return KvRefusal.TOO_MANY, f"{ASKERS_MAX} wait for it already"
        return None

    @property
    def busy(self) -> bool:
        """Whether it takes a slot."""
        return self.step not in IDLE_STEPS

    def status(self) -> MigrationStatus:
        """For people, with the migrator's heartbeat."""
        return MigrationStatus(
            sequence=self.sequence,
            source=self.source,
            target=self.target or self.wanted,
            step=str(self.step),
            round=self.rounds,
            began_ns=self.started_ns or self.asked_ns,
            bytes=self.bytes,
        )

    @property
    def stands_still(self) -> bool:
        """Whether its source was told to decode no further and may still wait for what becomes of it."""
        return self.step is OutgoingStep.COMMITTING

    @property
    def frozen_ns(self) -> int:
        """Time in which no token was decoded, ns; 0 where the migration never got that far."""
        return max(1, self.committed_ns - self.stopped_ns) if self.committed_ns else 0

    @property
    def tokens(self) -> int:
        """Length when it was frozen, prompt included; 0 where it was not."""
        if self.frozen is None or self.submission is None:
            return 0
        return len(self.submission.prompt_token_ids) + len(self.frozen.output_token_ids)


def asked_for(
    migration: str, source: str, body: MigrateSequence, mode: MigrationMode, now_ns: int
) -> OutgoingMigration:
    """A migration that has just been asked for."""
    return OutgoingMigration(
        migration=migration,
        sequence=body.sequence,
        source=source,
        wanted=body.target,
        reason=body.reason,
        mode=mode,
        asked_ns=now_ns,
        begin_until_ns=now_ns + max(0, body.within_ms) * 1_000_000,
        note=body.note,
    )


@dataclass
class Evacuation:
    """Everything shall leave an instance.

    Attributes:
        waiters: Reply subjects.
        attempts: Failures by sequence.
        ordered_ns: When its broker last ordered a move of it, or one ended; its beginning before.
        announced_ns: When its broker was last told of it; 0 before.
    """

    ask: EvacuateInstance
    since_ns: int
    until_ns: int
    waiters: list[str]
    moved: int = 0
    failed: int = 0
    attempts: dict[str, int] = field(default_factory=dict)
    ordered_ns: int = 0
    announced_ns: int = 0


@dataclass
class ManagedInstance:
    """One instance of ours.

    Attributes:
        heard_ns: When the snapshot came.
        evacuation: None while nobody asked for one.
        backoff: Sequences that are left alone for a while: they found no room, or have just left.
        freeze_ms_max: As its worker registered; 0 where it does not say.
    """

    instance: str
    snapshot: StatusSnapshot | None = None
    heard_ns: int = 0
    evacuation: Evacuation | None = None
    backoff: MoveBackoff = field(default_factory=MoveBackoff)
    freeze_ms_max: int = 0

    def sequences(self) -> list[SequenceStatus]:
        """Those of the last snapshot: running ones first."""
        return [*self.snapshot.running, *self.snapshot.waiting] if self.snapshot is not None else []
