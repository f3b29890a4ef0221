"""Cascades in ingress's core: attempts, scores, escalation, delivery, failures."""

import math
from typing import Any

import msgspec
import pytest
from millrace.actor.effects import Publish
from millrace.actor.errors import ConfigError
from millrace.contracts.judge import AnswerJudged, JudgeAnswer
from millrace.contracts.local import RequestFailure, StopRequested
from millrace.contracts.message import ErrorReply
from millrace.contracts.worker import CancelSequence, RefusalReason, Sampling, SequenceRefused
from millrace.judging.calibration import IsotonicCurve
from millrace.judging.confidence import ConfidenceModel
from millrace.judging.evidence import ConfidenceFeature

from services.ingress.calls.messages import (
    AcceptCall,
    CallAbandoned,
    CallSubmitted,
    CascadeOptions,
    CompleteCall,
    DeliverDeltas,
    FailCall,
    KeyLimits,
    RefusalKind,
    RefuseCall,
)
from services.ingress.cascade.entry import enter
from services.ingress.cascade.plans import SCORES_MIN, CascadePlans, EscalationBudget
from services.ingress.config import CascadeConfig
from tests.unit.cascade_core import CASCADE, CascadeBench, cascade_plan, logprob
from tests.unit.ingress_core import SECOND, make_call

#: The sum of log-probabilities -2 and below is wrong for sure, 0 is right for sure.
BY_SUM = ConfidenceModel(
    model="small",
    feature=ConfidenceFeature.SUM,
    curve=IsotonicCurve((-2.0, 0.0), (0.0, 1.0)),
    answers=100,
    area=0.9,
    error=0.02,
)


# Accepting and escalating.


def test_an_answer_below_the_threshold_is_thrown_away_and_the_next_tier_asked():
    bench = CascadeBench(70.0, 0.0)
    bench.ask()
    bench.answer("abc$", logprob(60))
    assert not bench.made(DeliverDeltas)
    assert bench.attempts()[1:] == [("r~2.0", "w-middle")]
    bench.answer("xy$", logprob(10))
    assert bench.text() == "xy"
    report = bench.report()
    assert (report.model, report.tier, report.reason) == ("middle", 1, "last_tier")
    assert [a.outcome for a in report.attempts] == ["rejected", "delivered"]
    assert report.attempts[0].threshold == 70.0
    assert bench.metrics.escalations.counts == {(CASCADE, "score"): 1}
    told = {o.request: o for o in bench.outcomes()}
    assert len(told) == len(bench.outcomes()) == 3
    assert [(told[r].model, told[r].parent) for r in ("r~1", "r~2", "r")] == [
        ("small", "r"), ("middle", "r"), (CASCADE, ""),
    ]  # fmt: skip
    assert told["r"].output_tokens == [3]
    assert [(a.request, a.outcome, a.epoch, a.judge) for a in told["r"].attempts] == [
        ("r~1", "rejected", 0, "confidence_uncalibrated"),
        ("r~2", "delivered", 0, "confidence_uncalibrated"),
    ]
    subjects = [e.subject for e in bench.made(Publish) if "outcome" in e.subject]
    assert [s.rpartition(".")[2] for s in subjects] == ["small", "middle", CASCADE]


def test_the_call_counts_once_in_admission_and_is_charged_for_all_attempts():
    bench = CascadeBench(70.0, 0.0)
    limits = KeyLimits(tokens_per_minute=1000, concurrency=1)
    bench.ask(key="k", limits=limits)
    assert bench.actor.state.admission.calls_open == 1
    bench.answer("abc$", logprob(60))
    assert bench.actor.state.admission._keys["k"].calls_open == 1
    bench.answer("xy$", logprob(60))
    assert bench.actor.state.admission.calls_open == 0
    use = bench.actor.state.admission._keys["k"]
    assert use.tokens._level == pytest.approx(1000 - (3 + 4) - (3 + 3))


