"""Configuration of the judge. Durations are seconds here and nanoseconds in the code."""

from __future__ import annotations

import msgspec
from millrace.actor.config import BusConfig, TelemetryConfig
from millrace.judging.calibration import IsotonicCurve


class RemoteConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model behind an OpenAI-compatible API that judges.

    Attributes:
        url: Base URL, such as ``http://127.0.0.1:8000/v1``; empty where that kind is not served.
        model: Name of the judging model there.
        key_file: File that holds the API key; empty for none.
        timeout_s: For one question; the asker has a deadline of its own.
        curve_file: For ``llm``: JSON of an isotonic curve (``scores``, ``probabilities``) from P("yes") to P(right);
            empty for ``curve``.
        curve: The same curve itself; None for none.
        curves: Curves of single answering models, by served name; they come before ``curve`` and ``curve_file``.
    """

    url: str = ""
    model: str = ""
    key_file: str = ""
    timeout_s: float = 2.0
    curve_file: str = ""
    curve: IsotonicCurve | None = None
    curves: dict[str, IsotonicCurve] = {}


class JudgeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of a judge process.

    Attributes:
        name: Unique name on the bus.
        judges: Files of confidence judges, by served model.
        external: For the kind ``external``.
        llm: For the kind ``llm``: a model of this cluster, through its own API.
    """

    name: str = "judge-0"
    bus: BusConfig = BusConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    record: str = ""
    judges: dict[str, str] = {}
    external: RemoteConfig = RemoteConfig()
    llm: RemoteConfig = RemoteConfig()
