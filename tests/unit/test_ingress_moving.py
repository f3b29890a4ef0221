"""Migration at ingress: who owns a sequence that moves, whatever is lost, late or repeated."""

import pytest
from millrace.contracts.ingress import FinishReason, ReturnReason, SequencesReturned, TokensResent
from millrace.contracts.leases import KvRefused
from millrace.contracts.local import BusDisconnected, RequestFailure
from millrace.contracts.migration import AllotEpoch
from millrace.contracts.observers import RequestFinished
from millrace.contracts.worker import ResendTokens

from services.ingress.calls.messages import CallAbandoned, CompleteCall, Usage
from services.ingress.dispatch.prefix_blocks import HOLDER_STRIDE, PromptBlocks
from services.ingress.lifecycle import SequencePhase
from tests.unit.ingress_core import chunk
from tests.unit.ingress_moving import MoveBench

STOP = FinishReason.STOP


def moving(**fields: object) -> MoveBench:
    """A call with three tokens from its source, and an epoch allotted to the target."""
    bench = MoveBench(**fields)
    bench.tokens(bench.source, chunk("abc"))
    assert bench.allot() == 1
    return bench


def moved() -> MoveBench:
    """The same, which the target has said to have."""
    bench = moving()
    bench.moved(3)
    return bench


def resent(text: str, first_index: int) -> TokensResent:
    return TokensResent(chunk=chunk(text, first_index, epoch=1))


# Allotting.


def test_a_migration_is_told_its_epoch_as_often_as_it_asks_and_the_owner_stays():
    bench = moving()
    assert bench.allot() == 1
    assert bench.outcomes() == {}
    bench.tokens(bench.source, chunk("d", 3))
    assert bench.owner == (bench.source, 0)
    assert bench.text() == "abcd"


def test_a_second_allotment_voids_the_first_and_its_target_is_told():
    bench = moving()
    assert bench.allot("m2", target=bench.third) == 2
    assert bench.cancels() == [(bench.target, 1)]
    assert bench.outcomes() == {"replaced": 1}
    assert isinstance(bench.ask("m"), KvRefused), "late"
    bench.moved(3, epoch=1)
    assert bench.owner == (bench.source, 0)
    bench.moved(3, epoch=2, instance=bench.third)
    assert bench.owner == (bench.third, 2)


def test_what_cannot_move_is_refused():
    bench = moving()
    for refused in (
        bench.ask("n", sequence="other.0"),
        bench.ask("n", epoch=3),
        bench.ask("n", source=bench.third),
        bench.ask("n", target=bench.source),
        bench.ask("n", target="nobody"),
        bench.ask("n", incarnation=9),
    ):
        assert isinstance(refused, KvRefused)
        assert refused.detail
    assert bench.owner == (bench.source, 0)
    assert bench.outcomes() == {"refused": 6}
    bench.moved(3)  # the open allotment still stands
    assert bench.owner == (bench.target, 1)


def test_a_sequence_that_ended_or_that_nobody_has_accepted_is_refused():
    bench = MoveBench()
    bench.tokens(bench.source, chunk("ab$", finish=STOP))
    assert isinstance(bench.ask(), KvRefused)
    bench.call("s")
    assert isinstance(bench.ask(sequence="s.0"), KvRefused)


def test_an_epoch_that_nobody_waits_for_is_not_given_out():
    bench = MoveBench()
    bench.tokens(bench.source, chunk("abc"))
    asked = AllotEpoch(migration="m", sequence="r.0", epoch=0, source=bench.source, target=bench.target, incarnation=1)
    assert bench.send(asked) == []
    assert bench.sequence.grant is None


def test_the_targets_word_makes_it_the_owner_and_the_source_lets_go_at_its_migrators_word():
    bench = moved()
    assert bench.owner == (bench.target, 1)
    assert bench.cancels() == []
    bench.tokens(bench.target, chunk("de$", 3, epoch=1, finish=STOP))
    assert bench.text() == "abcde"
    assert bench.made(CompleteCall) == [CompleteCall(request="r", usage=Usage(3, 6))]
    (finished,) = bench.sent(RequestFinished)
    assert (finished.migrations, finished.continuations) == (1, 0)
    assert finished.instances == [bench.source, bench.target]
    assert bench.outcomes() == {"moved": 1}
    assert bench.metrics.continuations.counts == {}
    assert (bench.metrics.migration_gap.count, bench.metrics.gap.count) == (1, 0)


def test_who_has_its_prompt_now_is_asked_about_its_next_turn():
    bench = moving()
    prompt = list(range(HOLDER_STRIDE * 16))
    bench.sequence.blocks = blocks = PromptBlocks(prompt, 16)
    holders = bench.actor.state.holders
    holders.note(blocks, bench.source)
    bench.moved(3)
    assert holders.find(PromptBlocks([*prompt, 1, 2, 3], 16), {bench.source, bench.target}) == bench.target


