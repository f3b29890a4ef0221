"""The confidence judge: the probability that an answer is right, from the log-probabilities of its own tokens.

One feature and an isotonic curve per model. It costs no GPU and no round trip. The feature is chosen at the fit by the
area under its curve on answers that the fit did not see. A logistic combination of seven features was worse than the
best single one on all shipped models (0.942 to 0.950 against 0.953 to 0.964).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from millrace.judging.calibration import IsotonicCurve, area_under_curve, calibration_error, fit_isotonic
from millrace.judging.evidence import Booleans, ConfidenceFeature, Floats, feature_of

#: Answers below which nothing is fitted: with fewer a curve of ten steps has hardly five answers a step.
ANSWERS_MIN = 50

#: Parts of the cross-fit that judges a feature.
FOLDS = 5


class ConfidenceModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fitted confidence judge of one model's answers.

    Attributes:
        model: Served model whose answers it judges.
        feature: What it looks at.
        curve: From the feature to the probability of a right answer.
        answers: It was fitted to.
        area: Under the ROC curve, on answers left out of the fit.
        error: Expected calibration error, likewise.
        fingerprint: Of the model's weights; empty where unknown.
    """

    model: str
    feature: ConfidenceFeature
    curve: IsotonicCurve
    answers: int
    area: float
    error: float
    fingerprint: str = ""

    def score(self, logprobs: Sequence[float]) -> float | None:
        """100 · P(right) of an answer; None where its log-probabilities are not usable."""
        value = feature_of(self.feature, logprobs)
        return None if value is None else 100 * self.curve.at_one(value)

    def least_value(self, score: float) -> float | None:
        """Value of the feature below which an answer cannot get that score; None where its feature may rise again."""
        return self.curve.least(score / 100.0) if self.feature.only_falls else None


def fit_confidence(
    model: str, answers: Sequence[Sequence[float]], right: Booleans, *, fingerprint: str = ""
) -> ConfidenceModel:
    """Fit the judge of one model.

    Args:
        answers: Log-probabilities of each answer's tokens, usable ones.
        right: (n,), whether each answer was right.

    Raises:
        ValueError: fewer than ANSWERS_MIN answers, all of one kind, or one without usable log-probabilities.
    """
    if len(answers) < ANSWERS_MIN or right.all() or not right.any():
        raise ValueError(f"a confidence judge needs {ANSWERS_MIN} answers, right and wrong ones; got {len(answers)}")
    rows = {feature: _rows(feature, answers) for feature in ConfidenceFeature}
    held_out = {feature: _held_out(values, right) for feature, values in rows.items()}
    chosen = _best(held_out)
    area, error = held_out[chosen]
    return ConfidenceModel(
        model=model,
        feature=chosen,
        curve=fit_isotonic(rows[chosen], right),
        answers=len(answers),
        area=area,
        error=error,
        fingerprint=fingerprint,
    )


def _best(held_out: Mapping[ConfidenceFeature, tuple[float, float]]) -> ConfidenceFeature:
    return max(held_out, key=lambda feature: held_out[feature][0])


def _rows(feature: ConfidenceFeature, answers: Sequence[Sequence[float]]) -> Floats:
    values = [feature_of(feature, logprobs) for logprobs in answers]
    if None in values:
        raise ValueError(f"answer {values.index(None)} has no usable log-probabilities")
    return np.array(values, dtype=np.float64)


def _held_out(values: Floats, right: Booleans) -> tuple[float, float]:
    """Area and calibration error of the curve on the part of the answers that it was not fitted to."""
    probabilities = np.empty(len(values))
    folds = np.arange(len(values)) % FOLDS
    for fold in range(FOLDS):
        inside = folds != fold
        probabilities[~inside] = fit_isotonic(values[inside], right[inside]).at(values[~inside])
    return area_under_curve(probabilities, right), calibration_error(probabilities, right)
