"""Ingress's core where the policy asks predictors: questions, answers, what is missing, what dies meanwhile."""

import pytest
from millrace.actor.effects import Gather, Log
from millrace.actor.errors import ConfigError
from millrace.contracts.ingress import FinishReason
from millrace.contracts.local import BusDisconnected, BusReconnected, RequestFailure, StopRequested
from millrace.contracts.message import ErrorReply
from millrace.contracts.observers import CandidateForecast, DecisionMade, RequestFinished
from millrace.contracts.predictor import NoPrediction, NoPredictionReason
from millrace.contracts.tagger import LengthTag, TagRequest
from millrace.contracts.worker import RefusalReason, SequenceRefused

from services.ingress.calls.messages import AcceptCall, CallAbandoned, RefusalKind, RefuseCall
from services.ingress.config import DispatchConfig, IngressConfig, TaggingConfig
from tests.unit.ingress_core import MILLISECOND, MODEL, NO_TAG, SECOND, START, Bench, chunk, instance_of

LENGTH = FinishReason.LENGTH


def asking(*, instances: int = 2, tagging: TaggingConfig = NO_TAG, seed: int = 1, **parameters) -> Bench:
    given = {"ttft_weight": 0.0} | parameters  # least end-to-end time: one figure decides
    dispatch = DispatchConfig(policy="forecast", parameters=given)
    return Bench(IngressConfig(tagging=tagging, dispatch=dispatch), instances=instances, seed=seed)


def decision(bench: Bench) -> DecisionMade:
    return bench.sent(DecisionMade)[-1]


def silence(bench: Bench, request: str) -> None:
    """A call that is asked about and nobody answers."""
    bench.call(request)
    bench.gathered()


# The question.


def test_the_predictors_of_all_candidates_are_asked_before_anything_is_submitted():
    bench = asking(instances=3, deadline_ms=30)
    bench.call()
    gather = bench.gather()
    assert gather.subjects == tuple(f"mr.local.predict.tiny.w{i}" for i in range(3))
    assert (gather.answers_max, gather.timeout_ns, gather.request) == (3, 30 * MILLISECOND, "r")
    asked = gather.body
    assert (asked.request, asked.model, asked.instance) == ("r", MODEL, ""), "the subject says whose future is meant"
    assert (asked.prompt_tokens, asked.output_tokens, asked.max_tokens, asked.sequences) == (3, 0, 50, 1)
    assert asked.expected_output_tokens is None
    assert not bench.submissions()
    assert not bench.sent(DecisionMade)
    assert bench.actor.snapshot()["sequences"]["r.0"]["phase"] == "forecasting"
    bench.call("hasty", timeout_ns=5 * MILLISECOND)
    assert bench.gather().timeout_ns == 5 * MILLISECOND


def test_under_overload_fewer_candidates_are_asked_and_the_policy_stays():
    bench = asking(instances=8, candidates=6, forecasts_per_s=100.0)
    asked = []
    for number in range(6):
        bench.call(f"r{number}")
        names = [subject.rpartition(".")[2] for subject in bench.gather().subjects]
        asked.append(len(names))
        bench.gathered(*(bench.predicted(name, 10.0) for name in names))
        assert not decision(bench).fallback
    assert asked == [6, 4, 2, 2, 2, 2], "a burst of ten forecasts, then two each"
    bench.now_ns += SECOND
    bench.call("later")
    assert len(bench.gather().subjects) == 6


def test_without_a_bound_every_candidate_that_the_policy_draws_is_asked():
    bench = asking(instances=8, candidates=6, forecasts_per_s=0)
    for number in range(50):
        bench.call(f"r{number}")
        assert len(bench.gather().subjects) == 6