@pytest.mark.parametrize(("own", "told"), [(None, [None]), (0, [2])])
def test_engines_are_asked_for_log_probabilities_that_only_who_asked_for_them_is_told(own, told):
    bench = CascadeBench(0.0, 0.0)
    member = make_call("r", model="small", prompts=[[1]], sampling=Sampling(max_tokens=5, logprobs=own))
    bench.send(CallSubmitted(call=make_call("r", model=CASCADE, members=[member], sampling=member.sampling)))
    assert bench.submissions()[0].body.sampling.logprobs == 0
    bench.answer("a$", logprob(60))
    assert [d.logprobs and len(d.logprobs) for e in bench.made(DeliverDeltas) for d in e.deltas] == told


def test_the_least_score_of_all_choices_decides():
    bench = CascadeBench(70.0, 0.0)
    bench.ask(n=2)
    bench.answer("ab$", logprob(90), choice=0)
    bench.answer("cd$", logprob(50), choice=1)
    assert [s for s, _ in bench.attempts()] == ["r~1.0", "r~1.1", "r~2.0", "r~2.1"]
    bench.answer("ef$", logprob(90), choice=0)
    bench.answer("gh$", logprob(90), choice=1)
    assert (bench.text(index=0), bench.text(index=1)) == ("ef", "gh")


def test_an_answer_without_log_probabilities_escalates_or_is_accepted_as_configured():
    for without_score, model in (("escalate", "middle"), ("accept", "small")):
        bench = CascadeBench(0.0, 0.0, without_score=without_score)
        bench.ask()
        bench.answer("ab$", math.nan)
        if model == "middle":
            bench.answer("ab$", math.nan)
        assert bench.report().model == model
    assert bench.report().reason == "not_judged"


# Early rejection and early commit.


def test_an_attempt_that_cannot_reach_its_threshold_is_cancelled_at_once():
    bench = CascadeBench(70.0, 0.0, judges={"small": BY_SUM})
    bench.ask()
    bench.answer("a", -0.5, end=False)
    assert len(bench.attempts()) == 1
    bench.answer("b", -0.2, first_index=1, end=False)
    (cancel,) = bench.sent(CancelSequence)
    assert (cancel.sequence, cancel.reason) == ("r~1.0", "rejected_early")
    assert bench.attempts()[1:] == [("r~2.0", "w-middle")]
    bench.answer("xy$", -3.0)
    assert [a.outcome for a in bench.report().attempts] == ["rejected_early", "delivered"]
    assert bench.report().attempts[0].score == pytest.approx(65)
    assert bench.outcomes()[-1].attempts[0].judge == "confidence"


def test_a_plan_that_raises_a_threshold_ends_attempts_that_it_makes_hopeless():
    bench = CascadeBench(20.0, 0.0, judges={"small": BY_SUM})
    bench.ask()
    bench.answer("ab", -0.5, end=False)
    assert len(bench.attempts()) == 1
    bench.put(cascade_plan(60.0, 0.0, epoch=2))
    assert bench.attempts()[1:] == [("r~2.0", "w-middle")]
    bench.answer("xy$", -3.0)
    (rejected, _) = bench.outcomes()[-1].attempts
    assert (rejected.outcome, rejected.threshold, rejected.epoch) == ("rejected_early", 60.0, 2)


def test_an_attempt_that_nothing_can_follow_is_not_rejected_early():
    bench = CascadeBench(70.0, 0.0, judges={"small": BY_SUM})
    bench.lose("w-middle")
    bench.ask()
    bench.answer("ab", -5.0, end=False)
    bench.answer("c$", -5.0, first_index=2)
    assert (bench.report().model, bench.report().reason) == ("small", "tier_unavailable")


def test_an_answer_is_streamed_from_early_on_where_the_client_wants_that_and_its_beginning_is_good():
    bench = CascadeBench(70.0, 0.0, early_commit_tokens=3)
    bench.ask(stream=True, options=CascadeOptions(stream="early_commit"))
    bench.answer("ab", logprob(95), end=False)
    assert not bench.made(AcceptCall)
    bench.answer("cd", logprob(95), first_index=2, end=False)
    assert bench.text() == "abcd"
    bench.answer("e$", logprob(10), first_index=4)
    assert bench.text() == "abcde"
    assert bench.report().reason == "early_commit"


