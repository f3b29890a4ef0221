"""Fits LinearStepTime to steps by non-negative least squares of relative errors, and judges it on steps held out."""

from __future__ import annotations

import statistics

import msgspec
import numpy as np
from scipy.optimize import nnls

from millrace.contracts.status import BatchComposition
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.stepcost import FS_PER_NS
from millrace.enginemodel.steptime import LinearStepTime, StepTimeModel

#: Of the cost of unequal lengths: the term is a maximum, so the longest sequence's cost is tried, not solved for.
LONGEST_TRIALS = 12
#: Share of the error that it must save to be kept: else any set of measurements would have one.
LONGEST_GAIN = 0.03
#: Rounds of reweighting from squares to absolute values.
ROUNDS = 15

#: Column of what any prompt costs.
PROMPTED = 5

Sample = tuple[BatchComposition, float]


class Errors(msgspec.Struct, frozen=True, kw_only=True):
    """Relative errors of a model on steps that it was not fitted on, as shares.

    Attributes:
        mean: Of absolute errors: the MAPE.
        bias: Mean of signed errors; above 0 where the model is too slow.
    """

    steps: int
    mean: float
    median: float
    p90: float
    bias: float

    def said(self) -> str:
        """In words, for provenances."""
        return (
            f"{self.steps} held-out steps: mean absolute {self.mean:.1%}, median {self.median:.1%}, "
            f"p90 {self.p90:.1%}, bias {self.bias:+.1%}"
        )


def judge(model: StepTimeModel, samples: list[Sample], parameters: EngineParameters | None = None) -> Errors:
    """Errors on samples (composition, ns)."""
    cost = model.cost(parameters or EngineParameters())
    errors = [cost.duration_fs(batch) / FS_PER_NS / ns - 1.0 for batch, ns in samples]
    absolute = sorted(abs(error) for error in errors)
    return Errors(
        steps=len(errors),
        mean=statistics.fmean(absolute),
        median=statistics.median(absolute),
        p90=absolute[min(len(absolute) - 1, int(len(absolute) * 0.9))],
        bias=statistics.fmean(errors),
    )


def held_out(samples: list[Sample], *, share: float = 1 / 3, seed: int = 0) -> tuple[list[Sample], list[Sample]]:
    """Splits at random into those to fit on and those to judge by."""
    chosen = np.random.default_rng(seed).random(len(samples)) < share
    fitted = [sample for sample, out in zip(samples, chosen, strict=True) if not out]
    return fitted, [sample for sample, out in zip(samples, chosen, strict=True) if out]


def fit(
    samples: list[Sample], *, bends: tuple[int, ...] = (), absolute: bool = False, prompted: bool = False
) -> LinearStepTime:
    """The model with the least squared relative errors; with ``absolute`` the least absolute ones.

    Squares suit figures without outliers. Where a machine is disturbed now and then, absolute errors keep a few slow
    steps from pulling harder than the rest.

    Args:
        samples: (composition, ns), at least as many as there are coefficients.
        bends: Numbers of tokens where the time per token may change; never below what it is for few tokens.
        absolute: See above.
        prompted: Fit too what a step with any prompt costs besides; else 0.
    """
    if len(samples) < 7 + len(bends):
        raise ValueError(f"{len(samples)} steps are too few to fit {6 + len(bends)} coefficients")
    rows = np.array([_features(batch, bends) for batch, _ in samples], dtype=float)
    rows[:, PROMPTED] *= prompted
    times = np.array([ns for _, ns in samples], dtype=float)
    solution = non_negative(rows / times[:, None], rounds=ROUNDS if absolute else 1)
    rounded = [float(f"{value:.4g}") for value in solution]
    return LinearStepTime.fitted(rounded[: PROMPTED + 1], bends=_bent(bends, rounded[PROMPTED + 1 :]))


def with_longest(model: LinearStepTime, samples: list[Sample]) -> LinearStepTime:
    """The model with a cost of the longest sequence, if one makes its errors on these samples clearly smaller."""
    if model.per_context_token == 0:
        return model
    best, least = model, judge(model, samples).mean * (1 - LONGEST_GAIN)
    for power in range(LONGEST_TRIALS):
        cost = float(f"{model.per_context_token * 2 ** (power / 2 + 1):.4g}")
        tried = msgspec.structs.replace(model, per_longest_token=cost)
        error = judge(tried, samples).mean
        if error < least:
            best, least = tried, error
    return best


def non_negative(rows: np.ndarray, *, rounds: int = 1) -> np.ndarray:
    """Coefficients of at least 0 whose sum with each row is nearest to 1.

    Columns are scaled to like sizes, or the solver would lose the small ones.

    Args:
        rows: One for each step, each divided by the step's time: errors are then relative.
        rounds: More than one for least absolute errors, by reweighting.
    """
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-30)
    weights = np.ones(len(rows))
    for _ in range(rounds):
        solution = nnls(rows / scale * weights[:, None], weights)[0] / scale
        weights = 1.0 / np.sqrt(np.maximum(np.abs(rows @ solution - 1.0), 1e-3))
    return np.asarray(solution)


def _features(batch: BatchComposition, bends: tuple[int, ...]) -> list[float]:
    tokens = batch.decodes + batch.prefill_tokens
    ends = [*bends[1:], max(tokens, bends[-1])] if bends else []
    within = [min(max(0, tokens - at), end - at) for at, end in zip(bends, ends, strict=True)]
    prompted = 1.0 if batch.prefill_tokens else 0.0
    linear = [1.0, batch.decodes, batch.prefill_tokens, batch.context_tokens, batch.prefill_work, prompted]
    return [*linear, *within]


def _bent(bends: tuple[int, ...], steepness: list[float]) -> tuple[tuple[int, float], ...]:
    """What a token costs more between bends, as changes at the bends."""
    before = [0.0, *steepness]
    changes = [round(ns - less, 4) for ns, less in zip(steepness, before, strict=False)]
    return tuple((at, ns) for at, ns in zip(bends, changes, strict=True) if ns)
