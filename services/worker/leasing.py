"""The worker's half of a lease: who may read a sequence's blocks, until when, and who stands still.

    question          change                                  to the engine
    LeaseKv           leased, or renewed                      LeaseInEngine
    FreezeSequence    will stand still until its deadline,    FreezeInEngine; LeaseInEngine before it
                      or leased on, where much of it is new
    EndLease          over; gone where it moved               EndLeaseInEngine
    (deadline)        over; a frozen sequence decodes on      EndLeaseInEngine
    (sequence ends)   over, lost                              EndLeaseInEngine

Invariants: a sequence is leased at most once; a frozen one has a deadline; a migration that is over stays over. Whether
a sequence has moved is decided here once: only a freeze that still holds can end in ``moved``. After a thaw it is this
instance's again, whatever the migrator says, until ingress takes it away.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from millrace.actor.effects import CancelTimer, Effect, Log, StartTimer
from millrace.actor.engine import (
    EndLeaseInEngine,
    FreezeInEngine,
    KvDenied,
    KvLeaseTaken,
    LeaseInEngine,
    SequenceStopped,
)
from millrace.contracts.kv import KvRefusal
from millrace.contracts.leases import (
    EndLease,
    FreezeSequence,
    KvLeased,
    KvRefused,
    LeaseKv,
    SequenceFrozen,
)
from millrace.contracts.status import EngineDescription
from millrace.contracts.worker import SubmitSequence

from services.worker.config import MigrationConfig
from services.worker.context import WorkerContext, answer
from services.worker.questions import Ended, PendingQuestion, Questions, refused
from services.worker.state import Held

_MS = 1_000_000
TIMER = "lease/"


@dataclass(slots=True, kw_only=True)
class SequenceLease:
    """One leased sequence.

    Attributes:
        until_ns: When the lease ends unless it is renewed.
        granted: Whether the engine has pinned anything yet.
        frozen_until_ns: When a sequence that was asked to stand still decodes on; None while nobody asked.
        frozen: What was answered when it stood still.
        stopped_ns: When that was.
    """

    migration: str
    held: Held
    until_ns: int
    granted: bool = False
    frozen_until_ns: int | None = None
    frozen: SequenceFrozen | None = None
    stopped_ns: int = 0
    questions: Questions = field(default_factory=Questions)

    @property
    def due_ns(self) -> int:
        """Time at which the lease ends by itself, ns; while frozen, only the freeze's deadline counts."""
        return self.until_ns if self.frozen_until_ns is None else self.frozen_until_ns