def test_an_early_commit_with_a_poor_beginning_waits_for_the_end_and_may_escalate():
    bench = CascadeBench(70.0, 0.0, early_commit_tokens=3)
    bench.ask(stream=True, options=CascadeOptions(stream="early_commit"))
    bench.answer("abcd", logprob(80), end=False)
    assert not bench.made(AcceptCall)
    bench.answer("e$", logprob(10), first_index=4)
    bench.answer("xy", logprob(50), end=False)
    assert bench.text() == "xy"
    answering = bench.made(AcceptCall)[0].answering
    assert (answering.tier, answering.model, answering.score) == (1, "middle", None)


# Plans.


def test_the_plan_in_force_when_an_answer_is_judged_decides_and_is_recorded():
    bench = CascadeBench(70.0, 0.0)
    bench.put(cascade_plan(70.0, 0.0, epoch=4))
    bench.ask()
    bench.put(cascade_plan(50.0, 0.0, epoch=5))
    bench.answer("ab$", logprob(60))
    (attempt,) = bench.outcomes()[-1].attempts
    assert (attempt.threshold, attempt.epoch, attempt.outcome) == (50.0, 5, "delivered")


def test_an_older_plan_is_ignored_and_a_wrong_one_refused():
    bench = CascadeBench(70.0, 0.0)
    bench.put(cascade_plan(70.0, 0.0, epoch=4))
    bench.put(cascade_plan(10.0, 0.0, epoch=3))
    plans = bench.actor.state.cascades
    assert plans.get(CASCADE).plan.epoch == 4
    bench.put(cascade_plan(10.0, 0.0, epoch=9), key="other")
    bench.put(cascade_plan(10.0, epoch=9, cascade="small", tiers=cascade_plan(1.0, 2.0).tiers[1:]), key="small")
    assert plans.get(CASCADE).plan.epoch == 4
    bench.put(None)
    assert plans.get(CASCADE).plan.epoch == 4
    bench.put(cascade_plan(70.0, 0.0, epoch=1))
    assert plans.get(CASCADE).plan.epoch == 1, "the store had lost the plan"


def test_a_cascade_that_only_a_plan_names_is_served():
    bench = CascadeBench(70.0, 0.0)
    bench.put(cascade_plan(0.0, 0.0, cascade="new"), key="new")
    bench.ask(model="new")
    bench.answer("ab$", logprob(60))
    assert bench.report().name == "new"


def test_tiers_rise_over_a_swap_that_reorders_them():
    bench = CascadeBench(70.0, 70.0, 0.0)
    bench.ask()
    bench.answer("ab$", logprob(60))
    tiers = cascade_plan(70.0, 70.0, 0.0).tiers
    bench.put(cascade_plan(epoch=2, tiers=[tiers[2], tiers[0], tiers[1]]))
    bench.answer("cd$", logprob(60))
    report = bench.report()
    assert [a.tier for a in report.attempts] == [0, 1]
    assert report.reason == "last_tier"


def test_an_answer_of_a_model_that_the_plan_no_longer_names_is_judged_by_its_last_tier():
    bench = CascadeBench(70.0, 70.0, 0.0)
    bench.ask(options=CascadeOptions(entry_tier=1))
    bench.put(cascade_plan(90.0, epoch=2))
    bench.answer("ab$", logprob(60))
    assert (bench.report().model, bench.report().attempts[0].tier) == ("middle", 1)


def test_a_tier_without_replicas_is_skipped():
    bench = CascadeBench(70.0, 70.0, 0.0)
    tiers = cascade_plan(70.0, 70.0, 0.0).tiers
    empty = cascade_plan(epoch=2, tiers=[tiers[0], type(tiers[1])(model="middle"), tiers[2]])
    bench.put(empty)
    assert not bench.actor.state.cascades.wants("middle", seen=False)
    assert bench.actor.state.cascades.wants("large", seen=False)
    bench.ask()
    bench.answer("ab$", logprob(60))
    assert bench.attempts()[1:] == [("r~2.0", "w-large")]


