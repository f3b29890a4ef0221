"""A person at work on a cascade who never lets its plan be: other thresholds and judges, tiers that come and go, and
instances that change their model.
"""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
from millrace.actor.actor import Actor
from millrace.actor.deps import ActorDeps
from millrace.actor.effects import Effect, PutKey, StartTimer, Stop, WatchKeys
from millrace.contracts.cascade import CascadeMove, CascadePlan, CascadeTier, ReplicaCount
from millrace.contracts.local import BusReconnected, KeyChanged, StopRequested, TimerFired
from millrace.contracts.message import Message
from millrace.sim.runtime_sim import MILLISECOND

#: Between two plans: an answer is often judged by another plan than the one it began under.
PERIOD_NS = 700 * MILLISECOND

#: Author of the plans: a person's thresholds are not set back by the coordinator.
AUTHOR = "operator"

#: A move that is not done after so long goes back: most are done in 5 s.
MOVE_NS = 12_000 * MILLISECOND


class SwapConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of the planner.

    Attributes:
        models: Of the tiers.
        judging: Model that judges; empty for none.
        instances_max: Of each model that can run, the judging one last.
        devices: Instances that run at once.
    """

    name: str
    cascade: str
    models: tuple[str, ...]
    judging: str = ""
    instances_max: tuple[int, ...]
    devices: int


class RestlessCascadePlanner:
    """Writes plans; takes up its predecessor's epoch after a restart."""

    def __init__(self, config: SwapConfig, rng: Random) -> None:
        self.name = config.name
        self._config = config
        self._rng = rng
        self._epoch = 0
        self._move: CascadeMove | None = None
        self._counts: dict[str, int] = {}
        self._revision = 0
        self._now_ns = 0

    def start(self, now_ns: int) -> list[Effect]:
        """Watches its own plans."""
        return [WatchKeys(bucket="cascade"), StartTimer(name="swap", at_ns=now_ns + PERIOD_NS)]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        """Plans anew with each timer."""
        self._now_ns = now_ns
        match message.body:
            case KeyChanged(bucket="cascade", value=CascadePlan() as plan, revision=revision):
                self._epoch, self._revision, self._move = max(self._epoch, plan.epoch), revision, plan.move
                self._counts = {tier.model: sum(each.count for each in tier.replicas) for tier in plan.members}
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
        move = self._next_move()
        if move is None and rng.random() < 0.1:
            rng.shuffle(models)
        one = [ReplicaCount(tensor_parallel=1, pipeline_parallel=1, count=1)]
        empty = rng.choice(models) if rng.random() < 0.2 else ""
        tiers = [
            CascadeTier(
                model=model,
                threshold=rng.choice((0.0, 50.0, 65.0, 75.0, 85.0, 100.0)),
                replicas=[] if model == empty else one,
            )
            for model in models
        ]
        judge = rng.choice(("confidence", "confidence", "llm"))
        judge_tier = None
        if self._config.judging:
            judge = rng.choice(("confidence", "llm", "llm", "llm"))
            judge_tier = CascadeTier(model=self._config.judging, replicas=one if rng.random() < 0.8 else [])
        return CascadePlan(
            cascade=self._config.cascade,
            epoch=epoch,
            tiers=tiers,
            judge=judge,
            judge_tier=judge_tier,
            move=move,
            coordinator=AUTHOR,
            reason="swap",
        )

    def _next_move(self) -> CascadeMove | None:
        """The move under way, which few interrupt; else now and then a new one."""
        rng, config = self._rng, self._config
        if self._move is not None and rng.random() < 0.98:
            return self._move
        if rng.random() < 0.7:
            return None
        members = [*config.models, *([config.judging] if config.judging else [])]
        counts = [0] * len(members)
        for _ in range(config.devices):
            open_ = [tier for tier, most in enumerate(config.instances_max) if counts[tier] < most]
            counts[rng.choice(open_)] += 1
        return CascadeMove(
            instances=counts,
            before=[self._counts.get(model, 0) for model in members] if any(self._counts.values()) else [],
            until_ns=self._now_ns + MOVE_NS,
            thresholds=[rng.choice((0.0, 50.0, 75.0)) for _ in config.models] if rng.random() < 0.5 else [],
        )

    def snapshot(self) -> dict[str, Any]:
        """State for people and checkers."""
        return {"name": self.name, "epoch": self._epoch}

    def check_invariants(self) -> None:
        """Nothing can contradict itself."""


def build(config: SwapConfig, deps: ActorDeps) -> Actor:
    """The actor of a configuration."""
    return RestlessCascadePlanner(config, deps.rng)
