"""The tagger: says how long an answer is expected to be, and learns from how long it was.

Owns: per served model the length model in force, history by key, task and template, real lengths of repeated prompts,
and the newest outcomes; the answered requests whose end is awaited.

| message in | change | messages out |
|---|---|---|
| TagRequest | remembers its features by request id | LengthTag: stated, model, history or unknown |
| RequestFinished | what was answered here is learnt; the rest is counted | perhaps TrainLengths |
| LengthsLoaded | models and outcomes of earlier runs are taken | log per unreadable file |
| LengthsTrained | a better model takes the place of the one in force | KeepModel, log |
| TrainingFailed, KeepingFailed | counted | log |
| TimerFired(heartbeat) | | ServicePresence, KeepOutcomes, next timer |
| StopRequested | | KeepOutcomes, ServicePresence(LEAVING), Stop |

Invariants: at most one training per model is under way; a model is replaced only by one that its trainer judged better
on held-out outcomes; every table is bounded. Replicas share the questions (queue group) and all hear every outcome:
each learns from the requests that it answered itself.

Overload: each request is answered in constant time (about 0.1 ms); askers carry a deadline and go on without a tag.
"""

from __future__ import annotations

from typing import Any

from millrace.actor.effects import Effect, Log, Reply, Stop, Subscribe
from millrace.contracts.catalog import Role
from millrace.contracts.local import StopRequested, TimerFired
from millrace.contracts.message import Message
from millrace.contracts.observers import RequestFinished
from millrace.contracts.subjects import Subjects, subject_token
from millrace.contracts.tagger import LengthTag, TagRequest
from millrace.lengths.quantile import ModelUnreadable, decode_model
from millrace.lengths.training import TrainingJob
from millrace.membership.heartbeat import Heartbeat

from services.tagger.config import NO_TRAINING, LearningConfig
from services.tagger.effects import (
    KeepingFailed,
    KeepModel,
    KeepOutcomes,
    LengthsLoaded,
    LengthsTrained,
    LoadLengths,
    TrainingFailed,
    TrainLengths,
)
from services.tagger.metrics import TaggerMetrics
from services.tagger.state import PENDING_MAX, SAMPLES_MAX, PendingRequests, ServedLengths

#: Taggers share the work; the name is fixed so that replicas need no configuration.
QUEUE_GROUP = "tagger"

#: Served models that are learnt about; of more nothing is known. Names come from ingresses' configuration.
MODELS_MAX = 64

#: Outcomes that wait for the next heartbeat to be written; beyond it the file has gaps.
UNKEPT_MAX = 10_000

#: Distinct problems that get a log line; beyond it they are only counted.
PROBLEMS_LOGGED_MAX = 100

ACCEPTS = (TagRequest, RequestFinished)


