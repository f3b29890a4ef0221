"""A migrator's view of instances: records, the plan's roles, and summaries while it listens to them.

Summaries, snapshots and heartbeats are frequent and migrations are rare, so a migrator subscribes to those of others
only while a migration needs them, and a little longer. It always watches records and plans, and hears the heartbeats of
its own instances. Who has left or died in the meantime sends no summary, so that it is no target.
"""

from __future__ import annotations

from millrace.actor.effects import Effect, Subscribe, Unsubscribe
from millrace.contracts.catalog import Role
from millrace.contracts.local import KeyChanged
from millrace.contracts.observers import CandidateScore
from millrace.contracts.plan import InstanceRole, Plan
from millrace.contracts.status import InstanceRecord, InstanceSummary, ServicePresence
from millrace.contracts.subjects import Subjects, subject_token
from millrace.membership import Member, Membership, MembershipConfig, MemberState
from millrace.policies.migration import Neighbour, TargetQuestion, TargetView, Wish, sifted

_MS = 1_000_000

#: A summary comes at least every 250 ms: after this long each instance that lives was heard.
LISTEN_NS = 300 * _MS

#: Listening goes on for so long after the last need, so that a burst of migrations subscribes once.
LINGER_NS = 10_000 * _MS

#: Blocks promised to a target are counted for this long after the end: until its summaries show them.
PROMISE_NS = 300 * _MS

#: Models whose roles are kept.
MODELS_MAX = 256


#: States in which an instance will take nothing for as long as this process lives.
_LEAVING = (MemberState.DRAINING, MemberState.DEAD, MemberState.GONE)


class MigrationTargets:
    """Instances of the cluster as one migrator sees them."""

    def __init__(self, subjects: Subjects, config: MembershipConfig) -> None:
        self._subjects = subjects
        self._members = Membership.of(config)
        self._roles: dict[str, dict[str, InstanceRole]] = {}
        self._promises: dict[str, tuple[str, int, int]] = {}  # by migration: (target, blocks, until; 0 while open)
        self._listening: dict[str, tuple[int, int]] = {}  # by subject: (since, until)

    # what comes

    def on_key(self, body: KeyChanged, now_ns: int) -> None:
        """A record or a plan."""
        value = body.value
        if body.bucket == "plan":
            if isinstance(value, Plan) and (body.key in self._roles or len(self._roles) < MODELS_MAX):
                self._roles[body.key] = {name: role for stage in value.stages for name, role in stage.roles.items()}
            elif value is None:
                self._roles.pop(body.key, None)
            return
        if isinstance(value, InstanceRecord):
            self._members.on_record(body.key, value, now_ns)
        elif value is None:
            self._members.forget(body.key)

    def on_summary(self, body: InstanceSummary, now_ns: int) -> None:
        """The state of an instance; of one that is not registered it is not kept."""
        member = self._members.find(body.instance)
        if member is not None and member.record is not None:
            self._members.on_summary(body, now_ns)

    def on_presence(self, body: ServicePresence) -> None:
        """A worker that leaves or died takes nothing."""
        self._members.on_presence(body)

    # what is asked

    def record(self, instance: str) -> InstanceRecord | None:
        """The registration of an instance; None where there is none."""
        member = self._members.find(instance)
        return member.record if member is not None else None

    def role(self, instance: str) -> InstanceRole:
        """Role that the plan gives the instance."""
        record = self.record(instance)
        roles = self._roles.get(subject_token(record.model), {}) if record is not None else {}
        return roles.get(instance, InstanceRole.BOTH)

    def has_others(self, instance: str) -> bool:
        """Whether anybody else serves the model, as far as registrations and summaries tell."""
        record = self.record(instance)
        if record is None:
            return False
        return any(
            other.model == record.model and other.instance != instance and member.state not in _LEAVING
            for member, other in self._members.registered()
        )

    def question(self, sequence: str, wish: Wish, now_ns: int, *, handoff: bool) -> TargetQuestion:
        """Question for the target policy."""
        candidates, filtered = self._sifted(wish, now_ns)
        return TargetQuestion(
            sequence=sequence, blocks=wish.blocks or 0, candidates=candidates, handoff=handoff, filtered=filtered
        )

    def _sifted(self, wish: Wish, now_ns: int) -> tuple[tuple[TargetView, ...], tuple[CandidateScore, ...]]:
        self._members.expire(now_ns)
        return sifted(wish, [self._neighbour(member, record, now_ns) for member, record in self._members.registered()])

    def rooms(self, source: str, now_ns: int) -> list[int]:
        """Idle blocks of each instance that could take a sequence, as far as was heard; the most first."""
        record = self.record(source)
        if record is None:
            return []
        candidates, _ = self._sifted(Wish(source=record, blocks=0), now_ns)
        return sorted((target.idle_after(0) for target in candidates), reverse=True)

    def shown(self, source: str, now_ns: int) -> int:
        """Idle blocks of the instance that has most of them, by its summary alone: what this migrator has promised
        comes and goes with its own asking and says nothing of who left. 0 where nobody could take anything.
        """
        record = self.record(source)
        if record is None:
            return 0
        candidates, _ = self._sifted(Wish(source=record, blocks=None), now_ns)
        return max((target.blocks_free for target in candidates), default=0)

    def _neighbour(self, member: Member, record: InstanceRecord, now_ns: int) -> Neighbour:
        """An instance that leaves counts as heard only where its summary says that it drains."""
        summary = member.summary
        heard = summary is not None and member.current_record is not None
        heard = heard and (member.serving or (member.state is MemberState.DRAINING and member.summary_drains))
        promised = [
            blocks
            for target, blocks, until_ns in self._promises.values()
            if target == record.instance and (not until_ns or now_ns < until_ns)
        ]
        return Neighbour(
            record=record,
            summary=summary if heard else None,
            role=self.role(record.instance),
            blocks_promised=sum(promised),
            arriving=len(promised),
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
        """Wants summaries of a model's instances for a while, and to know who leaves meanwhile."""
        summaries = self._listen(f"{self._subjects.prefix}.summary.{subject_token(model)}.*", now_ns)
        return [*summaries, *self._listen(self._subjects.presences(Role.WORKER), now_ns)]

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
            "instances": sorted(member.token for member, _ in self._members.registered()),
            "listening": sorted(self._listening),
            "promised": {m: [t, b] for m, (t, b, _) in sorted(self._promises.items())},
        }
