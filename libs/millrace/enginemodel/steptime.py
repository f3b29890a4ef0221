"""Step-time models: what is fitted, stored and read by people. Each compiles into a StepCost, which is what runs."""

from __future__ import annotations

from typing import Protocol

import msgspec

from millrace.contracts.status import BatchComposition
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.stepcost import FS_PER_NS, StepCost


class StepTimeModel(Protocol):
    """Says what a step costs on one kind of engine."""

    def cost(self, parameters: EngineParameters) -> StepCost:
        """Compiles the model for an engine of these limits."""
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

    ``T = fixed + per_decode·decodes + per_prefill_token·prefill_tokens + per_prefill_work·prefill_work +
    max(per_context_token·context_tokens, per_longest_token·longest_context)``.

    Attributes:
        fixed: ns of any step (c0): launching, weights read once.
        per_decode: ns for each decoding sequence (c1).
        per_prefill_token: ns for each prompt token (c2).
        per_context_token: ns for each token of context that attention reads (c3).
        per_prefill_work: ns for each token² of prompt attention (c4).
        per_longest_token: ns for each token of the longest decoding sequence: what unequal lengths in one batch cost.
            0 where that was not measured, or costs nothing.
    """

    fixed: float
    per_decode: float = 0.0
    per_prefill_token: float = 0.0
    per_context_token: float = 0.0
    per_prefill_work: float = 0.0
    per_longest_token: float = 0.0
    provenance: Provenance | None = None

    def cost(self, parameters: EngineParameters) -> StepCost:
        """The same in integers."""
        return StepCost(
            fixed=_fs(self.fixed),
            decode=_fs(self.per_decode),
            prefill_token=_fs(self.per_prefill_token),
            context_token=_fs(self.per_context_token),
            longest_token=_fs(self.per_longest_token),
            prefill_half_work=_fs(self.per_prefill_work / 2),
        )

    def duration_ns(self, batch: BatchComposition) -> int:
        """Time of one step, ns: for fits and for people."""
        return self.cost(EngineParameters()).duration_fs(batch) // FS_PER_NS


class ConstantStepTime(msgspec.Struct, frozen=True):
    """Every step takes the same time: for tests and for measuring everything but the engine."""

    step_ns: int

    def cost(self, parameters: EngineParameters) -> StepCost:
        """One fixed cost."""
        return StepCost(fixed=self.step_ns * FS_PER_NS)


def _fs(ns: float) -> int:
    return round(ns * FS_PER_NS)
