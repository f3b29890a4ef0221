"""One instance per stage: the first phase of the paper's heuristic, and its baseline of figure 14."""

from __future__ import annotations

from millrace.policies.stages import search
from millrace.policies.stages.deciding import decide_by
from millrace.policies.stages.objectives import UNCONSTRAINED, Constraints
from millrace.policies.stages.view import ObjectiveName, PlanningParameters, PlanningView, StageDecision

learns = True


class Parameters(PlanningParameters, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See PlanningParameters; a chain is taken whether it is better than one stage or not."""

    objective: ObjectiveName = ObjectiveName.QUALITY
    margin: float = 0.0
    cut_margin: float = 0.0
    constraints: Constraints = UNCONSTRAINED


def decide(view: PlanningView, parameters: Parameters) -> StageDecision:
    """Searches the best cuts for stages of one instance each."""
    return decide_by(search.chain, view, parameters, always=True)
