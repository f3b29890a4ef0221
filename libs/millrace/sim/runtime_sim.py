"""Runs actors in virtual time: the counterpart of the live runtime, with a network that can fail.

A scenario adds actors to nodes, schedules faults, and runs the clock::

    simulation = Simulation(seed=7)
    worker = simulation.add(lambda incarnation: WorkerActor(...), node="w0", accepts=(SubmitSequence,))
    simulation.after(2 * SECOND, simulation.faults.kill, worker)
    simulation.run_for(10 * SECOND)

The semantics are those of the live runtime, and one contract suite (tests/contract/bus) holds both to them. Every
random choice comes from the seed: the same seed, scenario and code give the same ``trace_hash``.

- A node is a process: it has one connection, and all its actors lose the bus together.
- Without faults a link keeps order; equal times are ordered by the seed.
- ``verify`` encodes and decodes every message, as the wire does; without it bodies (they are frozen) pass by
  reference.
- An actor that is added or restarted while the bus is away starts when its node reaches the bus.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any
from zlib import crc32

from msgspec.structs import replace

from millrace.actor.effects import Effect
from millrace.actor.ports import NullTelemetry, TelemetrySink
from millrace.contracts.channels import Role
from millrace.contracts.codec import MalformedMessage, decode
from millrace.contracts.message import Body, ErrorReply, Message
from millrace.sim.access import Access
from millrace.sim.checkers import Checker
from millrace.sim.effects_sim import SimEffectExecutor
from millrace.sim.events import EventQueue
from millrace.sim.failure import SimulationFailed
from millrace.sim.faults import Faults
from millrace.sim.links import LinkModel
from millrace.sim.nats import SimNats
from millrace.sim.process import ActorFactory, Handlers, SimActor, SimNode, SimProcess

MICROSECOND = 1_000
MILLISECOND = 1_000_000
SECOND = 1_000_000_000

#: Where virtual time starts, unix ns: a round number that no actor may depend on.
START_NS = 1_700_000_000 * SECOND

#: Checkers that look at the whole are called this often.
CHECK_NS = 100 * MILLISECOND

#: Deliveries kept for the report of a failure.
TRACE_LENGTH = 60

_MASK = (1 << 64) - 1
_PRIME = 0x100000001B3


class Simulation:
    """Virtual time, nodes, links, one server.

    Attributes:
        queue: The events; ``queue.now_ns`` is the time.
        rng: Source of every random choice of the network.
        counts: What else happened: ``refused``, ``dropped``, ``late_reply``, ... -> how often.
        trace_hash: Order-sensitive hash of all deliveries so far.
        faults: What can be done to the network and to actors.
    """

    def __init__(
        self,
        seed: int,
        *,
        verify: bool = True,
        link: LinkModel | None = None,
        telemetry: TelemetrySink | None = None,
        invariants_every: int = 1,
        cluster: str = "",
    ) -> None:
        """Makes an empty network.

        Args:
            invariants_every: An actor's invariants are checked after each n-th message; 0 for never. Of actors that
                can tell what a message touched (``TouchChecked``) that is checked, and all each 16th time.
            cluster: Enforces the permissions that roles have on this cluster; empty for none.
        """
        self.seed = seed
        self.rng = Random(f"{seed}/network")
        self.queue = EventQueue(Random(f"{seed}/order"), START_NS)
        self.nats = SimNats(self, self.rng)
        self.handled = 0
        self.counts: dict[str, int] = {}
        self.trace_hash = seed & _MASK
        self.actors: dict[str, SimActor] = {}
        self._link = link or LinkModel()
        self.executor = SimEffectExecutor(self, verify=verify, telemetry=telemetry or NullTelemetry())
        self._invariants_every = invariants_every
        self._cluster = cluster
        self._access: dict[Role, Access] = {}
        self._nodes: dict[str, SimNode] = {}
        self.faults = Faults(self, self._nodes)
        self._checkers: list[Checker] = []
        self._on_handled: list[Callable[[SimProcess, Message, list[Effect]], None]] = []  # of those that override it
        self._trace: deque[tuple[int, str, type]] = deque(maxlen=TRACE_LENGTH)

    # Scenario

    @property
    def now_ns(self) -> int:
        """Unix ns of virtual time."""
        return self.queue.now_ns

    def add(
        self,
        factory: ActorFactory,
        *,
        node: str,
        accepts: tuple[type[Body], ...],
        handlers: Callable[[SimProcess], Handlers] | None = None,
        role: Role | None = None,
    ) -> SimActor:
        """Adds an actor and starts it.

        Args:
            factory: Called with the incarnation (now, unix ns) at each start.
            node: Its process; made with the first actor that names it.
            accepts: Wire types that reach it.
            handlers: Called once per incarnation; gives what carries out effects of the service's own.
            role: Whose permissions it has; None for all.
        """
        place = self._nodes.get(node)
        if place is None:
            place = self._nodes[node] = SimNode(node, self._link, self.rng)
            place.connected = self.nats.up
        actor = SimActor(
            factory=factory, node=place, accepts=frozenset(accepts), handlers=handlers, access=self._access_of(role)
        )
        place.actors.append(actor)
        self.start(actor)
        return actor

    def _access_of(self, role: Role | None) -> Access | None:
        if role is None or not self._cluster:
            return None
        if role not in self._access:
            self._access[role] = Access(role, self._cluster)
        return self._access[role]

    def check_with(self, checker: Checker) -> None:
        """Calls a checker from now on, after each message and every CHECK_NS."""
        if not self._checkers:
            self.after(CHECK_NS, self._on_check)
        self._checkers.append(checker)
        if type(checker).on_handled is not Checker.on_handled:
            self._on_handled.append(checker.on_handled)

    def after(self, delay_ns: int, callback: Callable[..., None], *args: Any) -> None:
        """Calls back after a delay: how scenarios schedule load and faults."""
        self.queue.at(self.queue.now_ns + delay_ns, callback, *args)

    def run(self, until_ns: int) -> None:
        """Runs to ``until_ns`` (unix ns of virtual time).

        Raises:
            SimulationFailed: an actor or a checker raised.
        """
        self.queue.run(until_ns)

    def run_for(self, duration_ns: int) -> None:
        self.run(self.queue.now_ns + duration_ns)

    def finish(self) -> None:
        """Checks the end state, and lets the checkers look at it."""
        if self._invariants_every:
            for actor in self.actors.values():
                if actor.process is not None:
                    actor.process.actor.check_invariants()
        for checker in self._checkers:
            checker.on_end(self)

    def publish(self, subject: str, content: Body | bytes, *, sender: str = "outside", reply_to: str = "") -> None:
        """Puts a message on the bus from outside: any body, or bytes that are none."""
        if self.nats.up:
            self.nats.route(Message(content, subject, sender, reply_to))

    def start(self, actor: SimActor) -> None:
        """Starts an actor (again) as a new incarnation, when its node reaches the bus."""
        if actor.process is not None:
            return
        if not actor.node.connected or actor.node.partitioned:
            actor.starting = True
            return
        actor.starting = False
        process = SimProcess(self, actor, self.now_ns)
        actor.process = process
        actor.name = process.name
        self.actors[process.name] = actor
        process.busy = True
        self.executor.carry_out(process, process.actor.start(self.now_ns))
        self._settle(process)

    def end(self, process: SimProcess) -> None:
        process.alive = False
        process.owner.process = None
        process.waiting.clear()
        self.nats.forget(process)
        for subscription in process.subscriptions.values():
            subscription.ended = True
        for reply in list(process.questions):
            self.executor.close(reply)

    # Deliveries

    def arrived(self, process: SimProcess, message: Message) -> None:
        """A message of the bus reached an actor's process."""
        if type(message.body) is bytes:
            self.trace_hash ^= crc32(message.body)
            try:
                message = replace(message, body=decode(message.body))
            except MalformedMessage as malformed:
                self._refuse(process, "malformed", f"{malformed.kind}: {malformed.detail}", message.reply_to)
                return
        if type(message.body) not in process.accepts:
            self._refuse(process, "unexpected", f"{message.body.type_name()} is not taken here", message.reply_to)
            return
        self.deliver(process, message)

    def deliver(self, process: SimProcess, message: Message) -> None:
        """Hands a message over, now or after what is under way."""
        if process.busy:
            process.waiting.append(message)
            return
        process.busy = True
        self._handle(process, message)
        if process.waiting:
            self._settle(process)
        process.busy = False

    def _settle(self, process: SimProcess) -> None:
        while process.waiting:
            self._handle(process, process.waiting.popleft())
        process.busy = False

    def _handle(self, process: SimProcess, message: Message) -> None:
        if not process.alive:
            return
        now_ns = self.queue.now_ns
        kind = type(message.body)
        code = process.codes.get(kind) or self._code(process, kind)
        self.trace_hash = ((self.trace_hash ^ now_ns ^ code) * _PRIME) & _MASK
        self.handled += 1
        self._trace.append((now_ns, process.name, kind))
        try:
            effects = process.actor.handle(message, now_ns)
            if self._invariants_every and not self.handled % self._invariants_every:
                process.check(message.body)
            for look in self._on_handled:
                look(process, message, effects)
            if effects:
                self.executor.carry_out(process, effects)
        except SimulationFailed:
            raise
        except Exception as bug:
            raise self._failure(process, message, bug) from bug

    def _code(self, process: SimProcess, kind: type) -> int:
        code = process.codes[kind] = crc32(f"{process.name} {kind.__name__}".encode())
        return code

    def _failure(self, process: SimProcess, message: Message, bug: Exception) -> SimulationFailed:
        last = "\n".join(
            f"  {(at - START_NS) / 1e6:12.3f} ms  {who:<20} {what.__name__}" for at, who, what in self._trace
        )
        when_ms = (self.now_ns - START_NS) / 1e6
        what = f"{process.name} handling {message}: {bug!r}{_where(bug)}"
        return SimulationFailed(f"seed {self.seed}, {when_ms:.3f} ms, {what}\nlast deliveries:\n{last}")

    def _refuse(self, process: SimProcess, reason: str, detail: str, reply: str) -> None:
        self.count("refused")
        if reply:
            self.executor.publish(process, reply, ErrorReply(reason=reason, detail=detail))

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def _on_check(self) -> None:
        for checker in self._checkers:
            checker.on_interval(self)
        self.after(CHECK_NS, self._on_check)


def _where(bug: Exception) -> str:
    frames = traceback.extract_tb(bug.__traceback__)
    return f", raised at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
