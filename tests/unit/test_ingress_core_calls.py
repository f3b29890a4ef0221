"""Ingress's core: life of a call, refusals, answers of workers and taggers, stopping."""

import msgspec
import pytest
from millrace.actor.effects import Log, RecordSpan, Reply, Stop
from millrace.contracts.ingress import FindRequests, FinishReason, RequestsFound, TokenLogprobs
from millrace.contracts.local import BucketReady, KeyChanged, RequestFailure, StopRequested
from millrace.contracts.message import ErrorReply
from millrace.contracts.observers import DecisionMade, RequestFinished
from millrace.contracts.status import PresenceState, ServicePresence
from millrace.contracts.tagger import LengthTag, TagRequest
from millrace.contracts.worker import (
    AcknowledgeSequences,
    CancelSequence,
    RefusalReason,
    Sampling,
    SequenceRefused,
    StructuredOutput,
    SubmitSequence,
)

from services.ingress.calls.messages import (
    AcceptCall,
    CallAbandoned,
    CompleteCall,
    DeliverDeltas,
    FailCall,
    KeyLimits,
    RefusalKind,
    RefuseCall,
    Usage,
)
from services.ingress.config import IngressConfig, LimitsConfig, TaggingConfig
from services.ingress.dispatch.tag_client import PROMPT_HEAD_MAX, tag_request
from tests.testbed.messages import plain
from tests.unit.ingress_core import NO_TAG, PLAIN, SECOND, START, Bench, chunk, ids, instance_of, make_call, running

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
TRACED = f"00-{'a' * 32}-{'b' * 16}-01"


def config(**fields) -> IngressConfig:
    return IngressConfig(**({"tagging": NO_TAG, "dispatch": PLAIN} | fields))


def refusal(bench: Bench) -> RefuseCall:
    (only,) = bench.made(RefuseCall)
    return only


def test_a_call_is_submitted_accepted_streamed_completed_and_acknowledged():
    bench = Bench()
    bench.call()
    request, instance = bench.last_submission()
    assert request.body.prompt_token_ids == [1, 2, 3]
    assert (request.body.epoch, request.body.ingress, request.body.ingress_incarnation) == (0, "ingress-0", 7)
    assert request.body.deadline_ns == START + 600 * SECOND
    assert not bench.made(AcceptCall)
    bench.accept()
    assert bench.made(AcceptCall) == [AcceptCall(request="r")]
    call = bench.actor.state.calls["r"]
    bench.tokens(instance, chunk("ab", cached_tokens=2))
    bench.now_ns += SECOND
    bench.tokens(instance, chunk("c$", 2, finish=STOP))
    assert bench.text() == "abc"
    assert bench.made(CompleteCall) == [CompleteCall(request="r", usage=Usage(3, 4, 2))]
    assert [d.finish_reason for e in bench.made(DeliverDeltas) for d in e.deltas] == ["", "stop"]
    (outcome,) = bench.sent(RequestFinished)
    assert (outcome.outcome, outcome.output_tokens, outcome.finish_reasons) == ("completed", [4], ["stop"])
    assert (outcome.ttft_ns, outcome.e2e_ns, outcome.instances) == (0, SECOND, [instance])
    bench.pass_time(0.25)
    assert bench.sent(AcknowledgeSequences) == [AcknowledgeSequences(sequences=[("r.0", 0)])]
    assert bench.actor.snapshot()["calls"] == {}
    assert not call.sequences  # each names its call: a reference cycle


