"""The judge: says how likely an answer is right.

Owns: questions that wait for a model's answer over HTTP.

| message in | change | messages out |
|---|---|---|
| JudgeAnswer(confidence, verifier) | | AnswerJudged |
| JudgeAnswer(llm) with opinions | | AnswerJudged |
| JudgeAnswer(external, llm) | waits for the model | AskModel; AnswerJudged at once where the verifier vetoes |
| ModelAnswered, AskingFailed | waits no longer | AnswerJudged, the least score of all choices |
| TimerFired(heartbeat) | | ServicePresence, next timer |
| StopRequested | | AnswerJudged without a score for what waits, ServicePresence(LEAVING), Stop |

The verifier runs before every kind and scores 0 where it vetoes. Alone it vetoes only: other answers get the asker's
own confidence back.

Invariants: each question is answered exactly once; waiting questions are bounded.

Overload: beyond WAITING_MAX questions are answered at once without a score; the asker then goes by confidence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from millrace.actor.effects import Effect, Reply, StartTimer, Stop, Subscribe
from millrace.contracts.catalog import Role
from millrace.contracts.judge import AnswerJudged, JudgeAnswer
from millrace.contracts.local import StopRequested, TimerFired
from millrace.contracts.message import Message
from millrace.contracts.subjects import Subjects
from millrace.judging.calibration import IsotonicCurve
from millrace.judging.confidence import ConfidenceModel
from millrace.membership import Heartbeat

from services.judge.config import JudgeConfig
from services.judge.effects import AskingFailed, AskModel, ModelAnswered
from services.judge.kinds.confidence import judge_confidence
from services.judge.kinds.external import external_body, external_verdict
from services.judge.kinds.llm import judge_opinions, llm_body, llm_verdict
from services.judge.kinds.verdict import Verdict
from services.judge.kinds.verifier import veto
from services.judge.metrics import JudgeMetrics

#: How often the judge says that it is there.
HEARTBEAT_NS = 1_000_000_000

#: Judges share the work; the name is fixed so that replicas need no configuration.
QUEUE_GROUP = "judge"

#: Questions that wait for a model. At two seconds each this is 128 questions per second; some 100 KB each.
WAITING_MAX = 256

#: Choices of one question that a model is asked about.
CHOICES_MAX = 16

ACCEPTS = (JudgeAnswer,)


class WaitingQuestion(msgspec.Struct, frozen=True):
    """A question that a model is asked about."""

    question: JudgeAnswer
    reply_to: str
    asked_ns: int


class JudgeActor:
    """Answers JudgeAnswer; any number of them may run.

    Args:
        judges: Confidence judges by served model.
        curve: Calibration of the LLM judge; None for none.
    """

    def __init__(
        self,
        config: JudgeConfig,
        *,
        incarnation: int,
        judges: Mapping[str, ConfidenceModel],
        curve: IsotonicCurve | None,
        metrics: JudgeMetrics,
    ) -> None:
        self.name = config.name
        self.metrics = metrics
        self._remotes = {"external": config.external, "llm": config.llm}
        self._judges = judges
        self._curve = curve
        self._subjects = Subjects(config.bus.cluster)
        self._heartbeat = Heartbeat(subjects=self._subjects, role=Role.JUDGE, name=config.name, incarnation=incarnation)
        self._waiting: dict[int, WaitingQuestion] = {}
        self._asked = 0

    def start(self, now_ns: int) -> list[Effect]:
        """Subscribes to questions in the queue group and begins the heartbeat."""
        subscribe = Subscribe(subject=f"{self._subjects.prefix}.judge.*", queue_group=QUEUE_GROUP)
        return [subscribe, *self._tick(now_ns)]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        """See the table above."""
        match message.body:
            case JudgeAnswer() as body:
                return self._on_question(body, message.reply_to, now_ns)
            case ModelAnswered() as body:
                return self._on_answer(body, now_ns)
            case AskingFailed() as body:
                return self._on_failure(body, now_ns)
            case TimerFired():
                return self._tick(now_ns)
            case StopRequested():
                return self._on_stop(now_ns)
            case _:
                return []

    def _on_question(self, body: JudgeAnswer, reply_to: str, now_ns: int) -> list[Effect]:
        if not reply_to:
            return []
        asked = WaitingQuestion(body, reply_to, now_ns)
        if fault := veto(body):
            return [self._said(asked, Verdict(0.0, fault), now_ns, kind="verifier", result="vetoed")]
        match body.kind:
            case "confidence":
                return [self._said(asked, judge_confidence(body, self._judges), now_ns)]
            case "verifier":
                return [self._said(asked, Verdict(body.confidence, "nothing speaks against the answer"), now_ns)]
            case "llm" if body.opinions:
                return [self._said(asked, judge_opinions(body, self._curve_of(body.model)), now_ns)]
            case "external" | "llm":
                return self._ask(asked, now_ns)
            case kind:
                verdict = Verdict(None, f"no judge of kind {kind[:40]!r}")
                return [self._said(asked, verdict, now_ns, kind="none", result="refused")]

    def _ask(self, asked: WaitingQuestion, now_ns: int) -> list[Effect]:
        body = asked.question
        remote = self._remotes[body.kind]
        refusal = "this judge has no URL for it" if not remote.url else ""
        refusal = refusal or ("no answer was given" if not body.answer else "")
        refusal = refusal or (f"over {CHOICES_MAX} choices" if len(body.answer) > CHOICES_MAX else "")
        refusal = refusal or (f"{WAITING_MAX} questions wait already" if len(self._waiting) >= WAITING_MAX else "")
        if refusal:
            return [self._said(asked, Verdict(None, refusal), now_ns, result="refused")]
        make = external_body if body.kind == "external" else llm_body
        bodies = [msgspec.json.encode(make(body, answer, model=remote.model)) for answer in body.answer]
        self._asked += 1
        self._waiting[self._asked] = asked
        self.metrics.waiting = len(self._waiting)
        return [AskModel(correlation=self._asked, kind=body.kind, bodies=bodies)]

    def _on_answer(self, body: ModelAnswered, now_ns: int) -> list[Effect]:
        asked = self._taken(body.correlation)
        if asked is None:
            return []
        verdicts = [self._read(asked.question, payload) for payload in body.payloads]
        mute = next((verdict for verdict in verdicts if verdict.score is None), None)
        told = mute or min(verdicts, key=lambda verdict: verdict.score or 0.0, default=Verdict(None, "no answer came"))
        return [self._said(asked, told, now_ns)]

    def _read(self, question: JudgeAnswer, payload: bytes) -> Verdict:
        if question.kind == "external":
            return external_verdict(payload)
        return llm_verdict(payload, self._curve_of(question.model))

    def _curve_of(self, model: str) -> IsotonicCurve | None:
        """Calibration of verdicts about a model's answers."""
        return self._remotes["llm"].curves.get(model, self._curve)

    def _on_failure(self, body: AskingFailed, now_ns: int) -> list[Effect]:
        asked = self._taken(body.correlation)
        if asked is None:
            return []
        verdict = Verdict(None, f"the judge model did not answer: {body.detail}")
        return [self._said(asked, verdict, now_ns, result=body.why)]

    def _taken(self, correlation: int) -> WaitingQuestion | None:
        asked = self._waiting.pop(correlation, None)
        self.metrics.waiting = len(self._waiting)
        return asked

    def _said(
        self, asked: WaitingQuestion, verdict: Verdict, now_ns: int, *, kind: str = "", result: str = ""
    ) -> Reply:
        question = asked.question
        kind = kind or question.kind
        self.metrics.judged[kind, result or ("unscored" if verdict.score is None else "scored")] += 1
        self.metrics.seconds.observe(max(0, now_ns - asked.asked_ns))
        told = AnswerJudged(
            request=question.request,
            score=verdict.score,
            kind=kind,
            reason=verdict.reason,
            wall_us=max(0, now_ns - asked.asked_ns) / 1_000,
        )
        return Reply(to=asked.reply_to, body=told, request=question.request)

    def _on_stop(self, now_ns: int) -> list[Effect]:
        waiting, self._waiting = list(self._waiting.values()), {}
        said = [self._said(asked, Verdict(None, "the judge stops"), now_ns, result="refused") for asked in waiting]
        return [*said, self._heartbeat.leaving(now_ns), Stop(reason="asked to stop")]

    def _tick(self, now_ns: int) -> list[Effect]:
        timer = StartTimer(name="heartbeat", at_ns=now_ns + HEARTBEAT_NS)
        return [self._heartbeat.presence(now_ns), timer]

    def snapshot(self) -> dict[str, Any]:
        """Number of waiting questions, and counts of judged ones."""
        return {
            "name": self.name,
            "judges": sorted(self._judges),
            "waiting": len(self._waiting),
            "judged": {f"{kind} {result}": count for (kind, result), count in sorted(self.metrics.judged.items())},
        }

    def check_invariants(self) -> None:
        """Assert that the waiting questions are bounded."""
        assert len(self._waiting) <= WAITING_MAX
