"""Runs a predictor: ``python -m services.predictor --config FILE``."""

from __future__ import annotations

import sys
import time

from millrace.actor.hosting import host
from millrace.contracts.catalog import Role
from millrace.enginemodel.forecast import NATIVE
from millrace.telemetry import Telemetry

from services.predictor.actor import ACCEPTS, PredictorActor
from services.predictor.config import PredictorConfig
from services.predictor.metrics import PredictorMetrics
from services.predictor.step_times import read_step_times


def build(config: PredictorConfig, incarnation: int, telemetry: Telemetry) -> PredictorActor:
    """Makes the actor of this process. A step-time set that cannot be read is said once and done without."""
    step_times, unreadable = read_step_times(config.step_times)
    for name, error in unreadable.items():
        telemetry.logger.error("step_time_unreadable", step_time=name, error=error)
    telemetry.logger.info("forecasting", native=NATIVE, step_times=sorted(step_times))
    metrics = PredictorMetrics(telemetry.registry, clock=time.perf_counter_ns)
    return PredictorActor(config=config, incarnation=incarnation, step_times=step_times, metrics=metrics)


if __name__ == "__main__":
    sys.exit(host(Role.PREDICTOR, PredictorConfig, ACCEPTS, build))
