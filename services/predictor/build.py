"""Builds the predictor's actor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from millrace.actor.deps import ActorDeps
from millrace.enginemodel.step_time_models import StepTimeModel

from services.predictor.actor import PredictorActor
from services.predictor.config import PredictorConfig
from services.predictor.metrics import PredictorMetrics


@dataclass(frozen=True, kw_only=True)
class PredictorDeps(ActorDeps):
    """Dependencies of a predictor beside its configuration.

    Attributes:
        step_times: Step-time models by the name that instances give in their record.
    """

    step_times: Mapping[str, StepTimeModel]


def build(config: PredictorConfig, deps: PredictorDeps) -> PredictorActor:
    """The actor of a configuration."""
    metrics = PredictorMetrics(deps.registry, clock=deps.clock)
    return PredictorActor(config=config, incarnation=deps.incarnation, step_times=deps.step_times, metrics=metrics)
