"""Stage policies by name: which stage serves which lengths with how many instances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millrace.policies.registry import Policy, Registry
from millrace.policies.stages.exact import policy as exact
from millrace.policies.stages.fixed import policy as fixed
from millrace.policies.stages.membership import StageShape, assign, stages_of
from millrace.policies.stages.one_stage import policy as one_stage
from millrace.policies.stages.routing import covers, stage_order
from millrace.policies.stages.view import PlanningParameters, PlanningView, StageDecision

__all__ = [
    "STAGE_POLICIES",
    "PlanningParameters",
    "PlanningView",
    "StageDecision",
    "StagePolicy",
    "StageShape",
    "assign",
    "covers",
    "stage_order",
    "stages_of",
]


class StagePolicy(Policy, frozen=True, kw_only=True):
    """One policy of the registry.

    Attributes:
        decide: The pure function: (view, parameters) -> StageDecision.
        learns: Whether it looks at the statistics of lengths.
    """

    decide: Callable[[PlanningView, Any], StageDecision]
    learns: bool = False


#: To add a policy: its folder, its import above and a word here.
STAGE_POLICIES = Registry("stages", StagePolicy, (one_stage, fixed, exact))
