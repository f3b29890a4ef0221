"""The judge: asks a model how likely an answer is right, and answers with a score.

Owns: questions that wait for the model.

| message in | change | messages out |
|---|---|---|
| JudgeAnswer | waits for the model | AskModel; AnswerJudged without a score where it cannot be asked |
| ModelAnswered, AskingFailed | waits no longer | AnswerJudged: the least score of all choices, or none |
| TimerFired(heartbeat) | | ServicePresence, next timer |
| StopRequested | | AnswerJudged without a score for what waits, ServicePresence(LEAVING), Stop |

Invariants: each question is answered exactly once; waiting questions are bounded.
Overload: beyond WAITING_MAX questions are answered at once without a score; the asker then goes by confidence.
"""

from __future__ import annotations

from typing import Any

import msgspec
from millrace.actor.effects import Effect, Reply, Stop, Subscribe
from millrace.contracts.catalog import Role
from millrace.contracts.judge import AnswerJudged, JudgeAnswer
from millrace.contracts.local import StopRequested, TimerFired
from millrace.contracts.message import Message
from millrace.contracts.subjects import Subjects
from millrace.membership.heartbeat import Heartbeat
from millrace.policies.judges import Judged, JudgePolicy, Verdict

from services.judge.config import JudgeConfig
from services.judge.effects import AskingFailed, AskModel, ModelAnswered
from services.judge.metrics import JudgeMetrics

#: Judges share the work; the name is fixed so that replicas need no configuration.
QUEUE_GROUP = "judge"

#: Questions that wait for the model. At two seconds each this is 128 questions per second; some 100 KB each.
WAITING_MAX = 256

#: Choices of one question that the model is asked about.
CHOICES_MAX = 16

ACCEPTS = (JudgeAnswer,)


class WaitingQuestion(msgspec.Struct, frozen=True):
    """A question that the model is asked."""

    question: JudgeAnswer
    reply_to: str
    asked_ns: int


class JudgeActor:
    """Answers JudgeAnswer; any number of them may run."""

    def __init__(
        self, config: JudgeConfig, *, incarnation: int, policy: JudgePolicy, parameters: Any, metrics: JudgeMetrics
    ) -> None:
        self.name = config.name
        self.metrics = metrics
        self._model = config.model
        self._policy = policy
        self._parameters = parameters
        self._subjects = Subjects(config.bus.cluster)
        self._heartbeat = Heartbeat(subjects=self._subjects, role=Role.JUDGE, name=config.name, incarnation=incarnation)
        self._waiting: dict[int, WaitingQuestion] = {}
        self._asked = 0

    def start(self, now_ns: int) -> list[Effect]:
        subscribe = Subscribe(subject=f"{self._subjects.prefix}.judge.*", queue_group=QUEUE_GROUP)
        return [subscribe, *self._heartbeat.beat(now_ns)]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        match message.body:
            case JudgeAnswer() as body:
                return self._on_question(body, message.reply_to, now_ns)
            case ModelAnswered() as body:
                return self._on_answer(body, now_ns)
            case AskingFailed() as body:
                return self._on_failure(body, now_ns)
            case TimerFired() as body:
                return self._heartbeat.beat(now_ns, body)
            case StopRequested():
                return self._on_stop(now_ns)
            case _:
                return []

    def _on_question(self, body: JudgeAnswer, reply_to: str, now_ns: int) -> list[Effect]:
        if not reply_to:
            return []
        asked = WaitingQuestion(body, reply_to, now_ns)
        refusal = "no answer was given" if not body.answer else ""
        refusal = refusal or (f"over {CHOICES_MAX} choices" if len(body.answer) > CHOICES_MAX else "")
        refusal = refusal or (f"{WAITING_MAX} questions wait already" if len(self._waiting) >= WAITING_MAX else "")
        if refusal:
            return [self._judged(asked, Verdict(None, refusal), now_ns, result="refused")]
        questions = [self._policy.question(each, self._parameters) for each in _choices(body)]
        bodies = [msgspec.json.encode(each | {"model": self._model}) for each in questions]
        self._asked += 1
        self._waiting[self._asked] = asked
        self.metrics.waiting = len(self._waiting)
        return [AskModel(correlation=self._asked, bodies=bodies)]

    def _on_answer(self, body: ModelAnswered, now_ns: int) -> list[Effect]:
        asked = self._taken(body.correlation)
        if asked is None:
            return []
        pairs = zip(body.payloads, _choices(asked.question), strict=True)
        verdicts = [self._policy.verdict(payload, choice, self._parameters) for payload, choice in pairs]
        unscored = next((verdict for verdict in verdicts if verdict.score is None), None)
        return [self._judged(asked, unscored or min(verdicts, key=lambda each: each.score or 0.0), now_ns)]

    def _on_failure(self, body: AskingFailed, now_ns: int) -> list[Effect]:
        asked = self._taken(body.correlation)
        if asked is None:
            return []
        verdict = Verdict(None, f"the judge model did not answer: {body.detail}")
        return [self._judged(asked, verdict, now_ns, result=body.why)]

    def _taken(self, correlation: int) -> WaitingQuestion | None:
        asked = self._waiting.pop(correlation, None)
        self.metrics.waiting = len(self._waiting)
        return asked

    def _judged(self, asked: WaitingQuestion, verdict: Verdict, now_ns: int, *, result: str = "") -> Reply:
        took_ns = max(0, now_ns - asked.asked_ns)
        self.metrics.judged.add(result or ("unscored" if verdict.score is None else "scored"))
        self.metrics.seconds.observe(took_ns)
        told = AnswerJudged(
            request=asked.question.request,
            score=verdict.score,
            kind=self._policy.name,
            reason=verdict.reason,
            wall_us=took_ns / 1_000,
        )
        return Reply(to=asked.reply_to, body=told, request=asked.question.request)

    def _on_stop(self, now_ns: int) -> list[Effect]:
        waiting, self._waiting = list(self._waiting.values()), {}
        verdict = Verdict(None, "the judge stops")
        judged = [self._judged(asked, verdict, now_ns, result="refused") for asked in waiting]
        return [*judged, self._heartbeat.leaving(now_ns), Stop(reason="asked to stop")]

    def snapshot(self) -> dict[str, Any]:
        return {"name": self.name, "waiting": len(self._waiting), "judged": self.metrics.judged.plain()}

    def check_invariants(self) -> None:
        assert len(self._waiting) <= WAITING_MAX


def _choices(body: JudgeAnswer) -> list[Judged]:
    return [Judged(body.model, body.prompt, text) for text in body.answer]
