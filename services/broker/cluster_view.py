"""A broker's view of the cluster: instances, plans, boundaries and loads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple
from zlib import crc32

from millrace.contracts.broker import BoundaryMoved, LoadReported, MoveReason
from millrace.contracts.kv import compatible
from millrace.contracts.local import KeyChanged
from millrace.contracts.plan import InstanceRole, Plan, Stage
from millrace.contracts.status import InstanceRecord, ServicePresence
from millrace.contracts.subjects import subject_token
from millrace.membership.config import MembershipConfig
from millrace.membership.member import MemberState
from millrace.membership.members import Membership
from millrace.policies.stages.routing import stage_order
from millrace.policies.trading import LoadView
from millrace.policies.trading.view import load_view

_MS = 1_000_000

#: Models whose plans are known.
MODELS_MAX = 256

#: States in which an instance takes nothing for as long as its process lives.
_LEAVING = (MemberState.DRAINING, MemberState.DEAD, MemberState.GONE)


#: Instances of a set that are looked at; of a larger set so many, others every second. Every tick looks at peers, so
#: that a stage of a thousand would otherwise be a million looks. Twelve are drawn to ask six; and where loads vary by
#: 40 percent a mean over 16 is within 10 percent of theirs, while trading begins at 25.
LOOKED_AT = 16


class HeardLoad(NamedTuple):
    """A load, when it was heard, and as policies see it."""

    at_ns: int
    told: LoadReported
    view: LoadView


class TradeCandidate(NamedTuple):
    """An instance that can take something, and until when that holds if nothing else is heard."""

    record: InstanceRecord
    view: LoadView
    until_ns: int


class BrokerView:
    """One broker process's view of the cluster."""

    def __init__(self, *, load_age_ns: int) -> None:
        config = MembershipConfig()
        self.members = Membership.of(config)
        self._load_age_ns = load_age_ns
        self._instances_max = config.members_max
        self._plans: dict[str, Plan] = {}  # by model token
        self._stages: dict[str, tuple[str, Stage]] = {}  # by instance: (model token, stage)
        self._boundaries: dict[tuple[str, str], BoundaryMoved] = {}  # by (model token, stage)
        self._cuts: dict[tuple[str, str], int] = {}  # present upper boundaries, by (model token, stage)
        self._loads: dict[str, HeardLoad] = {}  # by instance token
        self._candidates: dict[str, TradeCandidate] = {}  # found before; each of our instances looks with each tick

    # inputs

    def on_record(self, body: KeyChanged, now_ns: int) -> None:
        """A registration; most only repeat what is known."""
        value = body.value
        if value is None or value != self.record(body.key):
            self._candidates.clear()
        if value is None or isinstance(value, InstanceRecord):
            self.members.on_record(body.key, value, now_ns)
        if value is None:
            self._loads.pop(subject_token(body.key), None)

    def on_plan(self, body: KeyChanged) -> str:
        """A plan. Returns the model whose plan changed; empty for none."""
        self._candidates.clear()
        token, value = subject_token(body.key), body.value
        if isinstance(value, Plan):
            if token not in self._plans and len(self._plans) >= MODELS_MAX:
                return ""
            before = self._plans.get(token)
            self._plans[token] = value
        elif value is None and token in self._plans:
            before = self._plans.pop(token)
        else:
            return ""
        self._index(token)
        return body.key if before is None or value is None or before.epoch != value.epoch else ""

    def _index(self, token: str) -> None:
        self._stages = {name: entry for name, entry in self._stages.items() if entry[0] != token}
        plan = self._plans.get(token)
        if plan is not None:
            self._stages |= {name: (token, stage) for stage in plan.stages for name in stage.instances}
        stale = [key for key in self._boundaries if key[0] == token and not self._valid(self._boundaries[key])]
        for key in stale:
            del self._boundaries[key]
        self._cut(token)

    def _cut(self, token: str) -> None:
        """Finds the present cuts of a model anew."""
        self._cuts = {key: cut for key, cut in self._cuts.items() if key[0] != token}
        plan = self._plans.get(token)
        if plan is not None:
            refined = {stage: body.length for (model, stage), body in self._boundaries.items() if model == token}
            cuts = zip(plan.stages, plan.present_cuts(refined), strict=False)
            self._cuts |= {(token, stage.name): cut for stage, cut in cuts}

    def on_presence(self, body: ServicePresence) -> None:
        self.members.on_presence(body)

    def on_load(self, body: LoadReported, now_ns: int) -> bool:
        """A load. Returns whether it counts: of a registered instance, and not older than what is known."""
        if not body.instance or body.blocks_free > body.blocks_total:
            return False
        member = self.members.find(body.instance)
        if member is None or member.record is None or member.record.model != body.model:
            return False
        if not self.members.observe(body.instance, body.incarnation, now_ns).accepted:
            return False
        known = self._loads.get(member.token)
        if known is not None and known.told.incarnation == body.incarnation and body.at_ns < known.told.at_ns:
            return False
        self._loads[member.token] = HeardLoad(now_ns, body, load_view(body))
        self._candidates.pop(body.instance, None)
        return True

    def on_boundary(self, body: BoundaryMoved) -> bool:
        """A refined boundary. Returns whether it counts: of this plan's cuts, of a keeper of the lower stage, and not
        older than the known one. One that crosses its neighbour is known, and applies when it does so no more.
        """
        if not self._valid(body) or not self._serves(body.keeper, body.stage):
            return False
        key = (subject_token(body.model), body.stage)
        known = self._boundaries.get(key)
        if known is not None and (known.plan_epoch, known.version) > (body.plan_epoch, body.version):
            return False
        self._boundaries[key] = body
        self._cut(key[0])
        return True

    def _serves(self, instance: str, stage: str) -> bool:
        entry = self._stages.get(instance)
        return entry is not None and entry[1].name == stage

    def _valid(self, body: BoundaryMoved) -> bool:
        plan = self._plans.get(subject_token(body.model)) if body.model else None
        if plan is None or not plan.boundary_epoch <= body.plan_epoch <= plan.epoch:
            return False
        names = [stage.name for stage in plan.stages]
        return (body.stage, body.next_stage) in pairwise(names)

    # instances

    def record(self, instance: str) -> InstanceRecord | None:
        member = self.members.find(instance)
        return member.record if member is not None else None

    def plan(self, model: str) -> Plan | None:
        return self._plans.get(subject_token(model)) if model else None

    def plan_epoch(self, model: str) -> int:
        """Epoch of the model's plan; -1 without one."""
        plan = self.plan(model)
        return plan.epoch if plan is not None else -1

    def stage(self, instance: str) -> Stage | None:
        """The stage that it serves in; None without a plan."""
        entry = self._stages.get(instance)
        return entry[1] if entry is not None else None

    def role(self, instance: str) -> InstanceRole:
        stage = self.stage(instance)
        return stage.roles.get(instance, InstanceRole.BOTH) if stage is not None else InstanceRole.BOTH

    def next_stage(self, instance: str) -> Stage | None:
        """The stage above its own; None for the last one."""
        entry = self._stages.get(instance)
        plan = self._plans.get(entry[0]) if entry is not None else None
        if entry is None or plan is None:
            return None
        index = plan.stages.index(entry[1]) + 1
        return plan.stages[index] if index < len(plan.stages) else None

    def refined(self, model: str, stage: str) -> BoundaryMoved | None:
        """The last refinement of the boundary above a stage."""
        return self._boundaries.get((subject_token(model), stage))

    def boundary_above(self, model: str, stage: Stage) -> int | None:
        """Current upper boundary of the stage, tokens; None for the last stage."""
        return self._cuts.get((subject_token(model), stage.name))

    def boundary(self, instance: str) -> int | None:
        """Current upper boundary of the instance's stage, tokens; None for the last stage, and without a plan."""
        stage, record = self.stage(instance), self.record(instance)
        return self.boundary_above(record.model, stage) if stage is not None and record is not None else None

    def has_others(self, instance: str) -> bool:
        """Whether another instance serves the model, as far as registrations and heartbeats say."""
        record = self.record(instance)
        return record is not None and any(
            other.model == record.model and other.instance != instance and member.state not in _LEAVING
            for member, other in self.members.registered()
        )

    def load(self, instance: str, now_ns: int) -> LoadView | None:
        """Its last load; None where none was heard lately."""
        known = self.heard(instance, now_ns)
        return known.view if known is not None else None

    def heard(self, instance: str, now_ns: int) -> HeardLoad | None:
        """The same as it was told, and when."""
        known = self._loads.get(subject_token(instance)) if instance else None
        return known if known is not None and now_ns - known.at_ns < self._load_age_ns else None

    # sets

    def peers(self, instance: str, now_ns: int) -> tuple[LoadView, ...]:
        """Loads of others that could take from it for balance: they decode in its stage; some of a large stage."""
        stage, record = self.stage(instance), self.record(instance)
        if record is None or self.role(instance) is InstanceRole.PREFILL:
            return ()
        names = stage.instances if stage is not None else self._unplanned(record.model)
        return self._open(next(sampled(names, instance, now_ns)), record, now_ns)

    def targets(
        self, instance: str, reason: MoveReason, length: int, now_ns: int, *, blocks: int = 0, recompute: bool = False
    ) -> tuple[LoadView, ...]:
        """Loads of those that may take a sequence of that length from it, in order of name: the nearest set in which
        anybody has so many blocks free, else the nearest one that has anybody. Of a large set some that have room.
        """
        record = self.record(instance)
        if record is None:
            return ()
        if reason in (MoveReason.BALANCE, MoveReason.MEMORY):
            return self.peers(instance, now_ns)
        sets = self._sets(instance, record.model, reason, length)
        nearest: tuple[LoadView, ...] = ()
        for names in sets:
            for some in sampled(names, instance, now_ns):
                found = self._open(some, record, now_ns, recompute=recompute)
                if reason is MoveReason.HANDOFF:
                    found = tuple(load for load in found if self.role(load.name) is InstanceRole.DECODE) or found
                if any(load.blocks_free >= blocks for load in found):
                    return found
                nearest = nearest or found
        return self._unheard(instance, sets, record) or nearest

    def _unheard(self, instance: str, sets: list[list[str]], source: InstanceRecord) -> tuple[LoadView, ...]:
        """The nearest set among stages whose loads are not listened to."""
        near = [stage.instances for stage in (self.stage(instance), self.next_stage(instance)) if stage is not None]
        for names in sets:
            known = [(name, self.record(name)) for name in names if names not in near and name != source.instance]
            found = [name for name, record in known if self._reachable(record, source)]
            if found:
                return tuple(LoadView(name=name, tokens=0) for name in sorted(found))
        return ()

    def _reachable(self, record: InstanceRecord | None, source: InstanceRecord) -> bool:
        """Whether it decodes and its broker can be asked, and KV could travel there."""
        if record is None or self.role(record.instance) is InstanceRole.PREFILL:
            return False
        member = self.members.find(record.instance)
        return member is not None and member.state not in _LEAVING and compatible(source.kv, record.kv)

    def _sets(self, instance: str, model: str, reason: MoveReason, length: int) -> list[list[str]]:
        plan, own = self.plan(model), self.stage(instance)
        if plan is None or own is None:
            return [] if reason is MoveReason.BOUNDARY else [self._unplanned(model)]
        order = stage_order(plan.stages, length)
        if reason is MoveReason.BOUNDARY:  # only upwards: nobody is moved down
            above = plan.stages[plan.stages.index(own) + 1 :]
            return [stage.instances for stage in order if stage in above] or [stage.instances for stage in above]
        return [own.instances, *(stage.instances for stage in order if stage is not own)]

    def _unplanned(self, model: str) -> list[str]:
        return sorted(record.instance for _, record in self.members.registered() if record.model == model)

    def _open(
        self, names: list[str], source: InstanceRecord, now_ns: int, *, recompute: bool = False
    ) -> tuple[LoadView, ...]:
        found: list[LoadView] = []
        for name in sorted(names):
            candidate = self._candidates.get(name)
            if candidate is None or now_ns >= candidate.until_ns:
                candidate = self._candidate(name, now_ns)
            if candidate is None or name == source.instance:
                continue
            if recompute or compatible(source.kv, candidate.record.kv):
                found.append(candidate.view)
        return tuple(found)

    def _candidate(self, name: str, now_ns: int) -> TradeCandidate | None:
        """An instance that could take something from another one now; remembered while its load is fresh."""
        self._candidates.pop(name, None)
        record, known = self.record(name), self.heard(name, now_ns)
        if record is None or known is None or known.told.draining or known.told.incarnation != record.incarnation:
            return None
        if self.role(name) is InstanceRole.PREFILL:
            return None
        until_ns = known.at_ns + self._load_age_ns
        found = self._candidates[name] = TradeCandidate(record, known.view, until_ns)
        return found

    def plain(self, now_ns: int) -> dict[str, object]:
        return {
            "plans": {token: plan.epoch for token, plan in sorted(self._plans.items())},
            "boundaries": {f"{m}/{s}": self._cuts[m, s] for m, s in sorted(self._boundaries)},
            "loads": sorted(token for token, each in self._loads.items() if now_ns - each.at_ns < self._load_age_ns),
        }

    def check_invariants(self) -> None:
        self.members.check_invariants()
        assert len(self._loads) <= self._instances_max
        assert len(self._plans) <= MODELS_MAX


def sampled(names: list[str], instance: str, now_ns: int) -> Iterator[list[str]]:
    """A set, or parts of a large one: each instance begins elsewhere, and with another part each second.

    All parts together are the set, so that who looks on finds the only one with room.
    """
    if len(names) <= LOOKED_AT:
        yield names
        return
    first = (crc32(instance.encode()) + LOOKED_AT * (now_ns // (1_000 * _MS))) % len(names)
    turned = names[first:] + names[:first]
    for at in range(0, len(turned), LOOKED_AT):
        yield turned[at : at + LOOKED_AT]
