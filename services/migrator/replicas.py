"""KV replicas: full blocks of running sequences copied ahead to a second instance, for their continuation.

    LEASING → RESERVING (once) → (PULLING → PROVING → PACING)* → KEEPING → IDLE          a round; any no: IDLE, or gone

A round takes a lease of its own, has the holder's worker read what is full, and asks the source for the lease once
more: its answer proves that the lease held while all was read. Only then holder and ingress are told. Between rounds
nothing is leased, so a replica keeps nobody from moving. One round at a time per instance, within a bandwidth, and none
while a migration is under way from there.

The holder's worker keeps what is proven for a while after the last news, longer than ingress takes to notice a loss.
So a replica is not freed here when its source stops answering, or no longer knows the sequence: it may be needed now.
Ingress frees it when the sequence has ended or goes on elsewhere (CancelSequence).
"""

from __future__ import annotations

from collections.abc import Iterator

from millrace.actor.effects import Effect, Request, StartTimer
from millrace.contracts.kv import KvRefusal
from millrace.contracts.leases import KvLeased, KvPulled, MigrationPrepared, UnreserveKv
from millrace.contracts.local import RequestFailure
from millrace.contracts.message import Body
from millrace.contracts.migration import MigrationFinished, MigrationOutcome
from millrace.contracts.sequences import request_id_of
from millrace.contracts.status import SequenceState, SequenceStatus, StatusSnapshot

from services.migrator.context import MS, REPLICA, MigratorContext, refusal_of, say
from services.migrator.messages import told_tokens
from services.migrator.outgoing import OutgoingMigrations
from services.migrator.replica_state import KvReplica, ReplicaStep
from services.migrator.state import ManagedInstance

#: After a refusal neither the sequence nor the holder is tried again for this long.
REST_NS = 2_000 * MS
#: The holder hears of its replica at least so often.
KEEP_NS = 2_000 * MS
#: A pull copies as much as the bandwidth allows in this time.
PULL_NS = 100 * MS
#: A holder that leaves so many questions in a row unanswered is given up.
SILENCES_MAX = 2


