"""Runs a tagger: ``python -m services.tagger --config FILE``."""

from __future__ import annotations

import sys

from millrace.actor.hosting import host
from millrace.contracts.catalog import Role
from millrace.telemetry import Telemetry

from services.tagger.actor import ACCEPTS, TaggerActor
from services.tagger.config import TaggerConfig
from services.tagger.metrics import TaggerCollector
from services.tagger.shell import TaggerShell


def build(config: TaggerConfig, incarnation: int, telemetry: Telemetry) -> TaggerActor:
    """Makes the actor of this process."""
    actor = TaggerActor(
        name=config.name,
        cluster=config.bus.cluster,
        incarnation=incarnation,
        learning=config.learning,
    )
    telemetry.registry.register(TaggerCollector(lambda: actor.figures))
    return actor


if __name__ == "__main__":
    sys.exit(host(Role.TAGGER, TaggerConfig, ACCEPTS, build, TaggerShell))
