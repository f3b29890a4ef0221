"""A judged sample from recorded answers: what planning a live cascade starts from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from millrace.cascade.sample import JudgedSample
from millrace.judging.confidence import ConfidenceModel
from millrace.judging.files import read_recording


def recorded_sample(path: Path, models: Sequence[str], judges: Sequence[ConfidenceModel]) -> JudgedSample:
    """Requests of a recording that all tiers answered.

    Scores are the judges', quality is the recorded truth (0 or 100). A judge that was fitted to the same recording
    knows its answers; its curves have few steps, so the difference is small, but a recording of its own is better.

    Args:
        models: Of the tiers, smallest first, as the recording names them.
        judges: Of the tiers but the last.

    Raises:
        RecordingUnreadable: a line is none of a recording.
        ValueError: no request was answered by all tiers.
        OSError: the file cannot be read.
    """
    rows = [row for row in read_recording(path) if all(model in row.answers for model in models)]
    if not rows:
        raise ValueError(f"{path} has no request that {', '.join(models)} all answered")
    answers = [[row.answers[model] for model in models] for row in rows]
    scores = [
        # An answer without a usable score counts as the worst: its request goes on.
        [judge.score(one.values()) or 0.0 for judge, one in zip(judges, each, strict=False)]
        for each in answers
    ]
    return JudgedSample(
        scores=np.array(scores, dtype=np.float64).reshape(len(rows), len(models) - 1),
        quality=np.array([[100.0 * one.right for one in each] for each in answers]),
        prompt_tokens=np.array([[max(1, row.prompt_tokens)] * len(models) for row in rows], dtype=np.int64),
        output_tokens=np.array([[one.length for one in each] for each in answers], dtype=np.int64),
    )
