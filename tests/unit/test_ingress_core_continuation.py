"""Continuation: every trigger, where the sequence goes, what stays as it was, and when it is given up."""

from collections import Counter
from collections.abc import Callable

import pytest
from millrace.actor.effects import Request
from millrace.contracts.ingress import FinishReason, ReturnReason, SequencesReturned, TokenLogprobs, TokensResent
from millrace.contracts.local import BusDisconnected, BusReconnected, RequestFailure
from millrace.contracts.message import ErrorReply
from millrace.contracts.observers import DecisionMade, RequestFinished
from millrace.contracts.worker import CancelSequence, ResendTokens, Sampling

from services.ingress.calls.messages import CompleteCall, DeliverDeltas, FailCall, RefusalKind, RefuseCall, Usage
from services.ingress.config import ContinuationConfig, IngressConfig
from tests.unit.ingress_core import NO_TAG, PLAIN, Bench, chunk, ids, instance_of

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def restarted(bench: Bench, instance: str, shown: Callable[[Bench, str], object] = Bench.summary) -> None:
    bench.incarnations[instance] = bench.now_ns + 1
    shown(bench, instance)


def returned(bench: Bench, instance: str, reason: ReturnReason) -> None:
    bench.send(SequencesReturned(instance=instance, incarnation=1, reason=reason, sequences=[("r.0", 0)]))


def resend(bench: Bench, instance: str) -> Request:
    """The question that a gap causes."""
    bench.tokens(instance, chunk("z", 9))
    return bench.asked(ResendTokens)[-1]


def stalled(bench: Bench, instance: str, seconds: int = 32, *, known: int = 3) -> None:
    """Its worker has nothing to tell but the tokens that are known."""
    for _ in range(seconds):
        bench.pass_time(1)
        for ask in bench.asked(ResendTokens):
            if ask.correlation in bench.actor.state.pending:
                bench.reply(ask, TokensResent(chunk=chunk("", known)))


TRIGGERS = {
    "dead": (lambda b, name: b.die(name), "instance_dead"),
    "restarted": (restarted, "instance_restarted"),
    "restarted_by_record": (lambda b, name: restarted(b, name, Bench.register), "instance_restarted"),
    "restarted_by_tokens": (lambda b, name: restarted(b, name, Bench.tokens), "instance_restarted"),
    "silent": (lambda b, name: b.pass_time(1.75, alive=tuple({*b.summary_at} - {name})), "instance_silent"),
    "returned": (lambda b, name: returned(b, name, ReturnReason.DRAINING), "returned_draining"),
    "engine_died": (lambda b, name: returned(b, name, ReturnReason.ENGINE_DIED), "returned_engine_died"),
    "gave_up": (lambda b, name: b.tokens(name, chunk("", 3, finish=FinishReason.ERROR)), "engine_gave_up"),
    "cancelled": (lambda b, name: b.tokens(name, chunk("", 3, finish=FinishReason.CANCELLED)), "engine_gave_up"),
    "forgotten": (lambda b, name: b.reply(resend(b, name), ErrorReply(reason="forgotten")), "tokens_forgotten"),
    "only_later": (
        lambda b, name: b.reply(resend(b, name), TokensResent(chunk=chunk("z", 9))), "tokens_forgotten",
    ),
    "unheard": (lambda b, name: b.fail(resend(b, name), RequestFailure.NO_RESPONDERS), "resend_failed"),
    "stalled": (stalled, "stalled"),
}  # fmt: skip


@pytest.mark.parametrize(("trigger", "why"), TRIGGERS.values(), ids=TRIGGERS)
def test_a_lost_sequence_goes_on_elsewhere_from_its_log(trigger, why):
    bench = Bench()
    instance = bench.run_call(sampling=Sampling(max_tokens=50, seed=3, presence_penalty=0.5))
    bench.tokens(instance, chunk("abc"))
    trigger(bench, instance)
    request, other = bench.last_submission()
    assert other != instance
    assert (request.body.epoch, request.body.output_token_ids) == (1, ids("abc"))
    assert request.body.prompt_token_ids == [1, 2, 3]
    assert request.body.sampling == Sampling(max_tokens=50, seed=3, presence_penalty=0.5)
    assert CancelSequence(sequence="r.0", epoch=0, reason=why) in bench.sent(CancelSequence)
    decision = bench.sent(DecisionMade)[-1]
    assert (decision.kind, decision.chosen, decision.epoch) == ("continuation", other, 1)
    assert decision.reason.startswith(why)
    assert bench.metrics.continuations.counts == {(why,): 1}
    bench.accept(request)
    bench.tokens(instance, chunk("zzz", 3))  # the old one lives on: void
    bench.tokens(other, chunk("de$", 3, epoch=1, finish=STOP))
    assert bench.text() == "abcde"
    assert bench.made(CompleteCall) == [CompleteCall(request="r", usage=Usage(3, 6))]
    (outcome,) = bench.sent(RequestFinished)
    assert (outcome.outcome, outcome.continuations, outcome.instances) == ("completed", 1, [instance, other])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kept", range(1, 5))
