"""Configuration of the tagger."""

from __future__ import annotations

import msgspec
from millrace.actor.config import BusConfig, TelemetryConfig


class TaggerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a tagger process needs.

    Attributes:
        name: Unique name on the bus.
    """

    name: str = "tagger-0"
    bus: BusConfig = BusConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    record: str = ""
