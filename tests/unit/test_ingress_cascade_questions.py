"""A judging model of the cluster is asked as a child call of the request whose answer it judges."""

from __future__ import annotations

from typing import Any

import pytest
from millrace.actor.effects import RecordSpan
from millrace.actor.errors import ConfigError
from millrace.cli.explain_spans import explained_by_spans
from millrace.cli.explain_text import told
from millrace.contracts.cascade import CascadeTier
from millrace.contracts.ingress import FinishReason, TokenLogprobs
from millrace.contracts.judge import AnswerJudged, JudgeAnswer
from millrace.contracts.local import RequestFailure, StopRequested
from millrace.contracts.observers import RequestFinished
from millrace.contracts.worker import CancelSequence, RefusalReason, SequenceRefused, SubmitSequence
from millrace.judging.question import judging_question
from millrace.telemetry.spans import span_line
from millrace.telemetry.tracecontext import parse_traceparent

from services.ingress.api.cascade_reports import usage_object
from services.ingress.calls.messages import (
    CallAbandoned,
    CompleteCall,
    KeyLimits,
    QuestionTokenized,
    TokenizeQuestion,
    Usage,
)
from services.ingress.cascade.plans import CascadePlans
from services.ingress.config import CascadeConfig
from tests.unit.cascade_core import CASCADE, ONE, CascadeBench, cascade_plan, logprob
from tests.unit.ingress_core import chunk

JUDGE = "verdict"
QUESTION = [5, 6, 7, 8]


class QuestionBench(CascadeBench):
    """A cascade whose answers ``verdict`` judges."""

    def __init__(self, *thresholds: float, **cascade: Any) -> None:
        super().__init__(*thresholds, judge="llm", judge_model=JUDGE, **cascade)

    def question(self, *prompts: list[int]) -> TokenizeQuestion:
        """The HTTP side tokenises the newest question; returns it."""
        asked = self.made(TokenizeQuestion)[-1]
        ids = list(prompts) or [QUESTION] * len(asked.texts)
        self.send(QuestionTokenized(correlation=asked.correlation, model=asked.model, prompts=ids))
        return asked

    def verdict(self, *, choice: int = 0) -> None:
        """The judge's engine answers with one token."""
        asked = [s for s in self.submissions() if str(getattr(s.body, "sequence", "")).endswith(f"~j1.{choice}")]
        request = asked[-1]
        assert isinstance(request.body, SubmitSequence)
        self.accept(request)
        likeliest = TokenLogprobs(token_ids=[24, 24, 13], logprobs=[-0.1, -0.1, -2.4], rank=1)
        body = request.body
        end = chunk("y", epoch=body.epoch, sequence=body.sequence, finish=FinishReason.LENGTH, logprobs=[likeliest])
        self.tokens(f"w-{JUDGE}", end)

    def judged(self, score: float | None) -> None:
        """The judge makes a score of it."""
        question = self.sent(JudgeAnswer)[-1]
        answer = AnswerJudged(request=question.request, score=score, kind="llm")
        self.reply(self.asked(JudgeAnswer)[-1], answer)

    def child(self) -> RequestFinished:
        return next(body for body in self.outcomes() if body.request.endswith("~j1"))


def _answered(*thresholds: float, **fields: Any) -> QuestionBench:
    bench = QuestionBench(*(thresholds or (70.0, 0.0)))
    bench.ask(**fields)
    bench.answer("ab$", logprob(60))
    return bench


def test_the_question_is_a_child_call_and_its_verdict_makes_the_score():
    bench = _answered(key="k", priority=3)
    asked = bench.question()
    assert (asked.model, asked.texts) == (JUDGE, [judging_question("bcd", "ab")])
    submitted = bench.submissions()[-1].body
    assert isinstance(submitted, SubmitSequence)
    assert (submitted.sequence, submitted.prompt_token_ids, submitted.priority) == ("r~j1.0", QUESTION, 3)
    assert (submitted.sampling.max_tokens, submitted.sampling.logprobs) == (1, 20)
    assert submitted.expected_output_tokens == 1
    bench.verdict()
    (body,) = bench.sent(JudgeAnswer)
    assert body.kind == "llm"
    assert [value for _, value in body.opinions[0]] == pytest.approx([-0.1, -2.4])
    assert not bench.made(CompleteCall)
    bench.judged(90.0)
    report = bench.report()
    assert (report.model, report.score, report.reason) == ("small", 90.0, "score")
    assert bench.metrics.judgements.counts == {(CASCADE, "answered"): 1}


