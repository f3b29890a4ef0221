"""Fault injection: killed actors, partitions, a server that is gone for a while."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.contracts.local import BusDisconnected, BusReconnected
from millrace.contracts.message import Message
from millrace.sim.links import LinkModel
from millrace.sim.process import SimActor, SimNode

if TYPE_CHECKING:
    from millrace.sim.runtime_sim import Simulation

#: A client notices a dead server at once (the connection is reset): within this time, ns.
NOTICE_NS_MAX = 5_000_000

#: A client comes back after a pause between these, ns, once there is a server again.
RECONNECT_NS = (20_000_000, 200_000_000)

#: A silent partition is noticed by missing answers to pings after this long, ns.
PARTITION_NOTICE_NS = 15_000_000_000

#: A watch that missed something while its node was partitioned starts over within this time, ns (heartbeats).
WATCH_RESYNC_NS = 2_000_000_000


class Faults:
    """Does harm to a simulation and heals it. Doing it twice is no error."""

    def __init__(self, simulation: Simulation, nodes: dict[str, SimNode]) -> None:
        self._sim = simulation
        self._nodes = nodes

    def kill(self, actor: SimActor) -> None:
        """Ends an actor at once, as ``kill -9`` does; what it has sent is under way. Killing twice is no error."""
        actor.starting = False
        if actor.process is not None:
            self._sim.end(actor.process)

    def partition(self, node: str) -> None:
        """Lets nothing pass between a node and the bus. Noticed only after PARTITION_NOTICE_NS."""
        place = self._nodes[node]
        if not place.partitioned:
            place.partitioned = True
            self._sim.after(PARTITION_NOTICE_NS, self._notice_partition, place, place.connection)

    def heal(self, node: str) -> None:
        """Ends a partition. Healing what is whole is no error."""
        place = self._nodes[node]
        if not place.partitioned:
            return
        place.partitioned = False
        if place.connected:
            for process in place.processes():
                for subscription in process.subscriptions.values():
                    self._sim.nats.router.add(subscription)
                for watch in process.watches:
                    delay_ns = self._sim.rng.randrange(WATCH_RESYNC_NS)
                    self._sim.after(delay_ns, self._sim.executor.resync, watch, place.connection)
            self._sim.after(self._sim.rng.randrange(*RECONNECT_NS), self._start_waiting, place)
        else:
            self._sim.after(self._sim.rng.randrange(*RECONNECT_NS), self._reconnect, place)

    def change_link(self, node: str, model: LinkModel) -> None:
        """Makes both directions of a node's connection behave like ``model``."""
        self._nodes[node].up.change(model)
        self._nodes[node].down.change(model)

    def stop_bus(self, *, keep_store: bool = True) -> None:
        if not self._sim.nats.up:
            return
        self._sim.nats.stop(keep_store=keep_store)
        for node in self._nodes.values():
            self._sim.after(self._sim.rng.randrange(NOTICE_NS_MAX), self._disconnect, node)

    def start_bus(self) -> None:
        """Starts the server again; clients come back one by one."""
        self._sim.nats.up = True
        for node in self._nodes.values():
            self._sim.after(NOTICE_NS_MAX + self._sim.rng.randrange(*RECONNECT_NS), self._reconnect, node)

    def _notice_partition(self, node: SimNode, connection: int) -> None:
        if node.partitioned and node.connection == connection:
            self._disconnect(node)

    def _disconnect(self, node: SimNode) -> None:
        if not node.connected:
            return
        node.connected = False
        node.connection += 1
        for process in node.processes():
            self._sim.nats.forget(process)
            for reply in list(process.questions):
                question = self._sim.executor.close(reply)
                if question is not None:
                    self._sim.deliver(process, question.on_disconnect())
            self._sim.deliver(process, Message(BusDisconnected()))

    def _reconnect(self, node: SimNode) -> None:
        if node.connected or node.partitioned or not self._sim.nats.up:
            return
        node.connected = True
        for process in node.processes():
            for subscription in process.subscriptions.values():
                self._sim.nats.router.add(subscription)
            for watch in process.watches:
                self._sim.executor.resync(watch, node.connection)
            self._sim.deliver(process, Message(BusReconnected()))
        self._start_waiting(node)

    def _start_waiting(self, node: SimNode) -> None:
        """Starts what was started while the bus was out of reach."""
        for actor in node.actors:
            if actor.starting:
                self._sim.start(actor)
