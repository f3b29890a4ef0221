"""The simulated server's interest table: indexed wildcards find what a scan over all subscriptions finds."""

from random import Random
from typing import cast

import pytest
from millrace.contracts.subjects import covers
from millrace.sim.process import SimProcess
from millrace.sim.routing import Router, Subscription

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
