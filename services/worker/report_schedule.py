"""Timing of a worker's reports: status, summary, presence and registration, each within its interval."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from millrace.actor.effects import DeleteKey, Effect, Publish, PutKey, StartTimer
from millrace.actor.engine import EngineLiveness
from millrace.contracts.catalog import Role
from millrace.contracts.status import EngineDescription, EngineSnapshot, InstanceSummary, StatusSnapshot
from millrace.contracts.subjects import Subjects
from millrace.lengths.remaining import RemainingLengths
from millrace.membership.heartbeat import Heartbeat

from services.worker.config import WorkerLimits
from services.worker.identity import Identity, empty_snapshot, record
from services.worker.indicators import load_indicators
from services.worker.state import Held

_MS = 1_000_000
REPORT = "report"


#: Half of the time for which the longest step is remembered.
_WINDOW_NS = 30_000_000_000


class LongestStep:
    """Longest step of the last 30 to 60 s, kept as two windows."""

    __slots__ = ("_before", "_begin_ns", "_now")

    def __init__(self) -> None:
        self._begin_ns = 0
        self._before = self._now = 0

    def observe(self, duration_ns: int, at_ns: int) -> None:
        """Take the duration of a step that ended."""
        self._shift(at_ns)
        self._now = max(self._now, duration_ns)

    def longest_ns(self, now_ns: int) -> int:
        """The longest one; 0 where none ended."""
        self._shift(now_ns)
        return max(self._before, self._now)

    def _shift(self, now_ns: int) -> None:
        elapsed = now_ns - self._begin_ns
        if elapsed >= _WINDOW_NS:
            self._before = self._now if elapsed < 2 * _WINDOW_NS else 0
            self._now, self._begin_ns = 0, now_ns


def _age(since_ns: int, now_ns: int) -> int:
    return max(1, now_ns - since_ns) if since_ns else 0


class Reporter:
    """Owns the last engine snapshot and the times of the last reports. Publishes nothing while the bus is down.

    Attributes:
        snapshot: The engine's state as last seen.
        liveness: Signs that the engine hangs; kept by the actor.
        bus_up: Kept by the actor.
        remaining: What is expected of the sequences now.
        moves: Tells how many sequences have KV that leaves, and how many KV that arrives; kept by the actor.
    """

    def __init__(
        self, *, identity: Identity, info: EngineDescription, subjects: Subjects, limits: WorkerLimits
    ) -> None:
        self.identity = identity
        self._sender: dict[str, Any] = {name: getattr(identity, name) for name in ("instance", "incarnation", "model")}
        self.info = info
        self.snapshot: EngineSnapshot = empty_snapshot(info, 0)
        self.liveness = EngineLiveness(silent_since_ns=0, step_since_ns=0)
        self.bus_up = True
        self._steps = LongestStep()
        self.draining = False
        self.remaining = RemainingLengths()
        self.moves: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._status_subject = subjects.status(identity.model, identity.instance)
        self._summary_subject = subjects.summary(identity.model, identity.instance)
        self._heartbeat = Heartbeat(
            subjects=subjects, role=Role.WORKER, name=identity.instance, incarnation=identity.incarnation
        )
        self._limits = limits
        self._unseen: dict[str, Held] = {}
        self._status_ns = 0
        self._status_stale = False
        self._summary_ns = 0

    def submitted(self, held: Held) -> None:
        """A sequence that the next snapshots may not show yet: it counts as waiting until one is younger."""
        self._unseen[held.sequence] = held

    def gone(self, held: Held) -> None:
        """A sequence that no snapshot needs to show any more."""
        self._unseen.pop(held.sequence, None)

    def take(self, snapshot: EngineSnapshot) -> None:
        """Replaces the snapshot, unless it is older than the one at hand."""
        if snapshot.at_ns < self.snapshot.at_ns:
            return
        self.snapshot = snapshot
        self._steps.observe(snapshot.step_duration_ns, snapshot.at_ns)
        self._status_stale = True
        if self._unseen:
            self._unseen = {name: held for name, held in self._unseen.items() if held.received_ns > snapshot.at_ns}

    def if_due(self, now_ns: int, output_tokens: int) -> list[Effect]:
        """After a change: status and summary where their least intervals allow."""
        if not self.bus_up:
            return []
        effects: list[Effect] = []
        if self._status_stale and now_ns - self._status_ns >= self._limits.status_interval_min_ms * _MS:
            effects.append(self._status(now_ns))
        if now_ns - self._summary_ns >= self._limits.summary_interval_min_ms * _MS:
            effects.append(self.summary(now_ns, output_tokens))
        return effects

    def on_timer(self, now_ns: int, output_tokens: int, due_ns: int = 0) -> list[Effect]:
        """At least one of each per greatest interval; the timer follows the older of the two.

        Args:
            due_ns: The time for which the timer was started, which the next ones keep in step with; 0 for now.
        """
        interval, due_ns = self._limits.report_interval_max_ms * _MS, due_ns or now_ns
        effects: list[Effect] = []
        if self.bus_up and due_ns - self._status_ns >= interval:
            effects.append(self._status(now_ns))
            self._status_ns = due_ns
        if self.bus_up and due_ns - self._summary_ns >= interval:
            effects.append(self.summary(now_ns, output_tokens))
            self._summary_ns = due_ns
        due = min(self._status_ns, self._summary_ns) + interval
        return [*effects, StartTimer(name=REPORT, at_ns=due if due > now_ns else now_ns + interval)]

    def _status(self, now_ns: int) -> Publish:
        self._status_ns, self._status_stale = now_ns, False
        fields = msgspec.structs.asdict(self.snapshot)
        fields |= {name: self.remaining.reported(fields[name]) for name in ("running", "waiting")}
        return Publish(subject=self._status_subject, body=StatusSnapshot(**self._sender | fields))

    def summary(self, now_ns: int, output_tokens: int) -> Publish:
        """The summary as of now, whatever the interval. Sequences submitted after the snapshot count as waiting."""
        self._summary_ns = now_ns
        snapshot, info, later = self.snapshot, self.info, list(self._unseen.values())
        body = InstanceSummary(
            **self._sender,
            at_ns=now_ns,
            running=len(snapshot.running),
            waiting=len(snapshot.waiting) + len(later),
            running_tokens=sum(entry.prompt_tokens + entry.output_tokens for entry in snapshot.running),
            waiting_prefill_tokens=sum(
                entry.prompt_tokens + entry.output_tokens - entry.computed_tokens for entry in snapshot.waiting
            )
            + sum(held.to_compute for held in later),
            blocks_free=snapshot.blocks_free,
            blocks_total=snapshot.blocks_total,
            block_size=info.block_size,
            preemptions=snapshot.preemptions,
            output_tokens_total=output_tokens,
            draining=self.draining,
            engine_silent_ns=_age(self.liveness.silent_since_ns, now_ns),
            step_age_ns=_age(self.liveness.step_since_ns, now_ns),
            step_longest_ns=self._steps.longest_ns(now_ns),
            indicators=load_indicators(
                snapshot,
                later,
                now_ns=now_ns,
                block_size=info.block_size,
                groups=info.kv.groups if info.kv is not None else (),
                moves=self.moves(),
            ),
            token_budget=snapshot.token_budget,
        )
        return Publish(subject=self._summary_subject, body=body)

    def left(self, held: Held, *, ended: bool = False) -> None:
        """Learns from a sequence that ends or goes. ``ended``: by itself, not at a bound or for another instance."""
        self.remaining.survival.learn(held.base_index + len(held.token_ids), entered=held.entered, ended=ended)

    def expected(self, sequence: str) -> int | None:
        """Length now expected of a running sequence's whole output, tokens; None where nothing is known."""
        entries = [entry for entry in self.snapshot.running if entry.sequence == sequence]
        return self.remaining.reported(entries)[0].expected_output_tokens if entries else None

    def presence(self, now_ns: int) -> Publish:
        """The heartbeat; LEAVING once the worker drains."""
        return self._heartbeat.leaving(now_ns) if self.draining else self._heartbeat.presence(now_ns)

    def register(self) -> list[Effect]:
        if not self.bus_up:
            return []
        value = record(self.identity, self.info)
        return [PutKey(bucket="instance", key=self.identity.instance, value=value, correlation="register")]

    def unregister(self) -> Effect:
        return DeleteKey(bucket="instance", key=self.identity.instance, correlation="leave")

    def check(self, held: Iterable[Held]) -> None:
        known = {id(entry) for entry in held}
        assert all(id(entry) in known for entry in self._unseen.values()), "unseen but not held"