def test_a_parser_of_the_output_gets_each_token_once_wherever_the_stream_breaks(stream, kept):
    bench = Bench()
    instance = bench.run_call(stream=stream, tell_tokens=True)
    bench.tokens(instance, *[chunk(c, i) for i, c in enumerate("abcde"[:kept])])
    bench.die(instance)
    request, other = bench.last_submission()
    bench.accept(request)
    bench.tokens(other, chunk("abcde"[kept - 1 :] + "$", kept - 1, epoch=1, finish=STOP))
    told = [delta for effect in bench.made(DeliverDeltas) for delta in effect.deltas]
    assert "".join(delta.text for delta in told) == "abcde"
    assert [token for delta in told for token in delta.token_ids or []] == ids("abcde$")


@pytest.mark.parametrize("stream", [True, False])
def test_choices_logprobs_and_cached_tokens_are_counted_once_over_the_break(stream):
    bench = Bench()
    entry = [TokenLogprobs(token_ids=ids("a"), logprobs=[-0.5], rank=1)]
    instance = bench.run_call(n=2, stream=stream, sampling=Sampling(max_tokens=2, logprobs=0))
    fields = {"logprobs": entry, "cached_tokens": 2}
    bench.tokens(instance, *[chunk("a", sequence=s, **fields) for s in ("r.0", "r.1")])
    bench.die(instance)
    for request in bench.submissions()[2:]:
        bench.accept(request)
    fields |= {"cached_tokens": 3, "epoch": 1, "finish": LENGTH}
    bench.tokens(bench.last_submission()[1], *[chunk("a", 1, sequence=s, **fields) for s in ("r.0", "r.1")])
    told = [d for e in bench.made(DeliverDeltas) for d in e.deltas]
    for index in (0, 1):
        assert "".join(d.text for d in told if d.index == index) == "aa"
        assert sum(len(d.logprobs) for d in told if d.index == index) == 2
    assert bench.made(CompleteCall)[0].usage == Usage(3, 4, 2)


@pytest.mark.parametrize(
    ("log", "sampling", "reason"),
    [
        ("abc$", Sampling(max_tokens=50), "stop"),
        ("abcx", Sampling(max_tokens=50, stop_token_ids=ids("x")), "stop"),
        ("abcx", Sampling(max_tokens=50, stop_token_ids=ids("x"), min_tokens=9), ""),
        ("abc$", Sampling(max_tokens=50, ignore_eos=True), ""),
        ("abcd", Sampling(max_tokens=50), ""),
    ],
)
def test_a_log_that_fulfils_its_end_is_completed_and_not_submitted_again(log, sampling, reason):
    bench = Bench()
    instance = bench.run_call(sampling=sampling)
    bench.tokens(instance, chunk(log))
    bench.die(instance)
    if reason:
        assert bench.made(CompleteCall)[0].usage == Usage(3, 4)
        assert bench.made(DeliverDeltas)[-1].deltas[-1].finish_reason == reason
        assert len(bench.submissions()) == 1
    else:
        assert not bench.made(CompleteCall)
        assert len(bench.submissions()) == 2


# Who is lost, and who is not.


@pytest.mark.parametrize("reason", [ReturnReason.REQUESTED, ReturnReason.DRAINING])
def test_a_queued_sequence_may_be_handed_back_often_by_instances_that_live(reason):
    bench = Bench()
    instance = bench.run_call()
    returns = bench.config.continuation.fruitless_max + 3
    for epoch in range(returns):
        before = len(bench.submissions())
        bench.send(SequencesReturned(instance=instance, incarnation=1, reason=reason, sequences=[("r.0", epoch)]))
        if len(bench.submissions()) == before:
            bench.pass_time(1.0)
        request, instance = bench.last_submission()
        assert request.body.epoch == epoch + 1
        bench.accept(request)
        bench.pass_time(0.3)
    assert all(known.usable for known in bench.actor.state.cluster.instances.values())
    assert bench.metrics.continuations.counts == {(f"returned_{reason}",): returns}
    bench.tokens(instance, chunk("ok", epoch=returns, finish=LENGTH))
    assert bench.text() == "ok"