def test_below_a_tier_that_has_not_come_yet_an_answer_is_not_called_the_last_tiers():
    bench = CascadeBench(70.0, 70.0, 0.0)
    tiers = cascade_plan(70.0, 70.0, 0.0).tiers
    awaited = type(tiers[2])(model="large", awaited=True)
    bench.put(cascade_plan(epoch=2, tiers=[tiers[0], tiers[1], awaited]))
    assert bench.actor.state.cascades.wants("large", seen=False)
    assert not bench.actor.state.cascades.wants("large", seen=True)
    bench.lose("w-large")
    bench.ask()
    bench.answer("ab$", logprob(60))
    bench.answer("cd$", logprob(50))
    assert (bench.report().model, bench.report().reason) == ("small", "tier_unavailable")
    bench.ask("s", stream=True)
    bench.answer("ab$", logprob(60))
    bench.answer("cd$", logprob(50))
    assert (bench.report("s").model, bench.report("s").reason) == ("middle", "tier_unavailable")


def test_a_swap_that_makes_the_judged_tier_the_last_one_has_its_answer_delivered():
    bench = CascadeBench(70.0, 70.0, 0.0, judge="llm")
    bench.ask()
    bench.answer("ab$", logprob(60))
    bench.reply(bench.asked(JudgeAnswer)[-1], AnswerJudged(request="r~1", score=60.0, kind="llm"))
    bench.answer("cd$", logprob(50))
    bench.put(cascade_plan(70.0, 70.0, epoch=2))
    bench.reply(bench.asked(JudgeAnswer)[-1], AnswerJudged(request="r~2", score=50.0, kind="llm"))
    report = bench.report()
    assert (report.model, report.reason, report.score) == ("middle", "last_tier", 50.0)


# What clients ask for.


@pytest.mark.parametrize(
    ("options", "scores", "model", "reason"),
    [
        (CascadeOptions(), [80], "small", "score"),
        (CascadeOptions(quality=50.0), [60], "small", "score"),
        (CascadeOptions(quality=100.0), [99, 99, 90], "large", "last_tier"),
        (CascadeOptions(max_tier=0), [60], "small", "last_tier"),
        (CascadeOptions(entry_tier=2), [60], "large", "last_tier"),
    ],
)
def test_a_client_may_set_the_quality_the_last_tier_and_the_first(options, scores, model, reason):
    bench = CascadeBench(70.0, 70.0, 0.0)
    bench.ask(options=options)
    for score in scores:
        bench.answer("ab$", logprob(score))
    report = bench.report()
    assert (report.model, report.reason, len(report.attempts)) == (model, reason, len(scores))
    assert report.score == pytest.approx(scores[-1])
    assert bench.text() == "ab"
    answering = bench.made(AcceptCall)[0].answering
    assert (answering.tier, answering.model, answering.score) == (report.tier, model, report.score)
    assert not bench.actor.state.parents


def test_an_entry_tier_beyond_the_plan_is_refused_with_the_fields_name():
    bench = CascadeBench(70.0, 0.0)
    bench.ask(options=CascadeOptions(entry_tier=2))
    (refusal,) = bench.made(RefuseCall)
    assert (refusal.kind, refusal.param) == (RefusalKind.INVALID, "cascade.entry_tier")
    assert bench.actor.state.admission.calls_open == 0


@pytest.mark.parametrize(
    ("policy", "given", "usable", "tier"),
    [
        ("first", 2, (0, 1, 2), 0),
        ("first", None, (1, 2), 1),
        ("given", None, (1, 2), 1),
        ("given", 1, (0, 2), 2),
        ("given", 2, (0, 1), 1),
    ],
)
def test_entry_policies_choose_a_usable_tier(policy, given, usable, tier):
    assert enter(policy, usable, given=given).tier == tier


def test_a_model_that_cannot_take_the_request_is_skipped():
    bench = CascadeBench(70.0, 70.0, 0.0)
    bench.ask(members=("small", "large"))
    bench.answer("ab$", logprob(60))
    assert bench.attempts()[1:] == [("r~2.0", "w-large")]


# Failures.