def test_a_call_of_several_choices_is_accepted_when_all_are():
    bench = Bench()
    bench.call(prompts=[[1], [2, 3]], n=2, sampling=Sampling(max_tokens=5, seed=10))
    submitted = bench.submissions()
    bodies = [s.body for s in submitted]
    assert [b.sequence for b in bodies] == ["r.0", "r.1", "r.2", "r.3"]
    assert [b.sampling.seed for b in bodies] == [10, 11, 10, 11]
    assert [b.prompt_token_ids for b in bodies] == [[1], [1], [2, 3], [2, 3]]
    assert instance_of(submitted[0]) == instance_of(submitted[1]), "choices of one prompt share its prefix"
    assert instance_of(submitted[0]) != instance_of(submitted[2]), "what is in flight counts"
    first, other = instance_of(submitted[0]), instance_of(submitted[2])
    for request in submitted[:3]:
        bench.accept(request)
    bench.tokens(first, chunk("a", cached_tokens=1), chunk("b", sequence="r.1", cached_tokens=1))
    assert not bench.made(AcceptCall)
    assert not bench.made(DeliverDeltas)
    bench.accept(submitted[3])
    assert [type(e) for e in bench.effects[-2:]] == [AcceptCall, DeliverDeltas]
    assert [(d.index, d.text) for d in bench.effects[-1].deltas] == [(0, "a"), (1, "b")]
    bench.tokens(other, chunk("cd", sequence="r.2", finish=LENGTH), chunk("e$", sequence="r.3", finish=STOP))
    told = [(d.index, d.text, d.finish_reason) for effect in bench.made(DeliverDeltas)[-2:] for d in effect.deltas]
    assert told == [(2, "cd", "length"), (3, "e", "stop")]
    assert not bench.made(CompleteCall)
    bench.tokens(first, chunk("", 1, finish=LENGTH), chunk("f", 1, sequence="r.1", finish=LENGTH))
    assert bench.made(CompleteCall) == [CompleteCall(request="r", usage=Usage(3, 7, 1))]


def test_a_chunk_after_the_end_in_the_same_message_is_dropped():
    for fields in ({}, {"n": 2}):
        bench, instance = running(**fields)
        bench.tokens(instance, chunk("a", finish=LENGTH), chunk("", 1, finish=LENGTH), chunk("b", 1))
        assert bench.text() == "a"
        assert bench.metrics.discarded.total() == 2


