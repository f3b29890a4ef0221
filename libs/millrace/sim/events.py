"""The event queue of a simulation: virtual integer-nanosecond time, equal times in a seeded order."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any

Event = tuple[int, int, Callable[..., None], tuple[Any, ...]]


class EventQueue:
    """A heap keyed (time_ns, seeded tie-break). Everything that happens in a simulation is one of its events.

    Attributes:
        now_ns: Time of the event under way; never goes back.
    """

    __slots__ = ("_heap", "_numbers", "_tie", "now_ns")

    def __init__(self, rng: Random, start_ns: int) -> None:
        self.now_ns = start_ns
        self._heap: list[Event] = []
        self._numbers = 0
        self._tie = rng.getrandbits

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, time_ns: int, callback: Callable[..., None], *args: Any) -> None:
        """Calls ``callback(*args)`` at ``time_ns``, or at the present time where that has passed."""
        self._numbers += 1  # the last word on order: two events never compare their callbacks
        order = self._tie(24) << 40 | self._numbers
        heappush(self._heap, (time_ns if time_ns > self.now_ns else self.now_ns, order, callback, args))

    def run(self, until_ns: int) -> None:
        """Runs all events up to and including ``until_ns``; the clock then stands there."""
        heap = self._heap
        while heap and heap[0][0] <= until_ns:
            time_ns, _order, callback, args = heappop(heap)
            self.now_ns = time_ns
            callback(*args)
        self.now_ns = max(self.now_ns, until_ns)

    def step(self) -> bool:
        """Runs one event; False where none is left."""
        if not self._heap:
            return False
        time_ns, _order, callback, args = heappop(self._heap)
        self.now_ns = time_ns
        callback(*args)
        return True
