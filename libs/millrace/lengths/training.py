"""Trains a length model and decides whether it may replace the one in force. Needs LightGBM; slow (seconds).

The newest quarter of the outcomes is held out: what came last is what will come next. Outcomes that the model in force
was trained on never lie in there, because the window only moves forward.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from millrace.lengths.baselines import HistoryModel
from millrace.lengths.estimate import LearningModel
from millrace.lengths.features import FEATURE_VERSION, FEATURES, without_history
from millrace.lengths.quantile import FORMAT, ModelFile, ModelUnreadable, QuantileModel, decode_model
from millrace.lengths.samples import LengthSample, matrix
from millrace.lengths.scoring import Numbers, Score, pinball, score
from millrace.lengths.trees import flatten

#: Share of the outcomes, the newest ones, that a candidate is judged by.
HOLDOUT = 0.25
#: Fewer outcomes than this give no judgement.
HOLDOUT_MIN = 50

_COMMON: dict[str, Any] = {
    "verbosity": -1,
    "num_threads": 1,
    "deterministic": True,
    "seed": 7,
    "use_missing": False,
    "learning_rate": 0.08,
    "num_leaves": 24,
    "max_depth": 7,
    "feature_fraction": 0.6,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
}
#: Trees per output at most: twice as many gain 2 % and take twice the time per answer.
TREES = 80
#: Where the newest ``TUNING`` of the training outcomes have not got better for so many trees, there are enough. Lengths
#: that nothing explains (public traces without prompts) are over-fitted without this.
PATIENCE = 10
TUNING = 0.15
#: A leaf holds at least these outcomes, and at least this share of them.
LEAF_MIN = 8
LEAF_SHARE = 0.005


class TrainingJob(msgspec.Struct, frozen=True, kw_only=True):
    """Input of a training.

    Attributes:
        samples: In order of time.
        incumbent: The model in force; empty where history answers.
    """

    model: str
    samples: list[LengthSample]
    incumbent: bytes
    at_ns: int


class TrainingResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of training a length model.

    Attributes:
        model: The candidate's bytes; empty where there were too few outcomes.
        accepted: Whether it is better than what it would replace.
        reason: One sentence with the figures.
        candidate, incumbent: Holdout scores; None where there is none.
    """

    model: bytes
    accepted: bool
    reason: str
    candidate: Score | None = None
    incumbent: Score | None = None


def train(rows: Numbers, lengths: Numbers, *, model: str, trained_ns: int = 0, trees: int = TREES) -> QuantileModel:
    """Fits mean and quantiles.

    Each outcome is shown twice, once without history: so the model is as good right after a start, before any template
    is known (measured on the recording: mean error 21.3 instead of 31.7 tokens), and loses nothing later.

    Args:
        rows: (outcomes, FEATURES).
        lengths: Real lengths, tokens.
    """
    logs = np.log1p(lengths)
    boosters = [
        _fit(rows, lengths, {"objective": "gamma"}, trees),
        *(_fit(rows, logs, {"objective": "quantile", "alpha": alpha}, trees) for alpha in (0.5, 0.9)),
    ]
    file = ModelFile(
        format=FORMAT,
        feature_version=FEATURE_VERSION,
        features=len(FEATURES),
        model=model,
        samples=len(lengths),
        trees=flatten([booster.dump_model() for booster in boosters]),
        trained_ns=trained_ns,
    )
    return QuantileModel(file)


def _fit(rows: Numbers, targets: Numbers, objective: dict[str, Any], trees: int) -> Any:
    """One LightGBM model with as many trees as help on the newest of the outcomes, then fitted to all of them."""
    import lightgbm

    leaf = max(LEAF_MIN, int(len(targets) * LEAF_SHARE))
    parameters = _COMMON | objective | {"min_data_in_leaf": leaf}
    older = int(len(targets) * (1.0 - TUNING))
    data = lightgbm.Dataset(*_both_ways(rows[:older], targets[:older]))
    newest = lightgbm.Dataset(rows[older:], targets[older:], reference=data)
    stop = lightgbm.early_stopping(PATIENCE, verbose=False)
    tuned = lightgbm.train(parameters, data, trees, valid_sets=[newest], callbacks=[stop])
    return lightgbm.train(parameters, lightgbm.Dataset(*_both_ways(rows, targets)), max(1, tuned.best_iteration))


def _both_ways(rows: Numbers, targets: Numbers) -> tuple[Numbers, Numbers]:
    return np.vstack([rows, without_history(rows)]), np.tile(targets, 2)


def train_candidate(job: TrainingJob) -> TrainingResult:
    """Trains on the older outcomes and judges by the newer ones."""
    samples = job.samples
    held_from = int(len(samples) * (1.0 - HOLDOUT))
    rows, lengths = matrix(samples[:held_from])
    held_rows, held_lengths = matrix(samples[held_from:])
    if len(held_lengths) < HOLDOUT_MIN:
        return TrainingResult(model=b"", accepted=False, reason=f"{len(samples)} outcomes are too few")
    candidate = train(rows, lengths, model=job.model, trained_ns=job.at_ns)
    predicted = candidate.estimate_many(held_rows)
    in_force = _in_force(job.incumbent, (rows, lengths), held_rows)
    accepted, reason = judge(predicted, in_force, held_lengths)
    scores = {"candidate": score(predicted, held_lengths), "incumbent": score(in_force, held_lengths)}
    file = msgspec.structs.replace(candidate.file, figures=msgspec.to_builtins(scores))
    return TrainingResult(model=QuantileModel(file).encode(), accepted=accepted, reason=reason, **scores)


def judge(candidate: Numbers, incumbent: Numbers, lengths: Numbers) -> tuple[bool, str]:
    """Whether a candidate's holdout predictions are better, beyond what chance explains.

    Better means: its mean pinball loss is lower by more than one standard error of the paired differences, and its
    mean absolute error is not higher.
    """
    gains = pinball(incumbent, lengths) - pinball(candidate, lengths)
    gain, deviation = float(gains.mean()), float(gains.std() / np.sqrt(len(gains)))
    before, after = (float(np.abs(p[:, 1] - lengths).mean()) for p in (incumbent, candidate))
    accepted = bool(np.isfinite(candidate).all()) and gain > deviation and after <= before
    verb = "is better" if accepted else "is not better"
    return accepted, (
        f"the candidate {verb} on {len(lengths)} held-out outcomes: pinball loss lower by {gain:.2f} ± "
        f"{deviation:.2f}, mean error {after:.1f} tokens against {before:.1f}"
    )


def baseline_predictions(model: LearningModel, seen: tuple[Numbers, Numbers], rows: Numbers) -> Numbers:
    """Return a baseline's predictions for ``rows`` after it has learnt ``seen``: (rows, 3)."""
    for row, length in zip(*seen, strict=True):
        model.learn(row, int(length))
    return np.array([_triple(model, row) for row in rows])


def _triple(model: LearningModel, row: NDArray[np.float64]) -> tuple[float, float, float]:
    said = model.estimate(row)
    return (said.mean, said.p50, said.p90) if said is not None else (0.0, 0.0, 0.0)


def _in_force(incumbent: bytes, seen: tuple[Numbers, Numbers], rows: Numbers) -> Numbers:
    """Predictions of what answers now: the model, or history where there is none that can be read."""
    if incumbent:
        try:
            return decode_model(incumbent).estimate_many(rows)
        except ModelUnreadable:
            pass  # what cannot be read does not answer either
    return baseline_predictions(HistoryModel(), seen, rows)
