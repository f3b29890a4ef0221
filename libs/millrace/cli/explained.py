"""Known facts about a request's placements and its end, whatever source they were read from."""

from __future__ import annotations

import msgspec

from millrace.contracts.observers import CandidateForecast, CandidateScore, CascadeAttempt


class ExplainedPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """One decision, or a migration.

    Attributes:
        kind: ``dispatch``, ``continuation`` or ``migration``.
        source: Instance that it moved from, or the loss that its target saved it from; migrations only.
        at_ns: When it was decided, unix ns.
        asked_ns: Time that asking predictors took; 0 where nobody was asked, or it is not known.
        chosen: Instance; empty where none could take it.
        output_tokens: Tokens that each sequence had by then.
        expected_output_tokens: Predicted mean of the whole output; None if unknown.
        forecasts: The chosen one first; empty where nobody was asked.
        scores: The policy's, best first.
        trouble: Why it came to nothing; empty where the instance took it or nothing is known.
        why: Of a migration: its asker's sentence, with the predicted rest, and the risk or delay; empty for none.
        copied: Of a migration: rounds, bytes and the pause; empty where not told.
        step_tokens_max: Bound of the steps there, where decodes came first; 0 where they did not, or it is not told.
    """

    kind: str
    sequences: list[str]
    epoch: int
    at_ns: int
    policy: str
    chosen: str
    reason: str
    fallback: str = ""
    asked_ns: int = 0
    output_tokens: int = 0
    expected_output_tokens: float | None = None
    forecasts: list[CandidateForecast] = []
    scores: list[CandidateScore] = []
    trouble: str = ""
    source: str = ""
    why: str = ""
    copied: str = ""
    step_tokens_max: int = 0

    @property
    def forecast(self) -> CandidateForecast | None:
        """Of the chosen instance; None without a prediction."""
        return next((f for f in self.forecasts if f.name == self.chosen and not f.note), None)


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of the request.

    Attributes:
        first_token_ns: Unix ns; None if there was no token.
        output_tokens: Of all choices together.
        cached_tokens: Of the prompt, found in the prefix cache.
        expected_output_tokens: Predicted mean of one choice's output; None if unknown.
    """

    outcome: str
    arrival_ns: int
    first_token_ns: int | None
    end_ns: int
    prompt_tokens: int
    output_tokens: int
    instances: list[str]
    cached_tokens: int = 0
    choices: int = 1
    continuations: int = 0
    migrations: int = 0
    expected_output_tokens: float | None = None
    trouble: str = ""


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """A request.

    Attributes:
        ending: None where nothing of its end was recorded.
        attempts: Of a request to a cascade, in order; ``placements`` are then those of its attempts.
        delivered: Why the cascade delivered its answer; empty where there is none.
    """

    request: str
    model: str
    placements: list[ExplainedPlacement]
    ending: Ending | None = None
    attempts: list[CascadeAttempt] = []
    delivered: str = ""
