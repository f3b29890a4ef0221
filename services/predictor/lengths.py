"""Statistics of output lengths, learnt from outcomes: their mean, and the error of predictions of them."""

from __future__ import annotations

from math import log, sqrt

from millrace.contracts.observers import RequestFinished
from millrace.enginemodel.forecast import LengthRule, OutrunPlusTen, SurvivalMean

from services.predictor.config import OutrunRule, PredictorConfig
from services.predictor.state import LENGTH_MAX

#: Share that is forgotten with each outcome.
FORGET = 0.01

#: Outcomes before what they say is used.
OUTCOMES_MIN = 20

#: Bounds of the spread of real over predicted length (standard deviation of its logarithm).
SIGMA_MIN, SIGMA_MAX = 0.05, 2.5

#: Before enough outcomes: about what a mean as the only prediction has on conversations (log-normal ShareGPT lengths).
SIGMA_START = 1.0

#: Learnt values are used in steps of this size, so that a forecaster is not built anew with every outcome.
STEP_RATIO = 1.1


class LearntLengths:
    """Lengths of one model's outputs. Each sum forgets; values change in steps of a tenth.

    Attributes:
        default_output_tokens: Length of an output that nobody predicted.
        rule: What is expected of one that outran its prediction.
        version: Rises when either changes.
    """

    def __init__(self, config: PredictorConfig) -> None:
        self.default_output_tokens = config.default_output_tokens
        self.version = 0
        self._learn = config.learn_lengths
        self._survival = config.rule is OutrunRule.SURVIVAL
        self._sigma = SIGMA_START
        self.rule: LengthRule = SurvivalMean(self._sigma) if self._survival else OutrunPlusTen()
        self._lengths = _Mean()
        self._logs, self._squares = _Mean(), _Mean()

    def observe(self, outcome: RequestFinished) -> None:
        """Learns from a request that completed."""
        if not self._learn or outcome.outcome != "completed":
            return
        predicted = outcome.predicted_output_tokens
        for tokens in outcome.output_tokens:
            if 0 < tokens < LENGTH_MAX:
                self._lengths.add(tokens)
                if predicted is not None and 0.1 <= predicted < LENGTH_MAX:
                    deviation = log(tokens / predicted)
                    self._logs.add(deviation)
                    self._squares.add(deviation**2)
        self._adopt()

    def _adopt(self) -> None:
        length = max(1, round(self._lengths.value))
        if self._lengths.count >= OUTCOMES_MIN and _differ(length, self.default_output_tokens):
            self.default_output_tokens, self.version = length, self.version + 1
        variance = max(0.0, self._squares.value - self._logs.value**2)
        sigma = min(SIGMA_MAX, max(SIGMA_MIN, sqrt(variance)))
        if self._survival and self._squares.count >= OUTCOMES_MIN and _differ(sigma, self._sigma):
            self._sigma, self.version = sigma, self.version + 1
            self.rule = SurvivalMean(sigma)


class _Mean:
    """A mean that forgets."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0.0
        self._weight = 0.0

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight else 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self._sum = (1 - FORGET) * self._sum + value
        self._weight = (1 - FORGET) * self._weight + 1


def _differ(value: float, used: float) -> bool:
    return not used / STEP_RATIO < value < used * STEP_RATIO
