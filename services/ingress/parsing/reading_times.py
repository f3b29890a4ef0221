"""Times at which a call's output was read by its parser, and at which it reasoned: two spans a call. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence

from millrace.actor.effects import RecordSpan
from millrace.telemetry.tracecontext import TraceContext, child, format_traceparent

from services.ingress.calls.messages import ChoiceDelta


class ReadingTimes:
    """Times of one call's output, Unix ns. One that comes in a single piece does not show when it reasoned."""

    __slots__ = ("_first_ns", "_last_ns", "_longest_ns", "_pieces", "_reasoned_ns", "_reasoning_ns", "_trace")

    def __init__(self, trace: TraceContext) -> None:
        """``trace``: of the call's root span, sampled."""
        self._trace = trace
        self._pieces = self._first_ns = self._last_ns = self._longest_ns = self._reasoning_ns = self._reasoned_ns = 0

    def on_read(self, asked_ns: int, now_ns: int, deltas: Sequence[ChoiceDelta]) -> None:
        """A delivery that came at ``asked_ns`` was read."""
        self._pieces += 1
        self._first_ns = self._first_ns or asked_ns
        self._last_ns = now_ns
        self._longest_ns = max(self._longest_ns, now_ns - asked_ns)
        if any(delta.reasoning for delta in deltas):
            self._reasoning_ns = self._reasoning_ns or asked_ns
            self._reasoned_ns = now_ns

    def spans(self, request: str, reasoning_tokens: int | None, rng: random.Random) -> list[RecordSpan]:
        """Those that are known."""
        reading = ("parser", self._first_ns, self._last_ns, {"longest_ms": self._longest_ns / 1e6})
        reasoning = ("reasoning", self._reasoning_ns, self._reasoned_ns, {"tokens": reasoning_tokens or 0})
        return [
            RecordSpan(
                name=name,
                traceparent=format_traceparent(child(self._trace, rng)),
                parent_span_id=self._trace.span_id,
                start_ns=start_ns,
                end_ns=end_ns,
                attributes={"request": request, **attributes},
            )
            for name, start_ns, end_ns, attributes in (reading, reasoning)
            if start_ns and (name == "parser" or self._pieces > 1)
        ]
