"""A coordinator with a KV store that does what it is told."""

from collections.abc import Mapping
from random import Random
from typing import Any

import msgspec
from millrace.actor.deps import ActorDeps
from millrace.actor.effects import Effect, PutKey
from millrace.actor.group import ActorGroup
from millrace.contracts.local import BucketReady, KeyChanged, KeyFailure, KeyNotPut, KeyPut, TimerFired
from millrace.contracts.message import Body, Message
from millrace.contracts.plan import InstanceRole, Plan
from millrace.contracts.status import InstanceRecord, InstanceSummary
from prometheus_client import CollectorRegistry

from services.coordinator.build import build
from services.coordinator.config import CoordinatorConfig
from tests.testbed.messages import plain_record, plain_summary

S = 1_000_000_000
MODEL = "tiny"


class Bench:
    """A coordinator with a KV store that does what it is told, so that tests read as a story."""

    buckets = ("instance", "plan", "lease")

    def __init__(
        self,
        *instances: str,
        name: str = "coordinator-0",
        incarnation: int = 1,
        roles: Mapping[str, InstanceRole] | None = None,
        registry: CollectorRegistry | None = None,
        **config: Any,
    ) -> None:
        """Registers ``instances``, then a second passes; ``config``: further fields of the configuration."""
        settings = CoordinatorConfig(name=name, roles=dict(roles or {}), **config)
        self.actor = build(settings, ActorDeps(incarnation=incarnation, rng=Random(1), registry=registry))
        self.now_ns = 100 * S
        self.revision = 0
        self.summaries = 0
        self.keys: dict[tuple[str, str], tuple[Body, int]] = {}
        self.effects = self.actor.start(self.now_ns)
        for bucket in self.buckets:
            self.send(BucketReady(bucket=bucket))
        for instance in instances:
            self.register(instance)
        if instances:
            self.tick()

    def send(self, body: Body, *, store: bool = True) -> list[Effect]:
        """A summary without a time is of now."""
        if isinstance(body, InstanceSummary) and not body.at_ns:
            self.summaries += 1
            body = msgspec.structs.replace(body, at_ns=self.now_ns + self.summaries)
        effects = self.actor.handle(Message(body), self.now_ns)
        return self.take(effects) if store else effects

    def take(self, effects: list[Effect]) -> list[Effect]:
        """Has the store carry out what it is asked."""
        self.actor.check_invariants()
        for effect in effects:
            if isinstance(effect, PutKey):
                self.put(effect)
        return effects

    def put(self, effect: PutKey) -> None:
        held = self.keys.get((effect.bucket, effect.key))
        if effect.expected_revision is not None and effect.expected_revision != (held[1] if held else 0):
            self.send(KeyNotPut(correlation=effect.correlation, reason=KeyFailure.CONFLICT))
            return
        self.send(KeyPut(correlation=effect.correlation, revision=self.told(effect.bucket, effect.key, effect.value)))

    def told(self, bucket: str, key: str, value: Body) -> int:
        """Somebody writes a key, and the watch tells it; returns its revision."""
        self.revision += 1
        revision = self.revision
        self.keys[bucket, key] = (value, revision)
        self.send(KeyChanged(bucket=bucket, key=key, value=value, revision=revision))
        return revision

    @property
    def registered(self) -> list[str]:
        return self.actor.snapshot()["instances"]

    def all_report(self) -> None:
        """Every registered instance gives a sign of life."""
        for name in self.registered:
            self.send(summary(name))

    def register(self, name: str, incarnation: int = 5) -> None:
        self.send(KeyChanged(bucket="instance", key=name, value=record(name, incarnation), revision=1))

    def tick(self, seconds: float = 1.0) -> list[Effect]:
        self.now_ns += int(seconds * S)
        return [effect for name in timers(self.actor) for effect in self.send(TimerFired(name=name))]

    @property
    def plan(self) -> Plan | None:
        value = self.keys.get(("plan", MODEL))
        assert value is None or isinstance(value[0], Plan)
        return value[0] if value else None

    @property
    def planned(self) -> list[str]:
        return self.plan.stages[0].instances if self.plan else []


def timers(actor: ActorGroup) -> list[str]:
    """Names of the ticks of all its parts."""
    return ["tick", *(f"{part}|tick" for part in range(1, len(actor.parts)))]


def record(name: str, incarnation: int = 5) -> InstanceRecord:
    return plain_record(name, incarnation=incarnation, model=MODEL, max_sequences=64, token_budget=2048, block_size=32)


def summary(name: str, incarnation: int = 5, *, draining: bool = False) -> InstanceSummary:
    return plain_summary(name, incarnation=incarnation, model=MODEL, block_size=32, draining=draining)
