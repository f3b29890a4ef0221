"""The predictor: says what would happen if an instance took a request.

Owns, for each instance that it serves: the last status snapshot with the state rolled forward from it, the placements
that no snapshot shows yet, and what its steps cost (calibration); for each model, what outcomes say of lengths.

| message in | change | messages out |
|---|---|---|
| KeyChanged(instance) | instance known, changed, restarted or gone | Subscribe / Unsubscribe unless it serves all |
| StatusSnapshot | newest state; its last step calibrates | |
| InstanceSummary | sign of life, draining or not | |
| ServicePresence(DEAD, worker) | incarnations until then are dead | |
| DecisionMade | its sequences are on their way to the chosen instance, and nowhere else | |
| MigrationFinished(moved) | its sequence's blocks are cached where it came to, too | |
| RequestFinished | its sequences are on no way any more, their blocks stay; learnt from; predictions judged | |
| PredictLatency | state rolled forward to now | LatencyPrediction, NoPrediction or ErrorReply |
| AskedTogether | the same of each instance | AnsweredTogether |
| TimerFired(heartbeat) | placements nobody showed in time are dropped | ServicePresence, next timer |
| StopRequested | | ServicePresence(LEAVING), Stop |

Invariants: every question with a reply subject gets exactly one answer; a sequence is on its way to one instance at
most; an answer comes from a snapshot of the instance's present incarnation.

Replicas: any number may serve the same instance. Each hears the same events and answers by itself (queue group
``predictor``); they share nothing, and their answers differ by what is under way.

Overload: a question costs one forecast (bounded by ``forecast``'s own bounds); late answers are the asker's to drop.
State is bounded (``membership.members_max``, MODELS_MAX, PLACEMENTS_MAX); what is beyond is ignored, counted,
logged once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

from millrace.actor.effects import Effect, Log, Reply, Stop, Subscribe, Unsubscribe, WatchKeys
from millrace.contracts.catalog import Role
from millrace.contracts.local import AnsweredTogether, AskedTogether, KeyChanged, StopRequested, TimerFired
from millrace.contracts.message import Body, ErrorReply, Message
from millrace.contracts.migration import MigrationFinished, MigrationOutcome
from millrace.contracts.observers import DecisionMade, RequestFinished
from millrace.contracts.predictor import LatencyPrediction, NoPrediction, NoPredictionReason, PredictLatency
from millrace.contracts.sequences import SequenceId
from millrace.contracts.status import InstanceRecord, InstanceSummary, ServicePresence, StatusSnapshot
from millrace.contracts.subjects import Subjects, subject_token
from millrace.enginemodel.registered import scheduler_parameters
from millrace.enginemodel.step_time_models import StepTimeModel
from millrace.membership.heartbeat import Heartbeat
from millrace.membership.member import Member, MemberState
from millrace.membership.members import Membership

from services.predictor.answering import Answers, candidate, fault
from services.predictor.calibration import Calibration, Kins
from services.predictor.config import PredictorConfig
from services.predictor.metrics import PredictorMetrics
from services.predictor.outcomes import OutcomeStatistics
from services.predictor.placements import PLACEMENTS_MAX, Placements
from services.predictor.prefixes import Prefixes, end_request
from services.predictor.state import LENGTH_MAX, Instance, PlacedSequence

#: Predictors of the same instance share its questions.
QUEUE_GROUP = "predictor"

#: Models whose lengths and corrections are learnt.
MODELS_MAX = 256

#: Different things that are said in the log, each once.
SAID_MAX = 1_000

ACCEPTS: tuple[type[Body], ...] = (
    AskedTogether,
    DecisionMade,
    InstanceSummary,
    MigrationFinished,
    PredictLatency,
    RequestFinished,
    ServicePresence,
    StatusSnapshot,
)


class PredictorActor:
    """Forecasts for some or all instances of a cluster."""

    def __init__(
        self,
        *,
        config: PredictorConfig,
        incarnation: int,
        step_times: Mapping[str, StepTimeModel],
        metrics: PredictorMetrics,
    ) -> None:
        self.name = config.name
        self.metrics = metrics
        metrics.instances = self._gauges
        self._config = config
        self._subjects = Subjects(config.bus.cluster)
        self._heartbeat = Heartbeat(
            subjects=self._subjects, role=Role.PREDICTOR, name=config.name, incarnation=incarnation
        )
        self._transit_ns = config.transit_us * 1_000
        self._answers = Answers(metrics, transit_ns=self._transit_ns)
        self._members = Membership.of(config.membership)
        self._instances: dict[str, Instance] = {}
        self._kins = Kins(step_times)
        self._statistics: dict[str, OutcomeStatistics] = {}
        self._placements = Placements(metrics.placements.add)
        self._said: set[str] = set()
        self._now_ns = 0  # of the last message, for gauges

    def start(self, now_ns: int) -> list[Effect]:
        everywhere = ["decision.*", "migration.*.*.*", "outcome.*", f"presence.{Role.WORKER}.*"]
        if self._serves_all():
            everywhere += ["status.*.*", "summary.*.*"]
        effects: list[Effect] = [WatchKeys(bucket="instance")]
        effects += [Subscribe(subject=f"{self._subjects.prefix}.{subject}") for subject in everywhere]
        if self._serves_all():
            effects.append(Subscribe(subject=f"{self._subjects.prefix}.predict.*.*", queue_group=QUEUE_GROUP))
        return [*effects, *self._heartbeat.beat(now_ns)]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        self._now_ns = now_ns
        match message.body:
            case AskedTogether(body=PredictLatency() as body, subjects=subjects):
                return self._on_question(message, body, subjects, now_ns)
            case PredictLatency() as body:
                return self._on_question(message, body, (message.subject,), now_ns)
            case DecisionMade() as body:
                return self._on_decision(body, now_ns)
            case RequestFinished() as body:
                return self._on_outcome(body, now_ns)
            case StatusSnapshot() as body:
                return self._on_snapshot(body, now_ns)
            case MigrationFinished(outcome=MigrationOutcome.MOVED) as body:
                return self._on_move(body, now_ns)
            case InstanceSummary() as body:
                return self._on_summary(body, now_ns)
            case KeyChanged(bucket="instance") as body:
                return self._on_instance(body, now_ns)
            case ServicePresence() as body:
                return self._on_presence(body)
            case TimerFired() as body:
                self._placements.expire(now_ns)
                return self._heartbeat.beat(now_ns, body)
            case StopRequested():
                return [self._heartbeat.leaving(now_ns), Stop(reason="asked to stop")]
            case _:
                return []

    # instances

    def _on_instance(self, body: KeyChanged, now_ns: int) -> list[Effect]:
        token, record = subject_token(body.key), body.value
        if record is None:
            return self._lose(token)
        if not isinstance(record, InstanceRecord):
            return self._say("warning", "key_of_wrong_type", key=body.key)
        if token != subject_token(record.instance or "-"):
            return self._say("warning", "key_of_other_instance", key=body.key, instance=record.instance)
        if not self._serves(record.instance):
            return []
        change = self._members.on_record(body.key, record, now_ns)
        known = self._instances.get(token)
        if known is not None and (known.record == record or not change.accepted):
            return []
        if change.member is None:
            return self._say("error", "bound_reached", what="instances", max=self._config.membership.members_max)
        effects = [] if known is not None else self._listen(token, Subscribe)
        if known is not None:
            self._placements.drop(known)
        return effects + self._register(change.member, record, known)

    def _register(self, member: Member, record: InstanceRecord, known: Instance | None) -> list[Effect]:
        token = member.token
        try:
            parameters = scheduler_parameters(record, prefix_caching=self._config.prefixes)
            kin = self._kins.of(record, parameters)
        except ValueError as error:
            self._instances.pop(token, None)
            return self._say("error", "instance_unusable", instance=record.instance, error=str(error))
        calibration = Calibration(kin, enabled=self._config.calibrate)
        instance = Instance(record=record, parameters=parameters, calibration=calibration, member=member)
        if known is not None and known.calibration.kin is kin:
            instance.calibration = known.calibration  # the same engine, started again
        self._instances[token] = instance
        if self._kins.knows(record.step_time):
            return []
        self.metrics.missing_sets += 1
        return self._say("warning", "step_time_unknown", step_time=record.step_time, model=record.model)

    def _lose(self, token: str) -> list[Effect]:
        self._members.forget(token)
        instance = self._instances.pop(token, None)
        if instance is None:
            return []
        self._placements.drop(instance)
        return self._listen(token, Unsubscribe)

    def _listen(self, token: str, act: type[Subscribe] | type[Unsubscribe]) -> list[Effect]:
        """Subjects of one instance, where it is not covered by the wildcards."""
        if self._serves_all():
            return []
        prefix = self._subjects.prefix
        asked = f"{prefix}.predict.*.{token}"
        question = Subscribe(subject=asked, queue_group=QUEUE_GROUP) if act is Subscribe else Unsubscribe(subject=asked)
        return [act(subject=f"{prefix}.status.*.{token}"), act(subject=f"{prefix}.summary.*.{token}"), question]

    def _on_snapshot(self, body: StatusSnapshot, now_ns: int) -> list[Effect]:
        instance = self._instances.get(subject_token(body.instance)) if body.instance else None
        if instance is None:
            self.metrics.snapshots.add("unregistered")
            return []
        refusal = instance.refusal(body, now_ns)
        if refusal is not None:
            self.metrics.snapshots.add(refusal)
            expected = refusal in ("old", "other_incarnation")  # a late message, or a record that is under way
            return [] if expected else self._say("warning", "snapshot_refused", instance=body.instance, why=refusal)
        self._members.observe(body.instance, body.incarnation, now_ns)
        instance.take(body, now_ns)
        self.metrics.snapshots.add("taken")
        return []

    def _on_summary(self, body: InstanceSummary, now_ns: int) -> list[Effect]:
        instance = self._instances.get(subject_token(body.instance)) if body.instance else None
        if instance is not None and self._members.on_summary(body, now_ns).restarted:
            self._end_incarnation(instance)
        return []

    def _on_presence(self, body: ServicePresence) -> list[Effect]:
        instance = self._instances.get(subject_token(body.name)) if body.name else None
        moved = instance is not None and self._members.on_presence(body).moved
        if instance is not None and moved and instance.member.state in (MemberState.DEAD, MemberState.GONE):
            self._end_incarnation(instance)
        return []

    def _end_incarnation(self, instance: Instance) -> None:
        """Drop what the ended process had."""
        self._placements.drop(instance)
        instance.lose()

    # placements and outcomes

    def _on_decision(self, body: DecisionMade, now_ns: int) -> list[Effect]:
        for sequence in body.sequences:
            self._placements.end(sequence, "moved")
        instance = self._instances.get(subject_token(body.chosen)) if body.chosen else None
        if instance is None:
            return []
        lengths = (body.prompt_tokens, body.output_tokens, body.max_tokens)
        if not (0 < lengths[0] < LENGTH_MAX and 0 <= lengths[1] < LENGTH_MAX and 0 < lengths[2] < LENGTH_MAX):
            self.metrics.placements.add("unusable")
            return []
        default = self._statistics_of(body.model).default_output_tokens
        at_ns = min(body.at_ns or now_ns, now_ns) + self._transit_ns
        for sequence in body.sequences:
            if len(instance.placements) >= PLACEMENTS_MAX:
                self.metrics.placements.add("full")
                return self._say("error", "bound_reached", what="placements", max=PLACEMENTS_MAX)
            hits = instance.prefixes.place(sequence, body, at_ns=at_ns)
            placed = candidate(*lengths, expected=body.expected_output_tokens, default=default, cached=hits)
            self._placements.add(instance, sequence, PlacedSequence(placed, at_ns))
        return []

    def _on_outcome(self, body: RequestFinished, now_ns: int) -> list[Effect]:
        for name in body.instances:
            if (instance := self._instances.get(subject_token(name or "-"))) is not None:
                end_request(instance.prefixes, body, self.metrics)
        for index in range(len(body.output_tokens)):
            self._placements.end(str(SequenceId(body.request, index)), "ended")
        statistics = self._statistics_of(body.model)
        statistics.observe_lengths(body)
        stayed = not body.continuations and not body.migrations
        here = len(body.instances) == 1 and subject_token(body.instances[0] or "-") in self._instances
        if body.outcome == "completed" and stayed and body.placed_ns and here:
            statistics.observe_times(body, now_ns)
        return []

    def _on_move(self, body: MigrationFinished, now_ns: int) -> list[Effect]:
        for name, take in ((body.source, Prefixes.depart), (body.target, Prefixes.arrive)):
            if (instance := self._instances.get(subject_token(name or "-"))) is not None:
                take(instance.prefixes, body, at_ns=now_ns)
        return []

    # questions

    def _on_question(
        self, message: Message, body: PredictLatency, subjects: tuple[str, ...], now_ns: int
    ) -> list[Effect]:
        """Answer for the instance of each subject."""
        if not message.reply_to:
            return []
        begun_ns = self.metrics.clock()
        answers: list[LatencyPrediction | NoPrediction | ErrorReply]
        if wrong := fault(body):
            answers = [ErrorReply(reason="malformed", detail=wrong)] * len(subjects)
        else:
            statistics = self._statistics_of(body.model)
            answers = [self._answer(body, subject, statistics, now_ns) for subject in subjects]
        for answer in answers:
            self.metrics.predictions.add("predicted" if isinstance(answer, LatencyPrediction) else answer.reason)
        self.metrics.handling.observe(self.metrics.clock() - begun_ns)
        reply = AnsweredTogether(bodies=answers) if len(subjects) > 1 else answers[0]
        return [Reply(to=message.reply_to, body=reply, request=body.request, traceparent=message.traceparent)]

    def _answer(
        self, body: PredictLatency, subject: str, statistics: OutcomeStatistics, now_ns: int
    ) -> LatencyPrediction | NoPrediction:
        # One question may go to several instances at once: then only its subject says which one is meant here.
        token = subject_token(body.instance) if body.instance else subject.rpartition(".")[2]
        instance = self._instances.get(token)
        if instance is None:
            reason = NoPredictionReason.NO_SNAPSHOT
            detail = "no such instance is registered"
            return NoPrediction(request=body.request, instance=body.instance or token, reason=reason, detail=detail)
        self._members.state(instance.member, now_ns)
        return self._answers.answer(body, instance, statistics, now_ns)

    # small things

    def _serves_all(self) -> bool:
        return self._config.shards == 1

    def _serves(self, instance: str) -> bool:
        config = self._config
        return crc32(instance.encode()) % config.shards == config.shard

    def _statistics_of(self, model: str) -> OutcomeStatistics:
        known = self._statistics.get(model)
        if known is None:
            known = OutcomeStatistics(self._config)
            if len(self._statistics) < MODELS_MAX:
                self._statistics[model] = known
        return known

    def _say(self, level: str, event: str, **fields: Any) -> list[Effect]:
        """One log line for each different thing."""
        what = f"{event} {sorted(fields.items())}"
        if what in self._said or len(self._said) >= SAID_MAX:
            return []
        self._said.add(what)
        return [Log(level=level, event=event, fields=fields)]

    def _gauges(self) -> list[tuple[str, float, int]]:
        now_ns = self._now_ns
        return [
            (each.record.instance, each.calibration.scale(now_ns), each.calibration.kin.fits)
            for each in self._instances.values()
        ]

    def snapshot(self) -> dict[str, Any]:
        instances = {token: each.facts() for token, each in sorted(self._instances.items())}
        return {"name": self.name, "instances": instances, "predictions": self.metrics.predictions.plain()}

    def check_invariants(self) -> None:
        """Bounds hold; each placement is at one instance, and known to be there."""
        self._members.check_invariants()
        assert len(self._instances) <= len(self._members)
        assert len(self._statistics) <= MODELS_MAX
        for instance in self._instances.values():
            instance.prefixes.check_invariants()
        self._placements.check(self._instances.values())
