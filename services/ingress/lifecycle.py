"""Lifecycle of a sequence: its states and its events. The table of transitions is in ``transitions.py``.

A *sequence* is one choice of one prompt. It is owned by ingress or by one instance, and events move it between them.

    WAITING      ingress owns the sequence: its length tag is awaited, or it is to be dispatched
    FORECASTING  the same, and predictors are asked about it
    SUBMITTED    sent to an instance in the current epoch; the answer is awaited
    RUNNING      owned by its instance in the current epoch
    VERIFYING    its instance is lost; the target of its migration is asked whether it holds the sequence
    ENDED        terminal

Events that a sequence of another epoch or instance causes never reach the table: token ingest and the reply router
drop them first.
"""

from __future__ import annotations

from enum import Enum

import msgspec
from millrace.contracts.local import RequestFailure
from millrace.contracts.observers import CandidateForecast
from millrace.contracts.worker import SequenceRefused
from millrace.policies.dispatch import Decision


class SequencePhase(Enum):
    """State of a sequence."""

    __hash__ = object.__hash__  # Enum's own hashes the name, in Python; the table is looked up with each event

    WAITING = "waiting"
    FORECASTING = "forecasting"
    SUBMITTED = "submitted"
    RUNNING = "running"
    VERIFYING = "verifying"
    ENDED = "ended"


class Deferred(msgspec.Struct, frozen=True):
    """No instance takes it now: it is dispatched again after a pause, nanoseconds."""

    pause_ns: int


class ForecastsRequested(msgspec.Struct, frozen=True):
    """Predictors were asked under this correlation."""

    correlation: str


class ForecastsReceived(msgspec.Struct, frozen=True):
    """Predictors answered, or their deadline passed."""


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


class Submitted(msgspec.Struct, frozen=True):
    """An instance was chosen."""

    choice: DispatchChoice


class Accepted(msgspec.Struct, frozen=True):
    """The instance owns it: the worker answered so, or tokens of the epoch arrived first. ``kv_tokens``: as in
    SequenceAccepted.
    """

    kv_tokens: int = 0


class SubmissionRefused(msgspec.Struct, frozen=True):
    """The worker did not take it."""

    answer: SequenceRefused


class SubmissionUnanswered(msgspec.Struct, frozen=True):
    """The worker did not answer, or not with what was asked."""

    reason: RequestFailure


class LossCause(Enum):
    """Whether the sequence may itself have caused the loss of its instance."""

    ENGINE_ERROR = "engine error"  # the engine ended this sequence with an error
    ENGINE_DIED = "engine died"  # the engine or its worker died while it had this sequence, among others
    ENGINE_SILENT = "engine silent"  # neither gives a sign of life since it has this sequence, among others
    OTHER = "other"


class InstanceLost(msgspec.Struct, frozen=True):
    """Its instance is gone, gave it up, forgot it or stalls. ``why`` is the label of the metric and of the log."""

    why: str
    cause: LossCause = LossCause.OTHER


class TokensMissing(msgspec.Struct, frozen=True):
    """The log has a gap, or its instance has been silent: it is asked for what comes after the log."""


class Finished(msgspec.Struct, frozen=True):
    """The log ends with a finish reason. ``engine_knows`` is False where ingress found the end (a stop string)."""

    engine_knows: bool


class Migrated(msgspec.Struct, frozen=True):
    """The target of its migration is proven to continue this very log."""


class TargetLost(msgspec.Struct, frozen=True):
    """The target of its migration is gone, or does not hold it."""


class Cancelled(msgspec.Struct, frozen=True):
    """Its call ended: the client left, a time limit passed, or the call cannot be served."""

    reason: str


SequenceEvent = (
    Deferred
    | ForecastsRequested
    | ForecastsReceived
    | Submitted
    | Accepted
    | SubmissionRefused
    | SubmissionUnanswered
    | InstanceLost
    | TokensMissing
    | Finished
    | Migrated
    | TargetLost
    | Cancelled
)