def test_the_sequence_goes_to_the_one_that_ends_soonest_and_the_decision_tells_what_was_predicted():
    bench = asking(instances=3)
    bench.call()
    bench.now_ns += 2 * MILLISECOND
    bench.gathered(
        bench.predicted("w0", 400, 20),
        bench.predicted("w2", 300, 90, tpot_mean_ns=5, preemptions=2, others_delay_ns=7, snapshot_age_ns=8),
        bench.predicted("w1", 350, 10),
    )
    assert instance_of(bench.submissions()[0]) == "w2"
    made = decision(bench)
    assert (made.policy, made.chosen, made.fallback, made.kind) == ("forecast", "w2", "", "dispatch")
    assert made.reason == "lowest of 3: 300 ms = predicted end to end"
    assert made.forecasts == [
        CandidateForecast("w2", 90 * MILLISECOND, 300 * MILLISECOND, 5, 2, 7, 8),
        CandidateForecast("w1", 10 * MILLISECOND, 350 * MILLISECOND),
        CandidateForecast("w0", 20 * MILLISECOND, 400 * MILLISECOND),
    ]
    assert (made.prompt_tokens, made.output_tokens, made.max_tokens) == (3, 0, 50)
    assert (made.wall_us, made.at_ns) == (2000.0, START + 2 * MILLISECOND)
    assert bench.metrics.forecasts.counts == {("answered",): 3}
    assert bench.metrics.forecast_wait.count == 1
    assert bench.actor.state.pending.keys() == {bench.submissions()[0].correlation}


def test_an_only_candidate_is_asked_by_name_so_that_its_prediction_can_be_joined():
    bench = asking(instances=1)
    bench.call()
    assert bench.gather().body.instance == "w0"
    bench.gathered(bench.predicted("w0", 10))
    assert decision(bench).forecasts


def test_the_expected_length_is_asked_of_the_tagger_first_and_travels_with_question_and_decision():
    bench = asking(tagging=TaggingConfig(mode="needed"))
    bench.call()
    bench.reply(bench.asked(TagRequest)[0], LengthTag(request="r", mean=12.5))
    assert bench.gather().body.expected_output_tokens == 12.5
    bench.gathered(bench.predicted("w0", 10))
    assert decision(bench).expected_output_tokens == 12.5
    bench.call("far")
    bench.reply(bench.asked(TagRequest)[1], LengthTag(request="far", mean=1e300))
    assert bench.gather().body.expected_output_tokens == 50


# Answers that are missing or wrong.


def test_those_who_answered_are_decided_among_and_the_others_are_named():
    bench = asking(instances=3)
    bench.call()
    bench.gathered(
        bench.predicted("w1", 900), NoPrediction(request="r", instance="w2", reason=NoPredictionReason.STALE_SNAPSHOT)
    )
    made = decision(bench)
    assert (made.chosen, made.fallback) == ("w1", "")
    assert [(f.name, f.note) for f in made.forecasts] == [
        ("w1", ""),
        ("w0", "no answer in time"),
        ("w2", "stale_snapshot"),
    ]
    assert bench.metrics.forecasts.counts == {("answered",): 1, ("stale_snapshot",): 1, ("unanswered",): 1}


@pytest.mark.parametrize(
    "fields",
    [
        {"e2e_ms": 0, "ttft_ms": 0},
        {"e2e_ms": -5},
        {"e2e_ms": 10, "ttft_ms": -1},
        {"e2e_ms": 10, "ttft_ms": 11},
        {"e2e_ms": 3_600_001},
        {"e2e_ms": 10, "tpot_mean_ns": -1},
        {"e2e_ms": 10, "others": -1},
        {"e2e_ms": 10, "others": 2, "others_delay_ns": 3 * 3_600 * SECOND},
    ],
)
def test_absurd_predictions_are_as_good_as_none_counted_and_logged_once(fields):
    bench = asking()
    for request in ("r", "again"):
        bench.call(request)
        bench.gathered(bench.predicted("w0", **fields), bench.predicted("w1", 1_000))
        assert decision(bench).chosen == "w1"
        assert decision(bench).forecasts[1].note.startswith("absurd")
    assert bench.metrics.forecasts.counts == {("absurd",): 2, ("answered",): 2}
    (line,) = bench.made(Log)
    assert line.event == "forecast_absurd"
    assert line.fields["answer"].startswith("w0: absurd: ")


