"""A bounded queue with a thread behind it: the event loop appends, the thread does the slow part in batches.

Used for span files, OTLP and log files, so that neither a full disk nor a slow collector ever holds up an actor.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

#: Time between two deliveries: what a kill -9 can lose. The thread takes the interpreter from the event loop each time,
#: and the loop waits for it; so items wake it only where none came for that long.
GATHER_S = 0.1


class Outbox(Generic[T]):
    """Hands items to ``deliver`` in batches on a thread of its own.

    When ``items_max`` are waiting, further items are dropped and counted. ``deliver`` must return within a bounded
    time; an OSError of it drops its batch and counts it.
    """

    def __init__(self, name: str, deliver: Callable[[list[T]], None], *, items_max: int, batch_max: int) -> None:
        """Starts the thread; it is a daemon, so that a hung collector cannot keep the process from ending."""
        self._deliver = deliver
        self._items_max = items_max
        self._batch_max = batch_max
        self._items: deque[T] = deque()
        self._awake = threading.Event()
        self._hurried = threading.Event()
        self._closing = False
        self._accepted = 0
        self._settled = 0
        self.dropped = 0
        self._thread = threading.Thread(target=self._work, name=f"millrace-{name}", daemon=True)
        self._thread.start()

    def put(self, item: T) -> bool:
        """Appends an item; False where it was dropped. Never blocks."""
        if self._closing or len(self._items) >= self._items_max:
            self.dropped += 1
            return False
        self._items.append(item)
        self._accepted += 1
        if not self._awake.is_set():
            self._awake.set()
        return True

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything appended so far is delivered; False where that took too long."""
        target, deadline = self._accepted, time.monotonic() + timeout_s
        self._hurried.set()
        while self._settled < target and time.monotonic() < deadline:
            time.sleep(0.002)
        return self._settled >= target

    def close(self, timeout_s: float) -> None:
        """Delivers what waits, for at most ``timeout_s``, and ends the thread; the rest counts as dropped."""
        self._closing = True
        self._hurried.set()
        self._awake.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.dropped += len(self._items)

    def _work(self) -> None:
        while True:
            self._awake.wait()
            if not self._closing:
                self._hurried.wait(GATHER_S)
                self._hurried.clear()
            if not self._items:
                # Cleared before the queue is emptied: an item appended meanwhile is in it, or sets it again.
                self._awake.clear()
            self._empty_queue()
            if self._closing and not self._items:
                return

    def _empty_queue(self) -> None:
        while self._items:
            batch = [self._items.popleft() for _ in range(min(self._batch_max, len(self._items)))]
            try:
                self._deliver(batch)
            except OSError:
                # A full disk or a lost collector: counted in the metric; telemetry never stops a service.
                self.dropped += len(batch)
            self._settled += len(batch)
