"""Present cuts of a plan: its own, and over them those that keepers have refined. Pure.

Keepers refine at the same time, so that two boundaries may cross, and messages come in any order. Whoever knows the
same boundaries gets the same cuts: a boundary that crosses its neighbour counts as little as that neighbour.
"""

from __future__ import annotations

from collections.abc import Mapping

from millrace.contracts.plan import Plan


def present_cuts(plan: Plan, refined: Mapping[str, int]) -> list[int]:
    """Lengths at which one stage ends and the next begins, strictly rising; one fewer than stages.

    Args:
        refined: Boundaries by the name of the lower stage.
    """
    standing = {index: refined[s.name] for index, s in enumerate(plan.stages[:-1]) if s.name in refined}
    while True:
        cuts = [standing.get(index, cut) for index, cut in enumerate(plan.cuts)]
        bounds = [0, *cuts]
        crossed = next((at for at in range(len(cuts)) if bounds[at] >= bounds[at + 1]), None)
        if crossed is None:
            return cuts
        standing.pop(crossed, None)
        standing.pop(crossed - 1, None)
