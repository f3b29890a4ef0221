"""Effects and events between the tagger's actor and its shell: training, and files of outcomes and models."""

from __future__ import annotations

from millrace.actor.effects import Effect
from millrace.contracts.message import Body
from millrace.lengths.samples import LengthSample
from millrace.lengths.training import TrainingJob, TrainingResult


class LoadLengths(Effect, frozen=True, kw_only=True):
    """Reads what is kept in files: LengthsLoaded follows."""


class TrainLengths(Effect, frozen=True, kw_only=True):
    """Trains a candidate, outside the actor's process: LengthsTrained or TrainingFailed follows, exactly one."""

    job: TrainingJob


class KeepModel(Effect, frozen=True, kw_only=True):
    """Writes the model that is in force now to its file; KeepingFailed where that cannot be done."""

    model: str
    payload: bytes


class KeepOutcomes(Effect, frozen=True, kw_only=True):
    """Appends outcomes to their bounded file; KeepingFailed where that cannot be done."""

    model: str
    samples: list[LengthSample]


class LengthsLoaded(Body, frozen=True, kw_only=True, tag="local.LengthsLoaded/1"):
    """Content of the files, by served model.

    Attributes:
        models: Length models in force when they were written.
        outcomes: The newest ones that this tagger kept, in order of time; by subject token of the model.
        problems: Files that could not be read, with the reason.
    """

    models: dict[str, bytes]
    outcomes: dict[str, list[LengthSample]]
    problems: dict[str, str]


class LengthsTrained(Body, frozen=True, kw_only=True, tag="local.LengthsTrained/1"):
    """A candidate was trained and judged."""

    model: str
    result: TrainingResult


class TrainingFailed(Body, frozen=True, kw_only=True, tag="local.TrainingFailed/1"):
    """The trainer ended without a result, or took too long."""

    model: str
    detail: str


class KeepingFailed(Body, frozen=True, kw_only=True, tag="local.KeepingFailed/1"):
    """A file could not be written; nothing depends on it but the next start."""

    model: str
    detail: str
