"""Confidence of an attempt: its score from the log-probabilities of its tokens."""

from __future__ import annotations

import math

from millrace.contracts.cascade import SCORE_MAX
from millrace.judging.evidence import ConfidenceFeature, feature_of

from services.ingress.cascade.open_cascade import Attempt
from services.ingress.sequence import OpenSequence
from services.ingress.state import IngressState


def score_by_confidence(state: IngressState, attempt: Attempt) -> None:
    """Set the attempt's score from the log-probabilities so far: the least of its choices; None where one has none."""
    assert attempt.call is not None
    scores = [_confidence(state, attempt.model, sequence) for sequence in attempt.call.sequences]
    known = [score for score in scores if score is not None]
    attempt.score = min(known) if len(known) == len(scores) else None
    calibrated = attempt.model in state.judges
    attempt.judged_by = "" if attempt.score is None else "confidence" if calibrated else "confidence_uncalibrated"


def _confidence(state: IngressState, model: str, sequence: OpenSequence) -> float | None:
    assert sequence.evidence is not None
    judge = state.judges.get(model)
    if judge is not None:
        return judge.score(sequence.evidence.logprobs)
    mean = feature_of(ConfidenceFeature.MEAN, sequence.evidence.logprobs)
    return None if mean is None else SCORE_MAX * min(1.0, math.exp(mean))