def test_a_tier_that_dies_is_left_for_the_next():
    bench = CascadeBench(70.0, 70.0, 0.0)
    bench.ask()
    bench.accept()
    bench.pass_time(6.0, alive=("w-middle", "w-large"))
    assert bench.attempts()[1:] == [("r~2.0", "w-middle")]
    bench.answer("ab$", logprob(90))
    report = bench.report()
    assert (report.model, [a.outcome for a in report.attempts]) == ("middle", ["failed", "delivered"])


def test_the_best_answer_so_far_is_delivered_where_the_next_tier_fails():
    bench = CascadeBench(70.0, 0.0)
    bench.ask(stream=True)
    bench.answer("ab$", logprob(60))
    bench.accept()
    bench.pass_time(6.0, alive=("w-small",))
    assert bench.text() == "ab"
    report = bench.report()
    assert (report.model, report.reason) == ("small", "tier_unavailable")
    assert [a.outcome for a in report.attempts] == ["delivered", "failed"]
    assert bench.outcomes()[-1].outcome == "completed"


def _rejected_early(*judged: str, thresholds: tuple[float, ...] = (70.0, 0.0), **fields: Any) -> CascadeBench:
    """A call whose first attempt was cancelled because it could not reach its threshold; the next one is accepted."""
    judges = {model: msgspec.structs.replace(BY_SUM, model=model) for model in judged or ("small",)}
    bench = CascadeBench(*thresholds, judges=judges)
    bench.ask(**fields)
    bench.answer("ab", -0.5, end=False)
    assert bench.attempts()[1:] == [("r~2.0", "w-middle")]
    bench.accept()
    return bench


@pytest.mark.parametrize("stream", [False, True])
def test_a_tier_that_was_rejected_early_answers_where_every_later_one_fails(stream: bool):
    bench = _rejected_early(stream=stream)
    bench.pass_time(6.0, alive=("w-small",))
    assert bench.attempts()[2:] == [("r~3.0", "w-small")]
    bench.answer("abc", -0.5, end=False)
    assert bench.text() == ("abc" if stream else "")
    bench.answer("d$", -0.5, first_index=3)
    assert bench.text() == "abcd"
    report = bench.report()
    assert (report.model, report.tier, report.reason) == ("small", 0, "tier_unavailable")
    assert [(a.tier, a.outcome) for a in report.attempts] == [(0, "rejected_early"), (1, "failed"), (0, "delivered")]
    assert not bench.actor.state.parents


def test_of_two_tiers_that_were_rejected_early_the_higher_answers_and_then_the_lower():
    bench = _rejected_early("small", "middle", thresholds=(70.0, 70.0, 0.0))
    bench.answer("ab", -0.5, end=False)
    bench.accept()
    bench.pass_time(6.0, alive=("w-small", "w-middle"))
    assert bench.attempts()[3:] == [("r~4.0", "w-middle")]
    bench.accept()
    bench.pass_time(6.0, alive=("w-small",))
    assert bench.attempts()[4:] == [("r~5.0", "w-small")]
    bench.accept()
    bench.pass_time(130.0, alive=())
    assert not bench.attempts()[5:]
    assert [e.request for e in bench.made(RefuseCall)] == ["r"]


def test_a_call_without_time_left_does_not_begin_anew():
    bench = _rejected_early(timeout_ns=4 * SECOND)
    bench.pass_time(6.0)
    assert len(bench.attempts()) == 2
    assert [e.kind for e in bench.made(RefuseCall)] == [RefusalKind.TIMEOUT]


def test_a_tier_that_has_come_back_is_asked_after_the_last_resort():
    bench = _rejected_early("small", thresholds=(70.0, 70.0, 0.0))
    bench.pass_time(6.0, alive=("w-small",))
    assert bench.attempts()[2:] == [("r~3.0", "w-small")]
    bench.summary("w-large")
    bench.answer("ab$", -1.0)
    assert bench.attempts()[3:] == [("r~4.0", "w-large")]
    bench.answer("xy$", -1.0)
    assert (bench.report().model, bench.report().reason) == ("large", "last_tier")


