"""The paper's heuristic: a chain with one instance per stage, then greedy merges."""

from __future__ import annotations

from millrace.policies.stages import search
from millrace.policies.stages.deciding import decide_by
from millrace.policies.stages.objectives import UNCONSTRAINED, Constraints
from millrace.policies.stages.view import ObjectiveName, PlanningParameters, PlanningView, StageDecision

learns = True


class Parameters(PlanningParameters, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See PlanningParameters. Defaults as in the paper: its objective, tiers of an octave, no bound on slow stages."""

    objective: ObjectiveName = ObjectiveName.QUALITY
    cuts_per_octave: int = 1
    margin: float = 0.02
    cut_margin: float = 0.0
    constraints: Constraints = UNCONSTRAINED


def decide(view: PlanningView, parameters: Parameters) -> StageDecision:
    """Searches by chain and merges."""
    return decide_by(search.two_phase, view, parameters)
