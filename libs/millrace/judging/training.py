"""Fits a judge to recorded answers and decides whether it may replace the one in force. Pure.

Answers are parted by prompt, so that no prompt is on both sides. A candidate that was fitted to one part must have the
lower Brier score on the other, beyond what chance explains. What is written then is fitted to all answers; its figures
are those of a cross-fit.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec
import numpy as np

from millrace.judging.calibration import area_under_curve, calibration_error
from millrace.judging.confidence import ANSWERS_MIN, ConfidenceModel, fit_confidence
from millrace.judging.evidence import Booleans, Floats
from millrace.judging.files import JudgedAnswer

#: Share of the prompts that judge.
HOLDOUT = 0.25
#: Fewer held-out answers than this give no judgement.
HOLDOUT_MIN = 50
#: Standard errors of the paired gain that a candidate must exceed: one in 44 passes by chance.
STANDARD_ERRORS = 2.0


class JudgeFigures(msgspec.Struct, frozen=True):
    """Quality of a judge on held-out answers.

    Attributes:
        area: Under the ROC curve.
        error: Expected calibration error, 0 to 1.
        brier: Mean squared error of the probability.
    """

    area: float
    error: float
    brier: float


class JudgeResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of training a judge.

    Attributes:
        judge: None where there was too little to learn from.
        figures: Of the held-out answers, by judge.
    """

    judge: ConfidenceModel | None
    accepted: bool
    reason: str
    figures: dict[str, JudgeFigures] = {}


def train_judge(
    model: str, answers: Sequence[JudgedAnswer], *, fingerprint: str, incumbent: ConfidenceModel | None
) -> JudgeResult:
    """Fit to some prompts and judge by others: against the judge in force, or the share of right answers where there is
    none.
    """
    seen, held = _parted(answers)
    truth, told = _truth(held), _truth(seen)
    if len(held) < HOLDOUT_MIN or len(seen) < ANSWERS_MIN or told.all() or not told.any():
        reason = f"{len(seen)} answers to fit and {len(held)} held-out ones, right and wrong, are too few"
        return JudgeResult(judge=None, accepted=False, reason=reason)
    candidate = fit_confidence(model, [each.logprobs for each in seen], told)
    against = "in force" if incumbent is not None else "share of right answers"
    said = {"candidate": _probabilities(candidate, held)}
    said[against] = np.full(len(held), told.mean()) if incumbent is None else _probabilities(incumbent, held)
    accepted, reason = _judgement(said["candidate"], said[against], truth)
    judge = fit_confidence(model, [each.logprobs for each in answers], _truth(answers), fingerprint=fingerprint)
    figures = {name: _figures(values, truth) for name, values in said.items()}
    return JudgeResult(judge=judge, accepted=accepted, reason=f"against {against}: {reason}", figures=figures)


def _parted(answers: Sequence[JudgedAnswer]) -> tuple[list[JudgedAnswer], list[JudgedAnswer]]:
    """To fit and to judge, fixed by the prompt alone."""
    held = [zlib.crc32(each.prompt.encode()) / 2**32 < HOLDOUT for each in answers]
    pairs = list(zip(answers, held, strict=True))
    return [each for each, out in pairs if not out], [each for each, out in pairs if out]


def _truth(answers: Sequence[JudgedAnswer]) -> Booleans:
    return np.array([each.right for each in answers], dtype=np.bool_)


def _probabilities(judge: ConfidenceModel, answers: Sequence[JudgedAnswer]) -> Floats:
    scores = [judge.score(each.logprobs) for each in answers]
    return np.array([0.5 if score is None else score / 100 for score in scores], dtype=np.float64)


def _figures(probabilities: Floats, truth: Booleans) -> JudgeFigures:
    return JudgeFigures(
        area_under_curve(probabilities, truth),
        calibration_error(probabilities, truth),
        float(((probabilities - truth) ** 2).mean()),
    )


def _judgement(candidate: Floats, incumbent: Floats, truth: Booleans) -> tuple[bool, str]:
    gains = (incumbent - truth) ** 2 - (candidate - truth) ** 2
    gain, deviation = float(gains.mean()), float(gains.std() / np.sqrt(len(gains)))
    accepted = gain > STANDARD_ERRORS * deviation
    verb = "is better" if accepted else "is not better"
    return accepted, (
        f"the candidate {verb} on {len(gains)} held-out answers: Brier score lower by {gain:.4f} ± {deviation:.4f}"
    )
