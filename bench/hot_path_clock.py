"""The clock of the hot path's rig: it advances with each request instead of with real time.

Ingress does some work per second: it traces the first requests of each second, and timers fire. On the machine's clock
a slow machine would do more of it per request, and no two runs would do the same work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
SECOND_NS = 1_000_000_000


class RequestClock:
    """A clock that its owner advances; it starts at the present second."""

    def __init__(self) -> None:
        self._now_ns = time.time_ns() // SECOND_NS * SECOND_NS

    def now_ns(self) -> int:
        """Unix ns."""
        return self._now_ns

    def now_s(self) -> float:
        """Unix seconds."""
        return self._now_ns / SECOND_NS

    def advance(self, by_ns: int) -> None:
        """Let time pass."""
        self._now_ns += by_ns


class RequestClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers fire by a `RequestClock`. It must not wait: nothing advances the clock meanwhile."""

    def __init__(self, clock: RequestClock) -> None:
        super().__init__()
        self._request_clock = clock

    def time(self) -> float:
        """Seconds, of the same clock as the runtime's."""
        return self._request_clock.now_s()


def run_by(work: Coroutine[Any, Any, T], clock: RequestClock) -> T:
    """Run to the end on a loop of that clock."""
    with asyncio.Runner(loop_factory=lambda: RequestClockLoop(clock)) as runner:
        return runner.run(work)
