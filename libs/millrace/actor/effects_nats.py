"""Carries out effects on NATS, in the order in which the actor returned them; nothing here awaits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol

from millrace.actor import effects as fx
from millrace.actor.cell import Cell
from millrace.actor.connection import Connection
from millrace.actor.effects import Effect
from millrace.actor.headers import write_headers
from millrace.actor.inbox import Inbox, OpenGather, OpenRequest
from millrace.actor.key_store import KeyStore
from millrace.actor.local_bus import LocalBus
from millrace.actor.meter import RuntimeMeter
from millrace.actor.ports import TelemetrySink
from millrace.actor.store_link import StoreLink
from millrace.actor.stored_values import StoredValues
from millrace.actor.watches import Watches
from millrace.contracts.codec import PAYLOAD_BYTES_MAX, MalformedMessage, encode
from millrace.contracts.local import AskedTogether, RequestFailure, TimerFired
from millrace.contracts.message import Body, ErrorReply, Message
from millrace.contracts.subjects import Subjects

#: Distinct permission violations of one actor that get a log line; beyond it they are only counted.
REFUSALS_LOGGED_MAX = 100


class HostingRuntime(Protocol):
    """The runtime that hosts actors, as far as their effects need it."""

    meter: RuntimeMeter
    subjects: Subjects

    def now_ns(self) -> int: ...

    def deliver(self, cell: Cell, message: Message) -> None: ...

    def taker(self, cells: list[Cell]) -> Callable[[str, str, bytes, bytes], None]: ...

    def refuse_key(self, cell: Cell, bucket: str, key: str, malformed: MalformedMessage) -> None: ...

    def stopped(self, cell: Cell, reason: str) -> None: ...


class EffectCarrier:
    """The effect table of one runtime, with what is open: requests, watches, timers."""

    def __init__(
        self,
        runtime: HostingRuntime,
        *,
        connection: Connection,
        store: Connection,
        telemetry: TelemetrySink,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._runtime = runtime
        self._connection = connection
        self._client = connection.client
        self._telemetry = telemetry
        self._meter = runtime.meter
        self.inbox = Inbox(connection.inbox_prefix, partial(self._meter.dropped.add, "late_reply"))
        self.store = StoreLink(
            store,
            runtime.subjects,
            partial(self._meter.dropped.add, "late_reply"),
            makes_buckets=store is connection,
        )
        self._keys = KeyStore(self.store, spawn)
        self.values = StoredValues(self.store, self._keys)
        self.watches = Watches(self.store)
        #: Set where actors of this runtime reach each other without the server.
        self.local: LocalBus | None = None
        self._receivers: dict[int, list[Cell]] = {}  # by number of the subscription
        self._numbers: dict[str, int] = {}  # of subscriptions without a queue group, by subject
        self._carry: dict[type[Effect], Callable[[Cell, Any], None]] = self._table()

    def carry_out(self, cell: Cell, effect: Effect) -> None:
        """Does one effect; those of the service's own go to its handlers."""
        carry = self._carry.get(type(effect))
        if carry is not None:
            carry(cell, effect)
        else:
            cell.handlers[type(effect)](effect)

    def _table(self) -> dict[type[Effect], Callable[[Cell, Any], None]]:
        return {
            fx.Publish: self._on_publish,
            fx.Reply: self._on_reply,
            fx.Request: self._on_request,
            fx.Gather: self._on_gather,
            fx.Subscribe: self._on_subscribe,
            fx.Unsubscribe: self._on_unsubscribe,
            fx.WatchKeys: self._on_watch,
            fx.PutKey: self._on_write,
            fx.DeleteKey: self._on_write,
            fx.StartTimer: self._on_start_timer,
            fx.CancelTimer: self._on_cancel_timer,
            fx.Log: lambda cell, effect: self._telemetry.log(cell.name, effect),
            fx.RecordSpan: lambda cell, effect: self._telemetry.span(cell.name, effect),
            fx.Stop: self._on_stop,
        }

    def _on_publish(self, cell: Cell, effect: fx.Publish) -> None:
        self.publish(cell, effect.subject, effect.body, "", effect.request, effect.traceparent)

    def _on_reply(self, cell: Cell, effect: fx.Reply) -> None:
        if self.local is not None and effect.to.startswith(self.inbox.prefix):
            # Of this process, and told to nobody but those who were asked.
            self.inbox.take_local(effect.to, cell.name, effect.body, effect.traceparent)
        else:
            self.publish(cell, effect.to, effect.body, "", effect.request, effect.traceparent)

    def publish(
        self, cell: Cell, subject: str, body: Body, reply: str = "", request: str = "", traceparent: str = ""
    ) -> bool:
        if self.local is not None and self._stays(cell, subject, body, reply, traceparent):
            return True
        payload = self._payload(cell, subject, body)
        if payload is None:
            return False
        return self._connection.send(
            subject, reply, write_headers(body.type_name(), cell.name, request, traceparent), payload
        )

    def _stays(self, cell: Cell, subject: str, body: Body, reply: str, traceparent: str) -> bool:
        """Deliver to actors of this process, where they may hear it; whether nobody else needs it."""
        assert self.local is not None
        if not cell.may_publish(subject):
            self._not_permitted(cell, f"publish to {subject}")
            return True
        return self.local.take(cell, subject, body, reply=reply, traceparent=traceparent)

    def _not_permitted(self, cell: Cell, what: str) -> None:
        self._meter.dropped.add("permission")
        if what not in cell.refused and len(cell.refused) < REFUSALS_LOGGED_MAX:
            cell.refused.add(what)
            fields = {"error": f"permissions violation: {cell.name} may not {what}"}
            self._telemetry.log(cell.name, fx.Log(level="warning", event="bus_error", fields=fields))

    def _payload(self, cell: Cell, subject: str, body: Body) -> bytes | None:
        """A body in wire form; None, counted and logged, where it is too large."""
        payload = encode(body)
        if len(payload) <= PAYLOAD_BYTES_MAX:
            return payload
        self._meter.dropped.add("too_large")
        fields = {"subject": subject, "type": body.type_name(), "bytes": len(payload)}
        self._telemetry.log(cell.name, fx.Log(level="error", event="message_too_large", fields=fields))
        return None

    def _on_request(self, cell: Cell, effect: fx.Request) -> None:
        question = OpenRequest(effect.correlation, partial(self._runtime.deliver, cell))
        reply = self.inbox.ask(question, None)
        if self.local is not None and self._stays(cell, effect.subject, effect.body, reply, effect.traceparent):
            self.inbox.limit(reply, effect.timeout_ns / 1e9)
            return
        payload = self._payload(cell, effect.subject, effect.body)
        if payload is None:
            self.inbox.close(reply)
            question.refuse(ErrorReply(reason="malformed", detail=f"too_large: more than {PAYLOAD_BYTES_MAX} bytes"))
            return
        headers = write_headers(effect.body.type_name(), cell.name, effect.request, effect.traceparent)
        if self._connection.send(effect.subject, reply, headers, payload):
            self.inbox.limit(reply, effect.timeout_ns / 1e9)
        else:
            self.inbox.close(reply)
            question.fail(RequestFailure.DISCONNECTED)

    def _on_gather(self, cell: Cell, effect: fx.Gather) -> None:
        deliver = partial(self._runtime.deliver, cell)
        question = OpenGather(effect.correlation, effect.answers_max, len(effect.subjects), deliver)
        reply = self.inbox.ask(question, None)
        subjects, body = effect.subjects, effect.body
        if self.local is not None:
            if self._ask_together(self.local, cell, effect, reply):
                subjects = ()
            subjects = tuple([s for s in subjects if not self._stays(cell, s, body, reply, effect.traceparent)])
        if not subjects or self._ask_all(cell, effect, subjects, reply):
            self.inbox.limit(reply, effect.timeout_ns / 1e9)
        elif self.inbox.close(reply):
            question.on_timeout()

    def _ask_together(self, local: LocalBus, cell: Cell, effect: fx.Gather, reply: str) -> bool:
        """Ask an actor of this process that answers on all these subjects, and takes that, with one message."""
        subjects = effect.subjects
        answerer = local.answerer(subjects) if len(subjects) > 1 else None
        if answerer is None or AskedTogether not in answerer.accepts or not all(map(cell.may_publish, subjects)):
            return False
        asked = AskedTogether(body=effect.body, subjects=subjects)
        self._runtime.deliver(answerer, Message(asked, "", cell.name, reply, effect.traceparent))
        return True

    def _ask_all(self, cell: Cell, effect: fx.Gather, subjects: tuple[str, ...], reply: str) -> bool:
        payload = self._payload(cell, subjects[0], effect.body)
        if payload is None:
            return False
        headers = write_headers(effect.body.type_name(), cell.name, effect.request, effect.traceparent)
        send = self._connection.send
        return all(send(subject, reply, headers, payload) for subject in subjects)

    def _on_subscribe(self, cell: Cell, effect: fx.Subscribe) -> None:
        if not cell.may_subscribe(effect.subject):
            self._not_permitted(cell, f"subscribe to {effect.subject}")
        elif effect.subject not in cell.subscriptions:
            if self.local is not None:
                self.local.subscribe(cell, effect.subject, effect.queue_group)
            cell.subscriptions[effect.subject] = self._subscribed(cell, effect.subject, effect.queue_group)

    def _subscribed(self, cell: Cell, subject: str, queue_group: str) -> int:
        """The number of a subscription; one for all actors here, so that what they all hear comes and is read once."""
        known = None if queue_group else self._numbers.get(subject)
        if known is not None:
            self._receivers[known].append(cell)
            return known
        cells = [cell]
        number = self._client.subscribe_now(subject, queue_group, self._runtime.taker(cells))
        self._receivers[number] = cells
        if not queue_group:
            self._numbers[subject] = number
        return number

    def _on_unsubscribe(self, cell: Cell, effect: fx.Unsubscribe) -> None:
        number = cell.subscriptions.pop(effect.subject, None)
        if number is not None:
            self._forget_subscription(cell, effect.subject, number)

    def _forget_subscription(self, cell: Cell, subject: str, number: int) -> None:
        cells = self._receivers[number]
        cells.remove(cell)
        if not cells:
            self._client.unsubscribe_now(number)
            del self._receivers[number]
            if self._numbers.get(subject) == number:
                del self._numbers[subject]
        if self.local is not None:
            self.local.unsubscribe(cell, subject)

    def _on_watch(self, cell: Cell, effect: fx.WatchKeys) -> None:
        subject = self._runtime.subjects.changes(effect.bucket) + ">"
        if cell.store is not None and not cell.store.may_subscribe(subject):
            self._not_permitted(cell, f"watch {effect.bucket}")
            return

        def refuse(key: str, malformed: MalformedMessage) -> None:
            self._runtime.refuse_key(cell, effect.bucket, key, malformed)

        cell.watches.append(self.watches.add(effect.bucket, partial(self._runtime.deliver, cell), refuse))

    def _on_write(self, cell: Cell, effect: fx.PutKey | fx.DeleteKey) -> None:
        self._keys.write(effect, partial(self._runtime.deliver, cell))

    def _on_start_timer(self, cell: Cell, effect: fx.StartTimer) -> None:
        self._on_cancel_timer(cell, effect)
        delay_s = max(0, effect.at_ns - self._runtime.now_ns()) / 1e9
        loop = asyncio.get_running_loop()
        cell.timers[effect.name] = loop.call_later(delay_s, self._fire, cell, effect.name, effect.at_ns)

    def _fire(self, cell: Cell, name: str, at_ns: int) -> None:
        early_ns = at_ns - self._runtime.now_ns()
        if early_ns > 0:  # the loop's clock may be coarser than ours; an actor must never see its timer early
            cell.timers[name] = asyncio.get_running_loop().call_later(early_ns / 1e9, self._fire, cell, name, at_ns)
            return
        cell.timers.pop(name, None)
        self._runtime.deliver(cell, Message(TimerFired(name=name, at_ns=at_ns)))

    def _on_cancel_timer(self, cell: Cell, effect: fx.CancelTimer | fx.StartTimer) -> None:
        timer = cell.timers.pop(effect.name, None)
        if timer is not None:
            timer.cancel()

    def _on_stop(self, cell: Cell, effect: fx.Stop) -> None:
        self.detach(cell)
        self._runtime.stopped(cell, effect.reason)

    def detach(self, cell: Cell) -> None:
        """Ends what an actor listens to and its timers: it hears nothing more."""
        for subject, number in list(cell.subscriptions.items()):
            self._forget_subscription(cell, subject, number)
        cell.subscriptions.clear()
        for watch in cell.watches:
            self.watches.end(watch)
        cell.watches.clear()
        self.end_timers(cell)

    def end_timers(self, cell: Cell) -> None:
        for timer in cell.timers.values():
            timer.cancel()
        cell.timers.clear()
