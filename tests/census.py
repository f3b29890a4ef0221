"""A service of one's own, whole: its configuration, actor, ``build`` and ``main``. It counts decisions by instance.

In the repository these are ``services/census`` with config.py, actor.py, build.py, __main__.py, __init__.py and
README.md, a role in contracts/channels.py and a function in simulator/services.py: eight files.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec
from millrace.actor.config import BusConfig, TelemetryConfig
from millrace.actor.deps import ActorDeps
from millrace.actor.effects import Effect, StartTimer, Stop, Subscribe
from millrace.contracts.local import StopRequested, TimerFired
from millrace.contracts.message import Message
from millrace.contracts.observers import DecisionMade
from millrace.contracts.subjects import Subjects
from millrace.hosting.service import host
from millrace.membership.heartbeat import HEARTBEAT_NS, Heartbeat
from prometheus_client import CollectorRegistry, Counter

# config.py


class CensusConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of a census process.

    Attributes:
        instance: Whose decisions it counts; empty for all.
    """

    name: str = "census-0"
    bus: BusConfig = BusConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    instance: str = ""


# actor.py

ACCEPTS = (DecisionMade,)


class CensusActor:
    """Counts the decisions that it hears."""

    def __init__(self, config: CensusConfig, *, incarnation: int, registry: CollectorRegistry | None) -> None:
        self.name = config.name
        self.incarnation = incarnation
        self.decisions: dict[str, int] = {}
        self._only = config.instance
        self._subjects = Subjects(config.bus.cluster)
        self._heart = Heartbeat(subjects=self._subjects, role="census", name=self.name, incarnation=incarnation)
        self._counter = Counter("census_decisions", "Decisions by instance.", ["instance"], registry=registry)

    def start(self, now_ns: int) -> list[Effect]:
        return [Subscribe(subject=self._subjects.decisions()), *self._beat(now_ns)]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        match message.body:
            case DecisionMade(chosen=chosen) if chosen and self._only in ("", chosen):
                self.decisions[chosen] = self.decisions.get(chosen, 0) + 1
                self._counter.labels(chosen).inc()
            case TimerFired():
                return self._beat(now_ns)
            case StopRequested():
                return [self._heart.leaving(now_ns), Stop(reason="asked to stop")]
        return []

    def _beat(self, now_ns: int) -> list[Effect]:
        return [self._heart.presence(now_ns), StartTimer(name="beat", at_ns=now_ns + HEARTBEAT_NS)]

    def snapshot(self) -> dict[str, Any]:
        return {"name": self.name, "decisions": dict(self.decisions)}

    def check_invariants(self) -> None:
        assert "" not in self.decisions


# build.py


def build(config: CensusConfig, deps: ActorDeps) -> CensusActor:
    return CensusActor(config, incarnation=deps.incarnation, registry=deps.registry)


# __main__.py

if __name__ == "__main__":
    sys.exit(host("census", CensusConfig, ACCEPTS, build))