def test_a_prediction_for_an_earlier_incarnation_is_outdated():
    bench = asking()
    bench.call()
    bench.incarnations["w0"] = 2
    bench.register("w0")
    bench.gathered(bench.predicted("w0", 1, incarnation=1), bench.predicted("w1", 50))
    assert decision(bench).chosen == "w1"
    assert decision(bench).forecasts[1].note == "of an earlier incarnation"
    assert bench.metrics.forecasts.counts == {("outdated",): 1, ("answered",): 1}


def test_answers_of_others_and_second_answers_are_counted_and_ignored():
    bench = asking()
    bench.call()
    bench.gathered(
        bench.predicted("stranger", 1),
        ErrorReply(reason="overloaded"),
        bench.predicted("w0", 50),
        bench.predicted("w0", 5),
        bench.predicted("w1", 40),
    )
    assert decision(bench).chosen == "w1"
    assert bench.metrics.forecasts.counts == {("unexpected",): 3, ("answered",): 2}


def test_without_any_answer_the_fallback_decides_and_nobody_is_refused():
    bench = asking(fallback="round_robin")
    bench.summary("w0", waiting=5, waiting_prefill_tokens=9_000)
    silence(bench, "r")
    made = decision(bench)
    assert (made.policy, made.fallback, made.chosen) == ("forecast", "round_robin", "w0")
    assert made.reason == "no prediction of 2 asked (no answer in time); round_robin: next of 2 in turn"
    assert [f.note for f in made.forecasts] == ["no answer in time"] * 2
    assert bench.metrics.fallbacks.counts == {("no_prediction",): 1}
    bench.accept()
    assert bench.made(AcceptCall)
    bench.tokens("w0", chunk("a", finish=LENGTH))
    (finished,) = bench.sent(RequestFinished)
    assert (finished.predicted_ttft_ns, finished.predicted_e2e_ns, finished.placed_ns) == (None, None, START)
    assert bench.metrics.errors["e2e"].count == 0


def test_three_silences_in_a_row_pause_the_asking_and_the_log_says_so_once_each_way():
    bench = asking(pause_s=1.0)
    for number in range(3):
        silence(bench, f"r{number}")
    assert [(e.event, e.fields["model"]) for e in bench.made(Log)] == [("forecasts_missing", MODEL)]
    bench.effects.clear()
    assert bench.actor.snapshot()["predictors"] == {MODEL: {"silences": 3, "paused": True}}
    bench.call("r3")
    assert not bench.made(Gather)
    assert bench.submissions()
    assert decision(bench).fallback == "join_shortest_queue"
    assert bench.metrics.fallbacks.counts == {("no_prediction",): 3, ("paused",): 1}
    bench.now_ns += SECOND
    bench.summaries()
    silence(bench, "r4")
    bench.call("r5")
    assert len(bench.made(Gather)) == 1, "one more silence is enough to pause again"
    assert not bench.made(Log)
    bench.now_ns += SECOND
    bench.summaries()
    bench.call("r6")
    bench.gathered(bench.predicted("w0", 10))
    bench.call("r7")
    assert bench.gather().request == "r7"
    assert [e.event for e in bench.made(Log)] == ["forecasts_back"]


def test_predictors_that_answer_without_a_prediction_are_asked_again_and_the_log_says_so_once():
    bench = asking()
    for number in range(5):
        bench.call(f"r{number}")
        bench.gathered(NoPrediction(request="r", instance="w0", reason=NoPredictionReason.NO_STEP_TIME))
    assert [e.event for e in bench.made(Log)] == ["forecasts_missing"]
    assert len(bench.made(Gather)) == 5


# What changes while it is asked.


def test_where_all_who_were_asked_are_gone_the_fallback_decides_among_the_others():
    bench = asking(instances=3, candidates=1)
    bench.call()
    asked = bench.gather().subjects[0].rsplit(".", 1)[1]
    bench.die(asked)
    bench.gathered(bench.predicted(asked, 1))
    made = decision(bench)
    assert made.chosen in {"w0", "w1", "w2"} - {asked}
    assert (made.fallback, bench.metrics.fallbacks.counts) == ("join_shortest_queue", {("gone",): 1})


