"""Runs a predictor: ``python -m services.predictor --config FILE``."""

from __future__ import annotations

import sys

from millrace.actor.deps import ActorDeps
from millrace.actor.hosting import host
from millrace.contracts.catalog import Role
from millrace.enginemodel.forecast import NATIVE
from millrace.telemetry import Telemetry

from services.predictor.actor import ACCEPTS
from services.predictor.build import PredictorDeps, build
from services.predictor.config import PredictorConfig
from services.predictor.step_times import read_step_times


def with_step_times(config: PredictorConfig, deps: ActorDeps, telemetry: Telemetry) -> PredictorDeps:
    """Reads the step-time sets. One that cannot be read is logged and left out."""
    step_times, unreadable = read_step_times(config.step_times)
    for name, error in unreadable.items():
        telemetry.logger.error("step_time_unreadable", step_time=name, error=error)
    telemetry.logger.info("forecasting", native=NATIVE, step_times=sorted(step_times))
    return PredictorDeps(**vars(deps), step_times=step_times)


if __name__ == "__main__":
    sys.exit(host(Role.PREDICTOR, PredictorConfig, ACCEPTS, build, deps_of=with_step_times))
