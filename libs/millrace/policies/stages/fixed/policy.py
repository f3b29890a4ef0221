"""The ranges of the configuration."""

from __future__ import annotations

import msgspec

from millrace.contracts.bounds import Count
from millrace.policies.stages.membership import StageShape
from millrace.policies.stages.view import PlanningView, StageDecision


class FixedRange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stage.

    Attributes:
        length_min: First length served, tokens.
        length_max: First length no longer served; None for no bound.
        instances: Number of instances it should have, in proportion to the other stages'; at least 1.
        members: Names or patterns (``gpu0-*``) of instances that serve here and nowhere else; the others are shared.
    """

    length_min: int
    length_max: int | None = None
    instances: Count = 1
    members: tuple[str, ...] = ()


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The stages, which tile all lengths in rising order."""

    ranges: tuple[FixedRange, ...] = (FixedRange(length_min=0),)

    def __post_init__(self) -> None:
        """Raises ValueError, naming the range, where they overlap, leave a gap or are empty."""
        expected: int | None = 0
        for index, each in enumerate(self.ranges):
            if each.length_min != expected:
                raise ValueError(
                    f"ranges[{index}].length_min is {each.length_min}, the range before ends at {expected}"
                )
            if each.length_max is not None and each.length_max <= each.length_min:
                raise ValueError(f"ranges[{index}].length_max {each.length_max} is not above {each.length_min}")
            expected = each.length_max
        if expected is not None or not self.ranges:
            raise ValueError(f"ranges end at {expected}: the last one has no bound")


def decide(view: PlanningView, parameters: Parameters) -> StageDecision:
    """The configured ranges, whatever comes."""
    shapes = tuple(
        StageShape(length_min=r.length_min, length_max=r.length_max, instances=r.instances) for r in parameters.ranges
    )
    return StageDecision(shapes=shapes, reason="the ranges are configured")