class Leasing:
    """Owns the leases of one instance."""

    def __init__(self, ctx: WorkerContext, info: EngineDescription, config: MigrationConfig) -> None:
        self._ctx = ctx
        self._info = info
        self._config = config
        self._leases: dict[str, SequenceLease] = {}
        self._ended = Ended()

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, migration: str) -> bool:
        return migration in self._leases

    def freezes(self, held: Held) -> bool:
        """Whether a target may read this sequence's blocks as those of its last token, without a further word."""
        return any(lease.held is held and lease.frozen_until_ns is not None for lease in self._leases.values())

    # Questions

    def lease(self, body: LeaseKv, reply_to: str, now_ns: int) -> list[Effect]:
        """Takes or renews a lease."""
        no = self._refusal(body)
        if no is not None:
            return self._ctx.refuse_kv(body.sequence, reply_to, no)
        held = self._ctx.ledger.get(body.sequence)
        assert held is not None
        lease = self._leases.get(body.migration)
        until_ns = now_ns + min(max(0, body.lease_ms), self._config.lease_ms_max) * _MS
        if lease is None:
            lease = SequenceLease(migration=body.migration, held=held, until_ns=until_ns)
            self._leases[body.migration] = lease
        lease.until_ns = max(lease.until_ns, until_ns)
        return [self._timer(lease), *self._ask(lease, body, reply_to, now_ns)]

    def _refusal(self, body: LeaseKv) -> KvRefused | None:
        """Reason to refuse a lease without asking the engine."""
        migration, held = body.migration, self._ctx.ledger.get(body.sequence)
        if not self._config.enabled:
            return refused(migration, KvRefusal.UNABLE, "migration is off")
        if migration in self._ended:
            return refused(migration, KvRefusal.LEASE_LOST, "this migration is over here")
        if held is None or body.epoch not in (-1, held.epoch) or not held.live:
            return refused(migration, KvRefusal.UNKNOWN_SEQUENCE)
        if body.from_block < 0:
            return refused(migration, KvRefusal.INVALID, f"from_block {body.from_block}")
        lease = self._leases.get(migration)
        if lease is not None:
            return None if lease.held is held else refused(migration, KvRefusal.INVALID, "leases another sequence")
        if not held.added:
            return refused(migration, KvRefusal.NOT_RUNNING, "the engine has not taken it yet")
        if held.moved is not None and len(held.token_ids) <= held.brought:
            # Its client still waits for the last move: two in a row would be one long pause.
            return refused(migration, KvRefusal.NOT_RUNNING, "it has come and decoded nothing here yet")
        if held.submission is not None and held.submission.sampling.prompt_logprobs is not None:
            return refused(migration, KvRefusal.NOT_RUNNING, "its prompt's log-probabilities stay here")
        if any(other.held is held for other in self._leases.values()):
            return refused(migration, KvRefusal.TOO_MANY, "another migration has leased it")
        if len(self._leases) >= self._config.leases_max:
            return refused(migration, KvRefusal.TOO_MANY, f"{len(self._leases)} leases, at most that many")
        return None

    def freeze(self, body: FreezeSequence, reply_to: str, now_ns: int) -> list[Effect]:
        """Stops a leased sequence, or renews its lease where too much of it is new. The deadline runs from the first
        asking on.
        """
        lease = self._leases.get(body.migration)
        if lease is None or not lease.granted:
            no = refused(body.migration, KvRefusal.LEASE_LOST, "there is no such lease")
            return self._ctx.refuse_kv(body.sequence, reply_to, no)
        if lease.held.sequence != body.sequence or lease.held.epoch != body.epoch:
            return self._ctx.refuse_kv(body.sequence, reply_to, refused(body.migration, KvRefusal.UNKNOWN_SEQUENCE))
        if lease.frozen is not None and lease.frozen.from_block == body.from_block:
            return answer(reply_to, body.sequence, lease.frozen)
        if lease.frozen_until_ns is None and body.new_blocks_max is not None:  # first it is asked what is full
            until_ns = now_ns + min(max(0, body.lease_ms), self._config.lease_ms_max) * _MS
            lease.until_ns = max(lease.until_ns, until_ns)
        elif lease.frozen_until_ns is None:
            self._limit_freeze(lease, body, now_ns)
        return [self._timer(lease), *self._ask(lease, body, reply_to, now_ns)]

    def _limit_freeze(self, lease: SequenceLease, body: FreezeSequence, asked_ns: int) -> None:
        lease.frozen_until_ns = asked_ns + min(max(0, body.freeze_ms), self._config.freeze_ms_max) * _MS

    def end(self, body: EndLease, now_ns: int) -> list[Effect]:
        """Ends a lease, as often as it is asked to."""
        lease = self._leases.get(body.migration)
        if lease is None:
            self._ended.put(body.migration)  # a lease that comes after its end was overtaken by it
            return []
        if lease.held.sequence != body.sequence or body.epoch not in (-1, lease.held.epoch):
            return []
        moved = body.moved and lease.frozen is not None
        # One that never stood still, or went on since, cannot have moved: whoever says so is behind.
        effects = self._close(lease, now_ns, KvRefusal.CANCELLED, moved=moved)
        return effects + (self._ctx.moved(lease.held, now_ns) if moved else [])

    def _ask(self, lease: SequenceLease, body: LeaseKv | FreezeSequence, reply_to: str, now_ns: int) -> list[Effect]:
        return self._next(lease) if lease.questions.put(body, reply_to, now_ns) else []

    def _next(self, lease: SequenceLease) -> list[Effect]:
        """The engine is asked what comes first."""
        first = lease.questions.first
        match first:
            case PendingQuestion(body=LeaseKv() as body):
                return [LeaseInEngine(migration=body.migration, sequence=body.sequence, from_block=body.from_block)]
            case PendingQuestion(body=FreezeSequence() as body) if lease.frozen_until_ns is None:
                return [LeaseInEngine(migration=body.migration, sequence=body.sequence, from_block=body.from_block)]
            case PendingQuestion(body=FreezeSequence() as body):
                return [FreezeInEngine(migration=body.migration, sequence=body.sequence, from_block=body.from_block)]
            case _:
                return []

    # The engine's answers

    def taken(self, body: KvLeaseTaken, now_ns: int) -> list[Effect]:
        """Blocks are pinned: whoever asked learns which, or the sequence is stopped as few enough are new."""
        lease = self._leases.get(body.migration)
        asked = lease.questions.first if lease is not None else None
        if lease is None or asked is None:
            return []  # ended meanwhile
        question = asked.body
        if isinstance(question, FreezeSequence) and lease.frozen_until_ns is None:
            if question.new_blocks_max is None or len(body.blocks) <= question.new_blocks_max:
                self._limit_freeze(lease, question, asked.at_ns)
                return [self._timer(lease), *self._next(lease)]
        elif not isinstance(question, LeaseKv):
            return []
        lease.granted = True
        begins = body.from_block == 0
        leased = KvLeased(
            **msgspec.structs.asdict(body),
            epoch=lease.held.epoch,
            submission=self._submission(lease.held) if begins else None,
            endpoint=self._info.kv if begins else None,
        )
        return lease.questions.answer(body.sequence, leased, lease.held.traceparent) + self._next(lease)

    def _submission(self, held: Held) -> SubmitSequence | None:
        """The submission as if it came now, with the length expected now."""
        submission = held.submission_now()
        expected = self._ctx.reporter.expected(held.sequence)
        if submission is None or expected is None:
            return submission
        return msgspec.structs.replace(submission, expected_output_tokens=expected)

    def stopped(self, body: SequenceStopped, now_ns: int) -> list[Effect]:
        """It stands still. Its tokens go out first, then the answer."""
        lease = self._leases.get(body.migration)
        if lease is None or not lease.questions.asks(FreezeSequence):
            return []
        held = lease.held
        known = held.output_token_ids()
        if body.output_token_ids != known:
            return self._contradicted(lease, len(body.output_token_ids), len(known), now_ns)
        lease.stopped_ns = now_ns
        lease.frozen = SequenceFrozen(
            **msgspec.structs.asdict(body),
            epoch=held.epoch,
            logprobs=None if held.logprobs is None else held.logprobs[held.mark_older :],
        )
        told = self._ctx.flush(held)
        return told + lease.questions.answer(body.sequence, lease.frozen) + self._next(lease)

    def _contradicted(self, lease: SequenceLease, engine: int, here: int, now_ns: int) -> list[Effect]:
        """The engine's tokens are not those that went out: nothing may go on from them elsewhere."""
        line = Log(
            level="error",
            event="frozen_tokens_differ",
            fields={"sequence": lease.held.sequence, "engine": engine, "worker": here},
        )
        return [line, *self._close(lease, now_ns, KvRefusal.INVALID)]

    def denied(self, body: KvDenied, now_ns: int) -> list[Effect]:
        """The engine's no. A lease that the engine never gave, or has lost, is over."""
        lease = self._leases.get(body.migration)
        if lease is None or lease.questions.first is None:
            return []
        self._ctx.figures.kv_refused[body.reason] += 1
        froze = lease.questions.asks(FreezeSequence)
        told = lease.questions.answer(lease.held.sequence, refused(body.migration, body.reason, body.detail))
        if body.reason is KvRefusal.LEASE_LOST:
            self._ctx.figures.leases_lost += 1
            return told + self._close(lease, now_ns, KvRefusal.LEASE_LOST)
        if not lease.granted:
            # Asked again it may be granted: it waits, or its prompt is not done.
            del self._leases[lease.migration]
            return [*told, CancelTimer(name=TIMER + lease.migration), *self._refuse_rest(lease, body.reason)]
        if froze and lease.frozen is None:
            lease.frozen_until_ns = None
        return [*told, self._timer(lease), *self._next(lease)]

    def _refuse_rest(self, lease: SequenceLease, reason: KvRefusal) -> list[Effect]:
        return lease.questions.refuse_all(lease.held.sequence, refused(lease.migration, reason))

    # The end

    def on_timer(self, migration: str, now_ns: int) -> list[Effect]:
        """A deadline: the lease is over, and a frozen sequence decodes on."""
        lease = self._leases.get(migration)
        if lease is None:
            return []
        if now_ns < lease.due_ns:
            return [self._timer(lease)]
        thaws = lease.frozen_until_ns is not None
        if thaws:
            self._ctx.figures.thaws += 1
        else:
            self._ctx.figures.leases_expired += 1
        fields = {"migration": migration, "sequence": lease.held.sequence, "epoch": lease.held.epoch}
        line = Log(level="warning", event="thawed_by_deadline" if thaws else "lease_expired", fields=fields)
        return [line, *self._close(lease, now_ns, KvRefusal.LEASE_LOST)]

    def sweep(self, now_ns: int) -> list[Effect]:
        """After every message: leases of sequences that have ended here are lost."""
        effects: list[Effect] = []
        for lease in [lease for lease in self._leases.values() if self._gone(lease)]:
            self._ctx.figures.leases_lost += 1
            effects += self._close(lease, now_ns, KvRefusal.LEASE_LOST)
        return effects

    def _gone(self, lease: SequenceLease) -> bool:
        return not lease.held.live or self._ctx.ledger.get(lease.held.sequence) is not lease.held

    def _close(self, lease: SequenceLease, now_ns: int, reason: KvRefusal, *, moved: bool = False) -> list[Effect]:
        """Ends a lease here and in the engine; what still waits for an answer is refused."""
        del self._leases[lease.migration]
        self._ended.put(lease.migration)
        if lease.frozen is not None:
            self._ctx.figures.frozen.observe(max(0, now_ns - lease.stopped_ns) / 1e9)
        return [
            EndLeaseInEngine(migration=lease.migration, moved=moved),
            CancelTimer(name=TIMER + lease.migration),
            *self._refuse_rest(lease, reason),
        ]

    def _timer(self, lease: SequenceLease) -> Effect:
        return StartTimer(name=TIMER + lease.migration, at_ns=lease.due_ns)

    # For people and checkers

    def snapshot(self) -> dict[str, Any]:
        return {
            name: {"sequence": lease.held.sequence, "epoch": lease.held.epoch, "frozen": lease.frozen is not None}
            for name, lease in self._leases.items()
        }

    def check(self) -> None:
        assert len(self._leases) <= self._config.leases_max
        leased = [lease.held.sequence for lease in self._leases.values()]
        assert len(leased) == len(set(leased)), "leased twice"
        for lease in self._leases.values():
            assert not self._gone(lease), f"{lease.held.sequence} is leased and gone"
            assert lease.frozen is None or lease.frozen_until_ns is not None, "frozen without a deadline"
