"""Expected final length of a sequence, from the prediction and the tokens that it has generated since."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Protocol

import msgspec

#: What a sequence that outran its prediction is given further, tokens.
OUTRUN_TOKENS = 10

#: Where a probability of survival comes near the end of what a float can hold, its quotients mean nothing.
_SURVIVAL_MIN = 1e-250
_NORMAL = NormalDist()


class LengthRule(Protocol):
    """Revises a predicted output length in the light of the tokens generated."""

    def final_tokens(self, expected: int, generated: int) -> int:
        """Expected length of the whole output, more than ``generated``.

        Args:
            expected: What was predicted before the first token, at least 1.
            generated: Output tokens so far.
        """
        ...


class OutrunPlusTen(msgspec.Struct, frozen=True):
    """The prediction holds until the sequence reaches it; from then on, ten tokens more than it has.

    Source: Block, section 4.1.
    """

    def final_tokens(self, expected: int, generated: int) -> int:
        """The prediction, or what there is plus ten."""
        return expected if generated < expected else generated + OUTRUN_TOKENS


class SurvivalMean(msgspec.Struct, frozen=True):
    """The mean of all lengths above what was generated, where lengths are log-normal around the prediction.

    Attributes:
        sigma: Standard deviation of the logarithm of actual over predicted length.
    """

    sigma: float

    def final_tokens(self, expected: int, generated: int) -> int:
        """``E[L | L > generated]`` for a log-normal L with mean ``expected``."""
        if generated <= 0:
            return expected
        # For L = exp(N(mu, sigma)): E[L; L > g] = E[L] * P(N > z - sigma) and P(L > g) = P(N > z).
        z = _normalized(expected, generated, self.sigma)
        survival = _above(z)
        if survival < _SURVIVAL_MIN:
            return generated + OUTRUN_TOKENS
        return max(generated + 1, round(expected * _above(z - self.sigma) / survival))


class SurvivalMedian(msgspec.Struct, frozen=True):
    """The median of the same lengths: half of such sequences are shorter. Before the first token, the prediction.

    Waiting requests are let in by the ends that come first, not by the mean of all; see README.md for what that makes.

    Attributes:
        sigma: Standard deviation of the logarithm of actual over predicted length.
    """

    sigma: float

    def final_tokens(self, expected: int, generated: int) -> int:
        """The length that half of all log-normal lengths above ``generated``, of mean ``expected``, exceed."""
        if generated <= 0:
            return expected
        survival = _above(_normalized(expected, generated, self.sigma))
        if survival < _SURVIVAL_MIN:
            return generated + OUTRUN_TOKENS
        z = -_NORMAL.inv_cdf(survival / 2)
        return max(generated + 1, round(expected * math.exp(self.sigma * z - self.sigma**2 / 2)))


def _normalized(mean: int, length: int, sigma: float) -> float:
    """Return the number of standard deviations by which the logarithm of ``length`` lies above its mean."""
    return (math.log(length / mean) + sigma**2 / 2) / sigma


def _above(z: float) -> float:
    """Probability that a standard normal variable exceeds ``z``."""
    return math.erfc(z / math.sqrt(2)) / 2
