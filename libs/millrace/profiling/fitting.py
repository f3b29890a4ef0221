"""Fits LinearStepTime to steps by non-negative least squares of relative errors, and judges it on steps held out."""

from __future__ import annotations

import itertools
import statistics

import msgspec
import numpy as np
from scipy.optimize import nnls

from millrace.contracts.status import BatchComposition
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_cost import FS_PER_NS
from millrace.enginemodel.step_time_models import LinearStepTime, StepTimeModel

#: Costs of a tail that are tried, as powers of the square root of 2 times the cost of a token of context: a gate makes
#: it a choice and not a solution.
TAIL_POWERS = range(-4, 16)
#: Decoding sequences from which on a tail may be paid.
TAIL_GATES = (1, 2, 4, 8, 16, 32, 64)
#: Share of the error that it must save to be kept: else any set of measurements would have one.
TAIL_GAIN = 0.03
#: Rounds of reweighting from squares to absolute values.
ROUNDS = 15

#: Columns of what any prompt costs, and of what decodes and prompt tokens in one step do.
PROMPTED, MIXED = 5, slice(6, 9)

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
    samples: list[Sample],
    *,
    bends: tuple[int, ...] = (),
    absolute: bool = False,
    prompted: bool = False,
    mixed: bool = False,
) -> LinearStepTime:
    """The model with the least squared relative errors; with ``absolute`` the least absolute ones.

    Squares suit figures without outliers. Where a machine is disturbed now and then, absolute errors keep a few slow
    steps from pulling harder than the rest.

    Args:
        samples: (composition, ns), at least as many as there are coefficients.
        bends: Numbers of tokens where the time per token may change; never below what it is for few tokens.
        absolute: See above.
        prompted: Fit too what a step with any prompt costs besides; else 0.
        mixed: Fit too what decodes cost more beside prompt tokens; else 0.
    """
    coefficients = PROMPTED + 1 + 3 * mixed + len(bends)
    if len(samples) <= coefficients:
        raise ValueError(f"{len(samples)} steps are too few to fit {coefficients} coefficients")
    rows = np.array([_features(batch, bends) for batch, _ in samples], dtype=float)
    rows[:, PROMPTED] *= prompted
    rows[:, MIXED] *= mixed
    times = np.array([ns for _, ns in samples], dtype=float)
    solution = non_negative(rows / times[:, None], rounds=ROUNDS if absolute else 1)
    rounded = [float(f"{value:.4g}") for value in solution]
    return LinearStepTime.fitted(rounded[: MIXED.stop], bends=_bent(bends, rounded[MIXED.stop :]))


def with_tail(model: LinearStepTime, samples: list[Sample]) -> LinearStepTime:
    """The model with a cost of unequal lengths, if one makes its errors on these samples clearly smaller."""
    if model.per_context_token == 0:
        return model
    best, least = model, judge(model, samples).mean * (1 - TAIL_GAIN)
    most = max((batch.decodes for batch, _ in samples), default=0)
    for gate, power in itertools.product((gate for gate in TAIL_GATES if gate <= most), TAIL_POWERS):
        cost = float(f"{model.per_context_token * 2 ** (power / 2):.4g}")
        tried = msgspec.structs.replace(model, per_tail_token=cost, tail_decodes=gate)
        error = judge(tried, samples).mean
        if error < least:
            best, least = tried, error
    return best


def non_negative(rows: np.ndarray, *, rounds: int = 1, known: np.ndarray | None = None) -> np.ndarray:
    """Coefficients of at least 0 whose sum with each row is nearest to 1, or to what ``known`` leaves of it.

    Columns are scaled to like sizes, or the solver would lose the small ones.

    Args:
        rows: One for each step, each divided by the step's time: errors are then relative.
        rounds: More than one for least absolute errors, by reweighting.
        known: For each row, the share of the step's time that is known already.
    """
    wanted = np.ones(len(rows)) if known is None else 1.0 - known
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-30)
    weights = np.ones(len(rows))
    for _ in range(rounds):
        solution = nnls(rows / scale * weights[:, None], wanted * weights)[0] / scale
        weights = 1.0 / np.sqrt(np.maximum(np.abs(rows @ solution - wanted), 1e-3))
    return np.asarray(solution)


def _features(batch: BatchComposition, bends: tuple[int, ...]) -> list[float]:
    tokens = batch.decodes + batch.prefill_tokens
    ends = [*bends[1:], max(tokens, bends[-1])] if bends else []
    within = [min(max(0, tokens - at), end - at) for at, end in zip(bends, ends, strict=True)]
    prompted = 1.0 if batch.prefill_tokens else 0.0
    linear = [1.0, batch.decodes, batch.prefill_tokens, batch.context_tokens, batch.prefill_work, prompted]
    context = batch.context_tokens - batch.prefill_context_tokens
    mixed = [prompted * batch.decodes, prompted * context, batch.decodes * batch.prefill_tokens]
    return [*linear, *mixed, *within]


def _bent(bends: tuple[int, ...], steepness: list[float]) -> tuple[tuple[int, float], ...]:
    """Convert the extra cost of a token between bends to changes at the bends."""
    before = [0.0, *steepness]
    changes = [round(ns - less, 4) for ns, less in zip(steepness, before, strict=False)]
    return tuple((at, ns) for at, ns in zip(bends, changes, strict=True) if ns)
