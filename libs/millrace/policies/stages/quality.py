"""Service quality of a batch: the paper's linear model of normalised latency, equation 1.

Source: CascadeInfer, section 4.1.
"""

from __future__ import annotations

import math

import msgspec


class QualityModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Coefficients of ``Q = D0 + D1·n + D2·ΣI + D3·ΣI² + D4·ΣL``, seconds per output token of each request in a batch.

    n is the number of requests in the batch, I their prompt lengths and L their present lengths, tokens. The quality of
    the whole batch is ``n·Q``; lower is better.

    Attributes:
        d0: Seconds.
        d1: Seconds per request.
        d2: Seconds per prompt token.
        d3: Seconds per squared prompt token.
        d4: Seconds per token of present length.
    """

    d0: float
    d1: float = 0.0
    d2: float = 0.0
    d3: float = 0.0
    d4: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for coefficients that are negative or not finite."""
        for name in ("d0", "d1", "d2", "d3", "d4"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be at least 0 and finite, is {value}")

    def batch(self, n: float, lengths_sum: float, *, instances: int = 1) -> float:
        """Quality of n requests that several instances share evenly, prompts left out: ``n·(D0 + (D1·n + D4·ΣL)/e)``.

        Args:
            n: Requests of all instances together.
            lengths_sum: Sum of their present lengths, tokens.
            instances: e, at least 1.
        """
        return n * (self.d0 + (self.d1 * n + self.d4 * lengths_sum) / instances)


#: Llama-3-8B on an H200 in decode, from the published step-time set ``h200-llama-3-8b``: what is assumed where nothing
#: was profiled. Refinement depends on the ratios of the coefficients only.
DEFAULT_QUALITY = QualityModel(d0=6.2e-3, d1=9.3e-6, d4=30.8e-9)


class QualityFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Coefficients with where they come from: the form of the file that ``millrace profile --qoe`` writes.

    Attributes:
        model: Served name of the model that was measured.
        hardware: What it ran on.
        source: How it was measured.
        error: The fit's error on rounds that it did not see, in words and figures.
        coefficients: Of equation 1.
    """

    model: str
    hardware: str
    source: str
    error: str
    coefficients: QualityModel


def decode_quality(content: bytes, *, origin: str) -> QualityFile:
    """Reads a file's content, TOML.

    Raises:
        ValueError: naming ``origin`` and the key that is missing, unknown or wrong.
    """
    try:
        return msgspec.toml.decode(content, type=QualityFile)
    except (msgspec.DecodeError, ValueError) as error:
        raise ValueError(f"quality coefficients {origin}: {error}") from error
