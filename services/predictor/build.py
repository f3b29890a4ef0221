"""Builds the predictor's actor."""

from __future__ import annotations

from millrace.hosting.step_times import StepTimeDeps

from services.predictor.actor import PredictorActor
from services.predictor.config import PredictorConfig
from services.predictor.metrics import PredictorMetrics


def build(config: PredictorConfig, deps: StepTimeDeps) -> PredictorActor:
    """The actor of a configuration."""
    metrics = PredictorMetrics(deps.registry, clock=deps.clock)
    return PredictorActor(config=config, incarnation=deps.incarnation, step_times=deps.step_times, metrics=metrics)
