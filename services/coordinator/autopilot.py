"""Autopilot: replays the last window of the recording with other settings, and advises what would have been better.
Where it is ``on``, it puts that in force, and takes back what does not show (``adopting.py``).

An actor of its own, hosted in the coordinator's process. Owns the advice in force. A replay is `millrace what-if
--advise` in a child process at the lowest priority; which settings are tried and which win is the simulator's matter.
Advice changes when two windows in a row say the same, and is withdrawn when the cluster's file changes.

| message in | change | messages out |
|---|---|---|
| RequestFinished | counted | |
| TimerFired(tick) | a window begins | ReplayLoad where the window is long enough and has enough requests |
| LoadReplayed | the advice, where the window before said the same | PlanProposed where it is new, Log; ApplySettings
to adopt it, or to take back what was adopted |
| SettingsApplied | an adoption is watched, or ended | PlanProposed |
| ReplayFailed | no advice | PlanProposed where that is new, Log |
| ClusterChanged | no advice, a new window; adoptions that the file contradicts end | PlanProposed |
| StopRequested | | Stop; the child is killed with the process's other tasks |

Overload: one replay at a time, of REQUESTS_MAX requests, and CPU_SHARE of a core over time.
"""

from __future__ import annotations

from typing import Any

import msgspec
from millrace.actor.effects import Effect, Log
from millrace.contracts.local import KeyChanged
from millrace.contracts.message import Body
from millrace.contracts.observers import RequestFinished
from millrace.contracts.plan import Advice
from millrace.policies.objectives import configured_objectives, objectives_text
from millrace.workloads.recording import ADVISED_MIN

from services.coordinator.adopting import Adoptions, LoadReplayed, policy_of
from services.coordinator.config import CoordinatorConfig
from services.coordinator.led_models import Controller
from services.coordinator.metrics import AutopilotMetrics

#: Replays may take so much of a core on average; longer ones are further apart.
CPU_SHARE = 0.05

#: A window is no longer: the recording keeps an hour.
WINDOW_NS = 3_600_000_000_000

#: Requests of a window that are replayed, the last ones.
REQUESTS_MAX = 1_000

#: A replay that takes longer is killed, seconds. At the lowest priority it may have to wait for others for long.
LIMIT_S = 3_600.0


class ReplayLoad(Effect, frozen=True, kw_only=True):
    """Replays the load of the last seconds with other settings: LoadReplayed or ReplayFailed follows, exactly one.

    Attributes:
        limit_s: A replay that takes longer is killed.
        beside: Settings that are replayed whatever comes of them; empty for none.
    """

    last_s: float
    requests_max: int
    limit_s: float
    beside: str = ""


class ReplayFailed(Body, frozen=True, kw_only=True, tag="local.ReplayFailed/1"):
    """A replay ended without an answer."""

    detail: str


class ClusterChanged(Body, frozen=True, kw_only=True, tag="local.ClusterChanged/1"):
    """The cluster's file is read for the first time, or another one: what was replayed before says nothing of it."""

    text: str = ""


class SettingsApplied(Body, frozen=True, kw_only=True, tag="local.SettingsApplied/1"):
    """The cluster has changed; or not, where ``failed`` says why."""

    failed: str = ""


