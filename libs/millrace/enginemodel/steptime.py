"""How long a step takes: from what it computes to nanoseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from millrace.contracts.status import BatchComposition


class StepTimeModel(Protocol):
    """Gives the duration of one step."""

    def duration_ns(self, batch: BatchComposition, lengths: Sequence[int] | None = None) -> int:
        """Time of one step.

        Args:
            batch: What the step computes. Not empty.
            lengths: Context length of each sequence after the step, for models that ask how unequal they are.
        """
        ...

    @property
    def wants_lengths(self) -> bool:
        """Whether ``lengths`` changes the answer: gathering them costs, so they are given only then."""
        ...


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Where coefficients come from and how far to trust them.

    Attributes:
        model: Language model.
        hardware: What it ran on.
        source: Measurement or publication.
        error: The fit's error in words and figures.
    """

    model: str
    hardware: str
    source: str
    error: str


class LinearStepTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step's time as a sum of what it does, each with a cost in ns.

    ``T = fixed + per_decode·decodes + per_prefill_token·prefill_tokens + per_context_token·context_tokens +
    per_prefill_work·prefill_work``, times ``1 + heterogeneity·cv`` where cv is the coefficient of variation of the
    context lengths, and never below ``floor``.

    Attributes:
        fixed: ns of any step (c0): launching, weights read once.
        per_decode: ns for each decoding sequence (c1).
        per_prefill_token: ns for each prompt token (c2).
        per_context_token: ns for each token of context that attention reads (c3).
        per_prefill_work: ns for each token² of prompt attention (c4).
        heterogeneity: Extra share of time at cv 1: what unequal lengths in one batch cost. 0 until measured.
    """

    fixed: float
    per_decode: float = 0.0
    per_prefill_token: float = 0.0
    per_context_token: float = 0.0
    per_prefill_work: float = 0.0
    heterogeneity: float = 0.0
    provenance: Provenance | None = None

    @property
    def wants_lengths(self) -> bool:
        return self.heterogeneity != 0.0

    def duration_ns(self, batch: BatchComposition, lengths: Sequence[int] | None = None) -> int:
        cost = (
            self.fixed
            + self.per_decode * batch.decodes
            + self.per_prefill_token * batch.prefill_tokens
            + self.per_context_token * batch.context_tokens
            + self.per_prefill_work * batch.prefill_work
        )
        if self.heterogeneity and lengths:
            cost *= 1 + self.heterogeneity * coefficient_of_variation(lengths)
        return max(1, round(cost))


class ConstantStepTime(msgspec.Struct, frozen=True):
    """Every step takes the same time: for tests and for measuring everything but the engine."""

    step_ns: int

    @property
    def wants_lengths(self) -> bool:
        return False

    def duration_ns(self, batch: BatchComposition, lengths: Sequence[int] | None = None) -> int:
        return self.step_ns


def coefficient_of_variation(lengths: Sequence[int]) -> float:
    """Standard deviation over mean; 0 for nothing, one length, or a mean of 0."""
    count = len(lengths)
    mean = sum(lengths) / count if count else 0.0
    if mean == 0:
        return 0.0
    return float((sum((length - mean) ** 2 for length in lengths) / count) ** 0.5 / mean)
