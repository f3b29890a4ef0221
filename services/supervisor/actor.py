"""The supervisor: keeps the processes of one machine's cluster running, and takes them down in order.

Owns: which child runs, its pid, its back-off. nats-server is a child as well; while it is down the bus effects of
this actor are lost,
which is why nothing here waits for an answer from the bus.

| message in | change | messages out |
|---|---|---|
| ChildStarted | pid known | |
| ChildReady, ServicePresence(ALIVE) | READY once every actor of the child is there | StartChild for those that waited
for it |
| ChildExited | BACKING_OFF; while stopping: STOPPED | ServicePresence(DEAD) for its actors, StartTimer(restart/...) |
| TimerFired(restart/NAME) | STARTING | StartChild |
| TimerFired(kill/NAME) | | SignalChild(SIGKILL) |
| TimerFired(tick) | children healthy for a while lose their failures | ServicePresence, next timer |
| StopRequested | first: STOPPING in stop_order; again: everything is killed | SignalChild, in the end Stop |

Invariants: a child has at most one process; nothing is started once stopping began.
Overload: back-off doubles from BACKOFF_NS to BACKOFF_NS_MAX, so a child that cannot run costs a start every few
seconds.
"""

from __future__ import annotations

import signal
from typing import Any

from millrace.actor.effects import CancelTimer, Effect, Log, Publish, StartTimer, Stop, Subscribe
from millrace.contracts.catalog import Role
from millrace.contracts.local import StopRequested, TimerFired
from millrace.contracts.message import Message
from millrace.contracts.status import PresenceState, ServicePresence
from millrace.contracts.subjects import Subjects

from services.supervisor.config import ChildSpec
from services.supervisor.effects import ChildExited, ChildReady, ChildStarted, SignalChild, StartChild
from services.supervisor.state import Child, ChildState

TICK_NS = 1_000_000_000

#: First pause before a child is started again: long enough for a port to be free, short enough for "back in under 5 s".
BACKOFF_NS = 200_000_000
BACKOFF_NS_MAX = 5_000_000_000

#: A child that was ready for this long has recovered; its next failure begins with the first pause again.
HEALTHY_NS = 10_000_000_000

ACCEPTS = (ServicePresence,)


