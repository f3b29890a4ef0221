"""The paper's heuristic: a chain with one instance per stage, then greedy merges."""

from __future__ import annotations

from millrace.policies.stages.view import PlanningView, StageDecision

from papers.cascadeinfer.planning import PaperParameters, decide_by
from papers.cascadeinfer.search import two_phase

learns = True


class Parameters(PaperParameters, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See PaperParameters."""


def decide(view: PlanningView, parameters: Parameters) -> StageDecision:
    """Searches by chain and merges."""
    return decide_by(two_phase, view, parameters)
