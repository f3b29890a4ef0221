"""The supervisor: keeps the processes of one machine's cluster running, and takes them down in order.

Owns: which child runs, its pid, its back-off. nats-server is a child as well; while it is down the bus effects of
this actor are lost,
which is why nothing here waits for an answer from the bus.

| message in | change | messages out |
|---|---|---|
| ChildStarted | pid known | |
| ServicePresence(ALIVE) | READY once every actor of the child is there | |
| ChildExited | BACKING_OFF; while stopping: STOPPED | ServicePresence(DEAD) for its actors, StartTimer(restart/...) |
| TimerFired(restart/NAME) | STARTING | StartChild |
| TimerFired(kill/NAME) | | SignalChild(SIGKILL) |
| TimerFired(tick) | children healthy for a while lose their failures | ServicePresence, DrainWorker again, next timer |
| StartInstance | a spare worker, or the one that is named, becomes a child | InstanceOrdered or OrderRefused,
StartChild |
| StopInstance | RETIRING; forgotten once its process has ended | InstanceOrdered or OrderRefused, DrainWorker |
| TimerFired(retire/NAME) | should be gone by now | SignalChild(SIGTERM) |
| UpdateCluster | processes that it names are started, ended, or asked to end and start anew |
ReadSpecification, or ClusterCompared, StartChild, SignalChild |
| SpecificationRead | in force from now on, where it shall be taken | ClusterCompared |
| MachineChecked | trouble that status shows; a store that stays ill | SignalChild(nats, SIGKILL) |
| MachineChecked(renewed) | | SignalChild(nats, SIGHUP), which reads its certificate |
| StopRequested | where it leaves a cluster: workers RETIRING first; then STOPPING in stop_order; again: everything is
killed | DrainWorker, SignalChild, in the end Stop |

Invariants: a child has at most one process; nothing is started once stopping began; a name is free again only after
its process has ended, so there are never more instances than workers in the roster.
Overload: back-off doubles from BACKOFF_NS to BACKOFF_NS_MAX, so a child that cannot run costs a start every few
seconds.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

from millrace.actor.effects import CancelTimer, Effect, Log, Publish, StartTimer, Stop, Subscribe, Unsubscribe, reply
from millrace.contracts.catalog import Role
from millrace.contracts.coordinator import OrderRefusal, OrderRefused
from millrace.contracts.local import StopRequested, TimerFired
from millrace.contracts.message import Message
from millrace.contracts.provisioner import (
    ClusterCompared,
    ComparedProcess,
    InstanceOrdered,
    StartInstance,
    StopInstance,
    UpdateCluster,
)
from millrace.contracts.status import DrainedInstance, PresenceState, ServicePresence
from millrace.contracts.subjects import Subjects
from millrace.contracts.worker import DrainWorker
from millrace.membership.heartbeat import Heartbeat

from services.supervisor.comparing import compared
from services.supervisor.config import ChildSpec, SupervisorConfig
from services.supervisor.effects import (
    ChildExited,
    ChildStarted,
    MachineChecked,
    ReadSpecification,
    SignalChild,
    SpecificationRead,
    StartChild,
)
from services.supervisor.roster import Roster
from services.supervisor.state import Child, ChildState

TICK_NS = 1_000_000_000

#: First pause before a child is started again: long enough for a port to be free, short enough for "back in under 5 s".
BACKOFF_NS = 200_000_000
BACKOFF_NS_MAX = 5_000_000_000

#: A child that was ready for this long has recovered; its next failure begins with the first pause again. Pauses are
#: for children that cannot run: one that is killed every few seconds while it serves must be back as soon each time.
HEALTHY_NS = 1_000_000_000

#: After its drain limit a retiring worker lingers for a second and leaves; then it is asked by signal as well.
RETIRE_GRACE_NS = 3_000_000_000

#: When its machine leaves a cluster a worker gets so long to move what it has.
LEAVE_DRAIN_MS = 60_000

#: A worker that drained when it was taken over gets so long anew.
ADOPTED_DRAIN_NS = 30_000_000_000

#: A store that is ill for this long does not get well by itself: nats-server is started anew.
STORE_PATIENCE_NS = 6_000_000_000

#: Time that a new nats-server gets before it is started anew once more; streams pause each time.
STORE_AGAIN_NS = 30_000_000_000

ACCEPTS = (ServicePresence, StartInstance, StopInstance, UpdateCluster)


class SupervisorActor:
    """Runs children. nats-server is given as already started, because without it no actor has a bus."""

    def __init__(
        self,
        *,
        name: str,
        cluster: str,
        incarnation: int,
        children: list[ChildSpec],
        roster: Roster | None = None,
        spares: Sequence[ChildSpec] = (),
        leaves: bool = False,
    ) -> None:
        """Args:
        leaves: Whether workers drain before anything stops.
        roster: What provisioning may start and stop here; without one it may do nothing.
        spares: Workers beyond the children that a policy may run.
        """
        self.name = name
        self._subjects = Subjects(cluster)
        self._heartbeat = Heartbeat(
            subjects=self._subjects,
            role=Role.SUPERVISOR,
            name=name,
            incarnation=incarnation,
            host=roster.host if roster is not None else "",
        )
        self._children = {spec.name: Child(spec=spec) for spec in children}
        self._roster = roster
        self._wanted = {spec.name: spec for spec in children}
        self._spares = list(spares)
        self._drained: dict[str, ChildSpec] = {}
        self._stopping, self._leaves, self._leaving = False, leaves, False
        self._trouble = ""
        self._listens = True
        # By server: since when it is ill, why, how often seen so, whether its disk has room.
        self._store_ill: dict[str, tuple[int, str, int, bool]] = {}
        self._store_again_ns: dict[str, int] = {}

    def start(self, now_ns: int) -> list[Effect]:
        effects: list[Effect] = [
            Subscribe(subject=self._subjects.presences()),
            StartTimer(name="tick", at_ns=now_ns + TICK_NS),
        ]
        if self._roster is not None:
            effects.append(Subscribe(subject=self._subjects.provision(self._roster.host, "*")))
        for child in self._children.values():
            if child.state is ChildState.RETIRING and child.spec.role == Role.WORKER:
                effects += self._retire(child, ADOPTED_DRAIN_NS // 1_000_000, now_ns)
        return effects + self._start_waiting(now_ns)

    def adopt(self, name: str, pid: int, now_ns: int, spec: ChildSpec | None = None, *, retiring: bool = False) -> None:
        """Takes over a process that the shell started before this actor could (nats-server), or an earlier supervisor.

        Args:
            spec: By which it was started; None for the present one.
            retiring: Whether it is not started again.
        """
        child = self._children.setdefault(name, Child(spec=spec or self._wanted[name]))
        child.spec = spec or child.spec
        child.state = ChildState.RETIRING if retiring else ChildState.READY
        child.pid, child.started_ns, child.ready_ns = pid, now_ns, now_ns
        child.drained_ns = now_ns + ADOPTED_DRAIN_NS if retiring else 0

    def running(self) -> list[tuple[ChildSpec, int, bool]]:
        """Each process: how it was started, its pid, and whether it is not started again."""
        children = self._children.values()
        return [(child.spec, child.pid, child.state is ChildState.RETIRING) for child in children if child.pid]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        match message.body:
            case ServicePresence() as body:
                return self._on_presence(body, now_ns)
            case ChildStarted() as body:
                return self._on_started(body, now_ns)
            case ChildExited() as body:
                return self._on_exited(body, now_ns)
            case MachineChecked() as body:
                return self._on_checked(body, now_ns)
            case StartInstance() as body:
                return self._on_start_instance(body, message.reply_to, now_ns)
            case StopInstance() as body:
                return self._on_stop_instance(body, message.reply_to, now_ns)
            case UpdateCluster() as body:
                return self._on_update(body, message.reply_to, now_ns)
            case SpecificationRead() as body:
                return self._on_specification(body)
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

    def _on_started(self, body: ChildStarted, now_ns: int) -> list[Effect]:
        child = self._children[body.name]
        child.pid = body.pid
        if self._stopping:
            return [SignalChild(name=body.name, pid=body.pid, signal=signal.SIGKILL)]
        if child.state is ChildState.RETIRING:
            return [SignalChild(name=body.name, pid=body.pid, signal=signal.SIGTERM)]
        if child.spec.presences or child.spec.role == "nats":  # a server is ready once its store is
            return []
        return self._on_ready(child, now_ns)

    def _on_ready(self, child: Child, now_ns: int) -> list[Effect]:
        if child.state is not ChildState.STARTING:
            return []
        child.state, child.start_failures, child.ready_ns = ChildState.READY, 0, now_ns
        took_ms = (now_ns - child.started_ns) // 1_000_000
        log = Log(level="info", event="child_ready", fields={"child": child.spec.name, "took_ms": took_ms})
        return [log]

    def _on_exited(self, body: ChildExited, now_ns: int) -> list[Effect]:
        child = self._children[body.name]
        was_ready_ns = now_ns - child.ready_ns if child.state is ChildState.READY else 0
        child.pid, child.present = 0, set()
        child.last_exit = body.detail or _exit_text(body)
        dead = [self._dead(child.spec.role, name, now_ns) for name in child.spec.presences]
        if self._stopping:
            child.state = ChildState.STOPPED
            return [*dead, CancelTimer(name=f"kill/{body.name}"), *self._stop_next(now_ns)]
        if child.state is ChildState.RETIRING:
            return [*dead, *self._forget(child), *self._left(now_ns)]
        child.failures = 0 if was_ready_ns > HEALTHY_NS else child.failures
        child.start_failures += child.state is ChildState.STARTING
        pause_ns = min(BACKOFF_NS << min(child.failures, 10), BACKOFF_NS_MAX)
        child.failures += 1
        child.state = ChildState.BACKING_OFF
        fields = {"child": body.name, "exit": child.last_exit, "again_in_ms": pause_ns // 1_000_000}
        return [
            *dead,
            CancelTimer(name=f"kill/{body.name}"),
            Log(level="warning", event="child_exited", fields=fields),
            StartTimer(name=f"restart/{body.name}", at_ns=now_ns + pause_ns),
        ]

    def _on_checked(self, body: MachineChecked, now_ns: int) -> list[Effect]:
        since_ns, _, looks, _ = self._store_ill.pop(body.server, (now_ns, "", 0, True))
        if body.store:
            self._store_ill[body.server] = (since_ns, body.store, looks + 1, body.room)
        store = [f"JetStream takes no writes: {why}" for _, why, _, _ in self._store_ill.values()]
        trouble = "; ".join(filter(None, (body.disk, *store)))
        effects: list[Effect] = []
        if trouble != self._trouble:
            self._trouble = trouble
            level, text = ("error", trouble) if trouble else ("info", "over")
            effects.append(Log(level=level, event="machine_trouble", fields={"trouble": text}))
        nats = self._children.get(body.server)
        if nats is None or not nats.pid or self._stopping:
            return effects
        if body.renewed:
            effects.append(SignalChild(name=body.server, pid=nats.pid, signal=signal.SIGHUP))
        if not body.store:
            return effects + self._on_ready(nats, now_ns)
        again_ns = self._store_again_ns.get(body.server, 0)
        patient_until_ns = max(since_ns + STORE_PATIENCE_NS, again_ns)
        if not body.room or now_ns < patient_until_ns:
            return effects
        self._store_again_ns[body.server] = now_ns + STORE_AGAIN_NS
        return [
            *effects,
            Log(level="warning", event="store_restarted", fields={"reason": body.store}),
            SignalChild(name=body.server, pid=nats.pid, signal=signal.SIGKILL),
        ]

    def _on_timer(self, timer: str, now_ns: int) -> list[Effect]:
        kind, _, name = timer.partition("/")
        if kind == "tick":
            again = StartTimer(name="tick", at_ns=now_ns + TICK_NS)
            return [self._presence(now_ns), *self._drain_again(now_ns), *self._listen_less(), again]
        child = self._children.get(name)
        if child is None:  # retired meanwhile
            return []
        if kind == "restart" and child.state is ChildState.BACKING_OFF:
            child.restarts += 1
            return self._start_child(child, now_ns)
        if kind == "kill" and child.pid:
            return [SignalChild(name=name, pid=child.pid, signal=signal.SIGKILL)]
        if kind == "retire" and child.pid:
            return [SignalChild(name=name, pid=child.pid, signal=signal.SIGTERM)]
        return []

    # provisioning

    def _on_start_instance(self, body: StartInstance, reply_to: str, now_ns: int) -> list[Effect]:
        roster = self._roster
        if roster is None or self._stopping or self._leaving:
            return _refuse(reply_to, OrderRefusal.STOPPING, "nothing is started here any more")
        instance = roster.instance_of(body.order)
        if instance is not None:
            return reply(reply_to, InstanceOrdered(instance=instance))
        spec = self._named(roster, body) if body.instance else self._free(roster, body)
        if isinstance(spec, OrderRefused):
            return reply(reply_to, spec)
        if lack := roster.lacks(spec, [child.spec for child in self._children.values()]):
            return _refuse(reply_to, OrderRefusal.NO_DEVICE, lack)
        instance = body.instance or spec.presences[0]
        roster.carried_out(body.order, instance)
        self._drained.pop(spec.name, None)
        self._children[spec.name] = Child(spec=spec)
        log = Log(level="info", event="instance_ordered", fields={"child": spec.name, "order": body.order})
        answer = reply(reply_to, InstanceOrdered(instance=instance))
        return [log, *answer, *self._start_waiting(now_ns)]

    def _free(self, roster: Roster, body: StartInstance) -> ChildSpec | OrderRefused:
        """One that does not run; those that an operator has drained are started by name only."""
        if roster.models and body.model not in roster.models:
            return _refused(OrderRefusal.OTHER_MODEL, f"{body.model} is not served here")
        taken = self._children.keys() | self._drained.keys()
        if (spec := roster.free(taken, model=body.model, shape=body.shape)) is not None:
            return spec
        if body.shape and body.shape not in (shapes := roster.shapes(body.model)):
            told = ", ".join(shapes) or "none that are known"
            return _refused(OrderRefusal.UNKNOWN_SHAPE, f"no {body.shape} for {body.model} here; shapes: {told}")
        kind = f"{body.shape} instances" if body.shape else "instances"
        bound = f"{roster.instances_max(body.model, body.shape)} {kind} of {body.model} are the bound (--instances-max)"
        drained = len(self._drained)
        return _refused(OrderRefusal.AT_BOUND, f"{bound}, {drained} drained by an operator" if drained else bound)

    def _named(self, roster: Roster, body: StartInstance) -> ChildSpec | OrderRefused:
        spec = roster.worker_of(body.instance)
        if spec is None:
            return _refused(OrderRefusal.UNKNOWN_INSTANCE, f"{body.instance} is none of this host")
        child = self._children.get(spec.name)
        if child is not None:
            doing = "still drains" if child.state is ChildState.RETIRING else "runs already"
            return _refused(OrderRefusal.RUNS, f"{body.instance} {doing}")
        return spec

    def _on_stop_instance(self, body: StopInstance, reply_to: str, now_ns: int) -> list[Effect]:
        children = (child for child in self._children.values() if child.spec.role == Role.WORKER)
        child = next((child for child in children if body.instance in child.spec.presences), None)
        if self._roster is None or child is None:
            return _refuse(reply_to, OrderRefusal.UNKNOWN_INSTANCE, f"{body.instance} does not run here")
        if len(child.spec.presences) > 1:
            detail = f"{child.spec.name} hosts {len(child.spec.presences)} instances"
            return _refuse(reply_to, OrderRefusal.SHARED_PROCESS, detail)
        answer = reply(reply_to, InstanceOrdered(instance=body.instance))
        if self._stopping:
            return answer  # it is on its way already
        child.by_operator = child.by_operator or body.operator
        return [*answer, *self._retire(child, body.drain_limit_ms, now_ns)]

    def _retire(self, child: Child, drain_limit_ms: int, now_ns: int) -> list[Effect]:
        """Drains a worker by message; by signal where that does not help, or where it does not listen yet."""
        name, drained_ns = child.spec.name, now_ns + max(0, drain_limit_ms) * 1_000_000
        if child.state is ChildState.RETIRING:
            drained_ns = min(drained_ns, child.drained_ns)
        listens, runs = child.state is not ChildState.STARTING, child.pid or child.state is ChildState.STARTING
        child.state, child.drained_ns = ChildState.RETIRING, drained_ns
        if not runs:
            return self._forget(child)
        term_ns = drained_ns + RETIRE_GRACE_NS if listens else now_ns
        kill_ns = term_ns + child.spec.stop_limit_ms * 1_000_000
        return [
            Log(level="info", event="child_retires", fields={"child": name, "drain_limit_ms": drain_limit_ms}),
            *self._drain(child, now_ns),
            StartTimer(name=f"retire/{name}", at_ns=term_ns),
            StartTimer(name=f"kill/{name}", at_ns=kill_ns),
        ]

    def _drain(self, child: Child, now_ns: int) -> list[Effect]:
        limit_ms = max(0, child.drained_ns - now_ns) // 1_000_000
        subjects = [self._subjects.engine(name, "drain") for name in child.spec.presences]
        return [Publish(subject=subject, body=DrainWorker(limit_ms=limit_ms)) for subject in subjects]

    def _drain_again(self, now_ns: int) -> list[Effect]:
        """The message may have been lost; a worker that has it ignores one with a later end."""
        retiring = [child for child in self._children.values() if child.state is ChildState.RETIRING]
        return [effect for child in retiring for effect in self._drain(child, now_ns)]

    def _forget(self, child: Child) -> list[Effect]:
        """Its name is free for another instance from now on."""
        name = child.spec.name
        del self._children[name]
        if child.by_operator:
            self._drained[name] = child.spec
        timers = [CancelTimer(name=f"{kind}/{name}") for kind in ("retire", "kill", "restart")]
        return [*timers, Log(level="info", event="child_retired", fields={"child": name, "exit": child.last_exit})]

    # another specification

    def _on_update(self, body: UpdateCluster, reply_to: str, now_ns: int) -> list[Effect]:
        if body.wanted:
            return [ReadSpecification(take=body.take, reply_to=reply_to)]
        effects = [] if self._stopping else [e for name in body.processes for e in self._update(name, now_ns)]
        return [*effects, *reply(reply_to, ClusterCompared(processes=self._compared()))]

    def _on_specification(self, body: SpecificationRead) -> list[Effect]:
        if body.machine is None:
            return reply(body.reply_to, ClusterCompared(refused=body.refused))
        if body.take:
            self._take(body.machine)
            return reply(body.reply_to, ClusterCompared(processes=self._compared()))
        spares = body.machine.spares if body.machine.provisioned else []
        rows = compared(self._children, [*body.machine.nats, *body.machine.children], spares)
        return reply(body.reply_to, ClusterCompared(processes=rows))

    def _take(self, machine: SupervisorConfig) -> None:
        self._wanted = {spec.name: spec for spec in (*machine.nats, *machine.children)}
        self._spares = machine.spares if machine.provisioned else []
        if self._roster is not None:
            self._roster.replace([*machine.children, *machine.spares], machine.devices)

    def _compared(self) -> list[ComparedProcess]:
        return compared(self._children, self._wanted.values(), self._spares)

    def _update(self, name: str, now_ns: int) -> list[Effect]:
        """Brings a process in line: started, ended, or ended and started anew."""
        spec, child = self._wanted.get(name), self._children.get(name)
        if Role.WORKER in (each.role for each in (spec, child.spec if child is not None else None) if each is not None):
            return []  # with a drain, by StopInstance and StartInstance
        if child is None:
            if spec is None:
                return []
            self._children[name] = Child(spec=spec)
            return self._start_waiting(now_ns)
        if spec == child.spec or child.state is ChildState.RETIRING:
            return []
        return self._end_service(child, anew=spec is not None, now_ns=now_ns)

    def _end_service(self, child: Child, *, anew: bool, now_ns: int) -> list[Effect]:
        """An ingress that another one replaces goes on until its last stream has ended."""
        name = child.spec.name
        if not anew:
            child.state = ChildState.RETIRING
        if not child.pid:
            return [] if anew or child.state is ChildState.STARTING else self._forget(child)
        if child.spec.role == Role.INGRESS and not anew:
            return [SignalChild(name=name, pid=child.pid, signal=signal.SIGUSR1)]
        kill = StartTimer(name=f"kill/{name}", at_ns=now_ns + child.spec.stop_limit_ms * 1_000_000)
        return [SignalChild(name=name, pid=child.pid, signal=signal.SIGTERM), kill]

    # the end

    def _on_stop(self, now_ns: int) -> list[Effect]:
        if self._stopping:  # asked twice: no more patience
            alive = [child for child in self._children.values() if child.pid]
            return [SignalChild(name=c.spec.name, pid=c.pid, signal=signal.SIGKILL) for c in alive]
        if self._leaves and not self._leaving:
            self._leaving = True
            workers = [child for child in self._children.values() if child.spec.role == Role.WORKER]
            drains = [effect for child in workers for effect in self._retire(child, LEAVE_DRAIN_MS, now_ns)]
            return [*drains, *self._left(now_ns)]
        self._stopping = True
        for child in self._children.values():
            if child.state in (ChildState.WAITING, ChildState.BACKING_OFF):
                child.state = ChildState.STOPPED
        return self._stop_next(now_ns)

    def _left(self, now_ns: int) -> list[Effect]:
        """The rest stops once no worker is left."""
        waits = not self._leaving or any(child.spec.role == Role.WORKER for child in self._children.values())
        return [] if waits else self._on_stop(now_ns)

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
            if child.state is ChildState.WAITING
            for effect in self._start_child(child, now_ns)
        ]

    def _start_child(self, child: Child, now_ns: int) -> list[Effect]:
        child.state, child.started_ns = ChildState.STARTING, now_ns
        if (spec := self._wanted.get(child.spec.name, child.spec)) != child.spec:
            child.spec, child.start_failures = spec, 0
        heard = [] if self._listens else [Subscribe(subject=self._subjects.presences())]
        self._listens = True
        return [*heard, StartChild(spec=child.spec)]

    def _listen_less(self) -> list[Effect]:
        """Presences say that a child has started; once all have, they would only wake this process."""
        starting = any(child.state is ChildState.STARTING for child in self._children.values())
        if starting or not self._listens:
            return []
        self._listens = False
        return [Unsubscribe(subject=self._subjects.presences())]

    def _presence(self, now_ns: int) -> Publish:
        specs = self._drained.values()
        drained = [DrainedInstance(name, spec.model) for spec in specs for name in spec.presences]
        return self._heartbeat.presence(now_ns, drained=drained, trouble=self._trouble, store=self._store())

    def _store(self) -> str:
        """Reason why the store takes no writes until somebody makes room, as two looks in a row at most of its servers
        say; one look may meet a new server. What has room gets well by itself, or is started anew.
        """
        ill = [why for _, why, looks, room in self._store_ill.values() if looks > 1 and not room]
        servers = sum(child.spec.role == "nats" for child in self._children.values())
        return ill[0] if 2 * len(ill) > servers else ""

    def _dead(self, role: str, name: str, now_ns: int) -> Publish:
        body = ServicePresence(role=role, name=name, incarnation=0, at_ns=now_ns, state=PresenceState.DEAD)
        return Publish(subject=self._subjects.presence(role, name), body=body)

    def snapshot(self) -> dict[str, Any]:
        return {
            child.spec.name: {
                "role": child.spec.role,
                "state": str(child.state),
                "pid": child.pid,
                "restarts": child.restarts,
                "start_failures": child.start_failures,
                "last_exit": child.last_exit,
                "present": len(child.present),
                "expected": len(child.spec.presences),
            }
            for child in self._children.values()
        }

    def check_invariants(self) -> None:
        for child in self._children.values():
            assert child.pid or child.state is not ChildState.READY, child
            assert not (self._stopping and child.state in (ChildState.WAITING, ChildState.BACKING_OFF)), child


def _refuse(reply_to: str, reason: OrderRefusal, detail: str) -> list[Effect]:
    return reply(reply_to, _refused(reason, detail))


def _refused(reason: OrderRefusal, detail: str) -> OrderRefused:
    return OrderRefused(reason=reason, detail=detail)


def _exit_text(body: ChildExited) -> str:
    text = f"exit status {body.status}" if body.status >= 0 else f"ended by {signal.Signals(-body.status).name}"
    if body.oom_kills:
        text += f"; the kernel killed {body.oom_kills} process(es) for the memory limit of the control group"
    return text