class SupervisorActor:
    """Runs children. nats-server is given as already started, because without it no actor has a bus."""

    def __init__(self, *, name: str, cluster: str, incarnation: int, children: list[ChildSpec]) -> None:
        self.name = name
        self._subjects = Subjects(cluster)
        self._incarnation = incarnation
        self._children = {spec.name: Child(spec=spec) for spec in children}
        self._stopping = False

    def start(self, now_ns: int) -> list[Effect]:
        """Listens to presences and starts every child that waits for none."""
        effects: list[Effect] = [
            Subscribe(subject=self._subjects.presences()),
            StartTimer(name="tick", at_ns=now_ns + TICK_NS),
        ]
        return effects + self._start_waiting(now_ns)

    def adopt(self, name: str, pid: int, now_ns: int) -> None:
        """Takes over a process that the shell started before this actor could (nats-server)."""
        child = self._children[name]
        child.state, child.pid, child.started_ns = ChildState.READY, pid, now_ns

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        """See the table above."""
        match message.body:
            case ServicePresence() as body:
                return self._on_presence(body, now_ns)
            case ChildStarted() as body:
                return self._on_started(body)
            case ChildReady() as body:
                return self._on_ready(self._children[body.name], now_ns)
            case ChildExited() as body:
                return self._on_exited(body, now_ns)
            case TimerFired() as body:
                return self._on_timer(body.name, now_ns)
            case StopRequested():
                return self._on_stop(now_ns)
            case _:
                return []

    def _on_presence(self, body: ServicePresence, now_ns: int) -> list[Effect]:
        child = next((c for c in self._children.values() if body.name in c.spec.presences), None)
        if child is None or child.state is not ChildState.STARTING or body.state is not PresenceState.ALIVE:
            return []
        if body.role != child.spec.role or body.incarnation < child.started_ns:
            return []  # a straggler of the process before
        child.present.add(body.name)
        return self._on_ready(child, now_ns) if len(child.present) == len(child.spec.presences) else []

    def _on_started(self, body: ChildStarted) -> list[Effect]:
        child = self._children[body.name]
        child.pid = body.pid
        if self._stopping:
            return [SignalChild(name=body.name, pid=body.pid, signal=signal.SIGKILL)]
        return []

    def _on_ready(self, child: Child, now_ns: int) -> list[Effect]:
        if child.state is not ChildState.STARTING:
            return []
        child.state = ChildState.READY
        took_ms = (now_ns - child.started_ns) // 1_000_000
        log = Log(level="info", event="child_ready", fields={"child": child.spec.name, "took_ms": took_ms})
        return [log, *self._start_waiting(now_ns)]

    def _on_exited(self, body: ChildExited, now_ns: int) -> list[Effect]:
        child = self._children[body.name]
        was_ready_ns = now_ns - child.started_ns if child.state is ChildState.READY else 0
        child.pid, child.present = 0, set()
        child.last_exit = body.detail or _exit_text(body.status)
        dead = [self._dead(child.spec.role, name, now_ns) for name in child.spec.presences]
        if self._stopping:
            child.state = ChildState.STOPPED
            return [*dead, CancelTimer(name=f"kill/{body.name}"), *self._stop_next(now_ns)]
        child.failures = 0 if was_ready_ns > HEALTHY_NS else child.failures
        pause_ns = min(BACKOFF_NS << min(child.failures, 10), BACKOFF_NS_MAX)
        child.failures += 1
        child.state = ChildState.BACKING_OFF
        fields = {"child": body.name, "exit": child.last_exit, "again_in_ms": pause_ns // 1_000_000}
        return [
            *dead,
            Log(level="warning", event="child_exited", fields=fields),
            StartTimer(name=f"restart/{body.name}", at_ns=now_ns + pause_ns),
        ]

    def _on_timer(self, timer: str, now_ns: int) -> list[Effect]:
        kind, _, name = timer.partition("/")
        if kind == "tick":
            return [self._presence(now_ns), StartTimer(name="tick", at_ns=now_ns + TICK_NS)]
        child = self._children[name]
        if kind == "restart" and child.state is ChildState.BACKING_OFF:
            child.restarts += 1
            return self._start_child(child, now_ns)
        if kind == "kill" and child.pid:
            return [SignalChild(name=name, pid=child.pid, signal=signal.SIGKILL)]
        return []

    def _on_stop(self, now_ns: int) -> list[Effect]:
        if self._stopping:  # asked twice: no more patience
            alive = [child for child in self._children.values() if child.pid]
            return [SignalChild(name=c.spec.name, pid=c.pid, signal=signal.SIGKILL) for c in alive]
        self._stopping = True
        for child in self._children.values():
            if child.state in (ChildState.WAITING, ChildState.BACKING_OFF):
                child.state = ChildState.STOPPED
        return self._stop_next(now_ns)

    def _stop_next(self, now_ns: int) -> list[Effect]:
        """Asks the lowest order that still runs to stop; ends this actor when nothing runs."""
        running = [c for c in self._children.values() if c.state is not ChildState.STOPPED]
        if not running:
            return [Stop(reason="every child has stopped")]
        order = min(child.spec.stop_order for child in running)
        effects: list[Effect] = []
        for child in running:
            if child.spec.stop_order == order and child.state is not ChildState.STOPPING:
                child.state = ChildState.STOPPING
                kill_ns = now_ns + child.spec.stop_limit_ms * 1_000_000
                effects.append(StartTimer(name=f"kill/{child.spec.name}", at_ns=kill_ns))
                if child.pid:
                    effects.append(SignalChild(name=child.spec.name, pid=child.pid, signal=signal.SIGTERM))
        return effects

    def _start_waiting(self, now_ns: int) -> list[Effect]:
        if self._stopping:
            return []
        return [
            effect
            for child in self._children.values()
            if child.state is ChildState.WAITING and self._may_start(child)
            for effect in self._start_child(child, now_ns)
        ]

    def _may_start(self, child: Child) -> bool:
        return not child.spec.after or self._children[child.spec.after].state is ChildState.READY

    def _start_child(self, child: Child, now_ns: int) -> list[Effect]:
        if not self._may_start(child):
            child.state = ChildState.WAITING
            return []
        child.state, child.started_ns = ChildState.STARTING, now_ns
        return [StartChild(spec=child.spec)]

    def _dead(self, role: str, name: str, now_ns: int) -> Publish:
        body = ServicePresence(role=role, name=name, incarnation=0, at_ns=now_ns, state=PresenceState.DEAD)
        return Publish(subject=self._subjects.presence(role, name), body=body)

    def _presence(self, now_ns: int) -> Publish:
        body = ServicePresence(role=Role.SUPERVISOR, name=self.name, incarnation=self._incarnation, at_ns=now_ns)
        return Publish(subject=self._subjects.presence(Role.SUPERVISOR, self.name), body=body)

    def snapshot(self) -> dict[str, Any]:
        """Every child's state, pid, restarts and last end."""
        return {
            child.spec.name: {
                "role": child.spec.role,
                "state": str(child.state),
                "pid": child.pid,
                "restarts": child.restarts,
                "last_exit": child.last_exit,
                "present": len(child.present),
                "expected": len(child.spec.presences),
            }
            for child in self._children.values()
        }

    def check_invariants(self) -> None:
        """A child without a process is not ready; nothing waits to start while stopping."""
        for child in self._children.values():
            assert child.pid or child.state is not ChildState.READY, child
            assert not (self._stopping and child.state in (ChildState.WAITING, ChildState.BACKING_OFF)), child


def _exit_text(status: int) -> str:
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    return f"exit status {status}"
