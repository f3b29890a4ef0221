"""Known facts about a request's placements and its end, whatever source they were read from."""

from __future__ import annotations

import msgspec

from millrace.contracts.observers import CandidateForecast, DecisionMade, RequestFinished


class ExplainedPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """One decision, or a migration.

    Attributes:
        decision: What was decided. Of a migration: ``kind`` is ``migration``, ``reason`` what asked for it.
        source: Instance that it moved from, or the loss that its target saved it from; migrations only.
        trouble: Why it came to nothing; empty where the instance took it or nothing is known.
        why: Of a migration: its asker's sentence, with the predicted rest, and the risk or delay; empty for none.
        copied: Of a migration: rounds, bytes and the pause; empty where not told.
        step_tokens_max: Bound of the steps there, where decodes came first; 0 where they did not, or it is not told.
    """

    decision: DecisionMade
    source: str = ""
    trouble: str = ""
    why: str = ""
    copied: str = ""
    step_tokens_max: int = 0

    @property
    def forecast(self) -> CandidateForecast | None:
        """Of the chosen instance; None without a prediction."""
        decision = self.decision
        return next((f for f in decision.forecasts if f.name == decision.chosen and not f.note), None)


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """A request.

    Attributes:
        placements: Of a request to a cascade those of its attempts.
        ending: None where nothing of its end was recorded.
    """

    request: str
    model: str
    placements: list[ExplainedPlacement]
    ending: RequestFinished | None = None