def test_a_call_that_does_not_stream_gets_each_choice_whole():
    bench, instance = running(stream=False, n=2)
    bench.tokens(instance, chunk("ab"), chunk("x", sequence="r.1"))
    bench.tokens(instance, chunk("cd", 2))
    assert not bench.made(DeliverDeltas)
    bench.tokens(instance, chunk("e$", 4, finish=STOP))
    (delivery,) = bench.made(DeliverDeltas)
    assert [(d.index, d.text, d.tokens, d.finish_reason) for d in delivery.deltas] == [(0, "abcde", 6, "stop")]
    bench.tokens(instance, chunk("$", 1, sequence="r.1", finish=STOP))
    assert bench.text(index=1) == "x"
    assert bench.made(CompleteCall)[0].usage == Usage(3, 8)


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_ends_the_sequence_and_its_decoding(stream):
    bench, instance = running(stop=["cd"], stream=stream)
    bench.tokens(instance, chunk("abc"))
    bench.tokens(instance, chunk("def", 3))
    assert bench.text() == "ab"
    last = bench.made(DeliverDeltas)[-1].deltas[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", "cd")
    assert bench.made(CompleteCall)[0].usage == Usage(3, 4), "tokens after the one that completed it do not count"
    assert bench.sent(RequestFinished)[0].output_tokens == [4]
    assert bench.sent(CancelSequence) == [CancelSequence(sequence="r.0", epoch=0, reason="stopped")]
    assert bench.actor.snapshot()["unacknowledged"] == 0


def test_a_stop_string_in_the_last_chunk_needs_no_cancel():
    bench, instance = running(stop=["cd"], include_stop=True)
    bench.tokens(instance, chunk("abcdef", finish=LENGTH))
    assert bench.text() == "abcd"
    assert bench.made(DeliverDeltas)[-1].deltas[-1].finish_reason == "stop"
    assert not bench.sent(CancelSequence)
    assert bench.actor.snapshot()["unacknowledged"] == 1


def test_a_stop_token_id_is_the_stop_reason_and_an_eos_is_not():
    for text, stop_ids, reason in (("abx", ids("x"), ids("x")[0]), ("ab$", ids("x"), None)):
        bench, instance = running(sampling=Sampling(max_tokens=50, stop_token_ids=stop_ids))
        bench.tokens(instance, chunk(text, finish=STOP))
        last = bench.made(DeliverDeltas)[-1].deltas[-1]
        assert (last.text, last.finish_reason, last.stop_reason) == ("ab", "stop", reason)


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs_come_as_text_and_bytes_with_as_many_alternatives_as_asked_for(stream):
    bench, instance = running(sampling=Sampling(max_tokens=50, logprobs=1), stream=stream)
    entry = TokenLogprobs(token_ids=ids("aba"), logprobs=[-0.5, -0.1, -0.5], rank=2)
    bench.tokens(instance, chunk("a", logprobs=[entry]))
    bench.tokens(instance, chunk("a$", 1, logprobs=[entry, entry], finish=STOP))
    told = [p for e in bench.made(DeliverDeltas) for d in e.deltas for p in d.logprobs or []]
    assert [(p.token, p.logprob, p.token_bytes, p.top) for p in told] == [("a", -0.5, b"a", [("b", -0.1, b"b")])] * 3


def test_a_stop_string_cuts_the_logprobs_too():
    bench, instance = running(sampling=Sampling(max_tokens=50, logprobs=0), stop=["bc"])
    entries = [TokenLogprobs(token_ids=ids(c), logprobs=[-1.0], rank=1) for c in "abcd"]
    bench.tokens(instance, chunk("abcd", logprobs=entries))
    assert [p.token for p in bench.made(DeliverDeltas)[-1].deltas[-1].logprobs] == ["a", "b", "c"]


@pytest.mark.parametrize("text", ["abc", "abcde"])
def test_the_bound_of_tokens_ends_a_sequence_without_its_engines_word_and_no_more_are_taken(text):
    bench, instance = running(sampling=Sampling(max_tokens=3))
    bench.tokens(instance, chunk(text))
    assert bench.text() == "abc"
    assert bench.made(DeliverDeltas)[-1].deltas[-1].finish_reason == "length"
    assert bench.sent(CancelSequence)


# Refusals.


def test_an_unknown_model_is_refused():
    bench = Bench()
    bench.call(model="huge")
    assert (refusal(bench).kind, refusal(bench).param) == (RefusalKind.UNKNOWN_MODEL, "model")
    assert not bench.submissions()


def test_what_no_instance_can_hold_is_refused_and_what_one_can_goes_there():
    bench = Bench()
    bench.register("w1", max_model_len=8192)
    bench.call("long", sampling=Sampling(max_tokens=8190))
    assert (refusal(bench).kind, refusal(bench).param) == (RefusalKind.TOO_LONG, "max_tokens")
    bench.call("deep", prompts=[[1] * 9000])
    assert bench.made(RefuseCall)[-1].param == "prompt"
    for number in range(4):
        bench.call(f"fits{number}", sampling=Sampling(max_tokens=8000))
        assert bench.last_submission()[1] == "w1"


def test_calls_and_choices_beyond_the_bounds_are_refused_until_one_ends():
    bench = Bench(config(limits=LimitsConfig(calls_open_max=2)))
    instance = bench.run_call("a")
    bench.call("b", n=4)
    assert refusal(bench).kind is RefusalKind.QUEUE_FULL
    assert refusal(bench).retry_after_s > 0
    bench.call("c")
    bench.call("d")
    assert bench.made(RefuseCall)[-1].request == "d"
    bench.tokens(instance, chunk("x", sequence="a.0", finish=LENGTH))
    bench.call("e")
    assert len(bench.made(RefuseCall)) == 2
    assert bench.metrics.refusals.counts == {("queue_full",): 2}


def test_a_key_is_limited_in_requests_and_other_keys_are_not():
    bench = Bench()
    limits = KeyLimits(requests_per_minute=2)
    for request in "abc":
        bench.call(request, key="k", limits=limits)
    assert refusal(bench).kind is RefusalKind.RATE_LIMITED
    assert 29 < refusal(bench).retry_after_s <= 30.1
    bench.call("d", key="other", limits=limits)
    assert len(bench.made(RefuseCall)) == 1


def test_output_tokens_are_paid_when_the_call_ends():
    bench = Bench()
    limits = KeyLimits(tokens_per_minute=60)
    instance = bench.run_call("a", key="k", limits=limits, prompts=[[1] * 20])
    bench.tokens(instance, chunk("x" * 50, sequence="a.0", finish=LENGTH))
    bench.call("b", key="k", limits=limits, prompts=[[1] * 20])
    assert refusal(bench).kind is RefusalKind.RATE_LIMITED
    assert refusal(bench).retry_after_s == pytest.approx(30, abs=0.1)  # 60 - 20 - 50 = -10; 20 are needed
    bench.now_ns += 31 * SECOND
    bench.call("c", key="k", limits=limits, prompts=[[1] * 20])
    assert len(bench.made(RefuseCall)) == 1


def test_a_model_without_any_planned_instance_is_refused_at_once_and_one_that_waits_for_its_instances_later():
    bench = Bench(instances=0)
    bench.actor.state.cluster.plans_read = False
    bench.call("a")
    assert not bench.made(RefuseCall)
    bench.send(BucketReady(bucket="plan"))
    bench.pass_time(1)
    assert refusal(bench).kind is RefusalKind.NO_INSTANCE
    bench.call("at once")
    assert bench.made(RefuseCall)[1].kind is RefusalKind.NO_INSTANCE
    bench = Bench(instances=0)
    bench.plan("w0")
    bench.call("b")
    assert not bench.made(RefuseCall)
    (decision,) = bench.sent(DecisionMade)
    assert (decision.chosen, [(s.name, s.note) for s in decision.scores]) == ("", [("w0", "never heard of")])
    bench.pass_time(9.9, alive=())
    assert not bench.made(RefuseCall)
    bench.pass_time(0.2, alive=())
    assert refusal(bench).kind is RefusalKind.NO_INSTANCE
    assert not bench.submissions()
    bench = Bench()
    bench.plan()  # the last instance is being restarted, and the plan is empty by then
    bench.call("c")
    assert not bench.made(RefuseCall)


def test_what_waits_for_an_instance_is_refused_at_once_while_the_store_takes_no_registration():
    bench = Bench(instances=0)
    supervisor = ServicePresence(role="supervisor", name="supervisor", incarnation=1, at_ns=0)
    ill = msgspec.structs.replace(supervisor, store="write error: write /x/1.blk: no space left on device")
    bench.plan("w0")
    bench.call("a")
    bench.send(ill)
    assert not bench.made(RefuseCall)  # what the plan names may come without a registration
    bench.plan()
    assert refusal(bench).kind is RefusalKind.NO_INSTANCE
    assert refusal(bench).detail.endswith(
        "no instance of it takes work now, and none can register: JetStream takes no writes (no space left on device)."
    )
    bench.send(supervisor)
    bench.call("b")
    bench.pass_time(1, alive=())
    assert [e.request for e in bench.made(RefuseCall)] == ["a"]
    bench.send(ill)
    assert [e.request for e in bench.made(RefuseCall)] == ["a", "b"]


def test_a_call_waits_for_the_plans_of_a_store_that_lost_its_leader_as_its_servers_were_restarted():
    bench = Bench(instances=0)
    bench.actor.state.cluster.plans_read = False  # it began while no plan could be read
    bench.send(ServicePresence(role="supervisor", name="s", incarnation=1, at_ns=0, store="nats: timeout"))
    bench.call()
    assert not bench.made(RefuseCall)
    bench.plan("w0")
    bench.summary_at["w0"], bench.incarnations["w0"] = 0, 1
    bench.summary("w0")
    assert bench.last_submission()[1] == "w0"


# Answers of workers.


@pytest.mark.parametrize("reason", [RefusalReason.FULL, RefusalReason.DRAINING, RefusalReason.ENGINE_DOWN])
def test_a_refused_sequence_goes_to_another_instance_in_a_new_epoch(reason):
    bench = Bench()
    bench.call()
    first, refusing = bench.last_submission()
    bench.reply(first, SequenceRefused(sequence="r.0", epoch=0, reason=reason))
    second, taking = bench.last_submission()
    assert taking != refusing
    assert second.body.epoch == 1
    bench.accept(second)
    bench.tokens(taking, chunk("ab", epoch=1))
    assert bench.text() == "ab"
    usable = bench.actor.snapshot()["instances"][refusing]["usable"]
    assert usable == (reason is RefusalReason.FULL)


@pytest.mark.parametrize(
    ("reason", "kind"), [(RefusalReason.INVALID, RefusalKind.INVALID), (RefusalReason.TOO_LONG, RefusalKind.TOO_LONG)]
)
def test_what_no_engine_takes_is_refused_and_nothing_of_it_stays_at_a_worker(reason, kind):
    bench = Bench()
    bench.call(n=2)
    first, second = bench.submissions()
    bench.accept(first)
    bench.reply(second, SequenceRefused(sequence="r.1", epoch=0, reason=reason, detail="no such bias"))
    assert (refusal(bench).kind, refusal(bench).detail) == (kind, "no such bias")
    assert [c.sequence for c in bench.sent(CancelSequence)] == ["r.0"]
    assert not bench.sent(RequestFinished), "only accepted calls have an outcome"


def test_when_every_queue_is_full_the_call_waits_and_is_then_refused_as_full():
    bench = Bench()
    bench.call()
    for _ in range(200):
        open_now = [s for s in bench.submissions() if s.correlation in bench.actor.state.pending]
        for request in open_now:
            refused = SequenceRefused(sequence="r.0", epoch=request.body.epoch, reason=RefusalReason.FULL)
            bench.reply(request, refused)
        if bench.made(RefuseCall):
            break
        bench.pass_time(0.25)
    assert refusal(bench).kind is RefusalKind.QUEUE_FULL
    assert bench.now_ns - START >= 10 * SECOND
    assert len(bench.submissions()) < 60, "tries are spaced"


@pytest.mark.parametrize(
    ("failure", "cancelled"),
    [(RequestFailure.TIMEOUT, 1), (RequestFailure.MALFORMED, 1), (RequestFailure.NO_RESPONDERS, 0)],
)
def test_an_unanswered_submission_goes_elsewhere_and_is_cancelled_where_it_may_have_arrived(failure, cancelled):
    bench = Bench()
    bench.call()
    first, silent = bench.last_submission()
    bench.fail(first, failure)
    second, other = bench.last_submission()
    assert (other != silent, second.body.epoch) == (True, 1)
    assert [c.epoch for c in bench.sent(CancelSequence)] == [0] * cancelled
    bench.accept(second)
    bench.tokens(silent, chunk("zz", epoch=0))
    assert bench.text() == "", "what the first one decodes is void"


def test_the_time_that_an_instance_takes_to_answer_does_not_count_as_a_wait_for_one():
    bench = Bench()
    bench.call()
    bench.pass_time(12)  # ingress itself may have been held up
    for _ in bench.model_of:
        bench.fail(bench.last_submission()[0], RequestFailure.NO_RESPONDERS)
    assert not bench.made(RefuseCall)
    bench.pass_time(0.25)
    bench.accept()
    assert bench.made(AcceptCall)


@pytest.mark.parametrize("heard", [(), ("w0",)], ids=["silent", "silent to the coordinator"])
def test_a_call_waits_on_for_an_instance_that_is_silent_and_still_registered(heard: tuple[str, ...]):
    bench = Bench()
    bench.register("w1", max_model_len=8192)
    bench.die("w1")
    bench.pass_time(3, alive=heard)
    bench.plan(epoch=2)
    bench.call()
    bench.call("long", prompts=[[1] * 5000])  # none but the dead one holds it
    bench.pass_time(30, alive=heard)
    assert [e.request for e in bench.made(RefuseCall)] == ["long"]
    assert bench.actor.state.sequences["r.0"].retry.rounds < 50
    bench.send(KeyChanged(bucket="instance", key="w0", value=None, revision=2))
    assert [(e.request, e.kind) for e in bench.made(RefuseCall)][1:] == [("r", RefusalKind.NO_INSTANCE)]


def test_where_all_instances_answer_late_each_is_given_longer_and_no_call_is_refused_while_one_is_heard():
    bench = Bench()
    bench.call()
    for seconds in (1, 2, 1, 2, 4, 8, 8):
        request = bench.last_submission()[0]
        assert request.timeout_ns == seconds * SECOND
        bench.pass_time(seconds)
        bench.fail(request, RequestFailure.TIMEOUT)
        bench.pass_time(0.25)
    bench.fail(bench.last_submission()[0], RequestFailure.DISCONNECTED)
    bench.pass_time(1)
    assert not bench.made(RefuseCall)
    assert len(bench.submissions()) == 9


def test_an_instance_without_a_subscription_gets_nothing_until_it_is_heard_again():
    bench = Bench()
    bench.call("a")
    first, gone = bench.last_submission()
    bench.fail(first, RequestFailure.NO_RESPONDERS)
    for request in "bcd":
        bench.call(request)
        assert bench.last_submission()[1] != gone
    bench.pass_time(0.25)
    assert bench.actor.snapshot()["instances"][gone]["usable"]


# Tags.


def tagged_bench(**tagging) -> Bench:
    return Bench(IngressConfig(tagging=TaggingConfig(**tagging), dispatch=PLAIN))


def test_the_tag_is_asked_first_and_travels_with_the_sequence_and_the_outcome():
    bench = tagged_bench()
    bench.call(prompt_head="count to ten", key="k")
    (ask,) = bench.asked(TagRequest)
    assert (ask.subject, ask.timeout_ns) == ("mr.local.tag.tiny", SECOND // 20)
    assert (ask.body.prompt, ask.body.prompt_tokens, ask.body.max_tokens) == ("count to ten", 3, 50)
    assert not bench.submissions()
    bench.reply(ask, LengthTag(request="r", mean=12.4, source="model"))
    request, instance = bench.last_submission()
    assert request.body.expected_output_tokens == 12
    bench.accept()
    bench.tokens(instance, chunk("a", finish=LENGTH))
    assert bench.sent(RequestFinished)[0].predicted_output_tokens == 12.4


def test_a_taggers_question_says_what_may_tell_the_length():
    sampling = Sampling(
        max_tokens=100,
        stop_token_ids=[9],
        min_tokens=5,
        presence_penalty=0.5,
        repetition_penalty=1.25,
        structured=StructuredOutput(regex="[0-9]+"),
    )
    call = make_call(key="team", n=2, stop=["\n", "END"], sampling=sampling, prompt_head="p" * 5000)
    asked = tag_request(call, 3)
    assert (asked.key, asked.n, asked.prompts, asked.stops, asked.min_tokens) == ("team", 2, 1, 3, 5)
    assert (asked.penalties, asked.structured) == (0.75, "regex")
    assert len(asked.prompt) == PROMPT_HEAD_MAX


@pytest.mark.parametrize(
    ("tag", "length"),
    [
        (LengthTag(request="r"), None),
        (LengthTag(request="r", mean=float("nan")), None),
        (LengthTag(request="r", mean=float("inf")), None),
        (LengthTag(request="r", mean=-3.0), None),
        (LengthTag(request="another", mean=3.0), None),
        (ErrorReply(reason="overloaded"), None),
        (LengthTag(request="r", mean=1e300), 50),
    ],
)
def test_a_tag_that_says_nothing_sensible_is_an_unknown_length_and_none_is_beyond_the_bound(tag, length):
    bench = tagged_bench()
    bench.call()
    bench.reply(bench.asked(TagRequest)[0], tag)
    assert bench.submissions()[0].body.expected_output_tokens == length


def test_a_dead_tagger_fails_no_request_is_left_alone_for_a_while_and_is_logged_once_as_is_its_return():
    bench = tagged_bench()
    for number in range(3):
        bench.call(f"r{number}")
        bench.fail(bench.asked(TagRequest)[-1], RequestFailure.TIMEOUT)
    assert len(bench.submissions()) == 3
    bench.call("r3")
    assert (len(bench.asked(TagRequest)), len(bench.submissions())) == (3, 4)
    for number in range(3):
        bench.now_ns += SECOND
        bench.summaries()
        bench.call(f"again{number}")
        bench.fail(bench.asked(TagRequest)[-1], RequestFailure.TIMEOUT)
    assert len(bench.asked(TagRequest)) == 6
    assert [e.event for e in bench.made(Log)] == ["tags_missing"]
    bench.now_ns += SECOND
    bench.summaries()
    for number in range(2):
        bench.call(f"later{number}")
        bench.reply(bench.asked(TagRequest)[-1], LengthTag(request=f"later{number}", mean=9.0))
    assert [e.event for e in bench.made(Log)] == ["tags_missing", "tags_back"]


def test_the_tagger_is_not_asked_where_the_length_is_known_or_nobody_needs_it():
    bench = tagged_bench()
    bench.call(sampling=Sampling(max_tokens=9, ignore_eos=True))
    assert bench.submissions()[0].body.expected_output_tokens == 9
    for mode in ("needed", "never"):
        bench = tagged_bench(mode=mode)
        bench.call()
        assert not bench.asked(TagRequest)
        assert bench.submissions()


# Ends that clients and time bring about.


@pytest.mark.parametrize(("reason", "outcome"), [("client_gone", "cancelled"), ("slow_reader", "cut")])
def test_an_abandoned_call_is_cancelled_everywhere_and_nothing_more_is_delivered(reason, outcome):
    bench, instance = running(n=2)
    bench.tokens(instance, chunk("ab"))
    bench.effects.clear()
    bench.send(CallAbandoned(request="r", reason=reason))
    assert {(c.sequence, c.reason) for c in bench.sent(CancelSequence)} == {("r.0", reason), ("r.1", reason)}
    (outcome_message,) = bench.sent(RequestFinished)
    assert (outcome_message.outcome, outcome_message.output_tokens) == (outcome, [2, 0])
    bench.tokens(instance, chunk("c", 2))
    bench.tokens(instance, chunk("d", 3, finish=LENGTH))
    assert not bench.made(DeliverDeltas)
    assert bench.actor.snapshot()["unacknowledged"] == 1, "its end is acknowledged, so that the worker forgets it"
    bench.send(CallAbandoned(request="r", reason=reason))
    assert len(bench.sent(RequestFinished)) == 1


def test_a_call_abandoned_while_its_tag_is_open_leaves_nothing():
    bench = tagged_bench()
    bench.call()
    bench.send(CallAbandoned(request="r", reason="client_gone"))
    assert bench.actor.state.pending == {}
    bench.reply(bench.asked(TagRequest)[0], LengthTag(request="r"))
    assert not bench.submissions()


def test_a_stray_sequence_is_cancelled_but_not_with_every_token():
    bench = Bench()
    for _ in range(3):
        bench.tokens("w0", chunk("a", sequence="old.0", epoch=4))
    assert bench.sent(CancelSequence) == [CancelSequence(sequence="old.0", epoch=4, reason="stray")]
    bench.now_ns += SECOND
    bench.tokens("w0", chunk("a", sequence="old.0", epoch=4))
    assert len(bench.sent(CancelSequence)) == 2
    assert bench.metrics.discarded.counts == {("late",): 4}


def test_a_call_past_its_deadline_fails_with_a_sentence():
    bench = Bench()
    bench.run_call("a", timeout_ns=2 * SECOND)
    bench.call("b", timeout_ns=2 * SECOND)
    bench.pass_time(2.5)
    (failed,) = bench.made(FailCall)
    assert (failed.request, failed.kind) == ("a", RefusalKind.TIMEOUT)
    assert (refusal(bench).request, refusal(bench).kind) == ("b", RefusalKind.TIMEOUT)
    assert {c.sequence for c in bench.sent(CancelSequence)} == {"a.0", "b.0"}
    assert [o.outcome for o in bench.sent(RequestFinished)] == ["failed"]


def test_a_stopping_ingress_refuses_new_calls_finishes_old_ones_and_stops():
    bench, instance = running("a")
    bench.send(StopRequested())
    assert bench.sent(ServicePresence)[-1].state is PresenceState.LEAVING
    bench.call("b")
    assert refusal(bench).kind is RefusalKind.STOPPING
    assert not bench.made(Stop)
    bench.tokens(instance, chunk("x", sequence="a.0", finish=LENGTH))
    assert isinstance(bench.effects[-1], Stop)
    assert bench.sent(AcknowledgeSequences)


def test_an_ingress_whose_supervisor_died_gives_up_at_once_and_says_why():
    bench = Bench()
    bench.run_call("a")
    bench.send(StopRequested(orphaned=True))
    (failed,) = bench.made(FailCall)
    assert failed.kind is RefusalKind.STOPPING
    assert "supervisor has died" in failed.detail
    assert isinstance(bench.effects[-1], Stop)


def test_a_replaced_ingress_ends_with_its_last_call_and_one_asked_to_stop_gives_up_what_runs_past_the_limit():
    bench = Bench(config(limits=LimitsConfig(drain_s=3.0)))
    bench.run_call("a")
    bench.send(StopRequested(replaced=True))
    bench.pass_time(10)
    assert not bench.made(Stop)
    assert not bench.made(FailCall)
    bench.send(StopRequested())
    bench.pass_time(2.5)
    assert not bench.made(Stop)
    bench.pass_time(1)
    assert bench.made(FailCall)[0].kind is RefusalKind.STOPPING
    assert len(bench.made(Stop)) == 1


# Decisions, configuration, traces.


def test_what_is_in_flight_is_forgotten_when_summaries_know_it_or_it_ends():
    bench = Bench(instances=1)

    def in_flight() -> int:
        return bench.actor.snapshot()["instances"]["w0"]["in_flight_tokens"]

    bench.run_call("a")
    bench.call("b")
    assert in_flight() == 6
    bench.now_ns += 1
    bench.summary("w0")
    assert in_flight() == 6
    bench.summary("w0")
    assert in_flight() == 3, "b is not accepted yet"
    bench.send(CallAbandoned(request="b", reason="client_gone"))
    assert in_flight() == 0


def test_spans_tell_a_sampled_call_and_nothing_is_made_for_others():
    bench = tagged_bench()
    bench.call("r", traceparent=TRACED, parent_span_id="c" * 16)
    bench.reply(bench.asked(TagRequest)[0], LengthTag(request="r", mean=4.0))
    request, instance = bench.last_submission()
    bench.accept()
    bench.tokens(instance, chunk("ab$", finish=STOP))
    spans = {s.name: s for s in bench.made(RecordSpan)}
    assert list(spans) == ["tag", "dispatch", "ingress"]
    root = spans["ingress"]
    assert (root.traceparent, root.parent_span_id) == (TRACED, "c" * 16)
    assert root.attributes["output_tokens"] == root.attributes["gen_ai.usage.output_tokens"] == 3
    assert root.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert spans["tag"].parent_span_id == spans["dispatch"].parent_span_id == "b" * 16
    assert request.traceparent == spans["dispatch"].traceparent
    assert "lowest of 2" in spans["dispatch"].attributes["reason"]
    bench = tagged_bench(mode="never")
    for traceparent in ("", TRACED[:-1] + "0", "nonsense"):
        instance = bench.run_call(f"r{len(traceparent)}", traceparent=traceparent)
        bench.tokens(instance, chunk("a", sequence=f"r{len(traceparent)}.0", finish=LENGTH))
    assert not bench.made(RecordSpan)


def test_a_call_that_fails_over_or_fails_is_traced_from_then_on_though_it_was_not_sampled():
    unsampled = TRACED[:-1] + "0"
    bench = tagged_bench(mode="never")
    instance = bench.run_call("r", traceparent=unsampled)
    bench.tokens(instance, chunk("a"))
    bench.die(instance)
    assert not bench.made(RecordSpan)
    request, other = bench.last_submission()
    assert request.traceparent.endswith("-01"), "the worker records its spans too"
    bench.accept()
    bench.tokens(other, chunk("b", 1, epoch=request.body.epoch, finish=LENGTH))
    spans = {s.name: s for s in bench.made(RecordSpan)}
    assert list(spans) == ["continuation", "ingress"]
    assert spans["ingress"].traceparent == TRACED
    assert spans["continuation"].links == [bench.submissions()[0].traceparent]
    bench = tagged_bench(mode="never")
    instance = bench.run_call("r", traceparent=unsampled)
    bench.send(CallAbandoned(request="r", reason="client_gone"))
    assert [(s.name, s.error) for s in bench.made(RecordSpan)] == [("ingress", "client_gone")]


def test_a_type_that_it_does_not_take_changes_nothing_and_is_answered_where_an_answer_is_wanted():
    bench = Bench()
    before = bench.actor.snapshot()
    body = plain(SubmitSequence, sequence="x.0", prompt_token_ids=[1])
    assert bench.send(body) == []
    (answer,) = bench.send(body, reply_to="inbox")
    assert isinstance(answer, Reply)
    assert answer.body.reason == "unexpected"
    assert bench.actor.snapshot() == before


@pytest.mark.parametrize(
    ("constraint", "detail", "shown", "param"),
    [
        (
            "response_format",
            "Failed to convert the grammar: [13:01:02] /project/cpp/json_schema_converter.cc:512: Unsupported type",
            "Failed to convert the grammar: Unsupported type",
            "response_format",
        ),
        ("structured_outputs", "Invalid regex: unclosed group", "Invalid regex: unclosed group", "structured_outputs"),
        ("response_format", "logit_bias is out of bounds", "logit_bias is out of bounds", ""),
        ("", "", "The engine refuses the request: invalid.", ""),
    ],
)
def test_an_engines_refusal_names_the_field_and_no_source_file(constraint, detail, shown, param):
    bench = Bench()
    bench.call(constraint_param=constraint)
    submission = bench.submissions()[-1]
    refused = SequenceRefused(sequence="r.0", epoch=0, reason=RefusalReason.INVALID, detail=detail)
    [refusal] = [e for e in bench.reply(submission, refused) if isinstance(e, RefuseCall)]
    assert (refusal.kind, refusal.detail, refusal.param) == (RefusalKind.INVALID, shown, param)


def test_open_requests_are_found_by_their_clients_id():
    bench = Bench()
    bench.run_call("a", client_id="mine")
    bench.run_call("b", client_id="theirs")
    bench.run_call("c", client_id="mine")
    [reply] = bench.send(FindRequests(client_id="mine"), reply_to="inbox")
    assert reply == Reply(to="inbox", body=RequestsFound(ingress="ingress-0", requests=["a", "c"]))
    for nobodys in ("other", ""):
        assert bench.send(FindRequests(client_id=nobodys), reply_to="inbox") == []
