"""What a migrator knows of instances: records, the plan's roles, and summaries while it listens to them.

Summaries and snapshots are many, migrations are few: both are listened to while somebody needs them, and a little
longer. Records and plans are always watched.
"""

from __future__ import annotations

from millrace.actor.effects import Effect, Subscribe, Unsubscribe
from millrace.contracts.local import KeyChanged
from millrace.contracts.plan import InstanceRole, Plan
from millrace.contracts.status import InstanceRecord, InstanceSummary, PresenceState, ServicePresence
from millrace.contracts.subjects import Subjects, subject_token
from millrace.policies.migration import Neighbour, TargetQuestion, Wish, sifted

_MS = 1_000_000

#: A summary comes at least every 250 ms: after this long each instance that lives was heard.
LISTEN_NS = 300 * _MS

#: Listening goes on for so long after the last need, so that a burst of migrations subscribes once.
LINGER_NS = 10_000 * _MS

#: An instance without a summary for this long takes nothing.
SUSPECT_NS = 1_500 * _MS

#: Blocks promised to a target are counted for this long after the end: until its summaries show them.
PROMISE_NS = 300 * _MS

#: A wish for so many blocks asks who could take a sequence at all, however little room there is.
NO_MATTER = -(10**9)

#: Bounds of the state.
INSTANCES_MAX, MODELS_MAX = 4_096, 256