class Replicas:
    """Owns the replicas of the sequences of one actor's instances."""

    def __init__(self, context: MigratorContext, outgoing: OutgoingMigrations) -> None:
        self._context = context
        self._config = context.config.replicas
        self._outgoing = outgoing
        self._replicas: dict[str, KvReplica] = {}
        self._resting: dict[str, int] = {}  # sequence -> until, ns
        self._avoided: dict[str, int] = {}  # holder -> until, ns
        self._free_ns: dict[str, int] = {}  # instance -> when it may copy again

    def __iter__(self) -> Iterator[KvReplica]:
        return iter(self._replicas.values())

    def of(self, instance: str) -> list[KvReplica]:
        """Those of one instance's sequences."""
        return [each for each in self._replicas.values() if each.source == instance]

    def held(self, instance: str) -> int:
        """Number of them that a continuation could begin on."""
        return sum(each.told > 0 for each in self.of(instance))

    # who gets one

    def on_snapshot(self, managed: ManagedInstance, body: StatusSnapshot, now_ns: int) -> list[Effect]:
        """The instance's sequences now: begins the round that is due."""
        if not self._config.enabled:
            return []
        present = {status.sequence: status for status in (*body.running, *body.waiting)}
        ended: list[Effect] = []
        for replica in self.of(managed.instance):
            if replica.sequence not in present and replica.step is ReplicaStep.IDLE:
                ended += self._forget(replica, now_ns)
        return ended if self._is_busy(managed.instance) else ended + self._next(managed, body, present, now_ns)

    def _next(
        self, managed: ManagedInstance, body: StatusSnapshot, present: dict[str, SequenceStatus], now_ns: int
    ) -> list[Effect]:
        """Begin the round that is due, or a replica, or tell a holder that its replica is still wanted."""
        due = self._due(managed.instance, present, now_ns)
        if due is not None:
            return self._begin(due, now_ns)
        idle = [each for each in self.of(managed.instance) if now_ns - each.kept_ns >= KEEP_NS]
        return self._keep(idle[0], now_ns) if idle else self._start(managed, body, now_ns)

    def _is_busy(self, instance: str) -> bool:
        """Whether a round, or a migration, is under way from there."""
        return bool(self._outgoing.of(instance)) or any(each.step is not ReplicaStep.IDLE for each in self.of(instance))

    def _due(self, instance: str, present: dict[str, SequenceStatus], now_ns: int) -> KvReplica | None:
        """The replica that lags most, of those that may have a round."""
        if now_ns < self._free_ns.get(instance, 0):
            return None
        lags = []
        for replica in self.of(instance):
            status = present.get(replica.sequence)
            if status is None or status.state is not SequenceState.RUNNING or now_ns < replica.due_ns:
                continue
            lag = status.computed_tokens // max(1, replica.block_tokens) - replica.proven
            if lag > 0:
                lags.append((lag, replica.name))
        return self._replicas[max(lags)[1]] if lags else None

    def _start(self, managed: ManagedInstance, body: StatusSnapshot, now_ns: int) -> list[Effect]:
        """Begin a replica of the longest sequence that should have one and has none."""
        instance = managed.instance
        if len(self.of(instance)) >= self._config.per_instance_max or now_ns < self._free_ns.get(instance, 0):
            return []
        self._resting = {name: until for name, until in self._resting.items() if now_ns < until}
        without = self._resting.keys() | {each.sequence for each in self.of(instance)}
        group = [status for status in body.running if status.sequence not in without and self._deserves(status)]
        if not group or self._context.records.prefills(instance) or self._is_whole_only(instance):
            return []
        chosen = max(group, key=lambda status: (status.computed_tokens, status.sequence))
        name = f"{self._context.rng.getrandbits(48):012x}"
        replica = KvReplica(name=name, sequence=chosen.sequence, source=instance)
        self._replicas[name] = replica
        return self._begin(replica, now_ns)

    def _is_whole_only(self, instance: str) -> bool:
        """Whether a part of a sequence's KV is of no use there."""
        record = self._context.records.get(instance)
        return record is not None and record.kv is not None and record.kv.whole_only

    def _deserves(self, status: SequenceStatus) -> bool:
        """Whether a sequence decodes and is long enough."""
        return (
            status.state is SequenceState.RUNNING
            and not status.immovable
            and status.output_tokens > 0
            and status.computed_tokens >= self._config.tokens_min
        )

    # a round

    def _begin(self, replica: KvReplica, now_ns: int) -> list[Effect]:
        replica.round += 1
        replica.from_block = replica.proven
        replica.forget_blocks()
        return self._lease(replica, ReplicaStep.LEASING, now_ns)

    def _lease(self, replica: KvReplica, step: ReplicaStep, now_ns: int) -> list[Effect]:
        limits = self._context.limits
        replica.lease_until_ns = now_ns + limits.lease_ms * MS
        subject = self._context.subjects.engine(replica.source, "lease")
        return self._ask(replica, step, subject, replica.lease_kv(limits.lease_ms), limits.answer_ms * MS)

    def _ask(self, replica: KvReplica, step: ReplicaStep, subject: str, body: Body, timeout_ns: int) -> list[Effect]:
        replica.step = step
        replica.number += 1
        correlation, request = f"{REPLICA}/{replica.name}/{replica.number}", request_id_of(replica.sequence)
        timeout_ns = max(MS, timeout_ns)
        return [Request(subject=subject, body=body, correlation=correlation, timeout_ns=timeout_ns, request=request)]

    def on_answer(self, name: str, number: int, body: Body | RequestFailure, now_ns: int) -> list[Effect]:
        """The answer to a replica's last question, or that there is none."""
        replica = self._replicas.get(name)
        if replica is None or number != replica.number:
            return []
        match replica.step, body:
            case ReplicaStep.LEASING, KvLeased():
                return self._on_leased(replica, body, now_ns)
            case ReplicaStep.RESERVING, MigrationPrepared():
                return self._on_reserved(replica, body, now_ns)
            case ReplicaStep.PULLING, KvPulled():
                return self._on_pulled(replica, body, now_ns)
            case ReplicaStep.PROVING, KvLeased():
                return self._on_proven(replica, body, now_ns)
            case ReplicaStep.KEEPING, KvPulled():
                return self._on_kept(replica, now_ns)
            case _:
                return self._on_no(replica, body, now_ns)

    def _on_leased(self, replica: KvReplica, body: KvLeased, now_ns: int) -> list[Effect]:
        replica.leased(body)
        if replica.reserved:
            return self._pull(replica, now_ns) if replica.known else self._end_round(replica, now_ns)
        if body.submission is None or body.endpoint is None or not replica.known:
            return self._give_up(replica, now_ns)
        replica.epoch, replica.endpoint, replica.ingress = body.epoch, body.endpoint, body.submission.ingress
        replica.adapter = body.submission.sampling.adapter
        return self._reserve(replica, told_tokens(body.submission), now_ns)

    def _reserve(self, replica: KvReplica, token_ids: list[int], now_ns: int) -> list[Effect]:
        context = self._context
        source, blocks = context.records.get(replica.source), len(replica.known)
        self._avoided = {name: until for name, until in self._avoided.items() if now_ns < until}
        if source is None:
            return self._give_up(replica, now_ns)
        record = context.records.holder(source, blocks, self._avoided.keys(), now_ns)
        if record is None:
            return self._give_up(replica, now_ns)
        replica.holder, replica.incarnation = record.instance, record.incarnation
        replica.asked_ns = now_ns
        body, subject = replica.reserve(token_ids, context.limits), context.subjects.engine(replica.holder, "prepare")
        return self._ask(replica, ReplicaStep.RESERVING, subject, body, context.limits.answer_ms * MS)

    def _on_reserved(self, replica: KvReplica, body: MigrationPrepared, now_ns: int) -> list[Effect]:
        replica.reserved, replica.kept_ns = True, now_ns
        replica.skip(body.matched_blocks)
        replica.proven = replica.from_block
        return self._pull(replica, now_ns) if replica.known else self._keep(replica, now_ns)

    def _pull(self, replica: KvReplica, now_ns: int) -> list[Effect]:
        assert replica.endpoint is not None
        blocks_max = max(1, self._config.bytes_per_s * PULL_NS // (1_000 * MS) // max(1, replica.endpoint.block_bytes))
        body = replica.pull(blocks_max, now_ns=now_ns, margin_ms=self._context.limits.margin_ms)
        if body is None:
            return self._end_round(replica, now_ns)
        replica.asked_ns = now_ns
        copied_ns = replica.pulling * replica.endpoint.block_bytes * 1_000 * MS // self._config.bytes_per_s
        self._free_ns[replica.source] = now_ns + copied_ns
        subject = self._context.subjects.engine(replica.holder, "pull")
        return self._ask(replica, ReplicaStep.PULLING, subject, body, replica.lease_until_ns - now_ns)

    def _on_pulled(self, replica: KvReplica, body: KvPulled, now_ns: int) -> list[Effect]:
        replica.kept_ns, replica.silences = now_ns, 0
        self._context.metrics.replica_bytes += body.bytes
        replica.skip(replica.pulling)
        return self._lease(replica, ReplicaStep.PROVING, now_ns)

    def _on_proven(self, replica: KvReplica, body: KvLeased, now_ns: int) -> list[Effect]:
        replica.leased(body)
        replica.proven = replica.from_block
        if not replica.known or self._outgoing.of(replica.source):
            return self._keep(replica, now_ns)
        replica.step = ReplicaStep.PACING
        at_ns = max(now_ns, self._free_ns.get(replica.source, 0))
        return [StartTimer(name=f"{REPLICA}/{replica.name}", at_ns=at_ns)]

    def on_timer(self, name: str, now_ns: int) -> list[Effect]:
        """It may copy again."""
        replica = self._replicas.get(name)
        return self._pull(replica, now_ns) if replica is not None and replica.step is ReplicaStep.PACING else []

    def _keep(self, replica: KvReplica, now_ns: int) -> list[Effect]:
        if not replica.reserved:
            return []
        subject, limits = self._context.subjects.engine(replica.holder, "pull"), self._context.limits
        return self._ask(replica, ReplicaStep.KEEPING, subject, replica.keep(), limits.answer_ms * MS)

    def _on_kept(self, replica: KvReplica, now_ns: int) -> list[Effect]:
        """The holder knows what is proven: now ingress may."""
        replica.kept_ns, replica.silences = now_ns, 0
        news = replica.proven > replica.told
        replica.told = replica.proven
        told = self._tell(replica, replica.told * replica.block_tokens) if news else []
        return told + self._end_round(replica, now_ns)

    # ends

    def _end_round(self, replica: KvReplica, now_ns: int) -> list[Effect]:
        """Nothing is leased until the next round."""
        leased = replica.lease_until_ns > 0
        replica.step, replica.lease_until_ns = ReplicaStep.IDLE, 0
        replica.due_ns = now_ns + self._config.interval_ms * MS
        replica.forget_blocks()
        if not leased:
            return []
        return [say(self._context.subjects.engine(replica.source, "end"), replica.end_lease(), replica.sequence, "")]

    def _on_no(self, replica: KvReplica, body: Body | RequestFailure, now_ns: int) -> list[Effect]:
        """Everything that is not the answer that was wanted: the round is over, or the replica."""
        reason, _ = refusal_of(body, str(replica.step))
        self._context.metrics.replica_refusals.add(str(reason))
        at_source = replica.step in (ReplicaStep.LEASING, ReplicaStep.PROVING)
        if at_source and reason is KvRefusal.UNKNOWN_SEQUENCE:
            return self._forget(replica, now_ns)
        if not at_source and (not replica.reserved or self._is_lost(replica, body, reason)):
            self._avoided[replica.holder] = now_ns + REST_NS
            return self._give_up(replica, now_ns)
        if not replica.reserved:
            return self._give_up(replica, now_ns)
        ended = self._end_round(replica, now_ns)
        if reason is not KvRefusal.NOT_RUNNING:
            replica.due_ns = now_ns + REST_NS
        return ended

    def _is_lost(self, replica: KvReplica, body: Body | RequestFailure, reason: KvRefusal) -> bool:
        """Whether the holder does not have it any more, or is gone itself."""
        replica.silences += isinstance(body, RequestFailure)
        gone = body is RequestFailure.NO_RESPONDERS or replica.silences >= SILENCES_MAX
        return gone or reason is KvRefusal.INVALID

    def _give_up(self, replica: KvReplica, now_ns: int) -> list[Effect]:
        """No holder, or it has it no more: again elsewhere where it had one, else later."""
        gone = self._tell(replica, 0) if replica.told else []
        ended = self._end_round(replica, now_ns)
        if not replica.reserved:
            self._resting[replica.sequence] = now_ns + REST_NS
        return [*gone, *ended, *self._drop(replica, now_ns)]

    def _tell(self, replica: KvReplica, tokens: int) -> list[Effect]:
        subject = self._context.subjects.replicated(replica.ingress)
        return [say(subject, replica.replicated(tokens), replica.sequence, "")]

    def _forget(self, replica: KvReplica, now_ns: int) -> list[Effect]:
        """Its sequence is not there any more. Ingress, or time, frees what it was told of."""
        if not replica.told:
            return self._drop(replica, now_ns)
        del self._replicas[replica.name]
        return []

    def _drop(self, replica: KvReplica, now_ns: int) -> list[Effect]:
        """Free it at its holder."""
        del self._replicas[replica.name]
        if not replica.holder:
            return []
        subject = self._context.subjects.engine(replica.holder, "unreserve")
        return [say(subject, UnreserveKv(migration=replica.name), replica.sequence, "")]

    def make_way(self, now_ns: int) -> list[Effect]:
        """End the rounds of instances from which a migration is under way."""
        effects: list[Effect] = []
        for replica in list(self):
            if replica.step is not ReplicaStep.IDLE and self._outgoing.of(replica.source):
                replica.number += 1  # nobody waits for the answer any more
                effects += self._end_round(replica, now_ns) if replica.reserved else self._give_up(replica, now_ns)
        return effects

    def on_finished(self, body: MigrationFinished, now_ns: int) -> list[Effect]:
        """A sequence that moved is of another epoch: its new instance makes a replica of its own."""
        if body.outcome is not MigrationOutcome.MOVED:
            return []
        effects: list[Effect] = []
        for replica in [each for each in self if each.sequence == body.sequence]:
            effects += self._drop(replica, now_ns)
        return effects

    def abandon(self, now_ns: int) -> list[Effect]:
        """This process ends: nothing renews the replicas any more."""
        effects: list[Effect] = []
        for replica in list(self):
            effects += [*self._end_round(replica, now_ns), *self._drop(replica, now_ns)]
        return effects

    def check(self) -> None:
        for instance in {each.source for each in self}:
            group = self.of(instance)
            assert len(group) <= self._config.per_instance_max
            assert len({each.sequence for each in group}) == len(group), "a sequence has two replicas"
            assert sum(each.step is not ReplicaStep.IDLE for each in group) <= 1, "one round at a time"
