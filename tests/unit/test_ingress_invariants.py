"""Invariants of an ingress, checked after each message in parts: what a message touched contradicts itself or not."""

from collections.abc import Callable

import pytest
from millrace.actor.actor import TouchChecked
from millrace.contracts.ingress import TokensGenerated
from millrace.contracts.message import Body

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


def tokens_of(bench: Bench) -> TokensGenerated:
    """Tokens of both requests from the first one's instance; handled before."""
    found = [sequence_of(bench, request) for request in ("a", "b")]
    assert found[0].instance is not None
    name = found[0].instance.name
    return TokensGenerated(instance=name, incarnation=1, step=1, chunks=[chunk("x", sequence=s.id) for s in found])


def too_long(bench: Bench) -> None:
    sequence_of(bench, "a").tokens_max = -1


def miscounted(bench: Bench) -> None:
    sequence_of(bench, "a").call.output_tokens += 1


def ended(bench: Bench) -> None:
    del bench.actor.state.sequences[sequence_of(bench, "a").id]


def unusable(bench: Bench) -> None:
    bench.actor.state.cluster.instances["w0"].usable = False


@pytest.mark.parametrize(
    ("touches", "breaks"),
    [
        (tokens_of, too_long),
        (tokens_of, miscounted),
        (tokens_of, ended),  # then all is checked
        (lambda bench: bench.actor.state.cluster.instances["w0"].member.summary, unusable),
        (lambda bench: bench.submissions()[-1].body, too_long),  # as after any other message
    ],
)
def test_what_a_message_touched_is_checked(
    bench: Bench, touches: Callable[[Bench], Body], breaks: Callable[[Bench], None]
) -> None:
    assert isinstance(bench.actor, TouchChecked)
    body = touches(bench)
    bench.actor.check_touched(body)
    breaks(bench)
    with pytest.raises(AssertionError):
        bench.actor.check_touched(body)
