"""Carries out effects on NATS, in the order in which the actor returned them; nothing here awaits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from millrace.actor import effects as fx
from millrace.actor.cell import Cell
from millrace.actor.connection import Connection
from millrace.actor.effects import Effect
from millrace.actor.headers import write_headers
from millrace.actor.inbox import Inbox, OpenGather, OpenRequest
from millrace.actor.key_store import KeyStore
from millrace.actor.ports import TelemetrySink
from millrace.actor.watches import Watches
from millrace.contracts.codec import PAYLOAD_BYTES_MAX, MalformedMessage, encode
from millrace.contracts.local import RequestFailure, TimerFired
from millrace.contracts.message import Body, ErrorReply, Message

if TYPE_CHECKING:
    from millrace.actor.runtime_nats import NatsRuntime

#: JetStream's own calls (streams, consumers) give up after this long, seconds.
STORE_TIMEOUT_S = 2.0


class EffectCarrier:
    """The effect table of one runtime, with what is open: requests, watches, timers."""

    def __init__(
        self,
        runtime: NatsRuntime,
        *,
        connection: Connection,
        telemetry: TelemetrySink,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._runtime = runtime
        self._connection = connection
        self._client = connection.client
        self._telemetry = telemetry
        self._meter = runtime.meter
        self.inbox = Inbox(connection.inbox_prefix, partial(self._meter.count_dropped, "late_reply"))
        js = connection.client.jetstream(timeout=STORE_TIMEOUT_S)
        subjects = runtime.subjects
        self._store = KeyStore(js=js, subjects=subjects, inbox=self.inbox, send=connection.send, spawn=spawn)
        self.watches = Watches(client=connection.client, js=js, subjects=subjects, inbox_prefix=connection.inbox_prefix)
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
        self.publish(cell, effect.to, effect.body, "", effect.request, effect.traceparent)

    def publish(
        self, cell: Cell, subject: str, body: Body, reply: str = "", request: str = "", traceparent: str = ""
    ) -> bool:
        payload = encode(body)
        if len(payload) > PAYLOAD_BYTES_MAX:
            self._too_large(cell, subject, body, len(payload))
            return False
        return self._connection.send(
            subject, reply, write_headers(body.type_name(), cell.name, request, traceparent), payload
        )

    def _too_large(self, cell: Cell, subject: str, body: Body, size: int) -> None:
        self._meter.count_dropped("too_large")
        fields = {"subject": subject, "type": body.type_name(), "bytes": size}
        self._telemetry.log(cell.name, fx.Log(level="error", event="message_too_large", fields=fields))

    def _on_request(self, cell: Cell, effect: fx.Request) -> None:
        payload = encode(effect.body)
        question = OpenRequest(effect.correlation, partial(self._runtime.deliver, cell))
        if len(payload) > PAYLOAD_BYTES_MAX:
            self._too_large(cell, effect.subject, effect.body, len(payload))
            question.refuse(ErrorReply(reason="malformed", detail=f"too_large: {len(payload)} bytes"))
            return
        reply = self.inbox.ask(question, effect.timeout_ns / 1e9)
        headers = write_headers(effect.body.type_name(), cell.name, effect.request, effect.traceparent)
        if not self._connection.send(effect.subject, reply, headers, payload):
            self.inbox.close(reply)
            question.fail(RequestFailure.DISCONNECTED)

    def _on_gather(self, cell: Cell, effect: fx.Gather) -> None:
        deliver = partial(self._runtime.deliver, cell)
        question = OpenGather(effect.correlation, effect.answers_max, len(effect.subjects), deliver)
        payload = encode(effect.body)
        sent = False
        if len(payload) > PAYLOAD_BYTES_MAX:
            self._too_large(cell, effect.subjects[0], effect.body, len(payload))
        else:
            reply = self.inbox.ask(question, effect.timeout_ns / 1e9)
            headers = write_headers(effect.body.type_name(), cell.name, effect.request, effect.traceparent)
            send = self._connection.send
            sent = all(send(subject, reply, headers, payload) for subject in effect.subjects)
            if not sent:
                self.inbox.close(reply)
        if not sent:
            question.on_timeout()

    def _on_subscribe(self, cell: Cell, effect: fx.Subscribe) -> None:
        if effect.subject not in cell.subscriptions:
            number = self._client.subscribe_now(effect.subject, effect.queue_group, self._runtime.taker(cell))
            cell.subscriptions[effect.subject] = number

    def _on_unsubscribe(self, cell: Cell, effect: fx.Unsubscribe) -> None:
        number = cell.subscriptions.pop(effect.subject, None)
        if number is not None:
            self._client.unsubscribe_now(number)

    def _on_watch(self, cell: Cell, effect: fx.WatchKeys) -> None:
        def refuse(malformed: MalformedMessage) -> None:
            self._runtime.refuse(
                cell, malformed.kind, "malformed", malformed.detail, Message(None, f"kv:{effect.bucket}")
            )

        self.watches.add(effect, partial(self._runtime.deliver, cell), refuse)

    def _on_write(self, cell: Cell, effect: fx.PutKey | fx.DeleteKey) -> None:
        self._store.write(effect, partial(self._runtime.deliver, cell))

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
        self._runtime.deliver(cell, Message(TimerFired(name=name)))

    def _on_cancel_timer(self, cell: Cell, effect: fx.CancelTimer | fx.StartTimer) -> None:
        timer = cell.timers.pop(effect.name, None)
        if timer is not None:
            timer.cancel()

    def _on_stop(self, cell: Cell, effect: fx.Stop) -> None:
        for number in cell.subscriptions.values():
            self._client.unsubscribe_now(number)
        self.end_timers(cell)
        self._runtime.stopped(cell, effect.reason)

    def end_timers(self, cell: Cell) -> None:
        """Forgets all timers of an actor."""
        for timer in cell.timers.values():
            timer.cancel()
        cell.timers.clear()
