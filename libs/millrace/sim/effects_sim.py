"""Carries out the effects of simulated actors: messages to the server, open questions, timers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from zlib import crc32

from millrace.actor import effects as fx
from millrace.actor.effects import Effect
from millrace.actor.ports import TelemetrySink
from millrace.contracts.codec import PAYLOAD_BYTES_MAX, MalformedMessage, decode, encode
from millrace.contracts.local import Replied, TimerFired
from millrace.contracts.message import Body, ErrorReply, Message
from millrace.sim.pending_replies import Answer, PendingReply, SimGather, SimRequest, SimWrite
from millrace.sim.process import SimNode, SimProcess, SimWatch
from millrace.sim.routing import Subscription

if TYPE_CHECKING:
    from millrace.sim.runtime_sim import Simulation

#: A write without an acknowledgement fails after this long, ns; the same as on NATS (actor/key_store.py).
WRITE_TIMEOUT_NS = 8_000_000_000


class SimEffectExecutor:
    """Executor of effects in virtual time: the counterpart of the live runtime's effect table. One per simulation."""

    def __init__(self, simulation: Simulation, *, verify: bool, telemetry: TelemetrySink) -> None:
        self._sim = simulation
        self._queue = simulation.queue
        self._verify = verify
        self._telemetry = telemetry
        self._asked: dict[str, tuple[SimProcess, PendingReply]] = {}
        self._questions = 0
        self._carry: dict[type[Effect], Callable[[SimProcess, Any], object]] = self._table()

    def carry_out(self, process: SimProcess, effects: list[Effect]) -> None:
        """In the order in which the actor returned them."""
        find = self._carry.get
        for effect in effects:
            kind = type(effect)
            if kind is fx.Publish:  # most are
                self.publish(process, effect.subject, effect.body, "", effect.traceparent)  # type: ignore[attr-defined]
                continue
            carry = find(kind)
            if carry is not None:
                carry(process, effect)
            else:
                process.handlers[kind](effect)

    def _table(self) -> dict[type[Effect], Callable[[SimProcess, Any], object]]:
        return {
            fx.Publish: lambda process, e: self.publish(process, e.subject, e.body, "", e.traceparent),
            fx.Reply: lambda process, e: self.publish(process, e.to, e.body, "", e.traceparent),
            fx.Request: self._on_request,
            fx.Gather: self._on_gather,
            fx.Subscribe: self._on_subscribe,
            fx.Unsubscribe: self._on_unsubscribe,
            fx.WatchKeys: self._on_watch,
            fx.PutKey: lambda process, e: self._on_write(process, e, e.value),
            fx.DeleteKey: lambda process, e: self._on_write(process, e, None),
            fx.StartTimer: self._on_start_timer,
            fx.CancelTimer: lambda process, e: process.timers.pop(e.name, None),
            fx.Log: lambda process, e: self._telemetry.log(process.name, e),
            fx.RecordSpan: lambda process, e: self._telemetry.span(process.name, e),
            fx.Stop: self._on_stop,
        }

    def publish(self, process: SimProcess, subject: str, body: Body, reply: str = "", traceparent: str = "") -> bool:
        if process.access is not None:
            process.access.check_publish(process.name, subject)
        node = process.node
        if not node.connected:
            self._sim.count("dropped")
            return False
        content: Body | bytes = body
        if self._verify:
            content = encode(body)
            if len(content) > PAYLOAD_BYTES_MAX:
                self._too_large(process, reply, len(content))
                return True
        message = Message(content, subject, process.name, reply, traceparent)
        queue, link = self._queue, node.up
        if not link.faulty:
            queue.at(link.arrival(queue.now_ns), self._at_server, node, node.connection, message)
            return True
        for arrival_ns in link.arrivals(queue.now_ns):
            queue.at(arrival_ns, self._at_server, node, node.connection, message)
        return True

    def _too_large(self, process: SimProcess, reply: str, size: int) -> None:
        """Not sent; a request is answered in its receiver's place, as on NATS."""
        self._sim.count("too_large")
        question = self.close(reply)
        if isinstance(question, SimRequest):
            refusal = ErrorReply(reason="malformed", detail=f"too_large: {size} bytes")
            self._sim.deliver(process, Message(Replied(correlation=question.correlation, body=refusal)))
        elif question is not None:
            self._sim.deliver(process, question.on_timeout())

    def _at_server(self, node: SimNode, connection: int, message: Message) -> None:
        server = self._sim.nats
        if server.up and not node.partitioned and connection == node.connection:
            server.route(message)
        else:
            server.lost += 1

    def _ask(self, process: SimProcess, question: PendingReply, timeout_ns: int) -> str:
        self._questions += 1
        reply = f"{process.inbox}{self._questions}"
        self._asked[reply] = (process, question)
        process.questions[reply] = question
        self._queue.at(self._queue.now_ns + timeout_ns, self._on_timeout, reply)
        return reply

    def asker(self, reply: str) -> SimProcess | None:
        """Return the process that waits for an answer on that subject; None if none waits any more."""
        asked = self._asked.get(reply)
        return None if asked is None else asked[0]

    def answered(self, reply: str, content: Any, sender: str, traceparent: str) -> None:
        """An answer reached the asker's process; one too many is dropped."""
        asked = self._asked.get(reply)
        if asked is None:
            self._sim.count("late_reply")
            return
        process, question = asked
        answer: Answer = content
        if type(content) is bytes:
            self._sim.trace_hash ^= crc32(content)
            try:
                answer = decode(content)
            except MalformedMessage as malformed:
                answer = malformed
        message = question.on_answer(answer, sender, traceparent)
        if message is not None:
            self.close(reply)
            self._sim.deliver(process, message)

    def close(self, reply: str) -> PendingReply | None:
        asked = self._asked.pop(reply, None)
        if asked is None:
            return None
        asked[0].questions.pop(reply, None)
        return asked[1]

    def _on_timeout(self, reply: str) -> None:
        process = self.asker(reply)
        question = self.close(reply)
        if process is not None and question is not None:
            self._sim.deliver(process, question.on_timeout())

    def _on_request(self, process: SimProcess, effect: fx.Request) -> None:
        reply = self._ask(process, SimRequest(effect.correlation), effect.timeout_ns)
        if not self.publish(process, effect.subject, effect.body, reply, effect.traceparent):
            self._fail(process, reply)

    def _on_gather(self, process: SimProcess, effect: fx.Gather) -> None:
        question = SimGather(effect.correlation, effect.answers_max, len(effect.subjects))
        reply = self._ask(process, question, effect.timeout_ns)
        sent = [self.publish(process, subject, effect.body, reply, effect.traceparent) for subject in effect.subjects]
        if not all(sent):
            self._fail(process, reply)

    def _fail(self, process: SimProcess, reply: str) -> None:
        question = self.close(reply)
        if question is not None:
            self._sim.deliver(process, question.on_disconnect())

    def _on_write(self, process: SimProcess, effect: fx.PutKey | fx.DeleteKey, value: Body | None) -> None:
        if process.access is not None:
            process.access.check_write(process.name, effect.bucket, effect.key)
        node = process.node
        reply = self._ask(process, SimWrite(effect.correlation), WRITE_TIMEOUT_NS)
        if not node.connected:
            self._fail(process, reply)
            return
        stored = encode(value) if self._verify and value is not None else value
        write = (reply, effect.bucket, effect.key, stored, effect.expected_revision)
        for arrival_ns in node.up.arrivals(self._queue.now_ns):
            self._queue.at(arrival_ns, self._control, node, node.connection, self._sim.nats.write, write)

    def _control(self, node: SimNode, connection: int, act: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self._sim.nats.up and not node.partitioned and connection == node.connection:
            act(*args)
        else:
            self._sim.nats.lost += 1

    def _on_subscribe(self, process: SimProcess, effect: fx.Subscribe) -> None:
        if effect.subject in process.subscriptions:
            return
        if process.access is not None:
            process.access.check_subscribe(process.name, effect.subject)
        subscription = Subscription(process, effect.subject, effect.queue_group)
        process.subscriptions[effect.subject] = subscription
        node = process.node
        if node.connected:  # else the reconnect does it
            arrival_ns = node.up.arrival(self._queue.now_ns)
            self._queue.at(arrival_ns, self._control, node, node.connection, self._add_interest, (subscription,))

    def _add_interest(self, subscription: Subscription) -> None:
        if not subscription.ended:
            self._sim.nats.router.add(subscription)

    def _on_unsubscribe(self, process: SimProcess, effect: fx.Unsubscribe) -> None:
        subscription = process.subscriptions.pop(effect.subject, None)
        if subscription is not None:
            subscription.ended = True
            self._sim.nats.router.remove(subscription)

    def _on_watch(self, process: SimProcess, effect: fx.WatchKeys) -> None:
        watch = SimWatch(process, effect.bucket)
        process.watches.append(watch)
        if process.node.connected:
            self.resync(watch, process.node.connection)

    def resync(self, watch: SimWatch, connection: int) -> None:
        """Has the server tell a watch everything once more."""
        node = watch.process.node
        if not watch.process.alive or connection != node.connection:
            return
        watch.generation += 1
        arrival_ns = node.up.arrival(self._queue.now_ns)
        self._queue.at(arrival_ns, self._control, node, connection, self._sim.nats.watch, (watch, watch.generation))

    def _on_start_timer(self, process: SimProcess, effect: fx.StartTimer) -> None:
        timer = process.timers.get(effect.name)
        if timer is not None and timer[1] <= effect.at_ns:
            timer[0] = effect.at_ns  # the event under way will see that it came too early
            return
        timer = [effect.at_ns, effect.at_ns]
        process.timers[effect.name] = timer
        self._queue.at(effect.at_ns, self._on_timer, process, effect.name, timer)

    def _on_timer(self, process: SimProcess, name: str, timer: list[int]) -> None:
        if not process.alive or process.timers.get(name) is not timer:
            return
        if timer[0] > self._queue.now_ns:
            timer[1] = timer[0]
            self._queue.at(timer[0], self._on_timer, process, name, timer)
            return
        del process.timers[name]
        self._sim.deliver(process, Message(TimerFired(name=name)))

    def _on_stop(self, process: SimProcess, effect: fx.Stop) -> None:
        process.stop_reason = effect.reason
        self._sim.end(process)
