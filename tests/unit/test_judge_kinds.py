"""Judges that ship: what they ask, what they read as a score, and what gives none."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from millrace.judging.calibration import IsotonicCurve
from millrace.policies.judges import JUDGES, Judged
from millrace.policies.judges.external import policy as external
from millrace.policies.judges.llm import policy as llm
from millrace.policies.registry import Nothing

ANSWER = Judged("nano", "Add 3 and 4.", "7")


def _completion(content: Any, **more: Any) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": content}, **more}]}).encode()


@pytest.mark.parametrize(("content", "score"), [("87", 87), (" 87.5\n", 87.5), ("87/100", 87), ("100.", 100), ("0", 0)])
def test_the_external_judge_grades_by_one_number(content: str, score: float) -> None:
    assert external.verdict(_completion(content), ANSWER, Nothing()).score == score


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (_completion("good"), "text, not a number"),
        (_completion("between 3 and 5"), "text, not a number"),
        (_completion("NaN"), "text, not a number"),
        (_completion(""), "answered nothing"),
        (_completion(None), "answered nothing"),
        (_completion("-3"), "not within"),
        (_completion("101"), "not within"),
        (_completion("9" * 400), "not within"),
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
    return _completion("yes", logprobs={"content": [{"token": "yes", "logprob": -0.1, "top_logprobs": top}]})


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
        (_completion("yes"), "no log-probabilities"),
        (_completion("yes", logprobs={"content": []}), "answered nothing"),
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