def test_a_source_that_thawed_and_went_on_keeps_it():
    bench = moving()
    bench.tokens(bench.source, chunk("de", 3))
    bench.moved(4)
    assert bench.owner == (bench.source, 0)
    assert bench.cancels() == [(bench.target, 1)]
    bench.tokens(bench.target, chunk("zz", 4, epoch=1))
    assert bench.cancels() == [(bench.target, 1)] * 2  # the first one may have been lost
    bench.tokens(bench.source, chunk("f", 5))
    assert bench.text() == "abcdef"
    assert bench.outcomes() == {"stayed": 1}


def test_a_client_that_leaves_in_the_middle_of_a_migration_leaves_both():
    bench = moving()
    bench.send(CallAbandoned(request="r", reason="disconnected"))
    assert set(bench.cancels()) == {(bench.source, 0), (bench.target, 1)}
    bench.tokens(bench.target, chunk("d", 3, epoch=1))
    assert bench.cancels()[-1] == (bench.target, 1)
    assert [f.outcome for f in bench.sent(RequestFinished)] == ["cancelled"]
    assert bench.outcomes() == {"ended": 1}


# Deaths.


def test_a_source_that_dies_leaves_it_to_a_target_that_has_it():
    bench = moving()
    bench.die(bench.source)
    assert bench.sequence.phase is SequencePhase.VERIFYING
    assert bench.question() == (bench.target, ResendTokens(sequence="r.0", epoch=1, from_index=3))
    assert len(bench.placed()) == 1
    bench.tell(chunk("de", 3, epoch=1))
    assert bench.owner == (bench.target, 1)
    bench.tokens(bench.target, chunk("f$", 5, epoch=1, finish=STOP))
    assert bench.text() == "abcdef"
    (finished,) = bench.sent(RequestFinished)
    assert (finished.migrations, finished.continuations) == (1, 0)
    assert bench.outcomes() == {"rescued": 1}


def test_a_source_that_dies_before_the_commit_is_continued_above_the_allotted_epoch():
    bench = moving()
    bench.die(bench.source)
    bench.tell(None)
    assert bench.cancels() == [(bench.target, 1), (bench.source, 0)]
    (instance, epoch) = bench.placed()[-1]
    assert instance != bench.source
    assert epoch == 2
    bench.accept()
    bench.moved(3)
    bench.tokens(bench.target, chunk("zz", 3, epoch=1))
    assert bench.cancels()[-1] == (bench.target, 1)
    bench.tokens(instance, chunk("d$", 3, epoch=2, finish=STOP))
    assert bench.text() == "abcd"
    (finished,) = bench.sent(RequestFinished)
    assert (finished.migrations, finished.continuations) == (0, 1)


def test_a_target_that_does_not_answer_for_a_dead_source_costs_a_recompute():
    bench = moving()
    bench.die(bench.source)
    bench.fail(bench.asked(ResendTokens)[-1], RequestFailure.TIMEOUT)
    assert bench.placed()[-1] == (bench.third, 2)


def hands_back(bench: MoveBench) -> None:
    back = ReturnReason.ENGINE_DIED
    bench.send(SequencesReturned(instance=bench.target, incarnation=1, reason=back, sequences=[("r.0", 1)]))


@pytest.mark.parametrize(
    "lose", [lambda bench: bench.die(bench.target), lambda bench: bench.come_back(bench.target), hands_back]
)
def test_a_target_that_is_lost_has_the_source_asked_at_once(lose):
    bench = moving()
    lose(bench)
    assert bench.owner == (bench.source, 0)
    assert bench.question() == (bench.source, ResendTokens(sequence="r.0", epoch=0, from_index=3))
    bench.tell(chunk("d", 3))
    assert bench.text() == "abcd"
    assert bench.outcomes() == {"lost": 1}
    bench.moved(4)
    assert bench.owner == (bench.source, 0), "its late word changes nothing"
    assert bench.cancels() == [(bench.target, 1)] * 2


def test_a_source_that_says_that_it_has_forgotten_it_leaves_it_to_the_target():
    bench = moving()
    bench.pass_time(3)
    assert bench.question()[0] == bench.source
    bench.tell(None)
    assert bench.question() == (bench.target, ResendTokens(sequence="r.0", epoch=1, from_index=3))
    bench.tell(chunk("d", 3, epoch=1))
    assert bench.owner == (bench.target, 1)


def test_without_a_bus_nobody_is_asked_and_it_waits():
    bench = moving()
    bench.send(BusDisconnected())
    bench.die(bench.source)
    assert bench.sequence.phase is SequencePhase.WAITING
    assert bench.sequence.grant is None


def test_a_target_that_forgot_what_it_spoke_of_is_not_the_owner():
    bench = moving()
    bench.tokens(bench.target, chunk("e", 4, epoch=1))
    bench.tell(None)
    assert bench.owner == (bench.source, 0)
    assert (bench.target, 1) in bench.cancels()
    assert bench.question()[0] == bench.source


