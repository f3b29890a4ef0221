"""Configuration of the judge."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from millrace.actor.config import BusConfig, TelemetryConfig


class JudgeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of a judge process.

    Attributes:
        name: Unique name on the bus.
        judge: A name of ``JUDGES``, a file or an entry point.
        parameters: The judge's parameters.
        url: Base URL of the API through which the model is asked, such as ``http://127.0.0.1:8000/v1``: the cluster's
            own or another one.
        model: Name of the judging model there.
        key_file: File that holds the API key; empty for none.
        timeout_s: For one question, seconds; the asker has a deadline of its own.
    """

    name: str = "judge-0"
    bus: BusConfig = BusConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    record: str = ""
    judge: str = "llm"
    parameters: dict[str, Any] = {}
    url: Annotated[str, msgspec.Meta(pattern="^https?://")] = "http://127.0.0.1:8000/v1"
    model: str = ""
    key_file: str = ""
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 2.0
