"""Arrival processes of requests: they yield rising times. Randomness comes from the rng passed in."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import msgspec

_SECOND = 1e9


class Poisson(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="poisson", tag_field="kind"):
    """Independent arrivals.

    Attributes:
        rate_per_s: Mean, requests per second; above 0.
    """

    rate_per_s: float

    def __post_init__(self) -> None:
        _positive("rate_per_s", self.rate_per_s)

    def times_ns(self, rng: Random) -> Iterator[int]:
        """Endless."""
        at_s = 0.0
        while True:
            at_s += rng.expovariate(self.rate_per_s)
            yield int(at_s * _SECOND)


class Gamma(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="gamma", tag_field="kind"):
    """Gamma-distributed pauses: bursts where ``cv`` is above 1, nearly even where it is below.

    Attributes:
        rate_per_s: Mean, requests per second; above 0.
        cv: Standard deviation of the pauses over their mean; above 0. 1 is Poisson.
    """

    rate_per_s: float
    cv: float

    def __post_init__(self) -> None:
        _positive("rate_per_s", self.rate_per_s)
        _positive("cv", self.cv)

    def times_ns(self, rng: Random) -> Iterator[int]:
        """Endless."""
        shape = 1 / self.cv**2
        scale = 1 / (self.rate_per_s * shape)
        at_s = 0.0
        while True:
            at_s += rng.gammavariate(shape, scale)
            yield int(at_s * _SECOND)


class Even(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="even", tag_field="kind"):
    """Equal pauses.

    Attributes:
        rate_per_s: Requests per second; above 0.
    """

    rate_per_s: float

    def __post_init__(self) -> None:
        _positive("rate_per_s", self.rate_per_s)

    def times_ns(self, rng: Random) -> Iterator[int]:
        """Endless; draws nothing."""
        number = 0
        while True:
            number += 1
            yield int(number / self.rate_per_s * _SECOND)


class FromTrace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="trace", tag_field="kind"):
    """The times that the trace of the lengths has.

    Attributes:
        speed: How much faster they pass; at 2 the rate doubles. Above 0.
    """

    speed: float = 1.0

    def __post_init__(self) -> None:
        _positive("speed", self.speed)


Process = Poisson | Gamma | Even
Arrivals = Poisson | Gamma | Even | FromTrace


def _positive(field: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ValueError(f"{field} must be above 0, is {value}")
