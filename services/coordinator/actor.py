"""The coordinator: a lease and a plan for each model.

Owns: the plan (stages, their instances and roles, the epoch). One coordinator is active per model, by a lease in the KV
bucket ``lease``; others stand by. The plan has the stages and roles that controllers propose (``PlanProposed``), and
names every instance that is registered, alive and not draining. Controllers are actors of their own that share its
process (``build.py``): stages, roles, step bounds, provisioning, cascades.

| message in | change | messages out |
|---|---|---|
| KeyChanged(instance) | instance known, renewed or gone | PutKey(plan) where that changes it |
| InstanceSummary | sign of life, draining or not | PutKey(plan) where that changes it |
| ServicePresence(DEAD, worker) | its incarnations until then are dead | PutKey(plan) |
| PlanProposed | what the next plan shall be | PutKey(plan) where it is led and that changes it |
| KeyChanged(lease / plan) | what another coordinator wrote is taken over | |
| TimerFired(tick) | silent instances leave the plan | ServicePresence, PutKey(lease), PutKey(plan), next timer |
| KeyUnreadable | | it is written anew |
| KeyPut / KeyNotPut | write done, or lost to another writer | |
| BusReconnected | revisions unconfirmed until the watches say BucketReady | |
| StopRequested | | DeleteKey(lease) where held, ServicePresence(LEAVING), Stop |

Invariants: it writes a plan only under its own unexpired lease and only over the revision it has seen; epochs rise; a
stage with two instances or more has one that prefills and one that decodes.
Overload: state is bounded by INSTANCES_MAX and MODELS_MAX; more are ignored and logged once.
"""

from __future__ import annotations

from typing import Any

from millrace.actor.effects import Effect, Log, StartTimer, Stop, Subscribe, WatchKeys
from millrace.contracts.catalog import Role
from millrace.contracts.coordinator import PlanProposed
from millrace.contracts.local import (
    BucketReady,
    BusReconnected,
    KeyChanged,
    KeyNotPut,
    KeyPut,
    KeyUnreadable,
    StopRequested,
    TimerFired,
)
from millrace.contracts.message import Message
from millrace.contracts.plan import Lease, Plan
from millrace.contracts.status import InstanceRecord, InstanceSummary, ServicePresence
from millrace.contracts.subjects import Subjects
from millrace.membership.heartbeat import Heartbeat
from millrace.membership.member import MemberState
from millrace.membership.members import Membership

from services.coordinator.config import CoordinatorConfig
from services.coordinator.leased_plans import LeasedPlans
from services.coordinator.plan_writing import PlanWriting, rewritten

#: How often liveness and leases are looked at, and presence is published.
TICK_NS = 1_000_000_000

#: Bound of the state; far above what one coordinator can sensibly plan for.
MODELS_MAX = 1_000


