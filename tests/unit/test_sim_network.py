"""The parts of the simulated network: subjects, links, events, keys."""

from itertools import pairwise
from random import Random

import pytest
from millrace.contracts.subjects import covers
from millrace.sim.events import EventQueue
from millrace.sim.link import SimLink
from millrace.sim.links import LinkModel


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
