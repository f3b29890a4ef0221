"""Pressure: flips one instance where one phase misses its objective and the other has capacity left, or one is idle,
and the simulated mix is better.
"""

from __future__ import annotations

import msgspec

from millrace.contracts.plan import InstanceRole
from millrace.policies.roles.flow import Pressures, Targets, present, simulate
from millrace.policies.roles.view import Flip, RoleDecision, RoleInstance, RolesView, Scenario, may_take_role


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conditions for a flip. Ranges are checked.

    Attributes:
        ttft_s, tpot_s: Objectives of a stage's requests, seconds.
        high: A phase above this share of its objective is overloaded.
        low: A phase below it has capacity left.
        idle: A phase below this share of its objective is idle.
        busy: A phase above this share is helped where the other one is idle, though it meets its objective.
        hold_s: Both must last for so long, seconds: faster rungs have had their turn then.
        margin: The simulated worst pressure must fall by this share.
        chunk_tokens: Prompt tokens that a step computes at most.
    """

    ttft_s: float = 3.0
    tpot_s: float = 0.05
    high: float = 1.0
    low: float = 0.6
    idle: float = 0.05
    busy: float = 0.4
    hold_s: float = 5.0
    margin: float = 0.1
    chunk_tokens: int = 2048

    def __post_init__(self) -> None:
        """Raises ValueError where a value makes no sense."""
        checks = {
            "ttft_s": self.ttft_s > 0,
            "tpot_s": self.tpot_s > 0,
            "high": self.high > 0,
            "low": 0 <= self.low < self.high,
            "idle": 0 <= self.idle <= self.low,
            "busy": self.idle < self.busy <= self.high,
            "hold_s": self.hold_s >= 0,
            "margin": 0 <= self.margin < 1,
            "chunk_tokens": self.chunk_tokens >= 1,
        }
        wrong = [name for name, holds in checks.items() if not holds]
        if wrong:
            raise ValueError(f"out of range: {', '.join(f'{name} = {getattr(self, name)}' for name in wrong)}")

    @property
    def targets(self) -> Targets:
        """Targets that pressures are relative to."""
        return Targets(ttft_s=self.ttft_s, tpot_s=self.tpot_s, chunk_tokens=float(self.chunk_tokens))


class State(msgspec.Struct, frozen=True):
    """Since when a phase has been overloaded while the other had capacity left.

    Attributes:
        side: ``prefill`` or ``decode``; empty for neither.
        since_ns: Unix ns.
    """

    side: str = ""
    since_ns: int = 0


def decide(view: RolesView, parameters: Parameters, state: State, now_ns: int) -> tuple[RoleDecision, State]:
    """Compare the pressures of both phases; see README.md."""
    known = [each for each in view.instances if each.heard and each.model is not None]
    if len(known) < len(view.instances) or len(known) < 2:
        reason = "fewer than two instances" if len(view.instances) < 2 else "not all instances are heard and known"
        return RoleDecision(scenario=Scenario.UNKNOWN, unmended=len(view.instances) < 2, reason=reason), State()
    now = present(known, view.demand, parameters.targets)
    side = _overloaded(now, parameters)
    told = f"prefill at {now.prefill:.2f}, decode at {now.decode:.2f} of their objectives"
    if not side:
        both = min(now.prefill, now.decode) > parameters.high
        scenario = Scenario.EXTREME if both else Scenario.NORMAL
        unmended = now.worst > parameters.high
        return _decision(now, scenario, told, unmended=unmended), State()
    if state.side != side:
        return _decision(now, Scenario.IMBALANCED, f"{told}, since now"), State(side, now_ns)
    if now_ns - state.since_ns < round(parameters.hold_s * 1e9):
        return _decision(now, Scenario.IMBALANCED, f"{told}, not for {parameters.hold_s:g} s yet"), state
    return _flip(view, parameters, now, told, side), state


def _decision(now: Pressures, scenario: Scenario, reason: str, *, unmended: bool = False) -> RoleDecision:
    return RoleDecision(scenario=scenario, unmended=unmended, prefill=now.prefill, decode=now.decode, reason=reason)


def _overloaded(now: Pressures, parameters: Parameters) -> str:
    """The phase to help: it misses its objective and the other has capacity left, or it is busy and the other idle."""
    limits = ((parameters.high, parameters.low), (parameters.busy, parameters.idle))
    if any(now.prefill > above and now.decode < below for above, below in limits):
        return "prefill"
    if any(now.decode > above and now.prefill < below for above, below in limits):
        return "decode"
    return ""


def _flip(view: RolesView, parameters: Parameters, now: Pressures, told: str, side: str) -> RoleDecision:
    """The flip whose mix is simulated as the best, where that is better than the mix as it is."""
    stays = simulate(view.instances, {}, view.demand, parameters.targets).worst
    tried = [
        (simulate(view.instances, {flip.instance: flip.role}, view.demand, parameters.targets).worst, order, flip)
        for order, flip in enumerate(candidates(view, side))
    ]
    if not tried or min(tried)[0] > stays * (1 - parameters.margin):
        reason = f"{told}; no flip is simulated as better than staying ({stays:.2f})"
        return _decision(now, Scenario.IMBALANCED, reason, unmended=now.worst > parameters.high)
    worst, _, flip = min(tried)
    reason = f"{told}; {flip.instance} to {flip.role} is simulated at {worst:.2f}, staying at {stays:.2f}"
    return RoleDecision(
        flips=(flip,), scenario=Scenario.IMBALANCED, prefill=now.prefill, decode=now.decode, reason=reason
    )


def candidates(view: RolesView, side: str) -> list[Flip]:
    """Flips that help a phase: for each present role the instance with the least to lose, to each role that helps."""
    gives = InstanceRole.DECODE if side == "prefill" else InstanceRole.PREFILL
    gains = InstanceRole.PREFILL if side == "prefill" else InstanceRole.DECODE
    found = []
    for before, after in ((gives, gains), (gives, InstanceRole.BOTH), (InstanceRole.BOTH, gains)):
        able = [i for i in view.instances if i.role is before and i.movable and may_take_role(view, i.name, after)]
        if able:
            found.append(Flip(min(able, key=_work).name, after))
    return found


def _work(instance: RoleInstance) -> tuple[float, str]:
    """Return the work that a flip disturbs: tokens held here and prompts to compute."""
    told = instance.indicators
    return told.context_tokens + told.prefill_tokens_left, instance.name
