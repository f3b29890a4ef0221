"""Interface that a runtime needs besides the bus: a sink for logs and spans."""

from __future__ import annotations

from typing import Protocol

from millrace.actor.effects import Log, RecordSpan


class TelemetrySink(Protocol):
    """Takes what actors want logged and traced. Never raises, never blocks; drops and counts when it is behind."""

    def log(self, actor: str, effect: Log) -> None:
        """Writes one line."""
        ...

    def span(self, actor: str, effect: RecordSpan) -> None:
        """Records one finished span."""
        ...


class NullTelemetry:
    """Discards everything: for tests and benchmarks that measure without it."""

    def log(self, actor: str, effect: Log) -> None:
        """Discards a line."""

    def span(self, actor: str, effect: RecordSpan) -> None:
        """Discards a span."""
