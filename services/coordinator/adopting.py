"""Settings that the autopilot puts in force, and takes back where they do not show. Pure.

Owns one adoption for each policy. The plan has them, so that the next coordinator goes on with them.

| phase | ends with |
|---|---|
| SWITCHING | processes that have changed: WATCHED; a failure: RETURNING; a change that ended with its coordinator goes
on after the next window |
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
from millrace.contracts.plan import Adoption, AdoptionPhase, Advice

#: Tails that are compared, and the share within the objectives.
TAILS, WITHIN = ("ttft_p99", "tpot_p99", "e2e_p99"), "within"

#: An adoption is taken back where a tail is longer by this factor, or the share smaller by this much, than with the
#: former settings.
WORSE, WORSE_SHARE = 1.25, 0.02

#: Windows after which a policy that was taken back may be adopted again, the first time.
PAUSE_WINDOWS = 8

SWITCHING, WATCHED, KEPT, RETURNING, RETURNED, OVERRULED = AdoptionPhase


class ApplySettings(Effect, frozen=True, kw_only=True):
    """Changes the cluster as `millrace apply` does: SettingsApplied follows, unless that ends this process."""

    settings: str
    reason: str


class Adoptions:
    """Those of one autopilot."""

    def __init__(self, interval_s: float) -> None:
        self._by_policy: dict[str, Adoption] = {}
        self._pause_ns = round(PAUSE_WINDOWS * interval_s * 1e9)
        self._spec: ClusterSpec | None = None
        self._changing = False  # by a child of this process

    def all(self) -> list[Adoption]:
        return list(self._by_policy.values())

    @property
    def open(self) -> Adoption | None:
        """The one that is not decided yet."""
        return next((each for each in self.all() if each.phase in (SWITCHING, WATCHED, RETURNING)), None)

    def restore(self, adoptions: Iterable[Adoption]) -> None:
        """Those of a plan."""
        self._by_policy = {_policy(each.settings): each for each in adoptions}

    def on_cluster(self, text: str) -> None:
        """The cluster's file is this one now."""
        self._spec = None
        with suppress(ConfigError):
            self._spec = parse_cluster(text)
            for each in self.all():
                between = each.phase in (SWITCHING, RETURNING) and self._present(each.settings) == each.before
                if each.phase not in (RETURNED, OVERRULED) and not between and not self._has(each.settings):
                    self._set(each, OVERRULED, evidence="a person applied something else")

    def _has(self, settings: str) -> bool:
        return self._spec is not None and with_cluster_settings(self._spec, settings.split()) == self._spec

    def _present(self, settings: str) -> str:
        return " ".join(present_settings(self._spec, settings.split())) if self._spec is not None else ""

    def adopt(self, advice: Advice, missed: Mapping[str, float], now_ns: int) -> list[ApplySettings]:
        """Puts what is advised in force, unless its policy is left alone or another adoption is open. ``missed``: as in
        Adoption.
        """
        last, before = self._by_policy.get(_policy(advice.settings)), self._present(advice.settings)
        alone = last is not None and (last.phase is OVERRULED or now_ns < last.until_ns)
        if self.open is not None or alone or not before:
            return []
        pause_ns = 2 * last.pause_ns if last is not None and last.phase is RETURNED else self._pause_ns
        fields = {"at_ns": now_ns, "pause_ns": pause_ns, "evidence": advice.evidence, "missed": dict(missed)}
        self._set(Adoption(settings=advice.settings, before=before), SWITCHING, **fields)
        return self._apply(advice.settings, f"adopted: {advice.evidence}")

    def on_applied(self, failed: str, now_ns: int) -> list[ApplySettings]:
        """Processes have changed, or could not be changed."""
        self._changing, found = False, self.open
        if found is None or found.phase is WATCHED:
            return []  # a person's change came between
        if found.phase is SWITCHING and failed:
            return self._take_back(found, f"it could not be carried out: {failed}", now_ns)
        if not failed:
            self._set(found, WATCHED if found.phase is SWITCHING else RETURNED)
        return []

    def judge(self, told: Mapping[str, float], missed: Mapping[str, float], now_ns: int) -> list[ApplySettings]:
        """Decides by a window with the adopted settings. ``told``: the former ones over those, as replayed; ``missed``:
        those, replayed over recorded.
        """
        found = self.open
        if found is None or self._changing:
            return []
        if found.phase is not WATCHED:
            return self._apply(found.settings if found.phase is SWITCHING else found.before, "goes on")
        live = live_figures(found.missed, missed, told)
        if not {"e2e_p99", WITHIN} <= live.keys():
            return []
        if why := shortfall(live):
            return self._take_back(found, f"{why}; {_text(live)}", now_ns)
        self._set(found, KEPT, evidence=f"{_text(live)}; {found.evidence}")
        return []

    def _take_back(self, found: Adoption, why: str, now_ns: int) -> list[ApplySettings]:
        self._set(found, RETURNING, evidence=why, until_ns=now_ns + found.pause_ns)
        return self._apply(found.before, f"taken back: {why}")

    def _apply(self, settings: str, reason: str) -> list[ApplySettings]:
        self._changing = True
        return [ApplySettings(settings=settings, reason=reason)]

    def _set(self, adoption: Adoption, phase: AdoptionPhase, **fields: object) -> None:
        self._by_policy[_policy(adoption.settings)] = msgspec.structs.replace(adoption, phase=phase, **fields)


def live_figures(
    before: Mapping[str, float], missed: Mapping[str, float], told: Mapping[str, float]
) -> dict[str, float]:
    """The adopted settings as recorded, over the former ones as replayed on the same load and corrected by what their
    replay missed while they were in force (``before``); of the share the difference.
    """
    both = before.keys() & missed.keys() & told.keys()
    live = {name: before[name] / missed[name] / told[name] for name in TAILS if name in both}
    return live | {name: before[name] - missed[name] - told[name] for name in (WITHIN,) if name in both}


def shortfall(live: Mapping[str, float]) -> str:
    """Reason to take an adoption back; empty where it shows."""
    if longer := [name for name in TAILS if live.get(name, 0.0) > WORSE]:
        return f"longer than before: {', '.join(longer)}"
    if live[WITHIN] < -WORSE_SHARE:
        return "fewer requests within the objectives than before"
    return "nothing is better than before" if live[WITHIN] <= 0 and live["e2e_p99"] >= 1 else ""


def _text(live: Mapping[str, float]) -> str:
    tails = [f"{name} {live[name] - 1:+.0%}" for name in TAILS if name in live]
    return f"live, against the former settings: {', '.join(tails)}, within {100 * live[WITHIN]:+.1f} points"


def _policy(settings: str) -> str:
    """The policy that settings are about, such as ``policies.dispatch``."""
    return ".".join(settings.partition("=")[0].split(".")[:2])