def test_where_nobody_is_left_the_sequence_waits_and_goes_on_when_someone_comes():
    bench = asking(instances=1)
    bench.call()
    bench.die("w0")
    bench.gathered(bench.predicted("w0", 1))
    assert not bench.submissions()
    assert decision(bench).chosen == ""
    assert list(bench.actor.state.waiting) == ["r.0"]
    bench.incarnations["w0"] = 2
    bench.register("w0")
    bench.summary("w0")
    bench.gathered(bench.predicted("w0", 1))
    assert len(bench.submissions()) == 1


@pytest.mark.parametrize("ends", ["abandoned", "timeout", "stopping"])
def test_a_call_that_ends_while_it_is_asked_about_leaves_nothing(ends):
    bench = asking()
    bench.call(n=2, timeout_ns=2 * SECOND if ends == "timeout" else 0)
    gather = bench.gather()
    if ends == "abandoned":
        bench.send(CallAbandoned(request="r", reason="client_gone"))
    elif ends == "timeout":
        bench.pass_time(2.5)
    else:
        bench.send(StopRequested())
        bench.pass_time(31)
    assert bench.actor.state.pending == {}
    assert bench.actor.state.sequences == {}
    assert bench.gathered(bench.predicted("w0", 1), to=gather) == []
    assert not bench.submissions()
    kinds = {"timeout": [RefusalKind.TIMEOUT], "stopping": [RefusalKind.STOPPING]}.get(ends, [])
    assert [r.kind for r in bench.made(RefuseCall)] == kinds


@pytest.mark.parametrize("answers_first", [False, True])
def test_a_bus_that_goes_away_while_it_is_asked_costs_a_wait_and_no_request(answers_first):
    bench = asking()
    bench.call()
    if answers_first:  # the runtime closes its questions before it says so
        bench.gathered()
        bench.send(BusDisconnected())
        bench.fail(bench.submissions()[0], RequestFailure.DISCONNECTED)
    else:
        bench.send(BusDisconnected())
        bench.gathered()
        assert not bench.submissions()
    assert list(bench.actor.state.waiting) == ["r.0"]
    bench.send(BusReconnected())
    bench.gathered(bench.predicted("w1", 5))
    bench.accept()
    assert bench.last_submission()[1] == "w1"
    assert bench.made(AcceptCall)


# Several sequences, refusals, continuations.


def test_choices_of_one_prompt_are_asked_about_and_placed_together_and_prompts_apart():
    bench = asking()
    bench.call(prompts=[[1], [2, 3]], n=2)
    first, second = bench.made(Gather)
    assert (first.body.sequences, first.body.prompt_tokens, second.body.prompt_tokens) == (2, 1, 2)
    bench.gathered(bench.predicted("w0", 9), bench.predicted("w1", 10), to=second)
    bench.gathered(bench.predicted("w0", 11), bench.predicted("w1", 9), to=first)
    assert [(s.body.sequence, instance_of(s)) for s in bench.submissions()] == [
        ("r.2", "w0"),
        ("r.3", "w0"),
        ("r.0", "w1"),
        ("r.1", "w1"),
    ]
    for submission in bench.submissions():
        bench.accept(submission)
    assert bench.made(AcceptCall)
    for index, submission in enumerate(bench.submissions()):
        last = chunk("a", sequence=submission.body.sequence, finish=LENGTH)
        bench.tokens(instance_of(submission), last)
        assert len(bench.sent(RequestFinished)) == (index == 3)
    assert bench.sent(RequestFinished)[0].predicted_e2e_ns is None, "no one forecast is of two prompts"


def test_a_burst_that_was_asked_about_one_idle_instance_does_not_all_go_there():
    bench = asking()
    gathers = []
    for number in range(12):
        bench.call(f"r{number}")
        gathers.append(bench.gather())
    for gather in gathers:
        bench.gathered(bench.predicted("w0", 100, 10), bench.predicted("w1", 140, 10), to=gather)
    chosen = [instance_of(s) for s in bench.submissions()]
    # Four newcomers of 10 ms each make up for the 40 ms that w1 is slower; from then on they take turns.
    assert chosen[:4] == ["w0"] * 4
    assert sorted(chosen[4:]) == ["w0"] * 4 + ["w1"] * 4
    assert decision(bench).forecasts[0].placed_since > 0