def test_returned_sequences_of_another_epoch_or_incarnation_stay():
    bench = Bench()
    instance = bench.run_call()
    why = ReturnReason.DRAINING
    for incarnation, epoch in ((1, 1), (2, 0)):
        had = [("r.0", epoch), ("unknown.0", 0)]
        bench.send(SequencesReturned(instance=instance, incarnation=incarnation, reason=why, sequences=had))
    assert len(bench.submissions()) == 1


def test_a_submission_under_way_at_the_death_is_placed_anew_without_being_a_continuation():
    bench = Bench()
    bench.call()
    first, instance = bench.last_submission()
    bench.die(instance)
    second, other = bench.last_submission()
    assert (second.body.epoch, other != instance) == (1, True)
    assert bench.sent(DecisionMade)[-1].kind == "dispatch"
    assert bench.accept(first) == []
    bench.accept(second)
    bench.tokens(other, chunk("a", epoch=1, finish=LENGTH))
    assert bench.sent(RequestFinished)[0].continuations == 0


def test_a_stalled_stream_stays_where_it_is_when_there_is_no_other_instance():
    bench = Bench(instances=1)
    instance = bench.run_call()
    bench.tokens(instance, chunk("abc"))
    stalled(bench, instance)
    assert len(bench.submissions()) == 1


def test_a_sequence_in_a_queue_is_given_more_time_than_a_stream():
    bench = Bench()
    instance = bench.run_call()
    stalled(bench, instance, 119, known=0)
    assert len(bench.submissions()) == 1
    stalled(bench, instance, 3, known=0)
    assert bench.last_submission()[1] != instance


# Where it goes.


def test_the_only_instance_is_asked_again_at_once_when_it_is_a_new_incarnation():
    bench = Bench(instances=1)
    instance = bench.run_call()
    bench.tokens(instance, chunk("abc"))
    bench.die(instance)
    assert len(bench.submissions()) == 1
    restarted(bench, instance)
    request, again = bench.last_submission()
    assert (again, request.body.epoch, request.body.output_token_ids) == (instance, 1, ids("abc"))
    bench.tokens(instance, chunk("d", 3, epoch=1, finish=LENGTH))
    assert bench.text() == "abcd"


def test_the_only_instance_in_the_same_incarnation_is_asked_again_after_a_pause():
    bench = Bench(instances=1)
    instance = bench.run_call()
    bench.tokens(instance, chunk("", 3, finish=FinishReason.ERROR))
    bench.tokens(instance, chunk("abc", finish=FinishReason.ERROR))
    assert len(bench.submissions()) == 1
    bench.pass_time(0.25)
    assert bench.last_submission()[0].body.epoch == 1


def test_a_sequence_that_nobody_can_continue_fails_with_a_clear_sentence():
    bench = Bench(instances=1)
    instance = bench.run_call()
    bench.tokens(instance, chunk("abc"))
    bench.die(instance)
    bench.pass_time(119, alive=())
    assert not bench.made(FailCall)
    bench.pass_time(3, alive=())
    (failed,) = bench.made(FailCall)
    assert failed.kind is RefusalKind.CONTINUATION_FAILED
    assert "instance_dead" in failed.detail
    assert "tiny" in failed.detail
    assert bench.sent(RequestFinished)[0].outcome == "failed"
    assert not bench.made(RefuseCall)


def test_a_request_that_no_engine_survives_is_given_up_and_not_at_full_speed():
    bench = Bench(IngressConfig(tagging=NO_TAG, dispatch=PLAIN, continuation=ContinuationConfig(fruitless_max=3)))
    bench.run_call()
    for _ in range(40):
        if bench.made(FailCall):
            break
        request, instance = bench.last_submission()
        epoch = request.body.epoch
        if request.correlation in bench.actor.state.pending:
            bench.accept(request)
        bench.tokens(instance, chunk("", epoch=epoch, finish=FinishReason.CANCELLED))
        bench.pass_time(0.25)
    (failed,) = bench.made(FailCall)
    assert failed.kind is RefusalKind.CONTINUATION_FAILED
    assert len(bench.submissions()) == 4


# The bus.


def test_while_the_bus_is_away_nobody_is_suspected_and_after_it_the_silent_are_asked():
    bench = Bench()
    first = bench.run_call("a")
    second = bench.run_call("b")
    bench.tokens(first, chunk("ab", sequence="a.0"))
    bench.tokens(second, chunk("xy", sequence="b.0"))
    bench.send(BusDisconnected())
    bench.pass_time(20, alive=())
    bench.send(BusReconnected())
    bench.pass_time(1, alive=())
    bench.tokens(second, chunk("z", 2, sequence="b.0"))
    bench.pass_time(1.25)
    assert [a.body for a in bench.asked(ResendTokens)] == [ResendTokens(sequence="a.0", epoch=0, from_index=2)]
    bench.reply(bench.asked(ResendTokens)[0], TokensResent(chunk=chunk("cd", 2, sequence="a.0")))
    assert bench.text("a") == "abcd"
    bench.pass_time(3)
    assert bench.metrics.continuations.total() == 0


