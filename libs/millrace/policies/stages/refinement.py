"""Refinement of the boundary between two neighbouring stages, from the lengths that both hold now.

There is one boundary per cut, not one per instance: with as many boundaries as instances the stage of a length is
undefined. Both sides are weighted by their numbers of instances. The paper sets one upstream instance against one
average downstream instance. With four upstream and two downstream, each step of the boundary then loads the downstream
ones twice as much as the formula says.

Source: CascadeInfer, section 4.3; differs in the above, in smoothing the logarithm of the length, and in the bounds on
each step. The paper's formula and its two naive refinements (section 6.5) are methods here, for comparison.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from millrace.policies.stages.digest import BINS, LONGEST, SHORTEST, STARTS, LengthDigest
from millrace.policies.stages.quality import DEFAULT_QUALITY, QualityModel

#: Candidate boundaries per bin of a digest; a bin spans a factor of 1.31, so candidates are 7 percent apart.
CANDIDATES_PER_BIN = 4


class RefinementMethod(StrEnum):
    """Definition of the best boundary.

    Attributes:
        WEIGHTED: Least total quality (equation 1), both sides weighted by their numbers of instances.
        PAPER: The same for one upstream and one average downstream instance.
        MEMORY: As many tokens per instance on both sides.
        QUANTITY: As many sequences per instance on both sides.
    """

    WEIGHTED = "weighted"
    PAPER = "paper"
    MEMORY = "memory"
    QUANTITY = "quantity"


class RefinementParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Method, speed and limits of boundary refinement.

    Attributes:
        method: What the best boundary is.
        smoothing: Share of the way to the best boundary that one round goes, in log length, 0 to 1.
        step_max: Largest relative change of one round, above 0.
        sequences_min: With fewer sequences on both sides together the boundary stays.
        spacing: Factor that two neighbouring cuts keep between them, at least 1.
    """

    method: RefinementMethod = RefinementMethod.WEIGHTED
    smoothing: float = 0.3
    step_max: float = 0.1
    sequences_min: int = 5
    spacing: float = 1.1

    def __post_init__(self) -> None:
        """Raises ValueError outside of the ranges."""
        if not 0 < self.smoothing <= 1:
            raise ValueError(f"smoothing must be within (0, 1], is {self.smoothing}")
        if not self.step_max > 0:
            raise ValueError(f"step_max must be above 0, is {self.step_max}")
        if not self.spacing >= 1:
            raise ValueError(f"spacing must be at least 1, is {self.spacing}")


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
        best: Boundary at which the method's figure is best now; the present one where the round is frozen.
        reason: One sentence.
    """

    cut: int
    best: int
    reason: str


def refine(
    view: BoundaryView,
    parameters: RefinementParameters,
    quality: QualityModel = DEFAULT_QUALITY,
) -> Refinement:
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
    best = _best(view, parameters.method, quality, low=low, high=high)
    wanted = math.exp((1 - parameters.smoothing) * math.log(view.cut) + parameters.smoothing * math.log(best))
    step = 1 + parameters.step_max
    bounded = min(max(wanted, view.cut / step), view.cut * step)
    cut = min(max(round(bounded), low), high)
    return Refinement(cut=cut, best=best, reason=f"{parameters.method}: best at {best} of {sequences} sequences")


def _bounds(view: BoundaryView, spacing: float) -> tuple[int, int]:
    low = max(1, math.ceil(view.cut_below * spacing), view.cut_below + 1)
    high = LONGEST if view.cut_above is None else min(math.floor(view.cut_above / spacing), view.cut_above - 1)
    return low, high


def _best(view: BoundaryView, method: RefinementMethod, quality: QualityModel, *, low: int, high: int) -> int:
    """Candidate with the least cost; of equals the one nearest to the present cut."""
    lower, upper = _Side(view.lower, view.lower_instances), _Side(view.upper, view.upper_instances)
    lengths = sorted({view.cut if low <= view.cut <= high else low, *(c for c in CANDIDATES if low <= c <= high)})
    costs = [(_cost(lower, upper, method, quality, cut), abs(math.log(cut / view.cut)), cut) for cut in lengths]
    return min(costs)[2]


def _cost(lower: _Side, upper: _Side, method: RefinementMethod, quality: QualityModel, cut: int) -> float:
    """Return the cost that the method minimises, with all sequences below ``cut`` in the lower stage.

    All others are in the upper stage.
    """
    (n_a, s_a), (n_b, s_b) = lower.below(cut), upper.below(cut)
    e_lower, e_upper = lower.instances, upper.instances
    if method is RefinementMethod.PAPER:
        n, s = n_a / e_lower + n_b / e_upper, s_a / e_lower + s_b / e_upper
        n_all = lower.sequences / e_lower + upper.sequences / e_upper
        s_all = lower.tokens / e_lower + upper.tokens / e_upper
        return quality.batch(n, s) + quality.batch(n_all - n, s_all - s)
    n_low, s_low = n_a + n_b, s_a + s_b
    n_high, s_high = lower.sequences + upper.sequences - n_low, lower.tokens + upper.tokens - s_low
    if method is RefinementMethod.MEMORY:
        return abs(s_low / e_lower - s_high / e_upper)
    if method is RefinementMethod.QUANTITY:
        return abs(n_low / e_lower - n_high / e_upper)
    return quality.batch(n_low, s_low, instances=e_lower) + quality.batch(n_high, s_high, instances=e_upper)


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


def divide(lengths: Sequence[int], parts: int) -> list[int]:
    """Picks the set of one of ``parts`` instances: sorted, from the parts/2-th on every parts-th.

    Source: CascadeInfer, footnote 1.
    """
    return sorted(lengths)[parts // 2 :: parts]


def paper_boundary(own: Sequence[int], successors: Sequence[int], instances: int, quality: QualityModel) -> int | None:
    """Boundary of one instance as the paper finds it, before smoothing; None below five sequences.

    Args:
        own: Lengths at this instance, tokens.
        successors: Lengths at all instances of the next stage.
        instances: Of the next stage, at least 1.

    Source: CascadeInfer, section 4.3.
    """
    lengths = sorted([*own, *divide(successors, instances)])
    if len(lengths) < RefinementParameters().sequences_min:
        return None
    sums = [0]
    for length in lengths:
        sums.append(sums[-1] + length)
    n, whole = len(lengths), sums[-1]
    costs = [quality.batch(i, sums[i]) + quality.batch(n - i, whole - sums[i]) for i in range(n)]
    return lengths[costs.index(min(costs))]


def _candidates() -> tuple[int, ...]:
    found = set(range(1, SHORTEST, 4))
    for low, high in itertools.pairwise(STARTS[1:]):
        found |= {round(low * (high / low) ** (k / CANDIDATES_PER_BIN)) for k in range(CANDIDATES_PER_BIN)}
    return tuple(sorted({*found, LONGEST}))


#: Boundaries that are compared, tokens.
CANDIDATES = _candidates()
