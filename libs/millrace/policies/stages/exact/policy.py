"""The best layout under the objective, by dynamic programming."""

from __future__ import annotations

from millrace.policies.stages import search
from millrace.policies.stages.deciding import decide_by
from millrace.policies.stages.view import PlanningParameters, PlanningView, StageDecision

learns = True


class Parameters(PlanningParameters, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See PlanningParameters."""


def decide(view: PlanningView, parameters: Parameters) -> StageDecision:
    """Searches all cuts and all numbers of instances."""
    return decide_by(search.exact, view, parameters)
