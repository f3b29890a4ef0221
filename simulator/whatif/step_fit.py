"""Step times of an engine out of a recording: what its steps took beside everything else on its machine.

The recorder's sums cover about a second each, pauses between steps included while the engine had work. What they
computed of prompts follows from the requests whose first token came meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from millrace.contracts.status import BatchComposition
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_time_models import LinearStepTime
from millrace.workloads.recording import RequestServed, StepsComputed
from scipy.optimize import nnls

#: Fewest intervals that a fit is made of.
INTERVALS_MIN = 20

#: Slow-downs by a neighbour that are tried.
TRIED = tuple(step / 50 for step in range(51))

Floats = npt.NDArray[np.float64]


class ComputedSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of one interval.

    Attributes:
        prompted: Those that computed any prompt.
        prefill_work: As in BatchComposition, summed.
        neighbours: Other engines of the host that were busy meanwhile, on average.
    """

    wall_ns: float
    steps: int
    decodes: int
    prefill_tokens: int
    context_tokens: int
    prompted: int
    prefill_work: float
    neighbours: float

    def features(self) -> tuple[float, ...]:
        """In the order of ``LinearStepTime.fitted``."""
        return (self.steps, self.decodes, self.prefill_tokens, self.context_tokens, self.prefill_work, self.prompted)


def computed(
    steps: Sequence[StepsComputed], served: Sequence[RequestServed], hosts: dict[str, str], budget: int
) -> dict[str, list[ComputedSteps]]:
    """Steps by instance.

    Args:
        hosts: Machine of each instance; empty where it has one for itself.
        budget: Tokens of a step.
    """
    busy: dict[int, dict[str, float]] = {}
    for row in steps:
        busy.setdefault(row.at_ns, {})[row.instance] = row.wall_ns
    ticks = sorted(busy)
    longest = float(np.median(np.diff(ticks))) if len(ticks) > 1 else 1e9
    prompts = _prompts(steps, served, budget)
    found: dict[str, list[ComputedSteps]] = {}
    for row in steps:
        host = hosts.get(row.instance, "")
        others = [ns for name, ns in busy[row.at_ns].items() if name != row.instance and host == hosts.get(name)]
        count, work = prompts.get((row.instance, row.at_ns), (0, 0.0))
        found.setdefault(row.instance, []).append(
            ComputedSteps(
                wall_ns=row.wall_ns,
                steps=row.steps,
                decodes=row.decodes,
                prefill_tokens=row.prefill_tokens,
                context_tokens=row.context_tokens,
                prompted=min(row.steps, max(count, -(-row.prefill_tokens // budget))),
                prefill_work=work,
                neighbours=sum(min(1.0, ns / longest) for ns in others) if host else 0.0,
            )
        )
    return found


def _prompts(
    steps: Sequence[StepsComputed], served: Sequence[RequestServed], budget: int
) -> dict[tuple[str, int], tuple[int, float]]:
    """Steps with prompts and their work, by instance and interval."""
    ends: dict[str, list[int]] = {}
    for row in steps:
        ends.setdefault(row.instance, []).append(row.at_ns)
    found: dict[tuple[str, int], tuple[int, float]] = {}
    for each in served:
        own = ends.get(each.instance, [])
        place = bisect_left(own, each.at_ns + each.ttft_ns)
        if each.ttft_ns < 0 or place == len(own):
            continue
        fresh = max(1, each.prompt - each.cached)
        count, work = found.get((each.instance, own[place]), (0, 0.0))
        found[each.instance, own[place]] = count + -(-fresh // budget), work + fresh * (each.cached + fresh / 2)
    return found


def slowdown(rows: Sequence[ComputedSteps]) -> float:
    """The share by which each busy neighbour makes steps longer: what leaves the least error; 0 where all intervals
    are alike in that.
    """
    share = np.array([row.neighbours for row in rows])
    if min((share < 0.5).sum(), (share >= 0.5).sum()) < INTERVALS_MIN:
        return 0.0
    features, walls = matrix(rows)
    weights = 1 / np.sqrt(walls)
    errors = []
    for tried in TRIED:
        weighted = features * ((1 + tried * share) * weights)[:, None]
        solution = np.linalg.lstsq(weighted, walls * weights, rcond=None)[0]
        errors.append(float(((weighted @ solution - walls * weights) ** 2).sum()))
    return TRIED[int(np.argmin(errors))]


def fit(
    rows: Sequence[ComputedSteps], base: LinearStepTime | None, parameters: EngineParameters, slowed: float
) -> LinearStepTime | None:
    """Least squares on the intervals' whole times: their sum comes out right, late steps included.

    Args:
        base: The set that the engine names. With it, a factor on the set and what each step, each decode and each step
            with a prompt costs besides are fitted; without it all costs of a linear set.
        slowed: By each neighbour that is busy.

    Returns the base where there are too few intervals.
    """
    if len(rows) < INTERVALS_MIN:
        return base
    features, walls = matrix(rows)
    walls = walls / (1 + slowed * np.array([row.neighbours for row in rows]))
    if base is None:
        return LinearStepTime.fitted(_solved(features, walls))
    told = [_told(row, base, parameters) for row in rows]
    factor, step, decode, prompted = _solved(np.column_stack([told, *features[:, [0, 1, 5]].T]), walls)
    own = base.times(float(factor))
    return msgspec.structs.replace(
        own,
        fixed=own.fixed + float(step),
        per_decode=own.per_decode + float(decode),
        per_prompted_step=own.per_prompted_step + float(prompted),
    )


def _solved(columns: Floats, walls: Floats) -> Floats:
    """Costs of the columns, none below 0."""
    weights = 1 / np.sqrt(walls)  # each interval by its length
    weighted = columns * weights[:, None]
    norms = np.linalg.norm(weighted, axis=0)
    norms[norms == 0] = 1.0
    solution = nnls(weighted / norms, walls * weights)[0] / norms
    return np.asarray(solution * (walls.sum() / max(1.0, float((columns @ solution).sum()))))


def _told(row: ComputedSteps, base: LinearStepTime, parameters: EngineParameters) -> float:
    """The set's own time for an interval, ns: prompts evenly over the steps that had any."""
    cost, mean = base.cost(parameters), row.context_tokens / max(1, row.steps)
    decodes = round(row.decodes / max(1, row.steps))
    plain = BatchComposition(decodes=decodes, context_tokens=round(mean))
    total = (row.steps - row.prompted) * cost.duration_fs(plain)
    if row.prompted:
        prompt = BatchComposition(
            decodes=decodes,
            prefills=1,
            prefill_tokens=round(row.prefill_tokens / row.prompted),
            context_tokens=round(mean),
            prefill_work=row.prefill_work / row.prompted,
            prefill_context_tokens=round(row.prefill_tokens / row.prompted),
        )
        total += row.prompted * cost.duration_fs(prompt)
    return total / 1e6


def matrix(rows: Sequence[ComputedSteps]) -> tuple[Floats, Floats]:
    """Features and times of intervals."""
    features = np.array([row.features() for row in rows], dtype=np.float64)
    return features, np.array([row.wall_ns for row in rows], dtype=np.float64)
