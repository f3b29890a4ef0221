"""Common parts of the policies that search: when they search, what they compare, what they expect."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from millrace.contracts.plan import PlanExpectation, StageExpectation
from millrace.policies.stages.instance import InstanceModel
from millrace.policies.stages.membership import StageShape
from millrace.policies.stages.objectives import (
    StageCosts,
    candidate_edges,
    fair,
    holding,
    open_costs,
    priced,
    relaxed,
)
from millrace.policies.stages.risks import LatencyBounds, over_bounds
from millrace.policies.stages.search import Part, total
from millrace.policies.stages.statistics import BINS, EDGES, LengthStatistics
from millrace.policies.stages.view import (
    PlanningParameters,
    PlanningView,
    StageDecision,
    one_shape,
)

Search = Callable[[StageCosts], list[Part] | None]

#: Searches for a layout that keeps the latency bounds, and the share to which each brings the slowest stage.
BOUND_ROUNDS, BOUND_STEP = 6, 0.95

#: So much more than a new layout may the one in force take beyond its bounds: figures of two periods differ.
BOUND_SLACK = 4


def decide_by(search: Search, view: PlanningView, parameters: PlanningParameters) -> StageDecision:
    """Plans by a search: one stage where there is nothing to gain, the layout in force where it is good enough.

    Going back to one stage needs no margin over the layout in force, since nothing has to move for it. Where no layout
    keeps the constraints, the one in force stays.
    """
    unplanned = why_not(view, parameters)
    if unplanned:
        return unplanned
    assert view.statistics is not None
    assert view.instance is not None
    costs = costs_of(view.statistics, view.instance, view.instances, parameters)
    one: list[Part] = [(0, len(costs.edges) - 1, view.instances)]
    one_cost, current = total(costs, one), parts_of(view.current, costs)
    costs = _reachable(view, costs, current or one)
    parts = search(priced(costs, parameters.cut_margin))
    if parts is not None and len(parts) > 1:
        parts = _within_bounds(search, view, parameters, costs, parts)
    hopeless = parts is None or not math.isfinite(total(costs, parts))
    if parts is None or hopeless:
        parts, why = one, "no layout keeps the constraints"
    elif len(parts) > 1 and total(costs, parts) > (1 - parameters.margin) * one_cost:
        share = 1 - total(costs, parts) / one_cost
        parts, why = one, f"{len(parts)} stages would gain {share:.1%}, less than the margin of {parameters.margin:.0%}"
    elif len(parts) == 1:
        why = "no layout with several stages is better and keeps requests within their latency bounds"
    else:
        why = _gain(total(costs, parts), one_cost, "one stage")
    if current is not None and current != parts:
        held = costs_of(view.statistics, view.instance, view.instances, relaxed_parameters(parameters))
        before = total(held, current)
        margin = parameters.change_margin if len(parts) > 1 else 0.0
        bearable = _keeps_bounds(view, held, current, relaxed_parameters(parameters).bounds)
        if bearable and math.isfinite(before) and total(costs, parts) > (1 - margin) * before:
            gain = _gain(total(costs, parts), before, "it")
            return decision_of(view, held, current, reason=f"stays: the best layout is {gain}", keep=True)
        if hopeless:
            return decision_of(view, held, current, reason="no layout keeps the constraints: no change", keep=True)
    return decision_of(view, costs, parts, reason=why, keep=current == parts)


def _reachable(view: PlanningView, costs: StageCosts, parts: Sequence[Part]) -> StageCosts:
    """Without stages that could not hold what the layout in force holds; all of them where it has no steady state."""
    assert view.statistics is not None
    assert view.instance is not None
    pace_s = np.zeros(BINS)
    for part in parts:
        pace_s[costs.edges[part[0]] : costs.edges[part[1]]] = costs.pace_s[part]
    if not np.isfinite(pace_s).all():
        return costs
    return holding(costs, view.statistics, view.instance, pace_s)


def _within_bounds(
    search: Search, view: PlanningView, parameters: PlanningParameters, costs: StageCosts, parts: list[Part]
) -> list[Part]:
    """The layout, or one with a faster slowest stage that keeps as many requests within their bounds as one stage does.

    Where none does it is one stage. Tables know stages, bounds are on requests, which pass several: so the slowest
    stage is made faster step by step.
    """
    one: list[Part] = [(0, len(costs.edges) - 1, view.instances)]
    one_pace = float(costs.pace_s[one[0]])
    found: list[Part] | None = parts
    for _ in range(BOUND_ROUNDS):
        if found is None or len(found) == 1:
            return one
        if _keeps_bounds(view, costs, found, parameters.bounds):
            return found
        slowest = max(float(costs.pace_s[part]) for part in found) / one_pace
        costs = fair(costs, BOUND_STEP * slowest - 1)
        found = search(priced(costs, parameters.cut_margin))
    return one


def _keeps_bounds(view: PlanningView, costs: StageCosts, parts: Sequence[Part], bounds: LatencyBounds) -> bool:
    """Whether hardly more requests than in one stage are expected beyond their bounds."""
    assert view.statistics is not None
    assert view.instance is not None
    one: list[Part] = [(0, len(costs.edges) - 1, view.instances)]
    if bounds.loss_max >= 1 or not math.isfinite(float(costs.pace_s[one[0]])):
        return True
    shares = [over_bounds(view.statistics, view.instance, costs.edges, each, bounds) for each in (parts, one)]
    return shares[0] <= shares[1] + bounds.loss_max


def costs_of(
    statistics: LengthStatistics, instance: InstanceModel, instances: int, parameters: PlanningParameters
) -> StageCosts:
    """Tables of the objective, without stages that would be too slow."""
    costs = open_costs(statistics, instance, candidate_edges(statistics), instances, parameters.constraints)
    return fair(costs, parameters.constraints.slowdown_max)


def relaxed_parameters(parameters: PlanningParameters) -> PlanningParameters:
    """The same for judging a layout in force."""
    bounds = msgspec.structs.replace(parameters.bounds, loss_max=min(1.0, BOUND_SLACK * parameters.bounds.loss_max))
    return msgspec.structs.replace(parameters, constraints=relaxed(parameters.constraints), bounds=bounds)


def why_not(view: PlanningView, parameters: PlanningParameters) -> StageDecision | None:
    """The decision where nothing is searched."""
    one = (one_shape(view.instances),)
    if view.instances < parameters.instances_min:
        told = f"{view.instances} instances, fewer than {parameters.instances_min}: one stage"
        return StageDecision(shapes=one, reason=told)
    current = view.current or one
    requests = 0 if view.statistics is None else view.statistics.requests
    if view.statistics is None or requests < parameters.requests_min:
        told = f"{requests:.0f} requests known, fewer than {parameters.requests_min}: no change"
        return StageDecision(shapes=current, reason=told)
    if view.instance is None:
        return StageDecision(shapes=current, reason="no step-time model of the instances is known: no change")
    return None


def parts_of(shapes: Sequence[StageShape], costs: StageCosts) -> list[Part] | None:
    """The layout in force on the present grid of cuts, its instances in proportion to those that serve now."""
    if not shapes or len(shapes) > costs.instances:
        return None
    bounds = [0]
    starts = [float(EDGES[edge]) if edge < BINS else math.inf for edge in costs.edges]
    for shape in shapes[1:]:
        above = min(max(1, bisect_left(starts, shape.length_min)), len(starts) - 1)
        lower = above - 1
        nearer = lower if lower > 0 and shape.length_min / starts[lower] < starts[above] / shape.length_min else above
        bounds.append(nearer)
    bounds.append(len(starts) - 1)
    if any(a >= b for a, b in itertools.pairwise(bounds)):
        return None
    counts = apportion([shape.instances for shape in shapes], costs.instances)
    return [(i, j, d) for (i, j), d in zip(itertools.pairwise(bounds), counts, strict=True)]


def apportion(wanted: Sequence[int], instances: int) -> list[int]:
    """Distributes instances in proportion to numbers of at least 1; each gets at least one.

    Args:
        wanted: At most as many entries as there are instances.
    """
    counts = [1] * len(wanted)
    for _ in range(instances - len(wanted)):
        lack = [count / want for count, want in zip(counts, wanted, strict=True)]
        counts[lack.index(min(lack))] += 1
    return counts


def decision_of(
    view: PlanningView, costs: StageCosts, parts: Sequence[Part], *, reason: str, keep: bool
) -> StageDecision:
    """The decision for parts of the tables; with ``keep`` the layout in force as it is."""
    assert view.statistics is not None
    one: list[Part] = [(0, len(costs.edges) - 1, view.instances)]
    shapes = tuple(view.current) if keep else tuple(_shape(costs, part) for part in parts)
    rate = view.statistics.requests_per_s
    return StageDecision(
        shapes=shapes,
        reason=reason,
        expects=PlanExpectation(
            cost=_told(total(costs, parts)),
            one_stage_cost=_told(total(costs, one)),
            requests=round(view.statistics.requests),
            requests_per_s=rate,
            stages=[_expectation(view, costs, part) for part in parts],
        ),
    )


def _shape(costs: StageCosts, part: Part) -> StageShape:
    i, j, d = part
    low, high = costs.edges[i], costs.edges[j]
    return StageShape(length_min=EDGES[low], length_max=EDGES[high] if high < BINS else None, instances=d)


def _expectation(view: PlanningView, costs: StageCosts, part: Part) -> StageExpectation:
    i, j, _ = part
    assert view.statistics is not None
    assert view.instance is not None
    span = view.statistics.span_s or 1.0
    n, context, pace = float(costs.sequences[part]), float(costs.context[i, j]), float(costs.pace_s[part])
    low, high = costs.edges[i], costs.edges[j]
    return StageExpectation(
        step_ns=round(pace * 1e9) if math.isfinite(pace) else 0,
        sequences=_told(n),
        kv_used=min(1.0, _told(n * context / view.instance.kv_tokens)),
        arrivals_per_s=float(view.statistics.paths[low:high].sum()) / span,
        moves_per_s=view.statistics.crossing(low) / span if low else 0.0,
    )


def _told(value: float) -> float:
    """A figure for the plan: what has no bound is told as -1."""
    return value if math.isfinite(value) else -1.0


def _gain(cost: float, other: float, what: str) -> str:
    if not math.isfinite(other):
        return f"feasible where {what} is not"
    share = 1 - cost / other if other > 0 else 0.0
    return f"{share:.1%} better than {what}"
