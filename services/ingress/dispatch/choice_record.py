"""Outcome of one dispatch decision, with what led to it."""

from __future__ import annotations

import msgspec
from millrace.contracts.observers import CandidateForecast
from millrace.policies.dispatch import Decision


class DispatchChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A policy's decision with its context.

    Attributes:
        policy: Name of the policy that the call has.
        fallback: Name of the policy that decided in its place; empty for none.
        forecasts: Predictions, the chosen instance's first, at most FORECASTS_MAX.
        asked_ns: When the predictors were asked, unix ns; 0 where none was.
    """

    decision: Decision
    policy: str
    fallback: str = ""
    forecasts: list[CandidateForecast] = []
    asked_ns: int = 0

    @property
    def forecast(self) -> CandidateForecast | None:
        """Prediction for the chosen instance; None where there is none."""
        first = self.forecasts[0] if self.forecasts else None
        return first if first is not None and first.name == self.decision.chosen and not first.note else None
