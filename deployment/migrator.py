"""Runs a migrator that hosts the broker of its instances: one process decides what moves and carries it out.

python -m deployment.migrator --config FILE [--broker FILE]
"""

from __future__ import annotations

import sys

from millrace.actor.actor import Actor
from millrace.actor.config import load_config
from millrace.actor.deps import ActorDeps
from millrace.contracts.catalog import Role
from millrace.hosting.companion import Companion
from millrace.hosting.service import host
from millrace.hosting.step_times import with_step_times
from millrace.telemetry import Telemetry

from services.broker.actor import ACCEPTS as BROKER_ACCEPTS
from services.broker.build import build as build_broker
from services.broker.config import BrokerConfig
from services.migrator.actor import ACCEPTS
from services.migrator.build import build
from services.migrator.config import MigratorConfig


def broker(path: str) -> Companion:
    """A broker of the configuration in a file. Raises ConfigError where that is wrong."""
    config = load_config(BrokerConfig, path)

    def make(deps: ActorDeps, telemetry: Telemetry) -> Actor:
        return build_broker(config, with_step_times(config, deps, telemetry))

    return Companion(Role.BROKER, config, BROKER_ACCEPTS, make)


if __name__ == "__main__":
    sys.exit(host(Role.MIGRATOR, MigratorConfig, ACCEPTS, build, companions={"broker": broker}))
