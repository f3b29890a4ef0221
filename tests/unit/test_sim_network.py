"""The parts of the simulated network: subjects, who receives, links, events, keys."""

from itertools import pairwise
from random import Random
from typing import cast

import pytest
from millrace.contracts.subjects import covers
from millrace.sim.events import EventQueue
from millrace.sim.link import SimLink
from millrace.sim.links import LinkModel
from millrace.sim.process import SimProcess
from millrace.sim.routing import Router, Subscription


@pytest.mark.parametrize(
    ("pattern", "subject", "fits"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("*.b.*", "a.b.c", True),
        ("a.b.c", "a.b", False),
    ],
)
def test_subjects_match_as_nats_matches_them(pattern: str, subject: str, fits: bool):
    assert covers(pattern, subject) is fits


def test_a_healthy_link_keeps_order_whatever_its_delays():
    link = SimLink(LinkModel(delay_ns=1000, jitter_ns=50_000), Random(1))
    arrivals = [link.arrivals(now_ns)[0] for now_ns in range(0, 100_000, 500)]
    assert arrivals == sorted(arrivals)
    assert len(set(arrivals)) == len(arrivals)


def test_a_faulty_link_loses_repeats_and_reorders_about_as_often_as_told():
    link = SimLink(LinkModel(loss=0.1, duplicate=0.2, reorder=0.3), Random(2))
    copies = [link.arrivals(number * 1000) for number in range(10_000)]
    assert 800 < sum(not times for times in copies) < 1200
    assert 1600 < sum(len(times) == 2 for times in copies) < 2000
    firsts = [times[0] for times in copies if times]
    assert sum(later < earlier for earlier, later in pairwise(firsts)) > 1000


def test_events_run_in_time_order_and_equal_times_in_an_order_of_the_seed():
    def order(seed: int) -> list[int]:
        queue, ran = EventQueue(Random(seed), 0), []
        for number in range(20):
            queue.at(5, ran.append, number)
        queue.at(1, ran.append, 99)
        queue.run(10)
        assert queue.now_ns == 10
        return ran

    assert order(1)[0] == 99
    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == sorted(order(2))


NOBODY = cast(SimProcess, None)
TOKENS = ["a", "b", "c"]


def wish(subject: str, group: str = "") -> Subscription:
    return Subscription(NOBODY, subject, group)


def found(router: Router, subject: str) -> list[str]:
    return [each.subject for each in router.receivers(subject)]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_and_goes_the_receivers_are_those_of_a_scan(seed: int) -> None:
    rng = Random(seed)
    router = Router(rng)
    standing: list[Subscription] = []
    for _ in range(300):
        if standing and rng.random() < 0.4:
            router.remove(standing.pop(rng.randrange(len(standing))))
        else:
            standing.append(wish(pattern_of(rng)))
            router.add(standing[-1])
        subject = ".".join(rng.choice(TOKENS) for _ in range(rng.randint(1, 5)))
        expected = sorted(each.subject for each in standing if covers(each.subject, subject))
        assert sorted(found(router, subject)) == expected


def pattern_of(rng: Random) -> str:
    tokens = [rng.choice([*TOKENS, "*"]) for _ in range(rng.randint(1, 5))]
    return ".".join([*tokens, ">"] if rng.random() < 0.2 else tokens)
