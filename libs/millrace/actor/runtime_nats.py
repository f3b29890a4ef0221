"""Runs actors on NATS: the only code of the live system that touches the bus, the clock and timers.

Effects are carried out in the order in which the actor returned them. Nothing awaits per message: a publish appends to
the connection's write buffer, which is flushed once per turn of the event loop. Messages of one connection are handled
in the order in which the server sent them, synchronously, straight from the socket's buffer, so there is no queue in
this process that could grow: a runtime that is too slow stops reading, and the server's own bound (its pending bytes
per connection) ends the connection, which shows as BusDisconnected.

What happens at the borders:

- The bus is away: Publish and Reply are dropped and counted; Request fails at once with DISCONNECTED, Gather ends with
  what it has, writes fail with UNAVAILABLE.
- More than ``PENDING_BYTES_MAX`` wait for the socket: the same, counted as ``behind``.
- A body is larger than ``PAYLOAD_BYTES_MAX``: not sent, counted and logged; a Request is answered with
  ErrorReply(malformed), as its receiver would.
- Bytes that are no message, or a type that the actor does not take: the actor sees nothing; counted, logged once per
  (kind, sender), answered with ErrorReply where a reply is wanted.
- An exception leaves a handler: the process ends with the actor's snapshot in the log; or the actor alone, where
  whoever hosts it said what to do then.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from prometheus_client import CollectorRegistry

from millrace.actor import effects as fx
from millrace.actor.actor import Actor
from millrace.actor.cell import ALONE, ActorCrashed, Cell, HostingTerms
from millrace.actor.clock import unix_ns
from millrace.actor.config import BusConfig
from millrace.actor.connection import Connection
from millrace.actor.effects import Effect
from millrace.actor.effects_nats import EffectCarrier
from millrace.actor.headers import read_headers
from millrace.actor.local_bus import LocalBus
from millrace.actor.meter import RuntimeMeter
from millrace.actor.ports import TelemetrySink
from millrace.actor.stored_values import StoredValues
from millrace.contracts.channels import Role
from millrace.contracts.codec import MalformedMessage, decode
from millrace.contracts.local import (
    BusDisconnected,
    BusReconnected,
    StopRequested,
)
from millrace.contracts.message import Body, ErrorReply, Message
from millrace.contracts.permissions import INBOX, permissions, store_permissions
from millrace.contracts.subjects import Subjects

#: Distinct (kind, sender) pairs that get a log line; beyond it refusals are only counted.
REFUSALS_LOGGED_MAX = 1000


class ActorHandle:
    """Handle by which a shell reaches the actor that it runs."""

    def __init__(self, runtime: NatsRuntime, cell: Cell) -> None:
        self._runtime = runtime
        self._cell = cell

    def deliver(self, body: Body, *, traceparent: str = "") -> None:
        """Hands over a local message, at once. To be called on the event loop's thread only."""
        self._runtime.deliver(self._cell, Message(body, traceparent=traceparent))


