"""The paper's planner: equation 1 over a fixed set of resident requests, and a heuristic search."""

from __future__ import annotations

import math
from collections.abc import Callable

from millrace.policies.stages.deciding import decision_of, parts_of, why_not
from millrace.policies.stages.objectives import StageCosts, candidate_edges
from millrace.policies.stages.search import Part, total
from millrace.policies.stages.view import PlanningParameters, PlanningView, StageDecision

from papers.cascadeinfer.equation1 import QualityModel, quality_costs


class PaperParameters(PlanningParameters, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the core's, the margins and least numbers count; constraints and bounds do not.

    Attributes:
        cuts_per_octave: Candidate cuts: 1 (the paper's tiers), 2 or 4.
        coefficients: Of equation 1; None for those of the step-time set that instances name.
    """

    margin: float = 0.02
    cuts_per_octave: int = 1
    coefficients: QualityModel | None = None

    def __post_init__(self) -> None:
        """Raises ValueError outside of the ranges."""
        super().__post_init__()
        if self.cuts_per_octave not in (1, 2, 4):
            raise ValueError(f"cuts_per_octave must be 1, 2 or 4, is {self.cuts_per_octave}")


def decide_by(
    search: Callable[[StageCosts], list[Part] | None],
    view: PlanningView,
    parameters: PaperParameters,
    *,
    always: bool = False,
) -> StageDecision:
    """The layout that the search finds where it is better than one stage, and than the one in force, by the margins.

    Args:
        search: Finds a partition.
        view: Model, statistics and layout in force.
        parameters: Margins and coefficients.
        always: Takes what the search finds, whether it is better or not.
    """
    unplanned = why_not(view, parameters)
    if unplanned:
        return unplanned
    costs = costs_of(view, parameters)
    one: list[Part] = [(0, len(costs.edges) - 1, view.instances)]
    parts = search(costs) or one
    if not math.isfinite(total(costs, parts)):
        parts = one
    if not always and total(costs, parts) > (1 - parameters.margin) * total(costs, one):
        parts = one
    current = None if always else parts_of(view.current, costs)
    margin = parameters.change_margin if len(parts) > 1 else 0.0
    if current is not None and current != parts and total(costs, parts) > (1 - margin) * total(costs, current):
        return decision_of(view, costs, current, reason="stays: the best layout is hardly better", keep=True)
    return decision_of(view, costs, parts, reason=f"{len(parts)} stages by equation 1", keep=current == parts)


def costs_of(view: PlanningView, parameters: PaperParameters) -> StageCosts:
    """Tables of equation 1."""
    assert view.statistics is not None
    assert view.instance is not None
    instance = view.instance
    line = QualityModel(d0=instance.fixed_s, d1=instance.per_decode_s, d4=instance.per_context_token_s)
    edges = candidate_edges(view.statistics, parameters.cuts_per_octave)
    per_token = instance.kv_bytes_per_token / instance.copy_bytes_per_s
    model = parameters.coefficients or line
    return quality_costs(view.statistics, model, edges, view.instances, transfer_s_per_token=per_token)
