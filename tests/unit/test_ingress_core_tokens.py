"""Token order: whatever the bus does to chunks, the client sees the whole text once, in order.

Losses, repetitions and disorder at random: test_ingress_moving_fuzz.py.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace.contracts.ingress import (
    FinishReason,
    ReturnReason,
    SequencesReturned,
    TokenChunk,
    TokenLogprobs,
    TokensGenerated,
    TokensResent,
)
from millrace.contracts.local import RequestFailure
from millrace.contracts.worker import ResendTokens, Sampling

from services.ingress.calls.messages import CompleteCall, DeliverDeltas, FailCall, RefuseCall
from tests.unit.ingress_core import Bench, chunk, ids, running

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def discarded(bench: Bench) -> dict[str, int]:
    return {kind: count for (kind,), count in bench.metrics.discarded.counts.items()}


def test_a_gap_is_asked_for_once_and_the_answer_closes_it():
    bench, instance = running()
    bench.tokens(instance, chunk("ab"))
    bench.tokens(instance, chunk("e", 4))
    bench.tokens(instance, chunk("f", 5))
    (ask,) = bench.asked(ResendTokens)
    assert ask.subject == f"mr.local.engine.{instance}.resend"
    assert ask.body == ResendTokens(sequence="r.0", epoch=0, from_index=2)
    assert bench.text() == "ab"
    bench.reply(ask, TokensResent(chunk=chunk("cdef", 2)))
    assert bench.text() == "abcdef"
    bench.tokens(instance, chunk("g", 6))
    assert bench.text() == "abcdefg"
    assert discarded(bench) == {"gap": 2}


@pytest.mark.parametrize("stream", [True, False])
def test_a_prompts_logprobs_are_told_once_also_where_its_instance_dies(stream: bool):
    bench = Bench()
    sampling = Sampling(max_tokens=50, prompt_logprobs=1)
    first = bench.run_call(sampling=sampling, stream=stream, tokens_as_ids=True)
    told = [TokenLogprobs([2, 4], [-1.0, -0.5], 2), TokenLogprobs([3, 5], [-3.0, -0.1], 7)]
    bench.tokens(first, chunk("ab", prompt_logprobs=told))
    bench.send(
        SequencesReturned(
            instance=first, incarnation=bench.incarnations[first], reason=ReturnReason.DRAINING, sequences=[("r.0", 0)]
        )
    )
    submission, second = bench.last_submission()
    assert submission.body.output_token_ids == ids("ab")
    bench.accept(submission)
    bench.tokens(second, chunk("c", 2, epoch=1, finish=LENGTH))
    found = [d.prompt_logprobs for e in bench.made(DeliverDeltas) for d in e.deltas if d.prompt_logprobs]
    assert [[each and list(each) for each in entries] for entries in found] == [[None, ["2", "4"], ["3", "5"]]]
    assert found[0][1]["4"] == {"logprob": -0.5, "rank": 1, "decoded_token": "token_id:4"}


def test_an_overlap_is_trimmed_a_duplicate_dropped_and_a_contradiction_ignored():
    bench, instance = running()
    bench.tokens(instance, chunk("abc"))
    bench.tokens(instance, chunk("bcd", 1))
    bench.tokens(instance, chunk("bcd", 1))
    bench.tokens(instance, chunk("xd", 2))
    bench.tokens(instance, chunk("xdefg", 2))
    assert bench.text() == "abcd"
    assert discarded(bench) == {"duplicate": 1, "contradiction": 2}
    bench.tokens(instance, chunk("e", 4))
    assert bench.text() == "abcde"


def test_tokens_of_another_epoch_or_instance_or_incarnation_are_late():
    bench, instance = running()
    other = "w1" if instance == "w0" else "w0"
    bench.tokens(instance, chunk("a", epoch=1))
    bench.tokens(other, chunk("a"))
    bench.tokens(instance, chunk("a", sequence="unknown.0"))
    bench.incarnations[instance] = 0
    bench.tokens(instance, chunk("a"))
    assert bench.text() == ""
    assert discarded(bench) == {"late": 4}


def test_a_resend_nobody_answers_is_asked_again_and_then_continued_elsewhere():
    bench, instance = running()
    bench.tokens(instance, chunk("c", 2))
    bench.fail(bench.asked(ResendTokens)[0], RequestFailure.TIMEOUT)
    assert len(bench.asked(ResendTokens)) == 2
    bench.fail(bench.asked(ResendTokens)[1], RequestFailure.TIMEOUT)
    request, other = bench.last_submission()
    assert (request.body.epoch, other != instance) == (1, True)
    assert bench.metrics.continuations.counts == {("resend_failed",): 1}


def test_a_sequence_that_is_silent_is_asked_about_ever_more_rarely():
    bench, instance = running()
    bench.tokens(instance, chunk("ab"))
    asked_at = []
    for _ in range(100):
        bench.pass_time(0.25)
        for ask in bench.asked(ResendTokens)[len(asked_at) :]:
            asked_at.append((bench.now_ns - 1000 * 10**9) / 1e9)
            bench.reply(ask, TokensResent(chunk=chunk("", 2)))
    assert asked_at == [2.0, 6.0, 14.0, 22.0]
    assert bench.text() == "ab"
    bench.tokens(instance, chunk("c", 2))
    bench.pass_time(2)
    assert len(bench.asked(ResendTokens)) == 5, "after a token it begins anew"


CHUNKS = st.builds(
    TokenChunk,
    sequence=st.sampled_from(["r.0", "r.1", "", "x.0", "r.0\r\nevil"]),
    epoch=st.integers(-1, 2),
    first_index=st.integers(-3, 6),
    token_ids=st.lists(st.integers(0, 10**6), max_size=5),
    finish=st.sampled_from([None, *FinishReason]),
    logprobs=st.none()
    | st.lists(
        st.builds(TokenLogprobs, st.lists(st.integers(0, 99)), st.lists(st.floats()), st.integers()), max_size=3
    ),
    cached_tokens=st.none() | st.integers(-5, 5),
)


@given(
    messages=st.lists(
        st.tuples(st.sampled_from(["w0", "w1", "", "strange name"]), st.integers(0, 2), st.lists(CHUNKS, max_size=4)),
        max_size=8,
    ),
    fields=st.sampled_from([{}, {"n": 2}, {"stream": False}, {"stop": ["ab"]}]),
)
def test_token_messages_that_lie_never_kill_the_actor_nor_its_invariants(messages, fields):
    bench = Bench()
    bench.run_call(sampling=Sampling(max_tokens=8, logprobs=1), **fields)
    for instance, incarnation, chunks in messages:
        bench.send(TokensGenerated(instance=instance, incarnation=incarnation, step=0, chunks=chunks))
        bench.pass_time(0.25)
    ends = [e for e in bench.effects if isinstance(e, CompleteCall | FailCall | RefuseCall)]
    assert len(ends) == ("r" not in bench.actor.snapshot()["calls"])
    for effect in bench.effects:
        assert "\n" not in getattr(effect, "request", "") + getattr(effect, "subject", "")
