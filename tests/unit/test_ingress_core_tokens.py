"""Token order: whatever the bus does to chunks, the client sees the whole text once, in order."""

from dataclasses import dataclass, field

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
from millrace.contracts.message import ErrorReply
from millrace.contracts.worker import (
    CancelSequence,
    ResendTokens,
    Sampling,
    SequenceAccepted,
    SubmitSequence,
)
from millrace.membership.config import MembershipConfig

from services.ingress.calls.messages import AcceptCall, CompleteCall, DeliverDeltas, FailCall, RefuseCall
from services.ingress.config import IngressConfig
from tests.unit.ingress_core import NO_TAG, PLAIN, Bench, chunk, ids, instance_of, running

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP
LETTERS = st.text("abcdefghij", min_size=1, max_size=40)


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


def test_tokens_that_came_while_the_answer_was_under_way_are_not_taken_twice():
    bench, instance = running()
    bench.tokens(instance, chunk("c", 2))
    (ask,) = bench.asked(ResendTokens)
    bench.tokens(instance, chunk("ab", 0))
    bench.reply(ask, TokensResent(chunk=chunk("abcd", 0)))
    assert bench.text() == "abcd"


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


def test_the_end_told_again_with_its_tokens_ends_the_sequence():
    bench, instance = running()
    bench.tokens(instance, chunk("abc"))
    bench.tokens(instance, chunk("bc", 1, finish=LENGTH))
    assert bench.text() == "abc"
    assert bench.made(CompleteCall)


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


def test_a_token_message_of_a_forgotten_instance_is_kept_out_when_the_instance_table_is_full():
    bench = Bench(IngressConfig(tagging=NO_TAG, dispatch=PLAIN, membership=MembershipConfig(members_max=2)))
    bench.incarnations["w9"] = 5
    bench.tokens("w9", chunk("a"))
    assert "w9" not in bench.actor.snapshot()["instances"]


def test_a_resend_nobody_answers_is_asked_again_and_then_continued_elsewhere():
    bench, instance = running()
    bench.tokens(instance, chunk("c", 2))
    bench.fail(bench.asked(ResendTokens)[0], RequestFailure.TIMEOUT)
    assert len(bench.asked(ResendTokens)) == 2
    bench.fail(bench.asked(ResendTokens)[1], RequestFailure.TIMEOUT)
    request, other = bench.last_submission()
    assert (request.body.epoch, other != instance) == (1, True)
    assert bench.metrics.continuations.counts == {("resend_failed",): 1}


@pytest.mark.parametrize("failure", ["forgotten", "only_later", "no_responders"])
def test_a_worker_that_knows_nothing_of_it_is_left_at_once(failure):
    bench, instance = running()
    bench.tokens(instance, chunk("ab"), chunk("d", 3))
    (ask,) = bench.asked(ResendTokens)
    if failure == "forgotten":
        bench.reply(ask, ErrorReply(reason="forgotten"))
    elif failure == "only_later":
        bench.reply(ask, TokensResent(chunk=chunk("d", 3)))
    else:
        bench.fail(ask, RequestFailure.NO_RESPONDERS)
    request, _ = bench.last_submission()
    assert (request.body.epoch, request.body.output_token_ids) == (1, ids("ab"))


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


def test_a_lost_last_chunk_is_recovered_by_the_question():
    bench, instance = running()
    bench.tokens(instance, chunk("ab"))
    bench.pass_time(2)
    bench.reply(bench.asked(ResendTokens)[0], TokensResent(chunk=chunk("c$", 2, finish=STOP)))
    assert bench.text() == "abc"
    assert bench.made(CompleteCall)


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


@given(
    text=LETTERS,
    cuts=st.lists(st.integers(1, 8), max_size=40),
    stream=st.booleans(),
    stop=st.lists(st.text("abcdefghij", min_size=1, max_size=4), max_size=2),
)
def test_chunking_never_changes_what_is_delivered(text, cuts, stream, stop):
    bench, instance = running(stream=stream, stop=stop)
    at = 0
    for size in [*cuts, 40]:
        if at < len(text):
            piece = text[at : at + size]
            at += len(piece)
            bench.tokens(instance, chunk(piece, at - len(piece), finish=LENGTH if at == len(text) else None))
    ends = [(text.find(s) + len(s), s) for s in stop if s in text]
    end, match = min(ends, key=lambda e: (e[0], stop.index(e[1])), default=(len(text), ""))
    assert bench.text() == text[: end - len(match)]
    (completed,) = bench.made(CompleteCall)
    assert completed.usage.completion_tokens == end


@dataclass
class Fate:
    """Fate of one message on the bus: dropped, repeated, or delivered later than others."""

    lost: bool
    copies: int
    delay: int


FATES = st.builds(Fate, lost=st.booleans(), copies=st.integers(1, 2), delay=st.integers(0, 4))


