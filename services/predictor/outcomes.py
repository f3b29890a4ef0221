"""Statistics of one model's outcomes: the length of outputs, and how much later requests end than forecasts say.

What makes requests later than the simulation of one engine says (those who come after them, ingress, bus, front ends)
changes with the load and is much the same for all instances of a model: a pause until the first token, and a factor on
the time of each token after it. Lengths that came out other than predicted do not spoil it, since times per token are
compared.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from math import exp, log

import msgspec
from millrace.contracts.observers import RequestFinished

from services.predictor.config import PredictorConfig
from services.predictor.state import LENGTH_MAX

#: Share that is forgotten with each outcome: the last hundred carry most of the weight.
FORGET = 0.01

#: Outcomes before their mean length is used; it is used in steps of this size, so that a forecaster is not built anew
#: with every outcome.
OUTCOMES_MIN, STEP_RATIO = 20, 1.1

#: Outcomes that "nothing comes later" is worth at the start.
PRIOR_OUTCOMES = 20.0

#: One outcome counts for at most these: a factor either way, and a pause that is no stall.
FACTOR_MAX, PAUSE_NS_MAX = 2.0, 100_000_000.0

#: Fewest tokens whose mean time says something.
TOKENS_MIN = 8

#: Smaller changes are not adopted: answers stay comparable, and what was in force when stays short.
FACTOR_STEP, PAUSE_NS_STEP = 0.02, 500_000.0

#: Corrections that are remembered, so that an outcome finds the one its prediction was made with.
REMEMBERED_MAX = 512


class Correction(msgspec.Struct, frozen=True):
    """In force from ``at_ns`` on. ``pause_ns``: until the first token; ``factor``: on each one after it."""

    at_ns: int = 0
    pause_ns: float = 0.0
    factor: float = 1.0

    def of(self, ttft_ns: int, e2e_ns: int, tpot_mean_ns: int, tpot_worst_ns: int) -> tuple[int, int, int, int]:
        """These times of a forecast, corrected."""
        factor = self.factor
        if self.pause_ns == 0 and factor == 1:
            return ttft_ns, e2e_ns, tpot_mean_ns, tpot_worst_ns
        first_ns = max(1, round(ttft_ns + self.pause_ns))
        rest_ns = round(factor * (e2e_ns - ttft_ns))
        return first_ns, first_ns + rest_ns, round(factor * tpot_mean_ns), round(factor * tpot_worst_ns)


class OutcomeStatistics:
    """Statistics of one model.

    Attributes:
        default_output_tokens: Length of an output that nobody predicted.
        version: Rises when that changes.
        correction: In force.
    """

    def __init__(self, config: PredictorConfig) -> None:
        self.default_output_tokens = config.default_output_tokens
        self.version = 0
        self.correction = Correction()
        self._learn_lengths, self._correct = config.learn_lengths, config.calibrate
        self._lengths = _ForgettingMean()
        self._before: deque[Correction] = deque([self.correction], maxlen=REMEMBERED_MAX)
        self._pauses, self._factors = _ForgettingMean(PRIOR_OUTCOMES), _ForgettingMean(PRIOR_OUTCOMES)

    def observe_lengths(self, outcome: RequestFinished) -> None:
        if not self._learn_lengths or outcome.outcome != "completed":
            return
        for tokens in outcome.output_tokens:
            if 0 < tokens < LENGTH_MAX:
                self._lengths.add(tokens)
        length, used = max(1, round(self._lengths.value)), self.default_output_tokens
        if self._lengths.count >= OUTCOMES_MIN and not used / STEP_RATIO < length < used * STEP_RATIO:
            self.default_output_tokens, self.version = length, self.version + 1

    def observe_times(self, outcome: RequestFinished, now_ns: int) -> None:
        """Learns the correction from a request of one sequence that completed where it was first placed."""
        times = _times(outcome) if self._correct else None
        if times is None:
            return
        predicted_ttft_ns, predicted_tpot_ns, ttft_ns, tpot_ns = times
        then = self._in_force(outcome.placed_ns)
        pause_ns = ttft_ns - (predicted_ttft_ns - then.pause_ns)
        self._pauses.add(min(PAUSE_NS_MAX, max(-PAUSE_NS_MAX, pause_ns)))
        if predicted_tpot_ns > 0 and tpot_ns > 0:
            bound = log(FACTOR_MAX)
            self._factors.add(min(bound, max(-bound, log(tpot_ns / predicted_tpot_ns * then.factor))))
        self._adopt(now_ns)

    def _in_force(self, at_ns: int) -> Correction:
        """The correction of predictions made at that time."""
        if at_ns >= self.correction.at_ns:
            return self.correction
        index = bisect_right(self._before, at_ns, key=lambda each: each.at_ns)
        return self._before[max(0, index - 1)]

    def _adopt(self, now_ns: int) -> None:
        pause_ns, factor, used = self._pauses.value, exp(self._factors.value), self.correction
        far = abs(pause_ns - used.pause_ns) > PAUSE_NS_STEP or abs(factor / used.factor - 1) > FACTOR_STEP
        if far and now_ns > used.at_ns:
            self.correction = Correction(now_ns, pause_ns, factor)
            self._before.append(self.correction)


class _ForgettingMean:
    """A mean that forgets. ``prior``: observations of 0 that it begins with."""

    def __init__(self, prior: float = 0.0) -> None:
        self.count = 0
        self._sum, self._weight = 0.0, prior

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight else 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self._sum = (1 - FORGET) * self._sum + value
        self._weight = (1 - FORGET) * self._weight + 1


def _times(outcome: RequestFinished) -> tuple[float, float, float, float] | None:
    """Predicted and measured time to the first token and per token after it, ns, from the placement on.

    None where they cannot be compared. Times per token are 0 where there are too few tokens.
    """
    before_ns = outcome.placed_ns - outcome.arrival_ns
    if outcome.ttft_ns is None or outcome.predicted_ttft_ns is None or outcome.predicted_e2e_ns is None:
        return None
    if len(outcome.output_tokens) != 1 or outcome.ttft_ns <= before_ns or before_ns < 0:
        return None
    predicted, tokens = outcome.predicted_output_tokens or 0.0, outcome.output_tokens[0]
    predicted_tpot_ns = tpot_ns = 0.0
    if predicted >= TOKENS_MIN and tokens >= TOKENS_MIN:
        predicted_tpot_ns = (outcome.predicted_e2e_ns - outcome.predicted_ttft_ns) / (round(predicted) - 1)
        tpot_ns = (outcome.e2e_ns - outcome.ttft_ns) / (tokens - 1)
    return outcome.predicted_ttft_ns, predicted_tpot_ns, outcome.ttft_ns - before_ns, tpot_ns
