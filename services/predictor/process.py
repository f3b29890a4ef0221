"""Dependencies of a predictor that its host process provides."""

from __future__ import annotations

from millrace.actor.deps import ActorDeps
from millrace.enginemodel.registered import load_step_times
from millrace.telemetry import Telemetry

from services.predictor.build import PredictorDeps
from services.predictor.config import PredictorConfig


def with_step_times(config: PredictorConfig, deps: ActorDeps, telemetry: Telemetry) -> PredictorDeps:
    """Reads the step-time sets. One that cannot be read is logged and left out."""
    step_times, unreadable = load_step_times(config.step_times)
    for name, error in unreadable.items():
        telemetry.logger.error("step_time_unreadable", step_time=name, error=error)
    telemetry.logger.info("forecasting", step_times=sorted(step_times))
    return PredictorDeps(**vars(deps), step_times=step_times)
