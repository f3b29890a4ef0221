"""The simulated NATS server: interest, routing, no-responders, and the KV store with its watches."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from millrace.contracts.channels import Role
from millrace.contracts.message import Message
from millrace.contracts.permissions import INBOX
from millrace.contracts.status import PresenceState, ServicePresence
from millrace.sim.kv_store import Entry, SimStore
from millrace.sim.pending_replies import NoResponders, WriteResult
from millrace.sim.process import SimProcess, SimWatch
from millrace.sim.routing import Router, Subscription

if TYPE_CHECKING:
    from millrace.sim.runtime_sim import Simulation

_ALIVE = PresenceState.ALIVE


class SimNats:
    """One server. While it is down, everything that reaches it is lost.

    Attributes:
        lost: Messages that arrived nowhere: server down, link broken, receiver gone.
        write_ns: Time that its disk takes for a write; in order.
        quiet: Whether it keeps to itself what no actor of a simulation acts on: presences of workers that live, which
            summaries tell too, and keys that are put again as they are. Of a thousand instances that is a sixth of all
            messages.
    """

    def __init__(self, simulation: Simulation, rng: Random) -> None:
        self.up = True
        self.lost = 0
        self.write_ns = 0
        self.quiet = False
        self._written_ns = 0
        self.router = Router(rng)
        self.store = SimStore(simulation.after, self._on_change)
        self._sim = simulation
        self._watches: dict[SimWatch, int] = {}

    def stop(self, *, keep_store: bool) -> None:
        """Ends: interest is gone, and with ``keep_store`` False so are the keys."""
        self.up = False
        self.router = Router(self._sim.rng)
        self._watches.clear()
        if not keep_store:
            self.store.wipe()

    def route(self, message: Message) -> None:
        """Passes a message on to whoever wants it. Its body may be bytes."""
        subject, body = message.subject, message.body
        if self.quiet and type(body) is ServicePresence and body.role == Role.WORKER and body.state is _ALIVE:
            return
        if subject.startswith(INBOX):
            self._to_inbox(subject, body, message.sender, message.traceparent)
            return
        receivers = self.router.receivers(subject)
        if not receivers and message.reply_to:
            self._to_inbox(message.reply_to, NoResponders(), "", "")
        sim = self._sim
        now_ns, at = sim.queue.now_ns, sim.queue.at
        for subscription in receivers:
            node = subscription.process.node
            link = node.down
            if not link.faulty:
                at(link.arrival(now_ns), self._at_receiver, subscription, node.connection, message)
                continue
            for arrival_ns in link.arrivals(now_ns):
                at(arrival_ns, self._at_receiver, subscription, node.connection, message)

    def forget(self, process: SimProcess) -> None:
        """An actor's connection ended."""
        for subscription in process.subscriptions.values():
            self.router.remove(subscription)
        for watch in process.watches:
            self._watches.pop(watch, None)

    def _at_receiver(self, subscription: Subscription, connection: int, message: Message) -> None:
        process = subscription.process
        node = process.node
        if subscription.ended or not process.alive or node.partitioned or connection != node.connection:
            self.lost += 1
            return
        self._sim.arrived(process, message)

    def _to_inbox(self, reply: str, content: Any, sender: str, traceparent: str) -> None:
        process = self._sim.executor.asker(reply)
        if process is None:
            self._sim.count("late_reply")
            return
        node = process.node
        for arrival_ns in node.down.arrivals(self._sim.now_ns):
            self._sim.queue.at(
                arrival_ns, self._at_asker, process, node.connection, (reply, content, sender, traceparent)
            )

    def _at_asker(self, process: SimProcess, connection: int, answer: tuple[str, Any, str, str]) -> None:
        node = process.node
        if not process.alive or node.partitioned or connection != node.connection:
            self.lost += 1
            return
        self._sim.executor.answered(*answer)

    # The store

    def write(self, reply: str, bucket: str, key: str, value: Any, expected: int | None) -> None:
        """Carries out a write and acknowledges it, when the disk has it."""
        queue = self._sim.queue
        if not self.write_ns and self._written_ns < queue.now_ns:
            self._write(reply, bucket, key, value, expected)
            return
        self._written_ns = max(self._written_ns + 1, queue.now_ns + self.write_ns)
        queue.at(self._written_ns, self._write, reply, bucket, key, value, expected)

    def _write(self, reply: str, bucket: str, key: str, value: Any, expected: int | None) -> None:
        self._to_inbox(reply, WriteResult(self.store.write(bucket, key, value, expected)), "", "")

    def watch(self, watch: SimWatch, generation: int) -> None:
        """Sends what stands, then each change."""
        self._watches[watch] = generation
        self._send(watch, generation, watch.news_of_all, dict(self.store.entries(watch.bucket)))

    def _on_change(self, bucket: str, key: str, entry: Entry, before: Entry | None) -> None:
        if self.quiet and before is not None and before.value == entry.value:
            return
        for watch, generation in list(self._watches.items()):
            if self.up and watch.bucket == bucket:
                self._send(watch, generation, watch.news, key, entry)

    def _send(self, watch: SimWatch, generation: int, news: Any, *args: Any) -> None:
        node = watch.process.node
        arrival_ns = node.down.arrival(self._sim.now_ns)  # never lost alone: a gap makes a live watch start over
        self._sim.queue.at(arrival_ns, self._at_watcher, watch, (generation, node.connection), news, args)

    def _at_watcher(self, watch: SimWatch, sent: tuple[int, int], news: Any, args: tuple[Any, ...]) -> None:
        process = watch.process
        if process.alive and not process.node.partitioned and sent == (watch.generation, process.node.connection):
            for body in news(*args):
                process.deliver(body)
