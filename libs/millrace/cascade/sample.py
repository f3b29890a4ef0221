"""Judged requests: what every tier of a cascade answered, and how good it was."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Booleans = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class JudgedSample:
    """Requests that ran on all tiers (N requests, C tiers, smallest model first).

    Attributes:
        scores: (N, C - 1), 0 to 100: the routing judge's score of each tier's answer but the last one's.
        quality: (N, C), 0 to 100: how good each answer is. Use another judge than the one that routes, or the truth:
            a judge that grades its own choices overstates them.
        prompt_tokens: (N, C), by each tier's tokenizer.
        output_tokens: (N, C).
    """

    scores: Floats
    quality: Floats
    prompt_tokens: Integers
    output_tokens: Integers

    def __post_init__(self) -> None:
        count, tiers = self.quality.shape
        if count < 1 or tiers < 1:
            raise ValueError("quality needs at least one request and one tier")
        if self.scores.shape != (count, tiers - 1):
            raise ValueError(f"scores has shape {self.scores.shape}, needs {(count, tiers - 1)}")
        for name in ("prompt_tokens", "output_tokens"):
            lengths = getattr(self, name)
            if lengths.shape != (count, tiers):
                raise ValueError(f"{name} has shape {lengths.shape}, needs {(count, tiers)}")
            if lengths.min() < 1:
                raise ValueError(f"{name} holds a length below 1")
        for name in ("scores", "quality"):
            values = getattr(self, name)
            if not np.isfinite(values).all() or (values.size and (values.min() < 0 or values.max() > 100)):
                raise ValueError(f"{name} holds values outside 0 to 100")

    @property
    def count(self) -> int:
        return int(self.quality.shape[0])

    @property
    def tiers(self) -> int:
        return int(self.quality.shape[1])

    def rows(self, indices: Integers) -> JudgedSample:
        """The requests of these indices, in their order; an index may come more than once."""
        return JudgedSample(
            scores=self.scores[indices],
            quality=self.quality[indices],
            prompt_tokens=self.prompt_tokens[indices],
            output_tokens=self.output_tokens[indices],
        )