class AutopilotActor(Controller):
    """Advises on the models that are led here."""

    def __init__(self, config: CoordinatorConfig, *, incarnation: int, metrics: AutopilotMetrics) -> None:
        super().__init__(config, by="autopilot", incarnation=incarnation)
        self._interval_s = config.autopilot_interval_s
        self._objectives = objectives_text(configured_objectives(config.stages.parameters, config.step_bounds))
        self._metrics = metrics
        self._window_ns = 0  # begin of the present window; 0 while no model is led
        self._due_ns = 0
        self._requests = 0
        self._began_ns = 0  # of the replay under way; 0 for none
        self._last: str | None = None  # the policy that the last window's advice is about
        self._given = Advice()
        self._cluster = ""  # its file, as last heard
        self._adopts = config.autopilot == "on"
        self._adoptions = Adoptions(self._interval_s)

    def _hears(self) -> list[str]:
        return [self._subjects.outcomes()]

    def _on(self, body: Body, reply_to: str, now_ns: int) -> list[Effect]:
        match body:
            case RequestFinished() as body:
                self._requests += self._led.leads(body.model, now_ns)
            case KeyChanged() as body:
                self._led.on_key(body, now_ns)
            case LoadReplayed() as body:
                return self._on_replayed(body, now_ns)
            case ReplayFailed() as body:
                return self._on_failed(body, now_ns)
            case SettingsApplied() as body:
                return [*self._adoptions.on_applied(body.failed, now_ns), *self._begin(now_ns)]
            case ClusterChanged() as body:
                first, self._cluster = not self._cluster, body.text
                self._adoptions.on_cluster(body.text)
                if not self._window_ns:
                    return []
                return self._give(self._given, now_ns) if first else self._begin(now_ns)
        return []

    def _take_over(self, now_ns: int) -> list[Effect]:
        """Adoptions of the coordinator before this one stay, or end as they would have there."""
        plans = (self._led.plan(model) for model in self._led.led(now_ns) if self._adopts)
        advice = [plan.advice for plan in plans if plan is not None and plan.advice is not None]
        self._adoptions.restore(adoption for each in advice for adoption in each.adopted)
        return self._begin(now_ns)

    def _begin(self, now_ns: int) -> list[Effect]:
        """A first window."""
        self._window_ns, self._due_ns, self._requests = now_ns, now_ns + round(self._interval_s * 1e9), 0
        self._last = None
        waits = f"waits for {ADVISED_MIN} requests, and for {self._interval_s:g} s, before the first replay"
        waits += "; what two replays advise is put in force" if self._adopts else ""
        return self._give(Advice(evidence=f"{waits}; objectives: {self._objectives}"), now_ns)

    def _on_tick(self, now_ns: int) -> list[Effect]:
        if not self._led.led(now_ns):
            self._window_ns = 0
            self._adoptions.restore([])
            return []
        if not self._window_ns:
            return self._take_over(now_ns)
        if self._began_ns or now_ns < self._due_ns or self._requests < ADVISED_MIN:
            return []
        last_s = min(WINDOW_NS, now_ns - self._window_ns) / 1e9
        self._began_ns = self._window_ns = now_ns
        self._requests = 0
        beside = self._adoptions.open.before if self._adoptions.open is not None else ""
        return [ReplayLoad(last_s=last_s, requests_max=REQUESTS_MAX, limit_s=LIMIT_S, beside=beside)]

    def _on_replayed(self, body: LoadReplayed, now_ns: int) -> list[Effect]:
        settings, given, stale = body.advice.settings, self._given.settings, self._began_ns != self._window_ns
        policy = policy_of(settings)
        self._ended(body.cpu_s, "better" if settings else "as_is", now_ns)
        fields = {"settings": settings, "requests": body.requests, "cpu_s": round(body.cpu_s, 1)}
        log = Log(level="info", event="load_replayed", fields=fields | {"evidence": body.advice.evidence})
        if stale:
            return [log]
        again, self._last = policy == self._last, policy
        adopted = self._adopted(body, now_ns, again=again)
        if given and (policy == policy_of(given) or not again):
            advice = self._given
        elif again or not settings:
            advice = body.advice
        else:
            better = f"{settings} was better in the last window; the next one decides"
            advice = Advice(evidence=f"{better}: {body.advice.evidence}")
        return [log, *adopted, *self._give(advice, now_ns)]

    def _adopted(self, body: LoadReplayed, now_ns: int, *, again: bool) -> list[Effect]:
        """Changes that the window decides on. One coordinator adopts: the one that leads all models."""
        if self._adoptions.open is not None:
            changes = self._adoptions.judge(body, now_ns)
        elif again and body.advice.settings and self._adopts and self._led.leads_all(now_ns):
            changes = self._adoptions.adopt(body, now_ns)
        else:
            return []
        return [*(Log(level="info", event="settings_changed", fields={"why": e.reason}) for e in changes), *changes]

    def _on_failed(self, body: ReplayFailed, now_ns: int) -> list[Effect]:
        self._ended((now_ns - self._began_ns) / 1e9, "failed", now_ns)
        log = Log(level="warning", event="replay_failed", fields={"detail": body.detail})
        return [log, *self._give(Advice(evidence=f"no replay: {body.detail}"), now_ns)]

    def _ended(self, cpu_s: float, outcome: str, now_ns: int) -> None:
        pause_s = max(self._interval_s, cpu_s / CPU_SHARE)
        self._due_ns, self._began_ns = max(self._due_ns, self._began_ns + round(pause_s * 1e9)), 0
        self._metrics.cpu_seconds += cpu_s
        self._metrics.replays.add(outcome)

    def _give(self, advice: Advice, now_ns: int) -> list[Effect]:
        """Into the plan of the first model that is led."""
        led = self._led.led(now_ns)
        advice = msgspec.structs.replace(advice, adopted=list(self._adoptions.by_policy.values()))
        if advice == self._given or not led:
            return []
        self._given = advice
        return [self._proposal(led[0], now_ns, advice=advice)]

    def snapshot(self) -> dict[str, Any]:
        return {"advice": self._given.settings}

    def check_invariants(self) -> None:
        assert self._began_ns <= self._window_ns or not self._began_ns