class NatsRuntime:
    """Hosts one or more actors on one NATS connection. Lives on one event loop."""

    def __init__(
        self,
        *,
        bus: BusConfig,
        name: str,
        telemetry: TelemetrySink,
        registry: CollectorRegistry,
        local: bool = False,
    ) -> None:
        """Args:
        local: Whether actors of this runtime reach each other in the process (``local_bus.py``); the user of ``bus``
            then needs the permissions of all their roles.
        """
        self.meter = RuntimeMeter(registry)
        self.subjects = Subjects(bus.cluster)
        self._bus = bus
        self._name = name
        self._telemetry = telemetry
        self._connection = Connection(bus=bus, name=name, meter=self.meter, log=self._log, echo=not local)
        self._connection.on_lost = self._on_lost
        self._connection.on_back = self._on_back
        self._store = self._connection
        if bus.user in {*map(str, Role)} and store_permissions(Role(bus.user), bus.cluster).publish:
            self._store = Connection(bus=bus, name=name, meter=self.meter, log=self._log, store=True)
            self._store.on_lost = self._on_store_lost
            self._store.on_back = self._on_store_back
        self._carrier = EffectCarrier(
            self, connection=self._connection, store=self._store, telemetry=telemetry, spawn=self._spawn
        )
        if local:
            self._carrier.local = LocalBus(self.hand_over)
        self._cells: list[Cell] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._refusals_logged: set[tuple[str, str]] = set()
        self._closing = False
        self._ended: asyncio.Future[str] | None = None

    # Composition

    def now_ns(self) -> int:
        """Unix ns that never step (``clock.py``)."""
        return unix_ns()

    def add(
        self,
        actor: Actor,
        *,
        accepts: tuple[type[Body], ...],
        handlers: Mapping[type[Effect], Callable[[Any], None]] | None = None,
        terms: HostingTerms = ALONE,
    ) -> ActorHandle:
        """Hosts an actor; run() starts it, or at once where run() is under way.

        Args:
            accepts: Wire types that reach the actor.
            handlers: What carries out effects of the service's own.
            terms: What holds for it where several actors share the process.
        """
        cell = Cell(actor=actor, accepts=accepts, handlers=handlers or {}, meter=self.meter)
        cell.on_crash = terms.on_crash
        if terms.role is not None and self._bus.user:  # a server without users permits everything
            cell.permissions = permissions(terms.role, self._bus.cluster)
            cell.store = store_permissions(terms.role, self._bus.cluster)
        self._cells.append(cell)
        if self._ended is not None:
            self._start(cell, self.now_ns())
        return ActorHandle(self, cell)

    @property
    def values(self) -> StoredValues:
        """Keys of the store, for the shell."""
        return self._carrier.values

    async def connect(self) -> None:
        """Connects and opens the inbox.

        Raises:
            BusUnavailable: no server answered in time.
            BusRefused: a server refused the credentials.
        """
        await self._connection.connect()
        inbox = self._carrier.inbox
        self._connection.client.subscribe_now(inbox.prefix + "*", "", inbox.take)
        if self._store is not self._connection:
            await self._store.connect()
        self._carrier.store.open()

    # Running

    async def run(self, *, signals: bool = True) -> str:
        """Starts the actors and serves until each returned Stop; returns the last one's reason.

        Args:
            signals: Turn SIGTERM and SIGINT into StopRequested. False where the shell does that itself.

        Raises:
            ActorCrashed: a handler raised; the snapshot is in the log.
        """
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        if signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.request_stop)
        now_ns = self.now_ns()  # of all: what each does now and then, they do together
        for cell in list(self._cells):
            self._start(cell, now_ns)
        try:
            return await self._ended
        finally:
            if signals:
                for number in (signal.SIGTERM, signal.SIGINT):
                    loop.remove_signal_handler(number)
            await self.close()

    @property
    def running(self) -> bool:
        return self._ended is not None and not self._ended.done() and not self._closing

    def request_stop(self, *, orphaned: bool = False, replaced: bool = False) -> None:
        """Tells every actor that the process is asked to end, and why (see StopRequested)."""
        for cell in list(self._cells):
            self.deliver(cell, Message(StopRequested(orphaned=orphaned, replaced=replaced)))

    async def close(self) -> None:
        """Sends what waits for the socket, then closes the connection. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._carrier.watches.close()
        for task in list(self._tasks):
            task.cancel()
        for cell in self._cells:
            self._carrier.end_timers(cell)
        await self._connection.close()
        await self._store.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Deliveries

    def deliver(self, cell: Cell, message: Message) -> None:
        if cell.stopped or self._closing:
            return
        try:
            cell.deliver(message, self.now_ns, self._carrier.carry_out)
        except Exception as bug:  # noqa: BLE001 a bug in an actor ends the process: nothing may go on from a state that contradicts itself
            self._crash(cell, bug)

    def _start(self, cell: Cell, now_ns: int) -> None:
        try:
            cell.start(now_ns, self.now_ns, self._carrier.carry_out)
        except Exception as bug:  # noqa: BLE001 as above
            self._crash(cell, bug)

    def _crash(self, cell: Cell, bug: Exception) -> None:
        cell.stopped = True
        try:
            snapshot = cell.actor.snapshot()
        except Exception as second:  # noqa: BLE001 the state is broken; the first failure is the one to tell
            snapshot = {"snapshot_failed": repr(second)}
        fields = {"error": repr(bug), "snapshot": snapshot}
        self._telemetry.log(cell.name, fx.Log(level="error", event="actor_crashed", fields=fields))
        if cell.on_crash is not None:
            self._carrier.detach(cell)
            self._cells.remove(cell)
            cell.on_crash()
            return
        crashed = ActorCrashed(f"{cell.name}: {bug!r}")
        crashed.__cause__ = bug
        self._fail(crashed)

    def taker(self, cells: list[Cell]) -> Callable[[str, str, bytes, bytes], None]:
        """Taker that hands a message to all actors in the list by then; the first one counts bytes that are none."""
        deliver = self.deliver

        def take(subject: str, reply: str, payload: bytes, headers: bytes) -> None:
            sender, traceparent = read_headers(headers)
            if reply and not reply.startswith(INBOX):  # an answer there would be this user's word, not the asker's
                told = Message(None, subject, sender)
                self.refuse(cells[0], "reply", "malformed", f"answers go to inboxes, not to {reply}", told)
                return
            try:
                body = decode(payload)
            except MalformedMessage as malformed:
                told = Message(None, subject, sender, reply)
                self.refuse(cells[0], malformed.kind, "malformed", malformed.detail, told)
                return
            message = Message(body, subject, sender, reply, traceparent)
            for cell in cells if len(cells) == 1 else tuple(cells):
                if type(body) in cell.accepts:
                    deliver(cell, message)
                else:
                    self._unexpected(cell, message)

        return take

    def hand_over(self, cell: Cell, message: Message) -> None:
        """Deliver what another actor of this process published."""
        if type(message.body) in cell.accepts:
            self.deliver(cell, message)
        else:
            self._unexpected(cell, message)

    def _unexpected(self, cell: Cell, message: Message) -> None:
        detail = f"{message.body.type_name()} is not taken here"
        told = Message(None, message.subject, message.sender, message.reply_to)
        self.refuse(cell, "unexpected", "unexpected", detail, told)

    def refuse(self, cell: Cell, kind: str, reason: str, detail: str, message: Message) -> None:
        self.meter.refused.add(cell.name, kind)
        if message.reply_to:
            answer = ErrorReply(reason=reason, detail=detail)
            self._carrier.carry_out(cell, fx.Reply(to=message.reply_to, body=answer))
        who = (kind, message.sender)
        if who not in self._refusals_logged and len(self._refusals_logged) < REFUSALS_LOGGED_MAX:
            self._refusals_logged.add(who)
            fields = {"kind": kind, "sender": message.sender, "subject": message.subject, "detail": detail[:500]}
            self._telemetry.log(cell.name, fx.Log(level="warning", event="message_refused", fields=fields))

    def refuse_key(self, cell: Cell, bucket: str, key: str, malformed: MalformedMessage) -> None:
        """A stored value that is none: counted, and an alarm the first time."""
        self.meter.refused.add(cell.name, "stored")
        if (bucket, key) not in self._refusals_logged and len(self._refusals_logged) < REFUSALS_LOGGED_MAX:
            self._refusals_logged.add((bucket, key))
            fields = {"bucket": bucket, "key": key, "detail": str(malformed)[:500]}
            self._telemetry.log(cell.name, fx.Log(level="error", event="key_unreadable", fields=fields))

    def stopped(self, cell: Cell, reason: str) -> None:
        """An actor returned Stop; with the last one the runtime ends."""
        cell.stopped = True
        if all(other.stopped for other in self._cells) and self._ended is not None and not self._ended.done():
            self._ended.set_result(reason)

    # The connection

    def _on_lost(self) -> None:
        self._carrier.inbox.disconnected()
        if self._store is self._connection:
            self._on_store_lost()
        for cell in list(self._cells):
            self.deliver(cell, Message(BusDisconnected()))

    def _on_back(self) -> None:
        self._carrier.watches.reconnected()
        for cell in list(self._cells):
            self.deliver(cell, Message(BusReconnected()))

    def _on_store_lost(self) -> None:
        self._carrier.store.inbox.disconnected()

    def _on_store_back(self) -> None:
        self._carrier.watches.reconnected()

    def _fail(self, error: Exception) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)

    def _log(self, level: str, event: str, fields: dict[str, Any]) -> None:
        self._telemetry.log(self._name, fx.Log(level=level, event=event, fields=fields))
