"""Provisioning's state of one model whose lease is held: latencies and open orders."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.contracts.observers import DecisionMade, RequestFinished
from millrace.contracts.plan import InstanceRole
from millrace.contracts.status import InstanceRecord, InstanceSummary
from millrace.policies.provisioning import InstanceLoad, LatencySample, ProvisioningView

from services.coordinator.scaling import WaitingScale

#: Latencies kept per model and kind. At 400 requests a second the usual window of 10 s is whole; beyond, it is shorter.
SAMPLES_MAX = 4096


@dataclass(frozen=True, slots=True)
class RegisteredInstance:
    """One registered instance as it is now.

    Attributes:
        serving: Whether the plan should name it.
        draining: Whether it says that it leaves.
        summary: The last one of this incarnation; None before the first.
    """

    record: InstanceRecord
    serving: bool
    draining: bool = False
    summary: InstanceSummary | None = None


@dataclass
class Order:
    """Something that a provisioner was asked for.

    Attributes:
        name: Unique for ever; a repeated order is the same one.
        action: ``start`` or ``stop``.
        instance: Empty until a start is accepted.
        incarnation: Of the instance to be stopped; 0 for starts and for what never registered.
        host_index: Who is asked, or has accepted it.
        repeated: Whether the present host was asked a second time.
        deadline_ns: When it should be done; set once it is accepted.
        shape: That a started one shall have; empty for any.
        role: That a started one gets; None for the configured one.
        waiter: The operator's order that it is part of; None for the policy's own.
        drain_limit_s: For a stop: how long requests may go on there, seconds.
    """

    name: str
    model: str
    action: str
    instance: str = ""
    incarnation: int = 0
    host_index: int = 0
    repeated: bool = False
    deadline_ns: int = 0
    shape: str = ""
    role: InstanceRole | None = None
    waiter: WaitingScale | None = None
    drain_limit_s: float = 0.0


def _samples() -> deque[LatencySample]:
    return deque(maxlen=SAMPLES_MAX)


@dataclass
class Fleet:
    """One model.

    Attributes:
        state: The policy's.
        asked: Orders without an answer yet, by name.
        starting: Accepted starts, by instance.
        stopping: Accepted stops, by instance.
        unstoppable: Instance -> incarnation of which every host said that it cannot stop it.
        failures: Starts in a row that failed.
    """

    state: Any
    predicted: deque[LatencySample] = field(default_factory=_samples)
    measured: deque[LatencySample] = field(default_factory=_samples)
    asked: dict[str, Order] = field(default_factory=dict)
    starting: dict[str, Order] = field(default_factory=dict)
    stopping: dict[str, Order] = field(default_factory=dict)
    unstoppable: dict[str, int] = field(default_factory=dict)
    failures: int = 0

    def hear_decision(self, body: DecisionMade, now_ns: int) -> None:
        """A new request's placement: what was forecast for the chosen instance."""
        if body.kind != "dispatch":
            return
        for forecast in body.forecasts:
            if forecast.name == body.chosen and not forecast.note:
                self.predicted.append(LatencySample(now_ns, forecast.e2e_ns))

    def hear_outcome(self, body: RequestFinished, now_ns: int) -> None:
        """An end: how long it really took."""
        if body.outcome == "completed":
            self.measured.append(LatencySample(now_ns, body.e2e_ns))

    def snapshot(self) -> dict[str, Any]:
        return {
            "asked": len(self.asked),
            "starting": sorted(self.starting),
            "stopping": sorted(self.stopping),
            "failures": self.failures,
        }

    def view(self, model: str, known: Mapping[str, RegisteredInstance], serving: set[str]) -> ProvisioningView:
        """The policy's view of the model: each known instance is in exactly one state."""
        leaving = {
            order.instance for order in [*self.stopping.values(), *self.asked.values()] if order.action == "stop"
        }
        stopping = {name for name, view in known.items() if view.draining or name in leaving}
        asked = sum(order.action == "start" for order in self.asked.values())
        return ProvisioningView(
            model=model,
            serving=tuple(self._load(known[name]) for name in sorted(serving - stopping)),
            absent=len(set(known) - serving - stopping - set(self.starting)),
            starting=len(self.starting) + asked,
            stopping=len(stopping),
            failures=self.failures,
            predicted=tuple(self.predicted),
            measured=tuple(self.measured),
        )

    def take_done(self, known: Mapping[str, RegisteredInstance], serving: set[str]) -> list[Order]:
        """Orders that are done, which are open no longer: started ones serve, stopped ones are gone."""
        started = [self.starting.pop(name) for name in sorted(serving & set(self.starting))]
        stopped = [self.stopping.pop(name) for name in sorted(set(self.stopping) - set(known))]
        self.unstoppable = {
            n: i for n, i in self.unstoppable.items() if n in known and known[n].record.incarnation == i
        }
        if started:
            self.failures = 0
        return started + stopped

    def take_late(self, now_ns: int) -> list[Order]:
        """Orders whose time is up, which are open no longer."""
        late = []
        for held in (self.starting, self.stopping):
            for name in [name for name, order in held.items() if now_ns >= order.deadline_ns]:
                late.append(held.pop(name))
        return late

    def _load(self, view: RegisteredInstance) -> InstanceLoad:
        record, summary = view.record, view.summary
        requests, utilisation = 0, 0.0
        if summary is not None and summary.incarnation == record.incarnation:
            requests = summary.running + summary.waiting
            blocks = (summary.blocks_total - summary.blocks_free) / max(1, summary.blocks_total)
            utilisation = max(requests / max(1, record.max_sequences), blocks)
        return InstanceLoad(
            name=record.instance,
            since_ns=record.incarnation,
            requests=requests,
            utilisation=utilisation,
            stoppable=record.instance not in self.unstoppable,
        )
