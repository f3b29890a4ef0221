"""Shadow runs in ingress's core: what is sampled, when its tiers are asked, what ends it, what comes of it."""

from __future__ import annotations

import pytest
from millrace.actor.effects import Publish
from millrace.actor.errors import ConfigError
from millrace.contracts.local import StopRequested
from millrace.contracts.observers import ShadowFinished
from millrace.contracts.worker import CancelSequence

from services.ingress.calls.messages import CascadeOptions, CompleteCall
from services.ingress.cascade.shadow import SHADOWS_MAX
from tests.unit.cascade_core import CASCADE, CascadeBench, cascade_plan, logprob


def shadowing(*thresholds: float, **fields: float) -> CascadeBench:
    return CascadeBench(*(thresholds or (70.0, 70.0, 0.0)), shadow_share=1.0, **fields)


def finished(bench: CascadeBench) -> list[ShadowFinished]:
    return [e.body for e in bench.effects if isinstance(e, Publish) and isinstance(e.body, ShadowFinished)]


def idle(bench: CascadeBench) -> None:
    """Every instance says that nothing runs there, often enough that placements no longer count as in flight."""
    for _ in range(3):
        bench.now_ns += 1_000_000
        for name in bench.names:
            bench.summary(f"w-{name}")


def test_after_the_answer_the_tiers_that_were_not_asked_run_one_after_another() -> None:
    bench = shadowing()
    bench.ask()
    bench.answer("ab$", logprob(80))
    assert bench.report().model == "small"
    assert bench.attempts()[1:] == [("r~s1.0", "w-middle")]
    assert bench.submissions()[-1].body.priority == 1
    bench.answer("ab$", logprob(50))
    assert bench.attempts()[2:] == [("r~s2.0", "w-large")]
    bench.answer("xy$", logprob(60))
    (told,) = finished(bench)
    assert (told.request, told.cascade, told.epoch) == ("r", CASCADE, 0)
    assert [(a.model, round(a.score or 0), a.agrees) for a in told.answers] == [
        ("small", 80, False),
        ("middle", 50, False),
        ("large", 60, True),
    ]
    assert [(a.output_tokens, len(a.logprobs)) for a in told.answers] == [(3, 3)] * 3
    assert bench.metrics.shadows.counts == {(CASCADE, "finished"): 1}
    assert bench.metrics.shadow_answers.counts[CASCADE, "large", "yes"] == 1
    assert not bench.actor.state.shadows
    assert len(bench.made(CompleteCall)) == 1


def test_an_attempt_that_was_rejected_early_runs_to_its_end_and_whole_answers_are_not_asked_for_again() -> None:
    bench = shadowing(70.0, 0.0)
    bench.ask()
    bench.answer("ab$", logprob(60))
    bench.answer("ab$", logprob(60))
    (told,) = finished(bench)
    assert [a.agrees for a in told.answers] == [True, True]
    assert len(bench.attempts()) == 2


def test_answers_agree_by_their_text_whatever_stands_around_it() -> None:
    bench = shadowing(0.0, 0.0)
    bench.ask(stop=["z"])
    bench.answer("abz", logprob(80))
    bench.answer("ab$", logprob(80))
    (told,) = finished(bench)
    assert [a.agrees for a in told.answers] == [True, True]


def test_by_default_and_for_several_choices_and_for_calls_that_may_not_use_every_tier_nothing_is_shadowed() -> None:
    plain = CascadeBench(0.0, 0.0)
    plain.ask()
    plain.answer("ab$", logprob(80))
    assert not plain.actor.state.shadows
    bench = shadowing(0.0, 0.0)
    bench.ask("a", options=CascadeOptions(max_tier=0))
    bench.answer("ab$", logprob(80))
    bench.ask("b", n=2)
    bench.answer("ab$", logprob(80), choice=0)
    bench.answer("ab$", logprob(80), choice=1)
    assert len(bench.made(CompleteCall)) == 2
    assert not bench.actor.state.shadows


