"""Input and output of a stage policy."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from millrace.contracts.plan import PlanExpectation
from millrace.policies.stages.instance import InstanceModel
from millrace.policies.stages.membership import StageShape
from millrace.policies.stages.objectives import Constraints
from millrace.policies.stages.risks import LatencyBounds
from millrace.policies.stages.statistics import LengthStatistics


@dataclass(frozen=True, kw_only=True)
class PlanningView:
    """One model at the time of planning.

    Attributes:
        instances: Number of instances that serve.
        statistics: Lengths of the requests of the last period; None where none are known.
        instance: Cost of a step and size of the memory; None where unknown.
        current: Layout in force; empty for none.
    """

    instances: int
    statistics: LengthStatistics | None = None
    instance: InstanceModel | None = None
    current: tuple[StageShape, ...] = ()


class StageDecision(msgspec.Struct, frozen=True, kw_only=True):
    """A layout and why.

    Attributes:
        shapes: Stages in rising order of length; their instances add up to those of the view, or are the layout in
            force, which a change of membership alone does not change.
        expects: None where nothing was computed.
    """

    shapes: tuple[StageShape, ...]
    reason: str
    expects: PlanExpectation | None = None


class PlanningParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the policies that search.

    Attributes:
        margin: Several stages must be better than one by this share, else it is one. The objective assumes perfect
            balance within a stage and free transfers, so that a small gain is none.
        cut_margin: Each cut must bring at least this share of what one stage costs.
        change_margin: A new layout must be better than the one in force by this share, else that one stays.
        instances_min: With fewer instances it is one stage: splitting two or three engines costs more in balance than
            lengths cost, and a stage of one engine has no spare.
        requests_min: With fewer requests in the period the layout in force stays.
        constraints: What a stage must keep.
        bounds: Latency bounds (SLO) that requests shall keep with several stages as with one.
    """

    margin: float = 0.1
    cut_margin: float = 0.02
    change_margin: float = 0.1
    instances_min: int = 4
    requests_min: int = 200
    constraints: Constraints = Constraints()
    bounds: LatencyBounds = LatencyBounds()

    def __post_init__(self) -> None:
        checks = {
            "margin": 0 <= self.margin < 1,
            "cut_margin": 0 <= self.cut_margin < 1,
            "change_margin": 0 <= self.change_margin < 1,
            "instances_min": self.instances_min >= 1,
            "requests_min": self.requests_min >= 1,
        }
        wrong = [name for name, holds in checks.items() if not holds]
        if wrong:
            raise ValueError(f"out of range: {', '.join(f'{name} = {getattr(self, name)}' for name in wrong)}")


def one_shape(instances: int) -> StageShape:
    """One stage over all lengths."""
    return StageShape(length_min=0, length_max=None, instances=max(1, instances))
