"""A coordinator that never lets a plan be: other stages, other cuts and other members every two seconds."""

from __future__ import annotations

from random import Random

import msgspec
from millrace.actor.actor import Actor
from millrace.actor.deps import ActorDeps
from millrace.actor.effects import Effect, PutKey, StartTimer, Stop, WatchKeys
from millrace.contracts.local import BusReconnected, KeyChanged, StopRequested, TimerFired
from millrace.contracts.message import Body, Message
from millrace.contracts.plan import Plan, Stage
from millrace.contracts.status import InstanceRecord
from millrace.sim.runtime_sim import MILLISECOND
from millrace.sim.stand_in import StandIn

#: Wire types that it takes: none, it only watches keys.
ACCEPTS: tuple[type[Body], ...] = ()

#: Before the first plan: instances have registered themselves by then.
FIRST_NS = 500 * MILLISECOND


class RestlessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of the planner.

    Attributes:
        cuts: Lengths of which it draws up to ``stages_max - 1``, tokens.
        period_ns: Between two plans; 0 leaves the first one in force.
        stages_max: With 1 there is one stage at all times.
    """

    name: str
    model: str
    cuts: tuple[int, ...]
    period_ns: int = 2_000 * MILLISECOND
    stages_max: int = 3


class RestlessPlanner(StandIn):
    """Writes plans; takes up its predecessor's epoch after a restart."""

    def __init__(self, config: RestlessConfig, rng: Random) -> None:
        self.name = config.name
        self._config = config
        self._rng = rng
        self._instances: dict[str, str] = {}
        self._plan: Plan | None = None
        self._revision = 0

    def start(self, now_ns: int) -> list[Effect]:
        watches = [WatchKeys(bucket="instance"), WatchKeys(bucket="plan")]
        return [*watches, StartTimer(name="plan", at_ns=now_ns + FIRST_NS)]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        """Plans anew with each timer, and once more where the set of instances has changed."""
        match message.body:
            case KeyChanged(bucket="plan", value=Plan() as plan, revision=revision):
                self._plan, self._revision = plan, revision
            case KeyChanged(bucket="instance", key=key, value=InstanceRecord(instance=name)):
                self._instances[key] = name
            case KeyChanged(bucket="instance", key=key):
                self._instances.pop(key, None)
            case BusReconnected():
                self._revision = 0  # the store may be a new one; if it is not, the watch tells the revision again
            case TimerFired():
                return self._on_timer(now_ns)
            case StopRequested():
                return [Stop(reason="asked to stop")]
        return []

    def _on_timer(self, now_ns: int) -> list[Effect]:
        period_ns = self._config.period_ns or FIRST_NS
        timer = StartTimer(name="plan", at_ns=now_ns + period_ns)
        known = self._plan
        planned = {name for stage in known.stages for name in stage.instances} if known is not None else set()
        stands = not self._config.period_ns and planned == set(self._instances.values())
        if not self._instances or stands:
            return [timer]
        return [timer, self._put(known)]

    def _put(self, known: Plan | None) -> PutKey:
        epoch = known.epoch + 1 if known is not None else 1
        plan = Plan(
            model=self._config.model,
            epoch=epoch,
            boundary_epoch=epoch,
            stages=self._stages(),
            coordinator=self.name,
            policy="restless",
            reason="two seconds are over",
        )
        return PutKey(
            bucket="plan",
            key=self._config.model,
            value=plan,
            correlation=f"plan/{epoch}",
            expected_revision=self._revision,
        )

    def _stages(self) -> list[Stage]:
        """Stages over all lengths; each has an instance."""
        names = sorted(self._instances.values())
        most = min(self._config.stages_max, len(names), len(self._config.cuts) + 1)
        count = self._rng.randrange(1, most + 1) if self._config.period_ns else most
        bounds = [0, *sorted(self._rng.sample(self._config.cuts, count - 1)), None]
        self._rng.shuffle(names)
        return [
            Stage(
                name=f"s{index}",
                length_min=begin or 0,
                length_max=bounds[index + 1],
                instances=sorted(names[index::count]),
            )
            for index, begin in enumerate(bounds[:-1])
        ]


def build(config: RestlessConfig, deps: ActorDeps) -> Actor:
    """The actor of a configuration."""
    return RestlessPlanner(config, deps.rng)
