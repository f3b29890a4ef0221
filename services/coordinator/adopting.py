"""Settings that the autopilot puts in force, and takes back where they do not show. Pure.

Owns one adoption for each policy. The plan has them, so that the next coordinator goes on with them.

| phase | ends with |
|---|---|
| SWITCHING | processes that have changed: WATCHED; a failure: RETURNING; a change that ended with its coordinator, or
met a person's, is tried again after the next window |
| WATCHED | the next window: KEPT, or RETURNING |
| RETURNING | processes that have changed back: RETURNED; a failure: tried again after the next window |
| RETURNED | its time, twice as long as the time before: the policy may be adopted again |
| any in force | a cluster's file that says something else, applied by a person: OVERRULED, for good |

At most one is SWITCHING, WATCHED or RETURNING.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

import msgspec
from millrace.actor.effects import Effect
from millrace.actor.errors import ConfigError
from millrace.cluster.reading import parse_cluster
from millrace.cluster.settings import present_settings, with_cluster_settings
from millrace.cluster.spec import ClusterSpec
from millrace.contracts.coordinator import UNDER_WAY
from millrace.contracts.message import Body
from millrace.contracts.plan import Adoption, AdoptionPhase, Advice

#: Tails that are compared, and the share within the objectives.
TAILS, WITHIN = ("ttft_p99", "tpot_p99", "e2e_p99"), "within"
DECIDING = {"e2e_p99", WITHIN}

#: An adoption is taken back where a tail is longer by this factor, or the share smaller by this much, than with the
#: former settings. A window with a smaller share of the rate of requests before takes nothing back.
WORSE, WORSE_SHARE, RATE_MIN = 1.25, 0.02, 0.8

#: Windows after which a policy that was taken back may be adopted again, the first time.
PAUSE_WINDOWS = 8

SWITCHING, WATCHED, KEPT, RETURNING, RETURNED, OVERRULED = AdoptionPhase


class ApplySettings(Effect, frozen=True, kw_only=True):
    """Changes the cluster as `millrace apply` does: SettingsApplied follows, unless that ends this process."""

    settings: str
    reason: str


class LoadReplayed(Body, frozen=True, kw_only=True, tag="local.LoadReplayed/1"):
    """Result of a replay.

    Attributes:
        requests: That were replayed.
        cpu_s: Processor time that it took.
        recorded, missed: Of the unchanged cluster, as in Adoption.
        told: Of each setting that was tried, over the unchanged cluster as replayed.
    """

    advice: Advice
    requests: int
    cpu_s: float
    recorded: dict[str, float] = {}
    missed: dict[str, float] = {}
    told: dict[str, dict[str, float]] = {}


class Adoptions:
    """Those of one autopilot, by policy."""

    def __init__(self, interval_s: float) -> None:
        self.by_policy: dict[str, Adoption] = {}
        self._pause_ns = round(PAUSE_WINDOWS * interval_s * 1e9)
        self._spec: ClusterSpec | None = None
        self._changing = False  # by a child of this process

    @property
    def open(self) -> Adoption | None:
        """The one that is not decided yet."""
        return next((each for each in self.by_policy.values() if each.phase in (SWITCHING, WATCHED, RETURNING)), None)

    def restore(self, adoptions: Iterable[Adoption]) -> None:
        """Those of a plan."""
        self.by_policy = {policy_of(each.settings): each for each in adoptions}

    def on_cluster(self, text: str) -> None:
        """The cluster's file is this one now."""
        self._spec = None
        with suppress(ConfigError):  # half written: nothing is adopted until it can be read
            self._spec = parse_cluster(text)
            for each in list(self.by_policy.values()):
                between = each.phase in (SWITCHING, RETURNING) and self._present(each.settings) == each.before
                stands = between or with_cluster_settings(self._spec, each.settings.split()) == self._spec
                if each.phase not in (RETURNED, OVERRULED) and not stands:
                    self._set(each, OVERRULED, evidence="a person applied something else")

    def _present(self, settings: str) -> str:
        return " ".join(present_settings(self._spec, settings.split())) if self._spec is not None else ""

    def adopt(self, body: LoadReplayed, now_ns: int) -> list[ApplySettings]:
        """Puts what is advised in force, unless its policy is left alone, another adoption is open, or nothing could be
        compared with it.
        """
        advice = body.advice
        last, before = self.by_policy.get(policy_of(advice.settings)), self._present(advice.settings)
        alone = last is not None and (last.phase is OVERRULED or now_ns < last.until_ns)
        if self.open is not None or alone or not before or not body.missed.keys() >= DECIDING:
            return []
        pause_ns = 2 * last.pause_ns if last is not None and last.phase is RETURNED else self._pause_ns
        seen = {"evidence": advice.evidence, "missed": body.missed, "recorded": body.recorded}
        self._set(Adoption(settings=advice.settings, before=before), SWITCHING, at_ns=now_ns, pause_ns=pause_ns, **seen)
        return self._apply(advice.settings, f"adopted: {advice.evidence}")

    def on_applied(self, failed: str, now_ns: int) -> list[ApplySettings]:
        """Processes have changed, or could not be changed."""
        self._changing, found = False, self.open
        if found is None or found.phase is WATCHED:
            return []  # a person's change came between
        if found.phase is SWITCHING and failed and UNDER_WAY not in failed:
            return self._take_back(found, f"it could not be carried out: {failed}", now_ns)
        if not failed:
            self._set(found, WATCHED if found.phase is SWITCHING else RETURNED)
        return []

    def judge(self, body: LoadReplayed, now_ns: int) -> list[ApplySettings]:
        """Decides by a window with the adopted settings; not against them while the load is far lower than before."""
        found = self.open
        if found is None or self._changing:
            return []
        if found.phase is not WATCHED:
            return self._apply(found.settings if found.phase is SWITCHING else found.before, "goes on")
        # As recorded, over the former settings as replayed on the same load, less what their replay missed before.
        live = over(over(found.missed, body.missed), body.told.get(found.before, {}))
        last = over(body.recorded, found.recorded)
        if not live.keys() & last.keys() >= DECIDING:
            return self._take_back(found, "no request was served that could be compared", now_ns)
        text = f"live over a replay of the former settings: {_text(live)}; over the window before: {_text(last)}"
        why = shortfall(live)
        if why and body.recorded["rate"] < RATE_MIN * found.recorded["rate"]:
            return []
        if why and shortfall(last):
            return self._take_back(found, f"{why}; {text}", now_ns)
        self._set(found, KEPT, evidence=f"{text}; {found.evidence}")
        return []

    def _take_back(self, found: Adoption, why: str, now_ns: int) -> list[ApplySettings]:
        self._set(found, RETURNING, evidence=why, until_ns=now_ns + found.pause_ns)
        return self._apply(found.before, f"taken back: {why}")

    def _apply(self, settings: str, reason: str) -> list[ApplySettings]:
        self._changing = True
        return [ApplySettings(settings=settings, reason=reason)]

    def _set(self, adoption: Adoption, phase: AdoptionPhase, **fields: object) -> None:
        self.by_policy[policy_of(adoption.settings)] = msgspec.structs.replace(adoption, phase=phase, **fields)


def over(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Ratios of the tails that both have, and the difference of the share."""
    both = after.keys() & before.keys()
    found = {name: after[name] / before[name] for name in TAILS if name in both}
    return found | {name: after[name] - before[name] for name in (WITHIN,) if name in both}


def _text(figures: Mapping[str, float]) -> str:
    tails = (f"{name} {figures[name] - 1:+.0%}" for name in TAILS if name in figures)
    return f"{', '.join(tails)}, within {100 * figures[WITHIN]:+.1f} points"


def shortfall(live: Mapping[str, float]) -> str:
    """Reason to take an adoption back; empty where it shows."""
    if longer := [name for name in TAILS if live.get(name, 0.0) > WORSE]:
        return f"longer than before: {', '.join(longer)}"
    if live[WITHIN] < -WORSE_SHARE:
        return "fewer requests within the objectives than before"
    return "nothing is better than before" if live[WITHIN] <= 0 and live["e2e_p99"] >= 1 else ""


def policy_of(settings: str) -> str:
    """The policy that settings are about, such as ``policies.dispatch``."""
    return ".".join(settings.partition("=")[0].split(".")[:2])
