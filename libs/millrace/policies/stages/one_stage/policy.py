"""One stage over all lengths."""

from __future__ import annotations

from millrace.policies.registry import Nothing
from millrace.policies.stages.view import PlanningView, StageDecision, one_shape


def decide(view: PlanningView, parameters: Nothing) -> StageDecision:
    """Every instance serves every length."""
    return StageDecision(shapes=(one_shape(view.instances),), reason="one stage is configured")
