"""One actor inside a live runtime: its deliveries in order, one at a time, each followed by its effects."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from millrace.actor.actor import Actor
from millrace.actor.effects import Effect
from millrace.actor.meter import SAMPLE_EVERY, RuntimeMeter
from millrace.contracts.message import Body, Message

if TYPE_CHECKING:
    import asyncio

    from millrace.actor.recording import RecordingWriter

CarryOut = Callable[["Cell", Effect], None]
Handlers = Mapping[type[Effect], Callable[[Any], None]]


class ActorCrashed(Exception):
    """A bug in an actor: an assertion or another exception left a handler. The process ends; its supervisor restarts
    it.
    """


class Cell:
    """Hosts one actor.

    A message that arrives while the actor's effects are carried out (a local answer, usually) waits until they are
    all done, so effects of one message are never interleaved with those of another.
    """

    def __init__(
        self, *, actor: Actor, accepts: tuple[type[Body], ...], handlers: Handlers, meter: RuntimeMeter
    ) -> None:
        self.actor = actor
        self.name = actor.name
        self.accepts = frozenset(accepts)
        self.handlers = dict(handlers)
        self.timers: dict[str, asyncio.TimerHandle] = {}
        self.subscriptions: dict[str, int] = {}
        self.recorder: RecordingWriter | None = None
        self.stopped = False
        self.stop_reason = ""
        self._meter = meter
        self._timer = meter.handle_seconds.labels(self.name)
        self._waiting: deque[Message] = deque()
        self._busy = False
        self._handled = 0

    def start(self, clock: Callable[[], int], carry_out: CarryOut) -> None:
        """First effects, and what they led to at once."""
        now_ns = clock()
        effects = self.actor.start(now_ns)
        if self.recorder is not None:
            self.recorder.started(now_ns, effects)
        self._busy = True
        for effect in effects:
            carry_out(self, effect)
        self._drain(clock, carry_out)

    def deliver(self, message: Message, clock: Callable[[], int], carry_out: CarryOut) -> None:
        """Hands a message over, now or after what is under way."""
        if self._busy:
            self._waiting.append(message)
            return
        self._busy = True
        self._handle(message, clock(), carry_out)
        self._drain(clock, carry_out)

    def _drain(self, clock: Callable[[], int], carry_out: CarryOut) -> None:
        """After a crash nothing is drained: the actor stays busy for ever, and the process ends."""
        while self._waiting:
            self._handle(self._waiting.popleft(), clock(), carry_out)
        self._busy = False

    def _handle(self, message: Message, now_ns: int, carry_out: CarryOut) -> None:
        if self.stopped:
            return
        self._meter.count_handled(self.name, type(message.body).__name__)
        self._handled += 1
        if self._handled % SAMPLE_EVERY:
            effects = self.actor.handle(message, now_ns)
        else:
            began = time.perf_counter()
            effects = self.actor.handle(message, now_ns)
            self._timer.observe(time.perf_counter() - began)
        if self.recorder is not None:
            self.recorder.handled(now_ns, message, effects)
        for effect in effects:
            carry_out(self, effect)