class TaggerActor:
    """Answers TagRequest; any number of them may run.

    Args:
        learning: Whether to load, train and keep; by default none of it.
    """

    def __init__(
        self,
        *,
        name: str,
        cluster: str,
        incarnation: int,
        learning: LearningConfig = NO_TRAINING,
        metrics: TaggerMetrics | None = None,
    ) -> None:
        self.name = name
        self.metrics = metrics or TaggerMetrics()
        self._subjects = Subjects(cluster)
        self._heartbeat = Heartbeat(subjects=self._subjects, role=Role.TAGGER, name=name, incarnation=incarnation)
        self._learning = learning
        self._problems_logged: set[str] = set()
        self._pending = PendingRequests()
        self._served: dict[str, ServedLengths] = {}

    def start(self, now_ns: int) -> list[Effect]:
        loads = self._learning.pretrained or self._learning.directory
        return [
            Subscribe(subject=f"{self._subjects.prefix}.tag.*", queue_group=QUEUE_GROUP),
            Subscribe(subject=f"{self._subjects.prefix}.outcome.*"),
            *([LoadLengths()] if loads else []),
            *self._heartbeat.beat(now_ns),
        ]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        match message.body:
            case TagRequest() as body:
                return self._on_tag_request(message, body)
            case RequestFinished() as body:
                return self._on_outcome(body, now_ns)
            case LengthsLoaded() as body:
                return self._on_loaded(body)
            case LengthsTrained() as body:
                return self._on_trained(body)
            case TrainingFailed() as body:
                return self._on_training_failed(body)
            case KeepingFailed() as body:
                return self._problem(body.model, body.detail)
            case TimerFired() as body:
                return [*self._keep(), *self._heartbeat.beat(now_ns, body)]
            case StopRequested():
                return [*self._keep(), self._heartbeat.leaving(now_ns), Stop(reason="asked to stop")]
            case _:
                return []

    def _on_loaded(self, body: LengthsLoaded) -> list[Effect]:
        """Takes what files hold. What outcomes taught since the start is newer and stays: both are learnt."""
        problems = dict(body.problems)
        for model, payload in body.models.items():
            served = self._of(model)
            try:
                loaded = decode_model(payload)
            except ModelUnreadable as unreadable:
                problems[model] = str(unreadable)
                continue
            if served is not None:
                served.model = loaded
        for token, samples in body.outcomes.items():
            served = self._of(token)
            if served is not None:
                served.take_all(samples)
        return [effect for name, why in problems.items() for effect in self._problem(name, why)]

    def _on_tag_request(self, message: Message, body: TagRequest) -> list[Effect]:
        tag = self._answer(body)
        self.metrics.answers.add(tag.source)
        return [Reply(to=message.reply_to, body=tag, request=body.request)] if message.reply_to else []

    def _answer(self, body: TagRequest) -> LengthTag:
        stated = float(body.max_tokens)
        if 0 < body.max_tokens <= max(body.min_tokens, 1):
            return LengthTag(request=body.request, mean=stated, p50=stated, p90=stated, source="stated")
        served = self._of(body.model)
        if served is None:
            return LengthTag(request=body.request)
        asked = served.answer(body)
        self._pending.add(asked)
        said = asked.said
        if said is None:
            return LengthTag(request=body.request)
        return LengthTag(request=body.request, mean=said.mean, p50=said.p50, p90=said.p90, source=asked.source)

    def _on_outcome(self, body: RequestFinished, now_ns: int) -> list[Effect]:
        asked = self._pending.pop(body.request)
        served = self._of(asked.request.model) if asked is not None else None
        if asked is None or served is None:
            self.metrics.outcomes.add("unmatched")
            return []
        sample = served.learn(asked, body)
        self.metrics.outcomes.add("unusable" if sample is None else "learnt")
        if sample is None:
            return []
        if asked.said is not None:
            for length in sample.lengths:
                self.metrics.judge(asked.source, asked.said, length)
        if self._learning.directory and len(served.unkept) < UNKEPT_MAX:
            served.unkept.append(sample)
        return self._train(asked.request.model, served, now_ns)

    def _train(self, model: str, served: ServedLengths, now_ns: int) -> list[Effect]:
        """Asks for a candidate where enough is new, one at a time."""
        learning = self._learning
        due = 0 < learning.retrain_outcomes <= served.since_training and len(served.samples) >= learning.outcomes_min
        rested = now_ns - served.trained_ns >= learning.retrain_pause_s * 1e9
        if served.training or not due or not rested:
            return []
        served.training = True
        served.since_training = 0
        served.trained_ns = now_ns
        incumbent = served.model.encode() if served.model is not None else b""
        job = TrainingJob(model=model, samples=list(served.samples), incumbent=incumbent, at_ns=now_ns)
        return [TrainLengths(job=job)]

    def _on_trained(self, body: LengthsTrained) -> list[Effect]:
        served = self._served[subject_token(body.model)]
        assert served.training, f"nobody asked for a model of {body.model}"
        served.training = False
        result = body.result
        self.metrics.trainings.add("replaced" if result.accepted else "kept")
        fields = {"model": body.model, "replaced": result.accepted, "reason": result.reason}
        log = Log(level="info", event="length_model_trained", fields=fields)
        if not result.accepted:
            return [log]
        served.model = decode_model(result.model)
        keep = [KeepModel(model=body.model, payload=result.model)] if self._learning.directory else []
        return [log, *keep]

    def _on_training_failed(self, body: TrainingFailed) -> list[Effect]:
        self._served[subject_token(body.model)].training = False
        self.metrics.trainings.add("failed")
        return self._problem(body.model, body.detail)

    def _keep(self) -> list[Effect]:
        """Hands outcomes of the last second to their files."""
        effects: list[Effect] = []
        for model, served in self._served.items():
            if served.unkept:
                effects.append(KeepOutcomes(model=model, samples=served.unkept))
                served.unkept = []
        return effects

    def _of(self, model: str) -> ServedLengths | None:
        """State of a served model; None where it is one model too many, or has no name."""
        token = subject_token(model) if model else ""
        served = self._served.get(token)
        if served is None and token and len(self._served) < MODELS_MAX:
            served = self._served[token] = ServedLengths(None)
        return served

    def _problem(self, name: str, why: str) -> list[Effect]:
        """Counts it, and logs it once."""
        self.metrics.file_problems += 1
        if name in self._problems_logged or len(self._problems_logged) >= PROBLEMS_LOGGED_MAX:
            return []
        self._problems_logged.add(name)
        return [Log(level="warning", event="lengths_problem", fields={"name": name, "reason": why[:500]})]

    def snapshot(self) -> dict[str, Any]:
        models = {
            model: {
                "outcomes": served.history.outcomes,
                "samples": len(served.samples),
                "trained_on": served.model.file.samples if served.model is not None else 0,
                "training": served.training,
            }
            for model, served in self._served.items()
        }
        return {"name": self.name, "models": models, "figures": self.metrics.plain()}

    def check_invariants(self) -> None:
        assert len(self._served) <= MODELS_MAX
        assert len(self._pending) <= PENDING_MAX
        assert all(len(served.samples) <= SAMPLES_MAX for served in self._served.values())