def test_nothing_is_escalated_that_would_end_too_late():
    bench = CascadeBench(70.0, 0.0, deadline_s=10.0)
    tiers = cascade_plan(70.0, 0.0).tiers
    slow = type(tiers[1])(model="middle", instances=1, p95_ns=8 * SECOND)
    bench.put(cascade_plan(epoch=2, tiers=[tiers[0], slow]))
    bench.ask("a")
    bench.accept()
    bench.pass_time(3.0)
    bench.answer("ab$", logprob(60))
    assert (bench.report("a").model, bench.report("a").reason) == ("small", "deadline")


def test_the_time_limit_delivers_the_best_answer_so_far_or_fails():
    bench = CascadeBench(70.0, 0.0)
    bench.ask(timeout_ns=5 * SECOND)
    bench.answer("ab$", logprob(60))
    bench.accept()
    bench.pass_time(6.0)
    assert bench.report().reason == "interrupted"
    bench.ask("late", timeout_ns=5 * SECOND)
    bench.accept()
    bench.pass_time(6.0)
    (refusal,) = bench.made(RefuseCall)
    assert (refusal.request, refusal.kind) == ("late", RefusalKind.TIMEOUT)
    assert bench.outcomes()[-1].outcome == "failed"


def _begun_stream(*, early: bool, **fields: Any) -> CascadeBench:
    """A stream with two tokens: of its last tier, or of one that commits early."""
    bench = CascadeBench(70.0, 0.0, early_commit_tokens=2, tier_wait_s=2.0)
    bench.ask(stream=True, options=CascadeOptions(stream="early_commit" if early else None), **fields)
    if not early:
        bench.answer("ab$", logprob(60))
    bench.answer("xy", logprob(95), end=False)
    assert bench.text() == "xy"
    return bench


@pytest.mark.parametrize("early", [False, True])
def test_a_stream_that_breaks_off_after_its_beginning_fails(early: bool):
    bench = _begun_stream(early=early, timeout_ns=5 * SECOND)
    bench.pass_time(6.0)
    assert [e.kind for e in bench.made(FailCall)] == [RefusalKind.TIMEOUT]
    assert not bench.made(CompleteCall)


@pytest.mark.parametrize("early", [False, True])
def test_a_stream_that_has_begun_waits_for_its_model_as_a_plain_one_does(early: bool):
    """Nothing else can answer any more: the tier's short patience is for those that another tier can stand in for."""
    bench = _begun_stream(early=early)
    busy = "w-small" if early else "w-middle"
    bench.pass_time(6.0, alive=tuple({"w-small", "w-middle"} - {busy}))
    assert not bench.made(FailCall)
    bench.summary(busy)
    bench.pass_time(2.0)
    bench.answer("z$", logprob(95), first_index=2)
    assert bench.text() == "xyz"
    assert bench.made(DeliverDeltas)[-1].report == bench.report()
    assert bench.outcomes()[-1].outcome == "completed"


def test_a_request_at_fault_is_not_tried_on_the_next_tier():
    bench = CascadeBench(70.0, 0.0)
    bench.ask()
    asked = bench.submissions()[0]
    refused = SequenceRefused(sequence="r~1.0", epoch=0, reason=RefusalReason.INVALID, detail="bad grammar")
    bench.reply(asked, refused)
    (refusal,) = bench.made(RefuseCall)
    assert (refusal.request, refusal.kind) == ("r", RefusalKind.INVALID)
    assert len(bench.attempts()) == 1


def test_without_any_instance_the_call_is_refused():
    bench = CascadeBench(70.0, 0.0)
    bench.actor.state.cluster.plans.clear()
    bench.actor.state.cluster._stages.clear()
    bench.ask()
    (refusal,) = bench.made(RefuseCall)
    assert refusal.kind is RefusalKind.NO_INSTANCE
    assert bench.actor.state.admission.calls_open == 0


def test_a_client_that_leaves_takes_its_attempt_and_its_question_along():
    bench = CascadeBench(70.0, 0.0)
    bench.ask()
    bench.accept()
    bench.send(CallAbandoned(request="r", reason="client_gone"))
    assert [c.sequence for c in bench.sent(CancelSequence)] == ["r~1.0"]
    assert [(o.request, o.outcome) for o in bench.outcomes()] == [("r~1", "cancelled"), ("r", "cancelled")]
    bench.put(cascade_plan(70.0, 0.0, judge="llm"))
    bench.ask("s")
    bench.answer("ab$", logprob(60))
    bench.send(CallAbandoned(request="s", reason="client_gone"))
    assert not bench.actor.state.pending
    bench.reply(bench.asked(JudgeAnswer)[0], AnswerJudged(request="s~1", score=90.0, kind="llm"))
    assert not bench.made(CompleteCall)


