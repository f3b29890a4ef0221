"""The event queue of a simulation: virtual integer-nanosecond time, equal times in a seeded order."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from random import Random
from typing import Any

Event = tuple[int, int, Callable[..., None], tuple[Any, ...]]

#: What is further ahead than the present slice of time waits unsorted in its own slice of 2^20 ns (1 ms). Most of it
#: are limits of answers that came long before: a heap would compare them with each message.
SLICE_BITS = 20


class EventQueue:
    """A heap keyed (time_ns, seeded tie-break). Everything that happens in a simulation is one of its events.

    Invariant: events before ``_end_ns`` are in the heap, all others in the slice of their time.

    Attributes:
        now_ns: Time of the event under way; never goes back.
    """

    __slots__ = ("_end_ns", "_heap", "_later", "_numbers", "_slices", "_tie", "now_ns")

    def __init__(self, rng: Random, start_ns: int) -> None:
        self.now_ns = start_ns
        self._heap: list[Event] = []
        self._end_ns = start_ns
        self._later: dict[int, list[Event]] = {}  # by time >> SLICE_BITS
        self._slices: list[int] = []  # heap of the keys of _later
        self._numbers = 0
        self._tie = rng.getrandbits

    def __len__(self) -> int:
        return len(self._heap) + sum(map(len, self._later.values()))

    def at(self, time_ns: int, callback: Callable[..., None], *args: Any) -> None:
        """Calls ``callback(*args)`` at ``time_ns``, or at the present time where that has passed."""
        self._numbers += 1  # the last word on order: two events never compare their callbacks
        order = self._tie(24) << 40 | self._numbers
        if time_ns < self.now_ns:
            time_ns = self.now_ns
        if time_ns < self._end_ns:
            heappush(self._heap, (time_ns, order, callback, args))
            return
        number = time_ns >> SLICE_BITS
        events = self._later.get(number)
        if events is None:
            self._later[number] = [(time_ns, order, callback, args)]
            heappush(self._slices, number)
        else:
            events.append((time_ns, order, callback, args))

    def run(self, until_ns: int) -> None:
        """Runs all events up to and including ``until_ns``; the clock then stands there."""
        heap = self._heap
        while heap or self._next_slice():
            if heap[0][0] > until_ns:
                break
            self.now_ns, _order, callback, args = heappop(heap)
            callback(*args)
        self.now_ns = max(self.now_ns, until_ns)

    def step(self) -> bool:
        """Runs one event; False where none is left."""
        if not self._heap and not self._next_slice():
            return False
        time_ns, _order, callback, args = heappop(self._heap)
        self.now_ns = time_ns
        callback(*args)
        return True

    def _next_slice(self) -> bool:
        """Fills the empty heap with the earliest slice; False where there is none."""
        if not self._slices:
            return False
        number = heappop(self._slices)
        self._heap += self._later.pop(number)
        heapify(self._heap)
        self._end_ns = (number + 1) << SLICE_BITS
        return True
