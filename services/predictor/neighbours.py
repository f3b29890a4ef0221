"""Engines on one host may slow each other: they share caches, memory, and cores with what surrounds them.

How much is learnt from steps alone, for each instance: the logarithm of measured over modelled time is taken as its
own pace, which drifts, plus an effect for each other engine of the host that computes at the same time. Where engines
do not disturb each other, as on GPUs of their own, the effect comes out as nothing; until steps have told, it counts
with the probability that there is one at all.

What follows from it: a forecast includes how busy the neighbours are, and a placement how much later those get ready
who decode beside it.
"""

from __future__ import annotations

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


class NeighbourEffect:
    """Effect of one busy neighbour on the logarithm of an engine's step times. A Kalman filter of two values.

    Attributes:
        value: Expected effect: the effect that steps indicate, times the probability that there is any.
    """

    def __init__(self) -> None:
        self.value = 0.0
        self._pace = self._effect = 0.0
        self._pace_variance, self._covariance, self._variance = PACE_VARIANCE, 0.0, EFFECT_VARIANCE
        self._at_ns = 0

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
        self.value = self._expected()

    def _expected(self) -> float:
        """Before the first step, an effect and none are equally likely. Then the odds are the ratio of the densities at
        no effect, before and after the steps. Without the probability, with many neighbours and many sequences on them,
        an effect that does not exist would outweigh all else that a placement is judged by.
        """
        if self._effect <= 0:
            return 0.0
        odds = sqrt(self._variance / EFFECT_VARIANCE) * exp(min(ODDS_LOG_MAX, self._effect**2 / (2 * self._variance)))
        return min(EFFECT_MAX, self._effect) * odds / (1 + odds)

    def _drift(self, at_ns: int) -> None:
        passed_s = max(0, at_ns - self._at_ns) / 1e9 if self._at_ns else 0.0
        self._at_ns = max(self._at_ns, at_ns)
        self._pace_variance = min(PACE_VARIANCE, self._pace_variance + PACE_DRIFT * passed_s)
        self._variance = min(EFFECT_VARIANCE, self._variance + EFFECT_DRIFT * passed_s)
