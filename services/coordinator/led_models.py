"""Controllers of a coordinator, and the models that it leads as they see them: plans, leases and instances. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from millrace.actor.effects import Effect, Publish, StartTimer, Stop, Subscribe, WatchKeys
from millrace.contracts.coordinator import PlanProposed
from millrace.contracts.local import KeyChanged, StopRequested, TimerFired
from millrace.contracts.message import Body, Message
from millrace.contracts.plan import Lease, Plan
from millrace.contracts.status import InstanceRecord, InstanceSummary
from millrace.contracts.subjects import Subjects, subject_token

from services.coordinator.config import CoordinatorConfig

#: How often controllers look at their models.
TICK_NS = 1_000_000_000


@dataclass
class SeenModel:
    """One model.

    Attributes:
        changed_ns: When instances last joined or left the plan, unix ns; 0 for never.
    """

    lease: Lease | None = None
    plan: Plan | None = None
    changed_ns: int = 0


@dataclass
class LedModels:
    """The view of one controller. ``name`` and ``incarnation``: of the coordinator that hosts it."""

    name: str
    incarnation: int
    records: dict[str, InstanceRecord] = field(default_factory=dict)
    summaries: dict[str, InstanceSummary] = field(default_factory=dict)
    _models: dict[str, SeenModel] = field(default_factory=dict)

    def start(self) -> list[Effect]:
        return [WatchKeys(bucket=bucket) for bucket in ("instance", "plan", "lease")]

    def on_key(self, body: KeyChanged, now_ns: int) -> str:
        """Takes a change; returns the model that it is about, empty where that is not known."""
        match body.value:
            case InstanceRecord() as record:
                self.records[record.instance] = record
                return record.model
            case Plan() as plan:
                seen = self._models.setdefault(plan.model, SeenModel())
                if _members(plan) != _members(seen.plan):
                    seen.changed_ns = now_ns
                seen.plan = plan
                return plan.model
            case Lease() as lease:
                self._models.setdefault(lease.model, SeenModel()).lease = lease
                return lease.model
        if body.bucket == "instance":
            self.records = {name: r for name, r in self.records.items() if subject_token(name) != body.key}
            self.summaries = {name: s for name, s in self.summaries.items() if name in self.records}
        for name, seen in self._models.items():
            if body.bucket == "lease" and subject_token(name) == body.key:
                seen.lease = None
                return name
        return ""

    def on_summary(self, body: InstanceSummary) -> InstanceRecord | None:
        """Takes a summary of a registered incarnation, and returns its record; None for any other."""
        record = self.records.get(body.instance)
        if record is None or record.incarnation != body.incarnation:
            return None
        self.summaries[body.instance] = body
        return record

    def leads(self, model: str, now_ns: int) -> bool:
        seen = self._models.get(model)
        lease = seen.lease if seen is not None else None
        mine = lease is not None and (lease.holder, lease.incarnation) == (self.name, self.incarnation)
        return mine and lease is not None and lease.until_ns > now_ns

    def lost(self, model: str) -> bool:
        seen = self._models.get(model)
        lease = seen.lease if seen is not None else None
        return lease is not None and (lease.holder, lease.incarnation) != (self.name, self.incarnation)

    def led(self, now_ns: int) -> list[str]:
        """Models that are led here, sorted."""
        return [model for model in sorted(self._models) if self.leads(model, now_ns)]

    def leads_all(self, now_ns: int) -> bool:
        """Whether no other coordinator leads a model."""
        return all(self.leads(model, now_ns) for model in self._models)

    def plan(self, model: str) -> Plan | None:
        seen = self._models.get(model)
        return seen.plan if seen is not None else None

    def changed_ns(self, model: str) -> int:
        """Time at which instances last joined or left the plan; 0 for never."""
        return self._models[model].changed_ns if model in self._models else 0

    def serving(self, model: str) -> list[InstanceRecord]:
        """Records of the instances that the plan names, in its order."""
        plan = self.plan(model)
        names = [name for stage in plan.stages for name in stage.instances] if plan is not None else []
        return [self.records[name] for name in names if name in self.records]

    def registered(self, model: str) -> Sequence[InstanceRecord]:
        return [record for record in self.records.values() if record.model == model]

    def summary(self, record: InstanceRecord) -> InstanceSummary | None:
        """The last one of this incarnation; None before the first."""
        found = self.summaries.get(record.instance)
        return found if found is not None and found.incarnation == record.incarnation else None


def _members(plan: Plan | None) -> set[str]:
    return {name for stage in plan.stages for name in stage.instances} if plan is not None else set()


class Controller:
    """Base of the actors that share a coordinator's process: it looks at the models that are led once a second."""

    def __init__(self, config: CoordinatorConfig, *, by: str, incarnation: int) -> None:
        """``by`` names the controller in its proposals."""
        self.name = config.name
        self._by = by
        self._subjects = Subjects(config.bus.cluster)
        self._led = LedModels(config.name, incarnation)
        self._number = 0

    def start(self, now_ns: int) -> list[Effect]:
        tick = StartTimer(name="tick", at_ns=now_ns + TICK_NS)
        return [*self._led.start(), *(Subscribe(subject=subject) for subject in self._hears()), tick]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        match message.body:
            case TimerFired() as body:
                return [StartTimer.again(body, now_ns, TICK_NS), *self._on_tick(now_ns)]
            case StopRequested():
                return [*self._on_stop(now_ns), Stop(reason="asked to stop")]
            case body:
                return self._on(body, message.reply_to, now_ns)

    def _hears(self) -> list[str]:
        raise NotImplementedError

    def _on_tick(self, now_ns: int) -> list[Effect]:
        raise NotImplementedError

    def _on_stop(self, now_ns: int) -> list[Effect]:
        return []

    def _on(self, body: Body, reply_to: str, now_ns: int) -> list[Effect]:
        raise NotImplementedError

    def _proposal(self, model: str, now_ns: int, **wanted: object) -> Effect:
        """Args: as the fields of ``PlanProposed``."""
        self._number = max(now_ns, self._number + 1)  # rises over restarts
        body = PlanProposed(model=model, by=self._by, number=self._number, **wanted)  # type: ignore[arg-type]
        return Publish(subject=self._subjects.coordinate(model, "propose"), body=body)
