"""A coordinator that writes plans of cascades, too: the coordinator of models with `cascades.py` beside it.

Owns nothing itself; messages about cascades go to one part, all others to the other one.

| message in | change | messages out |
|---|---|---|
| KeyChanged(cascade / cascade_lease) | what another coordinator or an operator wrote is taken over | |
| TimerFired(tick), KeyChanged(instance), InstanceSummary, ServicePresence | after the models' part |
PutKey(cascade_lease), PutKey(cascade) where thresholds or instances changed |
| RequestFinished (of a cascade) | rate, lengths and scores of its traffic | perhaps PlanCascade, at the next tick |
| ShadowFinished | scores of its later tiers, on a fair sample | |
| CascadePlanned, CascadePlanningFailed | no planner is at work | PutKey(cascade) where other thresholds are better |
| TimerFired(tick), Replied, RequestFailed | a move goes on | Request(StartInstance / StopInstance), PutKey(cascade) |
| KeyPut, KeyNotPut (of cascades) | write done, or lost to another writer | |
| StopRequested | | DeleteKey(cascade_lease) where held |
| everything else | as in actor.py | |

Invariants: as in actor.py; a cascade's plan is written only under its own unexpired lease.
"""

from __future__ import annotations

from typing import Any

from millrace.actor.effects import Effect, Stop, Subscribe
from millrace.contracts.local import (
    BucketReady,
    BusReconnected,
    KeyChanged,
    KeyNotPut,
    KeyPut,
    KeyUnreadable,
    Replied,
    RequestFailed,
    StopRequested,
    TimerFired,
)
from millrace.contracts.message import Message
from millrace.contracts.observers import RequestFinished, ShadowFinished
from millrace.contracts.subjects import Subjects

from services.coordinator.actor import CoordinatorActor
from services.coordinator.cascade_effects import CascadePlanned, CascadePlanningFailed
from services.coordinator.cascade_moves import PREFIX
from services.coordinator.cascades import BUCKET, LEASE_BUCKET, Cascades

_OWN = (BUCKET, LEASE_BUCKET)


class CascadingCoordinator:
    """One coordinator of models and of their cascades."""

    def __init__(self, models: CoordinatorActor, cascades: Cascades, *, cluster: str) -> None:
        self.name = models.name
        self._subjects = Subjects(cluster)
        self.models = models
        self.cascades = cascades

    def start(self, now_ns: int) -> list[Effect]:
        """Begins both parts."""
        effects = self.models.start(now_ns)
        outcomes = Subscribe(subject=self._subjects.outcomes())
        listens = self.cascades.learns and outcomes not in effects
        shadows = [Subscribe(subject=self._subjects.shadows())] if self.cascades.learns else []
        return [*effects, *([outcomes] if listens else []), *shadows, *self.cascades.start()]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        """See the table above."""
        match message.body:
            case KeyChanged() as body if body.bucket in _OWN:
                return [*self.cascades.on_key(body, now_ns), *self._write(now_ns)]
            case KeyPut() as body if _of_cascades(body.correlation):
                self.cascades.on_put(body)
                return []
            case KeyNotPut() as body if _of_cascades(body.correlation):
                return self.cascades.on_not_put(body)
            case BucketReady() as body if body.bucket in _OWN:
                self.cascades.on_ready(body)
                return self._write(now_ns)
            case KeyUnreadable() as body if body.bucket in _OWN:
                return self.cascades.on_unreadable(body)
            case CascadePlanned() as body:
                return self.cascades.on_planned(body, now_ns)
            case CascadePlanningFailed() as body:
                return self.cascades.on_planning_failed(body)
            case Replied() | RequestFailed() as body if body.correlation.startswith(PREFIX):
                return self.cascades.on_answer(body, now_ns)
            case ShadowFinished() as body:
                self.cascades.on_shadow(body)
                return []
            case RequestFinished() as body:
                self.cascades.on_outcome(body)
                return self.models.handle(message, now_ns)
            case StopRequested():
                effects = self.models.handle(message, now_ns)
                assert isinstance(effects[-1], Stop), "the coordinator ends with Stop"
                return [*self.cascades.stop(now_ns), *effects]
            case body:
                effects = self.models.handle(message, now_ns)
                if isinstance(body, BusReconnected):
                    self.cascades.on_reconnected()
                    return effects
                changed = isinstance(body, TimerFired | KeyChanged) or bool(effects)
                return [*effects, *self._write(now_ns)] if changed else effects

    def _write(self, now_ns: int) -> list[Effect]:
        models = {tier.model for state in self.cascades.states.values() for tier in state.config.members}
        return self.cascades.tick({model: self.models.serving(model, now_ns) for model in sorted(models)}, now_ns)

    def snapshot(self) -> dict[str, Any]:
        """Of both parts."""
        return self.models.snapshot() | {"cascades": self.cascades.snapshot()}

    def check_invariants(self) -> None:
        """Of the models' part; plans check themselves."""
        self.models.check_invariants()


def _of_cascades(correlation: str) -> bool:
    return correlation.partition("/")[0] in _OWN