def test_a_low_verdict_sends_the_request_on():
    bench = _answered()
    bench.question()
    bench.verdict()
    bench.judged(10.0)
    assert bench.attempts()[-1] == ("r~2.0", "w-middle")


def test_books_charge_the_question_to_its_parent():
    limits = KeyLimits(tokens_per_minute=1000)
    bench = _answered(key="k", limits=limits)
    bench.question()
    bench.verdict()
    bench.judged(90.0)
    child, parent = bench.child(), bench.outcomes()[-1]
    assert (child.parent, child.model, child.key, child.outcome) == ("r", JUDGE, "k", "completed")
    assert (child.prompt_tokens, child.output_tokens) == (4, [1])
    (attempt,) = parent.attempts
    assert attempt.question_model == JUDGE
    assert (attempt.question, attempt.question_prompt_tokens, attempt.question_output_tokens) == ("r~j1", 4, 1)
    (report,) = bench.report().attempts
    assert (report.judge_model, report.judge_usage) == (JUDGE, Usage(4, 1))
    asked = usage_object(report.usage, bench.report())["cascade"]["judgements"]  # type: ignore[index]
    assert [(one["model"], one["total_tokens"]) for one in asked] == [(JUDGE, 5)]
    # 3 tokens of the prompt, 3 of the answer, 4 + 1 of the question.
    (use,) = bench.actor.state.admission._keys.values()
    assert use.tokens._level == pytest.approx(1000 - 3 - 3 - 5, abs=1)
    assert bench.actor.state.admission.calls_open == 0
    assert not bench.actor.state.calls