def test_a_target_that_holds_only_what_it_decoded_itself_owns_a_log_that_is_not_longer():
    bench = moving()
    bench.tokens(bench.source, chunk("de", 3))
    bench.tokens(bench.target, chunk("f", 5, epoch=1))
    bench.tell(chunk("f", 5, epoch=1))
    assert bench.owner == (bench.target, 1)
    assert bench.question() == (bench.target, ResendTokens(sequence="r.0", epoch=1, from_index=5))
    bench.tell(chunk("f", 5, epoch=1))
    assert bench.text() == "abcdef"
    assert bench.outcomes() == {"moved": 1}


@pytest.mark.parametrize(("theirs", "outcome"), [("ef", "moved"), ("xy", "stayed")])
def test_a_longer_log_is_compared_with_what_the_target_holds(theirs, outcome):
    bench = moving()
    bench.tokens(bench.source, chunk("de", 3))
    bench.tokens(bench.target, chunk(theirs[1], 5, epoch=1))
    bench.tell(chunk(theirs, 4, epoch=1))
    assert bench.question() == (bench.target, ResendTokens(sequence="r.0", epoch=1, from_index=4))
    bench.tell(chunk(theirs, 4, epoch=1))
    assert bench.outcomes() == {outcome: 1}
    assert bench.text() == ("abcdef" if outcome == "moved" else "abcde")


def test_a_target_that_does_not_answer_is_asked_again_with_its_next_chunk():
    bench = moving()
    bench.tokens(bench.target, chunk("e", 4, epoch=1))
    bench.tokens(bench.target, chunk("f", 5, epoch=1))
    (question,) = bench.asked(ResendTokens)
    bench.fail(question, RequestFailure.TIMEOUT)
    bench.tokens(bench.target, chunk("g", 6, epoch=1))
    assert len(bench.asked(ResendTokens)) == 2
    bench.tell(chunk("defg", 3, epoch=1))
    assert bench.text() == "abcdefg"


# Several migrations.


def test_it_moves_twice_and_late_words_of_the_middle_one_change_nothing():
    bench = moved()
    bench.tokens(bench.target, chunk("d", 3, epoch=1))
    assert bench.allot("m2", source=bench.target, target=bench.third, epoch=1) == 2
    bench.moved(5, epoch=2, instance=bench.third)
    assert bench.owner == (bench.third, 2)
    bench.tell(chunk("ef", 4, epoch=2))
    bench.moved(3, epoch=1)
    bench.tokens(bench.target, chunk("z", 5, epoch=1))
    bench.tokens(bench.source, chunk("y", 3))
    assert bench.owner == (bench.third, 2)
    bench.tokens(bench.third, chunk("g$", 6, epoch=2, finish=STOP))
    assert bench.text() == "abcdefg"
    (finished,) = bench.sent(RequestFinished)
    assert finished.migrations == 2
    assert finished.instances == [bench.source, bench.target, bench.third]


def test_a_second_migration_before_the_first_is_settled_is_refused_and_hastens_it():
    bench = moving()
    refused = bench.ask("m2", source=bench.target, target=bench.third, epoch=1)
    assert isinstance(refused, KvRefused)
    bench.tell(chunk("d", 3, epoch=1))
    assert bench.owner == (bench.target, 1)
    assert bench.allot("m2", source=bench.target, target=bench.third, epoch=1) == 2


def test_each_choice_moves_on_its_own():
    bench = MoveBench(n=2)
    bench.tokens(bench.source, chunk("ab"), chunk("xy", sequence="r.1"))
    bench.allot()
    bench.moved(2)
    assert bench.owner == (bench.target, 1)
    bench.tokens(bench.source, chunk("z$", 2, sequence="r.1", finish=STOP))
    bench.tokens(bench.target, chunk("c$", 2, epoch=1, finish=STOP))
    assert (bench.text(), bench.text(index=1)) == ("abc", "xyz")
    assert len(bench.made(CompleteCall)) == 1


def test_a_moved_sequence_stalls_like_a_stream_not_like_a_queue():
    bench = moved()
    for _ in range(33):
        bench.pass_time(1)
        for question in bench.asked(ResendTokens):
            if question.correlation in bench.actor.state.pending:
                bench.reply(question, resent("", 3))
    assert bench.metrics.continuations.counts == {("stalled",): 1}


def test_a_chunk_of_an_epoch_that_was_never_given_out_ends_nothing():
    bench = moving()
    bench.tokens(bench.third, chunk("z", 3, epoch=7))
    bench.moved(3, epoch=7, instance=bench.third)
    assert bench.cancels() == []
    assert bench.owner == (bench.source, 0)


def test_a_sequence_that_is_unknown_is_dropped_where_it_moved_to():
    bench = moving()
    bench.moved(3, sequence="gone.0", epoch=4)
    assert bench.cancels() == [(bench.target, 4)]
