"""A person at work on a cascade who never lets its plan be: other thresholds and judges, tiers that come and go."""

from __future__ import annotations

from random import Random

import msgspec
from millrace.actor.actor import Actor
from millrace.actor.deps import ActorDeps
from millrace.actor.effects import Effect, PutKey, StartTimer, Stop, WatchKeys
from millrace.contracts.cascade import CascadePlan, CascadeTier
from millrace.contracts.local import BusReconnected, KeyChanged, StopRequested, TimerFired
from millrace.contracts.message import Message
from millrace.sim.runtime_sim import MILLISECOND
from millrace.sim.stand_in import StandIn

#: Between two plans: an answer is often judged by another plan than the one it began under.
PERIOD_NS = 700 * MILLISECOND

#: Author of the plans: a person's thresholds are not set back by the coordinator.
AUTHOR = "operator"


class SwapConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of the planner.

    Attributes:
        models: Of the tiers.
    """

    name: str
    cascade: str
    models: tuple[str, ...]


class RestlessCascadePlanner(StandIn):
    """Writes plans; takes up its predecessor's epoch after a restart."""

    def __init__(self, config: SwapConfig, rng: Random) -> None:
        self.name = config.name
        self._config = config
        self._rng = rng
        self._epoch = 0
        self._revision = 0

    def start(self, now_ns: int) -> list[Effect]:
        return [WatchKeys(bucket="cascade"), StartTimer(name="swap", at_ns=now_ns + PERIOD_NS)]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        match message.body:
            case KeyChanged(bucket="cascade", value=CascadePlan() as plan, revision=revision):
                self._epoch, self._revision = max(self._epoch, plan.epoch), revision
            case BusReconnected():
                self._revision = 0  # the store may be a new one; if it is not, the watch tells the revision again
            case TimerFired():
                return [StartTimer(name="swap", at_ns=now_ns + PERIOD_NS), self._put()]
            case StopRequested():
                return [Stop(reason="asked to stop")]
        return []

    def _put(self) -> PutKey:
        epoch = self._epoch + 1
        return PutKey(
            bucket="cascade",
            key=self._config.cascade,
            value=self._plan(epoch),
            correlation=f"cascade/{epoch}",
            expected_revision=self._revision,
        )

    def _plan(self, epoch: int) -> CascadePlan:
        rng = self._rng
        models = list(self._config.models)
        if rng.random() < 0.1:
            rng.shuffle(models)
        empty = rng.choice(models) if rng.random() < 0.2 else ""
        tiers = [
            CascadeTier(
                model=model,
                threshold=rng.choice((0.0, 50.0, 65.0, 75.0, 85.0, 100.0)),
                instances=int(model != empty),
            )
            for model in models
        ]
        judge = rng.choice(("confidence", "confidence", "llm"))
        return CascadePlan(
            cascade=self._config.cascade,
            epoch=epoch,
            tiers=tiers,
            judge=judge,
            coordinator=AUTHOR,
            reason="swap",
        )


def build(config: SwapConfig, deps: ActorDeps) -> Actor:
    """The actor of a configuration."""
    return RestlessCascadePlanner(config, deps.rng)
