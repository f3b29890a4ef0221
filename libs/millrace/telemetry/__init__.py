"""Logs, traces and metrics of one service: ``open_telemetry`` returns all three, and nothing here is process-global."""

from millrace.telemetry.opening import Telemetry, open_telemetry

__all__ = ["Telemetry", "open_telemetry"]
