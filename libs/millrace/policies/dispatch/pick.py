"""From loads to a decision: scores in [0, 1], the lowest load picked, ties by the rng passed in."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from millrace.contracts.observers import CandidateScore
from millrace.policies.dispatch.view import Decision, DispatchView

#: Scores told per decision. A reader wants the best few and the chosen one; 64 of them would be 3 KB per request.
SCORES_MAX = 16

NO_CANDIDATE = "no instance can take it"


def nothing(view: DispatchView) -> Decision:
    """The decision where no candidate is left."""
    return Decision(None, NO_CANDIDATE, list(view.filtered[:SCORES_MAX]))


def pick_lowest(view: DispatchView, loads: Sequence[float], rng: Random, *, unit: str) -> Decision:
    """Picks the candidate with the lowest load; equal ones by ``rng``.

    Args:
        loads: One per candidate, any unit, lower is better.
        unit: Ends the sentence: ``lowest of 4: 12 <unit>``.
    """
    if not loads:
        return nothing(view)
    lowest = min(loads)
    index = loads.index(lowest)
    if loads.count(lowest) > 1:
        ties = [i for i, load in enumerate(loads) if load == lowest]
        index = ties[rng.randrange(len(ties))]
    reason = f"lowest of {len(loads)}: {lowest:g} {unit}"
    return Decision(view.candidates[index].name, reason, _scores(view, loads, index))


def pick_index(view: DispatchView, index: int, reason: str) -> Decision:
    """Picks a candidate that a rule without loads named: it scores 1, the others 0."""
    candidates = view.candidates
    others = [CandidateScore(c.name, 0.0) for i, c in enumerate(candidates[:SCORES_MAX]) if i != index]
    scores = [CandidateScore(candidates[index].name, 1.0), *others[: SCORES_MAX - 1]]
    return Decision(candidates[index].name, reason, scores)


def _scores(view: DispatchView, loads: Sequence[float], chosen: int) -> list[CandidateScore]:
    candidates = view.candidates
    lowest, highest = loads[chosen], max(loads)
    width = (highest - lowest) or 1.0
    order = sorted(range(len(loads)), key=loads.__getitem__)[:SCORES_MAX]
    if chosen not in order:
        order[-1] = chosen
    return [CandidateScore(candidates[i].name, 1.0 - (loads[i] - lowest) / width) for i in order]
