"""Engines that are faster or slower than the one that was measured, by a factor."""

from __future__ import annotations

from typing import Any

import msgspec

from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_cost import CostCurve, StepCost
from millrace.enginemodel.step_time_models import StepTimeModel

#: Fields of StepCost that are no costs.
_COUNTS = frozenset({"prefill_granularity", "tail_decodes"})


class ScaledStepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Another model's step times times a factor.

    Attributes:
        factor: 0.5 for an engine twice as fast. Above 0.
    """

    model: Any
    factor: float

    def cost(self, parameters: EngineParameters) -> StepCost:
        model: StepTimeModel = self.model
        return scaled(model.cost(parameters), self.factor)


def scaled(cost: StepCost, factor: float) -> StepCost:
    """A cost times a factor, rounded to whole femtoseconds."""
    changed = {name: _times(getattr(cost, name), factor) for name in cost.__struct_fields__ if name not in _COUNTS}
    return msgspec.structs.replace(cost, **changed)


def _times(value: Any, factor: float) -> Any:
    if isinstance(value, CostCurve):
        return CostCurve(value.starts, _times(value.values_fs, factor), _times(value.slopes_fs, factor))
    if isinstance(value, tuple):
        return tuple(_times(entry, factor) for entry in value)
    return None if value is None else round(value * factor)