def test_a_stop_delivers_what_is_being_judged():
    bench = CascadeBench(70.0, 0.0, judge="llm")
    bench.ask()
    bench.answer("ab$", logprob(60))
    bench.send(StopRequested(orphaned=True))
    assert bench.report().reason == "interrupted"


# Judges.


@pytest.mark.parametrize(
    ("answer", "result", "model"),
    [
        (AnswerJudged(request="r~1", score=90.0, kind="llm"), "answered", "small"),
        (AnswerJudged(request="r~1", score=10.0, kind="llm"), "answered", "middle"),
        (AnswerJudged(request="r~1", score=None, kind="llm"), "unknown", "small"),
        (AnswerJudged(request="r~1", score=math.nan, kind="llm"), "absurd", "small"),
        (AnswerJudged(request="r~1", score=101.0, kind="llm"), "absurd", "small"),
        (ErrorReply(reason="busy", detail=""), "unexpected", "small"),
    ],
)
def test_a_judges_score_decides_and_confidence_where_it_gives_none(answer, result, model):
    bench = CascadeBench(70.0, 0.0, judge="llm")
    bench.ask()
    bench.answer("ab$", logprob(80))
    (asked,) = bench.asked(JudgeAnswer)
    assert asked.subject.endswith(f".judge.{CASCADE}")
    assert (asked.body.answer, asked.body.prompt) == (["ab"], "bcd")
    bench.reply(asked, answer)
    if model == "middle":
        bench.answer("cd$", logprob(80))
    assert bench.report().model == model
    assert bench.metrics.judgements.counts == {(CASCADE, result): 1}


def test_a_silent_judge_is_not_asked_for_a_while():
    bench = CascadeBench(70.0, 0.0, judge="llm", judge_pause_s=5.0)
    for i in range(4):
        bench.ask(f"r{i}")
        bench.answer("ab$", logprob(80))
        if i < 3:
            bench.fail(bench.asked(JudgeAnswer)[-1], RequestFailure.TIMEOUT)
        assert bench.report(f"r{i}").model == "small"
    assert bench.metrics.judgements.counts == {(CASCADE, "unanswered"): 3, (CASCADE, "paused"): 1}
    bench.pass_time(6.0)
    bench.ask("again")
    bench.answer("ab$", logprob(80))
    assert len(bench.asked(JudgeAnswer)) == 4


# The escalation budget.


def test_the_budget_lowers_a_threshold_to_where_the_share_holds():
    budget = EscalationBudget(0.25, 60 * SECOND)
    for score in range(SCORES_MIN - 1):
        budget.note(float(score), 0)
    assert budget.threshold(90.0, 0) == 90.0
    for score in range(SCORES_MIN - 1, 100):
        budget.note(float(score), 0)
    assert budget.threshold(90.0, 0) == 25.0
    assert budget.threshold(10.0, 0) == 10.0
    assert budget.threshold(90.0, 61 * SECOND) == 90.0


def test_answers_that_only_the_budget_accepts_say_so():
    bench = CascadeBench(70.0, 0.0, escalation_share_max=0.2)
    for i in range(SCORES_MIN + 1):
        bench.ask(f"r{i}")
        bench.answer("ab$", logprob(50))
        if i < SCORES_MIN:
            bench.answer("cd$", logprob(50))
    report = bench.report(f"r{SCORES_MIN}")
    assert (report.model, report.reason) == ("small", "escalation_budget")


# The configuration.


def test_a_wrong_cascade_is_refused_at_start():
    with pytest.raises(ConfigError, match="needs a name that is not a model's"):
        CascadePlans([CascadeConfig(name="small")], ["small"])
    with pytest.raises(ConfigError, match="threshold"):
        CascadeBench(170.0, 0.0)
