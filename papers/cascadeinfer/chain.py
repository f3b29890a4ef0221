"""One instance per stage: the first phase of the paper's heuristic, and its baseline of figure 14."""

from __future__ import annotations

from millrace.policies.stages.view import PlanningView, StageDecision

from papers.cascadeinfer.planning import PaperParameters, decide_by
from papers.cascadeinfer.search import chain

learns = True


class Parameters(PaperParameters, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A chain is taken whether it is better than one stage or not."""

    cuts_per_octave: int = 4


def decide(view: PlanningView, parameters: Parameters) -> StageDecision:
    """Searches the best cuts for stages of one instance each."""
    return decide_by(chain, view, parameters, always=True)