def test_a_refused_sequence_is_asked_about_again_without_the_one_that_refused():
    bench = asking(instances=3)
    bench.call()
    bench.gathered(bench.predicted("w0", 1), bench.predicted("w1", 2), bench.predicted("w2", 3))
    request, instance = bench.last_submission()
    assert instance == "w0"
    bench.reply(request, SequenceRefused(sequence="r.0", epoch=0, reason=RefusalReason.FULL))
    assert [s.rsplit(".", 1)[1] for s in bench.gather().subjects] == ["w1", "w2"]
    bench.now_ns += MILLISECOND
    bench.gathered(bench.predicted("w1", 7, 2), bench.predicted("w2", 6, 3))
    request, instance = bench.last_submission()
    assert (instance, request.body.epoch) == ("w2", 1)
    bench.accept()
    bench.tokens("w2", chunk("a", epoch=1, finish=LENGTH))
    (finished,) = bench.sent(RequestFinished)
    assert finished.predicted_e2e_ns == 6 * MILLISECOND, "of the placement that was accepted"
    assert finished.placed_ns == START + MILLISECOND


def test_a_continuation_is_asked_about_with_what_must_be_computed_again():
    bench = asking()
    bench.call()
    bench.gathered(bench.predicted("w0", 1), bench.predicted("w1", 2))
    bench.accept()
    bench.tokens("w0", chunk("abcd"))
    bench.die("w0")
    asked = bench.gather().body
    assert (asked.instance, asked.prompt_tokens, asked.output_tokens) == ("w1", 3, 4)
    bench.gathered(bench.predicted("w1", 20))
    made = decision(bench)
    assert (made.kind, made.epoch, made.output_tokens, made.chosen) == ("continuation", 1, 4, "w1")
    assert made.reason.startswith("instance_dead; ")
    request, _ = bench.last_submission()
    assert request.body.output_token_ids == [0, 1, 2, 3]
    bench.accept()
    bench.tokens("w1", chunk("e", 4, epoch=1, finish=LENGTH))
    (finished,) = bench.sent(RequestFinished)
    assert finished.predicted_e2e_ns == MILLISECOND, "of the first placement"
    assert bench.metrics.errors["e2e"].count == 0, "a continued request says nothing of the forecast"


# Afterwards.


def test_the_prediction_is_joined_with_what_happened():
    bench = asking()
    bench.call()
    bench.now_ns += 2 * MILLISECOND
    bench.gathered(bench.predicted("w0", 120, 8), bench.predicted("w1", 200))
    bench.accept()
    bench.now_ns += 10 * MILLISECOND
    bench.tokens("w0", chunk("a"))
    bench.now_ns += 90 * MILLISECOND
    bench.tokens("w0", chunk("b", 1, finish=LENGTH))
    (finished,) = bench.sent(RequestFinished)
    assert (finished.predicted_ttft_ns, finished.predicted_e2e_ns) == (8 * MILLISECOND, 120 * MILLISECOND)
    assert finished.placed_ns == START + 2 * MILLISECOND
    signed = bench.metrics.errors_signed
    assert signed["e2e"].sum == pytest.approx(0.2)
    assert signed["ttft"].sum == pytest.approx(-0.2)
    assert bench.metrics.errors["ttft"].sum == pytest.approx(0.2)


def test_a_decision_tells_at_most_sixteen_forecasts_the_chosen_first():
    bench = asking(instances=40, candidates=0)
    bench.call()
    bench.gathered(*(bench.predicted(name, 1_000 - int(name[1:])) for name in list(bench.summary_at)[:30]))
    made = decision(bench)
    assert len(made.forecasts) == 16
    assert made.forecasts[0].name == made.chosen == "w29"
    assert [f.e2e_ns for f in made.forecasts] == sorted(f.e2e_ns for f in made.forecasts)


def test_a_fallback_that_asks_itself_or_does_not_exist_is_refused():
    for fallback in ("forecast", "no_such"):
        with pytest.raises(ConfigError, match="fallback"):
            asking(fallback=fallback)
    for parameters in ({"deadline_ms": 0}, {"metric": "luck"}, {"candidates": -1}):
        with pytest.raises(ConfigError, match=next(iter(parameters))):
            asking(**parameters)
