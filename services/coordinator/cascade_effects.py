"""Effects and events between the coordinator and its shell: planning of cascades."""

from __future__ import annotations

from millrace.actor.effects import Effect
from millrace.cascade.jobs import PlanningJob, PlanningResult
from millrace.contracts.message import Body


class PlanCascade(Effect, frozen=True, kw_only=True):
    """Plans a cascade outside the coordinator's process: CascadePlanned or CascadePlanningFailed follows, exactly one.

    Attributes:
        key: Of the cascade in its bucket.
        limit_s: A planner that takes longer is killed.
    """

    key: str
    job: PlanningJob
    limit_s: float


class CascadePlanned(Body, frozen=True, kw_only=True, tag="local.CascadePlanned/1"):
    """A planner has come to a result."""

    key: str
    result: PlanningResult


class CascadePlanningFailed(Body, frozen=True, kw_only=True, tag="local.CascadePlanningFailed/1"):
    """The planner ended without a result, or took too long. The plan in force holds."""

    key: str
    detail: str
