"""Kinds of judges: what they score, what they veto, and what gives no score."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace.contracts.judge import JudgeAnswer
from millrace.judging.calibration import IsotonicCurve
from millrace.judging.confidence import ConfidenceModel
from millrace.judging.evidence import ConfidenceFeature

from services.judge.config import RemoteConfig
from services.judge.files import read_curve, read_judges
from services.judge.kinds.confidence import judge_confidence
from services.judge.kinds.external import external_body, external_verdict
from services.judge.kinds.llm import judge_opinions, llm_body, llm_verdict
from services.judge.kinds.verifier import veto

SCHEMA = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'
CURVE = IsotonicCurve((-10.0, 0.0), (0.0, 1.0))
JUDGE = ConfidenceModel(
    model="nano", feature=ConfidenceFeature.SUM, curve=CURVE, answers=100, area=0.9, error=0.02, fingerprint="f"
)


def _question(**fields: Any) -> JudgeAnswer:
    told = {"request": "r~1", "cascade": "c", "tier": 0, "model": "nano", "kind": "verifier", "answer": ["7"]}
    return JudgeAnswer(**(told | fields))


@pytest.mark.parametrize(
    ("structured", "constraint", "answer", "reason"),
    [
        ("json_schema", SCHEMA, '{"n": 3}', ""),
        ("json_schema", SCHEMA, '{"n": "3"}', "breaks its schema at /n"),
        ("json_schema", SCHEMA, '{"n": 3', "no JSON"),
        ("json_schema", "{ not a schema", "anything", ""),
        ("json_object", "", "{}", ""),
        ("json_object", "", "[1]", "no JSON object"),
        ("regex", r"\d{3}-\d{4}", "555-1234", ""),
        ("regex", r"\d{3}-\d{4}", "x555-1234", "does not match"),
        ("regex", r"a|bc", "bc", ""),
        ("regex", r"a|bc", "xbc", "does not match"),
        ("regex", r"(?=look)around", "around", ""),
        ("regex", r"(", "anything", ""),
        ("choice", '["yes", "no"]', "no", ""),
        ("choice", '["yes", "no"]', "maybe", "none of the choices"),
        ("grammar", "root ::= x", "anything", ""),
        ("", "", "anything", ""),
    ],
)
def test_the_verifier_vetoes_what_breaks_its_constraint(
    structured: str, constraint: str, answer: str, reason: str
) -> None:
    said = veto(_question(structured=structured, constraint=constraint, answer=[answer]))
    assert bool(said) == bool(reason)
    assert reason in said


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("It is sunny.", ""),
        ('<tool_call>{"name": "weather", "arguments": {}}</tool_call>', ""),
        ('<tool_call>{"name": "wether", "arguments": {}}</tool_call>', "not offered"),
        ('<tool_call>{"name": "weather", "arg', "does not parse"),
        ("<tool_call>[]</tool_call>", "does not parse"),
        ('<tool_call>{"name": "weather"}</tool_call> <tool_call>{"name": "x"}</tool_call>', "not offered"),
    ],
)
def test_the_verifier_vetoes_tool_calls_that_nobody_can_carry_out(answer: str, reason: str) -> None:
    said = veto(_question(tools=["weather"], answer=[answer]))
    assert bool(said) == bool(reason)
    assert reason in said


def test_one_bad_choice_is_a_veto_that_names_it() -> None:
    said = veto(_question(structured="json_object", answer=["{}", "x"]))
    assert said.startswith("choice 1:")


def test_an_expression_that_would_backtrack_for_ever_is_matched_in_linear_time() -> None:
    assert "does not match" in veto(_question(structured="regex", constraint="(a+)+b", answer=["a" * 50_000]))


def test_deep_nesting_is_no_crash() -> None:
    assert veto(_question(structured="json_object", answer=["[" * 100_000])) != ""


@given(st.text(max_size=200), st.sampled_from(["json_schema", "json_object", "regex", "choice", "grammar", ""]))
def test_no_answer_and_no_constraint_crashes_the_verifier(text: str, structured: str) -> None:
    veto(_question(structured=structured, constraint=text, answer=[text], tools=["t"]))


def test_confidence_scores_by_the_judge_of_the_model_and_the_least_choice_counts() -> None:
    verdict = judge_confidence(_question(kind="confidence", logprobs=[[-1.0, -1.0], [-4.0, -1.0]]), {"nano": JUDGE})
    assert verdict.score == pytest.approx(50.0)


@pytest.mark.parametrize("told", [None, 61.0])
def test_without_a_judge_of_that_model_the_askers_confidence_is_given_back(told: float | None) -> None:
    assert judge_confidence(_question(kind="confidence", confidence=told, logprobs=[[-1.0]]), {}).score == told


def test_a_choice_without_usable_log_probabilities_gives_no_score() -> None:
    question = _question(kind="confidence", logprobs=[[-1.0], [math.nan]])
    assert judge_confidence(question, {"nano": JUDGE}).score is None


def _completion(content: Any, **more: Any) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": content}, **more}]}).encode()


@pytest.mark.parametrize(("content", "score"), [("87", 87), (" 87.5\n", 87.5), ("87/100", 87), ("100.", 100), ("0", 0)])
def test_the_external_judge_grades_by_one_number(content: str, score: float) -> None:
    assert external_verdict(_completion(content)).score == score


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
    verdict = external_verdict(payload)
    assert verdict.score is None
    assert reason in verdict.reason


def _yes_no(*pairs: tuple[str, float]) -> bytes:
    top = [{"token": token, "logprob": logprob} for token, logprob in pairs]
    return _completion("yes", logprobs={"content": [{"token": "yes", "logprob": -0.1, "top_logprobs": top}]})


def test_the_llm_judge_scores_by_the_share_of_yes() -> None:
    payload = _yes_no((" Yes", math.log(0.3)), ("yes", math.log(0.3)), ("no", math.log(0.2)), ("x", math.log(0.2)))
    assert llm_verdict(payload, None).score == pytest.approx(75.0)
    assert llm_verdict(payload, IsotonicCurve((0.0, 0.75, 1.0), (0.0, 0.2, 1.0))).score == pytest.approx(20.0)


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
    verdict = llm_verdict(payload, None)
    assert verdict.score is None
    assert reason in verdict.reason


def test_opinions_that_ingress_has_asked_for_are_scored_alike_and_the_least_choice_counts() -> None:
    sure, unsure = [("yes", math.log(0.9)), ("no", math.log(0.1))], [(" Yes", math.log(0.3)), ("no", math.log(0.3))]
    told = _question(kind="llm", answer=["7", "8"], opinions=[sure, unsure])
    assert judge_opinions(told, None).score == pytest.approx(50.0)
    assert judge_opinions(told, IsotonicCurve((0.0, 0.5, 1.0), (0.0, 0.2, 1.0))).score == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("opinions", "reason"),
    [
        ([[("yes", -0.1)]], "did not say of each choice"),
        ([[("yes", -0.1)], []], "neither yes nor no"),
        ([[("maybe", -0.1)], [("yes", -0.1)]], "neither yes nor no"),
        ([[("yes", math.nan)], [("yes", -0.1)]], "neither yes nor no"),
    ],
)
def test_opinions_that_say_nothing_give_no_score(opinions: list[list[tuple[str, float]]], reason: str) -> None:
    verdict = judge_opinions(_question(kind="llm", answer=["7", "8"], opinions=opinions), None)
    assert verdict.score is None
    assert reason in verdict.reason


def test_questions_hold_prompt_and_answer_and_ask_for_few_tokens() -> None:
    question = _question(prompt="Add 3 and 4.")
    for body in (external_body(question, "7", model="j"), llm_body(question, "7", model="j")):
        text = body["messages"][-1]["content"]
        assert "Add 3 and 4." in text
        assert "Answer:\n7" in text
        assert body["max_tokens"] <= 8


def test_judges_that_cannot_be_read_are_told_and_left_out(tmp_path: Path) -> None:
    (tmp_path / "torn").write_text("{")
    judges, problems = read_judges({"a": str(tmp_path / "torn"), "b": str(tmp_path / "missing")})
    assert judges == {}
    assert sorted(problems) == ["a", "b"]


def test_a_curve_of_a_trained_judge_is_read(tmp_path: Path) -> None:
    path = tmp_path / "curve.json"
    path.write_text('{"scores": [0, 1], "probabilities": [0.1, 0.9]}')
    assert read_curve(RemoteConfig(curve_file=str(path))) == IsotonicCurve((0.0, 1.0), (0.1, 0.9))
    assert read_curve(RemoteConfig()) is None
