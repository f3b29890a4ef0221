"""Configuration of the coordinator."""

from __future__ import annotations

import msgspec
from millrace.actor.config import BusConfig, TelemetryConfig


class CoordinatorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a coordinator process needs.

    Attributes:
        name: Unique name on the bus; several coordinators stand by for each other.
    """

    name: str = "coordinator-0"
    bus: BusConfig = BusConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    record: str = ""
