"""The judge: every question is answered once, whatever its model does; and what the judges that ship ask and read."""

import json
import math
from pathlib import Path
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
from millrace.judging.calibration import IsotonicCurve
from millrace.policies.judges import JUDGES, Judged
from millrace.policies.judges.external import policy as external
from millrace.policies.judges.llm import policy as llm
from millrace.policies.registry import Nothing
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


def _grade(content: Any, **more: Any) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": content}, **more}]}).encode()


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


# The judges that ship.


ANSWER = Judged("nano", "Add 3 and 4.", "7")


@pytest.mark.parametrize(("content", "score"), [("87", 87), (" 87.5\n", 87.5), ("87/100", 87), ("100.", 100), ("0", 0)])
def test_the_external_judge_grades_by_one_number(content: str, score: float) -> None:
    assert external.verdict(_grade(content), ANSWER, Nothing()).score == score


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (_grade("good"), "text, not a number"),
        (_grade("between 3 and 5"), "text, not a number"),
        (_grade("NaN"), "text, not a number"),
        (_grade(""), "answered nothing"),
        (_grade(None), "answered nothing"),
        (_grade("-3"), "not within"),
        (_grade("101"), "not within"),
        (_grade("9" * 400), "not within"),
        (b"", "no chat completion"),
        (b'{"choices": []}', "no chat completion"),
        (b"<html>", "no chat completion"),
        (b"[" * 50_000, "no chat completion"),
    ],
)
def test_what_is_no_grade_gives_no_score_and_a_reason(payload: bytes, reason: str) -> None:
    verdict = external.verdict(payload, ANSWER, Nothing())
    assert verdict.score is None
    assert reason in verdict.reason


def _yes_no(*pairs: tuple[str, float]) -> bytes:
    top = [{"token": token, "logprob": logprob} for token, logprob in pairs]
    return _grade("yes", logprobs={"content": [{"token": "yes", "logprob": -0.1, "top_logprobs": top}]})


def test_the_llm_judge_scores_by_the_share_of_yes_and_the_answering_models_curve() -> None:
    payload = _yes_no((" Yes", math.log(0.3)), ("yes", math.log(0.3)), ("no", math.log(0.2)), ("x", math.log(0.2)))
    assert llm.verdict(payload, ANSWER, llm.Parameters()).score == pytest.approx(75.0)
    all_models = IsotonicCurve((0.0, 0.75, 1.0), (0.0, 0.2, 1.0))
    assert llm.verdict(payload, ANSWER, llm.Parameters(curve=all_models)).score == pytest.approx(20.0)
    own = IsotonicCurve((0.0, 1.0), (0.0, 0.5))
    parameters = llm.Parameters(curve=all_models, curves={"nano": own})
    assert llm.verdict(payload, ANSWER, parameters).score == pytest.approx(37.5)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (_yes_no(("maybe", -0.1)), "neither yes nor no"),
        (_yes_no(("yes", 5.0)), "neither yes nor no"),
        (_grade("yes"), "no log-probabilities"),
        (_grade("yes", logprobs={"content": []}), "answered nothing"),
        (b"{}", "no chat completion"),
    ],
)
def test_an_llm_judge_without_usable_tokens_gives_no_score(payload: bytes, reason: str) -> None:
    verdict = llm.verdict(payload, ANSWER, llm.Parameters())
    assert verdict.score is None
    assert reason in verdict.reason


def test_questions_hold_prompt_and_answer_and_ask_for_few_tokens() -> None:
    for judge in JUDGES.shipped():
        body = judge.question(ANSWER, judge.parameters())
        text = body["messages"][-1]["content"]
        assert "Add 3 and 4." in text
        assert "Answer:\n7" in text
        assert body["max_tokens"] <= 8


def test_a_judge_of_ones_own_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "length.py").write_text(
        "from millrace.policies.judges import Verdict\n"
        "def question(answer, parameters):\n    return {'messages': []}\n"
        "def verdict(payload, answer, parameters):\n    return Verdict(float(len(answer.text)))\n"
    )
    judge, parameters = JUDGES.choose(str(tmp_path / "length.py"), {})
    assert (judge.name, judge.verdict(b"", ANSWER, parameters).score) == ("length", 1.0)