@dataclass
class FakeWorker:
    """Decodes a fixed text, as any worker that is given the same log would; forgets everything when killed."""

    text: str
    owned: dict[tuple[str, int], int] = field(default_factory=dict)  # (instance, epoch) -> tokens made

    def submit(self, instance: str, body: SubmitSequence) -> None:
        assert body.output_token_ids == ids(self.text[: len(body.output_token_ids)])
        self.owned[instance, body.epoch] = len(body.output_token_ids)

    def step(self, instance: str, epoch: int, count: int) -> TokenChunk | None:
        made = self.owned.get((instance, epoch))
        if made is None or made >= len(self.text):
            return None
        piece = self.text[made : made + count]
        self.owned[instance, epoch] = made + len(piece)
        done = made + len(piece) == len(self.text)
        return chunk(piece, made, epoch=epoch, finish=LENGTH if done else None)

    def resend(self, instance: str, body: ResendTokens) -> TokensResent | ErrorReply:
        made = self.owned.get((instance, body.epoch))
        if made is None:
            return ErrorReply(reason="forgotten")
        finish = LENGTH if made == len(self.text) else None
        piece = self.text[body.from_index : made]
        return TokensResent(chunk=chunk(piece, body.from_index, epoch=body.epoch, finish=finish))

    def cancel(self, instance: str, body: CancelSequence) -> None:
        for name, epoch in list(self.owned):
            if name == instance and epoch <= body.epoch:
                del self.owned[name, epoch]

    def kill(self, instance: str) -> None:
        self.owned = {key: made for key, made in self.owned.items() if key[0] != instance}


def serve(bench: Bench, worker: FakeWorker, lost: list[bool]) -> None:
    """Lets the fake worker answer everything that ingress asked since the last time; some answers are lost."""
    while bench.effects:
        asked, kept = [*bench.effects], []
        bench.effects = kept
        for effect in asked:
            body = getattr(effect, "body", None)
            if isinstance(body, SubmitSequence | ResendTokens | CancelSequence):
                instance = instance_of(effect)
                if isinstance(body, CancelSequence):
                    worker.cancel(instance, body)
                elif lost and lost.pop():
                    bench.fail(effect, RequestFailure.TIMEOUT)
                elif isinstance(body, SubmitSequence):
                    worker.submit(instance, body)
                    bench.reply(effect, SequenceAccepted(sequence=body.sequence, epoch=body.epoch))
                else:
                    bench.reply(effect, worker.resend(instance, body))
            elif type(effect).__name__ != "StartTimer":
                delivered.append(effect)
            else:
                bench.started.append(effect)


delivered: list = []


@given(
    text=st.text("abcdefghij", min_size=1, max_size=30),
    steps=st.lists(st.tuples(st.integers(1, 4), FATES), max_size=40),
    kills=st.sets(st.integers(0, 39), max_size=3),
    lost_answers=st.lists(st.booleans(), max_size=6),
    stop=st.sampled_from([[], ["ab"], ["cde", "j"]]),
    stream=st.booleans(),
)
def test_loss_repetition_disorder_and_deaths_never_change_the_text(text, steps, kills, lost_answers, stop, stream):
    delivered.clear()
    bench = Bench()
    worker = FakeWorker(text)
    bench.call(sampling=Sampling(max_tokens=30), stop=stop, stream=stream)
    serve(bench, worker, lost_answers)
    under_way: list[tuple[int, str, TokenChunk]] = []
    for number, (count, fate) in enumerate([*steps, *[(4, Fate(False, 1, 0))] * 12]):
        suspect = any(sequence.retry.suspect for sequence in bench.actor.state.sequences.values())
        if number in kills and worker.owned and not suspect:  # one that lost two would be refused
            victim = next(iter(worker.owned))[0]
            worker.kill(victim)
            bench.incarnations[victim] = bench.now_ns + 1
            bench.summary(victim)
        for instance, epoch in list(worker.owned):
            made = worker.step(instance, epoch, count)
            if made is not None and not fate.lost:
                under_way += [(number + fate.delay * copy, instance, made) for copy in range(fate.copies)]
        for due in [u for u in under_way if u[0] <= number]:
            under_way.remove(due)
            bench.tokens(due[1], due[2])
        serve(bench, worker, lost_answers)
    for _ in range(60):
        bench.pass_time(0.5)
        serve(bench, worker, lost_answers)
        for instance, epoch in list(worker.owned):
            made = worker.step(instance, epoch, 8)
            if made is not None:
                bench.tokens(instance, made)
        serve(bench, worker, lost_answers)
    ends = [(text.find(s) + len(s), s) for s in stop if s in text]
    end, match = min(ends, default=(len(text), ""))
    shown = "".join(d.text for e in delivered if isinstance(e, DeliverDeltas) for d in e.deltas)
    assert shown == text[: end - len(match)]
    assert sum(d.tokens for e in delivered if isinstance(e, DeliverDeltas) for d in e.deltas) == end
    assert len([e for e in delivered if isinstance(e, AcceptCall)]) == 1
    assert [e.usage.completion_tokens for e in delivered if isinstance(e, CompleteCall)] == [end]
    assert not [e for e in delivered if isinstance(e, FailCall | RefuseCall)]
    assert bench.actor.snapshot()["sequences"] == {}
