"""Choice of the requests to trace: the first of each second, and a share of the rest."""

from random import Random

from services.ingress.http.open_calls import Tracer


def sampled(tracer: Tracer, *, second: float, requests: int) -> int:
    return sum(tracer.begin(second).sampled for _ in range(requests))


def test_the_first_of_each_second_are_traced_and_a_share_of_the_rest() -> None:
    tracer = Tracer(Random(1), 0.1, 5)
    assert sampled(tracer, second=10.0, requests=5) == 5
    assert 60 <= sampled(tracer, second=10.9, requests=1000) <= 140
    assert sampled(tracer, second=11.0, requests=5) == 5


def test_a_share_alone_needs_no_clock() -> None:
    assert sampled(Tracer(Random(1), 1.0), second=0.0, requests=50) == 50
    assert sampled(Tracer(Random(1), 0.0), second=0.0, requests=50) == 0
