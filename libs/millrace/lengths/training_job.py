"""One training as a job for a child process."""

from __future__ import annotations

import msgspec

from millrace.lengths.samples import LengthSample
from millrace.lengths.training import TrainingResult, train_candidate


class TrainingJob(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of ``train_candidate``."""

    model: str
    samples: list[LengthSample]
    incumbent: bytes
    at_ns: int


def train(job: TrainingJob) -> TrainingResult:
    """Trains a candidate."""
    return train_candidate(job.samples, model=job.model, incumbent=job.incumbent, trained_ns=job.at_ns)
