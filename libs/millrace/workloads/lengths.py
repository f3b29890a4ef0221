"""Request lengths: distributions described by a few figures, which ship, and draws from the rows of a trace.

A fitted set (``fitted/*.toml``) holds quantiles of prompt and output lengths and how the two go together. Lengths are
drawn by a Gaussian copula: two correlated normal numbers, each sent through its quantiles, linear in the logarithm
between them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from importlib import resources
from random import Random
from statistics import NormalDist
from typing import Protocol

import msgspec

from millrace.workloads.shape import RequestShape, WorkloadError

_NORMAL = NormalDist()


class Lengths(Protocol):
    """Gives one request's lengths after the other."""

    def draw(self, rng: Random) -> RequestShape: ...


class LogNormalLengths(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Independent log-normal lengths.

    Attributes:
        prompt_mean, output_mean: Tokens.
        prompt_sigma, output_sigma: Standard deviation of the logarithm; 0 for equal lengths.
        prompt_max, output_max: Longer ones are cut to this.
    """

    prompt_mean: float
    output_mean: float
    prompt_sigma: float = 0.0
    output_sigma: float = 0.0
    prompt_max: int = 1_000_000
    output_max: int = 1_000_000

    def draw(self, rng: Random) -> RequestShape:
        prompt = _log_normal(rng, self.prompt_mean, self.prompt_sigma)
        output = _log_normal(rng, self.output_mean, self.output_sigma)
        return RequestShape(min(prompt, self.prompt_max), min(output, self.output_max))


class FittedLengths(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Quantiles of both lengths and their rank correlation.

    Attributes:
        source: Where the figures come from, with licence.
        error: How far the fit is off, in words and figures.
        shares: Where the quantiles stand, rising from 0 to 1.
        prompt_tokens, output_tokens: The quantiles.
        correlation: Of the two normal numbers behind the lengths.
    """

    source: str
    error: str
    shares: tuple[float, ...]
    prompt_tokens: tuple[float, ...]
    output_tokens: tuple[float, ...]
    correlation: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for quantiles that are none."""
        rising = all(a < b for a, b in zip(self.shares, self.shares[1:], strict=False))
        if not rising or self.shares[0] != 0 or self.shares[-1] != 1:
            raise ValueError("shares must rise from 0 to 1")
        for name in ("prompt_tokens", "output_tokens"):
            values = getattr(self, name)
            if len(values) != len(self.shares) or list(values) != sorted(values) or values[0] < 1:
                raise ValueError(f"{name} needs one value per share, rising, the first at least 1")
        if not -1 <= self.correlation <= 1:
            raise ValueError(f"correlation must be in [-1, 1], is {self.correlation}")

    def draw(self, rng: Random) -> RequestShape:
        first, other = rng.gauss(0.0, 1.0), rng.gauss(0.0, 1.0)
        second = self.correlation * first + math.sqrt(1 - self.correlation**2) * other
        return RequestShape(self._quantile(self.prompt_tokens, first), self._quantile(self.output_tokens, second))

    def _quantile(self, values: tuple[float, ...], normal: float) -> int:
        share = _NORMAL.cdf(normal)
        piece = min(bisect_right(self.shares, share), len(self.shares) - 1) - 1
        width = self.shares[piece + 1] - self.shares[piece]
        low, high = math.log(values[piece]), math.log(values[piece + 1])
        return max(1, round(math.exp(low + (high - low) * (share - self.shares[piece]) / width)))


class RowLengths:
    """Rows of a trace: in their order from the beginning, over and over, or drawn with replacement."""

    def __init__(self, rows: list[RequestShape], *, shuffle: bool = False) -> None:
        if not rows:
            raise WorkloadError("a trace without rows gives no requests")
        self._rows = rows
        self._shuffle = shuffle
        self._next = 0

    def draw(self, rng: Random) -> RequestShape:
        if self._shuffle:
            return self._rows[rng.randrange(len(self._rows))]
        row = self._rows[self._next % len(self._rows)]
        self._next += 1
        return row


def fitted_names() -> list[str]:
    """Names of the sets that ship."""
    files = (resources.files("millrace.workloads") / "fitted").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def load_fitted(name: str) -> FittedLengths:
    """The set of this name.

    Raises:
        WorkloadError: there is none; the message lists those there are. Or the file is wrong.
    """
    file = resources.files("millrace.workloads") / "fitted" / f"{name}.toml"
    if not file.is_file():
        raise WorkloadError(f"lengths {name!r}: unknown, there are {', '.join(fitted_names())}")
    try:
        return msgspec.toml.decode(file.read_bytes(), type=FittedLengths)
    except msgspec.DecodeError as error:
        raise WorkloadError(str(error), path=f"{name}.toml") from None


def _log_normal(rng: Random, mean: float, sigma: float) -> int:
    mu = math.log(mean) - sigma**2 / 2
    return max(1, round(math.exp(mu + sigma * rng.gauss(0.0, 1.0)))) if sigma else max(1, round(mean))