def test_a_share_is_sampled() -> None:
    bench = CascadeBench(0.0, 0.0, shadow_share=0.25)
    for number in range(80):
        bench.ask(f"r{number}")
        bench.answer("ab$", logprob(80))
        while bench.actor.state.shadows:
            bench.answer("ab$", logprob(80))
            idle(bench)
    assert 8 <= len(finished(bench)) <= 35


def test_a_busy_tier_is_not_asked_and_the_run_is_given_up_after_a_while() -> None:
    bench = shadowing(0.0, 0.0, shadow_wait_s=3.0)
    bench.summary("w-middle", waiting=1)
    bench.ask()
    bench.answer("ab$", logprob(80))
    assert len(bench.attempts()) == 1
    for _ in range(5):
        bench.pass_time(0.9, alive=("w-small",))
        bench.summary("w-middle", running=4)  # of eight places a quarter may be taken
    assert len(bench.attempts()) == 1
    assert bench.metrics.shadows.counts == {(CASCADE, "busy"): 1}


def test_a_run_goes_on_as_soon_as_an_instance_is_idle() -> None:
    bench = shadowing(0.0, 0.0)
    bench.summary("w-middle", running=2)
    bench.ask()
    bench.answer("ab$", logprob(80))
    assert len(bench.attempts()) == 1
    bench.summary("w-middle", running=1)
    bench.pass_time(0.3)
    assert bench.attempts()[1:] == [("r~s1.0", "w-middle")]


def test_a_sequence_that_stands_in_the_way_is_cancelled() -> None:
    bench = shadowing(0.0, 0.0)
    bench.ask()
    bench.answer("ab$", logprob(80))
    bench.accept()
    bench.summary("w-middle", running=8, waiting=1)
    bench.pass_time(0.3, alive=())
    (cancel,) = bench.sent(CancelSequence)
    assert (cancel.sequence, cancel.reason) == ("r~s1.0", "shadow_busy")
    assert bench.metrics.shadows.counts == {(CASCADE, "busy"): 1}
    assert not bench.actor.state.calls


def test_runs_are_bounded() -> None:
    bench = shadowing(0.0, 0.0)
    for number in range(SHADOWS_MAX + 2):
        bench.summary("w-middle", running=8)
        bench.ask(f"r{number}")
        bench.answer("ab$", logprob(80))
    assert len(bench.actor.state.shadows) == SHADOWS_MAX
    assert bench.metrics.shadows.counts == {(CASCADE, "too_many"): 2}


def test_a_tier_that_dies_ends_the_run() -> None:
    bench = shadowing(0.0, 0.0)
    bench.ask()
    bench.answer("ab$", logprob(80))
    bench.accept()
    bench.pass_time(8.0, alive=("w-small",))
    assert not bench.actor.state.shadows
    assert bench.metrics.shadows.counts == {(CASCADE, "failed"): 1}


def test_an_ingress_that_stops_does_not_wait_for_shadows() -> None:
    bench = shadowing(0.0, 0.0)
    bench.ask()
    bench.answer("ab$", logprob(80))
    bench.accept()
    bench.send(StopRequested())
    bench.pass_time(0.3)
    assert not bench.actor.state.shadows
    assert [c.reason for c in bench.sent(CancelSequence)] == ["shadow_stopped"]


def test_a_run_follows_the_plan_in_force() -> None:
    bench = shadowing()
    bench.ask()
    bench.answer("ab$", logprob(80))
    tiers = cascade_plan(70.0, 70.0, 0.0).tiers
    bench.put(cascade_plan(epoch=2, tiers=[tiers[2], tiers[0]]))
    bench.answer("ab$", logprob(50))
    bench.answer("xy$", logprob(60))
    (told,) = finished(bench)
    assert [(a.model, a.agrees) for a in told.answers] == [("large", False), ("small", True)]


def test_a_share_out_of_bounds_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="shadow_share 2"):
        CascadeBench(0.0, 0.0, shadow_share=2.0)
