"""State of a migration away from an instance of ours, and the table of its steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import Any

from millrace.actor.transitions import Transition, TransitionTable
from millrace.contracts.kv import KvEndpoint, KvRefusal
from millrace.contracts.leases import KvLeased, KvPulled, MigrationPrepared, SequenceFrozen
from millrace.contracts.message import Body
from millrace.contracts.migration import EpochAllotted, MigrationMode, MigrationOutcome, MoveSequence
from millrace.contracts.status import MigrationStatus
from millrace.contracts.worker import SequenceAccepted, SubmitSequence


class MigrationStep(StrEnum):
    """Answers that a migration waits for."""

    LEASING = "leasing"
    ALLOTTING = "allotting"
    PREPARING = "preparing"  # room at the target, and its first read
    RENEWING = "renewing"  # more time to read: slow answers took the rest of the lease
    PULLING = "pulling"
    FREEZING = "freezing"
    COMMITTING = "committing"
    ENDED = "ended"


class MigrationGuard(Enum):
    """Condition on which a step follows an answer."""

    RECOMPUTES = auto()  # no KV travels
    LEASE_SHORT = auto()  # less than half of the lease is left
    ROUND_DONE = auto()  # the target has read all that was full when the round began
    UNPREPARED = auto()  # the target was not asked for room yet


class MigrationQuestion(Enum):
    """Questions that are asked next."""

    ALLOT = auto()
    PREPARE = auto()
    RENEW = auto()
    PULL = auto()
    FREEZE = auto()
    COMMIT = auto()
    END = auto()


_S, _G, _R = MigrationStep, MigrationGuard, MigrationQuestion

#: Which answer leads from which step to which other one. Any other answer, and none in time, ends the migration.
MIGRATIONS = TransitionTable[MigrationStep, type[Body], MigrationGuard, MigrationQuestion](
    Transition(_S.LEASING, KvLeased, _S.ALLOTTING, _R.ALLOT),
    Transition(_S.ALLOTTING, EpochAllotted, _S.FREEZING, _R.FREEZE, guard=_G.RECOMPUTES),
    Transition(_S.ALLOTTING, EpochAllotted, _S.RENEWING, _R.RENEW, guard=_G.LEASE_SHORT),
    Transition(_S.ALLOTTING, EpochAllotted, _S.PREPARING, _R.PREPARE),
    Transition(_S.PREPARING, MigrationPrepared, _S.FREEZING, _R.FREEZE, guard=_G.ROUND_DONE),
    Transition(_S.PREPARING, MigrationPrepared, _S.RENEWING, _R.RENEW, guard=_G.LEASE_SHORT),
    Transition(_S.PREPARING, MigrationPrepared, _S.PULLING, _R.PULL),
    Transition(_S.PULLING, KvPulled, _S.FREEZING, _R.FREEZE, guard=_G.ROUND_DONE),
    Transition(_S.PULLING, KvPulled, _S.RENEWING, _R.RENEW, guard=_G.LEASE_SHORT),
    Transition(_S.PULLING, KvPulled, _S.PULLING, _R.PULL),
    Transition(_S.RENEWING, KvLeased, _S.PREPARING, _R.PREPARE, guard=_G.UNPREPARED),
    Transition(_S.RENEWING, KvLeased, _S.PULLING, _R.PULL),
    Transition(_S.FREEZING, KvLeased, _S.FREEZING, _R.FREEZE, guard=_G.ROUND_DONE),
    Transition(_S.FREEZING, KvLeased, _S.PULLING, _R.PULL),
    Transition(_S.FREEZING, SequenceFrozen, _S.COMMITTING, _R.COMMIT),
    Transition(_S.COMMITTING, SequenceAccepted, _S.ENDED, _R.END),
)


@dataclass
class SourceLease:
    """Blocks that the source's worker has leased.

    Attributes:
        held: Whether it must be told of the end.
        until_ns: By our clock from the moment of asking, so never later than the source's.
        epoch: In which the source holds the sequence; -1 until the first lease.
        answer: The last one: blocks from its ``from_block`` on.
        slow_ns: What the slowest answer of an engine took so far, copying apart.
    """

    held: bool = False
    asked_ns: int = 0
    until_ns: int = 0
    epoch: int = -1
    submission: SubmitSequence | None = None
    endpoint: KvEndpoint | None = None
    answer: KvLeased | None = None
    slow_ns: int = 0


@dataclass
class TargetRoom:
    """Room that the target's worker was asked for.

    Attributes:
        epoch: Allotted; -1 before. ``span``: what ingress made for the target's part in decoding it.
        asked: It may hold something, and must hear of a failure.
        blocks: Positions below this have room; 0 before.
        ahead_ns: By how much its clock is ahead of ours, at least; None where it does not say.
    """

    epoch: int = -1
    span: str = ""
    asked: bool = False
    asked_ns: int = 0
    blocks: int = 0
    ahead_ns: int | None = None


@dataclass
class Copying:
    """Rounds of copying.

    Attributes:
        from_block: First position that the target does not have.
        round: The present one, from 1 on; 0 before.
        round_to: Where it ends: what was full when it began, whatever is decoded meanwhile.
        pull_bytes: As much as the next pull may copy; 0 before the first.
    """

    from_block: int = 0
    matched_blocks: int = 0
    round: int = 0
    round_to: int = 0
    pull_bytes: int = 0
    bytes: int = 0
    descriptors: int = 0
    copied_ns: int = 0
    copier: str = ""


@dataclass
class Freeze:
    """Halt of the source.

    Attributes:
        until_ns: By our clock from the moment of asking.
        stopped_ns: When it decoded its last token.
        committed_ns: When the target had the sequence; 0 before.
    """

    asked_ns: int = 0
    until_ns: int = 0
    stopped_ns: int = 0
    frozen: SequenceFrozen | None = None
    committed_ns: int = 0


@dataclass
class OutgoingMigration:
    """One migration away from an instance of ours.

    Attributes:
        number: Of its last request: only that one's answer counts.
        traceparent: Of the sequence's submission. ``span``: this migration's own.
        events: For the span.
    """

    migration: str
    source: str
    order: MoveSequence
    mode: MigrationMode
    reply_to: str
    started_ns: int
    step: MigrationStep = MigrationStep.LEASING
    number: int = 0
    lease: SourceLease = field(default_factory=SourceLease)
    room: TargetRoom = field(default_factory=TargetRoom)
    copy: Copying = field(default_factory=Copying)
    freeze: Freeze = field(default_factory=Freeze)
    traceparent: str = ""
    span: str = ""
    events: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)
    outcome: MigrationOutcome | None = None
    refusal: KvRefusal | None = None
    detail: str = ""

    @property
    def sequence(self) -> str:
        return self.order.sequence

    @property
    def target(self) -> str:
        return self.order.target

    @property
    def frozen_ns(self) -> int:
        """Time in which no token was decoded, ns; 0 where the migration never got that far."""
        return max(1, self.freeze.committed_ns - self.freeze.stopped_ns) if self.freeze.committed_ns else 0

    @property
    def tokens(self) -> int:
        """Length when it was frozen, prompt included; 0 where it was not."""
        if self.freeze.frozen is None or self.lease.submission is None:
            return 0
        return len(self.lease.submission.prompt_token_ids) + len(self.freeze.frozen.output_token_ids)

    def status(self) -> MigrationStatus:
        """For people, with the migrator's heartbeat."""
        return MigrationStatus(
            sequence=self.sequence,
            source=self.source,
            target=self.target,
            step=str(self.step),
            round=self.copy.round,
            began_ns=self.started_ns,
            bytes=self.copy.bytes,
        )


@dataclass
class ManagedInstance:
    """One instance of ours. ``freeze_ms_max``: as its worker registered; 0 where it does not say."""

    instance: str
    freeze_ms_max: int = 0
