"""Structured log lines: structlog on processors of our own, one logger per Telemetry, no global configuration."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, cast

import msgspec
import structlog
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}

#: Longest line, bytes. One log line must not carry a whole prompt into the log store.
LINE_BYTES_MAX = 16 * 1024

_encoder = msgspec.json.Encoder(enc_hook=str)


class LineLogger:
    """Last logger in structlog's chain: every level writes one line to ``write``."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        """``write`` takes a line with its newline."""
        self._write = write

    def msg(self, line: str) -> None:
        payload = line.encode("utf-8", "replace")
        if len(payload) > LINE_BYTES_MAX:
            payload = payload[:LINE_BYTES_MAX].decode("utf-8", "ignore").encode() + b" ... cut"
        self._write(payload + b"\n")

    debug = info = warning = error = critical = exception = msg


def open_logger(
    write: Callable[[bytes], None], *, form: str, level: str, colors: bool, bound: dict[str, Any]
) -> FilteringBoundLogger:
    """A logger with ``bound`` fields in every line.

    Raises:
        ValueError: for an unknown format or level.
    """
    if level not in LEVELS:
        raise ValueError(f"telemetry.log_level is {level!r}, not one of {', '.join(LEVELS)}")
    logger = structlog.wrap_logger(
        cast("WrappedLogger", LineLogger(write)),
        processors=[_add_time_and_level, _format_exception, _renderer(form, colors)],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        cache_logger_on_first_use=False,
        context_class=dict,
    )
    return cast("FilteringBoundLogger", logger.bind(**bound))


def _renderer(form: str, colors: bool) -> Callable[[WrappedLogger, str, EventDict], str]:
    if form == "json":
        return _render_json
    if form == "console":
        return cast(
            "Callable[[WrappedLogger, str, EventDict], str]",
            structlog.dev.ConsoleRenderer(colors=colors, pad_event_to=28, sort_keys=False),
        )
    raise ValueError(f"telemetry.log_format is {form!r}, not one of console, json")


def _add_time_and_level(_: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Puts time and level first: the order in which a person reads."""
    at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {"timestamp": at, "level": method, **event}


_format_exception = structlog.processors.ExceptionRenderer()


def _render_json(_: WrappedLogger, __: str, event: EventDict) -> str:
    head = {"time": event.pop("timestamp"), "level": event.pop("level"), "event": str(event.pop("event", ""))}
    return _encoder.encode({**head, **event}).decode()


def stderr_is_terminal() -> bool:
    """Whether colours make sense on standard error."""
    return sys.stderr.isatty()