class Surroundings:
    """Instances of the cluster as one migrator sees them."""

    def __init__(self, subjects: Subjects) -> None:
        self._subjects = subjects
        self._records: dict[str, InstanceRecord] = {}
        self._summaries: dict[str, tuple[int, InstanceSummary]] = {}
        self._roles: dict[str, dict[str, InstanceRole]] = {}
        self._promises: dict[str, tuple[str, int, int]] = {}  # by migration: (target, blocks, until; 0 while open)
        self._listening: dict[str, tuple[int, int]] = {}  # by subject: (since, until)

    # what comes

    def on_key(self, body: KeyChanged) -> None:
        """A record or a plan."""
        value = body.value
        if body.bucket == "plan":
            if isinstance(value, Plan) and (body.key in self._roles or len(self._roles) < MODELS_MAX):
                self._roles[body.key] = {name: role for stage in value.stages for name, role in stage.roles.items()}
            elif value is None:
                self._roles.pop(body.key, None)
            return
        token = subject_token(body.key)
        if isinstance(value, InstanceRecord) and (token in self._records or len(self._records) < INSTANCES_MAX):
            self._records[token] = value
        elif value is None:
            self._records.pop(token, None)
            self._summaries.pop(token, None)

    def on_summary(self, body: InstanceSummary, now_ns: int) -> None:
        """The state of an instance; of one that is not registered it is not kept."""
        token = subject_token(body.instance) if body.instance else ""
        if token in self._records:
            self._summaries[token] = (now_ns, body)

    def on_presence(self, body: ServicePresence) -> None:
        """An instance that died takes nothing."""
        if body.state is not PresenceState.ALIVE and body.name:
            self._summaries.pop(subject_token(body.name), None)

    # what is asked

    def record(self, instance: str) -> InstanceRecord | None:
        """The registration of an instance; None where there is none."""
        return self._records.get(subject_token(instance)) if instance else None

    def role(self, instance: str) -> InstanceRole:
        """What the plan says it does."""
        record = self.record(instance)
        roles = self._roles.get(subject_token(record.model), {}) if record is not None else {}
        return roles.get(instance, InstanceRole.BOTH)

    def has_others(self, instance: str) -> bool:
        """Whether anybody else serves the model, as far as registrations and summaries tell."""
        record = self.record(instance)
        if record is None:
            return False
        others = (r for r in self._records.values() if r.model == record.model and r.instance != instance)
        return any(not self._is_draining(other) for other in others)

    def _is_draining(self, record: InstanceRecord) -> bool:
        heard = self._summaries.get(subject_token(record.instance))
        return heard is not None and heard[1].incarnation == record.incarnation and heard[1].draining

    def question(self, sequence: str, wish: Wish, now_ns: int, *, handoff: bool) -> TargetQuestion:
        """What the target policy is asked."""
        neighbours = [self._neighbour(token, record, now_ns) for token, record in self._records.items()]
        candidates, filtered = sifted(wish, neighbours)
        return TargetQuestion(
            sequence=sequence, blocks=wish.blocks, candidates=candidates, handoff=handoff, filtered=filtered
        )

    def rooms(self, source: str, now_ns: int) -> list[int]:
        """Idle blocks of each instance that could take a sequence, as far as was heard; the most first."""
        record = self.record(source)
        if record is None:
            return []
        candidates = self.question("", Wish(source=record, blocks=0), now_ns, handoff=False).candidates
        return sorted((target.idle_after(0) for target in candidates), reverse=True)

    def shown(self, source: str, now_ns: int) -> int:
        """Idle blocks of the instance that has most of them, by its summary alone: what this migrator has promised
        comes and goes with its own asking and says nothing of who left. -1 where nobody could take anything.
        """
        record = self.record(source)
        if record is None:
            return -1
        candidates = self.question("", Wish(source=record, blocks=NO_MATTER), now_ns, handoff=False).candidates
        return max((target.blocks_free for target in candidates), default=-1)

    def _neighbour(self, token: str, record: InstanceRecord, now_ns: int) -> Neighbour:
        at_ns, summary = self._summaries.get(token, (0, None))
        known = summary is not None and summary.incarnation == record.incarnation and now_ns - at_ns < SUSPECT_NS
        promised = sum(
            blocks
            for target, blocks, until_ns in self._promises.values()
            if target == record.instance and (not until_ns or now_ns < until_ns)
        )
        return Neighbour(
            record=record,
            summary=summary if known else None,
            role=self.role(record.instance),
            blocks_promised=promised,
        )

    # promises

    def promise(self, migration: str, target: str, blocks: int) -> None:
        """These blocks are asked for there."""
        self._promises[migration] = (target, blocks, 0)

    def kept(self, migration: str, now_ns: int) -> None:
        """The migration has ended; its target's summaries will soon show what became of it."""
        if migration in self._promises:
            target, blocks, _ = self._promises[migration]
            self._promises[migration] = (target, blocks, now_ns + PROMISE_NS)

    def broken(self, migration: str) -> None:
        """That target has refused."""
        self._promises.pop(migration, None)

    # listening

    def listen_to_model(self, model: str, now_ns: int) -> list[Effect]:
        """Wants summaries of a model's instances for a while."""
        return self._listen(f"{self._subjects.prefix}.summary.{subject_token(model)}.*", now_ns)

    def listen_to_status(self, instance: str, now_ns: int) -> list[Effect]:
        """Wants an instance's snapshots for a while."""
        return self._listen(f"{self._subjects.prefix}.status.*.{subject_token(instance)}", now_ns)

    def heard_since(self, model: str) -> int | None:
        """Since when summaries of that model are listened to; None where they are not."""
        known = self._listening.get(f"{self._subjects.prefix}.summary.{subject_token(model)}.*")
        return known[0] if known is not None else None

    def _listen(self, subject: str, now_ns: int) -> list[Effect]:
        since, _ = self._listening.get(subject, (now_ns, 0))
        new = subject not in self._listening
        self._listening[subject] = (since, now_ns + LINGER_NS)
        return [Subscribe(subject=subject)] if new else []

    def tick(self, now_ns: int) -> list[Effect]:
        """Forgets what nobody needs any more."""
        for migration, (_, _, until_ns) in list(self._promises.items()):
            if until_ns and now_ns >= until_ns:
                del self._promises[migration]
        ended = [subject for subject, (_, until_ns) in self._listening.items() if now_ns >= until_ns]
        for subject in ended:
            del self._listening[subject]
        return [Unsubscribe(subject=subject) for subject in ended]

    def plain(self) -> dict[str, object]:
        """For people and checkers."""
        return {
            "instances": sorted(self._records),
            "listening": sorted(self._listening),
            "promised": {m: [t, b] for m, (t, b, _) in sorted(self._promises.items())},
        }
