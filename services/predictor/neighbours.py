"""Engines on one host may slow each other: they share caches, memory, and cores with what surrounds them.

How much is learnt from steps alone, for each instance: the logarithm of measured over modelled time is taken as its
own pace, which drifts, plus an effect for each other engine of the host that computes at the same time. Where engines
do not disturb each other, as on GPUs of their own, the effect comes out as nothing; until steps have told, it counts
with the probability that there is one at all.

What follows from it: a forecast includes how busy the neighbours are, and a placement how much later those get ready
who decode beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, log, sqrt

#: Variance of the logarithm of the time of all steps in one second, s: machines are noisy, and noise lasts for about
#: half a second (measured: two engines on two cores, 0.18 in half a second).
NOISE_S = 0.04

#: How fast a pace drifts by itself, and the effect of a neighbour, variance of the logarithm per second.
PACE_DRIFT, EFFECT_DRIFT = 1e-3, 1e-5

#: What is thought of both before the first step: nothing, give or take a factor of 1.6 and of 1.4.
PACE_VARIANCE, EFFECT_VARIANCE = 0.25, 0.1

#: One observation counts for at most so much (a factor of four), and for no more than a second.
SURPRISE_MAX, SPAN_S_MAX = log(4.0), 1.0

#: Odds beyond e to this are certainty.
ODDS_LOG_MAX = 50.0

#: Nobody is slowed more than threefold by one neighbour.
EFFECT_MAX = log(3.0)

#: Time after which half of what a neighbour did is forgotten; and after which one that tells nothing counts as idle.
LATELY_NS, SILENCE_NS = 700_000_000, 2_000_000_000

#: An engine that computes says so about every 20 ms; one that went idle may take 200 ms to report it.
WORD_NS = 40_000_000


class NeighbourEffect:
    """Effect of one busy neighbour on the logarithm of an engine's step times. A Kalman filter of two values."""

    def __init__(self) -> None:
        self._pace = self._effect = 0.0
        self._pace_variance, self._covariance, self._variance = PACE_VARIANCE, 0.0, EFFECT_VARIANCE
        self._at_ns = 0

    @property
    def value(self) -> float:
        """Expected effect: the effect that steps indicate, times the probability that there is any.

        Before the first step, an effect and none are equally likely. Then the odds are the ratio of the densities at no
        effect, before and after the steps. Without the probability, with many neighbours and many sequences on them, an
        effect that does not exist would outweigh all else that a placement is judged by.
        """
        if self._effect <= 0:
            return 0.0
        odds = sqrt(self._variance / EFFECT_VARIANCE) * exp(min(ODDS_LOG_MAX, self._effect**2 / (2 * self._variance)))
        return min(EFFECT_MAX, self._effect) * odds / (1 + odds)

    def factor(self, busy: float) -> float:
        """Factor on step times beside so many busy neighbours."""
        return exp(self.value * busy) if busy else 1.0

    def observe(self, at_ns: int, *, measured_ns: float, predicted_ns: float, busy: int) -> None:
        """Takes one step, or a run of steps, into account. ``predicted_ns``: by the set alone."""
        if measured_ns <= 0 or predicted_ns <= 0:
            return
        self._drift(at_ns)
        seen = log(measured_ns / predicted_ns) - self._pace - self._effect * busy
        seen = min(SURPRISE_MAX, max(-SURPRISE_MAX, seen))
        noise = NOISE_S / min(SPAN_S_MAX, measured_ns / 1e9)
        pace, effect = self._pace_variance + busy * self._covariance, self._covariance + busy * self._variance
        total = pace + busy * effect + noise
        pace_gain, effect_gain = pace / total, effect / total
        self._pace += pace_gain * seen
        self._effect += effect_gain * seen
        self._pace_variance -= pace_gain * pace
        self._covariance -= pace_gain * effect
        self._variance -= effect_gain * effect

    def _drift(self, at_ns: int) -> None:
        passed_s = max(0, at_ns - self._at_ns) / 1e9 if self._at_ns else 0.0
        self._at_ns = max(self._at_ns, at_ns)
        self._pace_variance = min(PACE_VARIANCE, self._pace_variance + PACE_DRIFT * passed_s)
        self._variance = min(EFFECT_VARIANCE, self._variance + EFFECT_DRIFT * passed_s)


@dataclass(slots=True)
class Mate:
    """An instance as its neighbours see it.

    Attributes:
        effect: How each neighbour slows it.
        sequences: That it has, in its batch or waiting for it: all of them get ready later where it is slowed.
        others: Its neighbours.
    """

    effect: NeighbourEffect = field(default_factory=NeighbourEffect)
    sequences: int = 0
    others: list[Mate] = field(default_factory=list)
    _share: float = 0.0
    _told_ns: int = 0
    _until_ns: int = 0

    def note(self, now_ns: int, *, sequences: int, left_ns: int = SILENCE_NS) -> None:
        """Note the engine's work from now on.

        ``left_ns``: time for which it has work, if nothing new comes and it reports nothing. The report that it is done
        comes late, and steps of others in between were not slowed.
        """
        self._share, self._told_ns = self.share(now_ns), max(now_ns, self._told_ns)
        self.sequences = sequences
        self._until_ns = self._told_ns + min(SILENCE_NS, max(WORD_NS, left_ns)) if sequences else self._told_ns

    def share(self, now_ns: int) -> float:
        """Of the last second or so, for how much of it it was busy."""
        passed_ns = max(0, now_ns - self._told_ns)
        busy_ns = min(passed_ns, self._until_ns - self._told_ns)
        share = 1 - (1 - self._share) * _kept(busy_ns)
        return share * _kept(passed_ns - busy_ns)

    def busy(self, now_ns: int) -> bool:
        """Whether it computes just now, as far as is known."""
        return now_ns < self._until_ns

    def neighbours_now(self, now_ns: int) -> int:
        """Number of neighbours that compute just now."""
        return sum(each.busy(now_ns) for each in self.others)

    def neighbours_lately(self, now_ns: int) -> float:
        """Mean number of neighbours that computed lately; it is expected to stay much the same."""
        return sum(each.share(now_ns) for each in self.others)

    def delay_ns(self, longer_ns: int, now_ns: int) -> int:
        """Total delay of its neighbours' sequences if it computes for ``longer_ns`` longer, ns."""
        slowed = (each.sequences * (each.effect.factor(1) - 1) for each in self.others if each.busy(now_ns))
        return round(longer_ns * sum(slowed))


class Hosts:
    """Neighbours of each instance, by host. An instance that names no host has no neighbours."""

    def __init__(self) -> None:
        self._mates: dict[str, dict[str, Mate]] = {}  # by host, then by instance
        self._host_of: dict[str, str] = {}

    def join(self, instance: str, host: str, effect: NeighbourEffect) -> Mate:
        """Puts an instance on its host, and away from where it was."""
        self.leave(instance)
        mate = Mate(effect)
        if host:
            self._host_of[instance] = host
            self._mates.setdefault(host, {})[instance] = mate
            self._introduce(host)
        return mate

    def leave(self, instance: str) -> None:
        """It is gone; nobody is slowed by it any more."""
        host = self._host_of.pop(instance, None)
        if host is None:
            return
        del self._mates[host][instance]
        self._introduce(host)
        if not self._mates[host]:
            del self._mates[host]

    def _introduce(self, host: str) -> None:
        mates = list(self._mates[host].values())
        for mate in mates:
            mate.others = [each for each in mates if each is not mate]


def _kept(passed_ns: int) -> float:
    """Share of the past that still counts after so long."""
    return exp(-log(2.0) * passed_ns / LATELY_NS)
