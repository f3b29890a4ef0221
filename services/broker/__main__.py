"""Runs a broker: ``python -m services.broker --config FILE``."""

from __future__ import annotations

import sys

from millrace.actor.deps import ActorDeps
from millrace.contracts.catalog import Role
from millrace.enginemodel.forecast import NATIVE
from millrace.enginemodel.registered import load_step_times
from millrace.hosting.service import host
from millrace.telemetry import Telemetry

from services.broker.actor import ACCEPTS
from services.broker.build import BrokerDeps, build
from services.broker.config import BrokerConfig


def with_step_times(config: BrokerConfig, deps: ActorDeps, telemetry: Telemetry) -> BrokerDeps:
    """Reads the step-time sets. One that cannot be read is logged and left out."""
    step_times, unreadable = load_step_times(config.step_times)
    for name, error in unreadable.items():
        telemetry.logger.error("step_time_unreadable", step_time=name, error=error)
    telemetry.logger.info("trading", native=NATIVE, policy=config.trading.policy, step_times=sorted(step_times))
    return BrokerDeps(**vars(deps), step_times=step_times)


if __name__ == "__main__":
    sys.exit(host(Role.BROKER, BrokerConfig, ACCEPTS, build, deps_of=with_step_times))