def test_an_instance_that_stays_away_after_the_outage_is_continued_elsewhere():
    bench = Bench()
    instance = bench.run_call()
    bench.tokens(instance, chunk("abc"))
    bench.send(BusDisconnected())
    bench.pass_time(5, alive=())
    bench.send(BusReconnected())
    others = tuple(n for n in bench.summary_at if n != instance)
    bench.pass_time(2, alive=others)
    for ask in bench.asked(ResendTokens):
        bench.fail(ask, RequestFailure.TIMEOUT)
    bench.pass_time(2, alive=others)
    request, other = bench.last_submission()
    assert other != instance
    assert request.body.output_token_ids == ids("abc")


def test_a_call_that_comes_or_is_under_way_while_the_bus_is_away_is_placed_when_it_is_back():
    bench = Bench()
    bench.call("a")
    bench.send(BusDisconnected())
    bench.fail(bench.submissions()[0], RequestFailure.DISCONNECTED)
    bench.call("b")
    bench.pass_time(9, alive=())
    assert len(bench.submissions()) == 1
    assert not bench.made(RefuseCall)
    bench.send(BusReconnected())
    again = bench.submissions()[1:]
    assert sorted(s.request for s in again) == ["a", "b"]
    for request in again:  # workers are not back yet: they are not to blame
        bench.fail(request, RequestFailure.NO_RESPONDERS)
    assert bench.actor.state.cluster.usable("tiny") == 2
    bench.pass_time(0.5)
    for request in bench.submissions()[3:]:
        bench.accept(request)
    assert {c.accepted for c in bench.actor.state.calls.values()} == {True}


def test_while_the_bus_stays_away_calls_are_refused_after_a_wait_and_streams_fail_after_the_time_of_a_continuation():
    bench = Bench()
    bench.run_call("a")
    bench.send(BusDisconnected())
    bench.pass_time(5, alive=())
    bench.call("b")
    bench.pass_time(5.25, alive=())
    bench.call("c")
    refused = bench.made(RefuseCall)
    assert [(each.request, each.kind, each.retry_after_s) for each in refused] == [
        ("b", RefusalKind.NO_INSTANCE, 1.0),
        ("c", RefusalKind.NO_INSTANCE, 1.0),
    ]
    assert "no connection to NATS for 10 s" in refused[0].detail
    bench.pass_time(109, alive=())
    assert not bench.made(FailCall)
    bench.pass_time(1, alive=())
    assert bench.made(FailCall)[0].kind is RefusalKind.CONTINUATION_FAILED
    assert not bench.actor.state.calls


def test_the_time_of_an_outage_does_not_count_against_a_continuation():
    bench = Bench(instances=1)
    instance = bench.run_call()
    bench.die(instance)
    bench.pass_time(60, alive=())
    bench.send(BusDisconnected())
    bench.pass_time(100, alive=())
    bench.send(BusReconnected())
    bench.pass_time(110, alive=())
    assert not bench.made(FailCall)
    bench.pass_time(12, alive=())
    assert bench.made(FailCall)[0].kind is RefusalKind.CONTINUATION_FAILED


def test_a_call_goes_on_after_tokens_that_another_ingress_had():
    bench = Bench()
    instance = bench.run_call(begun=ids("abc"), tell_tokens=True, stop=["cd"])
    assert bench.last_submission()[0].body.output_token_ids == ids("abc")
    (begun,) = bench.made(DeliverDeltas)
    assert [(d.text, d.tokens, d.token_ids) for d in begun.deltas] == [("ab", 3, ids("abc"))]  # "c" may begin a stop
    bench.tokens(instance, chunk("xe", 3, finish=LENGTH))
    assert bench.text() == "abcxe"
    (done,) = bench.made(CompleteCall)
    assert done.usage == Usage(3, 5)


def test_what_a_process_of_several_instances_lost_is_spread_over_them_and_waits_for_none_that_stays_away():
    bench = Bench(instances=4)
    for name in bench.summary_at:
        bench.die(name)
    for number in range(12):
        bench.call(f"r{number}")
    bench.pass_time(2, alive=())
    back = ("w0", "w1", "w2")
    for name in back:
        bench.come_back(name)
    assert not bench.submissions()
    bench.pass_time(1, alive=back)
    assert Counter(map(instance_of, bench.submissions())) == dict.fromkeys(back, 4)
