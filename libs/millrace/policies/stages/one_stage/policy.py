"""One stage over all lengths."""

from __future__ import annotations

import msgspec

from millrace.policies.stages.view import PlanningView, StageDecision, one_shape


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """None."""


def decide(view: PlanningView, parameters: Parameters) -> StageDecision:
    """Every instance serves every length."""
    return StageDecision(shapes=(one_shape(view.instances),), reason="one stage is configured")
