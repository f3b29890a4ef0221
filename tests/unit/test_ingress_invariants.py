"""Invariants of an ingress, checked after each message in parts: what a message touched contradicts itself or not."""

from collections.abc import Callable

import pytest
from millrace.actor.actor import TouchChecked
from millrace.contracts.ingress import TokensGenerated

from services.ingress.sequence import OpenSequence
from tests.unit.ingress_core import Bench, chunk


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.run_call("a")
    bench.run_call("b")
    return bench


def sequence_of(bench: Bench, request: str) -> OpenSequence:
    return next(s for s in bench.actor.state.sequences.values() if s.call.request == request)


def tokens_of(bench: Bench, *requests: str) -> TokensGenerated:
    """Tokens of the first request's instance for all these; handled before."""
    found = [sequence_of(bench, request) for request in requests]
    assert found[0].instance is not None
    name = found[0].instance.name
    return TokensGenerated(instance=name, incarnation=1, step=1, chunks=[chunk("x", sequence=s.id) for s in found])


def too_long(sequence: OpenSequence) -> None:
    sequence.tokens_max = -1


def miscounted(sequence: OpenSequence) -> None:
    sequence.call.output_tokens += 1


def homeless(sequence: OpenSequence) -> None:
    sequence.instance = None


@pytest.mark.parametrize("breaks", [too_long, miscounted, homeless])
def test_what_tokens_name_is_checked(bench: Bench, breaks: Callable[[OpenSequence], None]) -> None:
    assert isinstance(bench.actor, TouchChecked)
    body = tokens_of(bench, "a")
    bench.actor.check_touched(body)
    breaks(sequence_of(bench, "a"))
    with pytest.raises(AssertionError):
        bench.actor.check_touched(body)


def test_where_a_named_sequence_has_ended_all_is_checked(bench: Bench) -> None:
    body = tokens_of(bench, "a", "b")
    del bench.actor.state.sequences[sequence_of(bench, "a").id]
    with pytest.raises(AssertionError):
        bench.actor.check_touched(body)


def test_the_instance_of_a_summary_is_checked(bench: Bench) -> None:
    instance = bench.actor.state.cluster.instances["w0"]
    assert instance.member.summary is not None
    bench.actor.check_touched(instance.member.summary)
    instance.usable = False
    with pytest.raises(AssertionError):
        bench.actor.check_touched(instance.member.summary)


def test_after_any_other_message_all_is_checked(bench: Bench) -> None:
    too_long(sequence_of(bench, "a"))
    with pytest.raises(AssertionError):
        bench.actor.check_touched(bench.submissions()[-1].body)
