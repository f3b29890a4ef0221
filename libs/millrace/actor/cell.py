"""One actor inside a live runtime: its deliveries in order, one at a time, each followed by its effects."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from millrace.actor.actor import Actor
from millrace.actor.effects import Effect
from millrace.actor.meter import SAMPLE_EVERY, RuntimeMeter
from millrace.contracts.channels import Role
from millrace.contracts.message import Body, Message
from millrace.contracts.permissions import INBOX, Permissions

if TYPE_CHECKING:
    import asyncio

    from millrace.actor.watches import WatchFeed

#: Permitted subjects that are remembered.
SUBJECTS_MAX = 4096

CarryOut = Callable[["Cell", Effect], None]
Handlers = Mapping[type[Effect], Callable[[Any], None]]


class ActorCrashed(Exception):
    """A bug in an actor: an assertion or another exception left a handler. The process ends; its supervisor restarts
    it.
    """


@dataclass(frozen=True, kw_only=True)
class HostingTerms:
    """Terms for an actor that shares its process with others.

    Attributes:
        role: Whose permissions it has; None for all of the connection's user.
        on_crash: Called after it crashed, which then ends it alone; None where that ends the process.
    """

    role: Role | None = None
    on_crash: Callable[[], None] | None = None


#: Terms of an actor that has its process for itself.
ALONE = HostingTerms()


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
        self.watches: list[WatchFeed] = []
        self.refused: set[str] = set()
        self.on_crash: Callable[[], None] | None = None
        self.permissions: Permissions | None = None  # None: the connection's user has just this role
        self.store: Permissions | None = None
        self._may_publish: set[str] = set()
        self.stopped = False
        self.stop_reason = ""
        self._meter = meter
        self._timer = meter.handle_seconds.labels(self.name)
        self._waiting: deque[Message] = deque()
        self._busy = False
        self._handled = 0

    def may_subscribe(self, subject: str) -> bool:
        """Whether the actor's role may."""
        return self.permissions is None or self.permissions.may_subscribe(subject)

    def may_publish(self, subject: str) -> bool:
        """Whether the actor's role may. Inboxes differ by their last token only, so they are remembered without it."""
        if self.permissions is None or subject in self._may_publish:
            return True
        known = subject.rpartition(".")[0] if subject.startswith(INBOX) else subject
        if known in self._may_publish:
            return True
        if not self.permissions.may_publish(subject):
            return False
        if len(self._may_publish) >= SUBJECTS_MAX:
            self._may_publish.clear()
        self._may_publish.add(known)
        return True

    def start(self, now_ns: int, clock: Callable[[], int], carry_out: CarryOut) -> None:
        """First effects, and what they led to at once."""
        effects = self.actor.start(now_ns)
        self._busy = True
        for effect in effects:
            carry_out(self, effect)
        self._drain(clock, carry_out)
        self._busy = False

    def deliver(self, message: Message, clock: Callable[[], int], carry_out: CarryOut) -> None:
        """Hands a message over, now or after what is under way."""
        if self._busy:
            self._waiting.append(message)
            return
        self._busy = True
        self._handle(message, clock(), carry_out)
        if self._waiting:
            self._drain(clock, carry_out)
        self._busy = False

    def _drain(self, clock: Callable[[], int], carry_out: CarryOut) -> None:
        """After a crash nothing is drained: the actor stays busy for ever, and the process ends."""
        while self._waiting:
            self._handle(self._waiting.popleft(), clock(), carry_out)

    def _handle(self, message: Message, now_ns: int, carry_out: CarryOut) -> None:
        if self.stopped:
            return
        self._meter.handled.add(self.name, type(message.body).__name__)
        self._handled += 1
        if self._handled % SAMPLE_EVERY:
            effects = self.actor.handle(message, now_ns)
        else:
            began = time.perf_counter()
            effects = self.actor.handle(message, now_ns)
            self._timer.observe(time.perf_counter() - began)
        for effect in effects:
            carry_out(self, effect)
