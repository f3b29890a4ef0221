"""The ladder: which rung acts on a model's load, and what keeps rungs apart. Pure.

dispatch (ms) → move (1 s) → priority (1 s) → flip (5 to 10 s) → scale (30 s) → re-plan (minutes). A rung acts only on
what the faster one reports it could not mend. Dispatch and move belong to a normal load,
priority and flip to an imbalanced one, scale and re-plan to an extreme one.

| faster rung | reports that it could not mend |
|---|---|
| dispatch, move | a step beside prompts takes longer than the policy lets it |
| priority | a phase stays above its objective for the policy's hold time, with decodes first in each step |
| flip | `RoleDecision.unmended`: no flip would help, or roles are fixed |
| scale | no provisioning strategy, or its bound is reached |
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
from millrace.policies.roles import RoleDecision, Scenario

#: No scaling for so long after a flip, and no flip after scaling: an instance that joins takes load at once, and its
#: effect must be seen first.
APART_NS = 30_000_000_000


class Rung(StrEnum):
    """Mechanism that acts on a model's load, fastest first."""

    DISPATCH = "dispatch"
    MOVE = "move"
    PRIORITY = "priority"
    FLIP = "flip"
    SCALE = "scale"
    REPLAN = "replan"


class LadderView(msgspec.Struct, frozen=True, kw_only=True):
    """One model at a tick. Times in unix ns; 0 for never.

    Attributes:
        decisions: Of the policy on roles, one per stage.
        flipping: Whether a flip is under way.
        moving: Sequences under way between instances.
        scaling: Whether instances are being started or stopped.
        scales: Whether there is a provisioning strategy that may still start an instance.
        flipped_ns, scaled_ns: Last flip, and last start or stop of an instance.
    """

    decisions: tuple[RoleDecision, ...] = ()
    flipping: bool = False
    moving: int = 0
    scaling: bool = False
    scales: bool = False
    flipped_ns: int = 0
    scaled_ns: int = 0


def acting(view: LadderView) -> Rung:
    """The rung that acts now."""
    if view.flipping:
        return Rung.FLIP
    if view.scaling:
        return Rung.SCALE
    loads = [each for each in view.decisions if each.scenario in (Scenario.IMBALANCED, Scenario.EXTREME)]
    if any(each.unmended for each in loads):
        return Rung.SCALE if view.scales else Rung.REPLAN
    if any(each.flips for each in loads):
        return Rung.FLIP
    if any(each.priorities for each in view.decisions):
        return Rung.PRIORITY
    return Rung.MOVE if loads or view.moving else Rung.DISPATCH


def flips_held(view: LadderView, now_ns: int) -> str:
    """Reason why no flip may begin; empty where one may."""
    if view.scaling:
        return "instances are being started or stopped"
    if view.scaled_ns and now_ns - view.scaled_ns < APART_NS:
        return f"scaled {(now_ns - view.scaled_ns) / 1e9:.0f} s ago"
    return ""


def scaling_held(view: LadderView, now_ns: int) -> str:
    """Reason why scaling is held back; empty where it is allowed."""
    if view.flipping:
        return "a flip is under way"
    if view.flipped_ns and now_ns - view.flipped_ns < APART_NS:
        return f"flipped {(now_ns - view.flipped_ns) / 1e9:.0f} s ago"
    if any(each.scenario is Scenario.IMBALANCED and not each.unmended for each in view.decisions):
        return "a flip may mend the imbalance"
    return ""