def test_explain_tells_who_was_asked_about_an_answer():
    bench = QuestionBench(70.0, 0.0)
    bench.ask(traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    bench.answer("ab$", logprob(60))
    bench.question()
    bench.verdict()
    bench.judged(90.0)
    lines = [span_line(e, service="ingress", instance="i", actor="i") for e in bench.made(RecordSpan)]
    said = told(explained_by_spans([line for line in lines if line is not None]))
    assert "  verdict was asked about it (r~j1, 4 prompt and 1 output tokens)" in said
    assert any("score 90 by llm" in line for line in said)


def test_the_trace_of_a_question_is_a_child_of_its_attempts():
    bench = QuestionBench(70.0, 0.0)
    bench.ask(traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    bench.answer("ab$", logprob(60))
    attempt = bench.actor.state.parents["r"].attempt
    bench.question()
    (call,) = bench.actor.state.calls.values()
    (own, above) = (parse_traceparent(call.call.traceparent), parse_traceparent(attempt.span))
    assert own is not None
    assert above is not None
    assert (own.trace_id, call.call.parent_span_id) == (above.trace_id, above.span_id)
    assert own.span_id != above.span_id


def test_every_choice_is_asked_about_in_one_call():
    bench = QuestionBench(70.0, 0.0)
    bench.ask(n=2)
    bench.answer("ab$", logprob(60), choice=0)
    bench.answer("cd$", logprob(60), choice=1)
    asked = bench.question()
    assert asked.texts == [judging_question("bcd", "ab"), judging_question("bcd", "cd")]
    bench.verdict(choice=0)
    assert not bench.asked(JudgeAnswer)
    bench.verdict(choice=1)
    assert len(bench.sent(JudgeAnswer)[-1].opinions) == 2


def test_the_question_dies_with_its_client():
    bench = _answered()
    bench.question()
    bench.accept()
    bench.send(CallAbandoned(request="r", reason="client_gone"))
    assert [body.sequence for body in bench.sent(CancelSequence)] == ["r~j1.0"]
    assert (bench.child().outcome, bench.outcomes()[-1].outcome) == ("cancelled", "cancelled")
    assert not bench.actor.state.calls
    assert not bench.actor.state.pending


def test_a_client_that_leaves_while_the_question_is_tokenised_has_none_asked():
    bench = _answered()
    bench.send(CallAbandoned(request="r", reason="client_gone"))
    bench.question()
    assert [name for name, _ in bench.attempts()] == ["r~1.0"]
    assert not bench.actor.state.pending


def test_a_stop_delivers_what_is_being_judged_and_cancels_the_question():
    bench = _answered()
    bench.question()
    bench.accept()
    bench.send(StopRequested(orphaned=True))
    assert bench.report().reason == "interrupted"
    assert not bench.actor.state.calls


@pytest.mark.parametrize("why", ["untokenised", "no instance", "refused", "late", "judge silent", "no verdict"])
def test_confidence_decides_where_no_verdict_comes(why: str):
    bench = QuestionBench(50.0, 0.0)
    bench.ask()
    bench.answer("ab$", logprob(60))
    if why == "no instance":
        bench.lose(f"w-{JUDGE}")
    if why == "untokenised":
        asked = bench.made(TokenizeQuestion)[-1]
        bench.send(QuestionTokenized(correlation=asked.correlation, model=JUDGE, prompts=[]))
    else:
        bench.question()
    if why == "refused":
        body = SequenceRefused(sequence="r~j1.0", epoch=0, reason=RefusalReason.INVALID, detail="no")
        bench.reply(bench.submissions()[-1], body)
    elif why == "late":
        bench.accept()
        bench.pass_time(2.6)
    elif why in ("judge silent", "no verdict"):
        bench.verdict()
        if why == "judge silent":
            bench.fail(bench.asked(JudgeAnswer)[-1], RequestFailure.TIMEOUT)
        else:
            bench.judged(None)
    report = bench.report()
    assert report.model == "small"
    assert report.score == pytest.approx(60)
    result = "unknown" if why == "no verdict" else "unanswered"
    assert bench.metrics.judgements.counts == {(CASCADE, result): 1}
    assert not bench.actor.state.calls


def test_an_answer_that_any_score_delivers_is_asked_about_by_nobody():
    bench = _answered(0.0, 0.0)
    assert bench.report().reason == "score"
    assert not bench.made(TokenizeQuestion)


def test_a_plan_without_a_judging_model_asks_the_judge_itself():
    bench = QuestionBench(70.0, 0.0)
    bench.put(cascade_plan(70.0, 0.0, judge="llm"))
    bench.ask()
    bench.answer("ab$", logprob(60))
    assert not bench.made(TokenizeQuestion)
    assert bench.sent(JudgeAnswer)[0].opinions == []


def test_a_plan_names_the_judging_model_and_readiness_follows_it():
    bench = QuestionBench(70.0, 0.0)
    cascades = bench.actor.state.cascades
    assert cascades.wants(JUDGE, seen=False)
    bench.put(cascade_plan(70.0, 0.0, judge="llm", judge_tier=CascadeTier(model=JUDGE)))
    assert not cascades.wants(JUDGE, seen=True)
    awaited = CascadeTier(model=JUDGE, awaited=True)
    bench.put(cascade_plan(70.0, 0.0, epoch=2, judge="llm", judge_tier=awaited))
    assert cascades.wants(JUDGE, seen=False)
    bench.put(cascade_plan(70.0, 0.0, epoch=3, judge="llm", judge_tier=CascadeTier(model=JUDGE, replicas=ONE)))
    assert cascades.wants(JUDGE, seen=True)


def test_a_judging_model_that_is_not_configured_is_refused():
    with pytest.raises(ConfigError, match="the model nobody is not configured"):
        CascadePlans([CascadeConfig(name=CASCADE, judge="llm", judge_model="nobody")], ["small"])
