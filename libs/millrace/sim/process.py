"""Contents of a simulated machine: nodes with their connection, actors, and each actor's incarnations."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from millrace.actor.actor import Actor, TouchChecked
from millrace.actor.effects import Effect
from millrace.contracts.codec import decode
from millrace.contracts.local import BucketReady, KeyChanged
from millrace.contracts.message import Body, Message
from millrace.contracts.permissions import INBOX, inbox_of
from millrace.sim.link import SimLink
from millrace.sim.links import LinkModel

if TYPE_CHECKING:
    from millrace.sim.access import Access
    from millrace.sim.kv_store import Entry
    from millrace.sim.pending_replies import PendingReply
    from millrace.sim.routing import Subscription
    from millrace.sim.runtime_sim import Simulation

#: Builds an actor for an incarnation (its start, unix ns).
ActorFactory = Callable[[int], Actor]
Handlers = Mapping[type[Effect], Callable[[Any], None]]

#: Of an actor that is checked in parts, all is checked after so many messages.
FULL_CHECK_EVERY = 16


class SimNode:
    """One process on the network: its connection to the bus, and the actors that it hosts.

    Attributes:
        connected: What the runtime believes.
        partitioned: True while nothing passes, in either direction.
        connection: Number of the present connection; what was under way to an earlier one is lost.
    """

    __slots__ = ("actors", "connected", "connection", "down", "name", "partitioned", "up")

    def __init__(self, name: str, model: LinkModel, rng: Random) -> None:
        self.name = name
        self.up = SimLink(model, rng)
        self.down = SimLink(model, rng)
        self.connected = True
        self.partitioned = False
        self.connection = 0
        self.actors: list[SimActor] = []

    def processes(self) -> list[SimProcess]:
        """Actors that run."""
        return [actor.process for actor in self.actors if actor.process is not None]


class SimActor:
    """An actor over all its incarnations, as a scenario holds it."""

    def __init__(
        self,
        *,
        factory: ActorFactory,
        node: SimNode,
        accepts: frozenset[type[Body]],
        handlers: Callable[[SimProcess], Handlers] | None,
        access: Access | None = None,
    ) -> None:
        self.factory = factory
        self.node = node
        self.accepts = accepts
        self.handlers = handlers
        self.access = access
        self.process: SimProcess | None = None
        self.starting = False
        self.name = ""

    @property
    def actor(self) -> Actor:
        """The running state machine.

        Raises:
            LookupError: it does not run.
        """
        if self.process is None:
            raise LookupError(f"{self.name} does not run")
        return self.process.actor


@dataclass(slots=True, eq=False)
class SimWatch:
    """One WatchKeys effect: what its actor was given."""

    process: SimProcess
    bucket: str
    known: dict[str, int] = field(default_factory=dict)
    generation: int = 0

    def news(self, key: str, entry: Entry) -> list[Body]:
        """Return the notifications about one key's state."""
        if entry.value is None:
            if self.known.pop(key, None) is None:
                return []
        else:
            self.known[key] = entry.revision
        value = decode(entry.value) if isinstance(entry.value, bytes) else entry.value
        return [KeyChanged(bucket=self.bucket, key=key, value=value, revision=entry.revision)]

    def news_of_all(self, entries: dict[str, Entry]) -> list[Body]:
        """Return the notifications for a watch that (re)starts: every key, keys that are gone, then BucketReady."""
        messages: list[Body] = []
        for key, entry in entries.items():
            messages += self.news(key, entry)
        for key in [key for key in self.known if key not in entries]:
            revision = self.known.pop(key)
            messages.append(KeyChanged(bucket=self.bucket, key=key, value=None, revision=revision))
        return [*messages, BucketReady(bucket=self.bucket)]


class SimProcess:
    """One incarnation of an actor. Handlers of a service's own effects get it to deliver results and to wait.

    Attributes:
        incarnation: Start, unix ns of virtual time.
        alive: False once it was killed or returned Stop; then nothing reaches it any more.
        stop_reason: Set by Stop.
    """

    def __init__(self, simulation: Simulation, owner: SimActor, incarnation: int) -> None:
        self.simulation = simulation
        self.owner = owner
        self.node = owner.node
        self.accepts = owner.accepts
        self.access = owner.access
        self.incarnation = incarnation
        self.actor = owner.factory(incarnation)
        self.name = self.actor.name
        self.inbox = f"{inbox_of(owner.access.role) if owner.access is not None else INBOX}{self.name}."
        self.alive = True
        self.busy = False
        self.stop_reason: str | None = None
        self.waiting: deque[Message] = deque()
        #: name -> [due ns, ns of the event that will look at it]
        self.timers: dict[str, list[int]] = {}
        self.subscriptions: dict[str, Subscription] = {}
        self.watches: list[SimWatch] = []
        self.questions: dict[str, PendingReply] = {}
        self.codes: dict[type, int] = {}  # share of the trace hash of what it handles, by kind
        self._checks = 0
        self._check_touched = self.actor.check_touched if isinstance(self.actor, TouchChecked) else None
        self.handlers: Handlers = owner.handlers(self) if owner.handlers is not None else {}

    @property
    def now_ns(self) -> int:
        return self.simulation.now_ns

    def check(self, body: Body) -> None:
        """Checks the actor's invariants after a message: all, or what the message touched."""
        self._checks += 1
        if self._check_touched is None or not self._checks % FULL_CHECK_EVERY:
            self.actor.check_invariants()
        else:
            self._check_touched(body)

    def deliver(self, body: Body, *, traceparent: str = "") -> None:
        """Hands over a local message, at once (or after what is under way)."""
        self.simulation.deliver(self, Message(body, traceparent=traceparent))

    def after(self, delay_ns: int, callback: Callable[..., None], *args: Any) -> None:
        """Calls back after ``delay_ns`` unless this incarnation has ended by then."""
        self.simulation.after(delay_ns, self._call, callback, args)

    def _call(self, callback: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.alive:
            callback(*args)
