"""The judge's actor: every question is answered once, whatever the model that it asks does."""

import json
from random import Random
from typing import Any

import msgspec
import pytest
from millrace.actor.deps import ActorDeps
from millrace.actor.effects import Effect, Publish, StartTimer, Stop, Subscribe
from millrace.actor.errors import ConfigError
from millrace.contracts.judge import AnswerJudged, JudgeAnswer
from millrace.contracts.local import StopRequested, TimerFired
from millrace.contracts.message import Message
from millrace.contracts.status import PresenceState
from prometheus_client import CollectorRegistry

from services.judge.actor import CHOICES_MAX, WAITING_MAX, JudgeActor
from services.judge.build import build
from services.judge.config import JudgeConfig
from services.judge.effects import AskingFailed, AskModel, ModelAnswered

CONFIG = JudgeConfig(judge="external", model="grader")


def _actor(registry: CollectorRegistry | None = None) -> JudgeActor:
    return build(CONFIG, ActorDeps(incarnation=7, rng=Random(1), registry=registry))


def _ask(judge: JudgeActor, *, now_ns: int = 0, reply_to: str = "_INBOX.x", **fields: Any) -> list[Effect]:
    told = {"request": "r~1", "cascade": "c", "model": "nano", "answer": ["7"]}
    effects = judge.handle(Message(JudgeAnswer(**(told | fields)), reply_to=reply_to), now_ns)
    judge.check_invariants()
    return effects


def _said(effects: list[Effect]) -> AnswerJudged:
    (reply,) = effects
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


def test_of_several_choices_the_least_grade_counts() -> None:
    registry = CollectorRegistry()
    judge = _actor(registry)
    ask = _asked(_ask(judge, answer=["7", "8"]))
    assert json.loads(ask.bodies[0])["model"] == "grader"
    body = ModelAnswered(correlation=ask.correlation, payloads=[_grade("64"), _grade("12")])
    said = _said(judge.handle(Message(body), 3_000_000))
    assert (said.request, said.score, said.kind, said.wall_us) == ("r~1", 12.0, "external", 3_000.0)
    assert registry.get_sample_value("millrace_judge_answers_total", {"result": "scored"}) == 1


def test_one_grade_that_is_no_number_gives_no_score() -> None:
    judge = _actor()
    ask = _asked(_ask(judge, answer=["7", "8"]))
    body = ModelAnswered(correlation=ask.correlation, payloads=[_grade("64"), _grade("NaN")])
    assert _said(judge.handle(Message(body), 1)).score is None
    assert judge.metrics.judged.counts["unscored",] == 1


@pytest.mark.parametrize("why", ["timeout", "status", "unreachable"])
def test_a_model_that_does_not_answer_gives_no_score_and_is_counted(why: str) -> None:
    judge = _actor()
    ask = _asked(_ask(judge))
    said = _said(judge.handle(Message(AskingFailed(correlation=ask.correlation, why=why, detail="d")), 1))
    assert said.score is None
    assert "d" in said.reason
    assert judge.metrics.judged.counts[why,] == 1


def test_an_answer_that_comes_twice_is_said_once() -> None:
    judge = _actor()
    ask = _asked(_ask(judge))
    body = ModelAnswered(correlation=ask.correlation, payloads=[_grade("64")])
    assert len(judge.handle(Message(body), 1)) == 1
    assert judge.handle(Message(body), 2) == []
    assert judge.handle(Message(AskingFailed(correlation=ask.correlation, why="timeout", detail="")), 3) == []


@pytest.mark.parametrize(
    ("fields", "reason"), [({"answer": []}, "no answer"), ({"answer": ["x"] * (CHOICES_MAX + 1)}, "choices")]
)
def test_a_question_that_cannot_be_judged_is_answered_without_a_score(fields: dict[str, Any], reason: str) -> None:
    said = _said(_ask(_actor(), **fields))
    assert said.score is None
    assert reason in said.reason


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
    assert leaving.body.state is PresenceState.LEAVING
    assert isinstance(stop, Stop)


@pytest.mark.parametrize("fields", [{"judge": "oracle"}, {"parameters": {"x": 1}}])
def test_a_judge_that_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        build(msgspec.structs.replace(CONFIG, **fields), ActorDeps(incarnation=7, rng=Random(1)))