class CoordinatorActor:
    """Plans for every model that has instances."""

    def __init__(self, config: CoordinatorConfig, *, incarnation: int) -> None:
        self.name = name = config.name
        self._subjects = Subjects(config.bus.cluster)
        self._heartbeat = Heartbeat(subjects=self._subjects, role=Role.COORDINATOR, name=name, incarnation=incarnation)
        self._membership = config.membership
        self._members = Membership(
            silence_ns=self._membership.plan_silence_ns, members_max=self._membership.members_max
        )
        self.leased = LeasedPlans(
            Plan, plans="plan", leases="lease", names_max=MODELS_MAX, name=name, incarnation=incarnation
        )
        self._writing = PlanWriting(config)
        self._tick_ns = 0
        self._ready = False
        self._bound_reached = False

    def start(self, now_ns: int) -> list[Effect]:
        self._tick_ns = now_ns + TICK_NS
        return [
            WatchKeys(bucket="instance"),
            *self.leased.start(),
            Subscribe(subject=self._subjects.summaries()),
            Subscribe(subject=self._subjects.presences(Role.WORKER)),
            Subscribe(subject=self._subjects.coordinate("*", "propose")),
            self._heartbeat.presence(now_ns),
            StartTimer(name="tick", at_ns=self._tick_ns),
        ]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        if now_ns - self._tick_ns > TICK_NS:  # this process stood still; what instances sent meanwhile waits
            self._members.excuse(now_ns - self._tick_ns, now_ns)
            self._tick_ns = now_ns
        match message.body:
            case InstanceSummary() as body:
                return self._on_summary(body, now_ns)
            case PlanProposed() as body:
                return self._on_proposal(body, now_ns)
            case KeyChanged(bucket="instance") as body:
                return self._on_instance(body, now_ns)
            case KeyChanged() as body:
                return self._on_key(body, now_ns)
            case ServicePresence() as body:
                return self._on_presence(body, now_ns)
            case TimerFired() as body:
                return self._on_tick(body, now_ns)
            case KeyUnreadable() as body:
                return self.leased.on_unreadable(body) if body.bucket in self.leased.buckets else []
            case KeyPut() as body:
                self.leased.on_put(body)
                return []
            case KeyNotPut() as body:
                return self.leased.on_not_put(body)
            case BucketReady() as body:
                return self._on_bucket_ready(body, now_ns)
            case BusReconnected():
                return self._on_reconnected(now_ns)
            case StopRequested():
                return self._on_stop(now_ns)
            case _:
                return []

    # instances

    def _on_instance(self, body: KeyChanged, now_ns: int) -> list[Effect]:
        if body.value is None:
            self._members.forget(body.key)
            return self._plan_all(now_ns)
        record = body.value
        if not isinstance(record, InstanceRecord):
            return [Log(level="warning", event="key_of_wrong_type", fields={"bucket": "instance", "key": body.key})]
        served = self._serves(body.key, now_ns)
        change = self._members.on_record(body.key, record, now_ns)
        if change.member is None:  # no room for it, or another instance's key
            return self._say_bound_reached() if len(self._members) >= self._membership.members_max else []
        if self._ready:
            self.leased.ensure(record.model)
        if not change.rerecorded and served == change.member.serving:
            return self._lead(now_ns)  # a renewal, as nearly all are; who fell silent, the tick sees
        return self._lead(now_ns) + self._plan(record.model, now_ns)

    def _on_summary(self, body: InstanceSummary, now_ns: int) -> list[Effect]:
        member = self._members.find(body.instance)
        if member is None or member.record is None or member.record.incarnation != body.incarnation:
            return []
        served = self._members.state(member, now_ns) is MemberState.SERVING
        if not self._members.on_summary(body, now_ns).accepted:
            return []
        return self._plan(body.model, now_ns) if member.serving != served else []

    def _on_presence(self, body: ServicePresence, now_ns: int) -> list[Effect]:
        change = self._members.on_presence(body)
        if change.member is None or change.member.record is None or not change.moved:
            return []
        return self._plan(change.member.record.model, now_ns)

    def _serves(self, name: str, now_ns: int) -> bool:
        member = self._members.find(name)
        return member is not None and self._members.state(member, now_ns) is MemberState.SERVING

    # lease and plan

    def _on_key(self, body: KeyChanged, now_ns: int) -> list[Effect]:
        name = body.value.model if isinstance(body.value, Lease | Plan) else ""
        effects = self.leased.on_key(body, name)
        return effects if body.bucket == "plan" else [*effects, *self._lead(now_ns), *self._plan_all(now_ns)]

    def _on_tick(self, fired: TimerFired, now_ns: int) -> list[Effect]:
        for known in self.leased:
            if self.leased.lost(known):
                self._writing.forget(known.name)
        again = StartTimer.again(fired, now_ns, TICK_NS)
        self._tick_ns = again.at_ns
        return [self._heartbeat.presence(now_ns), again, *self._lead(now_ns), *self._plan_all(now_ns)]

    def _on_bucket_ready(self, body: BucketReady, now_ns: int) -> list[Effect]:
        self._ready = self._ready or body.bucket == "instance"
        self.leased.on_ready(body)
        if self._ready:
            for _, record in self._members.registered():
                self.leased.ensure(record.model)
        return self._lead(now_ns) + self._plan_all(now_ns)

    def _on_reconnected(self, now_ns: int) -> list[Effect]:
        self._ready = False
        self.leased.on_reconnected()
        self._members.restart_timers(now_ns)  # nobody could be heard
        return []

    def _on_stop(self, now_ns: int) -> list[Effect]:
        return [*self.leased.stop(now_ns), self._heartbeat.leaving(now_ns), Stop(reason="asked to stop")]

    # decisions

    def _lead(self, now_ns: int) -> list[Effect]:
        """Takes leases that are free and renews the ones held, for every model that has instances."""
        return self.leased.lead(now_ns) if self._ready else []

    def _plan_all(self, now_ns: int) -> list[Effect]:
        return [effect for known in self.leased for effect in self._plan(known.name, now_ns)]

    def _plan(self, model: str, now_ns: int) -> list[Effect]:
        known = self.leased.find(model)
        if known is None or not self._ready or not self.leased.may_plan(known, now_ns):
            return []
        plan = self._writing.next_plan(model, known.plan, self._serving(model, now_ns))
        if plan is None and known.plan is not None and known.lost:
            plan = rewritten(known.plan, self.name)
        if plan is None:
            return []
        count = sum(len(stage.instances) for stage in plan.stages)
        fields = {"model": model, "epoch": plan.epoch, "instances": count, "cuts": plan.cuts, "reason": plan.reason}
        return [self.leased.put(known, plan), Log(level="info", event="plan_written", fields=fields)]

    def _serving(self, model: str, now_ns: int) -> list[InstanceRecord]:
        """Those that the plan names."""
        self._members.expire(now_ns)
        return [r for member, r in self._members.registered() if r.model == model and member.serving]

    def _on_proposal(self, body: PlanProposed, now_ns: int) -> list[Effect]:
        """A controller's; one of a coordinator that does not lead the model waits until it does, and is replaced."""
        known = self.leased.ensure(body.model)
        if known is None or not self._writing.take(body):
            return []
        return self._plan(body.model, now_ns)

    # small things

    def _say_bound_reached(self) -> list[Effect]:
        if self._bound_reached:
            return []
        self._bound_reached = True
        return [
            Log(level="error", event="bound_reached", fields={"what": "instances", "max": self._membership.members_max})
        ]

    def snapshot(self) -> dict[str, Any]:
        models = {
            each.name: {
                "holder": each.lease.holder if each.lease else "",
                "epoch": each.plan.epoch if each.plan else 0,
                "cuts": each.plan.cuts if each.plan else [],
                "instances": [name for stage in each.plan.stages for name in stage.instances] if each.plan else [],
            }
            for each in self.leased
        }
        return {"name": self.name, "instances": sorted(member.token for member in self._members), "models": models}

    def check_invariants(self) -> None:
        self._members.check_invariants()
        assert len(self.leased) <= MODELS_MAX
        self._writing.check()
