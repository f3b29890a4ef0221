"""Stage policies by name: which stage serves which lengths with how many instances."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from millrace.policies.stages.chain import policy as chain
from millrace.policies.stages.exact import policy as exact
from millrace.policies.stages.fixed import policy as fixed
from millrace.policies.stages.membership import StageShape, assign, shapes_of, stages_of
from millrace.policies.stages.one_stage import policy as one_stage
from millrace.policies.stages.routing import covers, stage_for, stage_order
from millrace.policies.stages.two_phase import policy as two_phase
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
    "shapes_of",
    "stage_for",
    "stage_order",
    "stages_of",
]


class StagePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """One policy of the registry.

    Attributes:
        decide: The pure function: (view, parameters) -> StageDecision.
        parameters: Struct of its parameters; every field has a default.
        learns: Whether it looks at the statistics of lengths.
    """

    name: str
    decide: Callable[[PlanningView, Any], StageDecision]
    parameters: type[msgspec.Struct]
    learns: bool


_ALL = (
    StagePolicy(name="one_stage", decide=one_stage.decide, parameters=one_stage.Parameters, learns=False),
    StagePolicy(name="fixed", decide=fixed.decide, parameters=fixed.Parameters, learns=False),
    StagePolicy(name="chain", decide=chain.decide, parameters=chain.Parameters, learns=True),
    StagePolicy(name="two_phase", decide=two_phase.decide, parameters=two_phase.Parameters, learns=True),
    StagePolicy(name="exact", decide=exact.decide, parameters=exact.Parameters, learns=True),
)

STAGE_POLICIES: Mapping[str, StagePolicy] = MappingProxyType({p.name: p for p in _ALL})
