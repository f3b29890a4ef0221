"""The judge's actor: every question is answered once, whatever the model that it asks does."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from millrace.actor.effects import Effect, Publish, Reply, StartTimer, Stop, Subscribe
from millrace.contracts.judge import AnswerJudged, JudgeAnswer
from millrace.contracts.local import StopRequested, TimerFired
from millrace.contracts.message import Message
from millrace.contracts.status import PresenceState, ServicePresence
from millrace.judging.calibration import IsotonicCurve
from prometheus_client import CollectorRegistry

from services.judge.actor import CHOICES_MAX, WAITING_MAX, JudgeActor
from services.judge.config import JudgeConfig, RemoteConfig
from services.judge.effects import AskingFailed, AskModel, ModelAnswered
from services.judge.metrics import JudgeMetrics

REMOTE = RemoteConfig(url="http://127.0.0.1:1/v1", model="grader")


def _actor(config: JudgeConfig | None = None) -> JudgeActor:
    config = config or JudgeConfig(external=REMOTE, llm=REMOTE)
    return JudgeActor(config, incarnation=7, judges={}, curve=None, metrics=JudgeMetrics())


def _ask(judge: JudgeActor, *, now_ns: int = 0, reply_to: str = "_INBOX.x", **fields: Any) -> list[Effect]:
    told = {"request": "r~1", "cascade": "c", "tier": 0, "model": "nano", "kind": "external", "answer": ["7"]}
    effects = judge.handle(Message(JudgeAnswer(**(told | fields)), reply_to=reply_to), now_ns)
    judge.check_invariants()
    return effects


def _said(effects: list[Effect]) -> AnswerJudged:
    (reply,) = effects
    assert isinstance(reply, Reply)
    assert reply.to == "_INBOX.x"
    assert isinstance(reply.body, AnswerJudged)
    return reply.body


def _asked(effects: list[Effect]) -> AskModel:
    (ask,) = effects
    assert isinstance(ask, AskModel)
    return ask


def _grade(text: str) -> bytes:
    return json.dumps({"choices": [{"message": {"content": text}}]}).encode()


def test_it_shares_questions_and_says_that_it_is_there() -> None:
    subscribe, presence, timer = _actor().start(5)
    assert subscribe == Subscribe(subject="mr.local.judge.*", queue_group="judge")
    assert isinstance(presence, Publish)
    assert isinstance(timer, StartTimer)
    again = _actor().handle(Message(TimerFired(name="heartbeat")), 6)
    assert [type(effect) for effect in again] == [Publish, StartTimer]


def test_an_external_grade_is_the_score() -> None:
    judge = _actor()
    ask = _asked(_ask(judge))
    assert json.loads(ask.bodies[0])["model"] == "grader"
    body = ModelAnswered(correlation=ask.correlation, payloads=[_grade("64")])
    said = _said(judge.handle(Message(body), 3_000_000))
    assert (said.request, said.score, said.kind, said.wall_us) == ("r~1", 64.0, "external", 3_000.0)


def test_of_several_choices_the_least_grade_counts() -> None:
    judge = _actor()
    ask = _asked(_ask(judge, answer=["7", "8"]))
    body = ModelAnswered(correlation=ask.correlation, payloads=[_grade("64"), _grade("12")])
    assert _said(judge.handle(Message(body), 1)).score == 12.0


@pytest.mark.parametrize("text", ["very good", "NaN", ""])
def test_one_grade_that_is_no_number_gives_no_score(text: str) -> None:
    judge = _actor()
    ask = _asked(_ask(judge, answer=["7", "8"]))
    body = ModelAnswered(correlation=ask.correlation, payloads=[_grade("64"), _grade(text)])
    assert _said(judge.handle(Message(body), 1)).score is None
    assert judge.metrics.judged["external", "unscored"] == 1


@pytest.mark.parametrize("why", ["timeout", "status", "unreachable"])
def test_a_model_that_does_not_answer_gives_no_score_and_is_counted(why: str) -> None:
    judge = _actor()
    ask = _asked(_ask(judge))
    said = _said(judge.handle(Message(AskingFailed(correlation=ask.correlation, why=why, detail="d")), 1))
    assert said.score is None
    assert "d" in said.reason
    assert judge.metrics.judged["external", why] == 1


def test_an_answer_that_comes_twice_is_said_once() -> None:
    judge = _actor()
    ask = _asked(_ask(judge))
    body = ModelAnswered(correlation=ask.correlation, payloads=[_grade("64")])
    assert len(judge.handle(Message(body), 1)) == 1
    assert judge.handle(Message(body), 2) == []
    assert judge.handle(Message(AskingFailed(correlation=ask.correlation, why="timeout", detail="")), 3) == []


def test_an_opinion_that_comes_along_is_scored_at_once() -> None:
    effects = _ask(_actor(JudgeConfig()), kind="llm", answer=["7"], opinions=[[("yes", -0.2), ("no", -1.8)]])
    assert not [effect for effect in effects if isinstance(effect, AskModel)]
    assert _said(effects).score == pytest.approx(83.2, abs=0.1)


def test_each_models_answers_are_scored_by_their_own_curve() -> None:
    own = IsotonicCurve((0.0, 1.0), (0.0, 0.5))
    judge = _actor(JudgeConfig(llm=RemoteConfig(curves={"nano": own})))
    for model, score in (("nano", 40.0), ("mini", 80.0)):
        opinion = [("yes", math.log(0.8)), ("no", math.log(0.2))]
        effects = _ask(judge, kind="llm", model=model, answer=["7"], opinions=[opinion])
        assert _said(effects).score == pytest.approx(score)


def test_a_veto_asks_nobody_and_scores_nothing() -> None:
    said = _said(_ask(_actor(), structured="json_object", answer=["no"]))
    assert (said.score, said.kind) == (0.0, "verifier")


@pytest.mark.parametrize("told", [None, 55.0])
def test_a_verifier_without_a_veto_gives_the_askers_confidence_back(told: float | None) -> None:
    assert _said(_ask(_actor(), kind="verifier", confidence=told)).score == told


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kind": "oracle"}, "no judge of kind"),
        ({"answer": []}, "no answer"),
        ({"answer": ["x"] * (CHOICES_MAX + 1)}, "choices"),
    ],
)
def test_a_question_that_cannot_be_judged_is_answered_without_a_score(fields: dict[str, Any], reason: str) -> None:
    said = _said(_ask(_actor(), **fields))
    assert said.score is None
    assert reason in said.reason


def test_a_kind_without_a_url_gives_no_score() -> None:
    assert "no URL" in _said(_ask(_actor(JudgeConfig()))).reason


def test_beyond_the_bound_questions_are_answered_at_once() -> None:
    judge = _actor()
    for _ in range(WAITING_MAX):
        _asked(_ask(judge))
    said = _said(_ask(judge))
    assert said.score is None
    assert "wait already" in said.reason


def test_a_question_that_nobody_waits_for_is_dropped() -> None:
    assert _ask(_actor(), reply_to="") == []


def test_what_waits_at_the_end_is_answered_without_a_score() -> None:
    judge = _actor()
    _ask(judge)
    reply, leaving, stop = judge.handle(Message(StopRequested()), 9)
    assert _said([reply]).score is None
    assert isinstance(leaving, Publish)
    assert isinstance(leaving.body, ServicePresence)
    assert leaving.body.state is PresenceState.LEAVING
    assert isinstance(stop, Stop)


def test_figures_are_shown() -> None:
    registry = CollectorRegistry()
    judge = JudgeActor(JudgeConfig(), incarnation=7, judges={}, curve=None, metrics=JudgeMetrics(registry))
    _ask(judge, kind="verifier")
    labels = {"kind": "verifier", "result": "unscored"}
    assert registry.get_sample_value("millrace_judge_answers_total", labels) == 1
