"""Refinement of the boundary between two neighbouring stages, from the lengths that both hold now.

There is one boundary per cut, not one per instance: with as many boundaries as instances the stage of a length is
undefined. The best boundary has the least time per token, summed over the sequences of both stages, by a line for the
cost of a decode step; each side is weighted by its number of instances. Prompts and latency bounds do not count here:
where lengths do not drift, planned cuts are as good (docs/STAGES.md).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from typing import Annotated

import msgspec

from millrace.policies.stages.digest import BINS, LONGEST, SHORTEST, STARTS, LengthDigest


class StepLine(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of a decode step, seconds; only ratios matter.

    Attributes:
        fixed: Any step.
        per_sequence: Each sequence of the batch.
        per_token: Each token of their contexts.
    """

    fixed: float
    per_sequence: float = 0.0
    per_token: float = 0.0

    def summed(self, sequences: float, tokens: float, instances: int) -> float:
        """Time per token, summed over sequences that several instances share evenly."""
        return sequences * (self.fixed + (self.per_sequence * sequences + self.per_token * tokens) / instances)


#: Of Llama-3-8B on an H200, by the step-time set ``h200-llama-3-8b``.
DECODES = StepLine(fixed=6.2e-3, per_sequence=9.3e-6, per_token=30.8e-9)

#: Candidate boundaries per bin of a digest; a bin spans a factor of 1.31, so candidates are 7 percent apart.
CANDIDATES_PER_BIN = 4


class RefinementParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speed and limits of boundary refinement.

    Attributes:
        smoothing: Share of the way to the best boundary that one round goes, in log length, 0 to 1.
        step_max: Largest relative change of one round, above 0.
        sequences_min: With fewer sequences on both sides together the boundary stays.
        spacing: Factor that two neighbouring cuts keep between them, at least 1.
    """

    smoothing: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.3
    step_max: Annotated[float, msgspec.Meta(gt=0)] = 0.1
    sequences_min: int = 5
    spacing: Annotated[float, msgspec.Meta(ge=1)] = 1.1


class BoundaryView(msgspec.Struct, frozen=True, kw_only=True):
    """One cut and the sequences on both sides of it.

    Attributes:
        cut: Present boundary, tokens.
        cut_below: Next lower boundary; 0 where there is none.
        cut_above: Next higher boundary; None where there is none.
        lower: Lengths of all sequences in the stage below the cut.
        upper: The same above it.
        lower_instances: Instances of the stage below, at least 1.
        upper_instances: The same above.
    """

    cut: int
    cut_below: int
    cut_above: int | None
    lower: LengthDigest
    upper: LengthDigest
    lower_instances: int
    upper_instances: int


class Refinement(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one round.

    Attributes:
        cut: New boundary, tokens.
        best: Boundary that is best now; the present one where the round is frozen.
    """

    cut: int
    best: int
    reason: str


def refine(view: BoundaryView, parameters: RefinementParameters, line: StepLine = DECODES) -> Refinement:
    """Moves a boundary by one round.

    Never farther than ``step_max``, never past a neighbouring cut, and not at all where few sequences would decide.
    Where the neighbouring cuts leave no room the boundary stays.
    """
    sequences = view.lower.sequences + view.upper.sequences
    if sequences < parameters.sequences_min:
        return Refinement(cut=view.cut, best=view.cut, reason=f"frozen: {sequences} sequences")
    if min(view.lower_instances, view.upper_instances) < 1:
        return Refinement(cut=view.cut, best=view.cut, reason="frozen: a side has no instance")
    low, high = _bounds(view, parameters.spacing)
    if low > high:
        return Refinement(cut=view.cut, best=view.cut, reason="frozen: no room between the neighbouring cuts")
    best = _best(view, line, low=low, high=high)
    wanted = math.exp((1 - parameters.smoothing) * math.log(view.cut) + parameters.smoothing * math.log(best))
    step = 1 + parameters.step_max
    bounded = min(max(wanted, view.cut / step), view.cut * step)
    cut = min(max(round(bounded), low), high)
    return Refinement(cut=cut, best=best, reason=f"best at {best} of {sequences} sequences")


def _bounds(view: BoundaryView, spacing: float) -> tuple[int, int]:
    low = max(1, math.ceil(view.cut_below * spacing), view.cut_below + 1)
    high = LONGEST if view.cut_above is None else min(math.floor(view.cut_above / spacing), view.cut_above - 1)
    return low, high


def _best(view: BoundaryView, step: StepLine, *, low: int, high: int) -> int:
    """Candidate with the least cost; of equals the one nearest to the present cut."""
    lower, upper = _Side(view.lower, view.lower_instances), _Side(view.upper, view.upper_instances)
    lengths = sorted({view.cut if low <= view.cut <= high else low, *(c for c in CANDIDATES if low <= c <= high)})
    costs = [(_cost(lower, upper, step, cut), abs(math.log(cut / view.cut)), cut) for cut in lengths]
    return min(costs)[2]


def _cost(lower: _Side, upper: _Side, step: StepLine, cut: int) -> float:
    """Return the cost with all sequences below ``cut`` in the lower stage and all others in the upper one."""
    (n_a, s_a), (n_b, s_b) = lower.below(cut), upper.below(cut)
    n_low, s_low = n_a + n_b, s_a + s_b
    n_high, s_high = lower.sequences + upper.sequences - n_low, lower.tokens + upper.tokens - s_low
    return step.summed(n_low, s_low, lower.instances) + step.summed(n_high, s_high, upper.instances)


class _Side:
    """Running sums of a digest. Within a bin lengths spread evenly over their logarithm."""

    def __init__(self, counted: LengthDigest, instances: int) -> None:
        self.instances = instances
        self._digest = counted
        self._counts = [0, *itertools.accumulate(counted.counts)]
        self._tokens = [0, *itertools.accumulate(counted.tokens)]
        self.sequences = self._counts[-1]
        self.tokens = self._tokens[-1]

    def below(self, cut: int) -> tuple[float, float]:
        """Sequences shorter than ``cut``, and their tokens."""
        index = bisect_left(STARTS, cut) - 1  # the bin with the last length below the cut
        if index < 0 or index >= len(self._digest.counts):
            whole = index >= 0
            return (self.sequences, self.tokens) if whole else (0, 0)
        low, high = max(1, STARTS[index]), STARTS[index + 1] if index + 1 < BINS else LONGEST * 2
        share = 1.0 if cut >= high else math.log(max(cut, low) / low) / math.log(high / low)
        # The shorter part of a bin has shorter sequences: the bin's sum times the ratio of the geometric means.
        shorter = share * math.sqrt(min(high, max(cut, low)) / high)
        count = self._counts[index] + self._digest.counts[index] * share
        return count, self._tokens[index] + self._digest.tokens[index] * shorter


def _candidates() -> tuple[int, ...]:
    found = set(range(1, SHORTEST, 4))
    for low, high in itertools.pairwise(STARTS[1:]):
        found |= {round(low * (high / low) ** (k / CANDIDATES_PER_BIN)) for k in range(CANDIDATES_PER_BIN)}
    return tuple(sorted({*found, LONGEST}))


#: Boundaries that are compared, tokens.
CANDIDATES = _candidates()
