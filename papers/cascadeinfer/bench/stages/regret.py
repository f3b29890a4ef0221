"""Regret of planners: their layouts against simulated layouts that are drawn at random, on the same requests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from random import Random

from millrace.policies.stages import search
from millrace.policies.stages.membership import StageShape
from millrace.policies.stages.objectives import StageCosts, candidate_edges
from millrace.policies.stages.statistics import BINS, EDGES

from bench.scenarios.tables import figure, table
from papers.cascadeinfer.bench.stages.runs import RunOptions, StageRow, run_all
from papers.cascadeinfer.bench.stages.setups import Setup, merged, told
from papers.cascadeinfer.bench.stages.tables import paired
from papers.cascadeinfer.bench.stages.variants import hand_over
from simulator.scenarios.spec import ScenarioSpec

#: Stages of a drawn layout, at most: planners rarely take more.
STAGES_MAX = 4

PLANNERS = ("exact", "two_phase", "chain")

#: A layout does not bear the load where requests of the later half are slower by more than this share.
RISE_MAX = 0.15

#: Drawn layouts in the table.
SHOWN = 5


def drawn_layouts(setup: Setup, count: int, *, seed: int = 0) -> list[tuple[StageShape, ...]]:
    """One stage, neighbours of the exact layout, and as many with random cuts and random numbers of instances."""
    rng = Random(f"{seed}/layouts")
    edges = [edge for edge in candidate_edges(setup.statistics()) if 0 < edge < len(EDGES)]
    found: dict[tuple[int, ...], tuple[StageShape, ...]] = {(): layout_of((), (setup.instances,))}
    near = _neighbours(setup.planned("exact"), edges)
    for shapes in rng.sample(near, min(len(near), count // 2)):
        found[tuple(number for shape in shapes for number in (shape.length_min, shape.instances))] = shapes
    while len(found) < count:
        stages = rng.randint(2, min(STAGES_MAX, setup.instances))
        cuts = tuple(EDGES[edge] for edge in sorted(rng.sample(edges, stages - 1)))
        marks = [0, *sorted(rng.sample(range(1, setup.instances), stages - 1)), setup.instances]
        found.setdefault(cuts, layout_of(cuts, [b - a for a, b in itertools.pairwise(marks)]))
    return list(found.values())


def _neighbours(shapes: Sequence[StageShape], edges: Sequence[int]) -> list[tuple[StageShape, ...]]:
    """Layouts with one cut moved by half an octave or by one, or an instance moved to a neighbour, or both."""
    cuts = [shape.length_min for shape in shapes[1:]]
    counts = [shape.instances for shape in shapes]
    lengths = [EDGES[edge] for edge in edges]
    moved_cuts = [cuts]
    for index, by in itertools.product(range(len(cuts)), (-4, -2, 2, 4)):
        at = lengths.index(cuts[index]) + by
        others = [*cuts[:index], *([lengths[at]] if 0 <= at < len(lengths) else []), *cuts[index + 1 :]]
        if len(others) == len(cuts) and others == sorted(set(others)):
            moved_cuts.append(others)
    moved_counts = [counts]
    for index, by in itertools.product(range(len(cuts)), (-1, 1)):
        other = [*counts[:index], counts[index] + by, counts[index + 1] - by, *counts[index + 2 :]]
        if min(other) >= 1:
            moved_counts.append(other)
    pairs = list(itertools.product(moved_cuts, moved_counts))[1:]
    return [layout_of(some_cuts, some_counts) for some_cuts, some_counts in pairs]


def layout_of(cuts: Sequence[int], instances: Sequence[int]) -> tuple[StageShape, ...]:
    """Stages between cuts."""
    bounds: list[int | None] = [0, *cuts, None]
    ranges = itertools.pairwise(bounds)
    return tuple(
        StageShape(length_min=low or 0, length_max=high, instances=each)
        for (low, high), each in zip(ranges, instances, strict=True)
    )


def regret(setup: Setup, chosen: RunOptions, *, plans: int) -> str:
    """Runs everything, each layout from its own steady state where runs begin with residents.

    Cuts stay where the plan has them, so that the plan alone is compared. The best is taken among drawn layouts that
    bear the load: one that does not seems fast for as long as its memory is not full.
    """
    layouts = {planner: setup.planned(planner) for planner in PLANNERS}
    layouts |= {f"drawn {index}": shapes for index, shapes in enumerate(drawn_layouts(setup, plans))}
    rows = run_all(chosen.jobs({label: _spec(setup, shapes) for label, shapes in layouts.items()}), chosen)
    drawn = [label for label in layouts if label.startswith("drawn") and any(row.label == label for row in rows)]
    steady = sorted((label for label in drawn if _is_steady(rows, label)), key=lambda label: _mean(rows, label))
    if not steady:
        return f"{len(drawn)} drawn layouts, none of which bears the load"
    costs = setup.costs()
    shown = dict.fromkeys((*PLANNERS, "drawn 0", *steady[:SHOWN]))
    lines = [_line(rows, label, layouts[label], steady[0], told_cost(costs, layouts[label])) for label in shown]
    head = ["", "layout", "ms/token", "% of the best drawn", "rise %", "expected"]
    found = f"{len(drawn)} drawn layouts, {len(steady)} of which bear the load; the best is {steady[0]}"
    return found + "\n" + table(head, [line for line in lines if line])


def _spec(setup: Setup, shapes: Sequence[StageShape]) -> ScenarioSpec:
    return setup.spec(merged(hand_over(shapes), setup.begun(shapes)))


def _is_steady(rows: Sequence[StageRow], label: str) -> bool:
    """Return True if no run of it became much slower and nothing was lost; rows of before have no rise and count."""
    own = [row for row in rows if row.label == label]
    return all(not row.lost and not row.rise > RISE_MAX for row in own)


def _mean(rows: Sequence[StageRow], label: str) -> float:
    values = [row.norm for row in rows if row.label == label]
    return sum(values) / len(values)


def told_cost(costs: StageCosts, shapes: Sequence[StageShape]) -> str:
    """Return the ms per token that the planner expects of a layout, or "overload" where it violates a constraint."""
    marks = [*(EDGES.index(shape.length_min) for shape in shapes), BINS]
    parts = [
        (costs.edges.index(low), costs.edges.index(high), shape.instances)
        for (low, high), shape in zip(itertools.pairwise(marks), shapes, strict=True)
    ]
    cost = search.total(costs, parts)
    return f"{1e3 * cost:.1f}" if math.isfinite(cost) else "overload"


def _line(rows: Sequence[StageRow], label: str, shapes: Sequence[StageShape], best: str, expected: str) -> list[str]:
    own = [row for row in rows if row.label == label]
    pairs = paired(rows, label, best)
    if not own or not pairs:
        return []
    name = "one stage" if len(shapes) == 1 and label.startswith("drawn") else label
    over = [100 * (a / b - 1) for a, b in pairs]
    norm, rise = [1e3 * row.norm for row in own], [100 * row.rise for row in own]
    return [name, told(shapes), figure(norm), figure(over, places=1), figure(rise, places=0), expected]
