"""An autopilot that leads a model: what it hears, the replays that it begins, and what it proposes and applies."""

from millrace.actor.config import BusConfig
from millrace.actor.effects import Effect, Publish
from millrace.contracts.coordinator import PlanProposed
from millrace.contracts.local import KeyChanged, TimerFired
from millrace.contracts.message import Body, Message
from millrace.contracts.observers import RequestFinished
from millrace.contracts.plan import Advice, Lease, Plan

from services.coordinator.adopting import ApplySettings
from services.coordinator.autopilot import AutopilotActor, ReplayLoad
from services.coordinator.config import CoordinatorConfig
from services.coordinator.metrics import AutopilotMetrics
from tests.testbed.messages import plain

S = 1_000_000_000
T0 = 1_700_000_000 * S
INTERVAL_S = 60
DONE = plain(RequestFinished, request="r", prompt_tokens=9, output_tokens=[9], arrival_ns=T0, e2e_ns=9)


class Autopilot:
    """One autopilot, after its first tick, with its advice and the settings that it put in force, in order."""

    def __init__(self, *, leads: bool = True, mode: str = "advise", found: Plan | None = None) -> None:
        config = CoordinatorConfig(
            bus=BusConfig(cluster="c"), recording="somewhere", autopilot=mode, autopilot_interval_s=INTERVAL_S
        )
        self.metrics = AutopilotMetrics()
        self.actor = AutopilotActor(config, incarnation=7, metrics=self.metrics)
        self.now_ns = T0
        self.proposed: list[Advice] = []
        self.applied: list[str] = []
        self.actor.start(T0)
        lease = Lease(model="m", holder="coordinator-0" if leads else "other", incarnation=7, until_ns=T0 * 2)
        if found is not None:
            self.hear(KeyChanged(bucket="plan", key="m", value=found, revision=1))
        self.hear(KeyChanged(bucket="lease", key="m", value=lease, revision=1))
        self.tick()

    def hear(self, body: Body) -> list[Effect]:
        effects = self.actor.handle(Message(body), self.now_ns)
        self.actor.check_invariants()
        bodies = [each.body for each in effects if isinstance(each, Publish)]
        self.proposed += [each.advice for each in bodies if isinstance(each, PlanProposed) and each.advice]
        self.applied += [each.settings for each in effects if isinstance(each, ApplySettings)]
        return effects

    def tick(self, *, seconds: float = 0, requests: int = 0) -> ReplayLoad | None:
        """After so many requests, and seconds, the replay that begins."""
        for _ in range(requests):
            self.hear(DONE)
        self.now_ns += round(seconds * S)
        return next((each for each in self.hear(TimerFired(name="tick")) if isinstance(each, ReplayLoad)), None)
